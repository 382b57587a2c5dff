"""Which block of a `KVCache` holds which token: tables and a free list on the host, in numpy, apart from any tensor.

A block is room for a few neighbouring positions of one row. History (the positions before a row's length) may be shared
by the rows of a group, position by position; what a row writes next goes to a block of its own. So a reordering copies
table entries and no token, and a block is free again when no row of its group names it any more.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from fastformer.cache.block_pool import BlockPool, Bools, Ints

Count = TypeVar("Count", int, Ints)


class BlockTables:
    """The tables, lengths and free blocks of all groups. Methods take the first group that they speak of.

    Args:
        max_rows, max_seqlen, max_source_seqlen, num_blocks, block_size: as in `KVCache`.
        memory: (at least the last of `ends`,) int32: where the tables that ops read are kept.

    Attributes:
        seqlens: (max_rows,) the tokens of each row.
        keys: (max_rows,) the source that each row reads, a row of `source_slots`; what names its group for life.
        slots: (max_rows, max_seqlen) the token of the cache at each position of a row; 0 where there is none.
        source_seqlens: (max_rows,); source_slots: (max_rows, max_source_seqlen) the same of the sources, by key.
        sizes: the rows of each group. group_keys, has_source: likewise, one entry a group.
        reserved: the tokens for which every row from `reserved_from` (a group) on has its slots in the table.
        longest: no row has more tokens. pending: those that compiled code has appended and nobody has counted yet.
        used: no row has an entry in the table from here on. longest_source: no source has more tokens.
        rows_changed, slots_changed, sources_changed: seqlens or keys, slots, or those of sources have been written to
            since these were last set to False. version: how often anything has changed.
    """

    def __init__(
        self, max_rows: int, max_seqlen: int, max_source_seqlen: int, num_blocks: int, block_size: int, memory: Ints
    ) -> None:
        self.max_rows, self.max_seqlen, self.max_source_seqlen = max_rows, max_seqlen, max_source_seqlen
        self.block_size = block_size
        memory[:] = 0
        ends = self.ends(max_rows, max_seqlen, max_source_seqlen)
        self.seqlens, self.keys, slots, self.source_seqlens, sources = np.split(memory[: ends[-1]], ends[:-1])
        self.slots = slots.reshape(max_rows, max_seqlen)
        self.source_slots = sources.reshape(max_rows, max_source_seqlen)
        self.sizes: list[int] = []
        self.group_keys: list[int] = []
        self.has_source: list[bool] = []
        self._free_keys = list(range(max_rows))[::-1]
        # Of each row: where its group begins and how many rows it has, the blocks that it writes to (one for each
        # block_size positions), and how many of them it has been given or will never need.
        self._start = np.zeros(max_rows, np.int32)
        self._size = np.zeros(max_rows, np.int32)
        self._own = np.zeros((max_rows, blocks_of(max_seqlen, block_size)), np.int32)
        self._given = np.zeros(max_rows, np.int32)
        # A group has the blocks of its tokens by its key, those of its source by max_rows + key; the last owner has
        # what was set aside.
        self.pool = BlockPool(num_blocks, 2 * max_rows + 1)
        self._reordered = np.zeros(max_rows, bool)  # by key: dead blocks are possible
        # While rows take one token at a time inside their blocks: the last slot of each, how many steps more may be
        # taken like this, and how many when what is reserved has been used.
        self._next = np.zeros(max_rows, np.int32)
        self._every = np.arange(max_rows)
        self._steps = self._steps_left = 0
        self.used = self.longest_source = 0
        self._ahead = self._scattered = False  # entries behind the lengths: of the last reservation, of earlier ones
        self.reserved = self.reserved_from = self.longest = self.pending = 0
        self._counts: Ints | None = None
        self.rows_changed = self.slots_changed = self.sources_changed = True
        self.version = 0

    @staticmethod
    def ends(max_rows: int, max_seqlen: int, max_source_seqlen: int) -> list[int]:
        """Where seqlens, keys, slots, source_seqlens and source_slots end in the memory."""
        sizes = (max_rows, max_rows, max_rows * max_seqlen, max_rows, max_rows * max_source_seqlen)
        return list(accumulate(sizes))

    @property
    def num_rows(self) -> int:
        """The rows of all groups."""
        return sum(self.sizes)

    def row_of(self, group: int) -> int:
        """The first row of a group."""
        return sum(self.sizes[:group])

    def settle(self) -> None:
        """Counts what compiled code has appended."""
        if self.pending:
            appended, self.pending = self.pending, 0
            self.advance(self.reserved_from, appended)

    # Groups come and go.

    def add(self, num_groups: int, rows: int) -> None:
        """Appends empty groups."""
        self.settle()
        begin = self.num_rows
        end = begin + num_groups * rows
        if num_groups < 0 or rows < 1 or end > self.max_rows:
            raise ValueError(
                f"expected to add groups of 1 row or more, {self.max_rows} rows in all; got {num_groups} of {rows} "
                f"behind {begin}"
            )
        self._clear_ahead()
        keys = [self._free_keys.pop() for _ in range(num_groups)]
        self.sizes += [rows] * num_groups
        self.group_keys += keys
        self.has_source += [False] * num_groups
        self.seqlens[begin:end] = 0
        self._given[begin:end] = 0
        self._describe_rows()

    def release(self, groups: Sequence[int]) -> None:
        """Takes groups out and their blocks back; later groups move up."""
        self.settle()
        leaving = set(groups)
        if len(leaving) != len(groups) or (leaving and not 0 <= min(leaving) <= max(leaving) < len(self.sizes)):
            raise ValueError(f"expected different groups out of {len(self.sizes)}, got {list(groups)}")
        if not leaving:
            return
        keys = np.array([self.group_keys[group] for group in leaving])
        self.pool.give_back(np.concatenate((keys, self.max_rows + keys)))
        self._free_keys += keys.tolist()
        self._reordered[keys] = False
        self.source_seqlens[keys] = 0
        self.source_slots[keys, : self.longest_source] = 0
        self.longest_source = int(self.source_seqlens.max(initial=0))
        self.sources_changed = True
        rows = np.flatnonzero(~np.isin(self.keys[: self.num_rows], keys))
        staying = [group for group in range(len(self.sizes)) if group not in leaving]
        sizes = [self.sizes[group] for group in staying]
        self.group_keys = [self.group_keys[group] for group in staying]
        self.has_source = [self.has_source[group] for group in staying]
        self._move(rows, rows, sizes)

    def reorder(self, first: int, parents: Sequence[Sequence[int]]) -> None:
        """Row i of a group goes on from what its row parents[group][i] was."""
        self.settle()
        wanted = f"expected parents of {len(self.sizes) - first} groups, one or more each, as lists of integers"
        try:
            sizes = [len(rows) for rows in parents]
            # Of what numpy makes arrays, an array of Python's alone refuses floats, and it is the fastest.
            flat = np.array(array("i", [*chain.from_iterable(parents)]))
        except (TypeError, OverflowError) as error:
            raise ValueError(f"{wanted}, got {parents!r:.200}") from error
        if len(sizes) != len(self.sizes) - first or min(sizes, default=1) < 1:
            raise ValueError(f"{wanted}, got {parents!r:.200}")
        begin, end = self.row_of(first), self.num_rows
        same = sizes == self.sizes[first:]
        limits = self._size[begin:end] if same else np.repeat(self.sizes[first:], sizes)
        if ((flat < 0) | (flat >= limits)).any():
            raise ValueError(f"expected parents inside of groups of {self.sizes[first:]}, got {parents!r:.200}")
        if same:
            flat += self._start[begin:end]
            moved = np.flatnonzero(flat != np.arange(begin, end)) + begin
            if len(moved):
                self._clear_ahead()
                history = flat[moved - begin]
                width = int(self.seqlens[moved].max())
                self.slots[moved, :width] = self.slots[history, :width]
                self._reordered[self.keys[moved]] = True
                self.reserved, self.slots_changed = 0, True
                self.version += 1
            return
        if begin + len(flat) > self.max_rows:
            raise ValueError(f"expected parents of at most {self.max_rows} rows in all, got {begin + len(flat)}")
        before = self.sizes[first:]
        starts = list(accumulate(before, initial=begin))[:-1]
        flat += np.repeat(starts, sizes).astype(np.int32)
        places = [
            start + row if row < size else -1
            for start, size, new_size in zip(starts, before, sizes, strict=True)
            for row in range(new_size)
        ]
        ahead = np.arange(begin)
        self._move(np.concatenate((ahead, flat)), np.concatenate((ahead, places)), self.sizes[:first] + sizes)
        which = np.zeros(self.max_rows, bool)
        which[self.group_keys[first:]] = True
        self._sweep(which)

    def _move(self, history: npt.NDArray[np.integer], places: npt.NDArray[np.integer], sizes: list[int]) -> None:
        # Row i gets the history of row history[i] and the blocks to write to of row places[i], or none yet for -1.
        self._clear_ahead()
        before, after, used = self.num_rows, len(history), self.used
        self.slots[:after, :used] = self.slots[history, :used]
        self.slots[after:before, :used] = 0
        self.seqlens[:after] = self.seqlens[history]
        fresh = places < 0
        self._own[:after] = self._own[places]
        self._own[:after][fresh] = 0
        self._own[after:before] = 0
        self._given[:after] = np.where(fresh, self.seqlens[:after] // self.block_size, self._given[places])
        self.sizes = sizes
        self._describe_rows()
        self.used = self.longest

    def _clear_ahead(self) -> None:
        # What was reserved and not used: entries that mean nothing name block 0, whose numbers are finite.
        if self._ahead or self._scattered:
            rows = slice(0, self.num_rows)
            self.slots[rows, : self.used][np.arange(self.used) >= self.seqlens[rows, None]] = 0
            self._ahead = self._scattered = False

    def _describe_rows(self) -> None:
        rows = self.num_rows
        sizes = np.array(self.sizes, np.int32)
        self.keys[:rows] = np.repeat(np.array(self.group_keys, np.int32), sizes)
        self._size[:rows] = np.repeat(sizes, sizes)
        self._start[:rows] = np.repeat(np.cumsum(sizes) - sizes, sizes)
        self.longest = int(self.seqlens[:rows].max(initial=0))
        self._steps = 0
        self.reserved, self.rows_changed, self.slots_changed = 0, True, True
        self.version += 1

    # Tokens are added.

    def check_room(self, length: int, num_tokens: int) -> None:
        """Raises ValueError where num_tokens more than length are more than max_seqlen."""
        if num_tokens < 0 or length + num_tokens > self.max_seqlen:
            raise ValueError(
                f"the cache has room for {self.max_seqlen} tokens a row and holds up to {length}; {num_tokens} more "
                "don't fit: make it with a larger max_seqlen"
            )

    def reserve(self, first: int, num_tokens: int, counts: Ints | None = None) -> None:
        """Gives the rows of the groups from `first` on slots for num_tokens more each, or for counts (rows,)."""
        self.settle()
        if counts is None and self._counts is None and num_tokens <= self.reserved and first >= self.reserved_from:
            return
        steps, self._steps, self._steps_left = self._steps, 0, 0
        if steps > 0 and first == 0 and counts is None and num_tokens == 1:
            rows = self.num_rows
            self._next[:rows] += 1
            self.slots[self._every[:rows], self.seqlens[:rows]] = self._next[:rows]
            self.used = max(self.used, self.longest + 1)
            self._steps_left = steps - 1
        else:
            self._fill(first, num_tokens, counts)
        self.reserved, self.reserved_from, self._counts, self.slots_changed = num_tokens, first, counts, True
        self.version += 1
        self._scattered |= self._ahead
        self._ahead = True

    def _fill(self, first: int, num_tokens: int, counts: Ints | None) -> None:
        begin, end = self.row_of(first), self.num_rows
        lengths = self.seqlens[begin:end]
        until = lengths + (num_tokens if counts is None else counts)
        self.check_room(int(until.max(initial=num_tokens)) - num_tokens, num_tokens)
        due = blocks_of(until, self.block_size) - self._given[begin:end]
        if due.max(initial=0) > 0:
            self._give_rows(begin, np.maximum(due, 0))
        if counts is None and num_tokens == 1:
            row, position = np.arange(begin, end), lengths
        else:
            row, ahead = spread(np.full(end - begin, num_tokens, np.int32) if counts is None else counts)
            position = lengths[row] + ahead
            row += begin
        column = position // self.block_size
        ahead = position - column * self.block_size
        slots = self._own[row, column] * self.block_size + ahead
        self.slots[row, position] = slots
        self.used = max(self.used, int(until.max(initial=0)))
        if counts is None and num_tokens == 1 and end > begin:
            # What follows in all these blocks needs no looking up.
            self._next[begin:end] = slots
            self._steps_left = min(self.block_size - 1 - int(ahead.max()), self.max_seqlen - int(until.max()))

    def blocks_needed(self, first: int, num_tokens: int) -> int:
        """The blocks that `reserve` would take from the free ones."""
        self.settle()
        rows = slice(self.row_of(first), self.num_rows)
        due = blocks_of(self.seqlens[rows] + num_tokens, self.block_size) - self._given[rows]
        return int(np.maximum(due, 0).sum())

    def advance(self, first: int, num_tokens: int, counts: Ints | None = None) -> None:
        """Counts tokens whose slots were reserved."""
        self.settle()
        rows = slice(self.row_of(first), self.num_rows)
        if num_tokens > self.reserved or first < self.reserved_from or num_tokens < 0:
            raise ValueError(f"expected at most the {self.reserved} tokens that are reserved, got {num_tokens}")
        if counts is None and self._counts is not None:
            counts = np.full(rows.stop - rows.start, num_tokens, np.int32)
        if counts is None:
            self.seqlens[rows] += num_tokens
            self.longest += num_tokens
            if first > 0:
                self.longest = int(self.seqlens[: rows.stop].max(initial=0))
            self._steps = self._steps_left if first == 0 and num_tokens == 1 else 0
            self.reserved -= num_tokens
            self._ahead = self.reserved > 0 or first != self.reserved_from
        else:
            begins = self._start[rows] - rows.start
            if counts.shape != begins.shape or (counts != counts[begins]).any():
                raise ValueError(f"expected one length for all rows of a group of {self.sizes[first:]}, got {counts}")
            most = num_tokens if self._counts is None else self._counts
            if ((counts < 0) | (counts > most)).any():
                raise ValueError(f"expected from 0 to {num_tokens} tokens a row, as reserved, got {counts}")
            self.seqlens[rows] += counts
            self.longest = max(self.longest, int(self.seqlens[rows].max(initial=0)))
            self.reserved = 0
            self._ahead = bool((counts < most).any())
        self._counts = None
        self.rows_changed = True
        self.version += 1

    def follow(self, counts: Ints, parents: npt.NDArray[np.integer]) -> None:
        """What `advance` and `reorder` by turns would do, for all rows and several steps at once.

        The rows have written the tokens that were reserved one after another, and have gone on from others of their
        group behind each.

        Args:
            counts: (rows,) the tokens of each row, as reserved; what it did behind them doesn't count.
            parents: (steps, rows) behind each step, the row that each goes on from.
        """
        rows, steps = len(counts), len(parents)
        begins = self.seqlens[:rows].copy()
        written = np.zeros((rows, steps), np.int32)
        ancestors = np.arange(rows)
        for step in reversed(range(steps)):
            ancestors = parents[step][ancestors]
            written[:, step] = self.slots[ancestors, np.minimum(begins + step, self.max_seqlen - 1)]
        moved = np.flatnonzero(ancestors != np.arange(rows))
        width = int(begins.max(initial=0))
        self.slots[moved, :width] = self.slots[ancestors[moved], :width]
        for step in range(steps):
            here = np.flatnonzero(step < counts)
            self.slots[here, begins[here] + step] = written[here, step]
        self._reordered[self.keys[:rows][(parents != np.arange(rows)).any(0)]] = True
        self.slots_changed = True
        self.advance(0, int(counts.max(initial=0)), counts)

    def set_aside(self, num_tokens: int) -> Ints:
        """Takes blocks for tokens that belong to no group, for good: (num_tokens,) their slots."""
        blocks = self._take(np.full(blocks_of(num_tokens, self.block_size), 2 * self.max_rows))
        slots = np.add.outer(blocks * self.block_size, np.arange(self.block_size))
        return slots.astype(np.int32).reshape(-1)[:num_tokens]

    def rewind(self, first: int) -> None:
        """Takes the tokens out, and their blocks back; sources stay."""
        self.settle()
        rows = slice(self.row_of(first), self.num_rows)
        self.pool.give_back(np.array(self.group_keys[first:], np.int32))
        self.slots[rows, : self.used] = 0
        self.seqlens[rows] = 0
        self._own[rows] = 0
        self._given[rows] = 0
        self._describe_rows()

    def set_sources(self, groups: Sequence[int], lengths: Ints) -> Ints:
        """Gives sources to groups that have none: (sum of lengths,) the slots of their tokens, one after another."""
        self.settle()
        blocks = blocks_of(lengths, self.block_size)
        keys = np.array([self.group_keys[group] for group in groups], np.int32)
        which, _ = spread(blocks)
        taken = self._take(keys[which] + self.max_rows)
        first = np.cumsum(blocks) - blocks  # the first block of each source
        source, position = spread(lengths)
        slots = taken[first[source] + position // self.block_size] * self.block_size + position % self.block_size
        self.source_slots[keys[source], position] = slots
        self.source_seqlens[keys] = lengths
        self.longest_source = max(self.longest_source, int(lengths.max(initial=0)))
        for group in groups:
            self.has_source[group] = True
        self.sources_changed = True
        self.version += 1
        return slots

    # Blocks are taken and given back.

    def _give_rows(self, begin: int, due: Ints) -> None:
        # due[i] more blocks for row begin + i.
        which = np.zeros(self.max_rows, bool)
        which[self.keys[begin + np.flatnonzero(due)]] = True
        which &= self._reordered
        if which.any():
            self._sweep(which)
        row, ahead = spread(due)
        row += begin
        self._own[row, self._given[row] + ahead] = self._take(self.keys[row])
        self._given[begin : begin + len(due)] += due

    def _take(self, owners: npt.NDArray[np.integer]) -> Ints:
        if len(owners) > self.pool.num_free:
            self.sweep()
        return self.pool.take(owners)

    def sweep(self) -> None:
        """Takes back what no row names any more."""
        self._sweep(self._reordered.copy())

    def _sweep(self, which: Bools) -> None:
        # Takes back, of the groups with these keys, the blocks that no row names in its history and none writes to.
        rows = np.flatnonzero(which[self.keys[: self.num_rows]])
        lengths = self.seqlens[rows][:, None]
        position = np.arange(int(lengths.max(initial=0)))
        column = np.arange(self._own.shape[1])
        history = self.slots[rows, : len(position)][position < lengths] // self.block_size
        written = self._own[rows][column >= lengths // self.block_size]
        self.pool.give_back(np.flatnonzero(which), np.concatenate((history, written)))
        self._reordered &= ~which


def blocks_of(num_tokens: Count, block_size: int) -> Count:
    """The blocks that num_tokens of a row or of a source fill, rounded up."""
    return (num_tokens + (block_size - 1)) // block_size


def spread(counts: Ints) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """counts (n,) -> for each thing counted, whose it is and which of theirs: [2, 1] -> [0 0 1], [0 1 0]."""
    ends = np.cumsum(counts)
    whose = np.repeat(np.arange(len(counts)), counts)
    return whose, np.arange(len(whose)) - (ends - counts)[whose]
