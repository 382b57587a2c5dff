"""What the families of transformers have in common: masks that are padding, packed batches, joined and fused parts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastformer.nn.dropout import active_dropout, dropout_seed
from fastformer.nn.fusing import is_called_plainly, is_plain, is_plain_dropout, is_traced, norm_settings
from fastformer.nn.layers import post_norm
from fastformer.nn.layout import SequenceLayout
from fastformer.nn.padding import Padding, read_padding
from fastformer.ops import attention, varlen_attention
from fastformer.ops import feed_forward as feed_forward_op

# While a stack runs packed: how its tokens lie in memory.
_layout: ContextVar[SequenceLayout | None] = ContextVar("fastformer_packed_layout", default=None)


@contextlib.contextmanager
def packed(layout: SequenceLayout) -> Iterator[None]:
    """Attentions of the block take (1, total, ...) tensors for packed tokens."""
    token = _layout.set(layout)
    try:
        yield
    finally:
        _layout.reset(token)


def key_padding_of(mask: Tensor | None) -> Tensor | None:
    """A mask that is the same for all queries and heads as (batch, seqlen_k), True = ignore; None if it is another.

    Args:
        mask: transformers' (batch, 1, seqlen_q or 1, seqlen_k), bool (True = attend) or added to scores, where what is
            ignored gets the lowest number of its dtype, or -inf.
    """
    if mask is None or mask.dim() != 4 or mask.shape[1] != 1 or mask.requires_grad or mask.shape[2] == 0:
        return None
    rows = mask[:, 0]
    first = rows[:, 0]
    if rows.shape[1] > 1 and rows.stride(1) != 0 and not bool((rows == first[:, None]).all()):
        return None
    if first.dtype == torch.bool:
        return ~first
    ignored = first <= torch.finfo(first.dtype).min
    return ignored if bool((ignored | (first == 0)).all()) else None


def padding_of(x: Tensor, mask: Tensor | None, stack: nn.Module) -> Padding | None:
    """The padding that a stack may leave out; None where it has to run as it is.

    Args:
        x: (batch, seqlen, dim).
        mask: what the stack's layers would be given; None: nothing is ignored, and there is nothing to leave out.
        stack: all of whose modules must be called plainly, since hooks would see packed tokens.
    """
    if mask is None or type(x) is not Tensor or x.dim() != 3 or is_traced():
        return None
    if not all(is_called_plainly(module) for module in stack.modules()):
        return None
    key_padding_mask = key_padding_of(mask)
    if key_padding_mask is None or key_padding_mask.shape != x.shape[:2]:
        return None
    padding = read_padding(x, key_padding_mask, True)
    return None if padding is None or padding.is_none else padding


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    dropout_p: float,
    scale: float | None = None,
    is_causal: bool = False,
) -> Tensor:
    """Attention of (batch, seqlen, num_heads, head_dim), over packed tokens inside of `packed`.

    Args:
        q, k, v: see above; k and v may have fewer heads.
        mask: transformers' (batch or 1, num_heads or 1, seqlen_q or 1, seqlen_k), bool (True = attend) or additive.
        dropout_p, scale: as in `ops.attention`.
        is_causal: query i sees no key after its own.
    """
    layout = _layout.get()
    if layout is not None:
        assert mask is None and layout.cu_seqlens is not None and q.shape[0] == 1
        cu_seqlens, longest = layout.cu_seqlens, layout.max_seqlen
        out = varlen_attention(
            q[0], k[0], v[0], cu_seqlens, cu_seqlens, longest, longest, is_causal=is_causal, softmax_scale=scale,
            dropout_p=dropout_p,
        )  # fmt: skip
        return out[None]
    return attention(q, k, v, attn_mask=mask, is_causal=is_causal, softmax_scale=scale, dropout_p=dropout_p)


def add_and_norm(x: Tensor, residual: Tensor, dropout: nn.Module, norm: nn.Module) -> Tensor:
    """norm(dropout(x) + residual), in one op where nobody touched the modules."""
    if norm_settings(norm) is not None and is_plain_dropout(dropout):
        return post_norm(x, residual, dropout, norm)
    return norm(dropout(x) + residual)


def fused_activation(activation: object) -> str | None:
    """What `ops.feed_forward` calls one of transformers' activations; None for those that it doesn't have."""
    from transformers import activations

    if is_plain(activation, nn.ReLU):
        return "relu"
    names = {"GELUActivation": "gelu", "NewGELUActivation": "gelu_tanh", "GELUTanh": "gelu_tanh"}
    names["PytorchGELUTanh"] = "gelu_tanh"
    for name, fused in names.items():
        kind = getattr(activations, name, None)
        if kind is not None and is_plain(activation, kind):
            formula = getattr(activation, "act", F.gelu)
            return fused if formula is F.gelu or fused == "gelu_tanh" else None
    return None


def fused_feed_forward(
    x: Tensor, linear1: nn.Module, activation: object, linear2: nn.Module, dropout: nn.Module | None = None
) -> Tensor | None:
    """linear2(dropout(activation(linear1(x)))) as one op; None where somebody touched a part, or it has no such op."""
    name = fused_activation(activation)
    if name is None or not (is_plain(linear1, nn.Linear) and is_plain(linear2, nn.Linear)):
        return None
    if dropout is not None and not is_plain_dropout(dropout):
        return None
    assert isinstance(linear1, nn.Linear) and isinstance(linear2, nn.Linear)
    dropout_p = 0.0 if dropout is None else active_dropout(dropout)
    return feed_forward_op(
        x, linear1.weight, linear1.bias, linear2.weight, linear2.bias, activation=name, dropout_p=dropout_p,
        dropout_seed=dropout_seed(dropout_p, x.device),
    )  # fmt: skip


def heads(linear: Callable[[Tensor], Tensor], x: Tensor, head_dim: int) -> Tensor:
    """linear(x) as (batch, seqlen, num_heads, head_dim)."""
    return linear(x).unflatten(-1, (-1, head_dim))


def is_known(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Whether a module is exactly of one of these classes, and a call of it is a call of that class's forward."""
    return type(module) in kinds and is_called_plainly(module)


def checkpoints(stack: nn.Module) -> bool:
    """Whether a part of a stack is to be computed again in the backward pass, when no context is around it."""
    return any(getattr(module, "gradient_checkpointing", False) for module in stack.modules())


def nothing_else(args: tuple[Any, ...], kwargs: dict[str, Any], harmless: frozenset[str]) -> bool:
    """Whether what a forward was also given asks for nothing: None, False, Nones, or a name that changes nothing."""
    return all(map(_is_nothing, args)) and all(_is_nothing(value) or name in harmless for name, value in kwargs.items())


def _is_nothing(value: object) -> bool:
    return value is None or value is False or (isinstance(value, list) and all(each is None for each in value))
