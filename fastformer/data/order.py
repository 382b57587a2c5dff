"""The order in which a training meets its examples: epochs, windows in them, batches in those.

What fits in memory is one window. Shards on disk are taken several at a time: they are shuffled, then the examples of
each window among themselves, so that memory grows with the window and not with the corpus. The order is a function of
(seed, epoch, window); where a training stands in it is (epoch, window, batch).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from fastformer.data.batching import longest_sides, plan_epoch
from fastformer.data.examples import Example, Examples

_NEXT_WINDOW = 1_000_000_007  # what the seeds of neighbouring windows differ by


class WindowedExamples(Protocol):
    """Examples that an epoch takes window by window."""

    @property
    def num_windows(self) -> int:
        """Windows of an epoch."""

    @property
    def longest(self) -> int:
        """Tokens of the longest side of any example."""

    def window(self, seed: int, epoch: int, window: int) -> Tensor:
        """(examples,) int64: which examples a window has, in the order in which they are stored."""

    def lengths_at(self, indices: Sequence[int] | Tensor) -> Tensor:
        """(n, 2) int64: source and target lengths of some examples."""

    def weights_at(self, indices: Tensor) -> Tensor | None:
        """(n,) fp32: how often an epoch has each of some examples; None: once."""

    def __getitem__(self, index: int, /) -> Example:
        """One example."""


class Order:
    """Which examples form the batches of a training.

    Args:
        examples: in memory, or in windows.
        max_tokens, batching, seed: as `plan_epoch` takes them.
        weights: (examples,) how often an epoch has each example in memory; examples in windows know their own.

    Raises:
        ValueError: an example that is longer than max_tokens.
    """

    def __init__(
        self,
        examples: Examples | WindowedExamples,
        *,
        max_tokens: int,
        batching: str,
        seed: int,
        weights: Tensor | None = None,
    ) -> None:
        self._max_tokens, self._batching, self._seed = max_tokens, batching, seed
        self._windows: WindowedExamples | None = None
        if isinstance(examples, Examples):
            self._lengths, self._weights = examples.lengths, weights
            longest_sides(self._lengths, max_tokens)
        else:
            self._windows = examples
            longest_sides(torch.tensor([[examples.longest] * 2], device="cpu"), max_tokens)

    @property
    def num_windows(self) -> int:
        """Windows of an epoch; 1 for examples in memory."""
        return 1 if self._windows is None else self._windows.num_windows

    def plan(self, epoch: int, window: int) -> list[list[int]]:
        """The batches of a window, in order: lists of indices into the examples."""
        if self._windows is None:
            return self._planned(self._lengths, self._weights, self._seed, epoch)
        places = self._windows.window(self._seed, epoch, window)
        lengths, weights = self._windows.lengths_at(places), self._windows.weights_at(places)
        planned = self._planned(lengths, weights, self._seed + window * _NEXT_WINDOW, epoch)
        return [places[batch].tolist() for batch in planned]

    def _planned(self, lengths: Tensor, weights: Tensor | None, seed: int, epoch: int) -> list[list[int]]:
        return plan_epoch(
            lengths, max_tokens=self._max_tokens, batching=self._batching, seed=seed, epoch=epoch, weights=weights
        )

    def lengths(self, indices: Sequence[int] | Tensor) -> Tensor:
        """(n, 2) int64: source and target lengths of some examples."""
        if self._windows is None:
            return self._lengths[torch.as_tensor(indices, device="cpu")]
        return self._windows.lengths_at(indices)
