"""The KV cache: the keys and values of earlier tokens, so that no token is computed twice."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fastformer.cache.block_pool import NULL_BLOCK, Ints
from fastformer.cache.block_table import BlockTable, Tables, blocks_of, spread
from fastformer.cache.layer_view import StepTables
from fastformer.errors import InputError

BLOCK_SIZE = 16


class KVCache:
    """The keys and values of all layers of a decoder, in blocks. For inference: no gradient flows through it.

    Rows decode together. They belong to groups: a group is the beams or samples of one request, side by side, with one
    length and one source. At any time, `add` appends groups, `free` removes them, and `fork` makes rows continue from
    other rows of their group. None of these moves a key or a value. Memory is taken block by block as rows grow. The
    common beginning of a group's rows (a prompt, the stem of their hypotheses) and the source of a group are stored
    once.

    A step is a value: `begin` reserves the slots of the next tokens and returns the places of all tokens, the layers
    write keys and values there, and `commit` advances the lengths. The stacks do so themselves when they are given
    `cache=`. A step that fails, or is not committed for another reason, changes no length; the blocks that it took stay
    reserved for the next step. Any other change of the cache ends a step that has begun.

    The tables live on the host. Each change of a table is sent to the device asynchronously; the device's tables keep
    their addresses. A step that is compiled, or recorded in a CUDA graph, can run again when rows are longer: it reads
    all columns of the tables, and uses the step that the caller has begun and will commit.

    Args:
        num_layers, num_kv_heads, head_dim: the sizes of the decoder.
        max_rows: the most rows that decode together.
        max_seqlen: the longest row, in tokens.
        max_source_seqlen: the longest source. None: as long as the memory that is set while nothing is stored.
        num_sources: the number of sources that num_blocks None makes room for; None: the number of rows.
        num_blocks: the number of blocks that all rows and sources share, including the null block (`NULL_BLOCK`). None:
            enough for max_rows rows and num_sources sources of full length, as long as groups don't shrink (the
            remaining rows may hold blocks that many rows have written to).
        block_size: the number of tokens in a block.
        device, dtype: the device and dtype of the keys and values.
        layer_heads: num_kv_heads and head_dim of each layer, if they differ; None: all are alike.

    Attributes:
        k, v: (num_layers, num_blocks, block_size, num_kv_heads, head_dim), or, if layers differ, the numbers of one
            layer after another. On a CPU, pages that were never written use no memory.
        layer_heads: num_kv_heads and head_dim of each layer.

    Raises:
        InputError: a size is not an integer of at least 1.
    """

    def __init__(
        self,
        num_layers: int,
        max_rows: int,
        max_seqlen: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        max_source_seqlen: int | None = None,
        num_sources: int | None = None,
        num_blocks: int | None = None,
        block_size: int = BLOCK_SIZE,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        layer_heads: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        sizes = (num_layers, max_rows, max_seqlen, num_kv_heads, head_dim)
        if not all(isinstance(size, int) for size in sizes) or min(sizes) < 1:
            raise InputError(
                "expected num_layers, max_rows, max_seqlen, num_kv_heads and head_dim of at least 1, got "
                f"{num_layers}, {max_rows}, {max_seqlen}, {num_kv_heads}, {head_dim}"
            )
        for name, size, least in (
            ("max_source_seqlen", max_source_seqlen, 0),
            ("num_sources", num_sources, 0),
            ("num_blocks", num_blocks, 2),
            ("block_size", block_size, 1),
        ):
            if size is not None and (not isinstance(size, int) or size < least):
                raise InputError(f"expected {name} to be an integer of at least {least}, got {size!r}")
        self._sizes, self._num_blocks, self.block_size = sizes, num_blocks, block_size
        self.layer_heads = [(num_kv_heads, head_dim)] * num_layers if layer_heads is None else [*layer_heads]
        if len(self.layer_heads) != num_layers:
            raise InputError(f"expected layer_heads for {num_layers} layers, got {len(self.layer_heads)}")
        self._num_sources = max_rows if num_sources is None else num_sources
        self._fits_memory = max_source_seqlen is None
        self._first = 0  # the first group of this view
        self._placement = torch.empty(0, device=device, dtype=dtype)
        self._allocate(max_source_seqlen or 0)

    def _allocate(self, max_source_seqlen: int) -> None:
        num_layers, max_rows, max_seqlen, num_kv_heads, head_dim = self._sizes
        size = self.block_size
        columns, source_columns = blocks_of(max_seqlen, size), blocks_of(max_source_seqlen, size)
        num_blocks = self._num_blocks or 1 + max_rows * columns + self._num_sources * source_columns
        shapes = [(num_blocks, size, *heads) for heads in self.layer_heads]
        counts = [math.prod(shape) for shape in shapes]
        whole = (sum(counts),) if self.has_unlike_layers else (num_layers, *shapes[0])
        self.k, self.v = self._placement.new_empty(whole), self._placement.new_empty(whole)
        self._layers = tuple(
            [part.view(shape) for part, shape in zip(store.flatten().split(counts), shapes, strict=True)]
            for store in (self.k, self.v)
        )
        for layer in (*self._layers[0], *self._layers[1]):
            layer[NULL_BLOCK] = 0
        host = Tables.zeros(max_rows, columns * size, source_columns * size, "cpu")
        self._table = BlockTable(host, max_seqlen, max_source_seqlen, num_blocks, size)
        self._on_device = host
        if not self._is_host(self.k.device):
            # Tables that any mode may write to: an engine that was made in inference mode may be emptied outside of it.
            with torch.inference_mode(False):
                self._on_device = Tables.zeros(max_rows, columns * size, source_columns * size, self.k.device)
        # The step that may be committed, in a list that all views of this cache share (see `tail`).
        self._begun: list[StepTables] = []

    @staticmethod
    def _is_host(device: torch.device) -> bool:
        """Returns whether ops on this device read the host's memory."""
        return device.type == "cpu"

    # Sizes and state.

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.layer_heads)

    @property
    def has_unlike_layers(self) -> bool:
        """Whether layers differ in the number or the size of their heads."""
        return len(set(self.layer_heads)) > 1

    @property
    def max_rows(self) -> int:
        """The greatest number of rows."""
        return self._table.max_rows

    @property
    def max_seqlen(self) -> int:
        """The greatest number of tokens in a row."""
        return self._table.max_seqlen

    @property
    def max_source_seqlen(self) -> int:
        """The greatest number of tokens in a source."""
        return self._table.max_source_seqlen

    @property
    def num_rows(self) -> int:
        """The number of rows in all groups."""
        return self._table.num_rows - self._begin

    @property
    def num_groups(self) -> int:
        """The number of groups."""
        return len(self._table.groups) - self._first

    @property
    def group_sizes(self) -> list[int]:
        """The number of rows in each group."""
        return [group.size for group in self._table.groups[self._first :]]

    @property
    def lengths(self) -> list[int]:
        """The number of tokens in each row, for each group."""
        firsts = np.cumsum([self._begin, *self.group_sizes])[:-1]
        return self._table.seqlens[firsts].tolist()

    @property
    def length_bound(self) -> int:
        """The number of tokens in the longest row."""
        return self._recorded_step().longest if self._is_recorded() else self._table.longest(self._begin)

    @property
    def has_memory(self) -> bool:
        """Whether the cache has groups, and holds the keys and values of each group's source."""
        return self._longest_source() is not None

    @property
    def longest_source(self) -> int:
        """The number of tokens in the longest source; 0 while a group has no source."""
        return self._longest_source() or 0

    def _longest_source(self) -> int | None:
        groups = self._table.groups
        lengths = [group.source_seqlen for group in (groups[self._first :] if self._first else groups)]
        return max(lengths) if min(lengths, default=-1) >= 0 else None

    @property
    def num_blocks(self) -> int:
        """The number of blocks, including the null block."""
        return self._layers[0][0].shape[0]

    @property
    def free_blocks(self) -> int:
        """The number of blocks that no group holds. Blocks that forks no longer use are collected if these run out."""
        return self._table.pool.num_free

    @property
    def token_bytes(self) -> int:
        """The size in bytes of one token's keys and values in all layers."""
        return 2 * sum(map(math.prod, self.layer_heads)) * self.k.element_size()

    def blocks_of(self, num_tokens: int) -> int:
        """Returns the number of blocks that num_tokens of a row or of a source fill."""
        return blocks_of(num_tokens, self.block_size)

    def blocks_needed(self, num_tokens: int) -> int:
        """Returns the number of blocks that `begin` would take. If fewer are free, it first collects those of forks."""
        blocks = self._table.blocks_needed(self._begin, num_tokens)
        if blocks > self.free_blocks:
            self._table.collect()
        return blocks

    @property
    def seqlens(self) -> Tensor:
        """The number of tokens in each row, (num_rows,) int32 on the cache's device. Do not write to it."""
        return self._on_device.seqlens[self._begin : self._table.num_rows]

    def positions(self, num_tokens: int) -> Tensor:
        """Returns the positions of the next tokens of each row, (num_rows, num_tokens) int64."""
        return self.seqlens[:, None] + torch.arange(num_tokens, device=self.k.device)

    # Groups come and go.

    def add(self, num_groups: int = 1, rows: int = 1) -> None:
        """Appends empty groups of `rows` rows each.

        Raises:
            InputError: more than max_rows rows.
        """
        self._table.add(num_groups, rows)
        self._changed("seqlens", "keys")

    def free(self, groups: Sequence[int]) -> None:
        """Removes groups and releases their blocks. Later groups move up.

        Raises:
            InputError: a group doesn't exist or is named twice.
        """
        self._table.free([self._first + group if group >= 0 else group for group in groups])
        self._changed("seqlens", "keys", "slots")

    def fork(self, parents: Sequence[Sequence[int]]) -> None:
        """Makes rows continue from other rows of their group, as in beam search. No token is copied.

        Args:
            parents: one non-empty list for each group: row i of the group continues from its former row parents[i].
                Afterwards the group has one row for each item of the list.

        Raises:
            InputError: parents is not one list of integers for each group, a list is empty, an index is outside the
                group, or there would be more than max_rows rows.
        """
        if self._table.fork(self._first, parents):
            self._changed("seqlens", "keys", "slots")
        else:
            self._changed("slots")

    def rewind(self) -> None:
        """Removes the tokens of all groups; their sources stay."""
        self._table.rewind(self._first)
        self._changed("seqlens")

    def reset(self) -> None:
        """Empties the cache: no groups, no tokens, no sources. The allocated memory stays."""
        self.free(range(self.num_groups))

    def tail(self, first_group: int) -> KVCache:
        """Returns a view of the groups from first_group on, to run new prompts while the other groups wait.

        The view shares all memory with this cache, and is valid until groups before first_group are freed.
        """
        if not 0 <= first_group <= self.num_groups:
            raise InputError(f"expected a first_group from 0 to {self.num_groups}, got {first_group}")
        view = copy.copy(self)
        view._first, view._fits_memory = self._first + first_group, False
        return view

    def take_slots(self, num_tokens: int) -> Ints:
        """Takes blocks permanently, for tokens that belong to no group. Returns (num_tokens,) their slots.

        Raises:
            CacheFullError: fewer blocks are free than these tokens need. No block is taken.
        """
        return self._table.take_slots(num_tokens)

    # Tokens are added.

    def check_rows(self, num_rows: int) -> None:
        """Raises InputError unless a batch has as many rows as the cache."""
        if num_rows != self.num_rows:
            raise InputError(f"expected the {self.num_rows} rows of the cache, got a batch of {num_rows}")

    def check_room(self, num_tokens: int) -> None:
        """Raises InputError if num_tokens more tokens would make a row longer than max_seqlen."""
        self._table.check_room(self.length_bound, num_tokens)

    def begin(
        self, num_tokens: int, seqlens: Sequence[int] | Tensor | None = None, is_packed: bool = False
    ) -> StepTables:
        """Begins a step: reserves the slots of the next tokens of every row.

        Args:
            num_tokens: the most tokens that a row gets.
            seqlens: (num_rows,) the number of tokens that each row gets, the same in each group; None: num_tokens.
                Padded prompts are written whole, and the next tokens overwrite their padding. If it is a tensor on a
                GPU, the host waits for it.
            is_packed: whether the tokens are packed prompts of these seqlens, for rows that are empty.

        Returns:
            The step. Pass `step.layer(i)` to layer i as `cache=`.

        Raises:
            CacheFullError: fewer blocks are free than the step needs. No block is taken.
            InputError: a row would be longer than max_seqlen, or seqlens differ inside a group. In compiled code: the
                caller has not begun a step of num_tokens tokens.
        """
        table, tables, begin, end = self._table, self._on_device, self._begin, self._table.num_rows
        is_recorded = self._is_recorded()
        counts = packed_slots = batch_index = source_slots = source_seqlens = None
        if is_recorded:
            longest = self._recorded_step().longest
            if seqlens is not None or num_tokens != self._recorded_step().num_tokens:
                raise InputError(f"expected num_tokens as in the step that the caller has begun, got {num_tokens}")
        else:
            counts, longest = None if seqlens is None else host_lengths(seqlens), table.longest(begin)
            table.check_room(longest, num_tokens)
            if counts is not None:
                table.check_counts(begin, counts, num_tokens)
            if table.reserve(begin, counts if is_packed and counts is not None else num_tokens):
                self._changed("slots")
        if is_packed and counts is not None:
            row, position = spread(counts)
            row += begin
            packed_slots = self._place(table.slots[row, position].astype(np.int64))
            batch_index = self._place(table.keys[row])
        # A recorded step reads all columns. Any other step reads only the blocks that it needs.
        width, source_width = tables.slots.shape[1], tables.source_slots.shape[1]
        longest_source = self._longest_source()
        if not is_recorded:
            width, source_width = (
                blocks_of(tokens, self.block_size) * self.block_size
                for tokens in (longest + num_tokens, longest_source or 0)
            )
        if longest_source is not None:
            source_slots, source_seqlens = tables.source_slots[:, :source_width], tables.source_seqlens
            batch_index = tables.keys[begin:end] if batch_index is None else batch_index
        k, v = (self.k, self.v) if is_recorded and not self.has_unlike_layers else self._layers
        slots = tables.slots[begin:end, :width], tables.seqlens[begin:end], packed_slots, source_slots, source_seqlens
        step = StepTables(k, v, *slots, batch_index, num_tokens, counts, begin, longest)
        if not is_recorded:
            self._begun[:] = [step]
        return step

    def commit(self, step: StepTables) -> None:
        """Ends a step whose keys and values are written, and adds its tokens to the lengths.

        Raises:
            InputError: the step is not the one that began last, or the cache has changed since.
        """
        if self._is_recorded():
            return
        if not self._begun or self._begun[0] is not step:
            raise InputError("expected the step that was begun last, before the cache changed in any other way")
        self._table.commit(step.first_row, step.num_tokens if step.counts is None else step.counts)
        self._changed("seqlens")

    def _recorded_step(self) -> StepTables:
        # The caller does the host's part of the step outside the recording, before each replay.
        if not self._begun:
            raise InputError("expected KVCache.begin before each compiled step, and KVCache.commit after it")
        return self._begun[0]

    def _is_recorded(self) -> bool:
        return torch.compiler.is_compiling() or (self.k.is_cuda and torch.cuda.is_current_stream_capturing())

    @torch.no_grad()
    def set_memory(
        self,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        seqlens: Sequence[int] | Tensor | None = None,
    ) -> None:
        """Stores the cross-attention's keys and values for the groups without a source, one source for each group.

        Args:
            keys, values: one tensor a layer, padded (sources, source_seqlen, num_kv_heads, head_dim) or packed (total,
                num_kv_heads, head_dim).
            seqlens: (sources,) the number of real tokens in each source; None: all (padded only).

        Raises:
            InputError: the sizes differ from the cache's, or the number of sources from that of groups without one.
            CacheFullError: fewer blocks are free than the sources need. No block is taken.
        """
        lengths = self._memory_lengths(keys, values, seqlens)
        groups = [i for i in range(self._first, len(self._table.groups)) if self._table.groups[i].source_seqlen < 0]
        if len(groups) != len(lengths):
            raise InputError(
                f"expected a source for each of the {len(groups)} groups without one, got {len(lengths)}: rows that "
                "share a source are one group"
            )
        if lengths.max(initial=0) > self.max_source_seqlen:
            self._widen(int(lengths.max()))
        slots = self._place(self._table.set_sources(groups, lengths).astype(np.int64))
        real = None
        if keys[0].dim() == 4:
            source, position = spread(lengths)
            real = self._place(source * keys[0].shape[1] + position)
        for store, layers in ((self.k, keys), (self.v, values)):
            for layer, x in zip(store, layers, strict=True):
                x = x[: len(slots)] if real is None else x.flatten(0, 1)[real]
                layer.flatten(0, 1).index_copy_(0, slots, x.to(layer.dtype))
        self._changed("source_seqlens", "source_slots")

    def _memory_lengths(
        self, keys: Sequence[Tensor], values: Sequence[Tensor], seqlens: Sequence[int] | Tensor | None
    ) -> Ints:
        if len(keys) != self.num_layers or len(values) != self.num_layers:
            raise InputError(f"expected keys and values of {self.num_layers} layers, got {len(keys)} and {len(values)}")
        shape, sizes = keys[0].shape, self.k.shape[-2:]
        if len(shape) not in (3, 4) or shape[-2:] != sizes or any(x.shape != shape for x in (*keys, *values)):
            raise InputError(
                f"expected keys and values of (sources, source_seqlen, {sizes[0]}, {sizes[1]}) or (total, {sizes[0]}, "
                f"{sizes[1]}), the same for all layers, got {tuple(shape)}"
            )
        padded = len(shape) == 4
        if seqlens is None and not padded:
            raise InputError("expected seqlens along with packed keys and values")
        lengths = np.full(shape[0], shape[1], np.int32) if seqlens is None else host_lengths(seqlens)
        most, total = lengths.max(initial=0), lengths.sum()
        if lengths.min(initial=0) < 0 or (most > shape[1] or len(lengths) != shape[0] if padded else total > shape[0]):
            raise InputError(f"expected seqlens that keys of shape {tuple(shape)} have, got {lengths.tolist()}")
        return lengths

    def _widen(self, source_seqlen: int) -> None:
        groups = self._table.groups
        reserved = sum(len(group.blocks) for group in groups)
        is_empty = self.length_bound == 0 and all(group.source_seqlen < 0 for group in groups)
        if not (self._fits_memory and is_empty and self.free_blocks + reserved == self.num_blocks - 1):
            raise InputError(
                f"expected sources of at most max_source_seqlen = {self.max_source_seqlen} tokens, got one of "
                f"{source_seqlen}: make the cache with a larger one"
            )
        self._allocate(source_seqlen)
        for group in groups:
            self.add(rows=group.size)

    # The device's tables.

    @property
    def _begin(self) -> int:
        return self._table.row_of(self._first) if self._first else 0

    def _changed(self, *names: str) -> None:
        """Ends the step that has begun, if any, and sends these tables to the device."""
        self._begun.clear()
        if self._is_host(self.k.device):
            return
        table, rows = self._table, self._table.num_rows
        sources = max((group.key + 1 for group in table.groups), default=0)
        # Only the part of each table that is in use, not its whole capacity.
        used: dict[str, tuple[slice, ...]] = {
            "seqlens": (slice(rows),),
            "keys": (slice(rows),),
            "slots": (slice(rows), slice(int(table.capacities[:rows].max(initial=0)))),
            "source_seqlens": (slice(sources),),
            "source_slots": (slice(sources), slice(int(table.source_seqlens[:sources].max(initial=0)))),
        }
        for name in names:
            of_host, of_device = getattr(table, name), getattr(self._on_device, name)
            of_device[used[name]].copy_(self._staged(of_host[used[name]]), non_blocking=True)

    def _place(self, array: npt.NDArray[np.integer]) -> Tensor:
        return self._staged(array).to(self.k.device, non_blocking=True)

    def _staged(self, array: npt.NDArray[np.integer]) -> Tensor:
        # A pinned copy, so that the host may write to the tables during the upload: torch reuses the copy's memory only
        # after the device has finished with it.
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor.pin_memory() if self.k.is_cuda else tensor


def host_lengths(seqlens: Sequence[int] | Tensor) -> Ints:
    """Returns lengths as an array on the host. If they are a tensor on a GPU, the host waits for it.

    Raises:
        InputError: the lengths are not one-dimensional integers.
    """
    values = seqlens.cpu().numpy() if isinstance(seqlens, Tensor) else np.asarray(seqlens)
    if values.ndim != 1 or not (values.dtype.kind in "iu" or not len(values)):
        raise InputError(f"expected seqlens of shape (rows,) with integers, got {values.dtype} {values.shape}")
    return values.astype(np.int32)
