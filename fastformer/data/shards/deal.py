"""Makes a shard from the blocks of all sources: its share of each, without omitted examples, shuffled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy

from fastformer.data.shards.arrow_file import arrow, read_examples_table, read_table, write_table
from fastformer.data.shards.encode import open_block
from fastformer.data.shards.left_out import bits
from fastformer.data.shards.manifest import Shard, Stored, counts_of


@dataclass(frozen=True)
class Piles:
    """The places of the examples of all blocks.

    Attributes:
        paths: the paths of the blocks.
        sources: the number of each block's source.
        starts: the place of each block's first example among all examples.
        mask: the path of a file with a bit for each example, by `numpy.packbits`: 1 if the example is omitted.
        seed: the seed of the shuffling.
    """

    paths: Sequence[Path]
    sources: Sequence[int]
    starts: Sequence[int]
    mask: Path
    seed: int


def shard_name(number: int) -> str:
    """Returns the file name of a shard."""
    return f"shard-{number:05}.arrow"


def write_shard(piles: Piles, number: int, folder: Path) -> Shard:
    """Writes one shard, unless it exists.

    An existing file is complete, because it gets its name at the end; its index entry is computed by reading it.
    """
    path = folder / shard_name(number)
    if not path.is_file():
        library = arrow()
        mask = numpy.memmap(piles.mask, numpy.uint8, "r") if piles.mask.stat().st_size else numpy.empty(0, numpy.uint8)
        parts = []
        for start, block, source in zip(piles.starts, piles.paths, piles.sources, strict=False):
            table, about = open_block(block)
            begin, end = about.ends[number : number + 2]
            table = table.select(["source", "target"]).replace_schema_metadata(None).slice(begin, end - begin)
            rows = numpy.flatnonzero(~bits(mask, start + begin, start + end))
            origin = library.array(numpy.full(len(rows), source, numpy.uint16))
            parts.append(table.take(library.array(rows)).append_column("origin", origin))
        table = library.concat_tables(parts).combine_chunks()
        order = numpy.random.default_rng([piles.seed, 2, number]).permutation(table.num_rows)
        write_table(path, table.take(library.array(order)))
    return describe(path, 1 + max(piles.sources))


def write_rows(piles: Piles, rows: Sequence[tuple[int, int]], path: Path) -> None:
    """Writes examples, each given by its block and its row in the block, in the given order."""
    library = arrow()
    parts = []
    for block, row in rows:
        table = read_table(piles.paths[block]).select(["source", "target"]).replace_schema_metadata(None)
        origin = library.array(numpy.full(1, piles.sources[block], numpy.uint16))
        parts.append(table.slice(row, 1).append_column("origin", origin))
    write_table(path, library.concat_tables(parts))


def describe(path: Path, sources: int) -> Shard:
    """Makes a shard's entry in the index by reading the shard."""
    stored = Stored.of(path)
    return Shard(stored.file, stored.sha256, stored.size, **counts_of(read_examples_table(path), sources))
