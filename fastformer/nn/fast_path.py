"""The fast path of torch.nn's encoders where its results differ: it skips padding, and gives autocast's dtype."""

from __future__ import annotations

import itertools
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastformer.engine.checks import is_traced

_RELU_OR_GELU = ("relu", "gelu", F.relu, F.gelu)


def nests(layer: Any) -> bool:
    """Returns whether torch.nn's encoder of such layers has the fast path that skips padding."""
    return _is_encoder_layer(layer) and _is_fast(layer) and not layer.norm_first and layer.self_attn.batch_first


def zeroed_by_torch(stack: Any, src: Tensor, mask: Tensor | None, key_padding_mask: Tensor) -> Tensor | None:
    """Returns the positions that torch.nn's encoder would skip in this call; None if it would compute all of them.

    That is decided by its first layer, in evaluation without gradients, for padding on the right.

    Returns:
        (batch, seqlen), True where the layers' output is zero before the final norm. None, too, if a floating mask
        lowers scores: the fast path wrongly hides such keys, and fastformer adds the mask as everywhere else.
    """
    if mask is not None or src.dim() != 3 or not getattr(stack, "use_nested_tensor", False) or is_traced():
        return None
    layer: Any = stack.layers[0] if len(stack.layers) else None
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
    if not _is_encoder_layer(layer) or layer.training or not _is_fast(layer) or not layer.self_attn.batch_first:
        return dtype
    if any(each._forward_hooks or each._forward_pre_hooks for each in layer.modules()):
        return dtype
    if is_traced() or not _may_be_fast(x, *_tensors(layer)):
        return dtype
    return torch.get_autocast_dtype("cpu")


def _is_encoder_layer(layer: object) -> bool:
    """Returns whether a layer is of torch.nn's class, of fastformer's, or of one derived from them."""
    return isinstance(layer, nn.TransformerEncoderLayer) or getattr(layer, "has_cross_attention", True) is False


def _is_fast(layer: Any) -> bool:
    """Returns whether a layer has the parts and the settings of torch.nn's fast path."""
    attention: Any = getattr(layer, "self_attn", None)
    activation = getattr(layer, "activation", None)
    return (
        getattr(attention, "_qkv_same_embed_dim", False)
        and attention.num_heads % 2 == 0
        and (isinstance(activation, nn.ReLU | nn.GELU) or activation in _RELU_OR_GELU)
        and all(each is not None for each in _tensors(layer))
        and layer.norm1.eps == layer.norm2.eps
    )


def _tensors(layer: Any) -> list[Tensor | None]:
    """Returns the tensors of a layer that torch.nn's fast path reads; None in place of those that it lacks."""
    modules = layer._modules
    attention = modules.get("self_attn")
    out_proj = None if attention is None else attention._modules.get("out_proj")
    names = modules.get("norm1"), modules.get("norm2"), modules.get("linear1"), modules.get("linear2")
    tensors = []
    for owner, prefix in ((attention, "in_proj_"), *zip((out_proj, *names), itertools.repeat(""))):
        parameters = {} if owner is None else owner._parameters
        for name in (f"{prefix}weight", f"{prefix}bias"):
            # An attribute that is a parameter costs a call of Python; one of another kind may be a property.
            tensors.append(parameters[name] if name in parameters else getattr(owner, name, None))
    return tensors


def _may_be_fast(*tensors: Tensor | None) -> bool:
    """Returns whether torch.nn may take its fast path now: it is on, no tensor is missing, none needs a gradient."""
    return (
        type(None) not in map(type, tensors)
        and torch.backends.mha.get_fastpath_enabled()
        and not torch.is_autocast_enabled()
        and not torch.overrides.has_torch_function(tensors)
        and not (torch.is_grad_enabled() and any(cast(Tensor, each).requires_grad for each in tensors))
    )
