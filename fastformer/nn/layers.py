"""The encoder and the decoder layer under torch.nn's names and signatures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastformer.cache.layer_view import LayerCache
from fastformer.engine.checks import (
    DROPOUTS,
    Replacement,
    active_dropout,
    gathers,
    given,
    is_unhooked,
    is_untouched,
    replacement,
)
from fastformer.engine.frozen import Plans
from fastformer.nn.attention import AttentionPlan, MultiheadAttention, plan_inside
from fastformer.nn.attention_parameters import WindowSize
from fastformer.nn.embedding import RotaryPositions
from fastformer.nn.errors import InputError
from fastformer.nn.fast_path import fast_dtype
from fastformer.nn.feed_forward import (
    Activation,
    FeedForwardPlan,
    call_feed_forward,
    find_feed_forward_plan,
    is_gated,
    resolve_activation,
)
from fastformer.nn.layout import SequenceLayout, open_nested
from fastformer.nn.masks import as_additive
from fastformer.nn.mixture import MixtureOfExperts
from fastformer.nn.norm import AddLayerNorm, NormPlan, find_norm_plan
from fastformer.nn.projected_memory import ProjectedMemory
from fastformer.ops._dispatch import unviewed
from fastformer.ops.add_layer_norm import add_layer_norm


class ResidualStream(NamedTuple):
    """A pre-norm residual stream with one pending addition: its value is dropout(delta) + residual.

    A stack passes it from layer to layer, so that the addition is fused with the next layer's normalisation.
    """

    delta: Tensor | None
    residual: Tensor
    dropout_p: float = 0.0

    def value(self) -> Tensor:
        """Computes the value of the stream, dropout(delta) + residual."""
        return self.residual if self.delta is None else self.residual + F.dropout(self.delta, self.dropout_p)

    def normalise(self, norm: NormPlan) -> tuple[Tensor, Tensor]:
        """Computes (norm(value), value)."""
        if self.delta is None:
            return norm.module(self.residual), self.residual
        weight, bias = norm.parameters["weight"], norm.parameters.get("bias")
        return add_layer_norm(
            self.delta, self.residual, weight, bias, eps=norm.eps, dropout_p=self.dropout_p, rms_norm=norm.rms_norm,
        )  # fmt: skip


def _post_norm(x: Tensor, residual: Tensor, dropout_p: float, norm: NormPlan) -> Tensor:
    """Computes norm(dropout(x) + residual) in the sum's dtype: under autocast a post-norm layer's stream stays fp32."""
    if x.dtype != residual.dtype:
        x = x.to(torch.promote_types(x.dtype, residual.dtype))
    weight, bias = norm.parameters["weight"], norm.parameters.get("bias")
    return add_layer_norm(x, residual, weight, bias, eps=norm.eps, dropout_p=dropout_p, rms_norm=norm.rms_norm)[0]


def _handed_over(plan: LayerPlan, out: Tensor | ResidualStream) -> Tensor | ResidualStream:
    """Returns a layer's output, but not as a view if a hook on it gathers the layer's parameters for backward.

    If a view were changed in place, the hook would be lost.
    """
    if not plan.gathers:
        return out
    if not isinstance(out, ResidualStream):
        return unviewed(out)
    delta = None if out.delta is None else unviewed(out.delta)
    return ResidualStream(delta, unviewed(out.residual), out.dropout_p)


class LayerPlan(NamedTuple):
    """The parts of a layer's computation that depend only on its modules and its class.

    Attributes:
        replaced: the function that is called instead, because it replaced torch.nn's.
        norms, dropouts: the norms and the acting probabilities of dropout of the sub-layers in order, which are fused
            with the additions; () if each module, and each block that a subclass may override, is called. Norms are in
            the order of the layer's `_norm_names`.
        adds_masks: whether blocks or attention of another class get additive masks, as from torch.nn's layer.
        self_attention, cross_attention: the plans of the attentions; None if the attention is called.
        calls_attention: whether an attention, or a module inside of it, is called; it may change the rest of the layer.
        feed_forward: the plan of the feed-forward network; None if its modules are called.
        why_called: why a stack calls the layer, in words; None if the stack computes the layer without a call.
        gathers: whether a call is needed anyway, because it gathers the parameters.
    """

    replaced: Replacement | None
    norms: tuple[NormPlan, ...]
    dropouts: tuple[float, ...]
    adds_masks: bool
    self_attention: AttentionPlan | None
    cross_attention: AttentionPlan | None
    calls_attention: bool
    feed_forward: FeedForwardPlan | None
    why_called: str | None
    gathers: bool = False


def find_layer_plan(layer: _Layer) -> LayerPlan:
    """Finds the plan of a layer of fastformer's class, or of a class derived from it."""
    inside, replaced = layer._modules, replacement(type(layer))
    own_blocks, is_gathered = layer._has_own_blocks(), gathers(layer)
    norms = [find_norm_plan(inside.get(name), is_lent=is_gathered) for name in layer._norm_names()]
    dropouts = [inside.get(f"dropout{i}") for i in layer._sub_layers]
    joins = own_blocks and all(each is not None for each in norms)
    joins = joins and all(is_untouched(each, *DROPOUTS) for each in dropouts)
    self_attention = plan_inside(inside.get("self_attn"), is_lent=is_gathered)
    cross_attention = None
    if layer.has_cross_attention:
        cross_attention = plan_inside(inside.get("multihead_attn"), is_lent=is_gathered)
    attentions = (self_attention, cross_attention) if layer.has_cross_attention else (self_attention,)
    why_called = None
    if type(layer).forward not in _FORWARDS or replaced is not None:
        why_called = f"{type(layer).__name__} has a forward of its own, or another was put in its place"
    elif not (is_unhooked(layer) or is_gathered):
        why_called = "it has a hook, or a forward of its own"
    return LayerPlan(
        replaced,
        tuple(each for each in norms if each is not None) if joins else (),
        tuple(active_dropout(each) for each in dropouts if each is not None) if joins else (),
        not (own_blocks and self_attention is not None),
        self_attention,
        cross_attention,
        any(each is None or each.calls_modules for each in attentions),
        find_feed_forward_plan(layer, is_lent=is_gathered),
        why_called,
        is_gathered,
    )


