"""Linear attention by the gated delta rule (Yang et al. 2025), in the form of Qwen3-Next and Qwen3.5."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastformer.nn.errors import InputError
from fastformer.nn.mixture import Router
from fastformer.nn.norm import AddLayerNorm
from fastformer.nn.state_mixing import ByRow, StateMixing, causal_conv, decays_in_chunks

_CHUNK = 64
_EPS = 1e-6  # added to the squares of queries and keys


class GatedDeltaNet(StateMixing):
    """A layer's mixing of tokens by a state of fixed size in the place of keys and values.

    A value head has a state S (key_head_dim, value_head_dim), from 0. With queries and keys of length 1, a token reads

        S = exp(g) S;  S = S + beta k (v - S^T k)^T;  S^T q / sqrt(key_head_dim)

    where g = -exp(A_log) softplus(a + dt_bias) and beta = sigmoid(b). Queries, keys and values go through a causal
    depthwise convolution and SiLU first; each head's output through an RMSNorm, and is multiplied by silu(z).
    Consecutive value heads share a key head. It is computed in plain PyTorch, 64 tokens at a time, with a state in fp32
    or fp64.

    Parameters: `in_proj.weight` (rows of q, k, v and z), `gates.weight` (rows of b and a), `conv_weight` (channels of
    q, k and v, 1, conv_size), `A_log` and `dt_bias` (num_value_heads), `norm.weight`, `out_proj.weight`.

    Args:
        embed_dim: input and output size.
        num_key_heads, num_value_heads: the number of heads of queries and keys, and of values, a multiple of it.
        key_head_dim, value_head_dim: the sizes of these heads.
        conv_size: the number of tokens, the current one included, that the convolution reads.
        eps: that of the norm.
        device, dtype: the device and the dtype of the parameters.

    Raises:
        InputError: a size below 1, or a number of value heads that isn't a multiple of that of key heads.
    """

    def __init__(
        self,
        embed_dim: int,
        num_key_heads: int,
        num_value_heads: int,
        key_head_dim: int,
        value_head_dim: int,
        conv_size: int = 4,
        eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = (embed_dim, num_key_heads, num_value_heads, key_head_dim, value_head_dim, conv_size)
        if min(sizes) < 1 or num_value_heads % num_key_heads:
            raise InputError(
                f"expected sizes of at least 1, and num_value_heads to be a multiple of num_key_heads, got {sizes}"
            )
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.embed_dim, self.num_key_heads, self.num_value_heads = embed_dim, num_key_heads, num_value_heads
        self.key_head_dim, self.value_head_dim, self.conv_size = key_head_dim, value_head_dim, conv_size
        self.key_dim, self.value_dim = num_key_heads * key_head_dim, num_value_heads * value_head_dim
        self.conv_dim = 2 * self.key_dim + self.value_dim
        self.in_proj = nn.Linear(embed_dim, self.conv_dim + self.value_dim, bias=False, **factory)
        self.gates = Router(2 * num_value_heads, embed_dim, **factory)
        self.conv_weight = nn.Parameter(torch.empty(self.conv_dim, 1, conv_size, **factory))
        self.A_log = nn.Parameter(torch.empty(num_value_heads, **factory))
        self.dt_bias = nn.Parameter(torch.empty(num_value_heads, **factory))
        self.norm = AddLayerNorm(value_head_dim, eps, bias=False, rms_norm=True, **factory)
        self.out_proj = nn.Linear(self.value_dim, embed_dim, bias=False, **factory)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialises the convolution as PyTorch does, A uniformly up to 16, and dt_bias by ones."""
        bound = 1 / math.sqrt(self.conv_size)
        nn.init.uniform_(self.conv_weight, -bound, bound)
        nn.init.uniform_(self.A_log, 0.01, 16)
        self.A_log.log_()
        nn.init.ones_(self.dt_bias)

    def _mix_tokens(self, x: Tensor, by_row: ByRow) -> Tensor:
        qkv, z = self.in_proj(x).split([self.conv_dim, self.value_dim], -1)
        b, a = self.gates(x).chunk(2, -1)
        gated = self.norm(by_row(self._mix, qkv, b, a)) * F.silu(z.unflatten(-1, (-1, self.value_head_dim)))
        out: Tensor = self.out_proj(gated.flatten(-2))
        return out

    def _mix(self, qkv: Tensor, b: Tensor, a: Tensor) -> Tensor:
        """Computes the heads' outputs (batch, seqlen, num_value_heads, value_head_dim) of a padded batch."""
        if qkv.shape[1] == 0:
            return qkv.new_zeros(*qkv.shape[:2], self.num_value_heads, self.value_head_dim)
        qkv = F.silu(causal_conv(qkv, self.conv_weight))
        q, k, v = qkv.split([self.key_dim, self.key_dim, self.value_dim], -1)
        q, k = (x.unflatten(-1, (self.num_key_heads, -1)) for x in (q, k))
        v = v.unflatten(-1, (self.num_value_heads, -1))
        wide = torch.float64 if qkv.dtype == torch.float64 else torch.float32
        decay = -self.A_log.to(wide).exp() * F.softplus(a.to(wide) + self.dt_bias.to(wide))
        with torch.autocast(qkv.device.type, enabled=False):
            return gated_delta_rule(q, k, v, decay, b.sigmoid()).to(qkv.dtype)

    def extra_repr(self) -> str:
        """Returns the options that print shows for the module."""
        return f"{self.embed_dim}, heads={self.num_key_heads}/{self.num_value_heads}"


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Computes the gated delta rule from a state of 0, with queries and keys that it first gives the length 1.

    Within a chunk of 64 tokens, the values that the rule writes solve a triangular system (Yang et al. 2024), so that
    only the states between chunks are computed one after the other.

    Args:
        q, k: (batch, seqlen, key heads, key_head_dim).
        v: (batch, seqlen, value heads, value_head_dim).
        decay: (batch, seqlen, value heads), the logarithm of the factor of the state, at most 0; fp32 or fp64.
        beta: (batch, seqlen, value heads), how much of a value is written.

    Returns:
        v's shape, in decay's dtype.
    """
    batch, seqlen, heads = decay.shape
    shared = heads // k.shape[2]
    q, k = (x.to(decay.dtype) for x in (q, k))
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS) for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    if shared > 1:
        q, k = q.repeat_interleave(shared, 2), k.repeat_interleave(shared, 2)
    size = min(_CHUNK, seqlen)
    rest = -seqlen % size

    def in_chunks(x: Tensor) -> Tensor:  # (batch, heads, chunks, size, features)
        return F.pad(x.to(decay.dtype).transpose(1, 2), (0, 0, 0, rest)).unflatten(2, (-1, size))

    q, k, v, log, beta = map(in_chunks, (q, k, v, decay[..., None], beta[..., None]))
    between, before = decays_in_chunks(log)
    written = torch.cat([v, k * before], -1) * beta
    system = (k * beta) @ k.transpose(-1, -2) * between
    # What each token writes: the first part, less the product of the second with the chunk's first state.
    values, from_state = torch.linalg.solve_triangular(system, written, upper=False, unitriangular=True).split(
        [v.shape[-1], k.shape[-1]], -1
    )
    scores, q = q @ k.transpose(-1, -2) * between, q * before
    k, end = k.transpose(-1, -2) * between[..., -1:, :], before[..., -1:, :]
    state = v.new_zeros(batch, heads, k.shape[-2], v.shape[-1])
    outputs = []
    for i in range(v.shape[2]):
        new = values[:, :, i] - from_state[:, :, i] @ state
        outputs.append(q[:, :, i] @ state + scores[:, :, i] @ new)
        state = state * end[:, :, i] + k[:, :, i] @ new
    return torch.cat(outputs, 2)[:, :, :seqlen].transpose(1, 2)
