"""The position-wise feed-forward network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastformer.engine.checks import DROPOUTS, active_dropout, is_plain, is_untouched, plain_parameters
from fastformer.engine.frozen import Plans
from fastformer.nn.errors import InputError
from fastformer.nn.linear import LINEARS
from fastformer.ops.feed_forward import ACTIVATIONS, GATED, feed_forward

Activation = str | Callable[[Tensor], Tensor]

# Gates that no kernel computes, so that the modules are called: the exact GELU, and gpt-oss' SwiGLU of limited numbers.
GEGLU, CLAMPED_SWIGLU = "geglu", "clamped_swiglu"
CALLED = (GEGLU, CLAMPED_SWIGLU)
_LIMIT, _SIGMOID_SCALE = 7.0, 1.702
_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu}


def resolve_activation(activation: Activation) -> Activation:
    """Returns the activation in a layer's form: torch.nn's function if it has one, else a name or the given callable.

    Raises:
        InputError: the name is unknown.
    """
    if isinstance(activation, str):
        if activation not in (*ACTIVATIONS, *CALLED):
            raise InputError(f"expected an activation in {(*ACTIVATIONS, *CALLED)} or a callable, got {activation!r}")
        return _FUNCTIONS.get(activation, activation)
    return activation


def is_gated(activation: Activation) -> bool:
    """Returns whether the first linear map makes two numbers (gate and up) for each input of the second."""
    return isinstance(activation, str) and activation in (*GATED, *CALLED)


def fused_name(activation: Activation, check: Callable[..., bool] = is_plain) -> str | None:
    """Returns the op's name of an activation; None if the activation has to be called.

    Args:
        activation: the layer's attribute `activation`.
        check: `is_untouched`, if the caller has already checked `is_watched`.
    """
    if isinstance(activation, str):
        return None if activation in CALLED else activation
    if activation is F.relu or activation is torch.relu or check(activation, nn.ReLU):
        return "relu"
    if activation is F.gelu:
        return "gelu"
    if activation is F.silu or check(activation, nn.SiLU):
        return "silu"
    if isinstance(activation, nn.GELU) and check(activation, nn.GELU):
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(activation.approximate)
    return None


class FeedForwardPlan(NamedTuple):
    """The parameters of a feed-forward network that one op computes without a call of its modules.

    Attributes:
        activation: the activation's name in the op.
        linear1, linear2: the parameters of both linear maps.
        dropout_p: the acting probability of the dropout after the activation.
    """

    activation: str
    linear1: dict[str, Any]
    linear2: dict[str, Any]
    dropout_p: float

    def compute(self, x: Tensor) -> Tensor:
        """Computes linear2(dropout(activation(linear1(x)))) in one op."""
        return feed_forward(
            x,
            self.linear1["weight"],
            self.linear1["bias"],
            self.linear2["weight"],
            self.linear2["bias"],
            activation=self.activation,
            dropout_p=self.dropout_p,
        )


def find_feed_forward_plan(module: nn.Module, *, is_lent: bool = False) -> FeedForwardPlan | None:
    """Finds the plan of a module with `linear1`, `activation`, `dropout` and `linear2`; None if they must be called.

    They must be called if one of them was replaced (an adapter, a quantised linear), patched or hooked.
    `is_lent` is that of `is_untouched`.
    """
    inside = module._modules
    name = fused_name(module.activation, is_untouched)  # type: ignore[arg-type]
    linear1 = plain_parameters(inside.get("linear1"), *LINEARS, is_lent=is_lent)
    linear2 = plain_parameters(inside.get("linear2"), *LINEARS, is_lent=is_lent)
    dropout = inside.get("dropout")
    if name is None or linear1 is None or linear2 is None or not is_untouched(dropout, *DROPOUTS):
        return None
    assert isinstance(dropout, nn.Module)
    return FeedForwardPlan(name, linear1, linear2, active_dropout(dropout))


def call_feed_forward(module: Any, x: Tensor) -> Tensor:
    """Computes what the plan of a module would compute (see `find_feed_forward_plan`) by calling each module in it."""
    out: Tensor = module.linear2(module.dropout(activate(module.activation, module.linear1(x))))
    return out


def activate(activation: Activation, x: Tensor) -> Tensor:
    """Applies a layer's activation to the output of its first linear map."""
    if is_gated(activation):
        gate, up = x.chunk(2, dim=-1)
        if activation == CLAMPED_SWIGLU:
            gate, up = gate.clamp(max=_LIMIT), up.clamp(-_LIMIT, _LIMIT)
            return (up + 1) * (gate * torch.sigmoid(_SIGMOID_SCALE * gate))
        if activation == "swiglu":
            return F.silu(gate) * up
        return F.gelu(gate, approximate="none" if activation == GEGLU else "tanh") * up
    if activation == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    assert not isinstance(activation, str)
    return activation(x)


class FeedForward(nn.Module):
    """`linear2(dropout(activation(linear1(x))))` ("Attention Is All You Need", section 3.3) as one op.

    Parameters: `linear1.weight` (hidden_dim, dim), or (2 * hidden_dim, dim) for a gated activation, gate first;
    `linear2.weight` (dim, hidden_dim); their biases.

    Args:
        dim: input and output size.
        hidden_dim: the size between the linear maps.
        activation: "relu", "gelu" (exact), "gelu_tanh", "silu", "swiglu" or "geglu_tanh" (Shazeer 2020); or "geglu",
            "clamped_swiglu" or a callable, which aren't fused.
        dropout: probability after the activation while training, rounded to a multiple of 1/256.
        bias: whether both linear maps have a bias.
        device, dtype: the device and the dtype of the parameters.
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        activation: Activation = "relu",
        dropout: float = 0.0,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.activation = resolve_activation(activation)
        inner = 2 * hidden_dim if is_gated(self.activation) else hidden_dim
        self.linear1 = nn.Linear(dim, inner, bias=bias, device=device, dtype=dtype)
        self.dropout = nn.Dropout(dropout)
        self.linear2 = nn.Linear(hidden_dim, dim, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Applies the network to x (..., dim), with a result of the same shape."""
        plan = _PLANS.of(self)
        return call_feed_forward(self, x) if plan is None else plan.compute(x)


_PLANS: Plans[FeedForwardPlan | None] = Plans("feed_forward", find_feed_forward_plan, watched=lambda module, plan: None)
