"""Engines that cache less than `kv_cache` does, and recompute the rest for each token: they show what a cache saves.

    recompute     encoder and decoder run over everything for each new token (an engine of the library)
    encode_once   the encoder runs once
    cross_cache   encode_once, with the keys and values of cross-attention computed once

Their tokens are those of `kv_cache`, which also caches the keys and values of self-attention.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from fastformer.generation.engines import Batch, Prompt, register
from fastformer.generation.engines.base import Candidates, Selection
from fastformer.generation.engines.kv_cache import choose_from_hidden, new_cache, packed
from fastformer.generation.engines.recompute import RecomputeBatch, RecomputeEngine
from fastformer.generation.model_protocols import (
    DecoderOnly,
    EncoderDecoder,
    Model,
    is_encoder_decoder,
    why_not_by_modules,
)
from fastformer.nn import KVCache, SequenceLayout


class EncodeOnce(RecomputeEngine):
    """An engine that caches the output of the encoder."""

    name: ClassVar[str] = "encode_once"

    @classmethod
    def why_unsupported(cls, model: object, precision: str | None = None) -> str | None:
        if is_encoder_decoder(model):
            return why_not_by_modules(model, precision)
        return "it has no encoder with a cache behind it"

    def open(self, max_rows: int, num_tokens: int) -> Batch:
        return EncodeOnceBatch(self.model, self.device)


class _Rows(RecomputeBatch):
    """A batch that runs the decoder over all tokens again, beside something that it keeps of the sources."""

    @abstractmethod
    def _hidden(self, ids: Tensor, layout: SequenceLayout) -> Tensor:
        """Computes the packed hidden states of packed rows."""

    def step(self, tokens: Sequence[int], selection: Selection) -> Candidates:
        rows = [row for group in self.rows for row in group]
        for row, token in zip(rows, tokens, strict=True):
            row.append(token)
        ids, layout = packed(rows, self.device)
        assert layout.cu_seqlens is not None
        hidden = self._hidden(ids, layout)[layout.cu_seqlens[1:].long() - 1]
        return choose_from_hidden(self.model, hidden, selection)


class EncodeOnceBatch(_Rows):
    """A batch with the encoder's output of each group."""

    def __init__(self, model: EncoderDecoder | DecoderOnly, device: torch.device) -> None:
        super().__init__(model, device)
        self.memories: list[Tensor] = []  # one for each group: (source_seqlen, d_model)

    def prefill(self, prompts: Sequence[Prompt]) -> None:
        super().prefill(prompts)
        assert is_encoder_decoder(self.model)
        sources = [prompt.source or () for prompt in prompts]
        ids, layout = packed(sources, self.device)
        self.memories += self.model.encode(ids, layout).split([len(source) for source in sources])

    def _hidden(self, ids: Tensor, layout: SequenceLayout) -> Tensor:
        assert is_encoder_decoder(self.model)
        memories = [memory for memory, rows in zip(self.memories, self.rows, strict=True) for _ in rows]
        lengths = torch.tensor([len(memory) for memory in memories], device="cpu")
        memory_layout = SequenceLayout.packed(lengths, int(lengths.max())).to(self.device)
        return self.model.decode(ids, torch.cat(memories), layout=layout, memory_layout=memory_layout)

    def free(self, groups: Sequence[int]) -> None:
        super().free(groups)
        leaving = set(groups)
        self.memories = [memory for i, memory in enumerate(self.memories) if i not in leaving]


class CrossCache(EncodeOnce):
    """An engine that caches the keys and values of cross-attention, and runs the decoder over all tokens again."""

    name: ClassVar[str] = "cross_cache"

    def __init__(self, model: Model, precision: str | None = None) -> None:
        super().__init__(model, precision)
        self._empty = new_cache(self.model, 1, 1)

    @property
    def token_bytes(self) -> int:
        """Returns the bytes of a token's keys and values in all layers."""
        return self._empty.token_bytes

    def tokens_needed(self, prompt: Prompt, num_rows: int, new_tokens: int) -> int:
        cache = self._empty
        decoder_blocks = num_rows * cache.blocks_of(len(prompt.tokens) + new_tokens)
        return (cache.blocks_of(len(prompt.source or ())) + decoder_blocks) * cache.block_size

    def open(self, max_rows: int, num_tokens: int) -> Batch:
        return CrossCacheBatch(self.model, self.device, new_cache(self.model, max_rows, num_tokens))


class CrossCacheBatch(_Rows):
    """A batch with a cache, in which the source's part stays valid."""

    def __init__(self, model: EncoderDecoder | DecoderOnly, device: torch.device, cache: KVCache) -> None:
        super().__init__(model, device)
        self._cache = cache

    def prefill(self, prompts: Sequence[Prompt]) -> None:
        super().prefill(prompts)
        assert is_encoder_decoder(self.model)
        before = self._cache.num_groups
        self._cache.add(len(prompts))
        ids, layout = packed([prompt.source or () for prompt in prompts], self.device)
        self.model.store_memory(self._cache.tail(before), self.model.encode(ids, layout), layout)

    def _hidden(self, ids: Tensor, layout: SequenceLayout) -> Tensor:
        assert is_encoder_decoder(self.model)
        hidden = self.model.decode(ids, None, layout=layout, cache=self._cache)
        self._cache.rewind()  # the keys and values of the tokens are recomputed
        return hidden

    def fork(self, parents: Sequence[Sequence[int]]) -> None:
        super().fork(parents)
        self._cache.fork(parents)

    def free(self, groups: Sequence[int]) -> None:
        super().free(groups)
        self._cache.free(groups)

    def free_tokens(self) -> int:
        return self._cache.free_blocks * self._cache.block_size

    def step_tokens(self) -> int:
        cache = self._cache
        return sum(cache.blocks_of(len(row) + 1) for rows in self.rows for row in rows) * cache.block_size


RECOMPUTING = (EncodeOnce, CrossCache)
for _engine in RECOMPUTING:
    register(_engine)  # so that `generate(..., engine=)` knows their names
