"""Scaled dot-product attention: softmax(q k^T * softmax_scale + mask) v.

Vaswani et al. 2017, section 3.2.1; the dropout on the attention weights is tensor2tensor's, the soft cap on the scores
Gemma 2's (Gemma Team 2024, section 2). Only the reference materialises tensors of size seqlen_q * seqlen_k; the kernels
recompute the weights from lse in the backward pass.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from fastformer.ops._attention_reference import AttentionOptions, attend, attend_backward
from fastformer.ops._attention_torch import attend_torch, attend_torch_backward, unsupported
from fastformer.ops._autograd import differentiate, forbid_double_backward, register_autograd
from fastformer.ops._common import (
    accumulation_dtype,
    check_heads,
    check_seqlens_k,
    expand_mask,
    no_cpp_code,
    resolve_scale,
    resolve_softcap,
    resolve_window,
)
from fastformer.ops._dispatch import autocast, forced_backend
from fastformer.ops._dropout import resolve_dropout
from fastformer.ops._library import define_op
from fastformer.ops.attention_sinks import with_sinks


def _scores(
    q: Tensor, k: Tensor, attn_mask: Tensor | None, seqlens_k: Tensor | None, *options: Any
) -> AttentionOptions:
    """Returns the options of a call; from attn_mask on, the arguments are the schema's."""
    return AttentionOptions(*options, diagonal=k.shape[1] - q.shape[1], keys=seqlens_k, attn_mask=attn_mask)


