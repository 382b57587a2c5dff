"""A tokenizer for each side of a translator whose source and target have vocabularies of their own."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from fastformer.data.tokenizer import Tokenizer

TYPE = "pair"  # in tokenizer.json


class PairTokenizer(Tokenizer):
    """Encodes sources by one tokenizer, and translations by another (`encode_target`); decodes translations.

    Args:
        source: the tokenizer of sources.
        target: the tokenizer of translations.

    Raises:
        ValueError: different special ids, or a side that is a pair itself.
    """

    def __init__(self, source: Tokenizer, target: Tokenizer) -> None:
        for side, tokenizer in (("source", source), ("target", target)):
            if not isinstance(tokenizer, Tokenizer):
                raise ValueError(f"expected a fastformer.data.Tokenizer for the {side}, got {type(tokenizer).__name__}")
            if tokenizer.has_target:
                raise ValueError(f"expected a tokenizer for the {side} only, got one with two vocabularies")
        if source.special_ids != target.special_ids:
            raise ValueError(
                f"expected one set of special ids, got {source.special_ids} of the source and {target.special_ids} of "
                "the target"
            )
        super().__init__(source.backend, target.special_ids, target=target.backend, vocab_size=target.vocab_size)
        self.source, self.target = source, target

    @property
    def source_vocab_size(self) -> int:
        """The number of the source's ids."""
        return self.source.vocab_size

    def encode(self, text: str, max_len: int | None = None) -> list[int]:
        """Encodes a source to its ids, without EOS."""
        return self.source.encode(text, max_len)

    def encode_target(self, text: str) -> list[int]:
        """Encodes a translation to its ids, without EOS."""
        return self.target.encode(text)

    def encode_batch(
        self,
        texts: Sequence[str],
        max_len: int | None = None,
        *,
        prompt: str = "",
        lengths: list[int] | None = None,
    ) -> list[list[int]]:
        """Encodes many sources; see `encode`."""
        return self.source.encode_batch(texts, max_len, prompt=prompt, lengths=lengths)

    @property
    def cuts(self) -> re.Pattern[str] | None:
        """Where a source may be cut."""
        return self.source.cuts

    def decode(self, ids: Iterable[int]) -> str:
        """Decodes the ids of a translation to text: skips special tokens, stops at EOS."""
        return self.target.decode(ids)

    def source_tokens(self, ids: Iterable[int]) -> list[str]:
        """Returns the piece of each id of a source."""
        return self.source.tokens(ids)

    def to_json(self) -> dict[str, Any]:
        """Returns the contents of one tokenizer.json with both tokenizers."""
        return {"type": TYPE, "source": self.source.to_json(), "target": self.target.to_json()}


def sides(tokenizer: Tokenizer) -> tuple[Tokenizer, Tokenizer]:
    """Returns the tokenizers of sources and of translations, for examples of a new translator.

    Raises:
        ValueError: a pretrained model's tokenizer with two vocabularies.
    """
    if isinstance(tokenizer, PairTokenizer):
        return tokenizer.source, tokenizer.target
    if tokenizer.has_target:
        raise ValueError("expected a tokenizer of both sides, or one for each, got that of a Marian")
    return tokenizer, tokenizer


def contents(tokenizer: Tokenizer) -> Any:
    """Returns the complete contents of a tokenizer's file as plain values."""
    return json.loads(json.dumps(tokenizer.to_json()))
