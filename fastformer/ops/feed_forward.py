"""The position-wise feed-forward network: two linear maps with an activation and dropout between them.

    out = dropout(activation(x weight1^T + bias1)) weight2^T + bias2

Vaswani et al. 2017, section 3.3 (ReLU); Hendrycks and Gimpel 2016 (GELU; SiLU, x sigmoid(x)); Shazeer 2020, "GLU
Variants Improve Transformer" (SwiGLU: silu(gate) * up; GEGLU: gelu(gate) * up, with tanh in T5 1.1). The dropout after
the activation is tensor2tensor's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fastformer.ops._autograd import differentiate, forbid_double_backward, register_autograd
from fastformer.ops._common import (
    accumulation_dtype,
    check_dtype,
    check_features,
    check_vector,
    cpp_unsupported_dtype,
    described,
    is_matrix,
)
from fastformer.ops._dispatch import autocast, needs_gradient
from fastformer.ops._dropout import drop, keep_scale, resolve_dropout
from fastformer.ops._library import define_op
from fastformer.ops.linear import linear
from fastformer.ops.quantized_linear import acting_copy, quantized_linear

ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu", "swiglu", "geglu_tanh")
GATED = ("swiglu", "geglu_tanh")
_GELU_APPROXIMATION = {"gelu": "none", "gelu_tanh": "tanh"}


def _activate(pre: Tensor, activation: str) -> Tensor:
    if activation == "relu":
        return pre.relu()
    if activation == "silu":
        return F.silu(pre)
    if activation in GATED:
        gate, up = pre.chunk(2, dim=-1)
        return (F.silu(gate) if activation == "swiglu" else F.gelu(gate, approximate="tanh")) * up
    return F.gelu(pre, approximate=_GELU_APPROXIMATION[activation])


def _activate_backward(dhidden: Tensor, pre: Tensor, activation: str) -> Tensor:
    if activation == "swiglu":
        gate, up = pre.chunk(2, dim=-1)
        sigmoid = gate.sigmoid()
        dgate = dhidden * up * sigmoid * (1 + gate * (1 - sigmoid))
        return torch.cat((dgate, dhidden * gate * sigmoid), dim=-1)
    if activation == "geglu_tanh":
        gate, up = pre.chunk(2, dim=-1)
        dgate = torch.ops.aten.gelu_backward(dhidden * up, gate, approximate="tanh")
        return torch.cat((dgate, dhidden * F.gelu(gate, approximate="tanh")), dim=-1)
    if activation == "silu":
        sigmoid = pre.sigmoid()
        return dhidden * sigmoid * (1 + pre * (1 - sigmoid))
    dpre: Tensor = torch.ops.aten.gelu_backward(dhidden, pre, approximate=_GELU_APPROXIMATION[activation])
    return dpre


def feed_forward_reference(
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    activation: str,
    dropout_p: float,
    dropout_seed: Tensor | None,
    needs_saved: bool = True,
) -> tuple[Tensor, Tensor]:
    """Returns (out, saved). saved is needed for backward, with one row per token; it is (0,) unless it is needed.

    For relu it is the hidden state after dropout, else the pre-activation.
    """
    pre = F.linear(x.reshape(-1, x.shape[-1]), weight1, bias1)
    hidden = drop(_activate(pre.to(accumulation_dtype(x.dtype)), activation), dropout_p, dropout_seed).to(x.dtype)
    out = F.linear(hidden, weight2, bias2).reshape(*x.shape[:-1], weight2.shape[0])
    if not needs_saved:
        return out, x.new_empty(0)
    return out, hidden if activation == "relu" else pre


def _fwd_fake(
    x: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, *options: object
) -> tuple[Tensor, Tensor]:
    needs_saved = options[-1]
    saved = x.new_empty(x.numel() // x.shape[-1], weight1.shape[0]) if needs_saved else x.new_empty(0)
    return x.new_empty(*x.shape[:-1], weight2.shape[0]), saved


def _weight_gradient(dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Computes dy^T x with the layout of the weight: contiguous, or the transpose of a contiguous matrix."""
    return dy.T @ x if weight.is_contiguous() else (x.T @ dy).T


def _gradient_like(weight: Tensor) -> Tensor:
    """Returns an uninitialised tensor with the shape and layout of `_weight_gradient`'s result."""
    out_features, in_features = weight.shape
    return weight.new_empty(weight.shape) if weight.is_contiguous() else weight.new_empty(in_features, out_features).T


