"""Decodes with a `KVCache`: a step computes one token for each row, and no token is computed twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from fastformer.cache.kv_cache import BLOCK_SIZE
from fastformer.generation.engines.base import Batch, Candidates, Engine, Prompt, Selection
from fastformer.generation.engines.sampling import choose
from fastformer.generation.model_protocols import (
    DecoderOnly,
    EncoderDecoder,
    Model,
    device_of,
    is_decoder_only,
    is_encoder_decoder,
    why_not_by_modules,
)
from fastformer.nn import KVCache, SequenceLayout


class ModuleEngine(Engine):
    """Calls the modules of a `models.Transformer` or a `models.GPT`, or a model that decodes like one.

    Args:
        model: the model to decode.
        precision: the model's own precision, or None.
    """

    def __init__(self, model: Model, precision: str | None = None) -> None:
        assert is_encoder_decoder(model) or is_decoder_only(model)
        self.model: EncoderDecoder | DecoderOnly = model
        self.device = device_of(model)

    @classmethod
    def why_unsupported(cls, model: object, precision: str | None = None) -> str | None:
        """Returns a reason if the model doesn't decode like these or compute in this precision, or None."""
        if is_encoder_decoder(model) or is_decoder_only(model):
            return why_not_by_modules(model, precision)
        return "it is neither an encoder-decoder nor a decoder with keys and values (empty_cache): it may have a state"


class KVCacheEngine(ModuleEngine):
    """Steps a model with a `KVCache`; see `ModuleEngine`."""

    name: ClassVar[str] = "kv_cache"

    def __init__(self, model: Model, precision: str | None = None) -> None:
        super().__init__(model, precision)
        self._empty = new_cache(self.model, 1, 1)  # gives the bytes of a token
        self.block_size = self._empty.block_size

    @classmethod
    def why_unsupported(cls, model: object, precision: str | None = None) -> str | None:
        """See `ModuleEngine`; a `KVCache` doesn't hold the states of layers."""
        if any(getattr(getattr(model, "config", None), "stateful", ())):
            return "some layers have a state, which its cache doesn't hold"
        return super().why_unsupported(model, precision)

    @property
    def token_bytes(self) -> int:
        """The bytes of a token's keys and values in all layers."""
        return self._empty.token_bytes

    def open(self, max_rows: int, num_tokens: int) -> KVCacheBatch:
        return KVCacheBatch(self.model, self.device, new_cache(self.model, max_rows, num_tokens))


class KVCacheBatch(Batch):
    """A batch whose rows are the rows of a `KVCache`."""

    def __init__(self, model: EncoderDecoder | DecoderOnly, device: torch.device, cache: KVCache) -> None:
        self.model, self.device, self._cache = model, device, cache

    def prefill(self, prompts: Sequence[Prompt]) -> None:
        model, before = self.model, self._cache.num_groups
        self._cache.add(len(prompts))
        new = self._cache.tail(before)
        if is_encoder_decoder(model):
            ids, layout = packed([prompt.source or () for prompt in prompts], self.device)
            model.store_memory(new, model.encode(ids, layout), layout)
        prefixes = [prompt.tokens[:-1] for prompt in prompts]
        if not any(prefixes):
            return
        ids, layout = packed(prefixes, self.device)
        if is_encoder_decoder(model):
            model.decode(ids, None, layout=layout, cache=new)
        elif is_decoder_only(model):
            model.decode(ids, layout=layout, cache=new)

    def step(self, tokens: Sequence[int], selection: Selection) -> Candidates:
        ids = torch.tensor(tokens, device=self.device)[:, None]
        hidden = decode_cached(self.model, ids, self._cache)
        return choose_from_hidden(self.model, hidden[:, -1], selection)

    def fork(self, parents: Sequence[Sequence[int]]) -> None:
        self._cache.fork(parents)

    def free(self, groups: Sequence[int]) -> None:
        self._cache.free(groups)

    def is_current(self) -> bool:
        # The model's dtype or its layers may have changed, and autocast may be on or off since.
        current, new = self._cache, new_cache(self.model, 1, 1)
        return (current.k.dtype, current.layer_heads) == (new.k.dtype, new.layer_heads)

    def free_tokens(self) -> int:
        return self._cache.free_blocks * self._cache.block_size

    def step_tokens(self) -> int:
        return self._cache.blocks_needed(1) * self._cache.block_size


