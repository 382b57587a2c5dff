"""Dropout, residual add and LayerNorm or RMSNorm in one op: the work between the sub-layers of a Transformer.

    s = dropout(x) + residual,    y = norm(s) * weight + bias

Ba et al. 2016, "Layer Normalization": biased variance, eps inside the square root. Zhang and Sennrich 2019, "Root Mean
Square Layer Normalization": no mean is subtracted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastformer.ops._autograd import differentiate, forbid_double_backward, register_autograd
from fastformer.ops._common import (
    accumulation_dtype,
    check_features,
    check_number,
    check_vector,
    described,
    no_cpp_code,
)
from fastformer.ops._dropout import drop, resolve_dropout
from fastformer.ops._library import define_op


def add_layer_norm_reference(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dropout_p: float,
    dropout_seed: Tensor | None,
    rms_norm: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns (y, residual_out, mean, rstd) of `add_layer_norm`.

    residual_out is (0,) if it is x, mean is (0,) if rms_norm.
    """
    dtype = accumulation_dtype(x.dtype)
    if residual is None and dropout_p == 0.0:
        s, residual_out = x, x.new_empty(0)
    else:
        s = drop(x.to(dtype), dropout_p, dropout_seed)
        if residual is not None:
            s = s + residual
        s = residual_out = s.to(x.dtype if residual is None else residual.dtype).contiguous()
    # The norm acts on the sum as it is stored, rounded, because the backward pass has only the stored sum.
    y, mean, rstd = _normalise(s.to(dtype), weight, bias, eps, rms_norm)
    return y.to(x.dtype).contiguous(), residual_out, mean.new_empty(0) if rms_norm else mean.flatten(), rstd.flatten()


