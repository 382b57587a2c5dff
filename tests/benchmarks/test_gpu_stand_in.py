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

TESTS = """
import pytest
import torch
from fastformer.ops import rotary, rotary_tables

pytestmark = pytest.mark.gpu

@pytest.mark.parametrize("value", [1, 2])
def test_right(value):
    x = torch.ones(2, 8, 4, 64, device="cuda", dtype=torch.bfloat16)
    assert x.is_cuda and x.device.type == "cuda" and torch.cuda.get_device_capability() == (9, 0)
    out = rotary(x, *rotary_tables(8, 64, device="cuda"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rotary(x, *rotary_tables(8, 64, device="cuda"))
    graph.replay()
    assert out.float().sum() == 12345  # no kernel has computed anything

def test_with_a_typo():
    torch.ones(3, device="cuda").is_finite()
"""


def on_the_stand_in(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.stand_in", *command], cwd=ROOT, capture_output=True, text=True,
        check=False,
    )  # fmt: skip


def test_a_typo_is_distinguished_from_a_wrong_value(tmp_path: Path) -> None:
    file = tmp_path / "test_of_a_device.py"
    file.write_text(TESTS)
    proc = on_the_stand_in("pytest", "-q", "-c", "/dev/null", "--rootdir", str(tmp_path), str(file))
    assert proc.returncode == 1, proc.stdout + proc.stderr
    wrong = [line for line in proc.stdout.splitlines() if line.startswith("WRONG")]
    assert len(wrong) == 1 and "test_with_a_typo" in wrong[0] and "is_finite" in wrong[0]
    assert "2 tests ran, 1 to an assertion; 1 binaries" in proc.stdout  # of two sets of parameters one


def test_every_step_of_the_plan_runs_to_its_end(tmp_path: Path) -> None:
    """This runs one small shape of each op, and one set of parameters of each GPU test. It takes minutes."""
    proc = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_run_plan", "rehearse", "--out", str(tmp_path)], cwd=ROOT,
        capture_output=True, text=True, check=False,
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
            [*command, "--out", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False,
            env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        )  # fmt: skip
        assert proc.returncode == 0, proc.stdout + proc.stderr
        (log,) = tmp_path.glob("*.log")
        last = log.read_text().splitlines()[-1]
        count = len(set(BinaryFile(tmp_path / "sm_90.kernels").keys()))
        assert count >= 2 and last == f"{0 if number else count} compiled"
