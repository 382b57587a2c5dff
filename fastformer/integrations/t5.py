"""transformers' T5: fused norms and FFN, attention with its position bias on fastformer's op, packed stacks.

The bias depends on the tokens' positions in the batch, so self-attention and the decoder's cache, which transformers
fills in training, too, use the padded batch. The gated FFN runs as transformers wrote it: fastformer's op needs its
first two weights as one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.models.t5 import modeling_t5 as t5

from fastformer.engine.checks import is_traced, is_written_as_known
from fastformer.integrations.attention_interface import attend_padded
from fastformer.integrations.engine_encode import StackOnEncoder
from fastformer.integrations.engine_generate import OnEngine
from fastformer.integrations.fused import RMSNorm, fused_feed_forward, plain_dropout
from fastformer.integrations.fused_loss import Seq2SeqLoss
from fastformer.integrations.heads import (
    EncoderHead,
    KeepsPadding,
    Seq2SeqModel,
    TokenLabels,
    replacements,
    stands_for_original,
)
from fastformer.integrations.known import OLD_CACHE, cache_of
from fastformer.integrations.packing import Packing, attend, current_run, entered, entered_memory
from fastformer.integrations.padding import Owner
from fastformer.integrations.replace import Replacement
from fastformer.integrations.stacks import Decoder, Encoder, Stack
from fastformer.nn.layout import Padding


class T5LayerNorm(RMSNorm, t5.T5LayerNorm):
    """T5's RMSNorm as one op."""


class T5DenseActDense(t5.T5DenseActDense):
    """T5's feed-forward network, without a gate, as one op."""

    wi: Any
    wo: Any

    def forward(self, hidden_states: Tensor) -> Tensor:
        dropout_p = plain_dropout(self.dropout) if is_written_as_known(T5DenseActDense) else None
        # Only parameters are read here: a parametrized weight is computed at each access.
        weights = (self.wi._parameters.get("weight"), self.wo._parameters.get("weight"))
        dtypes = {weight.dtype for weight in weights if isinstance(weight, Tensor)}
        # In half precision the second weight may be kept in fp32.
        if dropout_p is not None and len(dtypes) == 1 and torch.float16 not in dtypes | {hidden_states.dtype}:
            out = fused_feed_forward(hidden_states, self.wi, self.act, self.wo, dropout_p)
            if out is not None:
                return out
        return super().forward(hidden_states)


