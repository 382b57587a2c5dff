"""A fixed-shape view of a `KVCache`, for steps that a CUDA graph replays."""

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

    There are `rows_per_group` batch slots for each of `num_groups` groups. Batch slots without a row are decoded too,
    and write to slots of the cache that nothing else uses. Keys and values belong to the cache. The tables belong to
    this object: they lie at fixed addresses on the device, and run ahead of the host's tables for several steps:

        reserve_run     the host reserves the slots of the next tokens, and sends its tables
        begin, commit   on the device, for each step, by the stack
        end_step        on the device, after each step
        sync            brings the host's tables up to date with the device's

    Args:
        cache: the cache of the rows. All its groups have rows_per_group rows in a run; with 1, each row counts as a
            group.
        num_groups: at least the number of groups in the cache.
        rows_per_group: see above.
        width: the greatest length of a row.
        source_width: the greatest length of a source.
        spare: slots from the cache's `KVCache.take_slots`, one for each batch slot without a row.

    Attributes:
        step: the number of finished steps of the run, (1,) int64.
        slot_table: the slot of each position of each batch slot, (num_rows, width) int32.
    """

    def __init__(
        self, cache: KVCache, num_groups: int, rows_per_group: int, width: int, source_width: int, spare: Ints
    ) -> None:
        # KVCache's __init__ is not called: everything except the tables on the device belongs to the cache.
        self.k, self.v, self._table, self._cache = cache.k, cache.v, cache._table, cache
        self.layer_heads, self._layers = cache.layer_heads, cache._layers
        self.rows_per_group, self.width, self.source_width = rows_per_group, width, source_width
        self._rows, self._num_groups, self._spare = num_groups * rows_per_group, num_groups, spare
        sizes = self._rows * width, self._rows, self._rows, num_groups * source_width, num_groups
        # Each table begins at a multiple of 16 bytes for any number of rows: kernels are compiled for that alignment.
        ends = list(accumulate(-(-size // 4) * 4 for size in sizes))
        device = cache.k.device
        self._tensors = torch.zeros(ends[-1], dtype=torch.int32, device=device)
        # Pinned, so that the upload is asynchronous. The host waits for a run before it writes here for the next one.
        self._pinned = torch.zeros(ends[-1], dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
        padded = self._tensors.tensor_split(ends[:-1])
        slots, self._seqlens, self._last, sources, self._lengths_of_sources = (
            table[:size] for table, size in zip(padded, sizes, strict=True)
        )
        self.slot_table, self._source_slots = slots.view(self._rows, width), sources.view(num_groups, source_width)
        on_host = np.split(self._pinned.numpy(), ends[:-1])
        self._host = [table[:size] for table, size in zip(on_host, sizes, strict=True)]
        self._position = torch.arange(width, device=device)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self._counts = np.zeros(0, np.int32)

    # By the host, between runs.

    def reserve_run(self, num_steps: int, last: Ints) -> None:
        """Reserves the slots of the next num_steps tokens, and sends the tables to the device.

        Args:
            num_steps: the number of steps in the run.
            last: (groups,) the last position that the rows of each group may fill. A row that has reached it writes to
                it again.

        Raises:
            CacheFullError: fewer blocks are free than the run needs. No block is taken.
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
        self.step.zero_()

    def sync(self, parents: Ints) -> None:
        """Updates the host's tables to the state that the device's tables have after the run.

        Args:
            parents: (steps, at least rows) the batch slot that each batch slot continued from after each step.
        """
        self._table.commit_run(self._counts, parents[:, : len(self._counts)])
        self._cache._changed("seqlens", "slots")

    # In a step.

    def end_step(self, parents: Tensor | None) -> None:
        """Makes each batch slot continue from a batch slot of its group.

        Args:
            parents: (num_rows,) int64; None: each continues from itself.
        """
        if parents is not None:
            # A row keeps its own slots for the tokens that it writes next.
            is_history = self._position < self._seqlens[:, None]
            self.slot_table.copy_(torch.where(is_history, self.slot_table.index_select(0, parents), self.slot_table))
        self.step.add_(1)

    @property
    def num_rows(self) -> int:
        """The number of batch slots."""
        return self._rows

    @property
    def length_bound(self) -> int:
        """Always 0: `reserve_run` has checked the lengths, and a step must not read them on the host."""
        return 0

    @property
    def has_memory(self) -> bool:
        """Whether the cache holds the keys and values of sources."""
        return self.source_width > 0

    @property
    def seqlens(self) -> Tensor:
        """The number of tokens in each batch slot, (num_rows,) int32."""
        return self._seqlens

    def positions(self, num_tokens: int) -> Tensor:
        """Returns the positions of the next tokens, (num_rows, 1) int64."""
        self.check_room(num_tokens)
        return self._seqlens[:, None].long()

    def check_room(self, num_tokens: int) -> None:
        """Raises InputError for anything but one token a row."""
        if num_tokens != 1:
            raise InputError(f"expected num_tokens = 1 in a step that is replayed, got {num_tokens}")

    def begin(
        self, num_tokens: int, seqlens: Sequence[int] | Tensor | None = None, is_packed: bool = False
    ) -> StepTables:
        """Returns the tables of a step, whose slots `reserve_run` has reserved."""
        self.check_room(num_tokens if seqlens is None else 0)
        slots, seqlens_ = (self._source_slots, self._lengths_of_sources) if self.has_memory else (None, None)
        k, v = self._layers if self.has_unlike_layers else (self.k, self.v)
        return StepTables(
            k,
            v,
            self.slot_table,
            self._seqlens,
            source_slots=slots,
            source_seqlens=seqlens_,
            rows_per_source=self.rows_per_group,
        )

    def commit(self, step: StepTables) -> None:
        """Adds the tokens of a step to the lengths, on the device."""
        torch.minimum(self._seqlens + 1, self._last, out=self._seqlens)
