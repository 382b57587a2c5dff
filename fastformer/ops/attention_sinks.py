"""Attention sinks: a learned score for each head that takes a share of the softmax and has no value (gpt-oss).

With sinks s, the weights of a query are exp(score_j) / (exp(s_head) + sum_j exp(score_j)). That is attention as it is
with exp(lse) / (exp(lse) + exp(s_head)) as a factor of its result. Its backward pass recomputes weights from lse and
takes the mean of their gradients from the result, so with the new lse and result it has the sink's share already.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastformer.ops._autograd import differentiate
from fastformer.ops._common import described
from fastformer.ops._transforms import needs_formula

Forward = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, ...]]


def with_sinks(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, forward: Forward, backward: Backward, formula: Forward
) -> tuple[Tensor, Tensor]:
    """Computes attention with sinks by the passes of attention without them, which are called under no_grad.

    Args:
        q, k, v: as in `attention` or in `varlen_attention`.
        sinks: (num_heads,), floating point.
        forward: (q, k, v) -> (out, lse).
        backward: (dout, q, k, v, out, lse) -> (dq, dk, dv), and further gradients, which are ignored.
        formula: the same as `forward`, in operations that PyTorch differentiates, lse too (see `_library`).

    Returns:
        (out, lse), where lse has the sinks' share and carries no gradient.

    Raises:
        ValueError: sinks of another shape, or that are no floating-point tensor.
    """
    expected = (q.shape[-2],)
    if not isinstance(sinks, Tensor) or tuple(sinks.shape) != expected or not sinks.is_floating_point():
        raise ValueError(f"expected floating-point sinks of shape {expected}, got {described(sinks)}")
    if not torch.compiler.is_compiling() and needs_formula((q, k, v, sinks)):
        out, whole, _ = _scaled(formula(q, k, v), sinks)
        return out, whole.detach()
    results: tuple[Tensor, Tensor] = _Attention.apply(q, k, v, sinks, forward, backward, formula)  # type: ignore[no-untyped-call]
    return results


def _scaled(results: tuple[Tensor, Tensor], sinks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (out, lse, the weights of the sinks) with sinks, given (out, lse) without them."""
    out, lse = results
    wide = sinks.to(lse.dtype)[:, None]
    above = lse - wide.clamp_min(torch.finfo(lse.dtype).min)  # lse, (..., num_heads, seqlen), may be -inf, as sinks may
    out = (out * torch.sigmoid(above).transpose(-1, -2)[..., None]).to(out.dtype)
    return out, torch.logaddexp(lse, wide), torch.sigmoid(-above)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, forward: Forward, backward: Backward, formula: Forward
    ) -> tuple[Tensor, Tensor]:
        out, whole, share = _scaled(forward(q, k, v), sinks)
        ctx.save_for_backward(q, k, v, sinks, share, out, whole)
        ctx.run_backward, ctx.formula = backward, formula
        ctx.mark_non_differentiable(whole)
        return out, whole

    @staticmethod
    def backward(ctx: Any, dout: Tensor, _: object) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, share, out, whole = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradients are to be differentiated again

            def plain(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
                return _scaled(ctx.formula(q, k, v), sinks)[0]

            return *differentiate(plain, (q, k, v, sinks), ctx.needs_input_grad[:4], dout), None, None, None
        dsinks = None
        if ctx.needs_input_grad[3]:
            # The gradient of a weight that multiplies no value is minus the mean of the others' gradients.
            mean = (dout.to(whole.dtype) * out.to(whole.dtype)).sum(-1).transpose(-1, -2)
            of_queries = torch.where(share < 1, share * mean, 0.0)  # a query that sees nothing has zeros
            dims = [dim for dim in range(of_queries.dim()) if dim != of_queries.dim() - 2]
            dsinks = -of_queries.sum(dims).to(sinks.dtype)
        return *ctx.run_backward(dout, q, k, v, out, whole)[:3], dsinks, None, None, None
