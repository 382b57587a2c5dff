"""The parameters of an attention: their sizes, their construction and their initial values."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastformer.engine.checks import given
from fastformer.nn.errors import InputError
from fastformer.nn.norm import AddLayerNorm, check_dropout
from fastformer.ops._common import resolve_window
from fastformer.ops._dispatch import copied

QK_NORMS = ("head", "all", "rotated")
WindowSize = tuple[int | None, int | None]


class AttentionParameters(nn.Module):
    """The base of `MultiheadAttention`, which documents the arguments: it constructs the module."""

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
    softmax_scale: float | None = None
    softcap: float = 0.0
    sinks: Tensor  # exists if has_sinks
    has_sinks: bool = False
    gate_proj: nn.Linear  # exists if has_gate
    has_gate: bool = False
    value_norm_eps: float | None = None
    kv_projections: int = 2

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        num_kv_heads: int | None = None,
        window_size: WindowSize = (None, None),
        head_dim: int | None = None,
        out_bias: bool | None = None,
        qk_norm: str | None = None,
        qk_norm_eps: float = 1e-5,
        softmax_scale: float | None = None,
        softcap: float = 0.0,
        sinks: bool = False,
        gate: bool = False,
        value_norm_eps: float | None = None,
        kv_projections: int = 2,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if embed_dim < 1 or num_heads < 1 or (head_dim is None and embed_dim % num_heads != 0):
            raise InputError(f"expected embed_dim to be a multiple of num_heads, got {embed_dim} and {num_heads}")
        if head_dim is not None and head_dim < 1:
            raise InputError(f"expected head_dim of at least 1, got {head_dim}")
        if num_kv_heads < 1 or num_heads % num_kv_heads != 0:
            raise InputError(f"expected num_heads to be a multiple of num_kv_heads, got {num_heads} and {num_kv_heads}")
        self.dropout, self.batch_first = check_dropout(dropout), batch_first
        self.add_zero_attn = add_zero_attn
        self.window_size: WindowSize = resolve_window(False, window_size)
        head_dim = embed_dim // num_heads if head_dim is None else head_dim
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, num_kv_heads
        self.head_dim = head_dim
        self.q_dim, self.kv_dim = num_heads * head_dim, num_kv_heads * head_dim
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        self.softmax_scale, self.softcap = softmax_scale, softcap
        has_others = (self.kdim, self.vdim) != (embed_dim, embed_dim) or add_bias_kv or add_zero_attn
        if kv_projections not in (0, 1, 2) or (has_others and (kv_projections < 2 or value_norm_eps is not None)):
            raise InputError(
                "expected kv_projections of 0, 1 or 2, and fewer than 2, or a value_norm_eps, only without kdim, vdim, "
                f"add_bias_kv and add_zero_attn; got {kv_projections} and {value_norm_eps}"
            )
        self.value_norm_eps, self.kv_projections = value_norm_eps, kv_projections
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self._make_parameters(bias, bias if out_bias is None else out_bias, add_bias_kv, factory)
        self._make_norms(qk_norm, qk_norm_eps, factory)
        if sinks:
            self.has_sinks = True
            self.sinks = nn.Parameter(torch.empty(num_heads, **factory))
            nn.init.zeros_(self.sinks)
        if gate:
            self.has_gate = True
            self.gate_proj = nn.Linear(embed_dim, self.q_dim, bias=bias, **factory)

    def _make_parameters(self, bias: bool, out_bias: bool, add_bias_kv: bool, factory: dict[str, Any]) -> None:
        embed_dim = self.embed_dim
        self._qkv_same_embed_dim = self.kdim == embed_dim and self.vdim == embed_dim

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, **factory))

        separate = not self._qkv_same_embed_dim
        self.register_parameter("q_proj_weight", parameter(self.q_dim, embed_dim) if separate else None)
        self.register_parameter("k_proj_weight", parameter(self.kv_dim, self.kdim) if separate else None)
        self.register_parameter("v_proj_weight", parameter(self.kv_dim, self.vdim) if separate else None)
        fused_rows = self.q_dim + self.kv_projections * self.kv_dim
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
        sizes = (self.q_dim, self.kv_dim) if qk_norm == "all" else (self.head_dim, self.head_dim)
        norms: dict[str, Any] = {"bias": False, "rms_norm": True, **factory}
        self.q_norm = AddLayerNorm(sizes[0], eps, **norms)
        if self.kv_projections:
            self.k_norm = AddLayerNorm(sizes[1], eps, **norms)

    @property
    def has_usual_keys(self) -> bool:
        """Whether keys and values are two products of the layer's own, the values without a norm."""
        return self.kv_projections == 2 and self.value_norm_eps is None

    @property
    def is_standard(self) -> bool:
        """Whether heads divide embed_dim, have no norms or gate, and scale scores by head_dim ** -0.5 without a cap."""
        is_usual = self.has_usual_keys and not self.has_gate
        return self.q_dim == self.embed_dim and self.qk_norm is None and is_usual and not self._scores()

    def _scores(self) -> dict[str, Any]:
        """Returns the ops' options for the scores; empty for their defaults."""
        if self.softmax_scale is None and not self.softcap and not self.has_sinks:
            return {}
        sinks = self.sinks if self.has_sinks else None
        return given(softmax_scale=self.softmax_scale, softcap=self.softcap or None, sinks=sinks)

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

    def _in_proj(self) -> tuple[Tensor | None, Tensor | None]:
        # Read once a call: a parametrised weight is computed at each access. It is None if there are three weights.
        weight, bias = self.in_proj_weight if self._qkv_same_embed_dim else None, self.in_proj_bias
        return (weight, bias) if torch.compiler.is_compiling() else (copied(weight), copied(bias))

    def in_proj_parts(self) -> tuple[tuple[Tensor | None, Tensor | None], tuple[Tensor | None, Tensor | None]]:
        """Returns the rows of the input projection's weight for queries, and those for the rest; then of its bias."""
        weight, bias = self._in_proj()
        return self._parts(weight), self._parts(bias)

    def _parts(self, whole: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Returns the rows of the weight or bias for queries, and those for keys and values."""
        if whole is None:
            return None, None
        # Not two slices: the gradient of each would be as large as the whole, and they would be added.
        q_part, kv_part = whole.split([self.q_dim, 2 * self.kv_dim])
        return q_part, kv_part

    def with_extra_keys(
        self, k: Tensor, v: Tensor, attn_mask: Tensor | None, key_padding_mask: Tensor | None, is_causal: bool,
        seqlen_q: int,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
        """Appends the learned key and the zero key, both visible to every query."""
        if is_causal:
            attn_mask = torch.ones(seqlen_q, k.shape[1], dtype=torch.bool, device=k.device).triu(1)
        batch, extra = k.shape[0], 0
        if self.bias_k is not None and self.bias_v is not None:
            bias_k, bias_v = (x.unflatten(-1, (-1, k.shape[-1])) for x in (self.bias_k, self.bias_v))
            k = torch.cat([k, bias_k.expand(batch, -1, -1, -1).to(k.dtype)], dim=1)
            v = torch.cat([v, bias_v.expand(batch, -1, -1, -1).to(v.dtype)], dim=1)
            extra += 1
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 0, 0, 1)), F.pad(v, (0, 0, 0, 0, 0, 1))
            extra += 1
        # Padding adds False to a bool mask and 0 to an additive one: attend.
        attn_mask = None if attn_mask is None else F.pad(attn_mask, (0, extra))
        key_padding_mask = None if key_padding_mask is None else F.pad(key_padding_mask, (0, extra))
        return k, v, attn_mask, key_padding_mask


def of_dtype(bias: Tensor | None, weight: Tensor) -> Tensor | None:
    """Returns a bias in the dtype of its weight."""
    # If the bias's dtype isn't the weight's, PyTorch's linear accepts or refuses it by the input's memory layout.
    return bias if bias is None or bias.dtype == weight.dtype else bias.to(weight.dtype)
