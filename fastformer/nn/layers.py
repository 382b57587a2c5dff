"""The encoder and the decoder layer under torch.nn's names and signatures."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastformer.cache.layer_view import LayerCache
from fastformer.nn.attention import MultiheadAttention, Window
from fastformer.nn.dropout import active_dropout, dropout_seed
from fastformer.nn.embedding import RotaryPositions
from fastformer.nn.errors import InputError
from fastformer.nn.feed_forward import Activation, apply_feed_forward, is_gated, resolve_activation
from fastformer.nn.guards import (
    DROPOUTS,
    is_called_plainly,
    is_untouched,
    is_untouched_norm,
    is_watched,
    is_written_as_known,
    read_norm,
    yields_to_torch,
)
from fastformer.nn.layout import SequenceLayout
from fastformer.nn.masks import as_additive
from fastformer.nn.norm import AddLayerNorm
from fastformer.nn.padding import open_nested
from fastformer.ops.add_layer_norm import add_layer_norm


class ResidualStream(NamedTuple):
    """A pre-norm residual stream whose last addition hasn't been done: the value is dropout(delta) + residual.

    A stack hands it from layer to layer, so that the addition joins the next layer's normalisation.
    """

    delta: Tensor | None
    residual: Tensor
    dropout_p: float = 0.0

    def value(self) -> Tensor:
        """The sum itself."""
        return self.residual if self.delta is None else self.residual + F.dropout(self.delta, self.dropout_p)

    def normalise(self, norm: nn.Module) -> tuple[Tensor, Tensor]:
        """(norm(value), value), of a norm that `norm_settings` knows."""
        if self.delta is None:
            return norm(self.residual), self.residual
        return join(self.delta, self.residual, self.dropout_p, norm)


def join(x: Tensor, residual: Tensor, dropout_p: float, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """(norm(dropout(x) + residual), the sum), of a norm that `norm_settings` knows."""
    weight, bias, eps, rms_norm = read_norm(norm)
    seed = dropout_seed(dropout_p, x.device)
    return add_layer_norm(x, residual, weight, bias, eps=eps, rms_norm=rms_norm, dropout_p=dropout_p, dropout_seed=seed)


def post_norm(x: Tensor, residual: Tensor, dropout: nn.Module, norm: nn.Module) -> Tensor:
    """norm(dropout(x) + residual), in the sum's dtype: under autocast a post-norm layer's stream stays fp32."""
    dtype = torch.promote_types(x.dtype, residual.dtype)
    return join(x.to(dtype), residual, active_dropout(dropout), norm)[0]


def given(**options: Any) -> dict[str, Any]:
    """What is not None: modules with torch.nn's signature alone aren't handed what nobody asked for."""
    return {name: value for name, value in options.items() if value is not None}


def is_our_attention(module: nn.Module) -> bool:
    """Whether a module attends as ours does, and nobody else sees what it is given."""
    return (
        type(module).forward is MultiheadAttention.forward
        and is_written_as_known(type(module))
        and is_called_plainly(module)
    )


def is_our_layer(module: nn.Module) -> bool:
    """Whether a module computes as our layers do, and nobody else sees what it is given."""
    return (
        type(module).forward in (TransformerEncoderLayer.forward, TransformerDecoderLayer.forward)
        and is_written_as_known(type(module))
        and is_called_plainly(module)
    )


class _Layer(nn.Module):
    """What both layers have: self-attention first, a feed-forward network last, norms and residuals around each."""

    has_cross_attention: ClassVar[bool]
    _sub_layers: ClassVar[range]
    _blocks: ClassVar[dict[str, Any]]  # the seams of torch.nn, as they are written here

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: Activation = F.relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        attention_bias: bool | None = None,
        attention_dropout: float | None = None,
        activation_dropout: float | None = None,
        num_kv_heads: int | None = None,
        norm: str = "layer",
        window_size: Window = (None, None),
    ) -> None:
        super().__init__()
        if norm not in ("layer", "rms"):
            raise InputError(f"expected norm 'layer' or 'rms', got {norm!r}")
        if not isinstance(norm_first, bool):
            raise InputError(f"expected norm_first to be True or False, got {norm_first!r}")
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        attention: dict[str, Any] = {
            "dropout": dropout if attention_dropout is None else attention_dropout,
            "bias": bias if attention_bias is None else attention_bias,
            "batch_first": batch_first,
            "num_kv_heads": num_kv_heads,
            **factory,
        }
        # The order of construction is torch.nn's, so that the same seed gives the same weights.
        self.self_attn = MultiheadAttention(d_model, nhead, window_size=window_size, **attention)
        if self.has_cross_attention:
            self.multihead_attn = MultiheadAttention(d_model, nhead, **attention)
        self.activation = resolve_activation(activation)
        inner = 2 * dim_feedforward if is_gated(self.activation) else dim_feedforward
        self.linear1 = nn.Linear(d_model, inner, bias=bias, **factory)
        self.dropout = nn.Dropout(dropout if activation_dropout is None else activation_dropout)
        self.linear2 = nn.Linear(dim_feedforward, d_model, bias=bias, **factory)
        self.norm_first = norm_first
        for i in self._sub_layers:
            # Each norm takes in the dropout and the addition of the sub-layer before it; that dropout's probability
            # stays where torch.nn has it, in dropout1 to dropout3.
            norm_module = AddLayerNorm(d_model, layer_norm_eps, bias=bias, rms_norm=norm == "rms", **factory)
            setattr(self, f"norm{i}", norm_module)
        for i in self._sub_layers:
            setattr(self, f"dropout{i}", nn.Dropout(dropout))

    def _self_attention(
        self, x: Tensor, attn_mask: Tensor | None, key_padding_mask: Tensor | None, is_causal: bool, **options: Any
    ) -> Tensor:
        return self.self_attn(
            x,
            x,
            x,
            attn_mask=attn_mask,
            key_padding_mask=key_padding_mask,
            is_causal=is_causal,
            need_weights=False,
            **options,
        )[0]

    def _feed_forward(self, x: Tensor) -> Tensor:
        return apply_feed_forward(x, self.linear1, self.linear2, self.activation, self.dropout)

    def _has_own_blocks(self) -> bool:
        kind, own = type(self), self.__dict__
        return all(name not in own and getattr(kind, name) is block for name, block in self._blocks.items())

    def may_join(self) -> bool:
        """Whether dropouts, additions and norms may be fused: nobody replaced, patched or hooked what is left out.

        The blocks, which subclasses override, aren't called then.
        """
        if is_watched() or not self._has_own_blocks():
            return False
        modules = self._modules
        for i in self._sub_layers:
            if not (is_untouched_norm(modules.get(f"norm{i}")) and is_untouched(modules.get(f"dropout{i}"), *DROPOUTS)):
                return False
        return True


class TransformerEncoderLayer(_Layer):
    """`torch.nn.TransformerEncoderLayer`: self-attention and feed-forward network, in fused ops.

    Same constructor, forward signature and state_dict keys; boolean masks are True = ignore, as in torch.nn. With
    `is_causal=True` and a `cache` it is the layer of a decoder-only model.

    Args:
        d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, batch_first, norm_first, bias, device,
            dtype: as in `torch.nn.TransformerEncoderLayer`; activation may also be "gelu_tanh", "swiglu" or
            "geglu_tanh", and dropout is rounded to a multiple of 1/256 where it acts.
        attention_bias: whether the attention's projections have a bias; None: as bias says.
        attention_dropout: on the attention weights; None: as dropout says.
        activation_dropout: after the activation; None: as dropout says.
        num_kv_heads, window_size: as in `MultiheadAttention`.
        norm: "layer" or "rms".
    """

    has_cross_attention = False
    _sub_layers = range(1, 3)
    norm1: AddLayerNorm
    norm2: AddLayerNorm
    dropout1: nn.Dropout
    dropout2: nn.Dropout

    @yields_to_torch
    def forward(
        self,
        src: Tensor | ResidualStream,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        layout: SequenceLayout | None = None,
        cache: LayerCache | None = None,
        rotary: RotaryPositions | None = None,
        position_bias: Tensor | None = None,
    ) -> Tensor | ResidualStream:
        """Passes the input through the layer.

        Args:
            src: (seqlen, batch, d_model), or (batch, seqlen, d_model) with batch_first, or (seqlen, d_model), or packed
                (total, d_model), or nested (batch, any lengths, d_model), with no mask but the causal one; a stack
                passes a `ResidualStream`.
            src_mask, src_key_padding_mask, is_causal: as in torch.nn; see `MultiheadAttention`.
            layout: how src lies in memory.
            cache: keys and values of earlier tokens; src's own are appended, the caller advances the lengths.
            rotary: rotates queries and keys.
            position_bias: added to the scores; see `MultiheadAttention`.

        Returns:
            src's shape; a `ResidualStream` for a `ResidualStream`.
        """
        if isinstance(src, Tensor) and src.is_nested:
            others = (layout, cache, rotary, position_bias)
            opened, is_causal = open_nested(src, src_mask, src_key_padding_mask, is_causal, *others)
            values = TransformerEncoderLayer.forward(self, opened.values, is_causal=is_causal, layout=opened.layout)
            assert isinstance(values, Tensor)
            return opened.close(values)
        own = None if cache is None else cache.self_attention
        options = given(layout=layout, cache=own, rotary=rotary, position_bias=position_bias)
        masks = (src_mask, src_key_padding_mask)
        if not (self._has_own_blocks() and is_our_attention(self.self_attn)):
            # torch.nn's layer gives its blocks and its attention masks that are added.
            dtype = (src.residual if isinstance(src, ResidualStream) else src).dtype
            masks = (as_additive(src_mask, dtype), as_additive(src_key_padding_mask, dtype))
        if not isinstance(src, ResidualStream) and not self.may_join():
            x = src
            if self.norm_first:
                x = x + self._sa_block(self.norm1(x), *masks, is_causal=is_causal, **options)
                return x + self._ff_block(self.norm2(x))
            x = self.norm1(x + self._sa_block(x, *masks, is_causal=is_causal, **options))
            return self.norm2(x + self._ff_block(x))
        if not self.norm_first:
            assert isinstance(src, Tensor)
            attended = self._self_attention(src, *masks, is_causal, **options)
            x = post_norm(attended, src, self.dropout1, self.norm1)
            return post_norm(self._feed_forward(x), x, self.dropout2, self.norm2)
        stream = src if isinstance(src, ResidualStream) else ResidualStream(None, src)
        y, residual = stream.normalise(self.norm1)
        attended = self._self_attention(y, *masks, is_causal, **options)
        y, residual = join(attended, residual, active_dropout(self.dropout1), self.norm2)
        stream = ResidualStream(self._feed_forward(y), residual, active_dropout(self.dropout2))
        return stream if isinstance(src, ResidualStream) else stream.value()

    @yields_to_torch
    def _sa_block(
        self,
        x: Tensor,
        attn_mask: Tensor | None,
        key_padding_mask: Tensor | None,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        return self.dropout1(self._self_attention(x, attn_mask, key_padding_mask, is_causal, **options))

    @yields_to_torch
    def _ff_block(self, x: Tensor) -> Tensor:
        return self.dropout2(self._feed_forward(x))

    _blocks = {"_sa_block": _sa_block, "_ff_block": _ff_block}


class TransformerDecoderLayer(_Layer):
    """`torch.nn.TransformerDecoderLayer`: self-attention, cross-attention, feed-forward network, in fused ops.

    Same constructor, forward signature and state_dict keys; boolean masks are True = ignore, as in torch.nn. The
    further arguments are those of `TransformerEncoderLayer`; window_size restricts the self-attention.
    """

    has_cross_attention = True
    _sub_layers = range(1, 4)
    norm1: AddLayerNorm
    norm2: AddLayerNorm
    norm3: AddLayerNorm
    dropout1: nn.Dropout
    dropout2: nn.Dropout
    dropout3: nn.Dropout

    @yields_to_torch
    def forward(
        self,
        tgt: Tensor | ResidualStream,
        memory: Tensor | None,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
        layout: SequenceLayout | None = None,
        memory_layout: SequenceLayout | None = None,
        cache: LayerCache | None = None,
        rotary: RotaryPositions | None = None,
        position_bias: Tensor | None = None,
    ) -> Tensor | ResidualStream:
        """Passes the inputs through the layer.

        Args:
            tgt: (seqlen_q, batch, d_model), or (batch, seqlen_q, d_model) with batch_first, or (seqlen_q, d_model), or
                packed (total_q, d_model); a stack passes a `ResidualStream`.
            memory: the encoder's output, likewise; not needed where the cache holds its keys and values.
            tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask, tgt_is_causal, memory_is_causal: as in
                torch.nn; see `MultiheadAttention`.
            layout, memory_layout: how tgt and memory lie in memory.
            cache: one layer of a `KVCache` whose memory is set. tgt's keys and values are appended to it; the caller
                advances the lengths.
            rotary: rotates queries and keys of the self-attention.
            position_bias: added to the scores of the self-attention; see `MultiheadAttention`.

        Returns:
            tgt's shape; a `ResidualStream` for a `ResidualStream`.
        """
        if cache is not None and cache.cross_attention is None:
            raise InputError("expected a cache whose memory is set (KVCache.set_memory)")
        own_cache = None if cache is None else cache.self_attention
        own = given(layout=layout, cache=own_cache, rotary=rotary, position_bias=position_bias)
        other = given(
            layout=layout, memory_layout=memory_layout, cache=None if cache is None else cache.cross_attention
        )
        masks, memory_masks = (tgt_mask, tgt_key_padding_mask), (memory_mask, memory_key_padding_mask)
        if not isinstance(tgt, ResidualStream) and not self.may_join():
            x = tgt
            if self.norm_first:
                x = x + self._sa_block(self.norm1(x), *masks, tgt_is_causal, **own)
                x = x + self._mha_block(self.norm2(x), memory, *memory_masks, memory_is_causal, **other)
                return x + self._ff_block(self.norm3(x))
            x = self.norm1(x + self._sa_block(x, *masks, tgt_is_causal, **own))
            x = self.norm2(x + self._mha_block(x, memory, *memory_masks, memory_is_causal, **other))
            return self.norm3(x + self._ff_block(x))
        if not self.norm_first:
            assert isinstance(tgt, Tensor)
            attended = self._self_attention(tgt, *masks, tgt_is_causal, **own)
            x = post_norm(attended, tgt, self.dropout1, self.norm1)
            attended = self._cross_attention(x, memory, *memory_masks, memory_is_causal, **other)
            x = post_norm(attended, x, self.dropout2, self.norm2)
            return post_norm(self._feed_forward(x), x, self.dropout3, self.norm3)
        stream = tgt if isinstance(tgt, ResidualStream) else ResidualStream(None, tgt)
        y, residual = stream.normalise(self.norm1)
        attended = self._self_attention(y, *masks, tgt_is_causal, **own)
        y, residual = join(attended, residual, active_dropout(self.dropout1), self.norm2)
        attended = self._cross_attention(y, memory, *memory_masks, memory_is_causal, **other)
        y, residual = join(attended, residual, active_dropout(self.dropout2), self.norm3)
        stream = ResidualStream(self._feed_forward(y), residual, active_dropout(self.dropout3))
        return stream if isinstance(tgt, ResidualStream) else stream.value()

    def _cross_attention(
        self,
        x: Tensor,
        memory: Tensor | None,
        attn_mask: Tensor | None,
        key_padding_mask: Tensor | None,
        is_causal: bool,
        **options: Any,
    ) -> Tensor:
        return self.multihead_attn(
            x,
            memory,
            memory,
            attn_mask=attn_mask,
            key_padding_mask=key_padding_mask,
            is_causal=is_causal,
            need_weights=False,
            **options,
        )[0]

    @yields_to_torch
    def _sa_block(
        self,
        x: Tensor,
        attn_mask: Tensor | None,
        key_padding_mask: Tensor | None,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        return self.dropout1(self._self_attention(x, attn_mask, key_padding_mask, is_causal, **options))

    @yields_to_torch
    def _mha_block(
        self,
        x: Tensor,
        mem: Tensor | None,
        attn_mask: Tensor | None,
        key_padding_mask: Tensor | None,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        return self.dropout2(self._cross_attention(x, mem, attn_mask, key_padding_mask, is_causal, **options))

    @yields_to_torch
    def _ff_block(self, x: Tensor) -> Tensor:
        return self.dropout3(self._feed_forward(x))

    _blocks = {"_sa_block": _sa_block, "_mha_block": _mha_block, "_ff_block": _ff_block}
