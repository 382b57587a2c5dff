"""Finds the library's models that are as their configs make them, and whose tensors the C++ engine can read."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from fastformer.engine.as_made import Made, why_not_as_made
from fastformer.engine.checks import examine_again
from fastformer.engine.frozen import ModelGuards, notes_of
from fastformer.models.bert import BERT
from fastformer.models.gpt import GPT
from fastformer.models.pretrained import Undrawn
from fastformer.models.transformer import Transformer
from fastformer.nn.attention import MultiheadAttention
from fastformer.nn.embedding import Embedding
from fastformer.nn.feed_forward import fused_name
from fastformer.nn.norm import AddLayerNorm

Kind: TypeAlias = Any  # a class of models, which mypy doesn't take for hashable

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
_GUARDS = "guards of the model as made"
_DROPPING = (nn.Dropout, Embedding, MultiheadAttention, AddLayerNorm)


def find_guards(model: Transformer | GPT | BERT) -> tuple[ModelGuards | None, str | None]:
    """Returns the guards of a model that is as its config makes it (cached while they hold), or why it isn't."""
    findings = notes_of(model).findings
    guards: ModelGuards | None = findings.pop(_GUARDS, None)
    if guards is not None and guards.hold(model):
        findings[_GUARDS] = guards
        return guards, None
    examine_again()
    kind, config = cast(Kind, type(model)), tuple(vars(model.config).items())
    reason = why_not_as_made(model, lambda: _new(kind, config), _MADE)
    if reason is not None:
        return None, reason
    guards = findings[_GUARDS] = ModelGuards(model, [vars(model.config)])
    return guards, None


def why_own_code(model: object) -> str | None:
    """Returns which class of a model may have Python code that a graph would run only once; None: no class."""
    for name, module in model.named_modules() if isinstance(model, nn.Module) else [("", model)]:
        if type(module).__module__.partition(".")[0] not in ("fastformer", "torch"):
            return f"{name or 'the model'} is a {type(module).__name__}, which may have code of its own"
    return None


def tensors_of(model: Transformer | GPT | BERT) -> list[Tensor]:
    """Returns the tensors of a model that is as its config makes it.

    Raises:
        ValueError: it no longer is.
    """
    guards, reason = find_guards(model)
    if guards is None:
        raise ValueError(f"expected a model as it was when its engine was chosen: {reason}")
    return guards.tensors


@lru_cache(maxsize=8)
def _new(kind: Kind, config: tuple[tuple[str, Any], ...]) -> nn.Module:
    """Returns the model that a config makes, on "meta": its tensors use no memory and draw no random numbers."""
    with torch.inference_mode(False), Undrawn():  # to draw on "meta" would import a compiler, which takes a second
        model: nn.Module = kind(kind.config_class(**dict(config)), device="meta")
    return model


def _is_free(module: nn.Module, name: str) -> bool:
    return name in _FREE or name == "activation"


def _why_not(module: Any, new: Any) -> str | None:
    if "activation" in vars(new):
        # An activation that can be fused is compared by its name.
        expected = fused_name(new.activation) or new.activation
        if (fused_name(module.activation) or module.activation) != expected:
            return f"has the activation {module.activation!r}, while its config says {expected!r}"
    if module.training and type(module) in _DROPPING:
        probability = module.p if type(module) is nn.Dropout else vars(module).get("dropout", 0)
        if probability:
            return f"drops out with probability {probability}: call model.eval()"
    return None


def _may_be(name: str, module: Any) -> bool:
    """Returns whether a child is an activation: nn.ReLU() in place of F.relu, of which `_why_not` compares the name."""
    return name == "activation" and fused_name(module) is not None


_MADE = Made(_is_free, _why_not, may_be=_may_be)