class T5Attention(t5.T5Attention):
    """T5's attention for padded or packed tokens: packed in cross-attention, padded in self-attention for the bias."""

    def forward(
        self,
        hidden_states: Tensor,
        mask: Tensor | None = None,
        key_value_states: Tensor | None = None,
        position_bias: Tensor | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> Any:
        older = kwargs.pop(OLD_CACHE, None)
        cache = older if cache is None else cache
        run = current_run()
        if run is None or run.padding is None:
            return super().forward(hidden_states, mask, key_value_states, position_bias, cache, **kwargs)
        if key_value_states is not None:
            return self._to_memory(run, hidden_states, key_value_states, cache), None, None
        padding = run.padding
        q, k, v = (
            padding.unpack(projection(hidden_states)[0]).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
            for projection in (self.q, self.k, self.v)
        )
        if cache is not None:
            k, v = cache.self_attention_cache.update(k, v, self.layer_idx)
        if position_bias is None:
            seqlen = padding.shape[1]
            # All blocks use the first block's bias, which is zero if that block has no table.
            position_bias = (
                self.compute_bias(seqlen, seqlen, device=q.device)
                if self.has_relative_attention_bias
                else q.new_zeros(1, self.n_heads, seqlen, seqlen)
            )
        kwargs.pop("is_causal", None)
        out, _ = attend_padded(
            self, q, k, v, mask, self._acting_dropout(), self.scaling, self.is_causal, position_bias=position_bias,
            **kwargs,
        )  # fmt: skip
        return self.o(padding.pack(out.flatten(2))[None]), position_bias, None

    def _to_memory(self, run: Packing, x: Tensor, memory: Tensor, cache: Any) -> Tensor:
        """Computes cross-attention, whose position bias is zero."""
        with entered_memory(memory, None) as (packed, _):
            q, k, v = (
                projection(of).unflatten(-1, (self.n_heads, -1))
                for projection, of in ((self.q, x), (self.k, packed), (self.v, packed))
            )
            if cache is not None:
                padded = (run.leave_memory(each).transpose(1, 2) for each in (k, v))
                cache.cross_attention_cache.update(*padded, self.layer_idx)
                cache.is_updated[self.layer_idx] = True
            attended = attend(q, k, v, None, dropout_p=self._acting_dropout(), scale=self.scaling)
        out: Tensor = self.o(attended.flatten(2))
        return out

    def _acting_dropout(self) -> float:
        return float(self.dropout) if self.training else 0.0


class T5Block(t5.T5Block):
    """T5's block for packed tokens or a padded batch. Its attention gets the padded batch's mask in both cases."""

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        return super().forward(entered(hidden_states, attention_mask)[0], attention_mask, *args, **kwargs)


def _has_tokens(mask: Any) -> bool:
    # A row without tokens attends to all of its padding equally.
    return type(mask) is Tensor and mask.dim() == 2 and bool((mask != 0).any(1).all())


class PackingT5Stack(Encoder, Decoder):
    """T5's stack with packed tokens: an encoder packs by its first block's mask, a decoder by its own mask."""

    layers_name = "block"
    is_decoder: bool

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        mask = args[1] if len(args) > 1 else kwargs.get("attention_mask")
        stays_padded = not is_traced() and (
            kwargs.get("is_causal") is not None or (mask is not None and not self.is_decoder and not _has_tokens(mask))
        )
        if stays_padded:
            return super(Stack, self).forward(*args, **kwargs)  # transformers' forward
        return super().forward(*args, **kwargs)

    def is_causal_stack(self) -> bool:
        return self.is_decoder

    def _may_pack(self) -> bool:
        return not self.is_decoder and super()._may_pack()

    def _padding(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Padding | None:
        packs = self.is_decoder and self.config.is_encoder_decoder  # only their caches have a part for each attention
        return super()._padding(args, kwargs) if packs else None

    def _fills_cache(self, kwargs: dict[str, Any]) -> bool:
        # The cache that the stack makes itself begins empty, and holds padded keys and values.
        return cache_of(kwargs) is not None

    def is_known_layer(self, layer: Any) -> bool:
        memory = [t5.T5LayerCrossAttention] if self.is_decoder else []
        kinds = [t5.T5LayerSelfAttention, *memory, t5.T5LayerFF]
        if type(layer) is not T5Block or [type(part) for part in layer.layer] != kinds:
            return False
        own = layer.layer[0].SelfAttention
        if type(own) is not T5Attention or own.is_causal != self.is_decoder:
            return False
        if not self.is_decoder:
            return True
        crossing = layer.layer[1].EncDecAttention
        return type(crossing) is T5Attention and not (crossing.is_causal or crossing.has_relative_attention_bias)


@stands_for_original
class T5Stack(StackOnEncoder, PackingT5Stack, t5.T5Stack):
    """T5's stack: an encoder runs on the engine if it can; all others run with packed tokens."""


@stands_for_original
class T5WithLoss(OnEngine, Seq2SeqModel, Seq2SeqLoss, t5.T5ForConditionalGeneration):
    """T5's model with a fused loss. In training it makes a cache only if the caller asks for one."""

    config: Any
    model_dim: int

    def _is_fusable(self, given: dict[str, Any]) -> bool:
        return super()._is_fusable(given) and self.config.decoder_start_token_id is not None

    def _decoded(self, given: dict[str, Any]) -> Any:
        out = t5.T5Model.forward(self, **given)
        if self.config.scale_decoder_outputs:
            out.last_hidden_state = out.last_hidden_state * self.model_dim**-0.5
        return out

    def _bias(self) -> Tensor | None:
        return None


REPLACEMENTS: tuple[Replacement, ...] = replacements(
    globals(),
    t5,
    {
        "T5Model": Owner,
        "T5EncoderModel": Owner,
        "T5ForConditionalGeneration": Seq2SeqModel,
        "T5ForQuestionAnswering": KeepsPadding,
        "T5ForSequenceClassification": KeepsPadding,
        "T5ForTokenClassification": (EncoderHead, TokenLabels),
    },
    *(T5LayerNorm, T5DenseActDense, T5Attention, T5Block, T5Stack),
)
LOSS_REPLACEMENTS: tuple[Replacement, ...] = (Replacement(t5.T5ForConditionalGeneration, T5WithLoss),)
