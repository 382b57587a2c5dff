"""The index of a folder of shards: the shards, their contents, and the means to check that they are intact."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from fastformer.data.pair import contents
from fastformer.data.shards.arrow_file import sha256_of
from fastformer.data.tokenizer import Tokenizer
from fastformer.files import is_plain_file, read_json, write_atomically

INDEX = "index.json"
FORMAT, VERSION = "fastformer shards", 1
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
        """Checks only the name and the size.

        Raises:
            ValueError: the file is missing, or has another size.
        """
        path = folder / self.file
        if not is_plain_file(path):
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
        found = sha256_of(folder / self.file)
        if found != self.sha256:
            raise ValueError(
                f"{folder / self.file} was changed or damaged: expected the SHA-256 {self.sha256}, got {found}: "
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


@dataclass(frozen=True)
class Source:
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
    """

    kind: Literal["pairs", "text"]
    tokenizer: str
    settings: dict[str, Any]
    sources: list[Source]
    shards: list[Shard]
    validation: Stored
    validation_texts: Stored | None = None
    validation_characters: int = 0

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
            if (values.pop("format"), values.pop("version")) != (FORMAT, VERSION):
                raise ValueError("another format or version")
            values["sources"] = [Source(**source) for source in values["sources"]]
            values["shards"] = [Shard(**shard) for shard in values["shards"]]
            values["validation"] = Stored(**values["validation"])
            if values["validation_texts"] is not None:
                values["validation_texts"] = Stored(**values["validation_texts"])
            found = cls(**values)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{place / INDEX} is damaged or of another version ({error}): {_AGAIN}") from error
        for stored in (*found.shards, found.validation, found.validation_texts):
            if stored is not None:
                stored.check_there(place)
        return found

    def check_tokenizer(self, tokenizer: Tokenizer, owner: str) -> None:
        """Checks that the ids in the shards are those of a tokenizer.

        Args:
            tokenizer: the tokenizer.
            owner: the name of the tokenizer in messages.

        Raises:
            ValueError: they are those of another tokenizer.
        """
        found = tokenizer_digest(tokenizer)
        if found != self.tokenizer:
            raise ValueError(
                f"expected the tokenizer that the shards were prepared with ({self.tokenizer[:12]}), got another, "
                f"{owner} ({found[:12]}): prepare the data with --tokenizer and that one"
            )

    def fingerprint(self) -> str:
        """Computes a SHA-256 over those of the shards."""
        return hashlib.sha256("\n".join(shard.sha256 for shard in self.shards).encode()).hexdigest()


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """Computes a SHA-256 of everything that determines a tokenizer, independently of its file."""
    text = json.dumps(contents(tokenizer), sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
