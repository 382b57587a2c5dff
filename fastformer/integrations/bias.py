"""What `attn_mask` can say without being a matrix: windows from the bottom right, and blocks on the diagonal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Window:
    """Which keys a query sees, counted from its own on the diagonal that ends at the bottom right.

    Attributes:
        left: how many keys before its own; None = all.
        right: how many behind it; None = all.
    """

    left: int | None = None
    right: int | None = None


@dataclass(frozen=True)
class BlockDiagonal:
    """Sequences one after another in a batch of one: each sees itself alone.

    Attributes:
        seqlens_q: the queries of each sequence.
        seqlens_k: its keys; None: as many as queries.
        window: within each sequence, from its own bottom right.
    """

    seqlens_q: Sequence[int]
    seqlens_k: Sequence[int] | None = None
    window: Window = Window()


def causal_lower_right() -> Window:
    """No key behind a query's own, on the diagonal that ends at the bottom right: what decoding with a cache means."""
    return Window(None, 0)
