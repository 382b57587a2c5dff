"""Converts torch.nn's masks (True = ignore, or additive) to those of the ops (True = attend, or additive)."""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fastformer.engine.checks import is_traced
from fastformer.nn.errors import InputError

# Counting costs a device three small kernels a call. With fewer keys than this, attention would save less. An estimate,
# not yet measured.
LEAST_KEYS = 512
# The devices whose memory the host reads without waiting.
_READABLE = ("cpu",)

# mask on a device -> (its version, whether it was causal)
_causal_masks = WeakTensorKeyDictionary()


def square_subsequent_mask(
    size: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Makes the causal mask in torch.nn's form: (size, size), -inf above the diagonal, 0 elsewhere."""
    return torch.full((size, size), float("-inf"), device=device, dtype=dtype).triu(1)


def is_causal_mask(mask: Tensor | None, size: int | None = None) -> bool:
    """Returns whether a mask is exactly the causal one (of this size), so that kernels can skip the triangle.

    This reads the mask: on a CPU in each call, because `mask.data` and NumPy write to it unnoticed; on a GPU, where
    reading is a host sync, once per mask tensor and version. While compiling, tracing or capturing a graph the mask is
    not read, and is applied like any other. Pass `is_causal=True` along with the mask to avoid the read.
    """
    if mask is None or mask.requires_grad or mask.is_meta or is_traced():
        return False
    if mask.dim() != 2 or mask.shape[0] != mask.shape[1] or (size is not None and len(mask) != size):
        return False
    # An inference tensor has no version counter.
    version = None if mask.device.type == "cpu" or mask.is_inference() else mask._version
    seen = _causal_masks.get(mask)
    if version is not None and seen is not None and seen[0] == version:
        return seen[1]
    if mask.dtype == torch.bool:
        expected = torch.ones_like(mask).triu(1)
    else:
        expected = square_subsequent_mask(mask.shape[0], mask.device, mask.dtype)
    answer = torch.equal(mask, expected)
    if version is not None:
        _causal_masks[mask] = (version, answer)
    return answer


def right_padding_lengths(mask: Tensor) -> Tensor | None:
    """Returns the lengths of a key_padding_mask, so that padding can be skipped; None if it isn't just right padding.

    This reads the mask, and so works only on a CPU: a GPU would have to be waited for in every step, and
    `attended_lengths` is used instead. It returns None while compiling, tracing or under functorch, too.

    Args:
        mask: (batch, seqlen_k), torch.nn's key_padding_mask.

    Returns:
        (batch,) int32 if the mask is bool and ignores the last keys of each row, if any, and no others.
    """
    if type(mask) is not Tensor or mask.dtype != torch.bool or mask.dim() != 2:
        return None
    if mask.device.type not in _READABLE or is_traced():
        return None
    lengths = mask.shape[1] - mask.sum(1)
    is_right = torch.equal(mask, torch.arange(mask.shape[1], device=mask.device) >= lengths[:, None])
    return lengths.to(torch.int32) if is_right else None


def attended_lengths(mask: Tensor) -> Tensor | None:
    """Counts each row's keys up to the last one that a key_padding_mask doesn't hide, on the mask's device.

    Kernels get these lengths in addition to the mask. All keys after a length are hidden by the mask anyway, so the
    blocks of right padding can be skipped; the mask still applies to the keys before it. The host doesn't wait for the
    device, so this also works in compilers, tracers and CUDA graphs.

    Args:
        mask: (batch, seqlen_k), torch.nn's key_padding_mask: bool, or additive, of which only -inf hides a key.

    Returns:
        (batch,) int32; None if lengths would save nothing: on a CPU, which reads the mask, and if there are few keys.
    """
    if mask.dim() != 2 or mask.shape[1] < LEAST_KEYS or mask.device.type in _READABLE:
        return None
    hidden = mask if mask.dtype == torch.bool else mask.detach() == -torch.inf
    ends = torch.arange(1, mask.shape[1] + 1, dtype=torch.int32, device=mask.device)
    return ends.masked_fill(hidden, 0).amax(1)


def merge_masks(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, batch: int, num_heads: int, seqlen_q: int, seqlen_k: int
) -> Tensor | None:
    """Merges both of torch.nn's masks into one mask for the ops.

    Args:
        attn_mask: (seqlen_q, seqlen_k) or (batch * num_heads, seqlen_q, seqlen_k); bool (True = ignore) or additive.
        key_padding_mask: (batch, seqlen_k); bool (True = ignore) or additive.

    Returns:
        4-d and broadcastable to (batch, num_heads, seqlen_q, seqlen_k); bool (True = attend) if both are bool, else
        additive; None if there is neither.

    Raises:
        InputError: a mask has another dtype or shape.
    """
    parts = []
    if attn_mask is not None:
        _check_dtype(attn_mask, "attn_mask")
        if attn_mask.shape == (seqlen_q, seqlen_k):
            parts.append(attn_mask[None, None])
        elif attn_mask.shape == (batch * num_heads, seqlen_q, seqlen_k):
            parts.append(attn_mask.view(batch, num_heads, seqlen_q, seqlen_k))
        else:
            if attn_mask.dim() == 3:
                raise InputError(
                    f"Expected `attn_mask` shape to be {(batch * num_heads, seqlen_q, seqlen_k)} but got "
                    f"{tuple(attn_mask.shape)}"
                )
            raise InputError(
                f"expected an attn_mask of shape {(seqlen_q, seqlen_k)} or {(batch * num_heads, seqlen_q, seqlen_k)}, "
                f"got {tuple(attn_mask.shape)}"
            )
    if key_padding_mask is not None:
        _check_dtype(key_padding_mask, "key_padding_mask")
        if key_padding_mask.shape != (batch, seqlen_k):
            raise InputError(
                f"expected a key_padding_mask of shape {(batch, seqlen_k)}, got {tuple(key_padding_mask.shape)}"
            )
        parts.append(key_padding_mask[:, None, None])
    if not parts:
        return None
    if all(part.dtype == torch.bool for part in parts):
        merged = parts[0] if len(parts) == 1 else parts[0] | parts[1]
        return ~merged
    dtype = next(part.dtype for part in parts if part.dtype != torch.bool)
    added = [as_additive(part, dtype) for part in parts]
    return added[0] if len(added) == 1 else added[0] + added[1]


def add_bias(bias: Tensor, mask: Tensor | None) -> Tensor:
    """Merges a floating-point bias on the scores and a mask for the ops (True = attend, or additive) into one mask."""
    if mask is None:
        return bias
    return bias.where(mask, -torch.inf) if mask.dtype == torch.bool else bias + mask


@overload
def as_additive(mask: Tensor, dtype: torch.dtype) -> Tensor: ...
@overload
def as_additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None: ...
def as_additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Converts a bool mask (True = ignore) to 0 and -inf; returns a floating-point mask unchanged."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))


def _check_dtype(mask: Tensor, name: str) -> None:
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise InputError(f"expected a bool (True = ignore) or floating {name}, got {mask.dtype}")


def check_dimensions(
    query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None
) -> None:
    """Raises InputError, with torch.nn's messages, unless all tensors are batched or none is."""
    dims = query.dim()
    if dims not in (2, 3):
        raise InputError(f"query should be unbatched 2D or batched 3D tensor but received {dims}-D query tensor")
    where = "batched (3-D)" if dims == 3 else "unbatched (2-D)"
    if key.dim() != dims or value.dim() != dims:
        raise InputError(
            f"For {where} `query`, expected `key` and `value` to be {dims}-D but found {key.dim()}-D and "
            f"{value.dim()}-D tensors respectively"
        )
    if key_padding_mask is not None and key_padding_mask.dim() != dims - 1:
        raise InputError(
            f"For {where} `query`, expected `key_padding_mask` to be `None` or {dims - 1}-D but found "
            f"{key_padding_mask.dim()}-D tensor instead"
        )
    if attn_mask is not None and attn_mask.dim() not in (2, 3):
        raise InputError(
            f"For {where} `query`, expected `attn_mask` to be `None`, 2-D or 3-D but found {attn_mask.dim()}-D tensor "
            "instead"
        )
