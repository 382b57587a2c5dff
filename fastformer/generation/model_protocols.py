"""What decoding asks of a model: one of three kinds, or several of them, by its methods and not by its class."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeAlias, TypeGuard, cast

import torch
from torch import Tensor, nn

from fastformer.nn import KVCache, SequenceLayout
from fastformer.ops.linear_topk import TopK


class Sizes(Protocol):
    """What decoding asks of a model's config."""

    @property
    def vocab_size(self) -> int:
        """The number of ids."""

    @property
    def d_model(self) -> int:
        """The size of a token's vector."""

    @property
    def max_len(self) -> int:
        """The longest sequence."""


class EncoderDecoder(Protocol):
    """A `models.Transformer`, which documents these methods, or a model that decodes like one."""

    @property
    def config(self) -> Sizes:
        """Its sizes."""

    def encode(self, source: Tensor, layout: SequenceLayout | None = None) -> Tensor: ...

    def decode(
        self,
        target: Tensor,
        memory: Tensor | None,
        *,
        layout: SequenceLayout | None = None,
        memory_layout: SequenceLayout | None = None,
        cache: KVCache | None = None,
    ) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...

    def top_tokens(self, hidden: Tensor, k: int, *, log_probs: bool = True) -> TopK: ...

    def empty_cache(
        self, max_rows: int, max_seqlen: int, max_source_seqlen: int | None = None, num_blocks: int | None = None
    ) -> KVCache: ...

    def store_memory(self, cache: KVCache, memory: Tensor, memory_layout: SequenceLayout | None = None) -> None: ...


class DecoderOnly(Protocol):
    """A `models.GPT`, which documents these methods, or a model that decodes like one."""

    @property
    def config(self) -> Sizes:
        """Its sizes."""

    def decode(
        self, tokens: Tensor, *, layout: SequenceLayout | None = None, cache: KVCache | None = None
    ) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...

    def top_tokens(self, hidden: Tensor, k: int, *, log_probs: bool = True) -> TopK: ...

    def empty_cache(self, max_rows: int, max_seqlen: int, num_blocks: int | None = None) -> KVCache: ...


RecurrentState: TypeAlias = tuple[Tensor, Tensor]  # hidden and cell, (num_layers, rows, dim) each


class Recurrent(Protocol):
    """A `baseline.LSTMSeq2Seq`, which documents these methods, or a model that decodes like one."""

    @property
    def config(self) -> Sizes:
        """Its sizes."""

    @property
    def output(self) -> Callable[[Tensor], Tensor]:
        """(rows, d_model) -> (rows, vocab_size)."""

    def encode(self, source: Tensor, layout: SequenceLayout | None = None) -> tuple[Tensor, RecurrentState]: ...

    def decode(
        self, target: Tensor, memory: Tensor, mask: Tensor, state: RecurrentState
    ) -> tuple[Tensor, Tensor, RecurrentState]: ...


class Ensembled(Protocol):
    """An `Ensemble` of models, which documents `combine`."""

    @property
    def config(self) -> Sizes:
        """Its sizes."""

    @property
    def members(self) -> Iterable[object]:
        """The models."""

    def combine(self, logits: Sequence[Tensor]) -> Tensor: ...


Model: TypeAlias = EncoderDecoder | DecoderOnly | Recurrent | Ensembled


def as_model(model: object) -> Model:
    """The model, once it is known to decode in one of the three ways.

    Raises:
        ValueError: it lacks the methods of each, or its parameters hold no values.
    """
    cached, recurrent = ("logits", "top_tokens", "empty_cache"), ("encode", "output")
    if is_ensemble(model) or _has(model, "config", "decode") and (_has(model, *cached) or _has(model, *recurrent)):
        if isinstance(model, nn.Module) and (name := _on_meta(model)) is not None:
            raise ValueError(
                f"expected a {type(model).__name__} whose parameters hold values, got {name!r} on the device meta: "
                "load its weights, or move it with model.to_empty(device=...) and fill it"
            )
        return cast(Model, model)
    raise ValueError(
        "expected a fastformer.models.Transformer or GPT, a baseline.LSTMSeq2Seq, or a model with their methods, got "
        f"{type(model).__name__}"
    )


def modules_of(model: nn.Module) -> list[nn.Module]:
    """All modules of a model, each once; what `model.modules()` gives, in another order and a third of the time."""
    found, seen = [model], {id(model)}
    for module in found:  # which grows meanwhile
        for child in module._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                found.append(child)
    return found


def _on_meta(model: nn.Module) -> str | None:
    """The name of a tensor that has no memory; None where there is none, or hooks bring what is missing."""
    modules, found = modules_of(model), False
    for module in modules:  # all of it for each call of generate: names are for the error alone
        for parameter in module._parameters.values():
            found = found or (parameter is not None and parameter.is_meta)
        for buffer in module._buffers.values():
            found = found or (buffer is not None and buffer.is_meta)
    if not found:
        return None
    if any("_hf_hook" in vars(module) for module in modules):  # accelerate's, which loads what it offloaded
        return None
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    return next(name for name, tensor in named if tensor.is_meta)


def is_decoder_only(model: object) -> TypeGuard[DecoderOnly]:
    """True for a language model, or an ensemble of them, whose inputs are prompts; False for what reads a source."""
    if is_ensemble(model):
        return all(is_decoder_only(member) for member in model.members)
    return _has(model, "empty_cache") and not _has(model, "encode")


def is_ensemble(model: object) -> TypeGuard[Ensembled]:
    """True for several models that decode as one."""
    # Of the class first: a module that is asked for what it doesn't have searches long.
    return hasattr(type(model), "combine") and _has(model, "config", "members")


def is_recurrent(model: object) -> TypeGuard[Recurrent]:
    """True for what keeps a state and no cache."""
    return _has(model, "output") and not _has(model, "empty_cache")


def is_encoder_decoder(model: object) -> TypeGuard[EncoderDecoder]:
    """True for what reads a source and keeps a cache."""
    return _has(model, "encode", "empty_cache", "store_memory")


def _has(model: object, *names: str) -> bool:
    return all(hasattr(model, name) for name in names)


def device_of(model: Model) -> torch.device:
    """Where a model's first parameter is; the CPU where there is none."""
    parameter = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    return torch.device("cpu") if parameter is None else parameter.device
