"""The lower rungs of the ladder: engines that keep less, and compute it again for each token.

    recompute     encoder and decoder run over everything for each new token
    encode_once   the encoder runs once
    cross_cache   and the keys and values of cross-attention are computed once

They give the same tokens as `kv_cache`, which also keeps those of self-attention. They are there to be compared with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from fastformer.generation.engines.base import Batch, Candidates, Engine, Prompt, Selection
from fastformer.generation.engines.kv_cache import choose_from_hidden, new_cache, packed, packed_layout
from fastformer.generation.model_protocols import (
    DecoderOnly,
    EncoderDecoder,
    Model,
    device_of,
    is_decoder_only,
    is_encoder_decoder,
)
from fastformer.generation.precisions import why_not_by_modules
from fastformer.nn import KVCache, SequenceLayout


class RecomputeEngine(Engine):
    """Runs everything over everything for each token.

    Args:
        model: a `models.Transformer` or a `models.GPT`, or what decodes like one.
        precision: its own, or None.
    """

    name: ClassVar[str] = "recompute"

    def __init__(self, model: Model, precision: str | None = None) -> None:
        assert is_encoder_decoder(model) or is_decoder_only(model)
        self.model: EncoderDecoder | DecoderOnly = model
        self.device = device_of(model)

    @classmethod
    def why_unsupported(cls, model: object, precision: str | None = None) -> str | None:
        """Why the model can't be called with all of its tokens, or doesn't compute in this precision."""
        if is_encoder_decoder(model) or is_decoder_only(model):
            return why_not_by_modules(model, precision)
        return "it keeps a state, and can't go on without it"

    def open(self, max_rows: int, num_tokens: int) -> Batch:
        """See `Engine.open`."""
        return RecomputeBatch(self.model, self.device)


class RecomputeBatch(Batch):
    """The ids of each row, and nothing that was computed from them."""

    def __init__(self, model: EncoderDecoder | DecoderOnly, device: torch.device) -> None:
        self.model, self.device = model, device
        self.sources: list[Sequence[int]] = []  # of the groups
        self.rows: list[list[list[int]]] = []  # of the groups: the tokens of each row, but for the next one

    def prefill(self, prompts: Sequence[Prompt]) -> None:
        self.sources += [prompt.source or () for prompt in prompts]
        self.rows += [[list(prompt.tokens[:-1])] for prompt in prompts]

    def step(self, tokens: Sequence[int], selection: Selection) -> Candidates:
        rows = [row for group in self.rows for row in group]
        for row, token in zip(rows, tokens, strict=True):
            row.append(token)
        ids, layout = packed(rows, self.device)
        hidden = self._hidden(ids, layout)
        assert layout.cu_seqlens is not None
        return choose_from_hidden(self.model, hidden[layout.cu_seqlens[1:].long() - 1], selection)

    def _hidden(self, ids: Tensor, layout: SequenceLayout) -> Tensor:
        model = self.model
        if is_decoder_only(model):
            return model.decode(ids, layout=layout)
        assert is_encoder_decoder(model)
        memory, memory_layout = self._memory(model)
        return model.decode(ids, memory, layout=layout, memory_layout=memory_layout)

    def _memory(self, model: EncoderDecoder) -> tuple[Tensor, SequenceLayout]:
        """The encoder's output for each row's source, packed."""
        sources = [source for source, rows in zip(self.sources, self.rows, strict=True) for _ in rows]
        ids, layout = packed(sources, self.device)
        return model.encode(ids, layout), layout

    def fork(self, parents: Sequence[Sequence[int]]) -> None:
        self.rows = [[list(rows[i]) for i in places] for rows, places in zip(self.rows, parents, strict=True)]

    def free(self, groups: Sequence[int]) -> None:
        leaving = set(groups)
        self.sources = [source for i, source in enumerate(self.sources) if i not in leaving]
        self.rows = [rows for i, rows in enumerate(self.rows) if i not in leaving]


class EncodeOnceEngine(RecomputeEngine):
    """Keeps what the encoder gives."""

    name: ClassVar[str] = "encode_once"

    @classmethod
    def why_unsupported(cls, model: object, precision: str | None = None) -> str | None:
        """See `Engine.why_unsupported`."""
        if is_encoder_decoder(model):
            return why_not_by_modules(model, precision)
        return "it has no encoder with a cache behind it"

    def open(self, max_rows: int, num_tokens: int) -> Batch:
        """See `Engine.open`."""
        return EncodeOnceBatch(self.model, self.device)


class EncodeOnceBatch(RecomputeBatch):
    """The output of the encoder for each group."""

    def __init__(self, model: EncoderDecoder | DecoderOnly, device: torch.device) -> None:
        super().__init__(model, device)
        self.memories: list[Tensor] = []  # of the groups: (source_seqlen, d_model)

    def prefill(self, prompts: Sequence[Prompt]) -> None:
        super().prefill(prompts)
        assert is_encoder_decoder(self.model)
        sources = [prompt.source or () for prompt in prompts]
        ids, layout = packed(sources, self.device)
        self.memories += self.model.encode(ids, layout).split([len(source) for source in sources])

    def _memory(self, model: EncoderDecoder) -> tuple[Tensor, SequenceLayout]:
        memories = [memory for memory, rows in zip(self.memories, self.rows, strict=True) for _ in rows]
        return torch.cat(memories), packed_layout([len(memory) for memory in memories], self.device)

    def free(self, groups: Sequence[int]) -> None:
        super().free(groups)
        leaving = set(groups)
        self.memories = [memory for i, memory in enumerate(self.memories) if i not in leaving]


class CrossCacheEngine(EncodeOnceEngine):
    """Keeps the keys and values of cross-attention, and runs the decoder over all tokens again."""

    name: ClassVar[str] = "cross_cache"

    def __init__(self, model: Model, precision: str | None = None) -> None:
        super().__init__(model, precision)
        self._empty = new_cache(self.model, 1, 1)

    @property
    def token_bytes(self) -> int:
        """The keys and values of a token in all layers."""
        return self._empty.token_bytes

    def tokens_needed(self, prompt: Prompt, num_rows: int, new_tokens: int) -> int:
        """See `Engine.tokens_needed`."""
        cache = self._empty
        own = num_rows * cache.blocks_of(len(prompt.tokens) + new_tokens)
        return (cache.blocks_of(len(prompt.source or ())) + own) * cache.block_size

    def open(self, max_rows: int, num_tokens: int) -> Batch:
        """See `Engine.open`."""
        return CrossCacheBatch(self.model, self.device, new_cache(self.model, max_rows, num_tokens))


class CrossCacheBatch(RecomputeBatch):
    """A cache of which the source's part is kept."""

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
        self._cache.rewind()  # the tokens' own keys and values are computed again
        return hidden

    def fork(self, parents: Sequence[Sequence[int]]) -> None:
        super().fork(parents)
        self._cache.reorder(parents)

    def free(self, groups: Sequence[int]) -> None:
        super().free(groups)
        self._cache.release(groups)

    def free_tokens(self) -> int:
        return self._cache.free_blocks * self._cache.block_size

    def step_tokens(self) -> int:
        cache = self._cache
        return sum(cache.blocks_of(len(row) + 1) for rows in self.rows for row in rows) * cache.block_size
