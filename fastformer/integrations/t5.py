"""transformers' T5: norms and the FFN fused, attention with its position bias led to ours, packed stacks.

The bias goes by where tokens stand, so self-attention alone is of the padded batch, and what the decoder's cache holds,
which it keeps in training, too. The gated FFN runs as transformers has it: our op wants its two first weights as one,
which they aren't.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.t5 import modeling_t5 as t5

from fastformer.integrations.attention_interface import attend_padded
from fastformer.integrations.bart import Decoder, Encoder, Seq2SeqModel
from fastformer.integrations.causal import EncoderHead, KeepsPadding, TokenLabels, derive, signed_as
from fastformer.integrations.fused_loss import Seq2SeqLoss
from fastformer.integrations.hugging_face import (
    RETURNS_TUPLES,
    Packing,
    attend,
    entered,
    entered_memory,
    fused_feed_forward,
    going_on,
    keeps_recording,
    know,
    plain_dropout,
)
from fastformer.integrations.padding import Owner
from fastformer.integrations.parts import know_parts
from fastformer.integrations.rms import RMSNorm
from fastformer.integrations.swap import Swap
from fastformer.nn.guards import is_traced, is_written_as_known
from fastformer.nn.padding import Padding

know(t5)
know_parts(t5.T5ClassificationHead)


class T5LayerNorm(RMSNorm, t5.T5LayerNorm):
    """Fused."""


class T5DenseActDense(t5.T5DenseActDense):
    """One op."""

    wi: Any
    wo: Any

    def forward(self, hidden_states: Tensor) -> Tensor:
        """See transformers."""
        dropout_p = plain_dropout(self.dropout) if is_written_as_known(T5DenseActDense) else None
        # Those that are parameters: reading one that is made of others would make it once more.
        weights = (self.wi._parameters.get("weight"), self.wo._parameters.get("weight"))
        dtypes = {weight.dtype for weight in weights if isinstance(weight, Tensor)}
        # In half precision the second weight may be kept in fp32.
        if dropout_p is not None and len(dtypes) == 1 and torch.float16 not in dtypes | {hidden_states.dtype}:
            out = fused_feed_forward(hidden_states, self.wi, self.act, self.wo, dropout_p)
            if out is not None:
                return out
        return super().forward(hidden_states)


class T5Attention(t5.T5Attention):
    """Of packed tokens, too: to a memory as they are; to one another, where their places count, padded again."""

    def forward(
        self,
        hidden_states: Tensor,
        mask: Tensor | None = None,
        key_value_states: Tensor | None = None,
        position_bias: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Any:
        """See transformers."""
        run = going_on()
        if run is None or run.padding is None:
            return super().forward(hidden_states, mask, key_value_states, position_bias, past_key_values, **kwargs)
        if key_value_states is not None:
            return self._to_memory(run, hidden_states, key_value_states, past_key_values), None, None
        padding = run.padding
        q, k, v = (
            padding.unpack(projection(hidden_states)[0]).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
            for projection in (self.q, self.k, self.v)
        )
        if past_key_values is not None:
            k, v = past_key_values.self_attention_cache.update(k, v, self.layer_idx)
        if position_bias is None:
            seqlen = padding.shape[1]
            # The first block's is all blocks', and zero where it has none.
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
        """Without a bias, which is zero for a memory."""
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
    """Of packed tokens or of a padded batch, whose mask attention has in either case."""

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """See transformers."""
        return super().forward(entered(hidden_states, attention_mask)[0], attention_mask, *args, **kwargs)


def _has_tokens(mask: Any) -> bool:
    # Of a row without any a decoder takes the mean, padding as it is.
    return type(mask) is Tensor and mask.dim() == 2 and bool((mask != 0).any(1).all())


@keeps_recording
@signed_as(t5.T5Stack)
class T5Stack(Encoder, Decoder, t5.T5Stack):
    """Packed: as an encoder by the mask that its first block is given, as a decoder by the mask that it is given."""

    block: Any
    is_decoder: bool

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """See transformers."""
        mask = args[1] if len(args) > 1 else kwargs.get("attention_mask")
        stays_padded = not is_traced() and (
            kwargs.get("is_causal") is not None or (mask is not None and not self.is_decoder and not _has_tokens(mask))
        )
        if stays_padded:
            return t5.T5Stack.forward(self, *args, **kwargs)
        return super().forward(*args, **kwargs)

    def is_causal_stack(self) -> bool:
        """See `PackingStack`."""
        return self.is_decoder

    def has_known_layers(self) -> bool:
        """See `PackingStack`."""
        return Decoder.has_known_layers(self)

    def _may_pack(self) -> bool:
        return not self.is_decoder and super()._may_pack()

    def _padding(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Padding | None:
        packs = self.is_decoder and self.config.is_encoder_decoder  # whose cache has a part for each attention
        return super()._padding(args, kwargs) if packs else None

    def _fills_cache(self, kwargs: dict[str, Any]) -> bool:
        # Its own begins empty, and holds padded keys and values.
        return kwargs.get("past_key_values") is not None

    def _layers(self) -> Sequence[nn.Module]:
        return list(self.block)

    def _is_ours(self, layer: Any) -> bool:
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


T5ForConditionalGeneration = derive(__name__, t5.T5ForConditionalGeneration, Seq2SeqModel)


@keeps_recording
@signed_as(t5.T5ForConditionalGeneration)
class T5WithLoss(Seq2SeqModel, Seq2SeqLoss, t5.T5ForConditionalGeneration):
    """The same, with the fused loss: in training no cache is kept but for who asks."""

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


T5ForQuestionAnswering = derive(__name__, t5.T5ForQuestionAnswering, KeepsPadding)
T5ForSequenceClassification = derive(__name__, t5.T5ForSequenceClassification, KeepsPadding)
T5ForTokenClassification = derive(__name__, t5.T5ForTokenClassification, EncoderHead, TokenLabels)


T5Model = derive(__name__, t5.T5Model, Owner)
T5EncoderModel = derive(__name__, t5.T5EncoderModel, Owner)


SWAPS: tuple[Swap, ...] = (
    Swap(t5.T5LayerNorm, T5LayerNorm),
    Swap(t5.T5DenseActDense, T5DenseActDense),
)
if not RETURNS_TUPLES:  # before 5 attention is written out in the model
    SWAPS += (
        Swap(t5.T5Attention, T5Attention),
        Swap(t5.T5Block, T5Block),
        Swap(t5.T5Stack, T5Stack),
        Swap(t5.T5Model, T5Model),
        Swap(t5.T5EncoderModel, T5EncoderModel),
        Swap(t5.T5ForConditionalGeneration, T5ForConditionalGeneration),
        Swap(t5.T5ForQuestionAnswering, T5ForQuestionAnswering),
        Swap(t5.T5ForSequenceClassification, T5ForSequenceClassification),
        Swap(t5.T5ForTokenClassification, T5ForTokenClassification),
    )
LOSS_SWAPS = () if RETURNS_TUPLES else (Swap(t5.T5ForConditionalGeneration, T5WithLoss),)
