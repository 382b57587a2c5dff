"""Runs PyTorch's own tests of its Transformer modules on fastformer's.

    python tests/foreign/torch_nn.py PYTORCH/test [--accelerate]

PYTORCH is PyTorch's source of any version near the installed one, which brings the tests. They run three times over: as
they are, and with the names of `torch.nn` leading to `fastformer.nn` (or, with --accelerate, each module accelerated as
it is made). What is named at the end fails on ours and passes on PyTorch's. Needs pytest, expecttest and parameterized.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

_NAMES = (
    *("MultiheadAttention", "TransformerEncoderLayer", "TransformerDecoderLayer"),
    *("TransformerEncoder", "TransformerDecoder", "Transformer"),
)
# The files, and which of their tests are about these modules.
_FILES = {
    "test_transformers.py": "TestTransformers",
    "nn/test_multihead_attention.py": "",
    "test_native_mha.py": "",
    "test_nn.py": "ransformer or ultihead",
    "nn/test_module_hooks.py": "",
    "test_jit.py": "ransformer or multihead",
}
_MODE = "FASTFORMER_FOREIGN_MODE"


def _lead_names_to_ours() -> None:
    import torch
    from torch.nn.modules import activation, transformer

    import fastformer.nn as fnn

    for name in _NAMES:
        for place in (torch.nn, torch.nn.modules, activation, transformer):
            if hasattr(place, name):
                setattr(place, name, getattr(fnn, name))


def _accelerate_what_is_made() -> None:
    import torch

    from fastformer import accelerate

    for name in _NAMES:
        kind = getattr(torch.nn, name)

        def construct(self, *args, _kind=kind, _construct=kind.__init__, **kwargs):
            _construct(self, *args, **kwargs)
            if type(self) is _kind:
                accelerate(self)

        kind.__init__ = construct


def _outcomes(folder: Path, mode: str) -> dict[str, tuple[str, str]]:
    """Returns the outcome and the message of each test."""
    found = {}
    root = Path(__file__).resolve().parents[2]
    paths = [str(root), str(folder), str(folder.parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), _MODE: mode}
    for name, chosen in _FILES.items():
        with tempfile.TemporaryDirectory() as scratch:
            report = Path(scratch) / "report.xml"
            subprocess.run(
                [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", "-p", "no:xdist",
                 "-p", "tests.foreign.torch_nn", "-c", os.devnull, "--rootdir", str(folder), "-W", "ignore",
                 f"--junitxml={report}", "-k", chosen, str(folder / name)],
                cwd=scratch, env=environment, stdout=subprocess.DEVNULL, check=False,
            )  # fmt: skip
            for case in ElementTree.parse(report).iter("testcase"):
                outcome = next((each for each in case if each.tag in ("failure", "error", "skipped")), None)
                key = f"{name}::{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
                found[key] = ("passed", "") if outcome is None else (outcome.tag, outcome.get("message") or "")
    return found


def main() -> None:
    """Compares both runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--accelerate", action="store_true")
    options = parser.parse_args()
    theirs = _outcomes(options.folder.resolve(), "as it is")
    ours = _outcomes(options.folder.resolve(), "accelerate" if options.accelerate else "names")
    fails = {name: message for name, (outcome, message) in ours.items() if outcome in ("failure", "error")}
    new = {name: message for name, message in fails.items() if theirs.get(name, ("passed", ""))[0] == "passed"}
    for title, outcomes in (("torch.nn", theirs), ("ours", ours)):
        counts = {what: sum(each == what for each, _ in outcomes.values()) for what in ("passed", "skipped")}
        print(f"{title}: {counts['passed']} passed, {counts['skipped']} skipped, of {len(outcomes)}")
    print(f"{len(new)} pass with torch.nn and fail with ours:")
    for name, message in new.items():
        print(f"  {name}: {' '.join(message.split())[:200]}")


if __name__ == "__main__":
    main()
elif _MODE in os.environ:
    {"as it is": lambda: None, "names": _lead_names_to_ours, "accelerate": _accelerate_what_is_made}[
        os.environ[_MODE]
    ]()
