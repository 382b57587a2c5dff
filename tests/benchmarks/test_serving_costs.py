"""The benchmark of HTTP's costs writes the rows of each part, and all answers equal the library's."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.serving_costs import PARTS, main
from tests.benchmarks.running import checked_rows
from tests.generation.small import needs_cpp


@pytest.mark.slow  # proves that 64 clients get the texts of the library, and that a full queue is empty afterwards
@needs_cpp
def test_every_part_writes_its_rows(tmp_path: Path) -> None:
    out = tmp_path / "costs.jsonl"
    turns = ["--rounds", "2", "--many_rounds", "2", "--seconds", "0.5", "--threads", "1", "--out", str(out)]
    assert main(["--case", "tiny", *turns]) == 0
    rows = checked_rows(out)
    parts = [row["shape"]["part"] for row in rows]
    assert list(dict.fromkeys(parts)) == list(PARTS)
    assert [parts.count(part) for part in PARTS] == [2, 6, 2, 2]
    assert all(row["speedup"] > 0 for row in rows if "baseline" in row)
