"""The projections of an attention from inputs to queries, keys and values, with biases and norms of the heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastformer.nn.errors import InputError
from fastformer.nn.linear import linear
from fastformer.nn.norm import AddLayerNorm, NormPlan

QK_NORMS = ("head", "all")


class Projections(nn.Module):
    """The base of `MultiheadAttention`: its parameters and the projections that need nothing else."""

    in_proj_weight: Tensor
    q_proj_weight: Tensor
    k_proj_weight: Tensor
    v_proj_weight: Tensor
    in_proj_bias: Tensor | None
    bias_k: Tensor | None
    bias_v: Tensor | None
    q_norm: nn.Module
    k_norm: nn.Module
    qk_norm: str | None = None
    batch_first: bool

    def _make_parameters(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        kdim: int | None,
        vdim: int | None,
        bias: bool,
        out_bias: bool,
        add_bias_kv: bool,
        factory: dict[str, Any],
    ) -> None:
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, num_kv_heads
        self.head_dim = head_dim
        self.q_dim, self.kv_dim = num_heads * head_dim, num_kv_heads * head_dim
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        self._qkv_same_embed_dim = self.kdim == embed_dim and self.vdim == embed_dim

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, **factory))

        separate = not self._qkv_same_embed_dim
        self.register_parameter("q_proj_weight", parameter(self.q_dim, embed_dim) if separate else None)
        self.register_parameter("k_proj_weight", parameter(self.kv_dim, self.kdim) if separate else None)
        self.register_parameter("v_proj_weight", parameter(self.kv_dim, self.vdim) if separate else None)
        fused_rows = self.q_dim + 2 * self.kv_dim
        self.register_parameter("in_proj_weight", None if separate else parameter(fused_rows, embed_dim))
        self.register_parameter("in_proj_bias", parameter(fused_rows) if bias else None)
        self.out_proj = nn.Linear(self.q_dim, embed_dim, bias=out_bias, **factory)
        self.register_parameter("bias_k", parameter(1, 1, self.kv_dim) if add_bias_kv else None)
        self.register_parameter("bias_v", parameter(1, 1, self.kv_dim) if add_bias_kv else None)
        self._reset_parameters()

    def _make_norms(self, qk_norm: str | None, eps: float, factory: dict[str, Any]) -> None:
        if qk_norm is None:
            return
        if qk_norm not in QK_NORMS:
            raise InputError(f"expected qk_norm in {QK_NORMS} or None, got {qk_norm!r}")
        self.qk_norm = qk_norm
        sizes = (self.head_dim, self.head_dim) if qk_norm == "head" else (self.q_dim, self.kv_dim)
        self.q_norm, self.k_norm = (AddLayerNorm(size, eps, bias=False, rms_norm=True, **factory) for size in sizes)

    def _reset_parameters(self) -> None:
        # torch.nn's initialisation, in its order, so that the same seed gives the same weights.
        for weight in (self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight):
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        for bias in (self.in_proj_bias, self.out_proj.bias):
            if bias is not None:
                nn.init.zeros_(bias)
        for bias in (self.bias_k, self.bias_v):
            if bias is not None:
                nn.init.xavier_normal_(bias)

    def project_memory(self, key: Tensor, value: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Projects only keys and values, for a cache.

        Args:
            key: (seqlen_k, batch, kdim), or (batch, seqlen_k, kdim) with batch_first, or packed (total_k, kdim).
            value: of the same form, with vdim; None: the same tensor.

        Returns:
            k and v: (batch, seqlen_k, num_kv_heads, head_dim), or (total_k, num_kv_heads, head_dim).
        """
        k, v = self._project_kv(key, key if value is None else value, *self._in_proj())
        k, v = self._normalise(None, "k_norm", self._heads(k)), self._heads(v)
        if key.dim() == 3 and not self.batch_first:
            k, v = k.transpose(0, 1), v.transpose(0, 1)
        return k, v

    def _project(
        self, query: Tensor, key: Tensor, value: Tensor, shape: tuple[int, int] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        # One product for self-attention, one for the query and one for the memory in cross-attention.
        if query.shape[-1] != self.embed_dim or key.shape[-1] != self.kdim or value.shape[-1] != self.vdim:
            raise InputError(
                f"expected query, key and value of size {self.embed_dim}, {self.kdim} and {self.vdim} in the last "
                f"dimension, got {query.shape[-1]}, {key.shape[-1]} and {value.shape[-1]}"
            )
        weight, bias = self._in_proj()
        if weight is not None and key is query and value is query:
            qkv = linear(query, weight, _of_dtype(bias, weight))
            head_dim = self._head_dim()
            num_kv_heads = self.kv_dim // head_dim
            num_all = self.num_heads + 2 * num_kv_heads
            qkv = qkv.view(*(qkv.shape[:-1] if shape is None else shape), num_all, head_dim)
            q, k, v = qkv.split([self.num_heads, num_kv_heads, num_kv_heads], dim=-2)
            return q, k, v
        q = linear(query, *self._q_weights(weight, bias))
        k, v = self._project_kv(key, value, weight, bias)
        return self._heads(q), self._heads(k), self._heads(v)

    def _in_proj(self) -> tuple[Tensor | None, Tensor | None]:
        # Read once a call: a parametrised weight is computed at each access. It is None if there are three weights.
        return self.in_proj_weight if self._qkv_same_embed_dim else None, self.in_proj_bias

    def _q_weights(self, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        weight = self.q_proj_weight if weight is None else weight[: self.q_dim]
        return weight, None if bias is None else _of_dtype(bias[: self.q_dim], weight)

    def _project_kv(
        self, key: Tensor, value: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        sizes = [self.kv_dim, self.kv_dim]
        bias = None if bias is None else bias[self.q_dim :]
        if weight is None:
            k_weight, v_weight = self.k_proj_weight, self.v_proj_weight
        else:
            weight = weight[self.q_dim :]
            if key is value:
                k, v = linear(key, weight, _of_dtype(bias, weight)).split(sizes, dim=-1)
                return k, v
            k_weight, v_weight = weight.split(sizes)
        k_bias, v_bias = (None, None) if bias is None else bias.split(sizes)
        return linear(key, k_weight, _of_dtype(k_bias, k_weight)), linear(value, v_weight, _of_dtype(v_bias, v_weight))

    def _head_dim(self) -> int:
        if self.q_dim != self.embed_dim:
            return self.head_dim
        # By the current num_heads, which may have been set after construction; torch.nn reads it, too.
        head_dim, rest = divmod(self.embed_dim, self.num_heads)
        if rest:
            raise InputError(f"expected num_heads to divide embed_dim, got {self.num_heads} and {self.embed_dim}")
        return head_dim

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self._head_dim()))

    def _normalise(self, plan: NormPlan | None, name: str, x: Tensor) -> Tensor:
        """Normalises queries or keys (..., heads, head_dim), if they have a norm.

        Args:
            plan: the plan of the norm; None if the norm is called.
            name: the name of the norm.
            x: the queries or keys.
        """
        if self.qk_norm is None:
            return x
        rows = x if self.qk_norm == "head" else x.flatten(-2)
        return (getattr(self, name)(rows) if plan is None else plan.apply(rows)).view(x.shape)


def _of_dtype(bias: Tensor | None, weight: Tensor) -> Tensor | None:
    # If the bias's dtype isn't the weight's, PyTorch's linear accepts or refuses it by the input's memory layout.
    return bias if bias is None or bias.dtype == weight.dtype else bias.to(weight.dtype)
