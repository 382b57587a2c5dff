"""Turns a block of text into a block of examples: parses, filters and tokenizes, deals to shards, and writes a file.

The processes of `prepare` do this in parallel. A block's file is a function of the block and the settings, so a
preparation that was interrupted continues with the existing files.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy

from fastformer.data.examples import Example, encode_pair
from fastformer.data.filters import PairFilter
from fastformer.data.pair import PairTokenizer
from fastformer.data.shards.arrow_file import arrow, lists, read_table, write_table
from fastformer.data.streams import PairBlock, TextBlock
from fastformer.data.tokenizer import Tokenizer
from fastformer.special_ids import SpecialIds

Array = numpy.ndarray[Any, Any]
MOST_HELD_OUT = 500
KEYS = ("key_high", "key_low")  # columns of a block's file: 128 bits, which are equal for equal examples


@dataclass(frozen=True)
class Recipe:
    """The settings that determine the examples of a text.

    Attributes:
        kind: "pairs" or "text".
        shards: the number of shards.
        seed: the seed of dealing, shuffling and holding out.
        filters: the filters for pairs.
        skip_bad: whether bad lines are skipped.
        max_len: the most tokens on a side of a pair.
        seqlen: the length of a language model's windows.
        hold_out: whether examples are held out for validation.
    """

    kind: Literal["pairs", "text"]
    shards: int
    seed: int
    filters: PairFilter = field(default_factory=PairFilter)
    skip_bad: bool = False
    max_len: int = 256
    seqlen: int = 128
    hold_out: bool = True

    @property
    def has_keys(self) -> bool:
        """Whether examples are compared with each other."""
        return self.hold_out or self.filters.drop_duplicates


@dataclass
class Block:
    """The properties of a block's file, without its examples.

    Attributes:
        read: the number of pairs or passages that were read.
        left_out: the number of omitted ones, by reason.
        ends: (shards + 1,): shard s has the rows from ends[s] to ends[s + 1].
        candidates: [key, source text, target text] of the examples that may be held out; without texts for a language
            model.
    """

    read: int
    left_out: dict[str, int]
    ends: list[int]
    candidates: list[list[str]]

    @property
    def examples(self) -> int:
        """The number of examples in the file."""
        return self.ends[-1]


def encode_block(
    block: PairBlock | TextBlock, recipe: Recipe, tokenizer: Tokenizer, path: Path, seeds: Sequence[int]
) -> None:
    """Writes the examples of a block to a file.

    Args:
        block: the text.
        recipe: the settings of the examples.
        tokenizer: the tokenizer.
        path: the path of the file.
        seeds: the number of the source, and of the block in it.

    Raises:
        ValueError: a line is bad, and bad lines are not skipped.
    """
    if isinstance(block, PairBlock):
        sides, keys, texts, read, left_out = _of_pairs(block, recipe, tokenizer)
    else:
        sides, keys, texts, read, left_out = _of_text(block, recipe, tokenizer)
    count = len(sides[1])
    # Examples are dealt to the shards in turn, in random order, beginning with a random shard.
    chooser = numpy.random.default_rng([recipe.seed, 1, *seeds])
    shard = (chooser.integers(recipe.shards) + chooser.permutation(count)) % recipe.shards
    order = numpy.argsort(shard, kind="stable")
    ends = numpy.concatenate([[0], numpy.bincount(shard, minlength=recipe.shards).cumsum()])
    columns = {name: lists(side).take(order) for name, side in zip(("source", "target"), sides, strict=True)}
    candidates: list[list[str]] = []
    if recipe.has_keys:
        for name, key in zip(KEYS, keys, strict=True):
            columns[name] = arrow().array(key[order])
        if recipe.hold_out:
            # Each content once: else one that a text repeats would leave no room for others.
            lowest = numpy.unique(numpy.stack(keys, axis=1), axis=0, return_index=True)[1][:MOST_HELD_OUT]
            candidates = [[f"{keys[0][i]:016x}{keys[1][i]:016x}", *texts(i)] for i in lowest.tolist()]
    about = {"read": read, "left_out": dict(left_out), "ends": ends.tolist(), "candidates": candidates}
    table = arrow().table(columns).replace_schema_metadata({"block": json.dumps(about)})
    write_table(path, table)


def open_block(path: Path) -> tuple[Any, Block]:
    """Opens a block's file: returns its table, mapped into memory, and its properties."""
    table = read_table(path)
    return table, Block(**json.loads(table.schema.metadata[b"block"]))


