"""The benchmark of the host's time runs every case on the stub, and records a row."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.slow
def test_a_line_is_recorded(tmp_path: Path) -> None:
    out = tmp_path / "host_time.jsonl"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.host_time", "--rounds", "1", "--calls", "3", "--out", str(out)]
    proc = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert proc.returncode == 0, proc.stderr
    row = json.loads(out.read_text())
    times = row["microseconds"]
    for op in ("attention", "add_layer_norm"):
        for case in ("fwd", "bwd", "fwd no_grad", "fwd launcher", "bwd plan", "bwd Triton's run", "bwd our launch"):
            assert 0 < times[f"{op} {case}"] < 1e6, case
    assert len(times) == len(proc.stdout.splitlines())
    assert row["triton"] is not None and row["mode"] == "host"
