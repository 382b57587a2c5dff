"""How a time is taken: everything interleaved in one process, medians with their spread, never a lone number.

A shared machine is faster and slower by the minute. Round after round each function runs once, so that all of them meet
the same conditions; on a CPU a function that is too short for the clock runs several times within its turn, on a GPU
the L2 cache is flushed before each turn.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from fastformer.ops import feed_forward

_TURN = 0.01  # seconds that one turn of a function should take at least
_FLUSHED = 256 * 2**20  # bytes: more than any L2 cache has


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


def time_interleaved(
    functions: Mapping[str, Callable[[], object]], *, rounds: int, device: str, seconds: float = 60.0
) -> dict[str, Timing]:
    """Times functions side by side.

    Args:
        functions: by name.
        rounds: turns of each; fewer, but at least three, when `seconds` are used up.
        device: "cpu" or "cuda".
        seconds: about how long all of it may take.

    Returns:
        A timing by name.
    """
    turn = _cuda_turn if device == "cuda" else _cpu_turn
    repeats = {name: _warm_up(function, turn) for name, function in functions.items()}
    measured: dict[str, list[float]] = {name: [] for name in functions}
    began = time.perf_counter()
    for done in range(rounds):
        if done >= 3 and time.perf_counter() - began > seconds:
            break
        for name, function in functions.items():
            measured[name].append(turn(function, 1 if device == "cuda" else repeats[name]))
    return {name: Timing.of(times) for name, times in measured.items()}


def _warm_up(function: Callable[[], object], turn: Callable[[Callable[[], object], int], float]) -> int:
    """Runs the function thrice; how often it fits into a turn."""
    return max(1, round(_TURN / max(min(turn(function, 1) for _ in range(3)), 1e-7)))


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


def keep_freed_memory() -> None:
    """Has malloc keep what is freed, so that tensors of up to 32 MiB meet no page faults again in every call.

    By default glibc gives memory back and asks for it anew, which takes longer than a pass over it. Anything but glibc
    is left as it is.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-3, 32 * 2**20)  # M_MMAP_THRESHOLD, at its maximum
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def peak_bytes(function: Callable[[], object], device: str) -> int:
    """The most memory that was allocated at once while the function ran, beyond what was there before."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    held = peak = 0
    events = (event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]")
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


@dataclass(frozen=True)
class Machine:
    """What the machine reaches at best, measured in this process: the floor that a time is held against."""

    flops: float
    bandwidth: float

    def floor(self, flops: float, moved: float) -> float:
        """The seconds below which nothing can be, by arithmetic or by memory."""
        return max(flops / self.flops, moved / self.bandwidth)


@functools.cache
def measure_machine(dtype: torch.dtype, device: str) -> Machine:
    """The FLOP/s of large products in a dtype, and the bytes/s of a copy that no cache holds.

    The products are the faster of torch.mm and of our feed_forward's two, since either may be far below what the CPU
    can do.
    """
    n = 8192 if device == "cuda" else 1024
    a = torch.randn(n, n, device=device).to(dtype)
    source = torch.empty(1 << (31 if device == "cuda" else 27), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    functions = {
        "mm": lambda: torch.mm(a, a),
        "feed_forward": lambda: feed_forward(a, a, None, a, None),
        "copy": lambda: target.copy_(source),
    }
    with torch.no_grad():
        times = {name: t.p20 for name, t in time_interleaved(functions, rounds=7, device=device, seconds=5.0).items()}
    return Machine(max(2 * n**3 / times["mm"], 4 * n**3 / times["feed_forward"]), 2 * source.numel() / times["copy"])