def decode_cached(model: EncoderDecoder | DecoderOnly, ids: Tensor, cache: KVCache) -> Tensor:
    """Appends the tokens ids (rows, 1) to a cache's rows, and returns their hidden states, (rows, 1, d_model)."""
    if is_encoder_decoder(model):
        return model.decode(ids, None, cache=cache)
    assert is_decoder_only(model)
    return model.decode(ids, cache=cache)


def decode_whole(
    model: EncoderDecoder | DecoderOnly,
    sources: Sequence[Sequence[int]],
    rows: Sequence[Sequence[int]],
    device: torch.device,
) -> tuple[Tensor, SequenceLayout]:
    """Reads rows as wholes, without a cache. Returns their packed hidden states, (total, d_model), and their layout.

    Args:
        model: the model to decode.
        sources: the source of each row; a decoder-only model ignores them.
        rows: the ids that the decoder reads.
        device: the model's device.
    """
    ids, layout = packed(rows, device)
    if is_decoder_only(model):
        return model.decode(ids, layout=layout), layout
    assert is_encoder_decoder(model)
    source_ids, memory_layout = packed(sources, device)
    memory = model.encode(source_ids, memory_layout)
    return model.decode(ids, memory, layout=layout, memory_layout=memory_layout), layout


def new_cache(model: EncoderDecoder | DecoderOnly, max_rows: int, num_tokens: int) -> KVCache:
    """Returns an empty cache for max_rows rows with num_tokens tokens in blocks."""
    longest = model.config.max_len
    num_blocks = 2 + num_tokens // BLOCK_SIZE  # block 0 belongs to no row, and the last may be half needed
    if is_encoder_decoder(model):
        return model.empty_cache(max_rows, longest, longest, num_blocks)
    assert is_decoder_only(model)
    return model.empty_cache(max_rows, longest, num_blocks)


def packed(sequences: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, SequenceLayout]:
    """Returns lists of ids packed into one tensor, (total,), and their layout."""
    ids = torch.tensor([token for sequence in sequences for token in sequence], dtype=torch.long, device="cpu")
    lengths = [len(sequence) for sequence in sequences]
    return ids.to(device), SequenceLayout.packed(torch.tensor(lengths, device="cpu"), max(lengths)).to(device)


def choose_from_hidden(model: EncoderDecoder | DecoderOnly, hidden: Tensor, selection: Selection) -> Candidates:
    """Returns the candidates of a step from hidden states (rows, d_model). Logits are written only for logit_rows.

    16-bit logits are rounded, while `top_tokens` compares the unrounded sums. Each row uses one of the two
    independently, because its tokens must not depend on its neighbours.
    """
    num_rows, logit_rows = hidden.shape[0], list(selection.logit_rows)
    if len(logit_rows) == num_rows:
        return choose(model.logits(hidden), selection)
    plain = sorted(set(range(num_rows)).difference(logit_rows))
    count = min(selection.num_candidates, model.config.vocab_size)
    best = model.top_tokens(hidden[plain] if logit_rows else hidden, count, log_probs=selection.log_probs)
    candidates = Candidates(best.indices.tolist(), best.values.tolist())
    if not logit_rows:
        return candidates
    shown = choose(model.logits(hidden[logit_rows]), replace(selection, logit_rows=range(len(logit_rows))))
    places = sorted(range(num_rows), key=(plain + logit_rows).__getitem__)
    ids, values = candidates.ids + shown.ids, candidates.values + shown.values
    return Candidates([ids[place] for place in places], [values[place] for place in places])
