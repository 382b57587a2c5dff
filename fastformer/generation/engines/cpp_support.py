"""Checks whether the C++ engine supports a model, and returns the reason if it doesn't.

The engine computes the same as a model's modules without calling them. So it supports a model only if calling the
modules would make no difference: every module is the library's own and as the config makes it, without hooks or
patches.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, lru_cache
from types import NoneType
from typing import Any, TypeAlias, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fastformer.generation.model_protocols import check_precision, own_precision
from fastformer.models import BERT, GPT, Transformer
from fastformer.models.bert import ClassificationHead, HeadLinear
from fastformer.models.pretrained import Undrawn
from fastformer.nn.attention import MultiheadAttention
from fastformer.nn.attention_parameters import AttentionParameters
from fastformer.nn.decoder_only import DecoderOnlyLayer
from fastformer.nn.embedding import Embedding, PositionalEncoding, RelativePositionBias, RotaryEmbedding
from fastformer.nn.feed_forward import fused_name
from fastformer.nn.guards import ModelGuards, why_not_now
from fastformer.nn.layers import TransformerDecoderLayer, TransformerEncoderLayer
from fastformer.nn.norm import AddLayerNorm
from fastformer.nn.transformer import TransformerDecoder, TransformerEncoder
from fastformer.ops import _extension

PACKED_PRECISIONS = ("fp32", "bf16", "int8", "int4")
_DTYPES = (torch.float32, torch.bfloat16)

# Attributes that may differ from module to module without changing the results in evaluation.
_FREE = {
    "training",
    "dropout",
    "p",
    "inplace",
    "gradient_checkpointing",
    "enable_nested_tensor",
    "use_nested_tensor",
    "padding",
    "mask_check",
    "atomics",
    "_is_full_backward_hook",
}
_VALUES = (int, float, str, tuple, NoneType)

Kind: TypeAlias = Any  # a class of modules, which mypy doesn't take for hashable


def why_no_cpp_engine() -> str | None:
    """Returns the reason why the C++ engine can't run on this machine, whatever the model, or None if it can."""
    return _extension.why_missing("Session")


def why_not_supported(model: object, precision: str | None) -> str | None:
    """Returns the reason why the C++ engine can't decode a model in a precision, with the module's name, or None.

    Args:
        model: any object.
        precision: see `choose_engine`.

    Raises:
        ValueError: the precision doesn't exist.
    """
    check_precision(precision)
    if (missing := why_no_cpp_engine()) is not None:
        return missing
    if type(model) not in (Transformer, GPT):
        return f"it only supports models.Transformer and models.GPT, and a {type(model).__name__} may differ"
    assert isinstance(model, Transformer | GPT)
    return why_not_now() or find_guards(model)[1] or why_not_in(precision, model)


def why_not_in(precision: str | None, model: object) -> str | None:
    """Returns the reason why C++ code can't compute a model in this precision (None: the model's own), or None."""
    if precision is None and torch.is_autocast_enabled("cpu"):
        precision = own_precision(model)
    if precision is not None and precision not in PACKED_PRECISIONS:
        return f"it computes in fp32, bf16, int8 and int4, not in {precision}"
    return None


_guards: WeakKeyDictionary[nn.Module, ModelGuards] = WeakKeyDictionary()


def find_guards(model: Transformer | GPT | BERT) -> tuple[ModelGuards | None, str | None]:
    """Returns the guards of a model that is as its config makes it (cached while they hold), or why it isn't."""
    guards = _guards.get(model)
    if guards is not None and guards.hold(model):
        return guards, None
    _guards.pop(model, None)
    reason = _why_not_by_classes() or _why_not_as_made(model)
    if reason is not None:
        return None, reason
    config: dict[str, object] = vars(model.config)
    guards = _guards[model] = ModelGuards(model, [*_WATCHED, *((config, name) for name in config)])
    return guards, None


def tensors_of(model: Transformer | GPT | BERT) -> list[Tensor]:
    """Returns the tensors of a model that is as its config makes it.

    Raises:
        ValueError: it no longer is.
    """
    guards, reason = find_guards(model)
    if guards is None:
        raise ValueError(f"expected a model as it was when its engine was chosen: {reason}")
    return guards.tensors


def forget_guards(model: nn.Module) -> None:
    """Drops the guards of a model, which hold its tensors: call it to free a model's weights after packing them."""
    _guards.pop(model, None)


def _why_not_by_classes() -> str | None:
    """Returns a reason with the name of a replaced method of the library's own module classes, or None."""
    for (kind, name), function in _FUNCTIONS.items():
        if vars(kind).get(name) is not function:
            return f"{kind.__name__}.{name} was replaced"
    return None


def _why_not_as_made(model: Transformer | GPT | BERT) -> str | None:
    try:
        made = _made(cast(Kind, type(model)), tuple(vars(model.config).items()))
    except (TypeError, ValueError) as error:  # the config was changed after the model was made
        return f"no model can be made from its config: {error}"
    dtypes: dict[torch.dtype, str] = {}
    for name, module, other in _walk(model, made):
        if isinstance(other, str):
            return other
        reason = _why_not_module(module, other) or _why_not_tensors(module, other, name, dtypes)
        if reason is not None:
            return f"{_called(name)} {reason}"
    if len(dtypes) > 1:
        found = ", ".join(f"{name} is {str(dtype).removeprefix('torch.')}" for dtype, name in dtypes.items())
        return f"its parameters are of several dtypes: {found}"
    return None


