"""The order of a training's examples: epochs consist of windows, and windows of batches.

Examples in memory are a single window. For shards on disk a window is several shards: the shards are shuffled, and then
the examples within each window, so that memory grows with the window and not with the corpus. The order is a function
of (seed, epoch, window); the position of a training in it is (epoch, window, batch).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastformer.data.batching import longest_sides, plan_epoch
from fastformer.data.examples import Examples
from fastformer.data.shards.reading import ShardedExamples

_NEXT_WINDOW = 1_000_000_007  # the difference between the seeds of neighbouring windows


class Order:
    """The choice of the examples that form the batches of a training.

    Args:
        examples: the examples, in memory or in shards.
        max_tokens, batching, seed: see `plan_epoch`.
        weights: (examples,) how often an epoch contains each example in memory; shards bring their own.

    Raises:
        ValueError: an example that is longer than max_tokens.
    """

    def __init__(
        self,
        examples: Examples | ShardedExamples,
        *,
        max_tokens: int,
        batching: str,
        seed: int,
        weights: Tensor | None = None,
    ) -> None:
        self._max_tokens, self._batching, self._seed = max_tokens, batching, seed
        self._windows: ShardedExamples | None = None
        if isinstance(examples, Examples):
            self._lengths, self._weights = examples.lengths, weights
            longest_sides(self._lengths, max_tokens)
        else:
            self._windows = examples
            longest_sides(torch.tensor([[examples.longest] * 2], device="cpu"), max_tokens)

    @property
    def num_windows(self) -> int:
        """The number of windows of an epoch; 1 for examples in memory."""
        return 1 if self._windows is None else self._windows.num_windows

    def plan(self, epoch: int, window: int) -> list[list[int]]:
        """Returns the batches of a window, in order, as lists of indices into the examples."""
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
        """Returns the source and target lengths of some examples, (n, 2) int64."""
        if self._windows is None:
            return self._lengths[torch.as_tensor(indices, device="cpu")]
        return self._windows.lengths_at(indices)
