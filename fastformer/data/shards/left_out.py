"""Finds the examples that are omitted from the shards: duplicates, and examples held out for validation.

Examples are compared by a hash of 128 bits. The probability that two of n different examples have the same hash is
n²/2^129: 1.5e-21 for a billion. All hashes are read in passes, each for a range of values, so that the memory is
bounded. The cost is 16 bytes of disk an example, a pass over them for every MOST_KEYS examples, and a byte of memory an
example during the passes.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from fastformer.data.held_out import MOST, number_held_out
from fastformer.data.shards.arrow_file import read_table
from fastformer.data.shards.encode import KEYS, Recipe, open_block

Array = numpy.ndarray[Any, Any]
MOST_KEYS = 1 << 21  # hashes that are compared in one pass, at about 60 bytes each


@dataclass
class LeftOut:
    """The examples that are omitted from the shards.

    Attributes:
        starts: (blocks + 1,) the place of each block's first example among all examples.
        mask: a bit for each example, by `numpy.packbits`.
        duplicates, held_out: the numbers of examples, by block.
        validation: for each content that is held out, its texts (none for a language model), its block and its row.
    """

    starts: list[int]
    mask: Array
    duplicates: list[int]
    held_out: list[int]
    validation: list[tuple[tuple[str, ...], tuple[int, int]]]


def bits(mask: Array, begin: int, end: int) -> Array:
    """Returns the bits from `begin` to `end` of a mask of `numpy.packbits`, as booleans."""
    first = begin // 8
    some = numpy.unpackbits(mask[first : -(-end // 8)])
    return some[begin - 8 * first : end - 8 * first].astype(bool)


def find_left_out(paths: Sequence[Path], recipe: Recipe) -> LeftOut:
    """Finds the omitted examples from the hashes of all blocks.

    Of equal examples the first one stays, in the order of the sources and of their lines by blocks. All examples that
    equal a held-out one are held out: a training never sees its validation data.
    """
    sizes, lowest = [], _Lowest()
    for path in paths:
        block = open_block(path)[1]
        sizes.append(block.examples)
        lowest.add(block.candidates)
    starts = numpy.concatenate([[0], numpy.cumsum(sizes)]).astype(numpy.int64)
    total = int(starts[-1])
    dropped, duplicates, held_out = numpy.zeros(total, bool), [0] * len(paths), [0] * len(paths)
    chosen = lowest.chosen(total) if recipe.hold_out else {}
    rows: dict[int, tuple[int, int]] = {}
    passes = -(-total // MOST_KEYS) if recipe.has_keys else 0
    wanted = numpy.array([key >> 64 for key in chosen], numpy.uint64)
    for number in range(passes):
        high, low, place = _keys_of(paths, starts, number, passes)
        if recipe.filters.drop_duplicates:
            order = numpy.lexsort((place, low, high))
            same = (high[order][1:] == high[order][:-1]) & (low[order][1:] == low[order][:-1])
            again = place[order[1:][same]]
            dropped[again] = True
            _count(duplicates, again, starts)
        for i in numpy.flatnonzero(numpy.isin(high, wanted)).tolist():
            key = int(high[i]) << 64 | int(low[i])
            if key not in chosen:
                continue
            at = int(place[i])
            where = int(numpy.searchsorted(starts, at, side="right")) - 1
            if key not in rows or at < starts[rows[key][0]] + rows[key][1]:
                rows[key] = (where, at - int(starts[where]))
            held_out[where] += not dropped[at]
            dropped[at] = True
    validation = [(tuple(chosen[key]), rows[key]) for key in chosen]
    return LeftOut(starts.tolist(), numpy.packbits(dropped), duplicates, held_out, validation)


class _Lowest:
    """The candidates with the lowest hashes of all that were added, each content once."""

    def __init__(self) -> None:
        self._found: dict[int, list[str]] = {}

    def add(self, candidates: Sequence[list[str]]) -> None:
        """Adds the candidates of a block."""
        for key, *texts in candidates:
            self._found.setdefault(int(key, 16), texts)
        if len(self._found) > 8 * MOST:
            self._found = {key: self._found[key] for key in sorted(self._found)[: MOST + 1]}

    def chosen(self, total: int) -> dict[int, list[str]]:
        """Returns the examples to hold out, in ascending order of their hashes.

        Those in the lowest tenth of the hashes are about a tenth of the different ones.

        Raises:
            ValueError: no example would be left.
        """
        lowest = sorted(self._found)
        tenth = bisect.bisect_left(lowest, (1 << 128) // 10)
        return {key: self._found[key] for key in lowest[: number_held_out(total, tenth, len(lowest))]}


def _keys_of(paths: Sequence[Path], starts: Array, number: int, passes: int) -> tuple[Array, Array, Array]:
    """Returns the hashes of one pass, and the places of their examples."""
    # Hashes are uniform, so that equal ranges of their high halves have about as many.
    step = (1 << 64) // passes
    first, last = number * step, (1 << 64) - 1 if number == passes - 1 else (number + 1) * step - 1
    chosen: list[tuple[Array, Array, Array]] = []
    for start, path in zip(starts[:-1], paths, strict=True):
        table = read_table(path)
        high, low = (table.column(name).to_numpy() for name in KEYS)
        here = numpy.flatnonzero((high >= numpy.uint64(first)) & (high <= numpy.uint64(last)))
        chosen.append((high[here], low[here], here + start))
    high, low, place = (numpy.concatenate(parts) for parts in zip(*chosen, strict=True))
    return high, low, place


def _count(counts: list[int], places: Array, starts: Array) -> None:
    numbers, times = numpy.unique(numpy.searchsorted(starts, places, side="right") - 1, return_counts=True)
    for number, count in zip(numbers.tolist(), times.tolist(), strict=True):
        counts[number] += count
