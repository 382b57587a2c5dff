"""Runs transformers' own modelling tests, with every model accelerated when it is made.

    python tests/foreign/transformers_models.py TRANSFORMERS [family ...] [-k EXPRESSION]

TRANSFORMERS is the source of any version of transformers that fastformer supports; its tests run on its code. Families
are those that `accelerate` knows, unless some are named. What fails is run again on models as they are: what is named
at the end fails on accelerated ones alone. Nothing is downloaded; pipelines and exporters are left out. Needs pytest,
pytest-xdist, parameterized, timeout-decorator, and datasets and accelerate to be importable.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

_FAMILIES = ("marian", "bart", "gpt2", "bert", "llama", "t5")
_MODE = "FASTFORMER_FOREIGN_MODE"


def _accelerate_what_is_made() -> None:
    from transformers import PreTrainedModel, modeling_utils

    from fastformer import accelerate

    # Compiled as transformers' own code: generate doesn't run on the engine where another's method stands in a class.
    made = {"finish": PreTrainedModel.post_init, "accelerate": accelerate}
    source = "def post_init(self):\n    finish(self)\n    accelerate(self)\n"
    exec(compile(source, modeling_utils.__file__, "exec"), made)  # noqa: S102
    PreTrainedModel.post_init = made["post_init"]


def _run(
    source: Path, family: str, accelerated: bool, expression: str, chosen: list[str] | None = None
) -> dict[str, tuple[str, str]]:
    """Returns the outcome and the message of each test, by name, of all tests or of the chosen ones."""
    file = f"tests/models/{family}/test_modeling_{family}.py"
    tests = [file] if chosen is None else [f"{file}::{name}" for name in chosen]
    with tempfile.TemporaryDirectory() as scratch:
        report, plugin = Path(scratch) / "report.xml", Path(scratch) / "accelerated_models.py"
        plugin.symlink_to(Path(__file__).resolve())
        root = Path(__file__).resolve().parents[2]
        paths = [scratch, str(source / "src"), str(root), str(source), os.environ.get("PYTHONPATH", "")]
        settings = {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", _MODE: str(int(accelerated))}
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "accelerated_models", "-W", "ignore",
             f"--junitxml={report}", "-k", f"not pipeline and not export and ({expression})", *tests],
            cwd=source, env=os.environ | settings, stdout=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        found = {}
        for case in ElementTree.parse(report).iter("testcase"):
            outcome = next((each for each in case if each.tag in ("failure", "error", "skipped")), None)
            name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
            found[name] = ("passed", "") if outcome is None else (outcome.tag, outcome.get("message") or "")
        return found


def main() -> None:
    """Runs the tests on accelerated models, and repeats those that fail on unmodified models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("family", nargs="*", default=_FAMILIES)
    parser.add_argument("-k", dest="expression", default="test", help="which tests, as pytest's -k")
    options = parser.parse_args()
    source = options.source.resolve()
    for family in options.family:
        ours = _run(source, family, True, options.expression)
        failed = [name for name, (outcome, _) in ours.items() if outcome in ("failure", "error")]
        theirs = _run(source, family, False, options.expression, failed) if failed else {}
        new = [name for name in failed if theirs.get(name, ("passed", ""))[0] == "passed"]
        counts = {what: sum(outcome == what for outcome, _ in ours.values()) for what in ("passed", "skipped")}
        print(
            f"{family}: {counts['passed']} passed, {counts['skipped']} skipped, {len(failed)} failed, of which "
            f"{len(failed) - len(new)} fail on models as they are",
            flush=True,
        )
        for name in new:
            print(f"  {name}: {' '.join(ours[name][1].split())[:200]}", flush=True)


if __name__ == "__main__":
    main()
elif os.environ.get(_MODE) == "1":
    _accelerate_what_is_made()
