"""Turns a block of text into a block of examples: parses, filters and tokenizes, deals to shards, and writes a file.

The processes of `prepare` do this in parallel. A block's file is a function of the block and the settings, so a
preparation that was interrupted continues with the existing files.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy

from fastformer.data.examples import encode_pair
from fastformer.data.filters import PairFilter
from fastformer.data.held_out import MOST, key_of
from fastformer.data.pair import sides
from fastformer.data.shards.arrow_file import arrow, lists, read_table, write_table
from fastformer.data.streams import PairBlock, TextBlock
from fastformer.data.tokenizer import Tokenizer
from fastformer.data.tokenizer_files import count_unknown

Array = numpy.ndarray[Any, Any]
TOO_LONG = "of more than max_len"  # the beginning of a reason
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
        bad: the number of bad lines, by reason.
        left_out: the number of omitted ones, by reason, bad lines included.
        characters: the number of characters of the text.
        unknown: how often the text has characters that the tokenizer has no token for.
        ends: (shards + 1,): shard s has the rows from ends[s] to ends[s + 1].
        candidates: [key, source text, target text] of the examples that may be held out; without texts for a language
            model.
    """

    read: int
    bad: dict[str, int]
    left_out: dict[str, int]
    characters: int
    unknown: dict[str, int]
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
        encoded = _of_pairs(block, recipe, tokenizer)
    else:
        encoded = _of_text(block, recipe, tokenizer)
    count = len(encoded.targets)
    # Examples are dealt to the shards in turn, in random order, beginning with a random shard.
    chooser = numpy.random.default_rng([recipe.seed, 1, *seeds])
    shard = (chooser.integers(recipe.shards) + chooser.permutation(count)) % recipe.shards
    order = numpy.argsort(shard, kind="stable")
    ends = numpy.concatenate([[0], numpy.bincount(shard, minlength=recipe.shards).cumsum()])
    columns = {"source": lists(encoded.sources).take(order), "target": lists(encoded.targets).take(order)}
    candidates: list[list[str]] = []
    if recipe.has_keys:
        keys = _keys(encoded, recipe.seed)
        for name, key in zip(KEYS, keys, strict=True):
            columns[name] = arrow().array(key[order])
        if recipe.hold_out:
            # Each content once: else one that a text repeats would leave no room for others.
            lowest = numpy.unique(numpy.stack(keys, axis=1), axis=0, return_index=True)[1][:MOST]
            candidates = [[f"{keys[0][i]:016x}{keys[1][i]:016x}", *encoded.texts[i]] for i in lowest.tolist()]
    about = Block(
        encoded.read,
        encoded.bad,
        encoded.bad + encoded.left_out,
        encoded.characters,
        encoded.unknown,
        ends.tolist(),
        candidates,
    )
    table = arrow().table(columns).replace_schema_metadata({"block": json.dumps(vars(about))})
    write_table(path, table)


def open_block(path: Path) -> tuple[Any, Block]:
    """Opens a block's file: returns its table, mapped into memory, and its properties."""
    table = read_table(path)
    return table, Block(**json.loads(table.schema.metadata[b"block"]))


@dataclass
class _Encoded:
    """The examples of a block, their texts (none for a language model), and counts of what was read."""

    sources: list[list[int]]
    targets: list[list[int]]
    texts: list[tuple[str, ...]]
    read: int
    bad: Counter[str]
    left_out: Counter[str]
    characters: int
    unknown: Counter[str]


def _of_pairs(block: PairBlock, recipe: Recipe, tokenizer: Tokenizer) -> _Encoded:
    pairs, bad = block.pairs(skip_bad=recipe.skip_bad)
    read, left_out = len(pairs) + len(bad), Counter[str]()
    if recipe.filters:
        # Duplicates are found among all blocks, by their keys.
        (pairs,), left_out = replace(recipe.filters, drop_duplicates=False).apply([pairs])
    examples = _Encoded([], [], [], read, Counter(line.kind for line in bad), left_out, 0, Counter())
    encoded: list[list[list[int]]] = []
    for side, side_tokenizer in enumerate(sides(tokenizer)):
        texts = [pair[side] for pair in pairs]
        encoded.append(side_tokenizer.encode_batch(texts))
        examples.unknown += count_unknown(side_tokenizer, texts, encoded[-1])
        examples.characters += sum(map(len, texts))
    for pair, source, target in zip(pairs, *encoded, strict=True):
        example = encode_pair(source, target, special_ids=tokenizer.special_ids)
        if max(example.lengths) <= recipe.max_len:
            examples.sources.append(example.source)
            examples.targets.append(example.target)
            examples.texts.append(pair)
    if len(examples.texts) < len(pairs):
        examples.left_out[f"{TOO_LONG} {recipe.max_len} tokens"] += len(pairs) - len(examples.texts)
    return examples


def _of_text(block: TextBlock, recipe: Recipe, tokenizer: Tokenizer) -> _Encoded:
    documents, bad = block.documents(skip_bad=recipe.skip_bad)
    pieces = [tokenizer.pieces(text) for text, _ in documents]
    texts = [piece for some in pieces for piece in some]
    encoded = tokenizer.encode_batch(texts)
    unknown, each = count_unknown(tokenizer, texts, encoded), iter(encoded)
    parts: list[list[int]] = []
    for some, (_, ends) in zip(pieces, documents, strict=True):
        parts += [next(each) for _ in some]
        parts += [[tokenizer.special_ids.first_eos]] if ends else []
    ids = numpy.fromiter(chain.from_iterable(parts), numpy.int32)
    targets = [ids[i : i + recipe.seqlen + 1].tolist() for i in range(0, len(ids) - 1, recipe.seqlen)]
    count, reasons = len(targets), Counter(line.kind for line in bad)
    read, characters = len(documents) + len(bad), sum(len(text) for text, _ in documents)
    return _Encoded([[]] * count, targets, [()] * count, read, reasons, Counter(), characters, unknown)


def _keys(examples: _Encoded, seed: int) -> tuple[Array, Array]:
    """Returns the keys of the examples, in high and low halves."""
    both = b"".join(key_of(*example, seed) for example in zip(examples.sources, examples.targets, strict=True))
    halves = numpy.frombuffer(both, ">u8").astype(numpy.uint64).reshape(-1, 2)
    return numpy.ascontiguousarray(halves[:, 0]), numpy.ascontiguousarray(halves[:, 1])
