"""A `KVCache` as a step sees it that a CUDA graph replays: tensors of fixed shapes at fixed addresses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from fastformer.cache.block_pool import Ints
from fastformer.cache.kv_cache import KVCache
from fastformer.cache.layer_view import AttentionCache, LayerCache


class LaneCache(KVCache):
    """What a stack asks of a cache in a step of one token a row, answered by tensors alone.

    The rows of the cache stand in lanes: `rows_per_group` for each of `num_groups` groups. Lanes that no row stands in
    decode along: they write to slots that were set aside for them, and nobody looks at what they find. The keys and
    values are the cache's own; tables and lengths are this object's, and live on the device, where `follow` lets lanes
    go on from others without the host.

    Several steps make a run. Before it the host provides the slots of its tokens (`provide`); behind it the host makes
    its own tables what the device's have become (`settle`). The tables are sent to the device (`load`) when anything
    else has happened to the cache meanwhile: a group that came or went, a step that was taken some other way.

    Args:
        cache: whose rows these are, of one device.
        num_groups: as many, or more than the cache has.
        rows_per_group: of each group of the cache when it is loaded.
        width: no row gets longer than this.
        source_width: no source is longer than this.
        num_steps: of a run, at most.
        spare: slots that were set aside (`KVCache.set_aside`), for as many lanes as no row will stand in.
    """

    def __init__(
        self,
        cache: KVCache,
        num_groups: int,
        rows_per_group: int,
        width: int,
        source_width: int,
        num_steps: int,
        spare: Ints,
    ) -> None:
        # Without KVCache's own: what there is belongs to the cache, but for the tables on the device.
        self.k, self.v, self._tables = cache.k, cache.v, cache._tables
        self.num_groups_at_most, self.rows_per_group, self.num_steps = num_groups, rows_per_group, num_steps
        self.width, self.source_width = width, source_width
        lanes, device = num_groups * rows_per_group, cache.k.device
        self._lanes, self._spare = lanes, spare
        ends = list(accumulate((lanes * width, lanes, lanes, num_groups * source_width, num_groups)))
        is_cuda = device.type == "cuda"
        self._sent = torch.zeros(ends[-1], dtype=torch.int32, device=device)
        # Pinned, so that the device can fetch it by itself; it is waited for between two loads.
        self._staged = torch.zeros(ends[-1], dtype=torch.int32, device="cpu", pin_memory=is_cuda)
        slots, self._seqlens, self._last, source_slots, self._source_seqlens = self._sent.tensor_split(ends[:-1])
        self._slots, self._source_slots = slots.view(lanes, width), source_slots.view(num_groups, source_width)
        self._next = torch.zeros(num_steps, lanes, dtype=torch.int32, device=device)
        self._staged_next = torch.zeros(num_steps, lanes, dtype=torch.int32, device="cpu", pin_memory=is_cuda)
        self._host = np.split(self._staged.numpy(), ends[:-1])
        self._step = torch.zeros(1, dtype=torch.int64, device=device)
        self._counts = np.zeros(0, np.int32)

    # By the host, between runs.

    @property
    def nbytes(self) -> int:
        """Of the tables."""
        return 4 * (self._sent.numel() + self._next.numel())

    def provide(self, num_steps: int, last: Ints) -> None:
        """Takes the blocks for the tokens of the next run, and tells the device where they go.

        Args:
            num_steps: of the run.
            last: (groups,) where the last token goes that the rows of each group may have. A row that is at it writes
                there again.

        Raises:
            CacheFullError: not as many blocks are free. Nothing is taken.
        """
        tables, lanes_of_rows = self._tables, np.repeat(last, self.rows_per_group)
        rows = len(lanes_of_rows)
        seqlens = tables.seqlens[:rows].copy()
        self._counts = np.minimum(num_steps, lanes_of_rows - seqlens + 1).astype(np.int32)
        tables.reserve(0, int(self._counts.max()), self._counts)
        position = np.minimum(seqlens[:, None] + np.arange(num_steps), lanes_of_rows[:, None])
        staged = self._staged_next.numpy()
        staged[:num_steps, :rows] = tables.slots[np.arange(rows)[:, None], position].T
        staged[:num_steps, rows:] = self._spare[: self._lanes - rows]
        self._next[:num_steps].copy_(self._staged_next[:num_steps], non_blocking=True)
        self._step.zero_()

    def load(self, last: Ints) -> None:
        """Sends the tables. Each group of the cache has rows_per_group rows; with 1, each row counts as a group.

        Args:
            last: see `provide`.
        """
        tables, rows = self._tables, self._tables.num_rows
        keys = tables.keys[: rows : self.rows_per_group]
        groups = len(keys)
        assert self.rows_per_group in (1, *set(tables.sizes)) and groups <= self.num_groups_at_most
        slots, seqlens, ends, source_slots, source_seqlens = self._host
        slots = slots.reshape(self._lanes, self.width)
        slots[:rows] = tables.slots[:rows, : self.width]
        slots[rows:] = self._spare[: self._lanes - rows, None]
        seqlens[:rows], seqlens[rows:] = tables.seqlens[:rows], 0
        ends[:rows], ends[rows:] = np.repeat(last, self.rows_per_group), 0
        sources = source_slots.reshape(self.num_groups_at_most, self.source_width)
        sources[:groups], sources[groups:] = tables.source_slots[keys, : self.source_width], 0
        source_seqlens[:groups], source_seqlens[groups:] = tables.source_seqlens[keys], 0
        self._sent.copy_(self._staged, non_blocking=True)

    def settle(self, parents: Ints) -> None:
        """Makes the host's tables what the device's have become.

        Args:
            parents: (steps of the run, at least rows) which lane each lane went on from behind each step.
        """
        self._tables.follow(self._counts, parents[:, : len(self._counts)])

    # In a step.

    def follow(self, parents: Tensor | None) -> None:
        """Ends a step: each lane goes on from what another one of its group was.

        Args:
            parents: (lanes,) int64; None: each from itself.
        """
        if parents is not None:
            self._slots.copy_(self._slots.index_select(0, parents))
        self._step.add_(1)

    @property
    def step(self) -> Tensor:
        """(1,) int64, how many steps of the run are over."""
        return self._step

    @property
    def num_rows(self) -> int:
        """The lanes."""
        return self._lanes

    @property
    def length_bound(self) -> int:
        """Whoever provides the slots has looked at the lengths: for a step, no row has any."""
        return 0

    @property
    def has_memory(self) -> bool:
        """Whether there are sources."""
        return self.source_width > 0

    @property
    def seqlens(self) -> Tensor:
        """(lanes,) int32."""
        return self._seqlens

    @property
    def slot_table(self) -> Tensor:
        """(lanes, width) int32."""
        return self._slots

    def positions(self, num_tokens: int) -> Tensor:
        """The positions of the next tokens: (lanes, 1) int64."""
        self.check_room(num_tokens)
        return self._seqlens[:, None].long()

    def check_room(self, num_tokens: int) -> None:
        """Raises ValueError for anything but one token a row."""
        if num_tokens != 1:
            raise ValueError(f"expected one token a row in a step that is replayed, got {num_tokens}")

    def reserve(self, num_tokens: int, seqlens: Sequence[int] | Tensor | None = None) -> None:
        """Enters the slots of the next tokens, which `provide` has taken, into the table."""
        self.check_room(num_tokens if seqlens is None else 0)
        self._slots.scatter_(1, self.positions(1), self._next.index_select(0, self._step).view(-1, 1))

    def advance(self, num_tokens: int, seqlens: Sequence[int] | Tensor | None = None) -> None:
        """Counts the tokens that were just appended."""
        self.check_room(num_tokens if seqlens is None else 0)
        torch.minimum(self._seqlens + 1, self._last, out=self._seqlens)

    def __getitem__(self, layer: int) -> LayerCache:
        """The part of one layer."""
        own = AttentionCache(self.k[layer], self.v[layer], self._slots, self._seqlens, reserved=1)
        if not self.has_memory:
            return LayerCache(own)
        cross = replace(
            own,
            slot_table=self._source_slots,
            seqlens=self._source_seqlens,
            is_static=True,
            rows_per_source=self.rows_per_group,
        )
        return LayerCache(own, cross)
