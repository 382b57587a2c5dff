"""A tokenizer for each side of a translator whose source and target have vocabularies of their own."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fastformer.data.tokenizer import TOKENIZER, Tokenizer, cuts_of
from fastformer.files import write_atomically
from fastformer.special_ids import SpecialIds

TYPE = "pair"  # in tokenizer.json


class PairTokenizer:
    """Encodes sources by one tokenizer, and translations by another (`encode_target`); decodes translations.

    Args:
        source: the tokenizer of sources.
        target: the tokenizer of translations.

    Raises:
        ValueError: different special ids, or a side that is a pair itself.
    """

    def __init__(self, source: Tokenizer, target: Tokenizer) -> None:
        for side, tokenizer in (("source", source), ("target", target)):
            if hasattr(tokenizer, "encode_target"):
                raise ValueError(f"expected a tokenizer for the {side} only, got one with two vocabularies")
        if source.special_ids != target.special_ids:
            raise ValueError(
                f"expected one set of special ids, got {source.special_ids} of the source and {target.special_ids} of "
                "the target"
            )
        self.source, self.target = source, target

    @property
    def special_ids(self) -> SpecialIds:
        """The special ids, which both sides share."""
        return self.target.special_ids

    @property
    def vocab_size(self) -> int:
        """The number of the target's ids."""
        return self.target.vocab_size

    @property
    def source_vocab_size(self) -> int:
        """The number of the source's ids."""
        return self.source.vocab_size

    @property
    def words_begin_with_space(self) -> bool:
        """Whether a word of a translation includes the space in front of it."""
        return bool(getattr(self.target, "words_begin_with_space", False))

    def encode(self, text: str) -> list[int]:
        """Encodes a source to its ids, without EOS."""
        return self.source.encode(text)

    def encode_target(self, text: str) -> list[int]:
        """Encodes a translation to its ids, without EOS."""
        return self.target.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes many sources; see `encode`."""
        return self.source.encode_batch(texts)

    def pieces(self, text: str) -> list[str]:
        """Cuts a long source as the source's tokenizer does."""
        return self.source.pieces(text)

    @property
    def cuts(self) -> re.Pattern[str] | None:
        """Where a source may be cut."""
        return cuts_of(self.source)

    def decode(self, ids: Iterable[int]) -> str:
        """Decodes the ids of a translation to text: skips special tokens, stops at EOS."""
        return self.target.decode(ids)

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """Returns the piece of each id of a translation."""
        return self.target.tokens(ids)

    def source_tokens(self, ids: Iterable[int]) -> list[str]:
        """Returns the piece of each id of a source."""
        return self.source.tokens(ids)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes both tokenizers into one tokenizer.json."""
        values = {"type": TYPE, "source": contents(self.source), "target": contents(self.target)}
        write_atomically(Path(folder, TOKENIZER), json.dumps(values, ensure_ascii=False).encode() + b"\n")


def sides(tokenizer: Tokenizer) -> tuple[Tokenizer, Tokenizer]:
    """Returns the tokenizers of sources and of translations, for examples of a new translator.

    Raises:
        ValueError: a pretrained model's tokenizer with two vocabularies.
    """
    if isinstance(tokenizer, PairTokenizer):
        return tokenizer.source, tokenizer.target
    if hasattr(tokenizer, "encode_target"):
        raise ValueError("expected a tokenizer of both sides, or one for each, got that of a Marian")
    return tokenizer, tokenizer


def contents(tokenizer: Tokenizer) -> Any:
    """Returns the complete contents of a tokenizer's file as plain values."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(folder)
        return json.loads(Path(folder, TOKENIZER).read_text(encoding="utf-8"))
