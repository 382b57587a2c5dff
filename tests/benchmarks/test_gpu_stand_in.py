"""A GPU's tests, its timed cases and the whole plan run without a GPU, so that a typo in them is found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.steps import steps
from benchmarks.measure.record import ROOT

pytestmark = pytest.mark.slow  # each is a process of its own that imports everything

pytest.importorskip("triton")
COMPILING = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


def test_every_step_of_the_plan_runs_to_its_end(tmp_path: Path) -> None:
    """This runs one small shape of each op, and one set of parameters of each GPU test. It takes minutes."""
    proc = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_run_plan", "rehearse", "--out", str(tmp_path)], cwd=ROOT,
        capture_output=True, text=True, check=False, env=COMPILING,
    )  # fmt: skip
    lines = [json.loads(line) for line in (tmp_path / "gpu_rehearsal.jsonl").read_text().splitlines()]
    assert [line for line in lines if not line["ok"]] == []
    assert proc.returncode == 0, proc.stderr[-2000:]
    assert [line["key"] for line in lines] == [
        step.key for step in steps(tmp_path) if "pip" not in step.commands[0][0]
    ]  # fmt: skip
    assert all(line["binaries"] > 0 for line in lines), lines


def test_the_launches_of_a_step_are_compiled_ahead(tmp_path: Path) -> None:
    """Forward and backward are compiled at the timed size, unless the file already contains them."""
    from fastformer.kernels._binaries import BinaryFile

    command = [sys.executable, "-m", "benchmarks.gpu_run_plan", "compile", "--only", "first look rotary", "--jobs", "1"]
    for number in range(2):
        proc = subprocess.run(
            [*command, "--out", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False, env=COMPILING,
        )  # fmt: skip
        assert proc.returncode == 0, proc.stdout + proc.stderr
        (log,) = tmp_path.glob("*.log")
        last = log.read_text().splitlines()[-1]
        count = len(set(BinaryFile(tmp_path / "sm_90.kernels").keys()))
        assert count >= 2 and last == f"{0 if number else count} compiled"


EARLY = """
import contextlib, importlib, io, os
from pathlib import Path
from benchmarks.gpu import ahead, stand_in
from benchmarks.gpu.steps import steps

stand_in.stand_in()
stand_in._rehearse_run()
stand_in.without_products()
runner, seconds, count = importlib.import_module("benchmarks.run"), 0.0, 0
for step in steps(Path(OUT)):
    seconds += step.seconds
    (command, variables), *_ = step.commands
    if seconds > 500 or not step.key.startswith("time"):
        continue
    os.environ.update(variables)
    launches = []
    for call in (ahead._run_ours, runner.main):
        stand_in.launches.clear()
        with contextlib.redirect_stdout(io.StringIO()):
            call(command[3:])
        launches.append(dict(stand_in.launches))
    compiled, launched = launches
    assert launched.keys() <= compiled.keys(), (step.key, [launched[key] for key in launched.keys() - compiled.keys()])
    count += 1
assert count >= 14
"""


def test_an_early_step_launches_only_what_is_compiled_ahead(tmp_path: Path) -> None:
    """Checks of providers, and calls of whichever mode, launch no kernel that the timed calls would not."""
    proc = subprocess.run(
        [sys.executable, "-c", EARLY.replace("OUT", repr(str(tmp_path)))], cwd=ROOT, capture_output=True, text=True,
        check=False, env=COMPILING,
    )  # fmt: skip
    assert proc.returncode == 0, proc.stderr[-3000:]
