"""The attention distribution, which fused attention never materialises: the weight of each key for each query.

weights = exp(q k^T * softmax_scale + mask - lse), from the lse that `attention` returned. The result itself has size
seqlen_q * seqlen_k, so there is no kernel: the reference is the op.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastformer.ops._attention_reference import AttentionOptions, exponentials, group_sum, grouped_matmul, probabilities
from fastformer.ops._autograd import differentiate, forbid_double_backward, register_autograd
from fastformer.ops._common import (
    accumulation_dtype,
    check_heads,
    check_seqlens_k,
    described,
    expand_mask,
    resolve_scale,
    resolve_softcap,
    resolve_window,
)
from fastformer.ops._dispatch import autocast
from fastformer.ops._library import define_op


def _scores(
    q: Tensor, k: Tensor, attn_mask: Tensor | None, seqlens_k: Tensor | None, *options: Any
) -> AttentionOptions:
    """Returns the options of a call; from attn_mask on, the arguments are the schema's."""
    scale, left, right, softcap = options
    diagonal = k.shape[1] - q.shape[1]
    return AttentionOptions(scale, left, right, softcap=softcap, diagonal=diagonal, keys=seqlens_k, attn_mask=attn_mask)


def attention_weights_reference(q: Tensor, k: Tensor, lse: Tensor, *options: Any) -> Tensor:
    """Returns the weights, (batch, num_heads, seqlen_q, seqlen_k), in q's dtype."""
    acc = accumulation_dtype(q.dtype)
    return probabilities(q.to(acc), k.to(acc), lse, _scores(q, k, *options)).to(q.dtype)


def attention_weights_formula(q: Tensor, k: Tensor, lse: Tensor, *options: Any) -> Tensor:
    """Computes the weights as a function of q, k and the mask alone: lse is computed again from these."""
    if k.shape[1] == 0:
        return attention_weights_reference(q, k, lse, *options)
    acc = accumulation_dtype(q.dtype)
    weights, total, _ = exponentials(_scores(q, k, *options)(q.to(acc), k.to(acc)))
    return (weights / total).to(q.dtype)


def attention_weights_backward_reference(
    dweights: Tensor,
    weights: Tensor,
    q: Tensor,
    k: Tensor,
    attn_mask: Tensor | None,
    softmax_scale: float,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (dq, dk, dmask) of the whole softmax, since lse depends on q, k and the mask.

    dmask is empty without a mask.
    """
    acc, dtype = accumulation_dtype(q.dtype), q.dtype
    weights, dweights = weights.to(acc), dweights.to(acc)
    dscores = weights * (dweights - (weights * dweights).sum(-1, keepdim=True))
    dmask = q.new_empty(0) if attn_mask is None else dscores.sum_to_size(attn_mask.shape).to(attn_mask.dtype)
    q, k = q.to(acc), k.to(acc)
    dscores = AttentionOptions(softmax_scale, softcap=softcap).through_cap(q, k, dscores) * softmax_scale
    dq = grouped_matmul(dscores.transpose(1, 2), k.transpose(1, 2), k.shape[2]).transpose(1, 2)
    return dq.to(dtype).contiguous(), group_sum(dscores, q, k.shape[2]).to(dtype).contiguous(), dmask


_WHY = "its result contains all weights, so a kernel would save no memory traffic"
_fwd = define_op(
    "attention_weights_fwd(Tensor q, Tensor k, Tensor lse, Tensor? attn_mask, Tensor? seqlens_k, float softmax_scale, "
    "int? window_left, int? window_right, float softcap=0.0) -> Tensor",
    attention_weights_reference,
    fake=lambda q, k, lse, *options: q.new_empty((q.shape[0], q.shape[2], q.shape[1], k.shape[1])),
    reference_only=dict.fromkeys(("triton", "cpp"), _WHY),
    formula=attention_weights_formula,
)
_bwd = define_op(
    "attention_weights_bwd(Tensor dweights, Tensor weights, Tensor q, Tensor k, Tensor? attn_mask, "
    "float softmax_scale, float softcap=0.0) -> (Tensor dq, Tensor dk, Tensor dmask)",
    attention_weights_backward_reference,
    fake=lambda dweights, weights, q, k, attn_mask, *_: (
        q.new_empty(q.shape),
        k.new_empty(k.shape),
        q.new_empty(0) if attn_mask is None else attn_mask.new_empty(attn_mask.shape),
    ),
    reference_only=dict.fromkeys(("triton", "cpp"), _WHY),
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    q, k, lse, attn_mask, seqlens_k, *ctx.options = inputs
    ctx.save_for_backward(output, q, k, lse, attn_mask, seqlens_k)


def _backward(ctx: Any, dweights: Tensor) -> tuple[Tensor | None, ...]:
    weights, q, k, _, attn_mask, _ = ctx.saved_tensors
    needs_mask_grad = ctx.needs_input_grad[3]
    scale_and_cap = ctx.options[0], ctx.options[-1]
    dq, dk, dmask = _bwd(dweights, weights, q, k, attn_mask if needs_mask_grad else None, *scale_and_cap)
    return dq, dk, None, dmask if needs_mask_grad else None, *(None,) * 5


def _differentiable_backward(ctx: Any, dweights: Tensor) -> tuple[Tensor | None, ...]:
    _, q, k, lse, attn_mask, seqlens_k = ctx.saved_tensors

    def formula(q: Tensor, k: Tensor, attn_mask: Tensor | None) -> Tensor:
        return attention_weights_formula(q, k, lse, attn_mask, seqlens_k, *ctx.options)

    needs_dq, needs_dk, _, needs_mask_grad = ctx.needs_input_grad[:4]
    needed = (needs_dq, needs_dk, needs_mask_grad)
    dq, dk, dmask = differentiate(formula, (q, k, attn_mask), needed, dweights)
    return dq, dk, None, dmask, *(None,) * 5


register_autograd(
    "attention_weights_fwd", _backward, setup_context=_setup_context, differentiable_backward=_differentiable_backward
)
forbid_double_backward("attention_weights_bwd")


def attention_weights(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    *,
    attn_mask: Tensor | None = None,
    seqlens_k: Tensor | None = None,
    is_causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """Returns the weights that `attention` gave to the values, before dropout. Rows without visible keys are 0.

    Args:
        q: (batch, seqlen_q, num_heads, head_dim), floating point.
        k: (batch, seqlen_k, num_kv_heads, head_dim).
        lse: (batch, num_heads, seqlen_q), the result of `attention(..., return_lse=True)` with the same options.
        attn_mask, seqlens_k, is_causal, window_size, softmax_scale, softcap: as in `attention`. A boolean mask is
            True = attend.

    Returns:
        (batch, num_heads, seqlen_q, seqlen_k), q's dtype.

    Raises:
        ValueError: shapes or dtypes don't agree.
    """
    q, k = autocast("attention_weights", q, k)
    check_heads(q, k, k, 4, "(batch, seqlen, num_heads, head_dim)")
    check_seqlens_k(seqlens_k, k)
    expected = (q.shape[0], q.shape[2], q.shape[1])
    if not isinstance(lse, Tensor) or tuple(lse.shape) != expected or not lse.is_floating_point():
        raise ValueError(f"expected a floating-point lse of shape {expected}, got {described(lse)}")
    left, right = resolve_window(is_causal, window_size)
    scale = resolve_scale(softmax_scale, q.shape[-1])
    mask = expand_mask(attn_mask, q, k)
    return _fwd(q, k, lse, mask, seqlens_k, scale, left, right, resolve_softcap(softcap))
