"""Text in, text out: a model, its tokenizer, and batches by length."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fastformer.generation.generate import generate
from fastformer.models import Transformer

_READ_AHEAD = 1000  # lines of a stream that are sorted by length together


class TextCodec(Protocol):
    """What a translator asks of a tokenizer; those of `fastformer.data` have it."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without EOS."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids."""
        ...

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """Each id as a readable string."""
        ...


class Translator:
    """Translates texts with a trained model.

    Args:
        model: a `models.Transformer`, or another model with its `encode`, `decode` and `config`. Set to evaluation.
        tokenizer: of both sides.
        max_tokens: of a batch of sources, padding included.
    """

    def __init__(self, model: Any, tokenizer: TextCodec, *, max_tokens: int = 8192) -> None:
        self.model, self.tokenizer, self.max_tokens = model, tokenizer, max_tokens

    @classmethod
    def from_pretrained(
        cls, run: str | os.PathLike, tokenizer: TextCodec, *, device: Any = None, max_tokens: int = 8192
    ) -> Translator:
        """The translator of a run folder.

        Args:
            run: a folder that `save_pretrained` wrote.
            tokenizer: `fastformer.data.load_tokenizer(run)`.
            device: where it runs.
            max_tokens: of a batch.

        Raises:
            ValueError: the folder is no Transformer's, or damaged.
        """
        return cls(Transformer.from_pretrained(run, device=device), tokenizer, max_tokens=max_tokens)

    def translate(self, texts: Sequence[str], *, numbers: Sequence[int] | None = None, **options: Any) -> list[str]:
        """Translates; the order is kept.

        Args:
            texts: one sentence each.
            numbers: of the texts, for messages; None: from 1.
            options: of `generate`: num_beams, length_penalty, do_sample, max_new_tokens, use_cache, ...

        Raises:
            ValueError: an empty text, or one longer than the model's max_len; the text is named by its number.
        """
        numbers = numbers or range(1, len(texts) + 1)
        encoded = [self.encode(text, number) for text, number in zip(texts, numbers, strict=True)]
        found: list[str] = [""] * len(encoded)
        was_training = self.model.training
        self.model.eval()
        try:
            for batch in self._batches(encoded):
                ids = _padded([encoded[i] for i in batch]).to(next(self.model.parameters()).device)
                out = generate(self.model, ids, **options)
                assert isinstance(out, Tensor)
                for i, row in zip(batch, out[:: len(out) // len(batch)].tolist(), strict=True):
                    found[i] = self.tokenizer.decode(row)
        finally:
            self.model.train(was_training)
        return found

    def stream(self, texts: Iterable[str], *, read_ahead: int = _READ_AHEAD, **options: Any) -> Iterator[str]:
        """Translates as texts come, in order; an empty text stays empty.

        Args:
            texts: one sentence each.
            read_ahead: how many are read before the first is translated; those are batched by length together.
            options: of `generate`.
        """
        numbered = enumerate(texts, 1)
        while group := list(itertools.islice(numbered, read_ahead)):
            full = {number: text for number, text in group if text.strip()}
            found = dict(zip(full, self.translate(list(full.values()), numbers=list(full), **options), strict=True))
            yield from (found.get(number, "") for number, _ in group)

    def encode(self, text: str, number: int = 1) -> list[int]:
        """The source ids of a text, EOS at the end.

        Raises:
            ValueError: an empty text, or one longer than the model's max_len.
        """
        if not text.strip():
            raise ValueError(f"text {number}: expected something to translate, got an empty text")
        ids = [*self.tokenizer.encode(text), 1]
        max_len = self.model.config.max_len
        if len(ids) > max_len:
            raise ValueError(
                f"text {number}: expected at most {max_len} tokens, got {len(ids)}; split it into sentences"
            )
        return ids

    def attention(self, text: str) -> tuple[list[str], list[str], Tensor]:
        """Which source tokens each token of the translation looked at.

        Returns:
            Source tokens, target tokens, and (num_layers, num_heads, target, source) weights of cross-attention.
        """
        source = self.encode(text)
        ids = torch.tensor([source], device=next(self.model.parameters()).device)
        out = generate(self.model, ids)
        assert isinstance(out, Tensor)
        target = out[0].tolist()
        shifted = torch.tensor([[0, *target[:-1]]], device=ids.device)
        weights = self.model.attention_maps(ids, shifted)["cross"][:, 0]
        return self.tokenizer.tokens(source), self.tokenizer.tokens(target), weights.cpu()

    def _batches(self, encoded: list[list[int]]) -> Iterator[list[int]]:
        """Indices in batches of similar length, the longest first: what doesn't fit in memory fails at once."""
        order = sorted(range(len(encoded)), key=lambda i: -len(encoded[i]))
        start = 0
        while start < len(order):
            size = max(1, self.max_tokens // len(encoded[order[start]]))
            yield order[start : start + size]
            start += size


def _padded(sequences: list[list[int]]) -> Tensor:
    width = max(map(len, sequences))
    return torch.tensor([[*sequence, *[0] * (width - len(sequence))] for sequence in sequences])
