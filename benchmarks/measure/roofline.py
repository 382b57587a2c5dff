"""Measures the machine's peak rates in this process: the floor that every time is compared with."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import torch

from benchmarks.measure.timing import time_interleaved
from fastformer.ops import feed_forward


@dataclass(frozen=True)
class Peaks:
    """The FLOP/s of large products in a dtype, and the bytes/s of a copy that doesn't fit in a cache.

    A call whose data fit in a cache may be faster than its floor.
    """

    flops: float
    bandwidth: float

    def floor(self, flops: float, moved: float) -> float:
        """Returns the least possible seconds, given the arithmetic and the memory traffic."""
        return max(flops / self.flops, moved / self.bandwidth)

    def bound(self, flops: float, moved: float) -> Literal["compute", "memory"]:
        """Returns which of the two determines the floor."""
        return "compute" if flops / self.flops >= moved / self.bandwidth else "memory"


@functools.cache
def measure_machine(dtype: torch.dtype, device: str, threads: int) -> Peaks:
    """Measures the rates of products and copies, once for each of PyTorch's numbers of threads.

    The products are the faster of torch.mm and fastformer's feed_forward, since each may be far below the possible
    rate. The times are those of the best fifth of turns: a roof is the best that is reached, not the average.
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
    return Peaks(max(2 * n**3 / times["mm"], 4 * n**3 / times["feed_forward"]), 2 * source.numel() / times["copy"])
