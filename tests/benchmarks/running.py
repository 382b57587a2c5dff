"""One case of a benchmark, checked and timed on the CPU, and the rows that a benchmark wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.measure import record
from benchmarks.measure.case import Benchmark
from benchmarks.measure.execute import Outcome, run_cases
from benchmarks.measure.suites import Case


def run_case(
    benchmark: Benchmark, shape: dict[str, Any], mode: str = "fwd", *, rounds: int = 1, seconds: float = 0.0
) -> Outcome:
    [(_, outcome)] = run_cases([Case(benchmark, shape, mode, "float32")], "cpu", rounds=rounds, seconds=seconds)
    return outcome


def checked_rows(file: Path) -> list[dict[str, Any]]:
    """Returns the rows of a file, each of which follows the schema."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        record.check(row)
    return rows
