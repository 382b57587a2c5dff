"""A `KVCache` as a batch of fixed shape: what a step needs that a CUDA graph replays."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from fastformer.cache.block_pool import Ints
from fastformer.cache.kv_cache import KVCache
from fastformer.cache.layer_view import StepTables
from fastformer.errors import InputError


class FixedShapeCache(KVCache):
    """The rows of a cache in batch slots, for steps of one token a row that read no value on the host.

    There are `rows_per_group` batch slots for each of `num_groups` groups. Those without a row decode along, and write
    to slots of the cache that nothing else uses. Keys and values are the cache's own. The tables are this object's, at
    fixed addresses on the device, where they run ahead of the host's for several steps:

        reserve_run     the host reserves the slots of the next tokens, and sends its tables
        begin, commit   on the device, for each step, by the stack
        end_step        on the device, after each step
        sync            the host's tables become what those of the device are

    Args:
        cache: of the rows. All its groups have rows_per_group rows in a run; with 1, each row counts as a group.
        num_groups: at least the groups of the cache.
        rows_per_group: see above.
        width: no row gets longer than this.
        source_width: no source is longer than this.
        spare: `KVCache.take_slots` of the cache, for as many batch slots as have no row.
    """

    def __init__(
        self, cache: KVCache, num_groups: int, rows_per_group: int, width: int, source_width: int, spare: Ints
    ) -> None:
        # Not KVCache's: all but the tables on the device belongs to the cache.
        self.k, self.v, self._table, self._cache = cache.k, cache.v, cache._table, cache
        self.rows_per_group, self.width, self.source_width = rows_per_group, width, source_width
        self._rows, self._num_groups, self._spare = num_groups * rows_per_group, num_groups, spare
        sizes = self._rows * width, self._rows, self._rows, num_groups * source_width, num_groups
        # Each table begins at a multiple of 16 bytes, whatever the number of rows: kernels are compiled for that.
        ends = list(accumulate(-(-size // 4) * 4 for size in sizes))
        device = cache.k.device
        self._tensors = torch.zeros(ends[-1], dtype=torch.int32, device=device)
        # Pinned, so that the device fetches it by itself. A run is waited for before the next one writes here.
        self._pinned = torch.zeros(ends[-1], dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
        padded = self._tensors.tensor_split(ends[:-1])
        slots, self._seqlens, self._last, sources, self._lengths_of_sources = (
            table[:size] for table, size in zip(padded, sizes, strict=True)
        )
        self._slots, self._source_slots = slots.view(self._rows, width), sources.view(num_groups, source_width)
        on_host = np.split(self._pinned.numpy(), ends[:-1])
        self._host = [table[:size] for table, size in zip(on_host, sizes, strict=True)]
        self._position = torch.arange(width, device=device)
        self._steps = torch.zeros(1, dtype=torch.int64, device=device)
        self._counts = np.zeros(0, np.int32)

    # By the host, between runs.

    def reserve_run(self, num_steps: int, last: Ints) -> None:
        """Reserves the slots of the next num_steps tokens, and sends the tables to the device.

        Args:
            num_steps: of the run.
            last: (groups,) the position of the last token that the rows of each group may have. A row that is there
                writes there again.

        Raises:
            CacheFullError: fewer blocks are free than it takes. Nothing is taken.
        """
        table, rows, last = self._table, self._table.num_rows, np.repeat(last, self.rows_per_group)
        counts = np.minimum(num_steps, last - table.seqlens[:rows] + 1).astype(np.int32)
        if table.reserve(0, counts):
            self._cache._changed("slots")
        self._counts = counts
        keys = table.keys[: rows : self.rows_per_group]
        groups = len(keys)
        slots, seqlens, ends, source_slots, source_seqlens = self._host
        slots = slots.reshape(self._rows, self.width)
        width = min(self.width, table.slots.shape[1])
        slots[:rows, :width] = table.slots[:rows, :width]
        slots[rows:] = self._spare[: self._rows - rows, None]
        seqlens[:rows], seqlens[rows:] = np.minimum(table.seqlens[:rows], last), 0
        ends[:rows], ends[rows:] = last, 0
        sources = source_slots.reshape(self._num_groups, self.source_width)
        sources[:groups] = table.source_slots[keys, : self.source_width]
        source_seqlens[:groups], source_seqlens[groups:] = table.source_seqlens[keys], 0
        self._tensors.copy_(self._pinned, non_blocking=True)
        self._steps.zero_()

    def sync(self, parents: Ints) -> None:
        """Makes the host's tables what those of the device have become in the run.

        Args:
            parents: (steps, at least rows) after each step, the batch slot that each one went on from.
        """
        self._table.commit_run(self._counts, parents[:, : len(self._counts)])
        self._cache._changed("seqlens", "slots")

    # In a step.

    @property
    def step(self) -> Tensor:
        """(1,) int64, how many steps of the run are over."""
        return self._steps

    def end_step(self, parents: Tensor | None) -> None:
        """Lets each batch slot go on from what another one of its group was.

        Args:
            parents: (num_rows,) int64; None: each goes on from itself.
        """
        if parents is not None:
            # The slots that a row writes to next stay its own.
            is_history = self._position < self._seqlens[:, None]
            self._slots.copy_(torch.where(is_history, self._slots.index_select(0, parents), self._slots))
        self._steps.add_(1)

    @property
    def num_rows(self) -> int:
        """The batch slots."""
        return self._rows

    @property
    def length_bound(self) -> int:
        """0: `reserve_run` has looked at the lengths, and no step may."""
        return 0

    @property
    def has_memory(self) -> bool:
        """Whether there are sources."""
        return self.source_width > 0

    @property
    def seqlens(self) -> Tensor:
        """(num_rows,) int32."""
        return self._seqlens

    @property
    def slot_table(self) -> Tensor:
        """(num_rows, width) int32."""
        return self._slots

    def positions(self, num_tokens: int) -> Tensor:
        """The positions of the next tokens: (num_rows, 1) int64."""
        self.check_room(num_tokens)
        return self._seqlens[:, None].long()

    def check_room(self, num_tokens: int) -> None:
        """Raises InputError for anything but one token a row."""
        if num_tokens != 1:
            raise InputError(f"expected num_tokens = 1 in a step that is replayed, got {num_tokens}")

    def begin(
        self, num_tokens: int, seqlens: Sequence[int] | Tensor | None = None, is_packed: bool = False
    ) -> StepTables:
        """The tables of any step: its slots are reserved by `reserve_run`."""
        self.check_room(num_tokens if seqlens is None else 0)
        slots, seqlens_ = (self._source_slots, self._lengths_of_sources) if self.has_memory else (None, None)
        return StepTables(
            self.k,
            self.v,
            self._slots,
            self._seqlens,
            source_slots=slots,
            source_seqlens=seqlens_,
            rows_per_source=self.rows_per_group,
        )

    def commit(self, step: StepTables) -> None:
        """Counts the tokens of a step, on the device."""
        torch.minimum(self._seqlens + 1, self._last, out=self._seqlens)