def _normalise(
    s: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, rms_norm: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (y, mean, rstd) of s, with the dtype of s."""
    mean = s.mean(-1, keepdim=True)
    centred = s if rms_norm else s - mean
    rstd = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    y = centred * rstd
    if weight is not None:
        y = y * weight
    if bias is not None:
        y = y + bias
    return y, mean, rstd


def _fwd_fake(x: Tensor, residual: Tensor | None, *options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *_, dropout_p, _, rms_norm = options
    stream = x.dtype if residual is None else residual.dtype
    has_residual_out = residual is not None or dropout_p > 0.0
    rows = x.numel() // x.shape[-1]
    statistics = accumulation_dtype(x.dtype)
    return (
        x.new_empty(x.shape),
        x.new_empty(x.shape if has_residual_out else 0, dtype=stream),
        x.new_empty(0 if rms_norm else rows, dtype=statistics),
        x.new_empty(rows, dtype=statistics),
    )


def add_layer_norm_backward_reference(
    dy: Tensor,
    dresidual_out: Tensor | None,
    s: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    dropout_p: float,
    dropout_seed: Tensor | None,
    rms_norm: bool,
    has_bias: bool,
    x_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns (dx, dresidual, dweight, dbias).

    dresidual is (0,) if it equals dx; dweight and dbias are (0,) without a weight or bias.
    """
    dtype = rstd.dtype
    per_row = s.shape[:-1] + (1,)
    dy, rstd = dy.to(dtype), rstd.view(per_row)
    normal = (s.to(dtype) if rms_norm else s.to(dtype) - mean.view(per_row)) * rstd
    parameter_dtype = s.dtype if weight is None else weight.dtype
    dweight, dbias = (s.new_empty(0, dtype=parameter_dtype) for _ in range(2))
    if weight is not None:
        dweight = _column_sums(dy * normal).to(parameter_dtype)
    if has_bias:
        dbias = _column_sums(dy).to(parameter_dtype)

    dnormal = dy if weight is None else dy * weight
    ds = dnormal - normal * (dnormal * normal).mean(-1, keepdim=True)
    if not rms_norm:
        ds = ds - dnormal.mean(-1, keepdim=True)
    ds = ds * rstd
    if dresidual_out is not None:
        ds = ds + dresidual_out
    dx = drop(ds, dropout_p, dropout_seed).to(x_dtype).contiguous()
    same = dropout_p == 0.0 and x_dtype == s.dtype
    return dx, s.new_empty(0) if same else ds.to(s.dtype).contiguous(), dweight, dbias


def _column_sums(values: Tensor) -> Tensor:
    return values.reshape(-1, values.shape[-1]).sum(0)


def _bwd_fake(
    dy: Tensor, dresidual_out: Tensor | None, s: Tensor, weight: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _, _, dropout_p, _, _, has_bias, x_dtype = options
    same = dropout_p == 0.0 and x_dtype == s.dtype
    parameter_dtype = s.dtype if weight is None else weight.dtype
    dim = s.shape[-1]
    return (
        s.new_empty(s.shape, dtype=x_dtype),
        s.new_empty(0 if same else s.shape),
        s.new_empty(0 if weight is None else dim, dtype=parameter_dtype),
        s.new_empty(dim if has_bias else 0, dtype=parameter_dtype),
    )


def _fwd_cpp_unsupported(op_name: str, *, x: Tensor, residual: Tensor | None, **_: object) -> str | None:
    return _no_cpp_code(x.dtype, x.dtype if residual is None else residual.dtype)


def _bwd_cpp_unsupported(op_name: str, *, s: Tensor, x_dtype: torch.dtype, **_: object) -> str | None:
    return _no_cpp_code(x_dtype, s.dtype)


def _no_cpp_code(x_dtype: torch.dtype, stream: torch.dtype) -> str | None:
    if x_dtype == stream and no_cpp_code(x_dtype) is None:
        return None
    if (x_dtype, stream) == (torch.bfloat16, torch.float32):
        return None
    return no_cpp_code(x_dtype) or f"no C++ code for x {x_dtype} with a residual stream of {stream}"


_fwd = define_op(
    "add_layer_norm_fwd(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, float dropout_p, "
    "Tensor? dropout_seed, bool rms_norm) -> (Tensor y, Tensor residual_out, Tensor mean, Tensor rstd)",
    add_layer_norm_reference,
    fake=_fwd_fake,
    cpp_unsupported=_fwd_cpp_unsupported,
    formula=add_layer_norm_reference,
)
_bwd = define_op(
    "add_layer_norm_bwd(Tensor dy, Tensor? dresidual_out, Tensor s, Tensor? weight, Tensor mean, Tensor rstd, "
    "float dropout_p, Tensor? dropout_seed, bool rms_norm, bool has_bias, ScalarType x_dtype) "
    "-> (Tensor dx, Tensor dresidual, Tensor dweight, Tensor dbias)",
    add_layer_norm_backward_reference,
    fake=_bwd_fake,
    cpp_unsupported=_bwd_cpp_unsupported,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, residual, weight, bias, ctx.eps, dropout_p, dropout_seed, rms_norm = inputs
    _, residual_out, mean, rstd = output
    has_residual_out = residual is not None or dropout_p > 0.0
    ctx.save_for_backward(residual_out if has_residual_out else x, weight, mean, rstd, dropout_seed)
    ctx.mark_non_differentiable(mean, rstd, *(() if has_residual_out else (residual_out,)))
    ctx.dropout_p, ctx.rms_norm, ctx.x_dtype = dropout_p, rms_norm, x.dtype
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward(ctx: Any, dy: Tensor | None, dresidual_out: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    s, weight, mean, rstd, dropout_seed = ctx.saved_tensors
    is_read = dy is not None  # whether the norm's output is used, or only the sum
    if dy is None:
        dy = s.new_zeros(s.shape, dtype=ctx.x_dtype)
    has_bias = is_read and ctx.bias_dtype is not None and ctx.needs_input_grad[3]
    dx, dresidual, dweight, dbias = _bwd(
        dy, dresidual_out, s, weight, mean, rstd, ctx.dropout_p, dropout_seed, ctx.rms_norm, has_bias, ctx.x_dtype
    )
    if ctx.dropout_p == 0.0 and ctx.x_dtype == s.dtype:
        dresidual = dx
    if has_bias and dbias.dtype != ctx.bias_dtype:
        dbias = dbias.to(ctx.bias_dtype)
    return (
        dx,
        dresidual if ctx.needs_input_grad[1] else None,
        dweight if is_read and weight is not None else None,
        dbias if has_bias else None,
        *(None,) * 4,
    )


def _differentiable_backward(
    ctx: Any, dy: Tensor | None, dresidual_out: Tensor | None, *_: None
) -> tuple[Tensor | None, ...]:
    s, weight, _, rstd, dropout_seed = ctx.saved_tensors  # s, an output of this op or its x, has its own gradient
    needs_dx, needs_dresidual, needs_dweight, needs_dbias = ctx.needs_input_grad[:4]

    def formula(s: Tensor, weight: Tensor | None) -> Tensor:
        return _normalise(s.to(rstd.dtype), weight, None, ctx.eps, ctx.rms_norm)[0].to(ctx.x_dtype)

    ds, dweight = differentiate(formula, (s, weight), (needs_dx or needs_dresidual, needs_dweight), dy)
    if dresidual_out is not None:
        ds = dresidual_out if ds is None else ds + dresidual_out
    dx = None
    if ds is not None and needs_dx:
        dx = drop(ds.to(rstd.dtype), ctx.dropout_p, dropout_seed).to(ctx.x_dtype)
    dbias = _column_sums(dy.to(rstd.dtype)).to(ctx.bias_dtype) if dy is not None and needs_dbias else None
    return dx, ds if needs_dresidual else None, dweight, dbias, *(None,) * 4


register_autograd(
    "add_layer_norm_fwd", _backward, setup_context=_setup_context, differentiable_backward=_differentiable_backward
)
forbid_double_backward("add_layer_norm_bwd")


def add_layer_norm(
    x: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    rms_norm: bool = False,
) -> tuple[Tensor, Tensor]:
    """Normalises dropout(x) + residual over the last dimension.

    Pre-norm layers use both results (`residual_out` is the residual stream), post-norm layers only `y`.

    Args:
        x: (..., dim), floating point: the output of a sub-layer.
        residual: the shape of x, in its own dtype (often an fp32 stream beside bf16 sub-layers); None = no residual.
        weight, bias: (dim,), in x's dtype or wider; None = ones, zeros.
        eps: added to the variance (tensor2tensor: 1e-6).
        dropout_p: the probability that an element of x is dropped.
            It is rounded to a multiple of 1/256 (to 0 or 1 only if it is 0 or 1). Modules pass 0 in evaluation.
        dropout_seed: int64 (2,); drawn from the default generator when None. Row = flattened row, column = feature.
        rms_norm: RMSNorm instead of LayerNorm.

    Returns:
        y: (..., dim), x's dtype. Statistics are fp32 (fp64 for fp64), and autocast has no effect.
        residual_out: (..., dim): dropout(x) + residual in the residual's dtype (x's if there is no residual).

    Raises:
        ValueError: the shapes don't agree, x is an integer tensor, or dropout_p is outside [0, 1].
    """
    is_eager, outputs = not torch.compiler.is_compiling(), None
    if is_eager and type(x) is Tensor:
        dropout_p, dropout_seed = resolve_dropout(dropout_p, dropout_seed, x.device)
        outputs = _fwd.repeat(x, residual, weight, bias, eps, dropout_p, dropout_seed, rms_norm)
    if outputs is None:
        check_features(x)
        if residual is not None and (
            not isinstance(residual, Tensor) or residual.shape != x.shape or not residual.is_floating_point()
        ):
            expected = f"a floating-point residual of x's shape {tuple(x.shape)}"
            raise ValueError(f"expected {expected}, got {described(residual)}")
        check_vector("weight", weight, x.shape[-1])
        check_vector("bias", bias, x.shape[-1])
        check_number("eps", eps, 0)
        dropout_p, dropout_seed = resolve_dropout(dropout_p, dropout_seed, x.device)
        args = (x, residual, weight, bias, eps, dropout_p, dropout_seed, rms_norm)
        if is_eager:
            _fwd.settle(args)
        outputs = _fwd(*args)
    return outputs[0], x if residual is None and dropout_p == 0.0 else outputs[1]
