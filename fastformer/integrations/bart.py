"""transformers' BART: packed stacks, joined norms, fused FFN. Marian has the same layers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.bart import modeling_bart as bart

from fastformer.engine.checks import is_written_as_known
from fastformer.integrations.engine_encode import StackOnEncoder
from fastformer.integrations.fused import add_and_norm, fused_feed_forward
from fastformer.integrations.fused_loss import Seq2SeqLoss
from fastformer.integrations.heads import KeepsPadding, Seq2SeqModel, derive, replacements
from fastformer.integrations.known import CACHE, OLD_CACHE
from fastformer.integrations.packing import entered, entered_memory
from fastformer.integrations.padding import Owner
from fastformer.integrations.replace import Replacement
from fastformer.integrations.stacks import Decoder, Encoder


class _Layer(nn.Module):
    """The base of both kinds of layers: dropouts as numbers, fc1 and fc2, a norm after each sub-layer."""

    self_attn: Any
    encoder_attn: Any
    self_attn_layer_norm: nn.Module
    encoder_attn_layer_norm: nn.Module
    fc1: nn.Module
    fc2: nn.Module
    final_layer_norm: nn.Module
    dropout: float
    activation_dropout: float
    activation_fn: Any

    def _join(self, x: Tensor, residual: Tensor, norm: nn.Module) -> Tensor:
        return add_and_norm(x, residual, self.dropout if self.training else 0.0, norm)

    def _feed_forward(self, x: Tensor) -> Tensor:
        dropout_p, activation = self.activation_dropout if self.training else 0.0, self.activation_fn
        out = fused_feed_forward(x, self.fc1, activation, self.fc2, dropout_p)
        if out is None:
            out = self.fc2(F.dropout(activation(self.fc1(x)), dropout_p))
        return self._join(out, x, self.final_layer_norm)


class EncoderLayer(_Layer):
    """An encoder layer of BART or Marian, for packed tokens or a padded batch."""

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        is_other = args or kwargs.get("output_attentions") or not is_written_as_known(type(self))
        if is_other or hidden_states.dtype == torch.float16:  # which transformers clamps
            return super().forward(hidden_states, attention_mask, *args, **kwargs)
        x, mask = entered(hidden_states, attention_mask)
        attended = _attended(self.self_attn, x, attention_mask=mask, **kwargs)
        return self._feed_forward(self._join(attended, x, self.self_attn_layer_norm))


class DecoderLayer(_Layer):
    """A decoder layer of BART or Marian, with or without a cache, for packed tokens or a padded batch."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        cache: Any = None,
        use_cache: bool | None = True,
        **kwargs: Any,
    ) -> Any:
        older = kwargs.pop(OLD_CACHE, None)
        cache = older if cache is None else cache
        names = {
            "attention_mask": attention_mask, "encoder_hidden_states": encoder_hidden_states,
            "encoder_attention_mask": encoder_attention_mask, CACHE: cache, "use_cache": use_cache,
        }  # fmt: skip
        if kwargs.get("output_attentions") or not is_written_as_known(type(self)):
            return super().forward(hidden_states, **names, **kwargs)
        x, mask = entered(hidden_states, attention_mask)
        options = {CACHE: cache, **kwargs}
        attended = _attended(self.self_attn, x, attention_mask=mask, **options)
        x = self._join(attended, x, self.self_attn_layer_norm)
        if encoder_hidden_states is not None:
            with entered_memory(encoder_hidden_states, encoder_attention_mask) as (memory, mask):
                options |= {"key_value_states": memory, "attention_mask": mask}
                attended = _attended(self.encoder_attn, x, **options)
            x = self._join(attended, x, self.encoder_attn_layer_norm)
        return self._feed_forward(x)


def _attended(attention: Any, x: Tensor, **options: Any) -> Tensor:
    """Calls an attention as transformers does, since hooks see the arguments; returns its output."""
    attended: Tensor = attention(x, **options)[0]
    return attended


class BartEncoderLayer(EncoderLayer, bart.BartEncoderLayer):
    """BART's encoder layer in fused ops."""


class BartDecoderLayer(DecoderLayer, bart.BartDecoderLayer):
    """BART's decoder layer in fused ops."""


BartEncoder = derive(__name__, bart.BartEncoder, StackOnEncoder, Encoder, kinds=(BartEncoderLayer, bart.BartAttention))
BartDecoder = derive(__name__, bart.BartDecoder, Decoder, kinds=(BartDecoderLayer, bart.BartAttention))
REPLACEMENTS = replacements(
    globals(),
    bart,
    {
        "BartModel": Owner,
        "BartForConditionalGeneration": Seq2SeqModel,
        "BartForCausalLM": KeepsPadding,
        "BartForQuestionAnswering": KeepsPadding,
        "BartForSequenceClassification": KeepsPadding,
    },
    *(BartEncoderLayer, BartDecoderLayer, BartEncoder, BartDecoder),
)
BartWithLoss = derive(__name__, bart.BartForConditionalGeneration, Seq2SeqModel, Seq2SeqLoss, name="BartWithLoss")
LOSS_REPLACEMENTS = (Replacement(bart.BartForConditionalGeneration, BartWithLoss),)