def _walk(model: nn.Module, made: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module | str]]:
    """Yields each module, its name, and the module that the config makes in its place or the reason for a mismatch."""
    stack: list[tuple[str, nn.Module, nn.Module]] = [("", model, made)]
    while stack:
        name, module, other = stack.pop()
        yield name, module, other
        prefix = f"{name}." if name else ""
        found = module._modules
        for child in other._modules.keys() | found.keys() if found.keys() != other._modules.keys() else found:
            expected, inner, place = other._modules.get(child), found.get(child), prefix + child
            if child == "activation" and fused_name(inner) is not None:  # type: ignore[arg-type]
                # nn.ReLU() in place of F.relu: the layer's own name for it says whether it is the same.
                expected = inner
            if expected is None and inner is None:
                continue
            if expected is None or inner is None:
                what = "has no" if inner is None else "has an additional"
                yield name, module, f"{_called(name)} {what} module {child!r}, which contradicts its config"
                return
            if type(inner) is not type(expected):
                yield place, inner, f"{_called(place)} is a {_full_name(type(inner))}, not {_full_name(type(expected))}"
                return
            stack.append((place, inner, expected))


def _why_not_module(module: nn.Module, made: nn.Module) -> str | None:
    own, theirs = vars(module), vars(made)
    if module._forward_hooks or module._forward_pre_hooks:
        return "has a forward hook, which it would not call"
    methods = _methods(cast(Kind, type(made)))
    if not methods.isdisjoint(own):
        return f"has its own {min(methods & own.keys())}"
    activation = fused_name(theirs["activation"]) if "activation" in theirs else None
    for name, value in theirs.items():
        # An activation that isn't fused is compared by its name.
        if name in _FREE or not isinstance(value, _VALUES) or (name == "activation" and activation is not None):
            continue
        found = own.get(name)
        # If a tensor stood for a number, it could be changed without detection.
        if found is not value and not (isinstance(found, _VALUES) and found == value):
            return f"has {name} {found!r}, while its config says {value!r}"
    if activation is not None and fused_name(module.activation) != activation:  # type: ignore[arg-type]
        return f"has the activation {module.activation!r}, while its config says {activation!r}"
    if module.training:
        probability = own.get("p", 0) if type(module) is nn.Dropout else own.get("dropout", 0)
        if probability and type(module) in (nn.Dropout, Embedding, MultiheadAttention, AddLayerNorm):
            return f"drops out with probability {probability}: call model.eval()"
    return None


def _why_not_tensors(module: nn.Module, made: nn.Module, name: str, dtypes: dict[torch.dtype, str]) -> str | None:
    for kind, expected, found in (
        (nn.Parameter, made._parameters, module._parameters),
        (Tensor, made._buffers, module._buffers),
    ):
        if expected.keys() != found.keys():
            return f"has the tensors {[*found]}, while its config says {[*expected]}"
        for key, tensor in found.items():
            other = expected[key]
            if tensor is None or other is None:
                if tensor is not None or other is not None:
                    return f"has {'a' if other is None else 'no'} {key}, which contradicts its config"
                continue
            if type(tensor) is not kind or tensor.layout != torch.strided:
                return f"has a {key} that is a {_full_name(type(tensor))} of layout {tensor.layout}"
            if tensor.device.type != "cpu":
                return f"has a {key} on {tensor.device}: it runs on a CPU"
            if tensor.dtype not in _DTYPES:
                return f"has a {key} of {str(tensor.dtype).removeprefix('torch.')}: it packs fp32 and bf16"
            if tensor.shape != other.shape:
                return f"has a {key} of shape {tuple(tensor.shape)}, while its config says {tuple(other.shape)}"
            if tensor.is_inference():
                return f"has a {key} made in inference mode, whose changes it could not notice"
            dtypes.setdefault(tensor.dtype, f"{name}.{key}" if name else key)
    return None


def _called(name: str) -> str:
    return f"its {name}" if name else "it"


def _full_name(kind: type) -> str:
    return f"{kind.__module__.partition('.')[0]}.{kind.__name__}"


@lru_cache(maxsize=8)
def _made(kind: Kind, config: tuple[tuple[str, Any], ...]) -> nn.Module:
    """Returns the model that a config makes, on "meta": its tensors use no memory and draw no random numbers."""
    with torch.inference_mode(False), Undrawn():  # to draw on "meta" would import a compiler, which takes a second
        model: nn.Module = kind(kind.config_class(**dict(config)), device="meta")
    return model


@cache
def _methods(kind: Kind) -> frozenset[str]:
    return frozenset(name for name in dir(kind) if callable(getattr(kind, name)) or name == "output_weight")


def _functions() -> dict[tuple[type, str], object]:
    """Returns the original methods of the classes that a model consists of."""
    ours: tuple[type, ...] = (
        *(Transformer, GPT, TransformerEncoder, TransformerDecoder, TransformerEncoderLayer, TransformerDecoderLayer),
        *(DecoderOnlyLayer, MultiheadAttention, AttentionParameters, Embedding, PositionalEncoding, RotaryEmbedding),
        *(RelativePositionBias, AddLayerNorm, BERT, HeadLinear, ClassificationHead),
    )
    found: dict[tuple[type, str], object] = {
        (kind, name): value for kind in ours for name, value in [*vars(kind).items()] if name in _methods(kind)
    }
    torchs: tuple[type, ...] = (nn.Module, nn.Linear, nn.Embedding, nn.Identity, nn.Dropout, nn.ReLU, nn.GELU, nn.SiLU)
    for kind in torchs:
        found |= {(kind, name): vars(kind)[name] for name in ("__call__", "forward") if name in vars(kind)}
    return found


_FUNCTIONS = _functions()
_WATCHED: list[tuple[object, str]] = [(vars(kind), name) for kind, name in _FUNCTIONS]
