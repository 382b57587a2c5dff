"""The layer of decoder-only models, whose norms and residual connections differ from family to family."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastformer.nn.errors import InputError
from fastformer.nn.gated_delta import GatedDeltaNet
from fastformer.nn.layer_input import LayerInput
from fastformer.nn.layers import (
    LAYER_PLANS,
    AttentionCall,
    LayerPlan,
    ResidualStream,
    TransformerEncoderLayer,
)
from fastformer.nn.mamba import Mamba
from fastformer.nn.norm import AddLayerNorm
from fastformer.nn.state_mixing import ShortConv

_PLACEMENTS = ("pre", "post", "both")


class DecoderOnlyLayer(TransformerEncoderLayer):
    """A `TransformerEncoderLayer` with norm_first, other placements of the norms, and sub-layers that may be parallel.

    With F the attention or the feed-forward network, a sub-layer returns

        "pre":  x + F(norm(x))                   GPT-2, Llama
        "post": x + post_norm(F(x))              OLMo 2
        "both": x + post_norm(F(norm(x)))        Gemma 2 and 3

    and, in parallel, the layer returns x + attention(norm1(x)) + feed_forward(norm2(x)) (GPT-NeoX), with norm1 in place
    of norm2 if it is shared (Phi). Dropout acts on the terms that are added to x. With `input_dim`, a `LayerInput` is
    added at the end, of the vectors that a call passes as `layer_input` (..., input_dim); with `has_scalar`, the result
    is multiplied by `layer_scalar`, which is not trained (Gemma 4).

    Parameters: those of `TransformerEncoderLayer`; `norm1` and `norm2` are None for "post", `norm2` is None if `norm1`
    is shared, and `post_norm1` and `post_norm2` exist for "post" and "both".

    Args:
        d_model, nhead, dim_feedforward: as in `TransformerEncoderLayer`.
        norm_placement: see above.
        parallel_residual: see above; only with "pre".
        shared_norm: see above; only with parallel_residual.
        linear_attention, short_conv, mamba: the arguments of the `GatedDeltaNet`, `ShortConv` or `Mamba` that is
            `self_attn`; None: it is a `MultiheadAttention`.
        input_dim, has_scalar: see above.
        options: the other arguments of `TransformerEncoderLayer`.

    Raises:
        InputError: norm_placement is unknown, or excludes parallel_residual, without which no norm is shared.
    """

    post_norm1: AddLayerNorm
    post_norm2: AddLayerNorm

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int,
        *,
        norm_placement: str = "pre",
        parallel_residual: bool = False,
        shared_norm: bool = False,
        linear_attention: Mapping[str, Any] | None = None,
        short_conv: Mapping[str, Any] | None = None,
        mamba: Mapping[str, Any] | None = None,
        input_dim: int | None = None,
        has_scalar: bool = False,
        **options: Any,
    ) -> None:
        if norm_placement not in _PLACEMENTS:
            raise InputError(f"expected norm_placement in {_PLACEMENTS}, got {norm_placement!r}")
        if parallel_residual and norm_placement != "pre":
            raise InputError(f"expected norm_placement 'pre' for parallel_residual, got {norm_placement!r}")
        if shared_norm and not parallel_residual:
            raise InputError("expected parallel_residual for shared_norm, got False")
        super().__init__(d_model, nhead, dim_feedforward, norm_first=True, **options)
        self.norm_placement, self.parallel_residual, self.shared_norm = norm_placement, parallel_residual, shared_norm
        if linear_attention is not None:
            self.self_attn = GatedDeltaNet(d_model, **linear_attention)  # type: ignore[assignment]
        if short_conv is not None:
            self.self_attn = ShortConv(d_model, **short_conv)  # type: ignore[assignment]
        if mamba is not None:
            self.self_attn = Mamba(d_model, **mamba)  # type: ignore[assignment]
        if shared_norm:
            self.norm2 = None  # type: ignore[assignment]
        if norm_placement != "pre":
            self.post_norm1, self.post_norm2 = copy.deepcopy(self.norm1), copy.deepcopy(self.norm2)
        if norm_placement == "post":
            self.norm1 = self.norm2 = None  # type: ignore[assignment]
        factory = {name: options.get(name) for name in ("device", "dtype")}
        self.input_dim, self.has_scalar = input_dim, has_scalar
        if input_dim is not None:
            eps = options.get("layer_norm_eps", 1e-5)
            self.layer_input = LayerInput(d_model, input_dim, self.activation, eps, factory)
        if has_scalar:
            self.layer_scalar = nn.Parameter(torch.ones(1, **factory), requires_grad=False)

    @property
    def is_standard(self) -> bool:  # type: ignore[override]
        """See `TransformerEncoderLayer`."""
        return self.norm_placement == "pre" and not self.parallel_residual and not self._has_end

    @property
    def _has_end(self) -> bool:
        return self.has_scalar or self.input_dim is not None

    def compute(
        self,
        plan: LayerPlan,
        src: Tensor | ResidualStream,
        attn_mask: Tensor | None,
        key_padding_mask: Tensor | None,
        is_causal: bool,
        *,
        layer_input: Tensor | None = None,
        **options: Any,
    ) -> Tensor | ResidualStream:
        """See `TransformerEncoderLayer`."""
        if (layer_input is None) != (self.input_dim is None):
            got = None if layer_input is None else tuple(layer_input.shape)
            raise InputError(f"expected a layer_input of size {self.input_dim}, got {got}")
        out = super().compute(plan, src, attn_mask, key_padding_mask, is_causal, **options)
        if not self._has_end:
            return out
        x = out.value() if isinstance(out, ResidualStream) else out
        if layer_input is not None:
            x = x + self.layer_input(x, layer_input)
        if self.has_scalar:
            x = x * self.layer_scalar.to(x.dtype)
        return ResidualStream(None, x) if isinstance(out, ResidualStream) else x

    def _norm_names(self) -> list[str]:
        before = [] if self.norm_placement == "post" else ["norm1"] if self.shared_norm else ["norm1", "norm2"]
        return before if self.norm_placement == "pre" else [*before, "post_norm1", "post_norm2"]

    def _join_pre_norm(self, plan: LayerPlan, stream: ResidualStream, calls: Sequence[AttentionCall]) -> ResidualStream:
        if self.norm_placement == "pre" and not self.parallel_residual:
            return super()._join_pre_norm(plan, stream, calls)
        join = self._join_parallel if self.parallel_residual else self._join
        return join(plan, stream, *calls)

    def _call_blocks(self, x: Tensor, calls: Sequence[AttentionCall]) -> Tensor:
        if self.norm_placement == "pre" and not self.parallel_residual:
            return super()._call_blocks(x, calls)
        (call,) = calls
        if self.parallel_residual:
            y = self.norm1(x)
            return x + self._call_attention(call, y) + self._ff_block(y if self.shared_norm else self.norm2(x))
        is_both = self.norm_placement == "both"
        x = x + self._call_attention(call, self.norm1(x) if is_both else x)
        return x + self._ff_block(self.norm2(x) if is_both else x)

    def _join_parallel(self, plan: LayerPlan, stream: ResidualStream, call: AttentionCall) -> ResidualStream:
        norm1, *others = plan.norms
        dropout1, dropout2 = plan.dropouts
        y, x = stream.normalise(norm1)
        attended = self._attend(plan, call, y)
        plan = self._plan_after(plan) if plan.calls_attention else plan
        fed = self._feed_forward(others[0].apply(x) if others else y, plan.feed_forward)
        # One addition to the stream, which is fused with the next norm.
        return ResidualStream(F.dropout(attended, dropout1) + F.dropout(fed, dropout2), x)

    def _join(self, plan: LayerPlan, stream: ResidualStream, call: AttentionCall) -> ResidualStream:
        before, (post_norm1, post_norm2) = plan.norms[:-2], plan.norms[-2:]
        dropout1, dropout2 = plan.dropouts
        if before:
            y, x = stream.normalise(before[0])
        else:
            y = x = stream.value()
        attended = post_norm1.apply(self._attend(plan, call, y))
        plan = self._plan_after(plan) if plan.calls_attention else plan
        stream = ResidualStream(attended, x, dropout1)
        if before:
            y, x = stream.normalise(before[1])
        else:
            y = x = stream.value()
        return ResidualStream(post_norm2.apply(self._feed_forward(y, plan.feed_forward)), x, dropout2)

    def _sa_block(
        self,
        x: Tensor,
        attn_mask: Tensor | None,
        key_padding_mask: Tensor | None,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        call = AttentionCall("self_attn", None, attn_mask, key_padding_mask, is_causal, options)
        attended = self._attend(LAYER_PLANS.of(self), call, x)
        return self.dropout1(attended if self.norm_placement == "pre" else self.post_norm1(attended))

    def _ff_block(self, x: Tensor) -> Tensor:
        fed = self._feed_forward(x, LAYER_PLANS.of(self).feed_forward)
        return self.dropout2(fed if self.norm_placement == "pre" else self.post_norm2(fed))

    _blocks = {"_sa_block": _sa_block, "_ff_block": _ff_block}
