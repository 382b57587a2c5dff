"""From turns to figures: everything interleaved, each at its better number of threads, ratios of medians."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from benchmarks.measure.timing import Timing
from benchmarks.peers.job import Job, Tokens

# OpenMP's threads go on spinning for up to 200 ms behind their last work (KMP_BLOCKTIME), in another's turn.
PAUSE = 0.3
# A turn's least length: a process that has just been asleep is slow at first.
TURN = 0.25

K = TypeVar("K")


class Thing(NamedTuple):
    """What is compared."""

    peer: str
    precision: str

    def __str__(self) -> str:
        return f"{self.peer} {self.precision}"


@dataclass(frozen=True)
class Best:
    """A thing at the number of threads that suits it."""

    threads: int
    timing: Timing


def take_turns(turns: Mapping[K, Callable[[], float]], rounds: int, pause: float) -> dict[K, list[float]]:
    """Each has one turn a round, in this order and in the reverse one by turns, with a pause behind each.

    Args:
        turns: each gives the seconds that it took.
        rounds: of all of them.
        pause: in seconds.

    Returns:
        The seconds of each, round by round.
    """
    measured: dict[K, list[float]] = {key: [] for key in turns}
    for number in range(rounds):
        for key in list(turns) if number % 2 == 0 else reversed(list(turns)):
            measured[key].append(turns[key]())
            time.sleep(pause)
    return measured


def better_threads(measured: Mapping[tuple[Thing, int], list[float]]) -> dict[Thing, Best]:
    """For each thing the number of threads whose median is lower."""
    found: dict[Thing, Best] = {}
    for (thing, threads), seconds in measured.items():
        timing = Timing.of(seconds)
        if thing not in found or timing.p50 < found[thing].timing.p50:
            found[thing] = Best(threads, timing)
    return found


def rival(thing: Thing, others: Mapping[Thing, Best]) -> Thing | None:
    """What a thing is measured against: the fastest kind of program there is, in its precision, or else in int8.

    An int8 rival is the harder one to beat for bf16, which CTranslate2 doesn't have on CPUs.
    """
    for peer in ("ctranslate2", "llama.cpp"):
        for precision in (thing.precision, "int8"):
            if Thing(peer, precision) in others:
                return Thing(peer, precision)
    for precision in (thing.precision, "fp32"):
        if Thing("transformers", precision) in others:
            return Thing("transformers", precision)
    return None


def steps(job: Job, tokens: Tokens | None) -> int | None:
    """How many steps of the decoder a job takes; None where the outputs don't say."""
    if job.new_tokens is not None:
        return job.new_tokens * len(job.batches)
    if tokens is None or job.num_beams > 1:
        return None
    total = first = 0
    for batch in job.batches:
        total += max(map(len, tokens[first : first + len(batch)]))
        first += len(batch)
    return total


def num_tokens(job: Job, tokens: Tokens | None) -> int:
    """The new tokens of all outputs."""
    if tokens is not None:
        return sum(map(len, tokens))
    assert job.new_tokens is not None  # a peer that returns no tokens only does jobs of a fixed length
    return job.new_tokens * sum(map(len, job.batches))


def agreeing(ours: Tokens, theirs: Tokens) -> int:
    """How many outputs are the same."""
    return sum(a == b for a, b in zip(ours, theirs, strict=True))


def is_wrong(same: int, total: int) -> bool:
    """Whether so few outputs agree that the weights can't be the same; near-ties part some in any fp32."""
    return 4 * same < 3 * total


def fair_share(threads: int, neighbours: int, cores: int) -> float:
    """The speed that is left when busy processes of one thread each join, if all threads get as much of the cores."""
    return min(1.0, cores / (threads + neighbours)) / min(1.0, cores / threads)


@contextlib.contextmanager
def busy_neighbours(count: int) -> Iterator[None]:
    """Processes that do nothing but compute, while the block runs."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        time.sleep(0.2)  # until they are at it
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
