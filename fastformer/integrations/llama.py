"""transformers' Llama: packed tokens, fused RMSNorms, the addition after attention joined to the norm after it.

The gated FFN runs as transformers wrote it: fastformer's op needs gate and up as one weight, and here they are two.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from transformers.models.llama import modeling_llama as llama

from fastformer.integrations.engine_encode import DecoderOnEncoder
from fastformer.integrations.fused import RMSNorm, join_rms
from fastformer.integrations.fused_loss import CausalLoss
from fastformer.integrations.heads import (
    KeepsPadding,
    LanguageModel,
    LastToken,
    TokenLabels,
    derive,
    replacements,
    stands_for_original,
)
from fastformer.integrations.packing import entered_positions, left
from fastformer.integrations.replace import Replacement
from fastformer.integrations.stacks import CausalLayer, CausalStack


class LlamaRMSNorm(RMSNorm, llama.LlamaRMSNorm):
    """Llama's RMSNorm as one op."""


class LlamaDecoderLayer(CausalLayer, llama.LlamaDecoderLayer):
    """Llama's layer for packed tokens or a padded batch."""

    names = tuple(inspect.signature(llama.LlamaDecoderLayer.forward).parameters)[2:]
    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module
    self_attn: Any
    mlp: nn.Module

    def _computed(self, x: Tensor, given: dict[str, Any]) -> Any:
        given["position_embeddings"] = entered_positions(given.get("position_embeddings"))
        attended = self.self_attn(hidden_states=self.input_layernorm(x), **given)[0]
        normed, x = join_rms(attended, x, self.post_attention_layernorm)
        return left(self, x + self.mlp(normed))


@stands_for_original
class LlamaModel(DecoderOnEncoder, CausalStack, llama.LlamaModel):
    """Llama's stack, whose layers see packed tokens."""

    kinds = (LlamaDecoderLayer, llama.LlamaAttention)

    def _layers(self) -> Sequence[nn.Module]:
        # The number of layers that are called may change with the config, so all of them have to be known.
        return super()._layers()[: self.config.num_hidden_layers]


REPLACEMENTS = replacements(
    globals(),
    llama,
    {
        "LlamaForCausalLM": LanguageModel,
        "LlamaForQuestionAnswering": KeepsPadding,
        "LlamaForSequenceClassification": LastToken,
        "LlamaForTokenClassification": TokenLabels,
    },
    *(LlamaRMSNorm, LlamaDecoderLayer, LlamaModel),
)
LlamaWithLoss = derive(__name__, llama.LlamaForCausalLM, LanguageModel, CausalLoss, name="LlamaWithLoss")
LOSS_REPLACEMENTS = (Replacement(llama.LlamaForCausalLM, LlamaWithLoss),)