def _watched_plan(layer: _Layer, plan: LayerPlan) -> LayerPlan:
    why_called = "a hook on all modules, a mode, or a function in place of one of PyTorch's sees what modules do"
    return LayerPlan(plan.replaced, (), (), True, None, None, True, None, why_called)


LAYER_PLANS: Plans[LayerPlan] = Plans("layer", find_layer_plan, watched=_watched_plan)


class AttentionCall(NamedTuple):
    """The arguments of a call of one of a layer's attentions, other than the queries.

    Attributes:
        name: the name of the module: "self_attn" or "multihead_attn".
        memory: the sequence that the keys and values are made of; None in self-attention, and if a cache holds them.
        attn_mask, key_padding_mask, is_causal: as in `MultiheadAttention`.
        options: its further arguments; those that aren't given are absent.
    """

    name: str
    memory: Tensor | None
    attn_mask: Tensor | None
    key_padding_mask: Tensor | None
    is_causal: bool
    options: dict[str, Any]


class _Layer(nn.Module):
    """The base of both layers: self-attention first, a feed-forward network last, norms and residuals around each."""

    has_cross_attention: ClassVar[bool]
    is_standard = True  # whether norms and residuals are placed as in torch.nn, before or after each sub-layer
    _sub_layers: ClassVar[range]
    dropout1: nn.Dropout
    _blocks: ClassVar[dict[str, Any]]  # torch.nn's overridable blocks, in this module's implementation

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
        norm_bias: bool | None = None,
        linear1_bias: bool | None = None,
        attention_dropout: float | None = None,
        activation_dropout: float | None = None,
        num_kv_heads: int | None = None,
        norm: str = "layer",
        window_size: WindowSize = (None, None),
        head_dim: int | None = None,
        self_attention: Mapping[str, Any] | None = None,
        experts: Mapping[str, Any] | None = None,
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
            "head_dim": head_dim,
            **factory,
        }
        # The order of construction is torch.nn's, so that the same seed gives the same weights.
        self_options = {"window_size": window_size, **attention, **(self_attention or {})}
        self.self_attn = MultiheadAttention(d_model, nhead, **self_options)
        if self.has_cross_attention:
            self.multihead_attn = MultiheadAttention(d_model, nhead, **attention)
        self.activation = resolve_activation(activation)
        inner = 2 * dim_feedforward if is_gated(self.activation) else dim_feedforward
        inner_dropout = dropout if activation_dropout is None else activation_dropout
        if experts is not None:
            if linear1_bias is not None:
                raise InputError(f"expected no linear1_bias beside experts, whose layers have bias, got {linear1_bias}")
            of_all = {"activation": activation, "dropout": inner_dropout, "bias": bias, **factory}
            self.mixture = MixtureOfExperts(d_model, dim_feedforward, **of_all, **experts)
        else:
            inner_bias = bias if linear1_bias is None else linear1_bias
            self.linear1 = nn.Linear(d_model, inner, bias=inner_bias, **factory)
            self.dropout = nn.Dropout(inner_dropout)
            self.linear2 = nn.Linear(dim_feedforward, d_model, bias=bias, **factory)
        self.norm_first = norm_first
        for i in self._sub_layers:
            # Each norm is fused with the dropout and the addition of the sub-layer before it; that dropout's
            # probability stays in torch.nn's attributes, dropout1 to dropout3.
            has_bias = bias if norm_bias is None else norm_bias
            norm_module = AddLayerNorm(d_model, layer_norm_eps, bias=has_bias, rms_norm=norm == "rms", **factory)
            setattr(self, f"norm{i}", norm_module)
        for i in self._sub_layers:
            setattr(self, f"dropout{i}", nn.Dropout(dropout))

    def _attend(self, plan: LayerPlan, call: AttentionCall, x: Tensor) -> Tensor:
        """Computes an attention of the layer by its plan, or by calling its module if there is no plan."""
        name, memory, attn_mask, key_padding_mask, is_causal, options = call
        inside = plan.cross_attention
        if name == "self_attn":
            memory, inside = x, plan.self_attention
        if inside is not None:
            module: Any = self._modules[name]
            out: Tensor = module.attend(inside, x, memory, memory, attn_mask, key_padding_mask, is_causal, **options)
            return out
        masks = {"attn_mask": attn_mask, "key_padding_mask": key_padding_mask}
        called: Tensor = getattr(self, name)(
            x, memory, memory, **masks, is_causal=is_causal, need_weights=False, **options
        )[0]
        return called

    def _feed_forward(self, x: Tensor, plan: FeedForwardPlan | None = None) -> Tensor:
        if plan is not None:
            return plan.compute(x)
        mixture = self._modules.get("mixture")
        out: Tensor = call_feed_forward(self, x) if mixture is None else mixture(x)
        return out

    def _sa_block(
        self,
        x: Tensor,
        attn_mask: Tensor | None,
        key_padding_mask: Tensor | None,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        plan = LAYER_PLANS.of(self)
        if plan.replaced is not None and not options:
            out: Tensor = plan.replaced.original._sa_block(self, x, attn_mask, key_padding_mask, is_causal)
            return out
        call = AttentionCall("self_attn", None, attn_mask, key_padding_mask, is_causal, options)
        return self.dropout1(self._attend(plan, call, x))

    def _ff_block(self, x: Tensor) -> Tensor:
        plan = LAYER_PLANS.of(self)
        if plan.replaced is not None:
            out: Tensor = plan.replaced.original._ff_block(self, x)
            return out
        dropout: Any = getattr(self, f"dropout{self._sub_layers[-1]}")
        fed: Tensor = dropout(self._feed_forward(x, plan.feed_forward))
        return fed

    def _plan_after(self, plan: LayerPlan) -> LayerPlan:
        """Returns the plan for the part after an attention, which may have run code that changed the plan."""
        return plan if torch.compiler.is_compiling() else LAYER_PLANS.of(self)

    def _join_post_norm(self, plan: LayerPlan, x: Tensor, calls: Sequence[AttentionCall]) -> Tensor:
        """Computes the layer with a norm behind each sub-layer: x = norm(x + dropout(sub_layer(x)))."""
        norms, dropouts = plan.norms, plan.dropouts
        for call, norm, dropout_p in zip(calls, norms, dropouts, strict=False):
            attended = self._attend(plan, call, x)
            plan = self._plan_after(plan) if plan.calls_attention else plan
            x = _post_norm(attended, x, dropout_p, norm)
        return _post_norm(self._feed_forward(x, plan.feed_forward), x, dropouts[-1], norms[-1])

    def _join_pre_norm(self, plan: LayerPlan, stream: ResidualStream, calls: Sequence[AttentionCall]) -> ResidualStream:
        """Computes the layer with a norm before each sub-layer: x = x + dropout(sub_layer(norm(x)))."""
        norms, dropouts = plan.norms, plan.dropouts
        for call, norm, dropout_p in zip(calls, norms, dropouts, strict=False):
            y, residual = stream.normalise(norm)
            attended = self._attend(plan, call, y)
            plan = self._plan_after(plan) if plan.calls_attention else plan
            stream = ResidualStream(attended, residual, dropout_p)
        y, residual = stream.normalise(norms[-1])
        return ResidualStream(self._feed_forward(y, plan.feed_forward), residual, dropouts[-1])

    def _compute(
        self, plan: LayerPlan, x: Tensor | ResidualStream, calls: Sequence[AttentionCall]
    ) -> Tensor | ResidualStream:
        """Computes the layer by its plan; the last sub-layer is the feed-forward network.

        Args:
            plan: the plan of the layer.
            x: the input; a `ResidualStream` in a stack with norm_first.
            calls: the attentions, in order.
        """
        if plan.norms and not self.norm_first:
            assert isinstance(x, Tensor)
            return self._join_post_norm(plan, x, calls)
        stream = x if isinstance(x, ResidualStream) else ResidualStream(None, x)
        if plan.norms:
            stream = self._join_pre_norm(plan, stream, calls)
        else:
            stream = ResidualStream(None, self._call_blocks(stream.value(), calls))
        return stream if isinstance(x, ResidualStream) else stream.value()

    def _call_blocks(self, x: Tensor, calls: Sequence[AttentionCall]) -> Tensor:
        """Computes the layer by calling each norm, and each block that a subclass may override."""
        norms = [getattr(self, f"norm{i}") for i in self._sub_layers]
        if self.norm_first:
            for call, norm in zip(calls, norms, strict=False):
                x = x + self._call_attention(call, norm(x))
            return x + self._ff_block(norms[-1](x))
        for call, norm in zip(calls, norms, strict=False):
            x = norm(x + self._call_attention(call, x))
        last: Tensor = norms[-1](x + self._ff_block(x))
        return last

    def _call_attention(self, call: AttentionCall, x: Tensor) -> Tensor:
        # A block of a subclass gets its arguments as torch.nn's layers pass them: is_causal by its name in an encoder
        # layer, and by its position in a decoder layer.
        name, memory, attn_mask, key_padding_mask, is_causal, options = call
        block: Any = self._sa_block if name == "self_attn" else self._mha_block
        attended: Tensor
        if not self.has_cross_attention:
            attended = block(x, attn_mask, key_padding_mask, is_causal=is_causal, **options)
        else:
            inputs = (x,) if name == "self_attn" else (x, memory)
            attended = block(*inputs, attn_mask, key_padding_mask, is_causal, **options)
        return attended

    def _norm_names(self) -> list[str]:
        return [f"norm{i}" for i in self._sub_layers]

    def _has_own_blocks(self) -> bool:
        """Returns whether the blocks are those of this class; blocks aren't called if their parts are fused."""
        kind, attributes = type(self), self.__dict__
        return all(name not in attributes and getattr(kind, name) is block for name, block in self._blocks.items())


class TransformerEncoderLayer(_Layer):
    """`torch.nn.TransformerEncoderLayer`: self-attention and feed-forward network, in fused ops.

    Same constructor, forward signature and state_dict keys; boolean masks are True = ignore, as in torch.nn. With
    `is_causal=True` and a `cache` it is the layer of a decoder-only model.

    Args:
        d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, batch_first, norm_first, bias, device,
            dtype: as in `torch.nn.TransformerEncoderLayer`; activation may also be "gelu_tanh", "swiglu" or
            "geglu_tanh", and when dropout acts, it is rounded to a multiple of 1/256.
        attention_bias: whether the attention's projections have a bias; None: the value of bias.
        norm_bias: whether norms have a bias; None: the value of bias.
        linear1_bias: whether the first linear layer of the feed-forward network has a bias; None: the value of bias.
        attention_dropout: the dropout of the attention weights; None: the value of dropout.
        activation_dropout: the dropout after the activation; None: the value of dropout.
        num_kv_heads, window_size: as in `MultiheadAttention`.
        norm: "layer" or "rms".
        self_attention: further arguments of the self-attention's `MultiheadAttention`, over those above.
        experts: further arguments of a `MixtureOfExperts`, which then is the feed-forward network, and has
            dim_feedforward as its hidden_dim; None: there is one feed-forward network.
    """

    has_cross_attention = False
    _sub_layers = range(1, 3)
    norm1: AddLayerNorm
    norm2: AddLayerNorm
    dropout1: nn.Dropout
    dropout2: nn.Dropout

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
        **own: Any,
    ) -> Tensor | ResidualStream:
        """Passes the input through the layer.

        Args:
            src: (seqlen, batch, d_model), or (batch, seqlen, d_model) with batch_first, or (seqlen, d_model), or packed
                (total, d_model), or nested (batch, any lengths, d_model), with only the causal mask; a stack
                passes a `ResidualStream`.
            src_mask, src_key_padding_mask, is_causal: as in torch.nn; see `MultiheadAttention`.
            layout: the layout of src.
            cache: keys and values of earlier tokens. Those of src are appended; the caller advances the lengths.
            rotary: rotates queries and keys.
            position_bias: added to the scores; see `MultiheadAttention`.
            own: what only layers of a decoder-only model have: `kept`, and `layer_input` (see `DecoderOnlyLayer`).

        Returns:
            src's shape; a `ResidualStream` for a `ResidualStream`.
        """
        plan = LAYER_PLANS.of(self)
        others = (layout, cache, rotary, position_bias, *own.values())
        if plan.replaced is not None and all(each is None for each in others) and isinstance(src, Tensor):
            options = given(src_mask=src_mask, src_key_padding_mask=src_key_padding_mask, is_causal=is_causal or None)
            out: Tensor = plan.replaced.original.forward(self, src, **options)
            return out
        if isinstance(src, Tensor) and src.is_nested:
            opened, is_causal = open_nested(src, src_mask, src_key_padding_mask, is_causal, *others[:4])
            values = self.compute(plan, opened.values, None, None, is_causal, layout=opened.layout)
            assert isinstance(values, Tensor)
            return opened.close(values)
        self_cache = None if cache is None else cache.self_attention
        options = given(layout=layout, cache=self_cache, rotary=rotary, position_bias=position_bias, **own)
        output = _handed_over(plan, self.compute(plan, src, src_mask, src_key_padding_mask, is_causal, **options))
        return output.to(fast_dtype(self, output)) if isinstance(output, Tensor) else output

    def compute(
        self,
        plan: LayerPlan,
        src: Tensor | ResidualStream,
        attn_mask: Tensor | None,
        key_padding_mask: Tensor | None,
        is_causal: bool,
        **options: Any,
    ) -> Tensor | ResidualStream:
        """Computes `forward` for a stack that knows the layer's plan; the options are those of the self-attention."""
        if plan.adds_masks:  # torch.nn's layer passes additive masks to its blocks and its attention
            dtype = (src.residual if isinstance(src, ResidualStream) else src).dtype
            attn_mask, key_padding_mask = as_additive(attn_mask, dtype), as_additive(key_padding_mask, dtype)
        call = AttentionCall("self_attn", None, attn_mask, key_padding_mask, is_causal, options)
        return self._compute(plan, src, (call,))

    _blocks = {"_sa_block": _Layer._sa_block, "_ff_block": _Layer._ff_block}


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
            memory: the encoder's output, in the same form; not needed if the cache holds its keys and values.
            tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask, tgt_is_causal, memory_is_causal: as in
                torch.nn; see `MultiheadAttention`.
            layout, memory_layout: the layouts of tgt and memory.
            cache: one layer of a `KVCache` whose memory is set. tgt's keys and values are appended to it; the caller
                advances the lengths.
            rotary: rotates queries and keys of the self-attention.
            position_bias: added to the scores of the self-attention; see `MultiheadAttention`.

        Returns:
            tgt's shape; a `ResidualStream` for a `ResidualStream`.
        """
        plan = LAYER_PLANS.of(self)
        others = (layout, memory_layout, cache, rotary, position_bias)
        if plan.replaced is not None and all(each is None for each in others) and isinstance(tgt, Tensor):
            options = given(
                tgt_mask=tgt_mask,
                memory_mask=memory_mask,
                tgt_key_padding_mask=tgt_key_padding_mask,
                memory_key_padding_mask=memory_key_padding_mask,
                tgt_is_causal=tgt_is_causal or None,
                memory_is_causal=memory_is_causal or None,
            )
            out: Tensor = plan.replaced.original.forward(self, tgt, memory, **options)
            return out
        masks, memory_masks = (tgt_mask, tgt_key_padding_mask), (memory_mask, memory_key_padding_mask)
        output = self.compute(
            plan, tgt, memory, masks, memory_masks, tgt_is_causal, memory_is_causal, layout, memory_layout, cache,
            rotary, position_bias,
        )  # fmt: skip
        return _handed_over(plan, output)

    def compute(
        self,
        plan: LayerPlan,
        tgt: Tensor | ResidualStream,
        memory: Tensor | None,
        masks: tuple[Tensor | None, Tensor | None],
        memory_masks: tuple[Tensor | None, Tensor | None],
        is_causal: bool,
        memory_is_causal: bool,
        layout: SequenceLayout | None,
        memory_layout: SequenceLayout | None,
        cache: LayerCache | None,
        rotary: RotaryPositions | None,
        position_bias: Tensor | None,
        projected: ProjectedMemory | None = None,
    ) -> Tensor | ResidualStream:
        """Computes `forward` for a stack that knows the layer's plan."""
        if cache is not None and cache.cross_attention is None:
            raise InputError("expected a cache whose memory is set (KVCache.set_memory)")
        self_cache, cross_cache = (None, None) if cache is None else (cache.self_attention, cache.cross_attention)
        self_options = given(layout=layout, cache=self_cache, rotary=rotary, position_bias=position_bias)
        cross_options = given(layout=layout, memory_layout=memory_layout, cache=cross_cache, projected=projected)
        calls = (
            AttentionCall("self_attn", None, *masks, is_causal, self_options),
            AttentionCall("multihead_attn", memory, *memory_masks, memory_is_causal, cross_options),
        )
        return self._compute(plan, tgt, calls)

    def _mha_block(
        self,
        x: Tensor,
        mem: Tensor | None,
        attn_mask: Tensor | None,
        key_padding_mask: Tensor | None,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        plan = LAYER_PLANS.of(self)
        if plan.replaced is not None and not options:
            out: Tensor = plan.replaced.original._mha_block(self, x, mem, attn_mask, key_padding_mask, is_causal)
            return out
        call = AttentionCall("multihead_attn", mem, attn_mask, key_padding_mask, is_causal, options)
        return self.dropout2(self._attend(plan, call, x))

    _blocks = {"_sa_block": _Layer._sa_block, "_mha_block": _mha_block, "_ff_block": _Layer._ff_block}


# The blocks of this module, recorded because other code may replace them.
_FORWARDS = (TransformerEncoderLayer.forward, TransformerDecoderLayer.forward)
