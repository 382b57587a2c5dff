"""Decides which padding a stack skips: where it does, its output has no values of the layers.

A stack's setting, `Stack.padding`, is "auto", "skip" or "compute". By "auto" the output equals torch.nn's at every
position, so padding is skipped only in three places:

1. in an encoder, where torch.nn skips it, too: its fast path of evaluation computes the norm of zeros there;
2. in the encoder of a `Transformer`, if the decoder's mask hides the same positions;
3. in the memory of a decoder, which reads it only through the mask, if the target has no mask of padding.

By "skip" the caller promises that nothing reads padded positions, and stacks return zeros there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from fastformer.engine.checks import is_traced
from fastformer.nn.errors import InputError
from fastformer.nn.fast_path import zeroed_by_torch
from fastformer.nn.layout import Padding, read_padding
from fastformer.nn.masks import is_causal_mask

if TYPE_CHECKING:
    from fastformer.nn.stack import Stack, StackPlan

CHOICES = ("auto", "skip", "compute")


class Skipped(NamedTuple):
    """The padding that an encoder's call skips.

    Attributes:
        padding: the layers get packed tokens; None: they get the padded batch.
        zeroed: (batch, seqlen), True where the layers' output becomes zero before the final norm, as in torch.nn's fast
            path; None: nowhere.
    """

    padding: Padding | None = None
    zeroed: Tensor | None = None


def may_pack(plan: StackPlan, *inputs: Tensor) -> bool:
    """Returns whether the layers compute the same for packed tokens, and no other code sees the packing."""
    for x in inputs:
        if type(x) not in (Tensor, nn.Parameter) or x.dim() != 3:
            return False
    return plan.why_padded is None and not is_traced()


def skipped_by_encoder(
    stack: Stack,
    plan: StackPlan,
    src: Tensor,
    mask: Tensor | None,
    key_padding_mask: Tensor,
    *,
    is_causal: bool,
    is_unread: bool,
) -> Skipped:
    """Returns the padding that an encoder skips in a call.

    Args:
        stack, plan: the encoder and its plan.
        src, mask, key_padding_mask: the arguments of the call.
        is_causal: whether the mask is causal, or said to be.
        is_unread: whether nothing reads the encoder's output at padding.
    """
    choice = _choice(stack)
    if choice == "compute":
        return Skipped()
    zeroed = zeroed_by_torch(stack, src, mask, key_padding_mask) if choice == "auto" else None
    if zeroed is not None:
        key_padding_mask = zeroed
    elif choice == "auto" and not is_unread:
        return Skipped()
    if not (_says_all(stack, src, mask, is_causal) and may_pack(plan, src)):
        return Skipped(None, zeroed)
    padding = read_padding(src, key_padding_mask, stack.layers[0].self_attn.batch_first)
    if padding is None or not (padding.is_none or padding.is_contiguous or not plan.is_windowed):
        return Skipped(None, zeroed)
    return Skipped(padding, zeroed)


def skipped_by_decoder(
    stack: Stack,
    plan: StackPlan,
    tgt: Tensor,
    memory: Tensor,
    masks: tuple[Tensor | None, Tensor | None],
    memory_masks: tuple[Tensor | None, Tensor | None],
    is_causal: bool,
) -> tuple[Padding, Padding] | None:
    """Returns the padding of tgt and memory that a decoder skips in a call; None if it computes everything."""
    mask, key_padding_mask = masks
    memory_mask, memory_key_padding_mask = memory_masks
    if (key_padding_mask is None and memory_key_padding_mask is None) or memory_mask is not None:
        return None
    choice = _choice(stack)
    if choice == "compute" or (choice == "auto" and key_padding_mask is not None):
        return None
    if not (_says_all(stack, tgt, mask, is_causal) and may_pack(plan, tgt, memory)):
        return None
    batch_first = stack.layers[0].self_attn.batch_first
    padding, of_memory = read_padding(tgt, key_padding_mask, batch_first), None
    if padding is not None:
        of_memory = read_padding(memory, memory_key_padding_mask, batch_first)
    if padding is None or of_memory is None or padding.layout.batch_size != of_memory.layout.batch_size:
        return None
    if not (padding.is_contiguous or not plan.is_windowed) or (padding.is_none and of_memory.is_none):
        return None
    return padding, of_memory


def _says_all(stack: Stack, x: Tensor, mask: Tensor | None, is_causal: bool) -> bool:
    """Returns whether `is_causal` says all that a mask does: torch.nn reads the mask where there is padding."""
    if mask is None:
        return True
    return is_causal and is_causal_mask(mask, stack._seqlen(x, None))


def _choice(stack: Stack) -> str:
    if stack.padding not in CHOICES:
        raise InputError(f"expected padding to be one of {', '.join(map(repr, CHOICES))}, got {stack.padding!r}")
    return stack.padding


def hides(mask: Tensor | None, padding: Tensor | None) -> bool:
    """Returns whether a key_padding_mask hides at least the keys that another one hides."""
    if mask is None or padding is None or mask.shape != padding.shape:
        return False
    if mask is padding:
        return True
    if is_traced() or any(each.dtype != torch.bool and not each.is_floating_point() for each in (mask, padding)):
        return False
    hidden, needed = (each if each.dtype == torch.bool else each == float("-inf") for each in (mask, padding))
    return not bool((needed & ~hidden).any())
