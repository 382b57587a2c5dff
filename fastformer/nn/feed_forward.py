"""The position-wise feed-forward network."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastformer.nn.dropout import active_dropout, dropout_seed
from fastformer.nn.errors import InputError
from fastformer.nn.guards import is_plain, is_plain_dropout, is_untouched
from fastformer.nn.linear import LINEARS
from fastformer.ops.feed_forward import ACTIVATIONS, GATED, feed_forward

Activation = str | Callable[[Tensor], Tensor]

_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu}


def resolve_activation(activation: Activation) -> Activation:
    """The activation as a layer keeps it: torch.nn's functions where there is one, a name, or the caller's callable.

    Raises:
        InputError: a name that isn't known.
    """
    if isinstance(activation, str):
        if activation not in ACTIVATIONS:
            raise InputError(f"expected an activation out of {ACTIVATIONS} or a callable, got {activation!r}")
        return _FUNCTIONS.get(activation, activation)
    return activation


def is_gated(activation: Activation) -> bool:
    """Whether the first linear makes two numbers for each that the second takes."""
    return isinstance(activation, str) and activation in GATED


def fused_name(activation: Activation) -> str | None:
    """What the op calls this activation, or None where it has to be called as it is."""
    if isinstance(activation, str):
        return activation
    if activation is F.relu or activation is torch.relu or is_plain(activation, nn.ReLU):
        return "relu"
    if activation is F.gelu:
        return "gelu"
    if activation is F.silu or is_plain(activation, nn.SiLU):
        return "silu"
    if isinstance(activation, nn.GELU) and is_plain(activation, nn.GELU):
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(activation.approximate)
    return None


def apply_feed_forward(
    x: Tensor, linear1: nn.Module, linear2: nn.Module, activation: Activation, dropout: nn.Module
) -> Tensor:
    """linear2(dropout(activation(linear1(x)))), in one op where the pieces are ones that it knows.

    Where somebody replaced one of the modules (an adapter, a quantised linear) or hooked it, each is called.
    """
    name = fused_name(activation)
    linears = is_untouched(linear1, *LINEARS) and is_untouched(linear2, *LINEARS)
    if name is not None and linears and is_plain_dropout(dropout):
        assert isinstance(linear1, nn.Linear) and isinstance(linear2, nn.Linear)
        dropout_p = active_dropout(dropout)
        return feed_forward(
            x,
            linear1.weight,
            linear1.bias,
            linear2.weight,
            linear2.bias,
            activation=name,
            dropout_p=dropout_p,
            dropout_seed=dropout_seed(dropout_p, x.device),
        )
    return linear2(dropout(_call(activation, linear1(x))))


def _call(activation: Activation, x: Tensor) -> Tensor:
    if activation in GATED:
        gate, up = x.chunk(2, dim=-1)
        return (F.silu(gate) if activation == "swiglu" else F.gelu(gate, approximate="tanh")) * up
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
        hidden_dim: the size between.
        activation: "relu", "gelu" (exact), "gelu_tanh", "silu", "swiglu" or "geglu_tanh" (Shazeer 2020), or a
            callable, which isn't fused.
        dropout: probability after the activation while training, rounded to a multiple of 1/256.
        bias: whether both linears have one.
        device, dtype: of the parameters.
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
        """x (..., dim) -> (..., dim)."""
        return apply_feed_forward(x, self.linear1, self.linear2, self.activation, self.dropout)
