"""Measures times: functions are interleaved in one process, and results are medians with their spread.

A shared machine becomes faster and slower by the minute. In each round every function runs once, so that all of them
meet the same conditions. Every other round runs in reverse order, so that a drift within rounds favours no function. On
a CPU, a function that is too short for the clock runs several times in its turn; on a GPU, the L2 cache is flushed
before each turn.

A noise monitor reports which turns were disturbed. Rounds are added, within limits, until each function has the
requested number of quiet turns. Disturbed turns count only if there are too few quiet ones, and the result is then
marked.

A ratio is the median, over the rounds in which both functions were undisturbed, of the ratio within the round:
slowdowns of a whole round cancel out. This was measured with one function against itself, in 67 passes of five rounds
beside a neighbour that came and went: in nine of ten passes this ratio was off by at most 6 %, the ratio of medians or
of minima by 9 %, that of means by 38 %.

Influences that last longer than the rounds, such as a neighbour on the other thread of the core, favour some functions,
and consecutive rounds can't show that. So the runner takes rounds in passes with time between them, and the spread of
the passes shows how reliable the ratio is (`Ratio.uncertainty`).
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from benchmarks.measure.noise_monitor import NoiseMonitor

ENOUGH = 3  # the least quiet turns, or quiet pairs of turns, for a median
STEADY = 0.06  # the allowed uncertainty of a ratio: of two such ratios, 1 in 800 differs by 15 %
_TURN = 0.01  # the least seconds of one turn of a function
_SHORT = 0.1  # seconds of a call of each function: longer calls use so much memory that its address doesn't matter
_TOUCHED = 2**30  # bytes of the heap to touch
_FLUSHED = 256 * 2**20  # bytes: more than any L2 cache has
_MOST = 3  # times the requested rounds, if turns are disturbed


@dataclass(frozen=True)
class Timing:
    """The seconds of one call: median, 20th and 80th percentile over the rounds."""

    p50: float
    p20: float
    p80: float

    @classmethod
    def of(cls, seconds: list[float]) -> Timing:
        """Computes the percentiles of some measurements."""
        shares = torch.tensor([0.5, 0.2, 0.8], dtype=torch.float64)
        p50, p20, p80 = torch.tensor(seconds, dtype=torch.float64).quantile(shares).tolist()
        return cls(p50, p20, p80)

    def fields(self) -> dict[str, float]:
        """Returns the fields of a row, in milliseconds."""
        return {"ms_p50": 1e3 * self.p50, "ms_p20": 1e3 * self.p20, "ms_p80": 1e3 * self.p80}


def beside_baseline(seconds: Mapping[str, list[float]], baseline: str) -> dict[str, dict[str, Any]]:
    """Returns the fields of each provider's row: its times, and its median speed over the rounds beside the baseline.

    Args:
        seconds: the seconds of each provider, round by round.
        baseline: the provider to compare with.
    """
    return {
        provider: {
            **Timing.of(mine).fields(),
            "rounds": len(mine),
            "baseline": None if provider == baseline else baseline,
            "speedup": None
            if provider == baseline
            else statistics.median(plain / one for plain, one in zip(seconds[baseline], mine, strict=True)),
        }
        for provider, mine in seconds.items()
    }


class Turn(NamedTuple):
    """One turn of a function.

    Attributes:
        seconds: the seconds of a call.
        disturbed: whether others took the core time that it needed (None: not known).
        slow: whether it ran at a slow clock.
    """

    seconds: float
    disturbed: bool | None
    slow: bool = False


class Ratio(NamedTuple):
    """How many times faster one function is than another.

    Attributes:
        value: the median over the rounds of all passes.
        quiet: whether it comes from undisturbed turns of passes that agree, some at full clock (None: not known).
        passes: the number of passes with a round that counts.
        uncertainty: half of its 95 % interval, as a share of it, from the spread of the passes' ratios; None for one
            pass.
    """

    value: float
    quiet: bool | None
    passes: int = 1
    uncertainty: float | None = None


class Rounds(Mapping[str, Timing]):
    """The turns of functions that were timed side by side; a mapping from name to timing.

    Attributes:
        turns: by name, one for each round.
        passes: the number of the pass of each round.
    """

    def __init__(self, turns: dict[str, list[Turn]], passes: list[int] | None = None) -> None:
        """Stores the turns; passes: None: all rounds are of one pass."""
        self.turns = turns
        self.passes = [0] * len(next(iter(turns.values()), [])) if passes is None else passes

    def __iter__(self) -> Iterator[str]:
        return iter(self.turns)

    def __len__(self) -> int:
        return len(self.turns)

    def __getitem__(self, name: str) -> Timing:
        """Returns the timing of the quiet turns, or of all turns if too few are quiet."""
        quiet = [turn.seconds for turn in self.turns[name] if not turn.disturbed]
        return Timing.of(quiet if len(quiet) >= ENOUGH else [turn.seconds for turn in self.turns[name]])

    def ratio(self, name: str, to: str) -> Ratio:
        """Computes how many times faster `name` is than `to`."""
        pairs = list(zip(self.turns[name], self.turns[to], self.passes, strict=True))
        quiet = [pair for pair in pairs if not pair[0].disturbed and not pair[1].disturbed]
        used = quiet if self._are_enough(quiet) else pairs
        ratios: dict[int, list[float]] = {}
        for turn, other_turn, number in used:
            ratios.setdefault(number, []).append(other_turn.seconds / turn.seconds)
        uncertainty = _uncertainty([statistics.median(values) for values in ratios.values()])
        is_quiet = None
        if pairs[0][0].disturbed is not None:
            is_quiet = self._are_enough([pair for pair in quiet if not pair[0].slow and not pair[1].slow])
        if uncertainty is not None and uncertainty > STEADY:
            is_quiet = False
        return Ratio(statistics.median(sum(ratios.values(), [])), is_quiet, len(ratios), uncertainty)

    def _are_enough(self, pairs: list[tuple[Turn, Turn, int]]) -> bool:
        """Returns whether there are enough pairs of turns for a ratio: from several passes, if several were taken."""
        passes = {number for *_, number in pairs}
        return len(pairs) >= ENOUGH and len(passes) >= min(ENOUGH, len(set(self.passes)))

    def disturbed(self, name: str) -> float | None:
        """Returns the share of a function's turns that were disturbed; None if that isn't known."""
        turns = self.turns[name]
        return None if turns[0].disturbed is None else sum(bool(turn.disturbed) for turn in turns) / len(turns)

    def slow(self, name: str) -> float:
        """Returns the share of a function's turns that ran at a slow clock."""
        return sum(turn.slow for turn in self.turns[name]) / len(self.turns[name])

    def fewest_quiet(self, number: int) -> int:
        """Returns the fewest turns of any function in a pass that are not known to be disturbed."""
        return min(
            sum(not turn.disturbed for turn, of in zip(turns, self.passes, strict=True) if of == number)
            for turns in self.turns.values()
        )


