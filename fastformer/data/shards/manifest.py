"""The index of a folder of shards: the shards, their contents, and the means to check that they are intact."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy

from fastformer.data.pair import contents
from fastformer.data.shards.arrow_file import read_examples_table, sha256_of, views
from fastformer.data.tokenizer import Tokenizer
from fastformer.files import read_json, write_atomically
from fastformer.settings import LEAST_WEIGHT

INDEX = "index.json"
FORMAT, VERSION = "fastformer shards", 2  # 1: without a checksum
_AGAIN = "prepare the data again, or copy the folder"


@dataclass(frozen=True)
class Stored:
    """A file of the folder, with the means to check it.

    Attributes:
        file: the name of the file in the folder.
        sha256: the SHA-256 of its bytes.
        size: the size in bytes.
    """

    file: str
    sha256: str
    size: int

    @classmethod
    def of(cls, path: Path) -> Stored:
        """Describes an existing file."""
        return cls(path.name, sha256_of(path), path.stat().st_size)

    def check_there(self, folder: Path) -> None:
        """Checks only the name and the size; the file may be a link.

        Raises:
            ValueError: the file is missing, or has another size.
        """
        path = folder / self.file
        if not path.is_file():
            raise ValueError(f"expected the file {path}, which {INDEX} names but which doesn't exist: {_AGAIN}")
        size = path.stat().st_size
        if size != self.size:
            raise ValueError(f"{path} was changed or damaged: expected {self.size:,} bytes, got {size:,}: {_AGAIN}")

    def check_content(self, folder: Path) -> None:
        """Reads the file and checks its contents.

        Raises:
            ValueError: the file is missing, or has other contents.
        """
        self.check_there(folder)
        digest = sha256_of(folder / self.file)
        if digest != self.sha256:
            raise ValueError(
                f"{folder / self.file} was changed or damaged: expected the SHA-256 {self.sha256}, got {digest}: "
                f"{_AGAIN}"
            )


@dataclass(frozen=True)
class Shard(Stored):
    """One shard.

    Attributes:
        examples: the number of examples.
        source_tokens, target_tokens: the numbers of their tokens, as `Example.lengths` counts.
        longest: the number of tokens on the longest side.
        by_source: the number of examples of each source.
    """

    examples: int
    source_tokens: int
    target_tokens: int
    longest: int
    by_source: list[int]

    def check_examples(self, folder: Path, vocab_sizes: tuple[int, int] | None) -> None:
        """Reads the shard, and checks its contents and the numbers of the index.

        Args:
            folder: the folder.
            vocab_sizes: the numbers of source and target ids; None: any.

        Raises:
            ValueError: they are not those that were prepared.
        """
        self.check_content(folder)
        table = read_examples_table(folder / self.file)
        for name, count in counts_of(table, len(self.by_source)).items():
            if count != getattr(self, name):
                raise ValueError(
                    f"expected {name} {getattr(self, name)} in {folder / self.file}, got {count}: {_AGAIN}"
                )
        if vocab_sizes is not None:
            check_ids(table, folder / self.file, vocab_sizes)


@dataclass(frozen=True)
class ShardSource:
    """One source of text, and the numbers of its examples.

    Attributes:
        name: the name on the command line.
        weight: how often an epoch has each of its examples.
        read: the number of pairs, or passages of text, that were read.
        examples: the number of examples in the shards.
        held_out: the number of examples that are held out for validation.
        left_out: the number of omitted examples, by reason.
        size: the bytes of its files when the preparation began; None: it was a pipe, or the index doesn't contain the
            size.
    """

    name: str
    weight: float
    read: int
    examples: int
    held_out: int
    left_out: dict[str, int]
    size: int | None = None


@dataclass(frozen=True)
class Manifest:
    """The contents of index.json.

    Attributes:
        kind: "pairs" of a translator, or "text" of a language model.
        tokenizer: `tokenizer_digest` of the tokenizer.
        settings: the settings that the shards depend on.
        sources: the sources, in the order in which they were given.
        shards: the shards, in order.
        validation: the file of the validation examples.
        validation_texts: the file of their texts; None for a language model.
        validation_characters: the number of characters in a language model's validation text.
        validation_size: the bytes of the files that the validation data came from; None: it was held out or a pipe, or
            the index doesn't contain the size.
    """

    kind: Literal["pairs", "text"]
    tokenizer: str
    settings: dict[str, Any]
    sources: list[ShardSource]
    shards: list[Shard]
    validation: Stored
    validation_texts: Stored | None = None
    validation_characters: int = 0
    validation_size: int | None = None

    @property
    def longest(self) -> int:
        """The number of tokens on the longest side of any example."""
        return max((shard.longest for shard in self.shards), default=0)

    @property
    def examples(self) -> int:
        """The number of examples in all shards."""
        return sum(shard.examples for shard in self.shards)

    def save(self, folder: Path) -> None:
        """Writes index.json, which makes a folder complete."""
        values = {"format": FORMAT, "version": VERSION, **asdict(self)}
        values["sha256"] = _checksum(values)
        write_atomically(folder / INDEX, json.dumps(values, indent=1, ensure_ascii=False).encode() + b"\n")

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Manifest:
        """Reads index.json, and checks that all files exist.

        Raises:
            ValueError: the folder was not prepared, the index is damaged, or a file is missing.
        """
        place = Path(folder)
        if not place.is_dir():
            raise ValueError(f"expected a folder that `fastformer prepare` made, but there is no folder {place}")
        if not (place / INDEX).is_file():
            raise ValueError(
                f"expected a folder that `fastformer prepare` made, but {place} has no {INDEX}: if the command was "
                "interrupted, give it again to continue"
            )
        values = read_json(place / INDEX)
        try:
            checksum = values.pop("sha256", None)
            if values["format"] != FORMAT or values["version"] not in (1, VERSION):
                raise ValueError("another format or version")
            if values["version"] == VERSION and checksum != _checksum(values):
                raise ValueError("it was changed since: its SHA-256 is another")
            del values["format"], values["version"]
            values["sources"] = [ShardSource(**source) for source in values["sources"]]
            values["shards"] = [Shard(**shard) for shard in values["shards"]]
            values["validation"] = Stored(**values["validation"])
            if values["validation_texts"] is not None:
                values["validation_texts"] = Stored(**values["validation_texts"])
            manifest = cls(**values)
            manifest._check()
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{place / INDEX} is damaged or of another version ({error}): {_AGAIN}") from error
        for stored in (*manifest.shards, manifest.validation, manifest.validation_texts):
            if stored is not None:
                stored.check_there(place)
        return manifest

    def _check(self) -> None:
        """Checks the types and the numbers.

        Raises:
            ValueError: a value that `save` doesn't write; it is named.
        """
        validation_files = [self.validation, *([] if self.validation_texts is None else [self.validation_texts])]
        for place, each in enumerate([*self.shards, *validation_files]):
            name = f"shard {place}" if place < len(self.shards) else "validation"
            is_name = _is(each.file, str) and each.file not in ("", ".", "..") and not set(each.file) & set("/\\\0")
            _expect(is_name, f"{name}: file", "a name in the folder", each.file)
            _expect(_is(each.sha256, str) and len(each.sha256) == 64, f"{name}: sha256", "64 digits", each.sha256)
            _expect_counts(name, each, ("size",))
        _expect(self.kind in ("pairs", "text"), "kind", "pairs or text", self.kind)
        _expect(_is(self.tokenizer, str), "tokenizer", "a text", self.tokenizer)
        _expect(_is(self.settings, dict), "settings", "a table", self.settings)
        _expect(
            (self.validation_texts is None) == (self.kind == "text"), "validation_texts", "those of pairs", self.kind
        )
        _expect_counts("the index", self, ("validation_characters",))
        size = self.validation_size
        _expect(size is None or _is_count(size), "validation_size", "a number", size)
        _expect(bool(self.sources), "sources", "at least one", self.sources)
        _expect(bool(self.shards), "shards", "at least one", self.shards)
        for shard in self.shards:
            _expect_counts(shard.file, shard, ("examples", "source_tokens", "target_tokens", "longest"))
            counts = shard.by_source
            is_whole = _is(counts, list) and all(map(_is_count, counts)) and len(counts) == len(self.sources)
            _expect(is_whole and sum(counts) == shard.examples, f"{shard.file}: by_source", "its examples", counts)
        for number, source in enumerate(self.sources):
            _expect(_is(source.name, str), "name", "a text", source.name)
            weight = source.weight
            is_weight = _is(weight, float, int) and LEAST_WEIGHT <= weight <= 1 / LEAST_WEIGHT
            _expect(is_weight, f"{source.name}: weight", f"{LEAST_WEIGHT:g} to {1 / LEAST_WEIGHT:g}", weight)
            _expect_counts(source.name, source, ("read", "examples", "held_out"))
            _expect(source.size is None or _is_count(source.size), f"{source.name}: size", "a number", source.size)
            reasons = source.left_out
            _expect(_is(reasons, dict) and all(map(_is_count, reasons.values())), "left_out", "numbers", reasons)
            total = sum(shard.by_source[number] for shard in self.shards)
            _expect(
                total == source.examples, f"{source.name}: examples", f"{total:,} as in the shards", source.examples
            )

    def check_tokenizer(self, tokenizer: Tokenizer, owner: str) -> None:
        """Checks that the ids in the shards are those of a tokenizer.

        Args:
            tokenizer: the tokenizer.
            owner: the name of the tokenizer in messages.

        Raises:
            ValueError: they are those of another tokenizer.
        """
        digest = tokenizer_digest(tokenizer)
        if digest != self.tokenizer:
            raise ValueError(
                f"expected the tokenizer that the shards were prepared with ({self.tokenizer[:12]}), got another, "
                f"{owner} ({digest[:12]}): prepare the data with --tokenizer and that one"
            )

    def fingerprint(self) -> str:
        """Computes a SHA-256 over those of the shards."""
        return hashlib.sha256("\n".join(shard.sha256 for shard in self.shards).encode()).hexdigest()


def check_ids(table: Any, path: Path, vocab_sizes: tuple[int, int]) -> None:
    """Raises a ValueError if a table of examples has other ids than those of its tokenizer."""
    for name, size in zip(("source", "target"), vocab_sizes, strict=True):
        ids = views(table.column(name))[0]
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < size:
            raise ValueError(
                f"expected {path} to have {name} ids below {size}, got {ids.min()} to {ids.max()}: {_AGAIN}"
            )


def counts_of(table: Any, sources: int) -> dict[str, Any]:
    """Counts the examples of a shard's table, for the index.

    Args:
        table: the table.
        sources: the number of sources.
    """
    lengths: list[Any] = [numpy.diff(views(table.column(name))[1]) for name in ("source", "target")]
    lengths[1] = lengths[1] - (lengths[0] == 0)  # the last token of a window is only predicted
    return {
        "examples": table.num_rows,
        "source_tokens": int(lengths[0].sum()),
        "target_tokens": int(lengths[1].sum()),
        "longest": max((int(side.max()) for side in lengths if len(side)), default=0),
        "by_source": numpy.bincount(table.column("origin").to_numpy(), minlength=sources).tolist(),
    }


def _checksum(values: dict[str, Any]) -> str:
    """Computes a SHA-256 of the index's values."""
    text = json.dumps(values, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _is(value: object, *kinds: type) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and _is(value, int) and 0 <= value < 1 << 62


def _expect(is_right: bool, name: str, expected: str, got: object) -> None:
    if not is_right:
        raise ValueError(f"{name}: expected {expected}, got {got!r:.60}")


def _expect_counts(owner: str, values: object, names: Sequence[str]) -> None:
    for name in names:
        _expect(_is_count(getattr(values, name)), f"{owner}: {name}", "a number", getattr(values, name))


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """Computes a SHA-256 of everything that determines a tokenizer, independently of its file."""
    text = json.dumps(contents(tokenizer), sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
