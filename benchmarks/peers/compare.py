"""From turns to figures: interleaved turns, the better number of threads for each program, ratios of medians."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, TypeVar

from benchmarks.measure.timing import Timing
from benchmarks.peers.job import PeerJob, Tokens

# OpenMP's threads spin for up to 200 ms after their last work (KMP_BLOCKTIME), which would be in another program's
# turn.
PAUSE = 0.3
# The least length of a turn in seconds: a process that has just been asleep is slow at first.
TURN = 0.25

K = TypeVar("K")


class PeerKey(NamedTuple):
    """A program in a precision, which is compared with others."""

    peer: str
    precision: str

    def __str__(self) -> str:
        return f"{self.peer} {self.precision}"


class Fastest(NamedTuple):
    """A program's result with its better number of threads."""

    threads: int
    timing: Timing


def take_turns(turns: Mapping[K, Callable[[], float]], rounds: int, pause: float) -> dict[K, list[float]]:
    """Gives each function one turn a round, in alternating order, with a pause after each turn.

    Args:
        turns: functions that return the seconds of their turn.
        rounds: the number of rounds.
        pause: the pause in seconds.

    Returns:
        The seconds of each function, round by round.
    """
    measured: dict[K, list[float]] = {key: [] for key in turns}
    for number in range(rounds):
        for key in list(turns) if number % 2 == 0 else reversed(list(turns)):
            measured[key].append(turns[key]())
            time.sleep(pause)
    return measured


def better_threads(measured: Mapping[tuple[PeerKey, int], list[float]]) -> dict[PeerKey, Fastest]:
    """Returns for each program the number of threads with the lower median."""
    best: dict[PeerKey, Fastest] = {}
    for (thing, threads), seconds in measured.items():
        timing = Timing.of(seconds)
        if thing not in best or timing.p50 < best[thing].timing.p50:
            best[thing] = Fastest(threads, timing)
    return best


def rival(thing: PeerKey, others: Mapping[PeerKey, Fastest]) -> PeerKey | None:
    """Returns the program to compare with: the strongest one that was measured, in the same precision or else in int8.

    For bf16, which CTranslate2 doesn't have on CPUs, an int8 rival is harder to beat.
    """
    for peer in ("ctranslate2", "ik_llama.cpp", "llama.cpp"):
        for precision in (thing.precision, "int8"):
            if PeerKey(peer, precision) in others:
                return PeerKey(peer, precision)
    for precision in (thing.precision, "fp32"):
        if PeerKey("transformers", precision) in others:
            return PeerKey("transformers", precision)
    return None


def steps(job: PeerJob, tokens: Tokens | None) -> int | None:
    """Returns the number of decode steps of a job; None if the outputs don't determine it."""
    if job.new_tokens is not None:
        return job.new_tokens * len(job.batches)
    if tokens is None or job.num_beams > 1:
        return None
    total = first = 0
    for batch in job.batches:
        total += max(map(len, tokens[first : first + len(batch)]))
        first += len(batch)
    return total


def num_tokens(job: PeerJob, tokens: Tokens | None) -> int:
    """Returns the number of new tokens of all outputs."""
    if tokens is not None:
        return sum(map(len, tokens))
    assert job.new_tokens is not None  # a peer that returns no tokens only does jobs of a fixed length
    return job.new_tokens * sum(map(len, job.batches))


def fair_share(threads: int, neighbours: int, cores: int) -> float:
    """Returns the speed that is left beside busy processes of one thread, if all threads share the cores equally."""
    return min(1.0, cores / (threads + neighbours)) / min(1.0, cores / threads)


def beside(quiet: Timing, busy: Timing, threads: int, neighbours: int) -> dict[str, object]:
    """Returns the fields of a row that compare times beside busy processes with those alone."""
    return {
        "neighbours": neighbours,
        **busy.fields(),
        "ms_quiet": 1e3 * quiet.p50,
        "speedup": quiet.p50 / busy.p50,
        "baseline": "quiet",
        "fair_share": fair_share(threads, neighbours, os.cpu_count() or 1),
    }


@contextlib.contextmanager
def busy_neighbours(count: int) -> Iterator[None]:
    """Runs processes that only compute, while the block runs."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        time.sleep(0.2)  # until they have started to compute
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
