"""The stacks under torch.nn's names and signatures: encoder, decoder, and both."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastformer.cache.kv_cache import KVCache
from fastformer.nn.cached_step import check_layers, check_masks, next_tokens
from fastformer.nn.embedding import RotaryPositions
from fastformer.nn.errors import InputError
from fastformer.nn.feed_forward import Activation, fused_name
from fastformer.nn.guards import (
    DROPOUTS,
    is_traced,
    is_untouched,
    is_written_as_known,
    norm_settings,
    yields_to_torch,
)
from fastformer.nn.layers import (
    ResidualStream,
    TransformerDecoderLayer,
    TransformerEncoderLayer,
    given,
    is_our_attention,
    is_our_layer,
    join,
)
from fastformer.nn.layout import SequenceLayout
from fastformer.nn.linear import LINEARS
from fastformer.nn.masks import as_additive, is_causal_mask, square_subsequent_mask
from fastformer.nn.norm import AddLayerNorm
from fastformer.nn.padding import open_nested, read_padding

# What goes from layer to layer.
State = Tensor | ResidualStream


class _Stack(nn.Module):
    """Layers in turn, then an optional norm; additions join the following norm wherever the layers allow it."""

    layers: Any  # an nn.ModuleList of layers: ours, torch.nn's or the caller's
    norm: nn.Module | None

    def __init__(self, layer: nn.Module, num_layers: int, norm: nn.Module | None) -> None:
        super().__init__()
        if not isinstance(layer, nn.Module) or not isinstance(num_layers, int) or num_layers < 0:
            raise InputError(
                f"expected a layer and num_layers of at least 0, got {type(layer).__name__} and {num_layers!r}"
            )
        self.layers = nn.ModuleList([copy.deepcopy(layer) for _ in range(num_layers)])
        self.num_layers = num_layers
        self.norm = norm
        # Recomputes each layer in the backward pass instead of keeping what it computed.
        self.gradient_checkpointing = False

    def _run(self, x: Tensor, call: Callable[[nn.Module, int, State], State]) -> Tensor:
        saving = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        fused = all(_takes_stream(layer) for layer in self.layers)
        state: State = ResidualStream(None, x) if fused else x
        for i, layer in enumerate(self.layers):
            state = checkpoint(call, layer, i, state, use_reentrant=False) if saving else call(layer, i, state)
        if not isinstance(state, ResidualStream):
            return state if self.norm is None else self.norm(state)
        return state.value() if self.norm is None else _final_norm(self.norm, state)

    def _seqlen(self, x: Tensor, layout: SequenceLayout | None) -> int | None:
        """The length that a mask must have; None where sequences are packed, or nobody says which dimension it is."""
        attention = getattr(self.layers[0], "self_attn", None) if len(self.layers) else None
        if (layout is not None and layout.is_packed) or attention is None:
            return None
        return x.shape[1 if x.dim() == 3 and getattr(attention, "batch_first", False) else 0]

    def _may_pack(self, x: Tensor, other: Tensor | None = None) -> bool:
        """Whether all layers compute the same for packed tokens, and nobody sees that they are packed."""
        return (
            all(type(each) in (Tensor, nn.Parameter) and each.dim() == 3 for each in (x, other) if each is not None)
            and not is_traced()
            and len(self.layers) > 0
            and all(_takes_packed(layer) for layer in self.layers)
            and (self.norm is None or norm_settings(self.norm) is not None)
        )

    def _is_windowed(self) -> bool:
        return any(layer.self_attn.window_size != (None, None) for layer in self.layers)


def _takes_layout(layer: nn.Module) -> bool:
    return isinstance(layer, TransformerEncoderLayer) and is_written_as_known(type(layer))


def _takes_packed(layer: nn.Module) -> bool:
    if not isinstance(layer, TransformerEncoderLayer | TransformerDecoderLayer):
        return False
    attentions = [layer.self_attn, *([layer.multihead_attn] if layer.has_cross_attention else [])]
    return (
        is_our_layer(layer)
        and all(map(_attends_packed, attentions))
        and is_untouched(layer.linear1, *LINEARS)
        and is_untouched(layer.linear2, *LINEARS)
        # Others may look at more than one token.
        and fused_name(layer.activation) is not None
        and is_untouched(layer.dropout, *DROPOUTS)
        and layer.may_join()
    )


def _attends_packed(attention: nn.Module) -> bool:
    return (
        is_our_attention(attention)
        and attention.bias_k is None
        and not attention.add_zero_attn
        and is_untouched(attention.out_proj, *LINEARS)
    )


def _takes_stream(layer: nn.Module) -> bool:
    # A subclass with a forward of its own, torch.nn's layer, or one that was hooked or patched gets and gives plain
    # tensors.
    return (
        isinstance(layer, TransformerEncoderLayer | TransformerDecoderLayer)
        and is_our_layer(layer)
        and layer.norm_first
        and layer.may_join()
    )


def _final_norm(norm: nn.Module, stream: ResidualStream) -> Tensor:
    if stream.delta is None or norm_settings(norm) is None:
        return norm(stream.value())
    # In the stream's dtype, as torch.nn has it under autocast.
    delta = stream.delta.to(torch.promote_types(stream.delta.dtype, stream.residual.dtype))
    return join(delta, stream.residual, stream.dropout_p, norm)[0]


class TransformerEncoder(_Stack):
    """`torch.nn.TransformerEncoder`: a stack of encoder layers, and, with a cache, of a decoder-only model's.

    Args:
        encoder_layer: a `TransformerEncoderLayer` (ours or torch.nn's), copied num_layers times.
        num_layers: number of layers.
        norm: applied to the output.
        enable_nested_tensor, mask_check: there for the signature; `layout=` is how padding is left out here.

    Attributes:
        gradient_checkpointing: recompute each layer in the backward pass, to save memory while training.
    """

    def __init__(
        self,
        encoder_layer: nn.Module,
        num_layers: int,
        norm: nn.Module | None = None,
        enable_nested_tensor: bool = True,
        mask_check: bool = True,
    ) -> None:
        super().__init__(encoder_layer, num_layers, norm)
        self.enable_nested_tensor = enable_nested_tensor
        self.mask_check = mask_check

    @yields_to_torch
    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
        layout: SequenceLayout | None = None,
        cache: KVCache | None = None,
        rotary: RotaryPositions | None = None,
        position_bias: Tensor | None = None,
    ) -> Tensor:
        """Passes the input through the layers.

        Args:
            src: (seqlen, batch, d_model), or (batch, seqlen, d_model) with batch_first, or (seqlen, d_model), or packed
                (total, d_model).
            mask, src_key_padding_mask: bool (True = ignore) or additive; see `MultiheadAttention`.
            is_causal: the mask is the causal one (and needn't be given); None: look at the mask, see `is_causal_mask`.
            layout: how src lies in memory.
            cache: keys and values of earlier tokens. src's own are appended and the lengths advanced (by the layout's
                seqlens where it is given); attention is causal. A packed src is the prompts of rows that are empty.
            rotary: rotates queries and keys.
            position_bias: added to the scores of every layer; see `MultiheadAttention`.

        Returns:
            src's shape.

        Raises:
            InputError: masks along with a cache; a full cache.
        """
        if src.is_nested:
            if isinstance(self, nn.TransformerEncoder) and not all(map(_takes_layout, self.layers)):
                return super().forward(src, mask, src_key_padding_mask, is_causal)
            others = (layout, cache, rotary, position_bias)
            opened, is_causal = open_nested(src, mask, src_key_padding_mask, is_causal, *others)
            values = TransformerEncoder.forward(self, opened.values, is_causal=is_causal, layout=opened.layout)
            return opened.close(values)
        is_causal = is_causal_mask(mask, self._seqlen(src, layout)) if is_causal is None else is_causal
        is_plain = all(option is None for option in (cache, layout, rotary, position_bias))
        if is_plain and src_key_padding_mask is not None:
            # torch.nn reads a mask that it is also told to be causal, where there is padding.
            says_all = mask is None or (is_causal and is_causal_mask(mask))
            padding = None
            if says_all and self._may_pack(src):
                padding = read_padding(src, src_key_padding_mask, self.layers[0].self_attn.batch_first)
            if padding is not None and padding.is_none:
                src_key_padding_mask = None
            elif padding is not None and (padding.is_contiguous or not self._is_windowed()):
                packed = padding.pack(src)
                out = TransformerEncoder.forward(self, packed, is_causal=is_causal, layout=padding.layout)
                return padding.unpack(out)
        step = None
        if cache is not None:
            check_masks(mask, src_key_padding_mask, is_causal)
            mask = None
            step = cache.begin(*next_tokens(cache, src, self.layers, layout))

        def call(layer: nn.Module, i: int, state: State) -> State:
            own = None if step is None else step.layer(i)
            options = given(layout=layout, cache=own, rotary=rotary, position_bias=position_bias)
            masks = {"src_mask": mask, "src_key_padding_mask": src_key_padding_mask}
            if not is_our_layer(layer):
                # torch.nn's stack gives its layers masks that are added.
                masks = {name: as_additive(each, src.dtype) for name, each in masks.items()}
            return layer(state, **masks, is_causal=is_causal, **options)

        # A cache keeps no graph, so gradients would be wrong: there are none.
        with torch.set_grad_enabled(torch.is_grad_enabled() and cache is None):
            out = self._run(src, call)
        if cache is not None and step is not None:
            cache.commit(step)
        return out


class TransformerDecoder(_Stack):
    """`torch.nn.TransformerDecoder`: a stack of decoder layers, with a KV cache for decoding.

    Args:
        decoder_layer: a `TransformerDecoderLayer` (ours or torch.nn's), copied num_layers times.
        num_layers: number of layers.
        norm: applied to the output.

    Attributes:
        gradient_checkpointing: recompute each layer in the backward pass, to save memory while training.
    """

    def __init__(self, decoder_layer: nn.Module, num_layers: int, norm: nn.Module | None = None) -> None:
        super().__init__(decoder_layer, num_layers, norm)

    @yields_to_torch
    def forward(
        self,
        tgt: Tensor,
        memory: Tensor | None,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
        layout: SequenceLayout | None = None,
        memory_layout: SequenceLayout | None = None,
        cache: KVCache | None = None,
        rotary: RotaryPositions | None = None,
        position_bias: Tensor | None = None,
    ) -> Tensor:
        """Passes the inputs through the layers.

        Args:
            tgt: (seqlen_q, batch, d_model), or (batch, seqlen_q, d_model) with batch_first, or (seqlen_q, d_model), or
                packed (total_q, d_model).
            memory: the encoder's output, likewise; None where the cache already holds its keys and values.
            tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask: bool (True = ignore) or additive.
            tgt_is_causal: tgt_mask is the causal one (and needn't be given); None: look at it, see `is_causal_mask`.
            memory_is_causal: memory_mask is the causal one.
            layout, memory_layout: how tgt and memory lie in memory.
            cache: keys and values of earlier tokens. The first call stores the memory's; every call appends tgt's and
                advances the lengths (by the layout's seqlens where it is given); self-attention is causal. A packed
                tgt is the prompts of rows that are empty. For inference. Of masks, the first call may bring
                memory_key_padding_mask.
            rotary: rotates queries and keys of the self-attention.
            position_bias: added to the scores of every layer's self-attention; see `MultiheadAttention`.

        Returns:
            tgt's shape.

        Raises:
            InputError: other masks along with a cache; a full cache; neither memory nor its keys and values.
        """
        tgt_is_causal = is_causal_mask(tgt_mask, self._seqlen(tgt, layout)) if tgt_is_causal is None else tgt_is_causal
        has_padding = tgt_key_padding_mask is not None or memory_key_padding_mask is not None
        options = (cache, layout, memory_layout, rotary, position_bias)
        if has_padding and memory is not None and all(option is None for option in options):
            # torch.nn reads a mask that it is also told to be causal, where there is padding.
            says_all = tgt_mask is None or (tgt_is_causal and is_causal_mask(tgt_mask))
            if says_all and memory_mask is None and not memory_is_causal and self._may_pack(tgt, memory):
                batch_first = self.layers[0].self_attn.batch_first
                own = read_padding(tgt, tgt_key_padding_mask, batch_first)
                other = read_padding(memory, memory_key_padding_mask, batch_first)
                if (
                    own is not None
                    and other is not None
                    and own.layout.batch_size == other.layout.batch_size
                    and (own.is_contiguous or not self._is_windowed())
                    and not (own.is_none and other.is_none)
                ):
                    out = TransformerDecoder.forward(
                        self,
                        own.pack(tgt),
                        other.pack(memory),
                        tgt_is_causal=tgt_is_causal,
                        layout=own.layout,
                        memory_layout=other.layout,
                    )
                    return own.unpack(out)
        step = None
        if cache is not None:
            check_masks(tgt_mask, tgt_key_padding_mask, tgt_is_causal)
            tgt_mask = None
            if memory_mask is not None:
                raise InputError("expected no memory_mask along with a cache")
            tokens = next_tokens(cache, tgt, self.layers, layout)
            if not cache.has_memory:
                if memory is None:
                    raise InputError("expected a memory: the cache holds none yet")
                self.store_memory(cache, memory, memory_layout, memory_key_padding_mask)
            step = cache.begin(*tokens)
            # From here on the cache speaks for the memory.
            memory = memory_layout = memory_key_padding_mask = None

        def call(layer: nn.Module, i: int, state: State) -> State:
            options = given(
                layout=layout,
                memory_layout=memory_layout,
                cache=None if step is None else step.layer(i),
                rotary=rotary,
                position_bias=position_bias,
            )
            return layer(
                state,
                memory,
                tgt_mask=tgt_mask,
                memory_mask=memory_mask,
                tgt_key_padding_mask=tgt_key_padding_mask,
                memory_key_padding_mask=memory_key_padding_mask,
                tgt_is_causal=tgt_is_causal,
                memory_is_causal=memory_is_causal,
                **options,
            )

        # A cache keeps no graph, so gradients would be wrong: there are none.
        with torch.set_grad_enabled(torch.is_grad_enabled() and cache is None):
            out = self._run(tgt, call)
        if cache is not None and step is not None:
            cache.commit(step)
        return out

    @torch.no_grad()
    def store_memory(
        self,
        cache: KVCache,
        memory: Tensor,
        memory_layout: SequenceLayout | None = None,
        memory_key_padding_mask: Tensor | None = None,
    ) -> None:
        """Computes the cross-attention's keys and values of every layer once, into the cache.

        The sources are those of the cache's groups that have none yet, in their order.

        Args:
            cache: of as many layers as the stack.
            memory: the encoder's output; one row a source, however many beams.
            memory_layout: how it lies in memory, padded or packed.
            memory_key_padding_mask: (num_sources, source_seqlen) bool, True = ignore; anywhere in a row.

        Raises:
            InputError: see `KVCache.set_memory`; a cache of another number of layers.
        """
        check_layers(cache, self.layers)
        if memory.dim() != (2 if memory_layout is not None and memory_layout.is_packed else 3):
            raise InputError(f"expected a padded memory, or a packed memory_layout, got shape {tuple(memory.shape)}")
        pairs = [layer.multihead_attn.project_memory(memory) for layer in self.layers]
        seqlens = None if memory_layout is None else memory_layout.read_seqlens()
        if memory_key_padding_mask is not None:
            mask = memory_key_padding_mask
            if mask.dtype != torch.bool or memory_layout is not None:
                raise InputError("expected a bool memory_key_padding_mask and no memory_layout along with a cache")
            # What is left, one after another, is packed.
            pairs = [(k[~mask], v[~mask]) for k, v in pairs]
            seqlens = (~mask).sum(1)
        cache.set_memory([k for k, _ in pairs], [v for _, v in pairs], seqlens)


class Transformer(nn.Module):
    """`torch.nn.Transformer`: encoder and decoder ("Attention Is All You Need", figure 1), without embeddings.

    Same constructor, forward signature and state_dict keys; boolean masks are True = ignore, as in torch.nn. For a
    model with embeddings, positions, loss and decoding see `fastformer.models.Transformer`.

    Args:
        d_model, nhead, num_encoder_layers, num_decoder_layers, dim_feedforward, dropout, activation, custom_encoder,
            custom_decoder, layer_norm_eps, batch_first, norm_first, bias, device, dtype: as in `torch.nn.Transformer`.
    """

    def __init__(
        self,
        d_model: int = 512,
        nhead: int = 8,
        num_encoder_layers: int = 6,
        num_decoder_layers: int = 6,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: Activation = F.relu,
        custom_encoder: nn.Module | None = None,
        custom_decoder: nn.Module | None = None,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = (d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, batch_first, norm_first, bias)

        def norm() -> AddLayerNorm:
            return AddLayerNorm(d_model, layer_norm_eps, bias=bias, device=device, dtype=dtype)

        if custom_encoder is not None:
            self.encoder = custom_encoder
        else:
            layer = TransformerEncoderLayer(*sizes, device, dtype)
            self.encoder = TransformerEncoder(layer, num_encoder_layers, norm())
        if custom_decoder is not None:
            self.decoder = custom_decoder
        else:
            self.decoder = TransformerDecoder(
                TransformerDecoderLayer(*sizes, device, dtype), num_decoder_layers, norm()
            )
        self._reset_parameters()
        self.d_model, self.nhead, self.batch_first = d_model, nhead, batch_first

    @yields_to_torch
    def forward(
        self,
        src: Tensor,
        tgt: Tensor,
        src_mask: Tensor | None = None,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        src_is_causal: bool | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
        layout: SequenceLayout | None = None,
        memory_layout: SequenceLayout | None = None,
    ) -> Tensor:
        """Encodes src, decodes tgt.

        Args:
            src, tgt: (seqlen, batch, d_model), or (batch, seqlen, d_model) with batch_first, or (seqlen, d_model), or
                packed (total, d_model).
            src_mask ... memory_is_causal: as in `torch.nn.Transformer`.
            layout: how tgt lies in memory.
            memory_layout: how src lies in memory.

        Returns:
            tgt's shape.

        Raises:
            InputError: another feature size than d_model, or batches of different sizes.
        """
        if src.shape[-1] != self.d_model or tgt.shape[-1] != self.d_model:
            raise InputError(
                f"expected src and tgt of d_model = {self.d_model} in the last dimension, got {src.shape[-1]} and "
                f"{tgt.shape[-1]}"
            )
        batch_dim = 0 if self.batch_first else 1
        if src.dim() == 3 and src.shape[batch_dim] != tgt.shape[batch_dim]:
            raise InputError(
                f"expected src and tgt of one batch size, got {src.shape[batch_dim]} and {tgt.shape[batch_dim]}"
            )
        memory = self.encoder(
            src,
            mask=src_mask,
            src_key_padding_mask=src_key_padding_mask,
            is_causal=src_is_causal,
            **given(layout=memory_layout),
        )
        return self.decoder(
            tgt,
            memory,
            tgt_mask=tgt_mask,
            memory_mask=memory_mask,
            tgt_key_padding_mask=tgt_key_padding_mask,
            memory_key_padding_mask=memory_key_padding_mask,
            tgt_is_causal=tgt_is_causal,
            memory_is_causal=memory_is_causal,
            **given(layout=layout, memory_layout=memory_layout),
        )

    @staticmethod
    def generate_square_subsequent_mask(
        sz: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """The causal mask: (sz, sz), -inf above the diagonal, 0 elsewhere."""
        return square_subsequent_mask(sz, device, dtype)

    def _reset_parameters(self) -> None:
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
