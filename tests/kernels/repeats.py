"""Detects races: runs that differ from the first."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def assert_repeats(call: Callable[[], Sequence[Tensor]], runs: int = 100) -> None:
    """Checks that all runs give the same bits; every other run has concurrent work that shifts its timing.

    Args:
        call: returns new tensors each time.
    """
    first = call()
    on_device = first[0].is_cuda
    if on_device:
        other, noise = torch.cuda.Stream(), torch.randn(1024, 1024, device=first[0].device)
    for run in range(runs):
        if on_device and run % 2:
            with torch.cuda.stream(other):
                noise = noise @ noise / 1024
        for number, (actual, expected) in enumerate(zip(call(), first, strict=True)):
            assert torch.equal(actual, expected), f"result {number} of run {run} differs"