def attention_reference(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """Returns (out, lse); the arguments are the schema's."""
    return attend(q, k, v, _scores(q, k, *options))


def attention_backward_reference(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, attn_mask: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns (dq, dk, dv, dmask); dmask is (0,) unless it is needed."""
    *options_of_scores, needs_mask_grad, softcap = options
    scores = _scores(q, k, attn_mask, *(*options_of_scores, softcap))
    dq, dk, dv, dscores = attend_backward(dout, q, k, v, out, lse, scores)
    if not needs_mask_grad or attn_mask is None:
        return dq, dk, dv, q.new_empty(0)
    return dq, dk, dv, dscores.sum_to_size(attn_mask.shape).to(attn_mask.dtype)


def _attention_torch(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    return attend_torch(q, k, v, _scores(q, k, *options))


def _attention_backward_torch(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *options_of_scores, _needs_mask_grad, softcap = options
    scores = _scores(q, k, *(*options_of_scores, softcap))
    return *attend_torch_backward(dout, q, k, v, out, lse, scores), q.new_empty(0)


def _fwd_fake(q: Tensor, k: Tensor, v: Tensor, *options: object) -> tuple[Tensor, Tensor]:
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=accumulation_dtype(q.dtype))
    return q.new_empty(q.shape), lse


def _bwd_fake(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, attn_mask: Tensor | None, *options: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    needs_mask_grad = options[-2]
    dmask = attn_mask.new_empty(attn_mask.shape) if attn_mask is not None and needs_mask_grad else q.new_empty(0)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dmask


def cpp_unsupported(op_name: str, *, q: Tensor, softmax_scale: float, **_: object) -> str | None:
    """Returns the reason why the C++ kernels can't compute a call of dense, packed or cached attention, or None."""
    if (reason := no_cpp_code(q.dtype)) is not None:
        return reason
    return None if softmax_scale > 0 else f"it needs a positive softmax_scale, not {softmax_scale}"


_fwd = define_op(
    "attention_fwd(Tensor q, Tensor k, Tensor v, Tensor? attn_mask, Tensor? seqlens_k, float softmax_scale, "
    "int? window_left, int? window_right, float dropout_p, Tensor? dropout_seed, float softcap=0.0) "
    "-> (Tensor out, Tensor lse)",
    attention_reference,
    fake=_fwd_fake,
    cpp_unsupported=cpp_unsupported,
    torch_function=_attention_torch,
    torch_unsupported=unsupported,
    formula=attention_reference,
    has_faster=True,
)
_bwd = define_op(
    "attention_bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? attn_mask, "
    "Tensor? seqlens_k, float softmax_scale, int? window_left, int? window_right, float dropout_p, "
    "Tensor? dropout_seed, bool needs_mask_grad, float softcap=0.0) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dmask)",
    attention_backward_reference,
    fake=_bwd_fake,
    cpp_unsupported=cpp_unsupported,
    torch_function=_attention_backward_torch,
    torch_unsupported=unsupported,
    has_faster=True,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, attn_mask, seqlens_k, *ctx.options, dropout_seed, ctx.softcap = inputs
    out, lse = output
    ctx.save_for_backward(q, k, v, out, lse, attn_mask, seqlens_k, dropout_seed)
    ctx.mark_non_differentiable(lse)


def _backward(ctx: Any, dout: Tensor, _: None) -> tuple[Tensor | None, ...]:
    *tensors, attn_mask, seqlens_k, dropout_seed = ctx.saved_tensors
    needs_mask_grad = attn_mask is not None and attn_mask.is_floating_point() and ctx.needs_input_grad[3]
    dq, dk, dv, dmask = _bwd(
        dout, *tensors, attn_mask, seqlens_k, *ctx.options, dropout_seed, needs_mask_grad, ctx.softcap
    )
    return dq, dk, dv, dmask if needs_mask_grad else None, *(None,) * 7


def _differentiable_backward(ctx: Any, dout: Tensor, _: None) -> tuple[Tensor | None, ...]:
    q, k, v, _, _, attn_mask, seqlens_k, dropout_seed = ctx.saved_tensors

    def formula(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None) -> Tensor:
        return attention_reference(q, k, v, attn_mask, seqlens_k, *ctx.options, dropout_seed, ctx.softcap)[0]

    return *differentiate(formula, (q, k, v, attn_mask), ctx.needs_input_grad[:4], dout), *(None,) * 7


register_autograd(
    "attention_fwd", _backward, setup_context=_setup_context, differentiable_backward=_differentiable_backward
)
forbid_double_backward("attention_bwd")


def why_no_kernel(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, softmax_scale: float) -> str | None:
    """Returns why a call of `attention` would not run on the kernels of q's device; None if it would.

    It is for callers that have another way to compute the result. The arguments are checked as in `attention`.
    """
    if forced_backend.get() is not None:
        return None
    backend = {"cpu": "cpp", "cuda": "triton"}.get(q.device.type)
    if backend is None:
        return f"there are no kernels for {q.device.type}"
    options = (None, softmax_scale, None, None, 0.0, None, 0.0)
    return _fwd.why_not(backend, (q, k, v, attn_mask, *options))


class ScoreOptions(TypedDict, total=False):
    """The options of every attention op, for its overloads; `attention` describes them."""

    is_causal: bool
    window_size: tuple[int | None, int | None]
    softmax_scale: float | None
    dropout_p: float
    dropout_seed: Tensor | None
    softcap: float
    sinks: Tensor | None


class MaskedOptions(ScoreOptions, total=False):
    """The options of `attention`."""

    attn_mask: Tensor | None
    seqlens_k: Tensor | None


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = False, **options: Unpack[MaskedOptions]
) -> Tensor: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[MaskedOptions]
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **options: Unpack[MaskedOptions]
) -> Tensor | tuple[Tensor, Tensor]: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    seqlens_k: Tensor | None = None,
    is_causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    softmax_scale: float | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    return_lse: bool = False,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes the attention of every query to its visible keys.

    A query without visible keys has zeros as its output and its gradients.

    Query i is aligned with key i + seqlen_k - seqlen_q (the bottom-right diagonal of the tensors, whatever seqlens_k
    is).

    Args:
        q: (batch, seqlen_q, num_heads, head_dim), floating point.
        k: (batch, seqlen_k, num_kv_heads, head_dim), q's dtype; num_heads is a multiple of num_kv_heads, and query
            head h uses kv head h // (num_heads // num_kv_heads).
        v: the same shape and dtype as k.
        attn_mask: broadcastable to (batch, num_heads, seqlen_q, seqlen_k). Boolean: True = attend. Floating point:
            added to the scaled scores; it may require a gradient.
        seqlens_k: (batch,) int32, the number of real keys in each right-padded sequence.
        is_causal: hide the keys to the right of the diagonal.
        window_size: (left, right), how many keys before and after the aligned one are visible; None = all; may be
            negative.
        softmax_scale: the factor of the scores; by default head_dim ** -0.5.
        dropout_p: the probability that an attention weight is dropped.
            It is rounded to a multiple of 1/256 (to 0 or 1 only if it is 0 or 1). Modules pass 0 in evaluation.
        dropout_seed: int64 (2,); drawn from the default generator when None.
        return_lse: also return lse. It carries no gradient.
        softcap: c of c * tanh(score / c), which is applied to the scaled scores before the mask; 0 = no cap.
        sinks: (num_heads,), for each head the score of one more key, which has no value; None = none. With them, a mask
            has no gradient.

    Returns:
        (batch, seqlen_q, num_heads, head_dim) in q's dtype (the autocast dtype under autocast). With return_lse also
        lse, (batch, num_heads, seqlen_q) fp32 (fp64 for fp64): the natural log of the sum of exponentials of the
        masked scores, those of sinks too; -inf for a query without visible keys, and without sinks.

    Raises:
        ValueError: shapes or dtypes don't agree, a mask doesn't broadcast, or requires a gradient along with sinks,
            dropout_p is outside [0, 1], or softcap is below 0.
    """
    # With the usual options nothing has to be resolved but the window and the scale.
    is_usual = softmax_scale is None and (attn_mask is None or (type(attn_mask) is Tensor and attn_mask.dim() == 4))
    is_usual = is_usual and sinks is None and not torch.compiler.is_compiling()
    if is_usual and type(q) is Tensor and q.dim() == 4 and q.shape[3] > 0:
        left, right = resolve_window(is_causal, window_size)
        dropout_p, dropout_seed = resolve_dropout(dropout_p, dropout_seed, q.device)
        outputs = _fwd.repeat(
            *(q, k, v, attn_mask, seqlens_k, q.shape[3] ** -0.5, left, right, dropout_p, dropout_seed, softcap),
            check_values=None if seqlens_k is None else lambda: check_seqlens_k(seqlens_k, k),
        )
        if outputs is not None:
            return outputs if return_lse else outputs[0]
    q, k, v = autocast("attention", q, k, v)
    check_heads(q, k, v, 4, "(batch, seqlen, num_heads, head_dim)")
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"expected q and k of one batch size, got {q.shape[0]} and {k.shape[0]}")
    check_seqlens_k(seqlens_k, k)
    left, right = resolve_window(is_causal, window_size)
    dropout_p, dropout_seed = resolve_dropout(dropout_p, dropout_seed, q.device)
    scale = resolve_scale(softmax_scale, q.shape[-1])
    cap = resolve_softcap(softcap)
    args = (q, k, v, expand_mask(attn_mask, q, k), seqlens_k, scale, left, right, dropout_p, dropout_seed, cap)
    if is_usual:
        _fwd.settle(args)
    out, lse = _fwd(*args) if sinks is None else _with_sinks(sinks, *args)
    return (out, lse) if return_lse else out


def _with_sinks(sinks: Tensor, q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    attn_mask, *others, cap = options
    if attn_mask is not None and attn_mask.requires_grad and torch.is_grad_enabled():
        raise ValueError("expected a mask without a gradient along with sinks, got one that requires it")
    return with_sinks(
        *(q, k, v, sinks),
        lambda q, k, v: _fwd(q, k, v, *options),
        lambda *tensors: _bwd(*tensors, attn_mask, *others, False, cap),
        lambda q, k, v: attention_reference(q, k, v, *options),
    )
