"""The keys and values that decoding keeps, so that no token is computed twice."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fastformer.cache.block_pool import CacheFullError as CacheFullError
from fastformer.cache.block_table import blocks_of, spread
from fastformer.cache.device_tables import DeviceTables
from fastformer.cache.layer_view import AttentionCache, LayerCache, host_lengths, memory_lengths

BLOCK_SIZE = 16


class KVCache:
    """Keys and values of all layers of a decoder, in blocks. For inference: no gradient flows through it.

    Rows decode together. They belong to groups: the beams or samples of one request, side by side, of one length and
    one source. `add` appends groups, `release` takes them out at any time; both, like `reorder`, move no key and no
    value. Memory is taken block by block as rows grow: tokens that the rows of a group have in common (a prompt, the
    stem of their hypotheses) and the source of a group are stored once.

    A step, which the stacks do by themselves when they are given `cache=`: `reserve` the slots of the next tokens, run
    the layers, which write their keys and values, `advance` the lengths. All bookkeeping is on the host; a GPU gets
    what is new in the tables by one upload a step, into tensors that keep their addresses, and is never waited for. The
    layers see as many columns of the tables as the longest row and the longest source need, in whole blocks. A compiled
    step, and one that a CUDA graph records, is run again when rows are longer: it sees all columns, and holds the
    tensors' part alone: call `reserve` before each.

    Args:
        num_layers, num_kv_heads, head_dim: of the decoder.
        max_rows: rows that decode together.
        max_seqlen: the longest row, in tokens.
        max_source_seqlen: the longest source. None: as long as the memory that is set while nothing is stored.
        num_sources: the sources that num_blocks None makes room for; None: as many as rows.
        num_blocks: what all rows and sources share. Block 0 is nobody's: it stays zero, and stands where a table says
            nothing. None: enough for max_rows rows and num_sources sources of full length, as long as groups don't
            shrink (what a group with few rows left holds may have been written by many).
        block_size: tokens in a block.
        device, dtype: of the keys and values.

    Attributes:
        k, v: (num_layers, num_blocks, block_size, num_kv_heads, head_dim). Pages that were never written cost nothing
            on a CPU.

    Raises:
        ValueError: sizes that are no integers of at least 1.
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
    ) -> None:
        sizes = (num_layers, max_rows, max_seqlen, num_kv_heads, head_dim)
        if not all(isinstance(size, int) for size in sizes) or min(sizes) < 1:
            raise ValueError(
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
                raise ValueError(f"expected {name} to be an integer of at least {least}, got {size!r}")
        self._sizes, self._num_blocks, self._block_size = sizes, num_blocks, block_size
        self._num_sources = max_rows if num_sources is None else num_sources
        self._fits_memory = max_source_seqlen is None
        self._first = 0
        self._packed: tuple[Tensor, Tensor] | None = None
        self._shared: tuple[int, LayerCache] | None = None
        self._placement = torch.empty(0, device=device, dtype=dtype)
        self._allocate(max_source_seqlen or 0)

    def _allocate(self, max_source_seqlen: int) -> None:
        num_layers, max_rows, max_seqlen, num_kv_heads, head_dim = self._sizes
        size = self._block_size
        num_blocks = self._num_blocks
        if num_blocks is None:
            sources = self._num_sources * blocks_of(max_source_seqlen, size)
            num_blocks = 1 + max_rows * blocks_of(max_seqlen, size) + sources
        shape = (num_layers, num_blocks, size, num_kv_heads, head_dim)
        self.k, self.v = self._placement.new_empty(shape), self._placement.new_empty(shape)
        # A kernel may load what lies behind a row's length before it masks it, and 0 * NaN would be NaN.
        self.k[:, 0] = 0
        self.v[:, 0] = 0
        self._on_device = DeviceTables(max_rows, max_seqlen, max_source_seqlen, num_blocks, size, self.k.device)
        self._tables, self._is_cuda = self._on_device.host, self.k.is_cuda
        self._shared = None
        self._cut_at: tuple[tuple[int, ...], tuple[Tensor, ...]] | None = None

    # What there is.

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return self.k.shape[0]

    @property
    def max_rows(self) -> int:
        """The rows that there is room for."""
        return self._tables.max_rows

    @property
    def max_seqlen(self) -> int:
        """The tokens that a row has room for."""
        return self._tables.max_seqlen

    @property
    def max_source_seqlen(self) -> int:
        """The tokens that a source has room for."""
        return self._tables.max_source_seqlen

    @property
    def num_rows(self) -> int:
        """The rows of all groups."""
        return sum(self.group_sizes)

    @property
    def num_groups(self) -> int:
        """The number of groups."""
        return len(self._tables.sizes) - self._first

    @property
    def group_sizes(self) -> list[int]:
        """The rows of each group."""
        return self._tables.sizes[self._first :]

    @property
    def lengths(self) -> list[int]:
        """The tokens in the rows of each group, by what the host knows."""
        tables = self._tables
        tables.settle()
        rows = np.cumsum([0, *tables.sizes])[self._first : -1]
        return tables.seqlens[rows].tolist()

    @property
    def length_bound(self) -> int:
        """The tokens in the longest row; in compiled code, no row has more."""
        if not torch.compiler.is_compiling():
            self._tables.settle()
        if self._first == 0 or torch.compiler.is_compiling():
            return self._tables.longest
        return int(self._tables.seqlens[self._rows()].max(initial=0))

    @property
    def has_memory(self) -> bool:
        """Whether the keys and values of each group's source are there."""
        has_source = self._tables.has_source[self._first :]
        return len(has_source) > 0 and all(has_source)

    @property
    def num_blocks(self) -> int:
        """All blocks, with block 0."""
        return self.k.shape[1]

    @property
    def block_size(self) -> int:
        """The tokens in a block."""
        return self._block_size

    @property
    def token_bytes(self) -> int:
        """What the keys and values of a token take, in all layers."""
        num_layers, _, _, num_kv_heads, head_dim = self.k.shape
        return 2 * num_layers * num_kv_heads * head_dim * self.k.element_size()

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody has. There may be more: what beams left behind is looked for by `sweep`."""
        return self._tables.pool.num_free

    @property
    def longest_source(self) -> int:
        """The tokens of the longest source that is stored."""
        return self._tables.longest_source

    def set_aside(self, num_tokens: int) -> npt.NDArray[np.int32]:
        """Takes blocks for tokens that belong to no group, for good: (num_tokens,) where they are; see `LaneCache`.

        Raises:
            CacheFullError: not as many blocks are free. Nothing is taken.
        """
        return self._tables.set_aside(num_tokens)

    def blocks_of(self, num_tokens: int) -> int:
        """The blocks that num_tokens of a row or of a source fill."""
        return blocks_of(num_tokens, self._block_size)

    def blocks_needed(self, num_tokens: int) -> int:
        """The blocks that `reserve` would take from the free ones."""
        return self._tables.blocks_needed(self._first, num_tokens)

    @property
    def seqlens(self) -> Tensor:
        """(num_rows,) int32, the tokens in each row, on the cache's device. Not to be written."""
        self._upload(slots=False)
        return self._on_device.seqlens[self._rows()]

    @property
    def slot_table(self) -> Tensor:
        """(num_rows, max_seqlen) int32, for `ops.decode_attention`: which token of the cache each position is."""
        self._upload()
        return self._on_device.slots[self._rows()]

    def positions(self, num_tokens: int) -> Tensor:
        """The positions of the next tokens of each row: (num_rows, num_tokens) int64."""
        return self.seqlens[:, None] + torch.arange(num_tokens, device=self.k.device)

    def __getitem__(self, layer: int) -> LayerCache:
        """The part of one layer. What is appended to it must have been reserved."""
        if torch.compiler.is_compiling() or (self._is_cuda and torch.cuda.is_current_stream_capturing()):
            step = self._all_layers(*self._cut(self._rows(), self.max_seqlen, self.max_source_seqlen))
        else:
            # What the layers have in common is found once a step.
            self._tables.settle()
            if self._shared is None or self._shared[0] != self._tables.version:
                self._shared = (self._tables.version, self._all_layers(*self._used_tables()))
            step = self._shared[1]
        k, v, cross = self.k[layer], self.v[layer], step.cross_attention
        return LayerCache(replace(step.self_attention, k=k, v=v), None if cross is None else replace(cross, k=k, v=v))

    def _used_tables(self) -> tuple[Tensor, ...]:
        # In whole blocks, so that they are cut anew once a block.
        size = self._block_size
        longest = blocks_of(self.length_bound + self._tables.reserved, size) * size
        longest_source = blocks_of(self._tables.longest_source, size) * size
        rows = self._rows()
        cut = (rows.start, rows.stop, longest, longest_source)
        if self._cut_at is None or self._cut_at[0] != cut:
            self._cut_at = cut, self._cut(rows, longest, longest_source)
        return self._cut_at[1]

    def _cut(self, rows: slice, width: int, source_width: int) -> tuple[Tensor, ...]:
        tables = self._on_device
        return (
            tables.slots[rows, :width],
            tables.seqlens[rows],
            tables.keys[rows],
            tables.source_slots[:, :source_width],
        )

    def _all_layers(self, slots: Tensor, seqlens: Tensor, keys: Tensor, source_slots: Tensor) -> LayerCache:
        self._upload()
        packed_slots, keys = self._packed or (None, keys)
        is_empty, reserved = self.length_bound == 0, self._tables.reserved
        own = AttentionCache(
            self.k, self.v, slots, seqlens, None, reserved, is_empty=is_empty, packed_slots=packed_slots
        )
        if not self.has_memory:
            return LayerCache(own)
        source_seqlens = self._on_device.source_seqlens
        return LayerCache(own, AttentionCache(self.k, self.v, source_slots, source_seqlens, keys, is_static=True))

    # Groups come and go.

    def add(self, num_groups: int = 1, rows: int = 1) -> None:
        """Appends empty groups of `rows` rows each.

        Raises:
            ValueError: more than max_rows rows.
        """
        self._tables.add(num_groups, rows)

    def release(self, groups: Sequence[int]) -> None:
        """Takes groups out, and their blocks back. Later groups move up.

        Raises:
            ValueError: no such group, or one twice.
        """
        self._tables.release([self._first + group if group >= 0 else group for group in groups])

    def reorder(self, parents: Sequence[Sequence[int]]) -> None:
        """Rows go on from what other rows of their group were: a beam search keeps its survivors. No token is copied.

        Args:
            parents: one list for each group, at least 1 long: its row i goes on from what its row parents[i] was. As
                many rows as the list is long are in the group from now on.

        Raises:
            ValueError: anything but as many lists of integers as there are groups, an empty one, an index outside of
                the group, more than max_rows rows.
        """
        self._tables.reorder(self._first, parents)

    def sweep(self) -> None:
        """Takes back the blocks that beams left behind; `reserve` does it by itself before blocks run out."""
        self._tables.sweep()

    def tail(self, first_group: int) -> KVCache:
        """The groups from first_group on as a cache of their own: runs new prompts while the others wait.

        It shares everything with this one, and holds until groups before first_group leave.
        """
        if not 0 <= first_group <= self.num_groups:
            raise ValueError(f"expected a first_group from 0 to {self.num_groups}, got {first_group}")
        view = copy.copy(self)
        view._first, view._fits_memory = self._first + first_group, False
        view._packed = view._shared = None
        return view

    def rewind(self) -> None:
        """Forgets the tokens of all groups; their sources stay."""
        self._tables.rewind(self._first)

    def reset(self) -> None:
        """Empties the cache: no groups, no tokens, no sources; what was allocated stays."""
        self.release(range(self.num_groups))

    # Tokens are added.

    def check_rows(self, num_rows: int) -> None:
        """Raises ValueError for a batch of another number of rows than the cache has."""
        if num_rows != self.num_rows:
            raise ValueError(f"expected the {self.num_rows} rows of the cache, got a batch of {num_rows}")

    def check_room(self, num_tokens: int) -> None:
        """Raises ValueError when rows would be longer than max_seqlen with `num_tokens` more."""
        self._tables.check_room(self.length_bound, num_tokens)

    def reserve(self, num_tokens: int, seqlens: Sequence[int] | Tensor | None = None) -> None:
        """Takes the blocks for the next tokens of every row. The stacks call it; a lone layer's caller calls it.

        Args:
            num_tokens: the most tokens that a row gets. Ahead of need is allowed: what `advance` leaves stays there.
            seqlens: (num_rows,) the tokens of packed prompts, where every row is empty.

        Raises:
            CacheFullError: not as many blocks are free. Nothing is taken.
            ValueError: a row would be longer than max_seqlen. Nothing is taken. In compiled code: nothing is reserved.
        """
        tables = self._tables
        if torch.compiler.is_compiling():
            if seqlens is not None or tables.pending or tables.reserved < num_tokens or tables.reserved_from:
                raise ValueError("expected KVCache.reserve before each compiled step, for all its tokens")
            return
        counts = None if seqlens is None else host_lengths(seqlens)
        self._on_device.reserve(self._first, num_tokens, counts)
        self._packed = None
        if counts is not None:
            begin = tables.row_of(self._first)
            row, position = spread(counts)
            row += begin
            place = self._on_device.place
            self._packed = place(tables.slots[row, position].astype(np.int64)), place(tables.keys[row])
        self._upload()

    def advance(self, num_tokens: int, seqlens: Sequence[int] | Tensor | None = None) -> None:
        """Counts tokens that were just appended. The stacks call it; a lone layer's caller calls it.

        Args:
            num_tokens: the tokens appended to each row.
            seqlens: (num_rows,) the real ones among them where groups differ (padded or packed prompts); what was
                written behind them is overwritten by the next tokens. A tensor on a GPU is waited for.

        Raises:
            ValueError: more than was reserved; different lengths inside a group.
        """
        tables = self._tables
        if torch.compiler.is_compiling():
            # The host catches up when it is next asked; rows of different lengths it could not tell apart.
            if seqlens is not None:
                raise ValueError("expected prompts of different lengths outside of compiled code")
            tables.pending += num_tokens
            return
        counts = None if seqlens is None else host_lengths(seqlens)
        self._on_device.advance(self._first, num_tokens, counts)
        self._packed = None

    @torch.no_grad()
    def set_memory(
        self,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        seqlens: Sequence[int] | Tensor | None = None,
    ) -> None:
        """Stores the cross-attention's keys and values of the groups that have none yet, one source for each group.

        Args:
            keys, values: one tensor a layer, padded (sources, source_seqlen, num_kv_heads, head_dim) or packed (total,
                num_kv_heads, head_dim).
            seqlens: (sources,) real tokens of each source; None: all (padded only).

        Raises:
            ValueError: other sizes than the cache has, or another number of sources than groups without one.
            CacheFullError: not as many blocks are free. Nothing is taken.
        """
        lengths = memory_lengths(keys, values, seqlens, self.k)
        tables = self._tables
        groups = [self._first + i for i, there in enumerate(tables.has_source[self._first :]) if not there]
        if len(groups) != len(lengths):
            raise ValueError(
                f"expected a source for each of the {len(groups)} groups without one, got {len(lengths)}: rows that "
                "share a source are one group"
            )
        if lengths.max(initial=0) > tables.max_source_seqlen:
            self._widen(int(lengths.max()))
        slots = self._on_device.place(self._tables.set_sources(groups, lengths).astype(np.int64))
        real = None
        if keys[0].dim() == 4:
            source, position = spread(lengths)
            real = self._on_device.place(source * keys[0].shape[1] + position)
        for stored, given in ((self.k, keys), (self.v, values)):
            for layer, x in zip(stored, given, strict=True):
                x = x[: len(slots)] if real is None else x.flatten(0, 1)[real]
                layer.flatten(0, 1).index_copy_(0, slots, x.to(layer.dtype))

    def _widen(self, source_seqlen: int) -> None:
        tables = self._tables
        if not self._fits_memory or self.free_blocks < self.num_blocks - 1:
            raise ValueError(
                f"expected sources of at most max_source_seqlen = {tables.max_source_seqlen} tokens, got one of "
                f"{source_seqlen}: make the cache with a larger one"
            )
        self._allocate(source_seqlen)
        for rows in tables.sizes:
            self.add(rows=rows)

    def _rows(self) -> slice:
        return slice(self._tables.row_of(self._first), self._tables.num_rows)

    def _upload(self, slots: bool = True) -> None:
        # Compiled code reads what `reserve` has uploaded before it.
        if not torch.compiler.is_compiling():
            self._on_device.upload(slots)
