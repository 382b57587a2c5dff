"""Shards as a sequence of examples, with a few files at a time mapped into memory."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, overload

import numpy
import torch
from torch import Tensor

from fastformer.data.examples import Example, Examples
from fastformer.data.shards.arrow_file import read_examples_table, read_table, views
from fastformer.data.shards.manifest import Manifest, check_ids

WINDOW = 4  # shards


class _Mapped:
    """The columns of one shard. They keep the file mapped until the last of them is deleted."""

    def __init__(self, path: Path) -> None:
        table = read_table(path)
        self.source_ids, self.source_ends = views(table.column("source"))
        self.target_ids, self.target_ends = views(table.column("target"))
        self.origin: numpy.ndarray[Any, Any] = table.column("origin").to_numpy()

    def example(self, row: int) -> Example:
        """Returns one example."""
        a, b = self.source_ends[row : row + 2].tolist()
        c, d = self.target_ends[row : row + 2].tolist()
        return Example(self.source_ids[a:b].tolist(), self.target_ids[c:d].tolist())

    def lengths(self, rows: Tensor) -> Tensor:
        """Returns the lengths of some examples, (n, 2) int64."""
        at = rows.numpy()
        sides = [ends[at + 1] - ends[at] for ends in (self.source_ends, self.target_ends)]
        lengths = torch.from_numpy(numpy.stack(sides, axis=1).astype(numpy.int64))
        lengths[:, 1] -= (lengths[:, 0] == 0).long()  # the last token of a window is only predicted
        return lengths


class ShardedExamples(Sequence[Example]):
    """The examples of a folder that `fastformer prepare` made.

    A shard is checked against its SHA-256 when it is first opened, and stays mapped until other shards replace it.

    Args:
        folder: the folder.
        window: the number of shards that are shuffled together.
        weights: how often an epoch has each example of a source; None: the weights in the index.
        vocab_sizes: the numbers of source and target ids that a shard is checked against; None: any.

    Raises:
        ValueError: the folder or a shard is missing, a shard has another size, or the number of weights is wrong.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        window: int = WINDOW,
        weights: Sequence[float] | None = None,
        vocab_sizes: tuple[int, int] | None = None,
    ) -> None:
        self.folder, self.manifest = Path(folder), Manifest.load(folder)
        sources = self.manifest.sources
        weights = weights or [source.weight for source in sources]
        if len(weights) != len(sources):
            raise ValueError(
                f"expected data_weights for the {len(sources)} sources of {folder}, got {len(weights)} numbers"
            )
        self._weights = None if set(weights) == {1.0} else torch.tensor(weights, dtype=torch.float32, device="cpu")
        self._window, self._vocab_sizes = window, vocab_sizes
        self._starts = [0]
        for shard in self.manifest.shards:
            self._starts.append(self._starts[-1] + shard.examples)
        self._open: OrderedDict[int, _Mapped] = OrderedDict()
        self._checked: set[int] = set()

    def __len__(self) -> int:
        return self._starts[-1]

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        places = range(len(self))[index]
        return self._example(places) if isinstance(places, int) else [self._example(place) for place in places]

    def _example(self, place: int) -> Example:
        shard = bisect_right(self._starts, place) - 1
        return self._mapped(shard).example(place - self._starts[shard])

    def _mapped(self, shard: int) -> _Mapped:
        """Opens a shard. A window and one more shard stay open, because an update may have batches of two windows.

        Raises:
            ValueError: its contents differ from those that were prepared.
        """
        mapped = self._open.pop(shard, None)
        if mapped is None:
            stored = self.manifest.shards[shard]
            if shard not in self._checked:
                stored.check_examples(self.folder, self._vocab_sizes)
                self._checked.add(shard)
            mapped = _Mapped(self.folder / stored.file)
        self._open[shard] = mapped
        while len(self._open) > self._window + 1:
            self._open.popitem(last=False)
        return mapped

    @property
    def num_windows(self) -> int:
        """The number of windows in an epoch."""
        return -(-len(self.manifest.shards) // self._window)

    @property
    def longest(self) -> int:
        """The number of tokens on the longest side of any example."""
        return self.manifest.longest

    def window(self, seed: int, epoch: int, window: int) -> Tensor:
        """Returns the indices of a window's examples, (examples,) int64; seed and epoch determine its shards."""
        generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
        order = torch.randperm(len(self.manifest.shards), generator=generator, device="cpu").tolist()
        some = order[window * self._window : (window + 1) * self._window]
        return torch.cat([torch.arange(self._starts[s], self._starts[s + 1], device="cpu") for s in some])

    def lengths_at(self, indices: Sequence[int] | Tensor) -> Tensor:
        """Returns the source and target lengths of some examples, (n, 2) int64."""
        places = torch.as_tensor(indices, dtype=torch.int64, device="cpu")
        lengths = torch.empty(len(places), 2, dtype=torch.int64, device="cpu")
        for shard, here, rows in self._by_shard(places):
            lengths[here] = self._mapped(shard).lengths(rows)
        return lengths

    def weights_at(self, indices: Tensor) -> Tensor | None:
        """Returns how often an epoch has each of some examples, (n,) fp32; None: once."""
        if self._weights is None:
            return None
        weights = torch.empty(len(indices), dtype=torch.float32, device="cpu")
        for shard, here, rows in self._by_shard(indices):
            origin = self._mapped(shard).origin[rows.numpy()].astype(numpy.int64)
            weights[here] = self._weights[torch.from_numpy(origin)]
        return weights

    def _by_shard(self, places: Tensor) -> list[tuple[int, Tensor, Tensor]]:
        """Groups examples by shard: returns each shard, its examples' indices in `places`, and their rows in it."""
        starts = torch.tensor(self._starts, device="cpu")
        shards = torch.bucketize(places, starts, right=True) - 1
        groups = []
        for shard in shards.unique_consecutive().unique().tolist():
            here = (shards == shard).nonzero().flatten()
            groups.append((shard, here, places[here] - self._starts[shard]))
        return groups

    @property
    def num_tokens(self) -> tuple[int, int]:
        """The numbers of source and target tokens of all examples."""
        shards = self.manifest.shards
        return sum(shard.source_tokens for shard in shards), sum(shard.target_tokens for shard in shards)

    def fingerprint(self) -> str:
        """Computes a SHA-256 that is equal only for equal shards."""
        return self.manifest.fingerprint()


def read_examples(path: Path, vocab_sizes: tuple[int, int] | None = None) -> Examples:
    """Reads all examples of one file into memory.

    Raises:
        ValueError: the file is damaged, or has other ids than those below `vocab_sizes`.
    """
    table = read_examples_table(path)
    if vocab_sizes is not None:
        check_ids(table, path, vocab_sizes)
    mapped, examples = _Mapped(path), Examples()
    for row in range(len(mapped.origin)):
        example = mapped.example(row)
        examples.append(example.source, example.target)
    return examples