def _uncertainty(ratios: list[float]) -> float | None:
    """Returns half of the 95 % interval of the mean ratio, as a share of it; None for a single ratio.

    It uses logarithms, since 2 and 1/2 are equally far from 1, and Student's t, since few ratios may agree by chance.
    """
    count = len(ratios) - 1
    if not count:
        return None
    # Its 97.5 % quantile, by Cornish and Fisher's expansion: 3.9 for three ratios, 2.4 for eight, 2.0 for many.
    z = 1.96
    t = z + (z**3 + z) / (4 * count) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * count**2)
    return t * statistics.stdev(map(math.log, ratios)) / math.sqrt(len(ratios))


class Interleaved:
    """Times functions side by side, in one pass or in several with time between them.

    Attributes:
        rounds: the rounds of all passes so far.
        seconds: their duration, without the first calls, which may compile.
    """

    def __init__(self, device: str) -> None:
        """Sets the device, "cpu" or "cuda"."""
        self.rounds = Rounds({}, [])
        self.seconds = 0.0
        self._device, self._turn = device, _cuda_turn if device == "cuda" else _cpu_turn
        self._fastest: dict[str, float] = {}

    @property
    def passes(self) -> int:
        """The number of passes that were taken."""
        return self.rounds.passes[-1] + 1 if self.rounds.passes else 0

    def take(
        self,
        functions: Mapping[str, Callable[[], object]],
        *,
        rounds: int,
        seconds: float,
        fewest: int = 1,
        lasting: float = 0.0,
        watcher: NoiseMonitor | None = None,
        anew: Callable[[], Mapping[str, Callable[[], object]]] | None = None,
    ) -> None:
        """Takes a pass.

        Args:
            functions: by name, the same in each pass.
            rounds: the quiet turns of each function; fewer if three times as many turns were taken.
            seconds: the approximate limit, of which an eighth may be spent waiting for quiet.
            fewest: the least number of rounds, if the seconds are used up.
            lasting: the seconds that the pass continues after the requested rounds, so that short functions get many
                rounds.
            watcher, anew: see `time_interleaved`.
        """
        watcher = watcher or (
            NoiseMonitor(torch.get_num_threads()) if self._device == "cpu" else NoiseMonitor(0, proc=None)
        )
        if is_first := not self._fastest:
            self._fastest = {name: min(self._turn(run, 1) for _ in range(3)) for name, run in functions.items()}
        repeats = {name: max(1, round(_TURN / max(self._fastest[name], 1e-7))) for name in functions}
        is_short = sum(self._fastest.values()) < _SHORT
        moves = is_short and anew is not None and self._device == "cpu"
        number, rounds_done, patience = self.passes, 0, seconds / 8
        began = time.perf_counter()
        if is_short and not moves and not is_first:
            for function in functions.values():
                self._turn(function, 1)
        while True:
            passed = time.perf_counter() - began
            if rounds_done >= fewest and passed > seconds:
                break
            if rounds_done >= rounds and passed >= lasting:
                if rounds_done >= _MOST * rounds or self.rounds.fewest_quiet(number) >= rounds:
                    break
                waited = time.perf_counter()
                watcher.wait(patience)
                patience -= time.perf_counter() - waited
            if anew is not None and moves:
                _held[:] = _blocks(len(self.rounds.passes))
                functions = anew()
                for function in functions.values():
                    self._turn(function, 2)  # touches memory that no earlier round used
            turns = {}
            for name in list(functions)[:: -1 if len(self.rounds.passes) % 2 else 1]:
                watcher.begin()
                elapsed = self._turn(functions[name], 1 if self._device == "cuda" else repeats[name])
                turns[name] = Turn(elapsed, watcher.end(), watcher.is_slow)
            for name, turn in turns.items():  # only whole rounds count if you interrupt
                self.rounds.turns.setdefault(name, []).append(turn)
            self.rounds.passes.append(number)
            rounds_done += 1
        _held.clear()
        self.seconds += time.perf_counter() - began


