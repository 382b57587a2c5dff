"""The fast path of torch.nn's encoders where its results differ: it skips padding, and gives autocast's dtype."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastformer.nn.guards import is_traced

_RELU_OR_GELU = ("relu", "gelu", F.relu, F.gelu)


def nests(layer: Any) -> bool:
    """Returns whether torch.nn's encoder of such layers has the fast path that skips padding."""
    if not _is_encoder_layer(layer) or layer.norm_first or not layer.self_attn.batch_first:
        return False
    return _is_fast(layer) and not any(each is None for each in _tensors(layer))


def zeroed_by_torch(stack: Any, src: Tensor, mask: Tensor | None, key_padding_mask: Tensor) -> Tensor | None:
    """Returns the positions that torch.nn's encoder would skip in this call; None if it would compute all of them.

    That is decided by its first layer, in evaluation without gradients, for padding on the right.

    Returns:
        (batch, seqlen), True where the layers' output is zero before the final norm. None, too, if a floating mask
        lowers scores: the fast path wrongly hides such keys, and fastformer adds the mask as everywhere else.
    """
    layer: Any = stack.layers[0] if len(stack.layers) else None
    if mask is not None or src.dim() != 3 or is_traced() or not getattr(stack, "use_nested_tensor", False):
        return None
    if not _is_encoder_layer(layer) or layer.training or key_padding_mask.shape != src.shape[:2]:
        return None
    if not _may_be_fast(src, *_tensors(layer)):
        return None
    hidden = key_padding_mask
    if hidden.dtype != torch.bool:
        hidden = key_padding_mask.detach() == -torch.inf
        if not bool((hidden | (key_padding_mask == 0)).all()):
            return None
    return None if bool((hidden[:, :-1] & ~hidden[:, 1:]).any()) else hidden


def fast_dtype(layer: Any, x: Tensor) -> torch.dtype:
    """Returns the dtype of an encoder layer's output: that of autocast on a CPU if torch.nn takes its fast path.

    Args:
        layer: a layer of any class.
        x: its input, or its output by the other path.
    """
    dtype = x.dtype
    if dtype != torch.float32 or x.device.type != "cpu" or not torch.is_autocast_enabled("cpu") or x.dim() != 3:
        return dtype
    if not _is_encoder_layer(layer) or layer.training or not layer.self_attn.batch_first or not _is_fast(layer):
        return dtype
    if any(each._forward_hooks or each._forward_pre_hooks for each in layer.modules()):
        return dtype
    tensors = _tensors(layer)
    if is_traced() or any(each is None for each in tensors) or not _may_be_fast(x, *tensors):
        return dtype
    return torch.get_autocast_dtype("cpu")


def _is_encoder_layer(layer: object) -> bool:
    """Returns whether a layer is of torch.nn's class, of fastformer's, or of one derived from them."""
    return isinstance(layer, nn.TransformerEncoderLayer) or getattr(layer, "has_cross_attention", True) is False


def _is_fast(layer: Any) -> bool:
    """Returns whether a layer's settings are those of torch.nn's fast path."""
    attention, activation = layer.self_attn, layer.activation
    return (
        attention._qkv_same_embed_dim
        and attention.num_heads % 2 == 0
        and (isinstance(activation, nn.ReLU | nn.GELU) or activation in _RELU_OR_GELU)
        and layer.norm1.eps == layer.norm2.eps
    )


def _tensors(layer: Any) -> tuple[Tensor | None, ...]:
    """Returns the tensors of a layer that torch.nn's fast path reads."""
    attention = layer.self_attn
    parts = (attention.out_proj, layer.norm1, layer.norm2, layer.linear1, layer.linear2)
    return (
        attention.in_proj_weight,
        attention.in_proj_bias,
        *(getattr(each, name, None) for each in parts for name in ("weight", "bias")),
    )


def _may_be_fast(*tensors: Tensor | None) -> bool:
    """Returns whether torch.nn may take its fast path now: it is on, and no tensor needs a gradient."""
    given = [each for each in tensors if each is not None]
    return (
        torch.backends.mha.get_fastpath_enabled()
        and not torch.is_autocast_enabled()
        and not torch.overrides.has_torch_function(given)
        and not (torch.is_grad_enabled() and any(each.requires_grad for each in given))
    )
