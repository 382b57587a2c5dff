"""Fused parts that the families share: a residual and its norm, the feed-forward network, RMSNorm."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import activations

from fastformer.engine.checks import DROPOUTS, active_dropout, is_plain, is_watched, is_written_as_known
from fastformer.integrations.known import is_known
from fastformer.nn.linear import LINEARS
from fastformer.nn.norm import find_norm_plan
from fastformer.ops import add_layer_norm
from fastformer.ops import feed_forward as feed_forward_op


def plain_dropout(dropout: nn.Module) -> float | None:
    """Returns a dropout's current probability; None if the module has a hook or another change and must be called."""
    return active_dropout(dropout) if is_plain(dropout, *DROPOUTS) else None


def add_and_norm(x: Tensor, residual: Tensor, dropout_p: float, norm: nn.Module) -> Tensor:
    """Computes norm(dropout(x) + residual), in one op if the norm is plain."""
    return join_residual(x, residual, dropout_p, norm)[0]


def join_residual(x: Tensor, residual: Tensor, dropout_p: float, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Computes (norm(dropout(x) + residual), the sum), in one op if the norm is plain."""
    plan = None if is_watched() else find_norm_plan(norm)
    if plan is None:
        total = F.dropout(x, dropout_p) + residual
        return norm(total), total
    dtype = torch.promote_types(x.dtype, residual.dtype)
    weight, bias = plan.parameters["weight"], plan.parameters.get("bias")
    return add_layer_norm(
        x.to(dtype), residual, weight, bias, eps=plan.eps, dropout_p=dropout_p, rms_norm=plan.rms_norm,
    )  # fmt: skip


# Classes of activations and their names in `ops.feed_forward`.
_ACTIVATIONS: dict[type[nn.Module], str] = {
    nn.ReLU: "relu",
    nn.SiLU: "silu",
    activations.GELUActivation: "gelu",
    activations.NewGELUActivation: "gelu_tanh",
    activations.GELUTanh: "gelu_tanh",
    activations.SiLUActivation: "silu",
}


def fused_activation(activation: object) -> str | None:
    """Returns the name in `ops.feed_forward` of one of transformers' activations; None if it doesn't support it."""
    if not (isinstance(activation, nn.Module) and is_plain(activation, *_ACTIVATIONS)):
        return None
    name = _ACTIVATIONS[type(activation)]
    # GELUActivation may use a formula of its own instead of PyTorch's function.
    return None if name == "gelu" and getattr(activation, "act", F.gelu) is not F.gelu else name


def fused_feed_forward(
    x: Tensor, linear1: nn.Module, activation: object, linear2: nn.Module, dropout_p: float = 0.0
) -> Tensor | None:
    """Computes linear2(dropout(activation(linear1(x)))) in one op; None if a part isn't plain or has no op."""
    name = fused_activation(activation)
    if name is None or not (is_plain(linear1, *LINEARS) and is_plain(linear2, *LINEARS)):
        return None
    assert isinstance(linear1, nn.Linear) and isinstance(linear2, nn.Linear)
    return feed_forward_op(
        x, linear1.weight, linear1.bias, linear2.weight, linear2.bias, activation=name, dropout_p=dropout_p,
    )  # fmt: skip


class RMSNorm(nn.Module):
    """transformers' RMSNorm, with statistics in fp32: one op if x has the weight's dtype, except fp16."""

    weight: Any
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        if not _fits(self, hidden_states):
            normed: Tensor = super().forward(hidden_states)
            return normed
        return add_layer_norm(hidden_states, weight=self.weight, eps=self.variance_epsilon, rms_norm=True)[0]


def join_rms(x: Tensor, residual: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Computes (norm(x + residual), the sum), in one op if the norm is a plain `RMSNorm`."""
    dtype = torch.promote_types(x.dtype, residual.dtype)
    if not (isinstance(norm, RMSNorm) and is_known(norm, type(norm)) and _fits(norm, residual.to(dtype))):
        total = x + residual
        return norm(total), total
    return add_layer_norm(x.to(dtype), residual.to(dtype), norm.weight, eps=norm.variance_epsilon, rms_norm=True)


def _fits(norm: RMSNorm, x: Tensor) -> bool:
    weight = norm._parameters.get("weight")  # a parametrized weight is computed at each access
    if type(weight) is not nn.Parameter or type(x) not in (Tensor, nn.Parameter):
        return False
    return x.dtype == weight.dtype and x.dtype != torch.float16 and is_written_as_known(type(norm))
