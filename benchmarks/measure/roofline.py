"""What the machine reaches at best, measured in this process: the floor that every time is held against."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import torch

from benchmarks.measure.timing import time_interleaved
from fastformer.ops import feed_forward


@dataclass(frozen=True)
class Machine:
    """FLOP/s of large products in a dtype, and bytes/s of a copy that no cache holds.

    A call whose data a cache does hold may be faster than its floor.
    """

    flops: float
    bandwidth: float

    def floor(self, flops: float, moved: float) -> float:
        """The seconds below which nothing can be, by arithmetic or by memory."""
        return max(flops / self.flops, moved / self.bandwidth)

    def bound(self, flops: float, moved: float) -> Literal["compute", "memory"]:
        """Which of the two the floor is."""
        return "compute" if flops / self.flops >= moved / self.bandwidth else "memory"


def measure_machine(dtype: torch.dtype, device: str) -> Machine:
    """The machine with the threads that PyTorch computes with now; measured once for each number of them."""
    return _measure(dtype, device, torch.get_num_threads())


@functools.cache
def _measure(dtype: torch.dtype, device: str, threads: int) -> Machine:
    """The products are the faster of torch.mm and of our feed_forward's two: either may be far below what is possible.

    The times are those of the best fifth of turns: a roof is what is reached, not what is usual.
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
        times = {name: t.p20 for name, t in time_interleaved(functions, rounds=7, device=device, seconds=2.0).items()}
    return Machine(max(2 * n**3 / times["mm"], 4 * n**3 / times["feed_forward"]), 2 * source.numel() / times["copy"])
