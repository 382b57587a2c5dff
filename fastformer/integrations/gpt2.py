"""transformers' GPT-2: packed tokens, dropout and addition joined to the norm after attention, fused FFN."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn
from transformers.models.gpt2 import modeling_gpt2 as gpt2

from fastformer.engine.checks import is_written_as_known
from fastformer.integrations.attention_interface import attention_forward, is_patched
from fastformer.integrations.fused import fused_activation, join_residual, plain_dropout
from fastformer.integrations.fused_loss import CausalLoss
from fastformer.integrations.heads import (
    KeepsPadding,
    LanguageModel,
    TokenLabels,
    derive,
    replacements,
    stands_for_original,
)
from fastformer.integrations.known import (
    CACHE,
    is_known,
    is_sdpa_known,
)
from fastformer.integrations.packing import left
from fastformer.integrations.products import is_plain_conv1d
from fastformer.integrations.replace import Replacement
from fastformer.integrations.stacks import CausalLayer, CausalStack
from fastformer.ops import feed_forward

# With fewer rows, as in a decode step, PyTorch's product reads weights in Conv1D's layout faster.
_FEW_ROWS = 16


class GPT2MLP(gpt2.GPT2MLP):
    """GPT-2's feed-forward network as one op, followed by the last dropout."""

    c_fc: Any
    c_proj: Any
    dropout: Any

    def forward(self, hidden_states: Tensor) -> Tensor:
        out = self._fused(hidden_states)
        return super().forward(hidden_states) if out is None else self.dropout(out)

    def _fused(self, x: Tensor) -> Tensor | None:
        if not (is_written_as_known(GPT2MLP) and is_plain_conv1d(self.c_fc) and is_plain_conv1d(self.c_proj)):
            return None
        activation = fused_activation(self.act)
        if activation is None or x.numel() < _FEW_ROWS * x.shape[-1]:
            return None
        weight1, weight2 = self.c_fc.weight, self.c_proj.weight
        if type(weight1) is not nn.Parameter or type(weight2) is not nn.Parameter:
            return None
        return feed_forward(x, weight1.t(), self.c_fc.bias, weight2.t(), self.c_proj.bias, activation=activation)


def _attend(attention: Any, x: Tensor, given: dict[str, Any]) -> Tensor:
    """Computes the output of a self-attention before its last dropout."""
    cache, mask = given[CACHE], given["attention_mask"]
    shape = (*x.shape[:-1], -1, attention.head_dim)
    q, k, v = (each.view(shape).transpose(1, 2) for each in attention.c_attn(x).split(attention.split_size, dim=2))
    if cache is not None:
        k, v = cache.update(k, v, attention.layer_idx)
    dropout_p = attention.attn_dropout.p if attention.training else 0.0
    scale = getattr(attention, "scaling", None)
    told = given.get("is_causal")
    out, _ = attention_forward(attention, q, k, v, mask, dropout=dropout_p, scaling=scale, is_causal=told)
    projected: Tensor = attention.c_proj(out.flatten(-2))
    return projected


class GPT2Block(CausalLayer, gpt2.GPT2Block):
    """GPT-2's block for packed tokens or a padded batch."""

    names = tuple(inspect.signature(gpt2.GPT2Block.forward).parameters)[2:]
    ln_1: nn.Module
    ln_2: nn.Module
    attn: Any
    mlp: nn.Module

    def _computed(self, x: Tensor, given: dict[str, Any]) -> Any:
        normed = self.ln_1(x)
        dropout_p = plain_dropout(self.attn.resid_dropout) if self._attends_plainly() else None
        if dropout_p is not None:
            attended = _attend(self.attn, normed, given)
        else:
            attended, dropout_p = self.attn(normed, **given)[0], 0.0
        normed, x = join_residual(attended, x, dropout_p, self.ln_2)
        return left(self, x + self.mlp(normed))

    def _attends_plainly(self) -> bool:
        attention = self.attn
        return is_known(attention, gpt2.GPT2Attention) and is_patched(attention) and is_sdpa_known()


@stands_for_original
class GPT2Model(CausalStack, gpt2.GPT2Model):
    """GPT-2's stack, whose blocks see packed tokens."""

    layers_name = "h"
    kinds = (GPT2Block, gpt2.GPT2Attention)
    attentions = ("attn",)


REPLACEMENTS = replacements(
    globals(),
    gpt2,
    {
        "GPT2LMHeadModel": LanguageModel,
        "GPT2DoubleHeadsModel": KeepsPadding,
        "GPT2ForQuestionAnswering": KeepsPadding,
        "GPT2ForSequenceClassification": KeepsPadding,
        "GPT2ForTokenClassification": TokenLabels,
    },
    *(GPT2MLP, GPT2Block, GPT2Model),
)
GPT2WithLoss = derive(__name__, gpt2.GPT2LMHeadModel, LanguageModel, CausalLoss, name="GPT2WithLoss")
LOSS_REPLACEMENTS = (Replacement(gpt2.GPT2LMHeadModel, GPT2WithLoss),)
