"""Replacements for torch.nn's own modules: classes that inherit fastformer's forward in front of torch.nn's."""

from __future__ import annotations

from typing import Any

from torch import nn

import fastformer.nn as fnn
from fastformer.integrations.replace import Replacement
from fastformer.nn import packed_stack
from fastformer.nn.guards import BLOCKS, is_its_own
from fastformer.nn.packed_stack import copy_bytes, megabytes, precision_of, why_no_engine
from fastformer.nn.stack import STACK_PLANS, Stack


class MultiheadAttention(fnn.MultiheadAttention, nn.MultiheadAttention):  # type: ignore[misc]
    pass


class TransformerEncoderLayer(fnn.TransformerEncoderLayer, nn.TransformerEncoderLayer):  # type: ignore[misc]
    pass


class TransformerDecoderLayer(fnn.TransformerDecoderLayer, nn.TransformerDecoderLayer):  # type: ignore[misc]
    pass


class TransformerEncoder(fnn.TransformerEncoder, nn.TransformerEncoder):
    pass


class TransformerDecoder(fnn.TransformerDecoder, nn.TransformerDecoder):
    pass


class Transformer(fnn.Transformer, nn.Transformer):
    pass


def _attention_attributes(attention: nn.MultiheadAttention) -> dict[str, Any]:
    return {
        "num_kv_heads": attention.num_heads,
        "q_dim": attention.embed_dim,
        "kv_dim": attention.embed_dim,
        "window_size": (None, None),
    }


def _why_not(module: nn.Module) -> str | None:
    kind = type(module)
    for name in ("forward", *BLOCKS.get(kind, ())):
        if not is_its_own(kind, nn, method=name):
            return f"{kind.__name__}.{name} was replaced"
    return None


def decide(model: nn.Module, precision: str | None, *, wanted: bool) -> None:
    """Gives the stacks inside of a module their setting.

    Args:
        model: the argument of `accelerate`.
        precision: the engine's precision; None leaves that of an earlier call. In int4 a stack keeps its own: the
            engine takes weights in groups from whole models alone.
        wanted: whether the engine may hold copies of the stacks' weights.
    """
    for module in model.modules():
        if not isinstance(module, Stack):
            continue
        if precision is not None:
            module.packed_precision = None if precision == "int4" else precision
        if wanted:
            vars(module).pop("packs_weights", None)
        else:
            module.packs_weights = False
            packed_stack.forget(module)


def forget(model: nn.Module) -> None:
    """Undoes `decide`, and drops the weights that were packed."""
    for module in model.modules():
        if isinstance(module, Stack):
            for name in ("packs_weights", "packed_precision"):
                vars(module).pop(name, None)
            packed_stack.forget(module)


def described(model: nn.Module) -> dict[str, str]:
    """Returns for each encoder of torch.nn or fastformer in a module, by name, what computes it in evaluation."""
    found = {}
    for name, module in model.named_modules():
        if not isinstance(module, fnn.TransformerEncoder):
            continue
        plan, precision = STACK_PLANS.of(module).evaluation, precision_of(module)
        reason = why_no_engine()
        if plan is None or plan.packed is None or precision is None:
            reason = "its layers are not all alike, or one of them has something that the engine doesn't know"
            if any(each.training for each in module.modules()):
                reason = "it is in training; call eval() before report to see what computes it in evaluation"
        if not module.packs_weights:
            reason = "you asked for it"
        if reason is not None or precision is None:
            found[name] = f"without the C++ engine: {reason}"
            continue
        matrices = sum(each.numel() for each in module.parameters() if each.dim() > 1)
        size = megabytes(copy_bytes(matrices, 0, precision))
        found[name] = f"on the C++ engine in {precision}, in evaluation without gradients, with a packed copy of {size}"
    return found


REPLACEMENTS = (
    Replacement(nn.MultiheadAttention, MultiheadAttention, _attention_attributes, _why_not),
    Replacement(nn.TransformerEncoderLayer, TransformerEncoderLayer, why_not=_why_not),
    Replacement(nn.TransformerDecoderLayer, TransformerDecoderLayer, why_not=_why_not),
    Replacement(nn.TransformerEncoder, TransformerEncoder, lambda stack: {"gradient_checkpointing": False}, _why_not),
    Replacement(nn.TransformerDecoder, TransformerDecoder, lambda stack: {"gradient_checkpointing": False}, _why_not),
    Replacement(nn.Transformer, Transformer, why_not=_why_not),
)
