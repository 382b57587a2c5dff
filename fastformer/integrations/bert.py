"""transformers' BERT: packed encoder, fused attention, joined residual + norm, fused FFN."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.bert import modeling_bert as bert

from fastformer.engine.checks import is_written_as_known
from fastformer.integrations.engine_encode import EncoderOwner
from fastformer.integrations.fused import add_and_norm, fused_feed_forward, plain_dropout
from fastformer.integrations.heads import EncoderHead, KeepsPadding, TokenLabels, replacements
from fastformer.integrations.known import attends_as_known, is_known, nothing_else
from fastformer.integrations.packing import attend, key_padding_of, packing
from fastformer.integrations.padding import Owner, PackingStack

# Arguments of a forward that don't change what it computes here.
_HARMLESS = frozenset({"position_ids", "cache_position", "return_dict", "num_items_in_batch"})


class BertSelfAttention(bert.BertSelfAttention):
    """Self-attention that runs on fastformer's op without a cache, and on transformers' code otherwise."""

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        if not self._is_simple(args, kwargs):
            return super().forward(hidden_states, attention_mask, *args, **kwargs)
        q, k, v = (
            linear(hidden_states).unflatten(-1, (-1, self.attention_head_size))
            for linear in (self.query, self.key, self.value)
        )
        told = kwargs.get("is_causal")
        is_causal = attention_mask is None and bool(self.is_causal if told is None else told)
        dropout_p = self.dropout.p if self.training else 0.0
        out = attend(q, k, v, attention_mask, dropout_p=dropout_p, scale=self.scaling, is_causal=is_causal)
        return out.flatten(-2), None

    def _is_simple(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return (
            is_written_as_known(BertSelfAttention)
            and attends_as_known()
            and nothing_else(args, kwargs, _HARMLESS)
            and self.config._attn_implementation == "sdpa"
        )


def _output(module: Any, x: Tensor, residual: Tensor) -> Tensor:
    dropout_p = plain_dropout(module.dropout)
    if dropout_p is None:
        return module.LayerNorm(module.dropout(x) + residual)
    return add_and_norm(x, residual, dropout_p, module.LayerNorm)


class BertSelfOutput(bert.BertSelfOutput):
    """Joins dropout and addition to the norm."""

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        if not is_written_as_known(BertSelfOutput):
            return super().forward(hidden_states, input_tensor)
        return _output(self, self.dense(hidden_states), input_tensor)


class BertOutput(bert.BertOutput):
    """Joins dropout and addition to the norm."""

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        if not is_written_as_known(BertOutput):
            return super().forward(hidden_states, input_tensor)
        return _output(self, self.dense(hidden_states), input_tensor)


class BertLayer(bert.BertLayer):
    """A layer whose feed-forward network is one op, and its residual and norm another."""

    attention: Any
    intermediate: Any
    output: Any

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the base class. Defining it here keeps transformers from binding the forward that exists at import."""
        return super().forward(*args, **kwargs)

    def feed_forward_chunk(self, attention_output: Tensor) -> Tensor:
        """Computes the feed-forward network with its residual and norm."""
        inner, outer = self.intermediate, self.output
        is_original = is_written_as_known(BertLayer)
        if is_original and is_known(inner, bert.BertIntermediate) and is_known(outer, BertOutput, bert.BertOutput):
            out = fused_feed_forward(attention_output, inner.dense, inner.intermediate_act_fn, outer.dense)
            if out is not None:
                return _output(outer, out, attention_output)
        return super().feed_forward_chunk(attention_output)


def _starts_real(mask: Tensor | None) -> bool:
    # A pooler reads the first token of each row, padding or not.
    key_padding_mask = key_padding_of(mask)
    return key_padding_mask is None or not bool(key_padding_mask[:, :1].any())


class BertEncoder(PackingStack, bert.BertEncoder):
    """An encoder whose layers see packed tokens, and whose output is zeros at padding."""

    layer: Any
    config: Any

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        if not (
            nothing_else(args, kwargs, _HARMLESS)
            and self.config._attn_implementation == "sdpa"
            and self.may_leave_out()
            and _starts_real(attention_mask)
        ):
            return super().forward(hidden_states, attention_mask, *args, **kwargs)
        with packing() as run:
            hidden_states, attention_mask = run.enter(hidden_states, attention_mask)
            out = super().forward(hidden_states, attention_mask, *args, **kwargs)
        out.last_hidden_state = run.leave(out.last_hidden_state)
        return out

    def has_known_layers(self) -> bool:
        return all(_attends_plainly(layer, self.config) for layer in self.layer)


def _attends_plainly(layer: Any, config: Any) -> bool:
    if type(layer) is not BertLayer or type(layer.attention) is not bert.BertAttention:
        return False
    attention: Any = layer.attention.self
    return (
        type(attention) is BertSelfAttention
        and attention.config is config  # each call looks up its attention function there
        and not attention.is_causal
        and not layer.chunk_size_feed_forward
    )


REPLACEMENTS = replacements(
    globals(),
    bert,
    {
        # These read the pooler's output for the first token.
        "BertModel": EncoderOwner,
        "BertForMultipleChoice": Owner,
        "BertForNextSentencePrediction": Owner,
        "BertForSequenceClassification": Owner,
        "BertForMaskedLM": (EncoderHead, TokenLabels),
        "BertForPreTraining": (EncoderHead, TokenLabels),
        "BertForTokenClassification": (EncoderHead, TokenLabels),
        "BertLMHeadModel": EncoderHead,
        "BertForQuestionAnswering": (EncoderHead, KeepsPadding),
    },
    *(BertSelfAttention, BertSelfOutput, BertOutput, BertLayer, BertEncoder),
)
