"""One case of a benchmark, checked and timed on the CPU, and the rows that a benchmark wrote."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
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


@contextlib.contextmanager
def neighbours(count: int, code: str) -> Iterator[None]:
    """Runs code in processes like another user's: their parent ends, so that they are no children of this process."""
    command = f'for i in $(seq {count}); do "{sys.executable}" -c "$CODE" >/dev/null 2>&1 & echo $!; done'
    environment = {**os.environ, "CODE": code}
    started = subprocess.run(["sh", "-c", command], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    try:
        yield
    finally:
        for pid in started.stdout.split():
            os.kill(int(pid), signal.SIGKILL)
