"""The tables that map each token to its slot in a `KVCache`: numpy arrays on the host.

A slot holds one token: slot s is in block s // block_size. Each row has a table of slots, one for each
position. These invariants hold between any two calls:

- Positions before a row's length hold its tokens. Rows of a group may name the same slots there.
- Positions from a row's length to its capacity are reserved for its writes: no other row names their slots.
- Entries at positions from a row's capacity on are undefined and are not read.
- A group holds the blocks that its rows name before their capacities, and the blocks of its source. After a fork it may
  hold blocks that none of its rows names any more, until they are collected.
- All rows of a group have the same length.

A decode step writes into slots that the table names already, and advances the lengths; the table changes once a block.
A row that continues from another row copies table entries, not tokens, and keeps the slots that it will write to.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fastformer.cache.block_pool import BlockPool, Ints
from fastformer.errors import InputError

Count = TypeVar("Count", int, Ints)


class Tables(NamedTuple):
    """The tables as int32 tensors in one contiguous allocation; ops read all of it except the slots of free rows.

    Attributes:
        seqlens: (max_rows,) the number of tokens in each row.
        keys: (max_rows,) the source that each row reads, as a row index into source_slots.
        source_seqlens: (max_rows,) the number of tokens in each source.
        slots: (max_rows, max_seqlen in whole blocks) the slot of each position of a row.
        source_slots: (max_rows, max_source_seqlen in whole blocks) the slot of each token of a source.
    """

    seqlens: Tensor
    keys: Tensor
    source_seqlens: Tensor
    slots: Tensor
    source_slots: Tensor

    @classmethod
    def zeros(cls, max_rows: int, width: int, source_width: int, device: torch.device | str) -> Tables:
        """Returns tables of these sizes, filled with 0."""
        sizes = [max_rows] * 3 + [max_rows * width, max_rows * source_width]
        seqlens, keys, source_seqlens, slots, sources = torch.zeros(sum(sizes), dtype=torch.int32, device=device).split(
            sizes
        )
        return cls(seqlens, keys, source_seqlens, slots.view(max_rows, width), sources.view(max_rows, source_width))


@dataclass(eq=False)
class Group:
    """Rows side by side that decode one request.

    Attributes:
        size: the number of its rows.
        key: the row of the source tables that belongs to the group for its lifetime.
        source_seqlen: the number of tokens in its source; -1 while it has no source.
        blocks, source_blocks: the blocks that it holds for its rows and for its source.
        is_forked: whether it may hold blocks that none of its rows names.
    """

    size: int
    key: int
    source_seqlen: int = -1
    blocks: list[int] = field(default_factory=list)
    source_blocks: list[int] = field(default_factory=list)
    is_forked: bool = False


class BlockTable:
    """Groups of rows, and the slots of their tokens and sources.

    Args:
        tables: zeros, on the host.
        max_seqlen, max_source_seqlen, num_blocks, block_size: as in `KVCache`.

    Attributes:
        seqlens, keys, source_seqlens, slots, source_slots: the tables as arrays.
        capacities: (max_rows,) the capacity of each row; see the module.
        groups: the groups, in the order of their rows.
        num_rows: the number of rows in all groups.
        pool: the pool of blocks.
    """

    def __init__(
        self, tables: Tables, max_seqlen: int, max_source_seqlen: int, num_blocks: int, block_size: int
    ) -> None:
        self.max_seqlen, self.max_source_seqlen, self.block_size = max_seqlen, max_source_seqlen, block_size
        self.seqlens, self.keys, self.source_seqlens, self.slots, self.source_slots = (x.numpy() for x in tables)
        self.max_rows = max_rows = len(self.seqlens)
        self.capacities = np.zeros(max_rows, np.int32)
        self.groups: list[Group] = []
        self.num_rows = 0
        self.pool = BlockPool(num_blocks)
        self._by_key: dict[int, Group] = {}
        self._free_keys = list(range(max_rows))[::-1]
        self._starts = np.zeros(max_rows, np.int32)  # for each row, the first row of its group
        self._sizes = np.zeros(max_rows, np.int32)  # for each row, the number of rows in its group

    def row_of(self, group: int) -> int:
        """Returns the index of a group's first row."""
        return sum(group_rows.size for group_rows in self.groups[:group])

    def longest(self, begin: int) -> int:
        """Returns the number of tokens in the longest row from row `begin` on."""
        return int(self.seqlens[begin : self.num_rows].max(initial=0))

    # Groups come and go.

    def add(self, num_groups: int, rows: int) -> None:
        """Appends empty groups; see `KVCache.add`."""
        begin, end = self.num_rows, self.num_rows + num_groups * rows
        if num_groups < 0 or rows < 1 or end > self.max_rows:
            raise InputError(
                f"expected num_groups groups of 1 row or more, max_rows = {self.max_rows} rows in all, got "
                f"{num_groups} of {rows}, in addition to {begin}"
            )
        self.seqlens[begin:end] = self.capacities[begin:end] = 0
        self._regroup(self.groups + [Group(rows, self._free_keys.pop()) for _ in range(num_groups)])

    def free(self, groups: Sequence[int]) -> None:
        """Removes groups; see `KVCache.free`."""
        leaving = set(groups)
        if len(leaving) != len(groups) or (leaving and not 0 <= min(leaving) <= max(leaving) < len(self.groups)):
            raise InputError(f"expected distinct groups of the {len(self.groups)}, got {list(groups)}")
        if not leaving:
            return
        for group in (self.groups[index] for index in leaving):
            self.pool.release(np.array(group.blocks + group.source_blocks, np.intp))
            self._free_keys.append(group.key)
        is_leaving = np.repeat([index in leaving for index in range(len(self.groups))], self._group_sizes())
        staying = np.flatnonzero(~is_leaving)
        end, width = len(staying), int(self.capacities[staying].max(initial=0))
        self.slots[:end, :width] = self.slots[staying, :width]
        self.seqlens[:end], self.capacities[:end] = self.seqlens[staying], self.capacities[staying]
        self._regroup([group for index, group in enumerate(self.groups) if index not in leaving])

    def rewind(self, first: int) -> None:
        """Removes the tokens of the groups from `first` on."""
        for group in self.groups[first:]:
            self.pool.release(np.array(group.blocks, np.intp))
            group.blocks, group.is_forked = [], False
        rows = slice(self.row_of(first), self.num_rows)
        self.seqlens[rows] = self.capacities[rows] = 0

    def fork(self, first: int, parents: Sequence[Sequence[int]]) -> bool:
        """Makes row i of each group from `first` on continue from its row parents[group][i]; see `KVCache.fork`.

        Returns:
            Whether the size of a group has changed.
        """
        flat, sizes = self._read_parents(first, parents)
        begin, end, before = self.row_of(first), self.num_rows, self._group_sizes()[first:]
        if sizes == before:
            flat += self._starts[begin:end]
            moved = np.flatnonzero(flat != np.arange(begin, end))
            history, moved = flat[moved], moved + begin
            seqlens = self.seqlens[moved]
            width = int(seqlens.max(initial=0))
            self._adopt(moved, self.slots[history, :width], seqlens)
            return False
        starts = np.cumsum([begin, *before[:-1]])
        history = flat + np.repeat(starts, sizes)
        index = np.arange(len(flat)) - np.repeat(np.cumsum(sizes) - sizes, sizes)  # of each row in its group
        is_new = index >= np.repeat(before, sizes)
        place = np.where(is_new, history, index + np.repeat(starts, sizes))  # the row whose slots it continues to write
        seqlens = self.seqlens[history]
        capacities = np.where(is_new, seqlens, self.capacities[place])
        width = int(capacities.max(initial=0))
        is_history = np.arange(width) < seqlens[:, None]
        rows = slice(begin, begin + len(flat))
        self.slots[rows, :width] = np.where(is_history, self.slots[history, :width], self.slots[place, :width])
        self.seqlens[rows], self.capacities[rows] = seqlens, capacities
        for group, size in zip(self.groups[first:], sizes, strict=True):
            group.size, group.is_forked = size, True
        self._regroup(self.groups)
        self.collect()
        return True

    def _read_parents(self, first: int, parents: Sequence[Sequence[int]]) -> tuple[Ints, list[int]]:
        before = self._group_sizes()
        expected = f"expected parents of {len(before) - first} groups, one or more each, as lists of integers"
        try:
            sizes = [len(rows) for rows in parents]
            # Python's array converts to numpy faster than any other type, and it rejects floats.
            flat = np.array(array("i", [*chain.from_iterable(parents)]))
        except (TypeError, OverflowError) as error:
            raise InputError(f"{expected}, got {parents!r:.200}") from error
        if len(sizes) != len(before) - first or min(sizes, default=1) < 1:
            raise InputError(f"{expected}, got {parents!r:.200}")
        begin = self.row_of(first)
        limits = self._sizes[begin : self.num_rows] if sizes == before[first:] else np.repeat(before[first:], sizes)
        if ((flat < 0) | (flat >= limits)).any():
            raise InputError(f"expected parents inside of groups of {before[first:]}, got {parents!r:.200}")
        if begin + len(flat) > self.max_rows:
            raise InputError(f"expected parents of max_rows = {self.max_rows} rows at most, got {begin + len(flat)}")
        return flat, sizes

    def _adopt(self, rows: npt.NDArray[np.integer], slots: Ints, seqlens: Ints) -> None:
        # The rows copy these entries up to seqlens; each keeps its own slots for the tokens that it writes next.
        width = slots.shape[1]
        if seqlens.min(initial=width) < width:
            slots = np.where(np.arange(width) < seqlens[:, None], slots, self.slots[rows, :width])
        self.slots[rows, :width] = slots
        for key in set(self.keys[rows].tolist()):
            self._by_key[key].is_forked = True

    def collect(self, groups: Collection[Group] | None = None) -> None:
        """Releases the blocks that forks no longer use, in all groups or in the given ones."""
        start = 0
        for group in self.groups:
            if group.is_forked and (groups is None or group in groups):
                rows = slice(start, start + group.size)
                capacities = self.capacities[rows, None]
                position = np.arange(capacities.max())
                is_named = np.zeros(self.pool.num_blocks, np.bool_)
                is_named[self.slots[rows, : len(position)][position < capacities] // self.block_size] = True
                blocks = np.array(group.blocks, np.intp)
                stays = is_named[blocks]
                self.pool.release(blocks[~stays])
                group.blocks, group.is_forked = blocks[stays].tolist(), False
            start += group.size

    def _group_sizes(self) -> list[int]:
        return [group.size for group in self.groups]

    def _regroup(self, groups: list[Group]) -> None:
        self.groups, self._by_key = groups, {group.key: group for group in groups}
        sizes = np.array([group.size for group in groups], np.int32)
        self.num_rows = rows = int(sizes.sum())
        self.keys[:rows] = np.repeat(np.array([group.key for group in groups], np.int32), sizes)
        self._sizes[:rows] = np.repeat(sizes, sizes)
        self._starts[:rows] = np.repeat(np.cumsum(sizes, dtype=np.int32) - sizes, sizes)

    # Tokens are added.

    def check_room(self, longest: int, num_tokens: int) -> None:
        """Raises InputError if num_tokens more tokens would make the longest row longer than max_seqlen."""
        if num_tokens < 0 or longest + num_tokens > self.max_seqlen:
            raise InputError(
                f"expected at most max_seqlen = {self.max_seqlen} tokens a row, got num_tokens = {num_tokens} after "
                f"{longest}: make the cache with a larger max_seqlen"
            )

    def reserve(self, begin: int, num_tokens: int | Ints) -> bool:
        """Reserves slots for num_tokens in each row from row `begin` on. Returns whether entries have changed."""
        rows, due = slice(begin, self.num_rows), self._due(begin, num_tokens)
        if due is None:
            return False
        keys, capacities, size = self.keys[rows], self.capacities[rows], self.block_size
        row, ahead = spread(due)
        self.collect([self._by_key[key] for key in set(keys[row].tolist())])
        blocks = self._allocate(len(row))
        for key, block in zip(keys[row].tolist(), blocks.tolist(), strict=True):
            self._by_key[key].blocks.append(block)
        column = capacities[row] // size + ahead
        slots = blocks[:, None] * size + np.arange(size)
        # A row that a fork made begins in the middle of its first block.
        is_own = column[:, None] * size + np.arange(size) >= capacities[row][:, None]
        by_block = self.slots.reshape(self.max_rows, -1, size)
        by_block[begin + row, column] = np.where(is_own, slots, by_block[begin + row, column])
        self.capacities[rows] = np.where(due > 0, (capacities // size + due) * size, capacities)
        return True

    def blocks_needed(self, begin: int, num_tokens: int) -> int:
        """Returns the number of blocks that `reserve` would take."""
        due = self._due(begin, num_tokens)
        return 0 if due is None else int(due.sum())

    def _due(self, begin: int, num_tokens: int | Ints) -> Ints | None:
        # The number of blocks that each row needs; None if no row needs any.
        rows = slice(begin, self.num_rows)
        capacities: Ints = self.capacities[rows]
        until: Ints = np.add(self.seqlens[rows], num_tokens)
        is_short = until > capacities
        if not is_short.any():
            return None
        return np.where(is_short, blocks_of(until, self.block_size) - capacities // self.block_size, 0)

    def _allocate(self, num_blocks: int) -> Ints:
        if num_blocks > self.pool.num_free:
            self.collect()
        return self.pool.allocate(num_blocks)

    def check_counts(self, begin: int, counts: Ints, num_tokens: int) -> None:
        """Raises InputError unless counts has a valid entry (see `KVCache.begin`) for each row from row `begin` on."""
        starts = self._starts[begin : self.num_rows] - begin
        if counts.shape != starts.shape or (counts != counts[starts]).any():
            sizes = self._group_sizes()
            raise InputError(f"expected equal seqlens within each group, for groups of {sizes}, got {counts}")
        if ((counts < 0) | (counts > num_tokens)).any():
            raise InputError(f"expected seqlens from 0 to num_tokens = {num_tokens}, got {counts}")

    def commit(self, begin: int, num_tokens: int | Ints) -> None:
        """Adds the tokens written into reserved slots to the length of each row from row `begin` on."""
        self.seqlens[begin : self.num_rows] += num_tokens

    def commit_run(self, counts: Ints, parents: npt.NDArray[np.integer]) -> None:
        """Applies several steps of `commit` and `fork` to all rows.

        Args:
            counts: (rows,) the number of steps that count for each row; its later steps are ignored.
            parents: (steps, rows) the row that each row continues from after each step.
        """
        steps, rows = parents.shape
        before, after = self.seqlens[:rows].copy(), self.seqlens[:rows] + counts
        # (steps, rows): for each step and row, the row that wrote the token which now belongs to that row.
        writers = np.empty((steps, rows), np.intp)
        row = np.arange(rows)
        for step in reversed(range(steps)):
            row = writers[step] = parents[step][row]
        position = np.arange(after.max(initial=0))
        step_of = np.clip(position - before[:, None], 0, steps - 1)
        history = writers[step_of, np.arange(rows)[:, None]]
        self._adopt(np.arange(rows), self.slots[history, position], after)
        self.seqlens[:rows] = after

    def set_sources(self, groups: Sequence[int], lengths: Ints) -> Ints:
        """Gives sources to groups without one. Returns (sum of lengths,) the slots of their tokens, concatenated."""
        size, keys = self.block_size, np.array([self.groups[group].key for group in groups], np.intp)
        blocks = blocks_of(lengths, size)
        allocated = self._allocate(int(blocks.sum()))
        firsts = np.cumsum(blocks) - blocks
        source, position = spread(lengths)
        slots = allocated[firsts[source] + position // size] * size + position % size
        self.source_slots[keys[source], position] = slots
        self.source_seqlens[keys] = lengths
        for group, length, group_blocks in zip(groups, lengths.tolist(), np.split(allocated, firsts[1:]), strict=True):
            self.groups[group].source_seqlen, self.groups[group].source_blocks = length, group_blocks.tolist()
        return slots

    def take_slots(self, num_tokens: int) -> Ints:
        """Takes blocks permanently, for tokens that belong to no group. Returns (num_tokens,) their slots."""
        blocks = self._allocate(blocks_of(num_tokens, self.block_size))
        slots = np.add.outer(blocks * self.block_size, np.arange(self.block_size, dtype=np.int32))
        return slots.reshape(-1)[:num_tokens]


def blocks_of(num_tokens: Count, block_size: int) -> Count:
    """Returns the number of blocks that num_tokens fill, rounded up."""
    return (num_tokens + (block_size - 1)) // block_size


def spread(counts: npt.NDArray[np.integer]) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Expands counts into each item's index of its count, and its index within that: [2, 1] -> [0 0 1], [0 1 0]."""
    ends = np.cumsum(counts)
    counter = np.repeat(np.arange(len(counts)), counts)
    return counter, np.arange(len(counter)) - (ends - counts)[counter]