def _of_pairs(block: PairBlock, recipe: Recipe, tokenizer: Tokenizer) -> Any:
    pairs, bad = block.pairs(skip_bad=recipe.skip_bad)
    left_out = Counter(line.kind for line in bad)
    read = len(pairs) + len(bad)
    if recipe.filters:
        # Duplicates are found among all blocks, by their keys.
        (pairs,), reasons = replace(recipe.filters, drop_duplicates=False).apply([pairs])
        left_out += reasons
    kept, examples = [], []
    for pair, example in zip(pairs, _encoded(pairs, tokenizer), strict=True):
        if max(example.lengths) <= recipe.max_len:
            kept.append(pair)
            examples.append(example)
    if len(kept) < len(pairs):
        left_out[f"of more than max_len {recipe.max_len} tokens"] += len(pairs) - len(kept)
    sides = ([example.source for example in examples], [example.target for example in examples])
    # The length of the source distinguishes ("a", "bc") from ("ab", "c").
    keys = _keys((f"{len(s)} {s}{t}".encode() for s, t in kept), recipe) if recipe.has_keys else None
    return sides, keys, lambda i: kept[i], read, left_out


def _encoded(pairs: Sequence[tuple[str, str]], tokenizer: Tokenizer) -> list[Example]:
    sources, targets = [source for source, _ in pairs], [target for _, target in pairs]
    if isinstance(tokenizer, PairTokenizer):
        encoded = tokenizer.source.encode_batch(sources), tokenizer.target.encode_batch(targets)
    else:
        encoded = tokenizer.encode_batch(sources), tokenizer.encode_batch(targets)
    special_ids: SpecialIds = tokenizer.special_ids
    return [encode_pair(source, target, special_ids=special_ids) for source, target in zip(*encoded, strict=True)]


def _of_text(block: TextBlock, recipe: Recipe, tokenizer: Tokenizer) -> Any:
    documents, bad = block.documents(skip_bad=recipe.skip_bad)
    pieces = [tokenizer.pieces(text) for text, _ in documents]
    encoded = iter(tokenizer.encode_batch([piece for some in pieces for piece in some]))
    parts: list[list[int]] = []
    for some, (_, ends) in zip(pieces, documents, strict=True):
        parts += [next(encoded) for _ in some]
        parts += [[tokenizer.special_ids.first_eos]] if ends else []
    ids = numpy.fromiter(chain.from_iterable(parts), numpy.int32)
    targets = [ids[i : i + recipe.seqlen + 1] for i in range(0, len(ids) - 1, recipe.seqlen)]
    keys = _keys((target.tobytes() for target in targets), recipe) if recipe.has_keys else None
    sides = ([()] * len(targets), [target.tolist() for target in targets])
    return sides, keys, lambda i: (), len(documents) + len(bad), Counter(line.kind for line in bad)


def _keys(contents: Any, recipe: Recipe) -> tuple[Array, Array]:
    """Computes 128 bits of each content, in high and low halves. The seed decides which contents have low values."""
    salt = recipe.seed.to_bytes(16, "little", signed=True)
    digests = b"".join(hashlib.blake2b(content, digest_size=16, salt=salt).digest() for content in contents)
    both = numpy.frombuffer(digests, ">u8").astype(numpy.uint64).reshape(-1, 2)
    return numpy.ascontiguousarray(both[:, 0]), numpy.ascontiguousarray(both[:, 1])
