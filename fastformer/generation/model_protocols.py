"""The requirements of decoding on a model: its methods and its precision.

A model is one of three kinds, or an ensemble of several models. Its methods, not its class, determine the kind.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeAlias, TypeGuard, cast, get_args

import torch
from torch import Tensor, nn

from fastformer.generation.config import Precision
from fastformer.generation.evaluation import modules_of
from fastformer.models.quantization import QUANTIZED
from fastformer.models.stored import first_parameter
from fastformer.nn import KVCache, SequenceLayout
from fastformer.ops.linear_topk import TopK

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PRECISIONS = get_args(Precision)

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_CASTS = {"fp32": "model.float()", "bf16": "model.bfloat16()", "fp16": "model.half()"}


class Sizes(Protocol):
    """The part of a model's config that decoding uses."""

    @property
    def vocab_size(self) -> int:
        """The number of ids."""

    @property
    def d_model(self) -> int:
        """The size of the hidden states."""

    @property
    def max_len(self) -> int:
        """The longest sequence."""


class EncoderDecoder(Protocol):
    """A `models.Transformer`, which documents these methods, or a model that decodes like one."""

    @property
    def config(self) -> Sizes:
        """The sizes of the model."""

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
        """The sizes of the model."""

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
        """The sizes of the model."""

    @property
    def output(self) -> Callable[[Tensor], Tensor]:
        """The function (rows, d_model) -> (rows, vocab_size)."""

    def encode(self, source: Tensor, layout: SequenceLayout | None = None) -> tuple[Tensor, RecurrentState]: ...

    def decode(
        self, target: Tensor, memory: Tensor, mask: Tensor, state: RecurrentState
    ) -> tuple[Tensor, Tensor, RecurrentState]: ...


class Ensembled(Protocol):
    """An `Ensemble` of models, which documents `combine`."""

    @property
    def config(self) -> Sizes:
        """The sizes of the ensemble."""

    @property
    def members(self) -> Iterable[object]:
        """The models."""

    def combine(self, logits: Sequence[Tensor]) -> Tensor: ...


Model: TypeAlias = EncoderDecoder | DecoderOnly | Recurrent | Ensembled


def as_model(model: object) -> Model:
    """Returns the model after a check that it is of a known kind.

    Raises:
        ValueError: the model lacks the methods of each kind, or its parameters hold no values.
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


def _on_meta(model: nn.Module) -> str | None:
    """Returns the name of a tensor on "meta", or None if there is none, or if hooks load the missing values."""
    modules, is_on_meta = modules_of(model), False
    for module in modules:  # each call of generate runs this; names are only for errors
        for tensors in (module._parameters, module._buffers):
            for tensor in dict.values(cast(dict[str, Any], tensors)):  # reads nothing of a model that is in a file
                if tensor is not None and tensor.is_meta:
                    is_on_meta = True
    if not is_on_meta:
        return None
    if any("_hf_hook" in vars(module) for module in modules):  # accelerate loads offloaded weights by it
        return None
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    return next(name for name, tensor in named if tensor.is_meta)


def is_decoder_only(model: object) -> TypeGuard[DecoderOnly]:
    """Returns True for a language model or an ensemble of them, whose inputs are prompts; False if it reads sources."""
    if is_ensemble(model):
        return all(is_decoder_only(member) for member in model.members)
    return _has(model, "empty_cache") and not _has(model, "encode")


def is_ensemble(model: object) -> TypeGuard[Ensembled]:
    """Returns True for an ensemble of models."""
    # The class first: a lookup of a missing attribute on a module is slow.
    return hasattr(type(model), "combine") and _has(model, "config", "members")


def is_recurrent(model: object) -> TypeGuard[Recurrent]:
    """Returns True for a model with a recurrent state in place of a cache."""
    return _has(model, "output") and not _has(model, "empty_cache")


def is_encoder_decoder(model: object) -> TypeGuard[EncoderDecoder]:
    """Returns True for a model that reads a source and uses a cache."""
    return _has(model, "encode", "empty_cache", "store_memory")


def _has(model: object, *names: str) -> bool:
    return all(hasattr(model, name) for name in names)


def device_of(model: Model) -> torch.device:
    """Returns the device of a model's first parameter; the CPU for a model without parameters."""
    parameter = first_parameter(model) if isinstance(model, nn.Module) else None
    return torch.device("cpu") if parameter is None else parameter.device


def check_precision(precision: object) -> None:
    """Raises a ValueError unless `precision` is the name of a precision, or None for the model's own."""
    if precision is not None and (not isinstance(precision, str) or precision not in PRECISIONS):
        raise ValueError(f"expected precision fp32, bf16, fp16, int8 or int4, got {precision!r}")


def dtype_precision(model: object, *, is_of_one_dtype: bool = False) -> str:
    """Returns the precision of a model's modules: autocast's dtype if it is on, else the dtype of the parameters.

    Args:
        model: any object.
        is_of_one_dtype: the caller knows that all parameters have one dtype, so the first one tells it.

    Returns:
        One of `DTYPES`; for another dtype its name in PyTorch; "mixed" for parameters of several dtypes.
    """
    dtypes: set[torch.dtype] = set()
    is_cast = {device: torch.is_autocast_enabled(device) for device in ("cpu", "cuda")}
    reads_device = any(is_cast.values())
    for module in modules_of(model) if isinstance(model, nn.Module) else []:
        if dtypes and is_of_one_dtype:
            break
        for parameter in dict.values(cast(dict[str, Any], module._parameters)):
            if parameter is None or not (dtype := parameter.dtype).is_floating_point:
                continue
            if reads_device and dtype != torch.float64 and is_cast.get(device := parameter.device.type):
                dtype = torch.get_autocast_dtype(device)
            dtypes.add(dtype)
    if len(dtypes) > 1:
        return "mixed"
    dtype = dtypes.pop() if dtypes else torch.get_default_dtype()
    return _NAMES.get(dtype, str(dtype).removeprefix("torch."))


def own_precision(model: object, *, is_of_one_dtype: bool = False) -> str:
    """Returns a model's own precision: "int8" or "int4" if it is quantised, else `dtype_precision`."""
    precision: str | None = getattr(model, "precision", None)
    return precision if precision in QUANTIZED else dtype_precision(model, is_of_one_dtype=is_of_one_dtype)


def asked_precision(model: object, precision: Precision | None) -> Precision | None:
    """Returns the precision to request from an engine, given the precision for loading the model.

    It is None if the dtype of the loaded weights determines the precision. A quantised model has its own precision
    whatever its dtype, so the caller's precision must then be passed on.
    """
    return precision if {precision, own_precision(model)} & {*QUANTIZED} else None


def why_not_by_modules(model: object, precision: str | None) -> str | None:
    """Returns the reason why an engine that calls the model's own modules can't decode in a precision, or None."""
    computed = dtype_precision(model)
    if precision is None or precision == computed:
        return None
    if precision in QUANTIZED:
        return (
            f"it calls the model's modules, which compute in {computed}; {precision} needs the engine 'cpp', or, on a "
            f"GPU, 'graph' with a model in bf16 or fp16 that quantize({precision!r}) returned"
        )
    is_autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    advice = "leave autocast" if is_autocast else f"decode with {_CASTS[precision]}"
    return f"it calls the model's modules, which compute in {computed}: for {precision} {advice}"
