"""State space models with one decay for each head and token: Mamba-2 (Dao & Gu 2024), in the form of Granite 4."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastformer.nn.errors import InputError
from fastformer.nn.mixture import Router
from fastformer.nn.state_mixing import ByRow, StateMixing, causal_conv, decays_in_chunks

_CHUNK = 64


class Mamba(StateMixing):
    """A layer's mixing of tokens by a state of fixed size in the place of keys and values.

    A head has a state S (state_dim, head_dim), from 0. A token with the step dt = softplus(d + dt_bias) reads

        S = exp(-exp(A_log) dt) S + dt b x^T;  y = S^T c + D x

    where x, b and c go through a causal depthwise convolution and SiLU first. The heads of a group share b and c. The
    outputs are multiplied by silu(z), and then go through an RMSNorm over the heads of a group. It is computed in plain
    PyTorch, 64 tokens at a time, with a state in fp32 or fp64.

    Parameters: `in_proj.weight` (rows of z, x, b and c), `gates.weight` (rows of d), `conv_weight` (channels of x, b
    and c, 1, conv_size), `conv_bias` (channels), if there is one, `A_log`, `dt_bias` and `D` (num_heads), `norm_weight`
    (num_heads * head_dim), `out_proj.weight`.

    Args:
        embed_dim: input and output size.
        num_heads: the number of heads.
        head_dim: the size of a head of x.
        state_dim: the size of b and c.
        num_groups: the number of groups of heads.
        conv_size: the number of tokens, the current one included, that the convolution reads.
        conv_bias: whether the convolution has a bias.
        eps: that of the norm.
        device, dtype: the device and the dtype of the parameters.

    Raises:
        InputError: a size below 1, or a number of heads that isn't a multiple of that of groups.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        head_dim: int,
        state_dim: int,
        num_groups: int = 1,
        conv_size: int = 4,
        conv_bias: bool = True,
        eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = (embed_dim, num_heads, head_dim, state_dim, num_groups, conv_size)
        if min(sizes) < 1 or num_heads % num_groups:
            raise InputError(f"expected sizes of at least 1, and num_heads to be a multiple of num_groups, got {sizes}")
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.embed_dim, self.num_heads, self.head_dim, self.state_dim = embed_dim, num_heads, head_dim, state_dim
        self.num_groups, self.conv_size, self.eps = num_groups, conv_size, eps
        self.value_dim, self.key_dim = num_heads * head_dim, num_groups * state_dim
        conv_dim = self.value_dim + 2 * self.key_dim
        self.in_proj = nn.Linear(embed_dim, self.value_dim + conv_dim, bias=False, **factory)
        self.gates = Router(num_heads, embed_dim, **factory)
        self.conv_weight = nn.Parameter(torch.empty(conv_dim, 1, conv_size, **factory))
        self.register_parameter("conv_bias", nn.Parameter(torch.empty(conv_dim, **factory)) if conv_bias else None)
        self.A_log = nn.Parameter(torch.empty(num_heads, **factory))
        self.dt_bias = nn.Parameter(torch.empty(num_heads, **factory))
        self.D = nn.Parameter(torch.empty(num_heads, **factory))
        self.norm_weight = nn.Parameter(torch.empty(self.value_dim, **factory))
        self.out_proj = nn.Linear(self.value_dim, embed_dim, bias=False, **factory)
        self.reset_parameters()

    conv_bias: nn.Parameter | None

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialises the convolution as PyTorch does, A by 1, 2, ... for the heads, and the rest by ones."""
        bound = 1 / math.sqrt(self.conv_size)
        for parameter in (self.conv_weight, self.conv_bias):
            if parameter is not None:
                nn.init.uniform_(parameter, -bound, bound)
        self.A_log.copy_(torch.arange(1, self.num_heads + 1).log())
        for parameter in (self.dt_bias, self.D, self.norm_weight):
            nn.init.ones_(parameter)

    def _mix_tokens(self, x: Tensor, by_row: ByRow) -> Tensor:
        z, xbc = self.in_proj(x).split([self.value_dim, self.value_dim + 2 * self.key_dim], -1)
        mixed = by_row(self._mix, xbc, self.gates(x))
        gated = (mixed * F.silu(z.to(mixed.dtype))).unflatten(-1, (self.num_groups, -1))
        normed = F.rms_norm(gated, gated.shape[-1:], eps=self.eps).flatten(-2).to(x.dtype)
        out: Tensor = self.out_proj(normed * self.norm_weight.to(x.dtype))
        return out

    def _mix(self, xbc: Tensor, d: Tensor) -> Tensor:
        """Computes the outputs (batch, seqlen, value_dim) of a padded batch, in fp32 or fp64."""
        wide = torch.float64 if xbc.dtype == torch.float64 else torch.float32
        if xbc.shape[1] == 0:
            return xbc.new_zeros(*xbc.shape[:2], self.value_dim, dtype=wide)
        xbc = causal_conv(xbc, self.conv_weight)
        xbc = F.silu(xbc if self.conv_bias is None else xbc + self.conv_bias.to(xbc.dtype))
        x, b, c = xbc.split([self.value_dim, self.key_dim, self.key_dim], -1)
        x = x.unflatten(-1, (self.num_heads, -1))
        shared = self.num_heads // self.num_groups
        b, c = (each.unflatten(-1, (self.num_groups, -1)).repeat_interleave(shared, 2) for each in (b, c))
        dt = F.softplus(d.to(wide) + self.dt_bias.to(wide))
        with torch.autocast(xbc.device.type, enabled=False):
            x, b, c = (each.to(wide) for each in (x, b, c))
            read = scan(x, b * dt[..., None], c, -self.A_log.to(wide).exp() * dt)
            return (read + self.D.to(wide)[:, None] * x).flatten(-2)

    def extra_repr(self) -> str:
        """Returns the options that print shows for the module."""
        return f"{self.embed_dim}, heads={self.num_heads}, head_dim={self.head_dim}, state_dim={self.state_dim}"


def scan(x: Tensor, b: Tensor, c: Tensor, decay: Tensor) -> Tensor:
    """Computes S = exp(decay) S + b x^T and S^T c for one token after another, from a state of 0.

    Args:
        x: (batch, seqlen, heads, head_dim), fp32 or fp64, as the others.
        b, c: (batch, seqlen, heads, state_dim).
        decay: (batch, seqlen, heads), the logarithm of the factor of the state, at most 0.

    Returns:
        x's shape.
    """
    seqlen = x.shape[1]
    size = min(_CHUNK, seqlen)

    def in_chunks(each: Tensor) -> Tensor:  # (batch, heads, chunks, size, features)
        return F.pad(each.transpose(1, 2), (0, 0, 0, -seqlen % size)).unflatten(2, (-1, size))

    x, b, c, log = map(in_chunks, (x, b, c, decay[..., None]))
    between, before = decays_in_chunks(log)
    inside = (c @ b.transpose(-1, -2) * between) @ x
    c, b, end = c * before, b.transpose(-1, -2) * between[..., -1:, :], before[..., -1:, :]
    state = x.new_zeros(*x.shape[:2], b.shape[-2], x.shape[-1])
    outputs = []
    for i in range(x.shape[2]):
        outputs.append(inside[:, :, i] + c[:, :, i] @ state)
        state = state * end[:, :, i] + b[:, :, i] @ x[:, :, i]
    return torch.cat(outputs, 2)[:, :, :seqlen].transpose(1, 2)
