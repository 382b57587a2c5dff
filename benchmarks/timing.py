"""How a time is taken: everything interleaved in one process, medians with their spread, never a lone number.

A shared machine is faster and slower by the minute. Round after round each function runs once, so that all of them meet
the same conditions; every other round goes backwards, so that a drift within rounds favours nobody. On a CPU a function
that is too short for the clock runs several times within its turn; on a GPU the L2 cache is flushed before each turn.

A watcher says which turns something disturbed (`watch`). Rounds are added until each function has as many quiet turns
as were asked for, within limits; what was disturbed counts only where too little else is left, and then is marked.

A ratio is the median, over the rounds in which both were undisturbed, of the ratio within the round: what made a whole
round slow cancels out of it. Measured by one function against itself, 67 times five rounds beside a neighbour that came
and went: nine times in ten this is off by at most 6 %, the ratio of medians or of minima by 9 %, that of means by 38 %.

What a short pass over memory takes depends on where that lies, by up to a third and for as long as a process lives, and
tenfold on whether malloc had given it back. So freed memory stays (`keep_freed_memory`), and each round of short calls
has copies of the inputs elsewhere: its median is over places, too.
"""

from __future__ import annotations

import ctypes
import functools
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from benchmarks.watch import Watcher

ENOUGH = 3  # quiet turns, or quiet pairs of turns, that a median may be of
_TURN = 0.03  # seconds that one turn of a function should take at least: several slices of the scheduler
_SHORT = 0.5  # seconds of a call of each function: what takes longer visits so much memory that its place is no matter
_TOUCHED = 2**30  # bytes of the heap, more than the short calls of a case take together
_FLUSHED = 256 * 2**20  # bytes: more than any L2 cache has
_MOST = 3  # times the rounds that were asked for, where turns are disturbed


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: median, 20th and 80th percentile of the rounds."""

    p50: float
    p20: float
    p80: float

    @classmethod
    def of(cls, seconds: list[float]) -> Timing:
        """The percentiles of some measurements."""
        shares = torch.tensor([0.5, 0.2, 0.8], dtype=torch.float64)
        p50, p20, p80 = torch.tensor(seconds, dtype=torch.float64).quantile(shares).tolist()
        return cls(p50, p20, p80)


class Turn(NamedTuple):
    """One turn of a function: the seconds of a call, and whether something disturbed it (None: nobody knows)."""

    seconds: float
    disturbed: bool | None


class Ratio(NamedTuple):
    """How many times faster one is than another, and whether that is from quiet turns (None: nobody knows)."""

    value: float
    quiet: bool | None


class Rounds(Mapping[str, Timing]):
    """The turns of functions that were timed side by side; a mapping from name to timing."""

    def __init__(self, turns: Mapping[str, list[Turn]]) -> None:
        """turns: by name, one a round."""
        self.turns = turns

    def __iter__(self) -> Iterator[str]:
        return iter(self.turns)

    def __len__(self) -> int:
        return len(self.turns)

    def __getitem__(self, name: str) -> Timing:
        """Of the quiet turns, or of all where the quiet are too few."""
        quiet = [turn.seconds for turn in self.turns[name] if not turn.disturbed]
        return Timing.of(quiet if len(quiet) >= ENOUGH else [turn.seconds for turn in self.turns[name]])

    def ratio(self, name: str, to: str) -> Ratio:
        """How many times faster `name` is than `to`."""
        pairs = list(zip(self.turns[name], self.turns[to], strict=True))
        quiet = [(own, other) for own, other in pairs if not own.disturbed and not other.disturbed]
        is_quiet = None if pairs[0][0].disturbed is None else len(quiet) >= ENOUGH
        used = pairs if len(quiet) < ENOUGH else quiet
        return Ratio(Timing.of([other.seconds / own.seconds for own, other in used]).p50, is_quiet)

    def disturbed(self, name: str) -> float | None:
        """The share of a function's turns that something disturbed; None where nobody knows."""
        turns = self.turns[name]
        return None if turns[0].disturbed is None else sum(bool(turn.disturbed) for turn in turns) / len(turns)

    def fewest_quiet(self) -> int:
        """Of any function, the fewest turns that nothing is known to have disturbed."""
        return min(sum(not turn.disturbed for turn in turns) for turns in self.turns.values())


