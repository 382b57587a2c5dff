"""One case of a benchmark, checked and timed on the CPU."""

from __future__ import annotations

from typing import Any

from benchmarks.measure.case import Benchmark
from benchmarks.measure.execute import Outcome, run_cases
from benchmarks.measure.suites import Case


def run_case(
    benchmark: Benchmark, shape: dict[str, Any], mode: str = "fwd", *, rounds: int = 1, seconds: float = 0.0
) -> Outcome:
    [(_, outcome)] = run_cases([Case(benchmark, shape, mode, "float32")], "cpu", rounds=rounds, seconds=seconds)
    return outcome
