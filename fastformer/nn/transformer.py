"""The stacks under torch.nn's names and signatures: encoder, decoder, and both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastformer.cache.kv_cache import KVCache
from fastformer.cache.layer_view import StepTables
from fastformer.engine.checks import given, is_called_plainly, replacement
from fastformer.nn.cached_step import check_layers, check_masks, next_tokens
from fastformer.nn.embedding import RotaryPositions
from fastformer.nn.errors import InputError
from fastformer.nn.fast_path import fast_dtype, nests
from fastformer.nn.feed_forward import Activation
from fastformer.nn.kept_keys import KeptKeys, cache_places
from fastformer.nn.layers import LayerPlan, TransformerDecoderLayer, TransformerEncoderLayer
from fastformer.nn.layout import SequenceLayout, open_nested
from fastformer.nn.masks import as_additive, is_causal_mask, square_subsequent_mask
from fastformer.nn.norm import AddLayerNorm
from fastformer.nn.padding import hides, may_pack, skipped_by_decoder, skipped_by_encoder
from fastformer.nn.projected_memory import project_together
from fastformer.nn.stack import STACK_PLANS, Stack, StackPlan, State, run_layers


def _as_rows(plan: StackPlan, x: Tensor) -> Tensor | None:
    """Returns a batch (.., .., dim) as (rows, dim), so that layers need no views around products; None if they do."""
    if torch.compiler.is_compiling() or plan.gathers or not may_pack(plan, x) or not x.is_contiguous():
        return None
    return x.view(-1, x.shape[-1])


class TransformerEncoder(Stack):
    """`torch.nn.TransformerEncoder`: a stack of encoder layers, and, with a cache, of a decoder-only model's.

    Args:
        encoder_layer: a `TransformerEncoderLayer` (fastformer's or torch.nn's), copied num_layers times; or a list of
            num_layers layers, which may differ, and are not copied.
        num_layers: number of layers.
        norm: applied to the output.
        enable_nested_tensor: whether evaluation without gradients skips padding as torch.nn does; see `padding`.
        mask_check: only completes torch.nn's signature.

    Attributes:
        padding: "auto": the output is torch.nn's at every position; padding is skipped where torch.nn skips it, and in
            a `Transformer` whose decoder doesn't read it. "skip": you promise that nothing reads the output at padding;
            it is skipped in every call, and the output is zero there. "compute": it is never skipped.
        gradient_checkpointing: recompute each layer in the backward pass, to save memory while training.
        packs_weights: in evaluation without gradients on a CPU, compute all layers in one call over a packed copy of
            their weights, which takes as much memory as they do. False makes no copy.
        packed_precision: the precision of that copy, "fp32", "bf16" or "int8"; None: the weights' own.
        key_layers: for each layer, the layer whose keys and values it reads: itself, or one before it, whose place in a
            cache is also its own; None: itself.
    """

    key_layers: Sequence[int] | None = None

    def __init__(
        self,
        encoder_layer: nn.Module | list[Any],
        num_layers: int,
        norm: nn.Module | None = None,
        enable_nested_tensor: bool = True,
        mask_check: bool = True,
    ) -> None:
        super().__init__(encoder_layer, num_layers, norm)
        self.enable_nested_tensor = enable_nested_tensor
        self.use_nested_tensor = enable_nested_tensor and nests(self.layers[0] if self.layers else encoder_layer)
        self.mask_check = mask_check

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
        layout: SequenceLayout | None = None,
        cache: KVCache | None = None,
        rotary: RotaryPositions | list[RotaryPositions] | None = None,
        position_bias: Tensor | None = None,
        layer_inputs: Tensor | None = None,
    ) -> Tensor:
        """Passes the input through the layers.

        Args:
            src: (seqlen, batch, d_model), or (batch, seqlen, d_model) with batch_first, or (seqlen, d_model), or packed
                (total, d_model).
            mask, src_key_padding_mask: bool (True = ignore) or additive; see `MultiheadAttention`.
            is_causal: the mask is the causal one (and needn't be given); None: read the mask, see `is_causal_mask`.
            layout: the layout of src in memory.
            cache: keys and values of earlier tokens. src's own are appended and the lengths advanced (by the layout's
                seqlens if it is given); attention is causal. A packed src is the prompts of rows that are empty.
            rotary: rotates queries and keys; a list: one for each layer.
            position_bias: added to the scores of every layer; see `MultiheadAttention`.
            layer_inputs: src's shape with (num_layers, dim) in place of d_model; see `DecoderOnlyLayer`.

        Returns:
            src's shape.

        Raises:
            InputError: masks along with a cache; a full cache.
        """
        plan = STACK_PLANS.of(self)
        others = (layout, cache, rotary, position_bias, layer_inputs)
        is_bare = all(each is None for each in others)
        if plan.replaced is not None and is_bare:
            options = given(mask=mask, src_key_padding_mask=src_key_padding_mask, is_causal=is_causal)
            out: Tensor = plan.replaced.original.forward(self, src, **options)
            return out
        if src.is_nested:
            if isinstance(self, nn.TransformerEncoder) and not all(map(_takes_layout, self.layers)):
                return super().forward(src, mask, src_key_padding_mask, is_causal)
            opened, is_causal = open_nested(src, mask, src_key_padding_mask, is_causal, *others[:4])
            return opened.close(
                self._encode(plan, opened.values, None, None, is_causal, opened.layout, is_trusted=True)
            )
        out = self.encode(plan, src, mask, src_key_padding_mask, is_causal, *others, is_bare=is_bare)
        # A layer that is called gives its output this dtype itself, or its own code and hooks decide.
        if torch.is_autocast_enabled("cpu") and plan.layers and plan.layers[-1] is not None:
            out = out.to(fast_dtype(self.layers[-1], out))
        return out

    def encode(
        self,
        plan: StackPlan,
        src: Tensor,
        mask: Tensor | None,
        key_padding_mask: Tensor | None,
        is_causal: bool | None,
        layout: SequenceLayout | None = None,
        *others: Any,
        is_bare: bool = True,
        is_unread: bool = False,
    ) -> Tensor:
        """Computes `forward` by the stack's plan, for an input that isn't nested.

        Args:
            plan, src, mask, key_padding_mask, is_causal, layout: see `forward`.
            others: the cache, the rotary positions, the position bias and the inputs of layers; `is_bare` if none of
                them, nor a layout, is.
            is_unread: whether nothing reads the output at padding.
        """
        if is_causal is None:
            is_causal = mask is not None and is_causal_mask(mask, self._seqlen(src, layout))
        zeroed = None
        if key_padding_mask is not None and is_bare:
            padding, zeroed = skipped_by_encoder(
                self, plan, src, mask, key_padding_mask, is_causal=is_causal, is_unread=is_unread
            )
            if padding is not None and padding.is_none:
                key_padding_mask = zeroed = None
            elif padding is not None:
                packed = (padding.pack(src), None, None, is_causal, padding.layout)
                out = self._encode(plan, *packed, is_trusted=True)
                if zeroed is None or self.norm is None:
                    return padding.unpack(out)
                return padding.unpack(out, self.norm(out.new_zeros(out.shape[-1])))
        return self._encode(plan, src, mask, key_padding_mask, is_causal, layout, *others, zeroed=zeroed)

    def _encode(
        self,
        plan: StackPlan,
        src: Tensor,
        mask: Tensor | None,
        key_padding_mask: Tensor | None,
        is_causal: bool,
        layout: SequenceLayout | None = None,
        cache: KVCache | None = None,
        rotary: RotaryPositions | list[RotaryPositions] | None = None,
        position_bias: Tensor | None = None,
        layer_inputs: Tensor | None = None,
        *,
        is_trusted: bool = False,
        zeroed: Tensor | None = None,
    ) -> Tensor:
        """Passes the input through the layers without packing it.

        Args:
            is_trusted: whether the layout was read from a mask, so that nothing in it needs a check.
            zeroed: see `Skipped`.
        """
        options_given = (cache, rotary, position_bias, layer_inputs, zeroed)
        has_options = any(each is not None for each in options_given) or self.key_layers is not None
        if not has_options and plan.evaluation is not None and not torch.is_grad_enabled():
            out = plan.evaluation.run(self, src, mask, key_padding_mask, is_causal, layout, is_trusted=is_trusted)
            if out is not None:
                return out
        step = None
        if cache is not None:
            check_masks(mask, key_padding_mask, is_causal)
            mask = None
            step = cache.begin(*next_tokens(cache, src, self.layers, layout, self.key_layers))
        rows = None
        if layout is None and not has_options:
            rows = _as_rows(plan, src)
        shape = None if rows is None else src.shape[:2]

        shared = given(layout=layout, position_bias=position_bias)
        places = [*range(len(self.layers))] if self.key_layers is None else cache_places(self.key_layers)
        kept: dict[int, tuple[Tensor, Tensor]] = {}
        of_layers = None if layer_inputs is None else layer_inputs.unbind(-2)

        def call(layer: nn.Module, layer_plan: LayerPlan | None, i: int, state: State) -> State:
            options = shared.copy()
            if (turns := rotary[i] if isinstance(rotary, list) else rotary) is not None:
                options["rotary"] = turns
            if self.key_layers is not None:
                options["kept"] = KeptKeys(kept, self.key_layers[i])
            if of_layers is not None:
                options["layer_input"] = of_layers[i]
            if layer_plan is not None and isinstance(layer, TransformerEncoderLayer):
                if step is not None:
                    options["cache"] = step.layer(places[i]).self_attention
                if shape is not None:
                    options["shape"] = shape
                return layer.compute(layer_plan, state, mask, key_padding_mask, is_causal, **options)
            if step is not None:
                options["cache"] = step.layer(places[i])
            # torch.nn's stack passes additive masks to its layers.
            options["src_mask"] = as_additive(mask, src.dtype)
            options["src_key_padding_mask"] = as_additive(key_padding_mask, src.dtype)
            return layer(state, is_causal=is_causal, **options)

        if rows is not None:
            return run_layers(self, plan, rows, call).view(src.shape)
        if cache is None or step is None:
            return run_layers(self, plan, src, call, zeroed)
        # A cache records no graph, so gradients would be wrong: none are computed.
        with torch.no_grad():
            out = run_layers(self, plan, src, call)
        cache.commit(step)
        return out


def _takes_layout(layer: nn.Module) -> bool:
    return isinstance(layer, TransformerEncoderLayer) and replacement(type(layer)) is None


class TransformerDecoder(Stack):
    """`torch.nn.TransformerDecoder`: a stack of decoder layers, with a KV cache for decoding.

    Args:
        decoder_layer: a `TransformerDecoderLayer` (fastformer's or torch.nn's), copied num_layers times.
        num_layers: number of layers.
        norm: applied to the output.

    Attributes:
        padding: "auto": the output is torch.nn's at every position, and only the padding of the memory is skipped, in
            calls without tgt_key_padding_mask. "skip" and "compute": as in `TransformerEncoder`.
        gradient_checkpointing: recompute each layer in the backward pass, to save memory while training.
    """

    def __init__(self, decoder_layer: nn.Module, num_layers: int, norm: nn.Module | None = None) -> None:
        super().__init__(decoder_layer, num_layers, norm)

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
            memory: the encoder's output, in the same form; None if the cache already holds its keys and values.
            tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask: bool (True = ignore) or additive.
            tgt_is_causal: tgt_mask is the causal one (and needn't be given); None: read it, see `is_causal_mask`.
            memory_is_causal: memory_mask is the causal one.
            layout, memory_layout: how tgt and memory lie in memory.
            cache: keys and values of earlier tokens. The first call stores the memory's; every call appends tgt's and
                advances the lengths (by the layout's seqlens if it is given); self-attention is causal. A packed
                tgt is the prompts of rows that are empty. For inference. The only mask is the first call's
                memory_key_padding_mask.
            rotary: rotates queries and keys of the self-attention.
            position_bias: added to the scores of every layer's self-attention; see `MultiheadAttention`.

        Returns:
            tgt's shape.

        Raises:
            InputError: other masks along with a cache; a full cache; neither memory nor its keys and values.
        """
        plan = STACK_PLANS.of(self)
        is_bare = all(option is None for option in (layout, memory_layout, cache, rotary, position_bias))
        if plan.replaced is not None and is_bare:
            options = given(
                tgt_mask=tgt_mask,
                memory_mask=memory_mask,
                tgt_key_padding_mask=tgt_key_padding_mask,
                memory_key_padding_mask=memory_key_padding_mask,
                tgt_is_causal=tgt_is_causal,
                memory_is_causal=memory_is_causal or None,
            )
            out: Tensor = plan.replaced.original.forward(self, tgt, memory, **options)
            return out
        tgt_is_causal = is_causal_mask(tgt_mask, self._seqlen(tgt, layout)) if tgt_is_causal is None else tgt_is_causal
        masks, memory_masks = (tgt_mask, tgt_key_padding_mask), (memory_mask, memory_key_padding_mask)
        if is_bare and memory is not None and not memory_is_causal:
            padding = skipped_by_decoder(self, plan, tgt, memory, masks, memory_masks, tgt_is_causal)
            if padding is not None:
                of_tgt, of_memory = padding
                inputs, none = (of_tgt.pack(tgt), of_memory.pack(memory)), (None, None)
                layouts = of_tgt.layout, of_memory.layout
                return of_tgt.unpack(self._decode(plan, *inputs, none, none, tgt_is_causal, False, *layouts))
        if cache is None:
            return self._decode(
                plan, tgt, memory, masks, memory_masks, tgt_is_causal, memory_is_causal, layout, memory_layout, None,
                rotary, position_bias,
            )  # fmt: skip
        check_masks(tgt_mask, tgt_key_padding_mask, tgt_is_causal)
        if memory_mask is not None:
            raise InputError("expected no memory_mask along with a cache")
        tokens = next_tokens(cache, tgt, self.layers, layout)
        if not cache.has_memory:
            if memory is None:
                raise InputError("expected a memory: the cache holds none yet")
            self.store_memory(cache, memory, memory_layout, memory_key_padding_mask)
        step = cache.begin(*tokens)
        masks = (None, tgt_key_padding_mask)
        # From here on the cache replaces the memory, and it records no graph: gradients would be wrong.
        with torch.no_grad():
            out = self._decode(
                plan, tgt, None, masks, (None, None), tgt_is_causal, memory_is_causal, layout, None, step, rotary,
                position_bias,
            )  # fmt: skip
        cache.commit(step)
        return out

    def _decode(
        self,
        plan: StackPlan,
        tgt: Tensor,
        memory: Tensor | None,
        masks: tuple[Tensor | None, Tensor | None],
        memory_masks: tuple[Tensor | None, Tensor | None],
        is_causal: bool,
        memory_is_causal: bool,
        layout: SequenceLayout | None,
        memory_layout: SequenceLayout | None,
        step: StepTables | None = None,
        rotary: RotaryPositions | None = None,
        position_bias: Tensor | None = None,
    ) -> Tensor:
        """Passes the inputs through the layers without packing them; a cache's step must have begun."""
        projected = project_together(self, plan, memory, memory_layout)

        def call(layer: nn.Module, layer_plan: LayerPlan | None, i: int, state: State) -> State:
            cached = None if step is None else step.layer(i)
            if layer_plan is not None and isinstance(layer, TransformerDecoderLayer):
                return layer.compute(
                    layer_plan, state, memory, masks, memory_masks, is_causal, memory_is_causal, layout, memory_layout,
                    cached, rotary, position_bias, None if projected is None else projected[i],
                )  # fmt: skip
            layouts = {"layout": layout, "memory_layout": memory_layout}
            options = given(**layouts, cache=cached, rotary=rotary, position_bias=position_bias)
            return layer(
                state,
                memory,
                tgt_mask=masks[0],
                memory_mask=memory_masks[0],
                tgt_key_padding_mask=masks[1],
                memory_key_padding_mask=memory_masks[1],
                tgt_is_causal=is_causal,
                memory_is_causal=memory_is_causal,
                **options,
            )

        return run_layers(self, plan, tgt, call)

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
            cache: a cache with the stack's number of layers.
            memory: the encoder's output, with one row per source for any number of beams.
            memory_layout: the layout of memory, padded or packed.
            memory_key_padding_mask: (num_sources, source_seqlen) bool, True = ignore; anywhere in a row.

        Raises:
            InputError: see `KVCache.set_memory`; or the cache has another number of layers.
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
            # The remaining tokens, one after another, are packed.
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
            memory_layout: the layout of src in memory.

        Returns:
            tgt's shape.

        Raises:
            InputError: another feature size than d_model, or batches of different sizes.
        """
        replaced = replacement(type(self))
        if replaced is not None and layout is memory_layout is None:
            options = given(
                src_mask=src_mask,
                tgt_mask=tgt_mask,
                memory_mask=memory_mask,
                src_key_padding_mask=src_key_padding_mask,
                tgt_key_padding_mask=tgt_key_padding_mask,
                memory_key_padding_mask=memory_key_padding_mask,
                src_is_causal=src_is_causal,
                tgt_is_causal=tgt_is_causal,
                memory_is_causal=memory_is_causal or None,
            )
            out: Tensor = replaced.original.forward(self, src, tgt, **options)
            return out
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
        encoder: Any = self.encoder
        if memory_layout is None and self._leaves_padding_unread(src, src_key_padding_mask, memory_key_padding_mask):
            plan = STACK_PLANS.of(encoder)
            memory = encoder.encode(plan, src, src_mask, src_key_padding_mask, src_is_causal, is_unread=True)
        else:
            options = {"mask": src_mask, "src_key_padding_mask": src_key_padding_mask, "is_causal": src_is_causal}
            memory = encoder(src, **options, **given(layout=memory_layout))
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

    def _leaves_padding_unread(
        self, src: Tensor, key_padding_mask: Tensor | None, memory_key_padding_mask: Tensor | None
    ) -> bool:
        """Returns whether nothing reads the encoder's output at padding: the decoder's mask hides it."""
        stacks = (self.encoder, TransformerEncoder), (self.decoder, TransformerDecoder)
        for stack, kind in stacks:
            if not (isinstance(stack, kind) and type(stack).forward is _FORWARDS[kind] and is_called_plainly(stack)):
                return False
            plan = STACK_PLANS.of(stack)
            if plan.replaced is not None or plan.why_padded is not None:
                return False
        return not src.is_nested and hides(memory_key_padding_mask, key_padding_mask)

    @staticmethod
    def generate_square_subsequent_mask(
        sz: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Makes the causal mask: (sz, sz), -inf above the diagonal, 0 elsewhere."""
        return square_subsequent_mask(sz, device, dtype)

    def _reset_parameters(self) -> None:
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)


# The forwards of this module, recorded because other code may replace them.
_FORWARDS = {kind: kind.forward for kind in (TransformerEncoder, TransformerDecoder)}
