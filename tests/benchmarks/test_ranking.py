"""A provider that is 20 % slower is ranked so, in 10 runs of 10, beside a process that is busy half of the time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch

from benchmarks.timing import time_interleaved

BUSY = """
import time
while True:
    end = time.perf_counter() + 1.0
    while time.perf_counter() < end:
        pass
    time.sleep(1.0)
"""


@pytest.fixture
def neighbour() -> Iterator[None]:
    """Somebody else's process: its parent ends, so that it is none of ours."""
    command = f'"{sys.executable}" -c "$BUSY" >/dev/null 2>&1 & echo $!'
    started = subprocess.run(
        ["sh", "-c", command], env={**os.environ, "BUSY": BUSY}, stdout=subprocess.PIPE, text=True, check=True
    )
    yield
    os.kill(int(started.stdout), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_a_fifth_is_seen_beside_a_neighbour(threads: int, neighbour: None, capsys: pytest.CaptureFixture[str]) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        a, b = torch.randn(400 * threads, 400), torch.randn(400, 400)

        def work(times: int = 10) -> float:
            began = time.perf_counter()
            for _ in range(times):
                torch.mm(a, b)
            return time.perf_counter() - began

        pause = 0.2 * min(work() for _ in range(30))

        def slower() -> None:
            work()
            time.sleep(pause)

        found = []
        for _ in range(10):
            rounds = time_interleaved({"it": work, "slower": slower}, rounds=9, device="cpu", seconds=6.0)
            ratio = rounds.ratio("it", "slower")
            found.append((round(ratio.value, 3), ratio.quiet, len(rounds.turns["it"]), rounds.disturbed("it")))
        with capsys.disabled():
            print(f"\n{threads} threads: ratio, quiet, turns, disturbed: {found}")
        assert all(value > 1 for value, *_ in found)
    finally:
        torch.set_num_threads(before)
