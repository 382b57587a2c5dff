"""transformers' GPT-2: packed tokens, dropout and addition joined to the norm behind attention, fused FFN."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from transformers.models.gpt2 import modeling_gpt2 as gpt2

from fastformer.integrations.attention_interface import attention_forward, is_led
from fastformer.integrations.causal import (
    KeepsPadding,
    LanguageModel,
    Stack,
    TokenLabels,
    derive,
    entered_cache,
    left,
    signed_as,
    writes_plainly,
)
from fastformer.integrations.fused_loss import CausalLoss
from fastformer.integrations.hugging_face import (
    RETURNS_TUPLES,
    attends_by_theirs,
    entered,
    fused_activation,
    is_known,
    join_residual,
    keeps_recording,
    know,
    nothing_else,
    plain_dropout,
)
from fastformer.integrations.products import is_plain_conv1d
from fastformer.integrations.swap import Swap
from fastformer.nn.guards import is_written_as_known
from fastformer.ops import feed_forward

know(gpt2)

# The names of what a block may be given by position, behind its hidden states.
_NAMES = tuple(inspect.signature(gpt2.GPT2Block.forward).parameters)[2:]
_HARMLESS = frozenset(
    {"past_key_values", "attention_mask", "use_cache", "position_ids", "cache_position", "num_items_in_batch"}
)
# Fewer rows than this are a step of decoding, where PyTorch's product reads weights that lie as Conv1D's faster.
_FEW_ROWS = 16


class GPT2MLP(gpt2.GPT2MLP):
    """One op, but for the last dropout."""

    c_fc: Any
    c_proj: Any
    dropout: Any

    def forward(self, hidden_states: Tensor) -> Tensor:
        """See transformers."""
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


def _attend(attention: Any, x: Tensor, mask: Tensor | None, cache: Any) -> Tensor:
    """What a self-attention computes before its last dropout."""
    shape = (*x.shape[:-1], -1, attention.head_dim)
    q, k, v = (each.view(shape).transpose(1, 2) for each in attention.c_attn(x).split(attention.split_size, dim=2))
    if cache is not None:
        k, v = cache.update(k, v, attention.layer_idx)
    dropout_p = attention.attn_dropout.p if attention.training else 0.0
    scale = getattr(attention, "scaling", None)
    out, _ = attention_forward(attention, q, k, v, mask, dropout=dropout_p, scaling=scale)
    projected: Tensor = attention.c_proj(out.flatten(-2))
    return projected


class GPT2Block(gpt2.GPT2Block):
    """A block, of packed tokens or of a padded batch."""

    ln_1: nn.Module
    ln_2: nn.Module
    attn: Any
    mlp: nn.Module

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """See transformers."""
        given = dict(zip(_NAMES, args, strict=False)) | kwargs
        if not (
            is_written_as_known(GPT2Block)
            and nothing_else((), given, _HARMLESS)
            and writes_plainly(given.get("past_key_values"))
        ):
            return super().forward(hidden_states, *args, **kwargs)
        x, mask = entered(hidden_states, given.get("attention_mask"))
        cache = entered_cache(given.get("past_key_values"))
        normed = self.ln_1(x)
        dropout_p = plain_dropout(self.attn.resid_dropout) if self._attends_plainly() else None
        if dropout_p is not None:
            attended = _attend(self.attn, normed, mask, cache)
        else:
            options = given | {"past_key_values": cache, "attention_mask": mask}
            attended, dropout_p = self.attn(normed, **options)[0], 0.0
        normed, x = join_residual(attended, x, dropout_p, self.ln_2)
        x = left(self, x + self.mlp(normed))
        return (x,) if RETURNS_TUPLES else x

    def _attends_plainly(self) -> bool:
        attention = self.attn
        if not is_known(attention, gpt2.GPT2Attention):
            return False
        return is_led(attention) and attends_by_theirs()


@keeps_recording
@signed_as(gpt2.GPT2Model)
class GPT2Model(Stack, gpt2.GPT2Model):
    """Packed."""

    h: Any

    def _layers(self) -> Sequence[nn.Module]:
        return list(self.h)

    def _is_ours(self, layer: Any) -> bool:
        # A wrapper around the attention may call it again after the stack has ended, as a checkpoint does.
        is_known = type(layer) is GPT2Block and type(layer.attn) is gpt2.GPT2Attention
        return is_known and bool(getattr(layer.attn, "is_causal", False))


GPT2LMHeadModel = derive(__name__, gpt2.GPT2LMHeadModel, LanguageModel)
GPT2WithLoss = derive(__name__, gpt2.GPT2LMHeadModel, LanguageModel, CausalLoss, name="GPT2WithLoss")
GPT2DoubleHeadsModel = derive(__name__, gpt2.GPT2DoubleHeadsModel, KeepsPadding)
GPT2ForQuestionAnswering = derive(__name__, gpt2.GPT2ForQuestionAnswering, KeepsPadding)
GPT2ForSequenceClassification = derive(__name__, gpt2.GPT2ForSequenceClassification, KeepsPadding)
GPT2ForTokenClassification = derive(__name__, gpt2.GPT2ForTokenClassification, TokenLabels)


SWAPS = (
    Swap(gpt2.GPT2DoubleHeadsModel, GPT2DoubleHeadsModel),
    Swap(gpt2.GPT2ForQuestionAnswering, GPT2ForQuestionAnswering),
    Swap(gpt2.GPT2ForSequenceClassification, GPT2ForSequenceClassification),
    Swap(gpt2.GPT2ForTokenClassification, GPT2ForTokenClassification),
    Swap(gpt2.GPT2MLP, GPT2MLP),
    Swap(gpt2.GPT2Block, GPT2Block),
    Swap(gpt2.GPT2Model, GPT2Model),
    Swap(gpt2.GPT2LMHeadModel, GPT2LMHeadModel),
)
LOSS_SWAPS = (Swap(gpt2.GPT2LMHeadModel, GPT2WithLoss),)