def feed_forward_backward_reference(
    dout: Tensor,
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    saved: Tensor,
    activation: str,
    dropout_p: float,
    dropout_seed: Tensor | None,
    has_bias2: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns (dx, dweight1, dbias1, dweight2, dbias2); the gradient of a missing bias is (0,)."""
    rows, drows = x.reshape(-1, x.shape[-1]), dout.reshape(-1, dout.shape[-1])
    dhidden = drows @ weight2
    if activation == "relu":
        # A value above 0 after dropout was above 0 before and was kept, so the dropout mask isn't needed.
        hidden = saved
        dpre = (dhidden * keep_scale(dropout_p)).masked_fill(saved <= 0, 0.0)
    else:
        pre = saved.to(accumulation_dtype(x.dtype))
        hidden = drop(_activate(pre, activation), dropout_p, dropout_seed).to(x.dtype)
        dpre = _activate_backward(drop(dhidden.to(pre.dtype), dropout_p, dropout_seed), pre, activation).to(x.dtype)
    return (
        (dpre @ weight1).view(x.shape),
        _weight_gradient(dpre, rows, weight1),
        x.new_empty(0) if bias1 is None else dpre.sum(0),
        _weight_gradient(drows, hidden, weight2),
        drows.sum(0) if has_bias2 else x.new_empty(0),
    )


def _bwd_fake(
    dout: Tensor, x: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, *options: object
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    has_bias2 = options[-1]
    return (
        x.new_empty(x.shape),
        _gradient_like(weight1),
        x.new_empty(0 if bias1 is None else weight1.shape[0]),
        _gradient_like(weight2),
        x.new_empty(weight2.shape[0] if has_bias2 else 0),
    )


_fwd = define_op(
    "feed_forward_fwd(Tensor x, Tensor weight1, Tensor? bias1, Tensor weight2, Tensor? bias2, str activation, "
    "float dropout_p, Tensor? dropout_seed, bool needs_saved) -> (Tensor out, Tensor saved)",
    feed_forward_reference,
    fake=_fwd_fake,
    cpp_unsupported=cpp_unsupported_dtype,
    formula=feed_forward_reference,
)
_bwd = define_op(
    "feed_forward_bwd(Tensor dout, Tensor x, Tensor weight1, Tensor? bias1, Tensor weight2, Tensor saved, "
    "str activation, float dropout_p, Tensor? dropout_seed, bool has_bias2) "
    "-> (Tensor dx, Tensor dweight1, Tensor dbias1, Tensor dweight2, Tensor dbias2)",
    feed_forward_backward_reference,
    fake=_bwd_fake,
    cpp_unsupported=cpp_unsupported_dtype,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight1, bias1, weight2, bias2, activation, dropout_p, dropout_seed, _ = inputs
    saved = output[1]
    # bias2, a parameter, is saved only for double backward.
    ctx.save_for_backward(x, weight1, bias1, weight2, bias2, saved, dropout_seed)
    ctx.mark_non_differentiable(saved)
    ctx.activation, ctx.dropout_p, ctx.has_bias2 = activation, dropout_p, bias2 is not None


def _backward(ctx: Any, dout: Tensor, _: None) -> tuple[Tensor | None, ...]:
    x, weight1, bias1, weight2, _, saved, dropout_seed = ctx.saved_tensors
    dx, dweight1, dbias1, dweight2, dbias2 = _bwd(
        dout, x, weight1, bias1, weight2, saved, ctx.activation, ctx.dropout_p, dropout_seed, ctx.has_bias2
    )
    return (
        dx,
        dweight1,
        None if bias1 is None else dbias1,
        dweight2,
        dbias2 if ctx.has_bias2 else None,
        *(None,) * 4,
    )


def _differentiable_backward(ctx: Any, dout: Tensor, _: None) -> tuple[Tensor | None, ...]:
    *inputs, _, dropout_seed = ctx.saved_tensors

    def formula(*inputs: Any) -> Tensor:
        options: Any = (ctx.activation, ctx.dropout_p, dropout_seed)
        return feed_forward_reference(*inputs, *options)[0]

    return *differentiate(formula, tuple(inputs), ctx.needs_input_grad[:5], dout), *(None,) * 4


register_autograd(
    "feed_forward_fwd", _backward, setup_context=_setup_context, differentiable_backward=_differentiable_backward
)
forbid_double_backward("feed_forward_bwd")


def feed_forward(
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    *,
    activation: str = "relu",
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
) -> Tensor:
    """Applies a linear map, an activation, dropout and a second linear map.

    Args:
        x: (..., dim), floating point.
        weight1: (hidden_dim, dim) as in nn.Linear; for a gated activation (2 * hidden_dim, dim), the gate's half first,
            then up's. It and weight2 may be views of their transposes, which aren't copied.
        bias1: (hidden_dim,) or (2 * hidden_dim,), or None.
        weight2: (out_dim, hidden_dim); out_dim is dim in a Transformer.
        bias2: (out_dim,) or None.
        activation: "relu", "gelu" (erf), "gelu_tanh", "silu", or the gated "swiglu" or "geglu_tanh".
        dropout_p: the probability that a hidden element is dropped.
            It is rounded to a multiple of 1/256 (to 0 or 1 only if it is 0 or 1). Modules pass 0 in evaluation.
        dropout_seed: int64 (2,); drawn from the default generator when None. Row = flattened row.

    Returns:
        (..., out_dim), x's dtype; under autocast the autocast dtype.

    Raises:
        ValueError: shapes or dtypes don't agree, the activation is unknown, or dropout_p is outside [0, 1].
    """
    if not dropout_p and (copy := acting_copy(x, weight1, bias1)) is not None:
        pre = quantized_linear(x, copy, bias1, is_wide=True)
        return linear(_activate(pre, activation).to(x.dtype), weight2, bias2)
    is_usual = not torch.compiler.is_compiling() and type(x) is Tensor and x.dim() >= 2 and x.shape[-1] > 0
    if is_usual:
        dropout_p, dropout_seed = resolve_dropout(dropout_p, dropout_seed, x.device)
        needs_saved = needs_gradient(x, weight1, bias1, weight2, bias2)
        rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        outputs = _fwd.repeat(rows, weight1, bias1, weight2, bias2, activation, dropout_p, dropout_seed, needs_saved)
        if outputs is not None:
            return outputs[0] if x.dim() == 2 else outputs[0].reshape(*x.shape[:-1], weight2.shape[0])
    if activation not in ACTIVATIONS:
        raise ValueError(f"expected an activation in {ACTIVATIONS}, got {activation!r}")
    x, weight1, weight2 = autocast("feed_forward", x, weight1, weight2)
    bias1, bias2 = autocast("feed_forward", bias1, bias2)
    check_features(x)
    if not is_matrix(weight1, x.shape[-1]):
        raise ValueError(f"expected a floating-point weight1 (hidden_dim, {x.shape[-1]}), got {described(weight1)}")
    if activation in GATED and weight1.shape[0] % 2:
        raise ValueError(
            f"expected an even number of rows in weight1 (gate and up) for {activation}, got {weight1.shape[0]}"
        )
    hidden_dim = weight1.shape[0] // 2 if activation in GATED else weight1.shape[0]
    if not is_matrix(weight2, hidden_dim):
        raise ValueError(f"expected a floating-point weight2 (out_dim, {hidden_dim}), got {described(weight2)}")
    check_vector("bias1", bias1, weight1.shape[0])
    check_vector("bias2", bias2, weight2.shape[0])
    for name, parameter in (("weight1", weight1), ("bias1", bias1), ("weight2", weight2), ("bias2", bias2)):
        check_dtype(name, parameter, x.dtype)
    dropout_p, dropout_seed = resolve_dropout(dropout_p, dropout_seed, x.device)
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    # The saved tensor is as large as the widest matrix here, or twice as large, so it is written only if a backward
    # pass will follow. A trace is repeated to check it, and has to be the same with gradients and without.
    needs_saved = torch._C._get_tracing_state() is not None or needs_gradient(x, weight1, bias1, weight2, bias2)
    args = (rows, weight1, bias1, weight2, bias2, activation, dropout_p, dropout_seed, needs_saved)
    if is_usual:
        _fwd.settle(args)
    out = _fwd(*args)[0]
    return out if x.dim() == 2 else out.reshape(*x.shape[:-1], weight2.shape[0])
