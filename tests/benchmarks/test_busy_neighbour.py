"""The benchmark beside busy processes times each provider with and without them, and writes valid rows."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from benchmarks.busy_neighbour import main
from benchmarks.peers.compare import fair_share
from tests.benchmarks.running import checked_rows


def test_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, threads = tmp_path / "busy.jsonl", torch.get_num_threads()
    sizes = ["--dim", "32", "--layers", "1", "--batch", "2", "--seqlen", "8"]
    flags = ["--provider", "fastformer", "--threads", str(threads), "--rounds", "1", "--seconds", "0.01"]
    assert main([*flags, *sizes, "--out", str(out)]) == 0
    rows = checked_rows(out)
    assert [row["mode"] for row in rows] == ["step", "fwd"]
    for row in rows:
        assert row["neighbours"] == 1 and row["fair_share"] == fair_share(threads, 1, os.cpu_count() or 1)
        assert row["speedup"] == pytest.approx(row["ms_quiet"] / row["ms_p50"])
        assert row["shape"]["dim"] == 32 and row["provider"] == "fastformer"
    assert len(capsys.readouterr().out.splitlines()) == 2