def time_interleaved(
    functions: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    device: str,
    seconds: float = 60.0,
    watcher: NoiseMonitor | None = None,
    anew: Callable[[], Mapping[str, Callable[[], object]]] | None = None,
) -> Rounds:
    """Times functions side by side, in one pass.

    Args:
        functions: by name.
        rounds: the quiet turns of each function; fewer, but at least three turns, if `seconds` are used up, and fewer
            quiet ones if three times as many turns were taken.
        device: "cpu" or "cuda".
        seconds: the approximate limit, of which an eighth may be spent waiting for quiet.
        watcher: None: on a CPU, a monitor for PyTorch's number of threads; a GPU isn't watched.
        anew: makes the functions on new copies of their inputs. On a CPU it is called in each round, if they are short.
    """
    timer = Interleaved(device)
    timer.take(functions, rounds=rounds, seconds=seconds, fewest=min(ENOUGH, rounds), watcher=watcher, anew=anew)
    return timer.rounds


def _blocks(number: int) -> list[torch.Tensor]:
    """Allocates memory of sizes that differ from round to round, so that later allocations have other addresses."""
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
    return _between_events(function, repeats)


def _between_events(function: Callable[[], object], repeats: int) -> float:
    """Returns the seconds of a call between two events on the stream."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / repeats


_SPINS_A_SECOND = 2e9  # cycles of a GPU's clock, about


def device_seconds(functions: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Returns the median time that each function takes on a GPU whose stream is never empty.

    The stream is kept busy until the host has enqueued all of a call, so that the host's time, which `_cuda_turn`
    contains where kernels are short, doesn't count. A function that waits for the device is timed with its host.
    """
    host: dict[str, float] = {}
    for name, function in functions.items():
        function()
        torch.cuda.synchronize()
        began = time.perf_counter()
        function()
        host[name] = time.perf_counter() - began
        torch.cuda.synchronize()
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(15):
        for name, function in functions.items():
            _flush_buffer().zero_()
            torch.cuda._sleep(int(_SPINS_A_SECOND * (1.5 * host[name] + 1e-4)))
            times[name].append(_between_events(function, 1))
    return {name: statistics.median(samples) for name, samples in times.items()}


@functools.cache
def _flush_buffer() -> torch.Tensor:
    return torch.empty(_FLUSHED, dtype=torch.uint8, device="cuda")


@functools.cache
def keep_freed_memory() -> None:
    """Has malloc keep freed memory, so that no call meets page faults for the memory of the call before it.

    By default glibc returns memory to the system and requests it again, which takes longer than a pass over it. Whether
    it does depends on what was freed before. jemalloc and tcmalloc keep the memory. Other allocators than glibc's are
    unchanged.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-4, 0)  # M_MMAP_MAX: everything comes from the heap
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
        torch.zeros(_TOUCHED, dtype=torch.uint8)  # else the first use of new memory faults


def peak_bytes(function: Callable[[], object], device: str) -> int:
    """Returns the most memory that was allocated at once while the function ran, beyond what was allocated before."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else the profiler writes to stderr when it begins and ends
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    current = peak = 0
    events = (event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]")
    for event in sorted(events, key=lambda event: event.start_ns()):
        current += event.nbytes()
        peak = max(peak, current)
    return peak