def time_interleaved(
    functions: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    device: str,
    seconds: float = 60.0,
    watcher: Watcher | None = None,
    anew: Callable[[], Mapping[str, Callable[[], object]]] | None = None,
) -> Rounds:
    """Times functions side by side.

    Args:
        functions: by name.
        rounds: quiet turns of each; fewer, but at least three turns, when `seconds` are used up, and fewer quiet ones
            when three times as many turns were taken.
        device: "cpu" or "cuda".
        seconds: about how long all of it may take, of which an eighth may be spent waiting for quiet.
        watcher: None: one for as many threads as PyTorch has on a CPU; on a GPU nobody watches.
        anew: makes the functions on new copies of their inputs. It is called in each round on a CPU, if they are short.
    """
    turn = _cuda_turn if device == "cuda" else _cpu_turn
    watcher = watcher or (Watcher(torch.get_num_threads()) if device == "cpu" else Watcher(0, proc=None))
    fastest = {name: _warm_up(function, turn) for name, function in functions.items()}
    repeats = {name: max(1, round(_TURN / max(taken, 1e-7))) for name, taken in fastest.items()}
    moves = anew is not None and device == "cpu" and sum(fastest.values()) < _SHORT
    turns: dict[str, list[Turn]] = {name: [] for name in functions}
    measured = Rounds(turns)
    began, patience = time.perf_counter(), seconds / 8
    for done in range(_MOST * rounds):
        if done >= min(ENOUGH, rounds) and time.perf_counter() - began > seconds:
            break
        if done >= rounds:
            if measured.fewest_quiet() >= rounds:
                break
            waited = time.perf_counter()
            watcher.wait(patience)
            patience -= time.perf_counter() - waited
        if anew is not None and moves:
            _held[:] = _blocks(done)
            functions = anew()
            for function in functions.values():
                turn(function, 2)  # meets the memory that no round had before
        for name in list(functions)[:: -1 if done % 2 else 1]:
            watcher.begin()
            taken = turn(functions[name], 1 if device == "cuda" else repeats[name])
            turns[name].append(Turn(taken, watcher.end()))
    _held.clear()
    return measured


def _warm_up(function: Callable[[], object], turn: Callable[[Callable[[], object], int], float]) -> float:
    """Runs the function thrice; the seconds of the fastest call."""
    return min(turn(function, 1) for _ in range(3))


def _blocks(number: int) -> list[torch.Tensor]:
    """Memory of sizes that differ from round to round, so that what is allocated after it lies elsewhere."""
    sizes = random.Random(number)
    return [torch.empty(int(2 ** sizes.uniform(4, 20))) for _ in range(sizes.randrange(20, 60))]


_held: list[torch.Tensor] = []  # the blocks of this round


def _cpu_turn(function: Callable[[], object], repeats: int) -> float:
    began = time.perf_counter()
    for _ in range(repeats):
        function()
    return (time.perf_counter() - began) / repeats


def _cuda_turn(function: Callable[[], object], repeats: int) -> float:
    _flush_buffer().zero_()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / repeats


@functools.cache
def _flush_buffer() -> torch.Tensor:
    return torch.empty(_FLUSHED, dtype=torch.uint8, device="cuda")


@functools.cache
def keep_freed_memory() -> None:
    """Has malloc keep what is freed, so that no call meets page faults for what the call before it had.

    By default glibc gives memory back and asks for it anew, which takes longer than a pass over it, or doesn't: that
    depends on what was freed before. jemalloc and tcmalloc keep it. Anything but glibc is left as it is.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-4, 0)  # M_MMAP_MAX: all of it in the heap
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
        torch.zeros(_TOUCHED, dtype=torch.uint8)  # or what is new to the process faults when it is first used


def peak_bytes(function: Callable[[], object], device: str) -> int:
    """The most memory that was allocated at once while the function ran, beyond what was there before."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or the profiler says on stderr that it begins and ends
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    held = peak = 0
    events = (event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]")
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak
