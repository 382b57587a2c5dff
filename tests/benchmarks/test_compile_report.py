"""The compile report's quick subset is green. In its own process: interpreted kernels can't be compiled."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no triton")


def run(*arguments: str) -> subprocess.CompletedProcess:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.compile_report", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_quick_report_is_green(tmp_path: Path) -> None:
    """Every kernel that there is compiles, and spills nothing: what the interpreter takes the compiler may not."""
    out = tmp_path / "report.jsonl"
    result = run("--quick", "--arch", "90", "--out", str(out))
    assert result.returncode == 0, result.stdout + result.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    sources = "".join(path.read_text() for path in (ROOT / "kernels").glob("*.py"))
    assert {row["kernel"] for row in rows} == set(re.findall(r"def (\w+_kernel)\(", sources))
    assert all(row["spilled"] == 0 and 0 < row["registers"] <= 255 for row in rows)
    assert all(row["wide"] >= 4 for row in rows if row["kernel"] == "_attention_fwd_kernel")


def test_a_violation_is_an_exit_status(tmp_path: Path) -> None:
    """A tile that spills, from a tuning file, turns the report red."""
    import triton

    key = f"90 False 128 False False True long triton{triton.__version__}"
    tuning = tmp_path / "tuning.json"
    tuning.write_text(json.dumps({"attention_fwd": {key: [128, 128, 4, 2, False]}}))
    environment = os.environ | {"FASTFORMER_TUNING_FILE": str(tuning)}
    environment.pop("TRITON_INTERPRET", None)
    code = (
        "import torch, benchmarks.compile_report as report\n"
        "from benchmarks.compile_cases.attention import attention_call\n"
        "call = attention_call(torch.bfloat16, 128, ('causal',), 4096)\n"
        "print(report.compile_launch(report.launches_of(call, 90)[0], 'attention', 90, ('spilling',)).problems)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert "spills" in result.stdout


def test_the_interpreter_is_refused() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.compile_report"], cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 2 and "TRITON_INTERPRET" in result.stderr
