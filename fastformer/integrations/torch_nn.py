"""Replacements for torch.nn's own modules: classes that inherit fastformer's forward in front of torch.nn's."""

from __future__ import annotations

from typing import Any

from torch import nn

import fastformer.nn as fnn
from fastformer.engine.checks import replacement
from fastformer.engine.frozen import unpack
from fastformer.integrations.replace import Replacement, is_accelerated
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
    replaced = replacement(type(module))
    # A replaced function in place of the attention's own is called by fastformer's class.
    is_function = replaced is not None and replaced.replaced.startswith("torch.")
    return None if replaced is None or is_function else f"{replaced.replaced} was replaced"


def decide(model: nn.Module, precision: str | None, *, wanted: bool, padding: str) -> None:
    """Gives the stacks inside of a module their settings.

    Args:
        model: the argument of `accelerate`.
        padding: the argument of `accelerate`; by "auto" the stacks of fastformer.nn keep their own setting.
        precision: the engine's precision; None leaves that of an earlier call. In int4 a stack keeps its own: the
            engine takes weights in groups from whole models alone.
        wanted: whether the engine may hold copies of the stacks' weights.
    """
    for module in model.modules():
        if not isinstance(module, Stack):
            continue
        if padding != "auto":
            module.padding = padding
        elif is_accelerated(module):
            vars(module).pop("padding", None)
        if precision is not None:
            module.packed_precision = None if precision == "int4" else precision
        if wanted:
            vars(module).pop("packs_weights", None)
        else:
            module.packs_weights = False
            unpack(module)


def forget(model: nn.Module) -> None:
    """Undoes `decide`, and drops the weights that were packed."""
    for module in model.modules():
        if isinstance(module, Stack):
            for name in ("packs_weights", "packed_precision", *(["padding"] if is_accelerated(module) else [])):
                vars(module).pop(name, None)
            unpack(module)


def described_padding(model: nn.Module) -> dict[str, str]:
    """Returns for each stack of torch.nn or fastformer in a module, by name, which padding it skips, and why."""
    return {name: _padding_of(module) for name, module in model.named_modules() if isinstance(module, Stack)}


def _padding_of(stack: Stack) -> str:
    if stack.padding == "compute":
        return 'padding is computed: you asked for padding="compute"'
    plan = STACK_PLANS.of(stack)
    reason = plan.why_padded
    if plan.replaced is not None:
        reason = f"{plan.replaced.replaced} was replaced"
    if stack.padding == "skip":
        zeros = "padding is skipped, and the output is zero there"
        return zeros if reason is None else f"padding is computed: {reason}"
    if isinstance(stack, fnn.TransformerDecoder):
        if reason is None:
            return "padding is computed, except that of the memory in calls without tgt_key_padding_mask"
        return f"padding is computed: {reason}"
    places = []
    if getattr(stack, "use_nested_tensor", False):
        places.append("in evaluation without gradients, as in torch.nn")
    if reason is None:
        places.append("in a Transformer whose decoder's mask hides it")
    return f"padding is computed, except {', and '.join(places)}" if places else f"padding is computed: {reason}"


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
