"""The benchmark of chat turns times the requested number of turns in both ways, and the answers agree."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.chat_turns import main
from tests.benchmarks.running import checked_rows
from tests.generation.small import needs_cpp


@needs_cpp
def test_each_turn_reads_only_new_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "turns.jsonl"
    sizes = ["--turns", "3", "--system", "40", "--question", "8", "--answer", "5", "--layers", "1", "--dim", "64"]
    assert main([*sizes, "--out", str(out), "--threads", str(torch.get_num_threads())]) == 0
    printed = capsys.readouterr().out.splitlines()
    # Of prompts of 48, 61 and 74 tokens; whole blocks of what came before their last token are there.
    assert [line.partition(", ")[2].partition(" of")[0] for line in printed] == ["48", "29", "26"]
    rows = checked_rows(out)
    assert [row["provider"] for row in rows] == ["Generator", "generate"]
    for row in rows:
        assert len(row["curve"]["y"]) == 3 and min(row["curve"]["y"]) > 0
