"""transformers' Llama: packed tokens, RMSNorms fused, the addition behind attention joined to the norm behind it.

The gated FFN runs as transformers has it: our op wants gate and up as one weight, which they aren't.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from transformers.models.llama import modeling_llama as llama

from fastformer.integrations.causal import (
    KeepsPadding,
    LanguageModel,
    Stack,
    TokenLabels,
    derive,
    entered_cache,
    entered_positions,
    left,
    signed_as,
    writes_plainly,
)
from fastformer.integrations.fused_loss import CausalLoss
from fastformer.integrations.hugging_face import entered, keeps_recording, know, nothing_else
from fastformer.integrations.rms import RMSNorm, join_rms
from fastformer.integrations.swap import Swap
from fastformer.nn.guards import is_written_as_known

know(llama)

# The names of what a layer may be given by position, behind its hidden states.
_NAMES = tuple(inspect.signature(llama.LlamaDecoderLayer.forward).parameters)[2:]
_HARMLESS = frozenset(
    {
        *("past_key_values", "attention_mask", "use_cache", "position_ids", "cache_position", "position_embeddings"),
        "num_items_in_batch",
    }
)


class LlamaRMSNorm(RMSNorm, llama.LlamaRMSNorm):
    """Fused."""


class LlamaDecoderLayer(llama.LlamaDecoderLayer):
    """A layer, of packed tokens or of a padded batch."""

    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module
    self_attn: Any
    mlp: nn.Module

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """See transformers."""
        given = dict(zip(_NAMES, args, strict=False)) | kwargs
        if not (
            is_written_as_known(LlamaDecoderLayer)
            and nothing_else((), given, _HARMLESS)
            and writes_plainly(given.get("past_key_values"))
        ):
            return super().forward(hidden_states, *args, **kwargs)
        x, given["attention_mask"] = entered(hidden_states, given.get("attention_mask"))
        given["past_key_values"] = entered_cache(given.get("past_key_values"))
        given["position_embeddings"] = entered_positions(given.get("position_embeddings"))
        attended = self.self_attn(hidden_states=self.input_layernorm(x), **given)[0]
        normed, x = join_rms(attended, x, 0.0, self.post_attention_layernorm)
        return left(self, x + self.mlp(normed))


@keeps_recording
@signed_as(llama.LlamaModel)
class LlamaModel(Stack, llama.LlamaModel):
    """Packed."""

    layers: Any

    def _layers(self) -> Sequence[nn.Module]:
        return list(self.layers)[: self.config.num_hidden_layers]

    def has_known_layers(self) -> bool:
        """See `PackingStack`. The config may say later that more of them are called."""
        return all(map(self._is_ours, self.layers))

    def _is_ours(self, layer: Any) -> bool:
        # A wrapper around the attention may call it again after the stack has ended, as a checkpoint does.
        is_known = type(layer) is LlamaDecoderLayer and type(layer.self_attn) is llama.LlamaAttention
        return is_known and bool(getattr(layer.self_attn, "is_causal", False))


LlamaForCausalLM = derive(__name__, llama.LlamaForCausalLM, LanguageModel)
LlamaWithLoss = derive(__name__, llama.LlamaForCausalLM, LanguageModel, CausalLoss, name="LlamaWithLoss")
LlamaForQuestionAnswering = derive(__name__, llama.LlamaForQuestionAnswering, KeepsPadding)
LlamaForSequenceClassification = derive(__name__, llama.LlamaForSequenceClassification, KeepsPadding)
LlamaForTokenClassification = derive(__name__, llama.LlamaForTokenClassification, TokenLabels)


SWAPS = (
    Swap(llama.LlamaForQuestionAnswering, LlamaForQuestionAnswering),
    Swap(llama.LlamaForSequenceClassification, LlamaForSequenceClassification),
    Swap(llama.LlamaForTokenClassification, LlamaForTokenClassification),
    Swap(llama.LlamaRMSNorm, LlamaRMSNorm),
    Swap(llama.LlamaDecoderLayer, LlamaDecoderLayer),
    Swap(llama.LlamaModel, LlamaModel),
    Swap(llama.LlamaForCausalLM, LlamaForCausalLM),
)
LOSS_SWAPS = (Swap(llama.LlamaForCausalLM, LlamaWithLoss),)
