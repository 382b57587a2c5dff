"""transformers' BART, and what Marian's layers have in common with it: packed stacks, joined norms, fused FFN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.models.bart import modeling_bart as bart

from fastformer.integrations.attention_interface import is_led
from fastformer.integrations.causal import (
    Causal,
    KeepsPadding,
    LanguageModel,
    derive,
    labels_count_at_padding,
    signed_as,
)
from fastformer.integrations.fused_loss import Seq2SeqLoss
from fastformer.integrations.hugging_face import (
    RETURNS_TUPLES,
    add_and_norm,
    entered,
    entered_memory,
    fused_feed_forward,
    gives_tuple,
    keeps_recording,
    know,
    packing,
)
from fastformer.integrations.padding import Owner, PackingStack
from fastformer.integrations.parts import know_parts
from fastformer.integrations.swap import Swap
from fastformer.nn.guards import is_written_as_known
from fastformer.nn.padding import Padding, read_padding

know(bart)
know_parts(bart.BartClassificationHead)


class _Layer(nn.Module):
    """What the layers have: numbers for dropouts, fc1 and fc2, a norm behind each sub-layer."""

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
        return add_and_norm(x, residual, self._acting(self.dropout), norm)

    def _feed_forward(self, x: Tensor) -> Tensor:
        dropout_p, activation = self._acting(self.activation_dropout), self.activation_fn
        out = fused_feed_forward(x, self.fc1, activation, self.fc2, dropout_p)
        if out is None:
            out = self.fc2(F.dropout(activation(self.fc1(x)), dropout_p))
        return self._join(out, x, self.final_layer_norm)

    def _acting(self, dropout_p: float) -> float:
        return dropout_p if self.training else 0.0


class EncoderLayer(_Layer):
    """An encoder layer, of packed tokens or of a padded batch."""

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """See transformers."""
        is_other = args or not is_written_as_known(type(self))
        if is_other or _asks_for_weights(kwargs) or hidden_states.dtype == torch.float16:  # which it clamps
            return super().forward(hidden_states, attention_mask, *args, **kwargs)
        x, mask = entered(hidden_states, attention_mask)
        attended = _attended(self.self_attn, x, attention_mask=mask, **kwargs)
        x = self._feed_forward(self._join(attended, x, self.self_attn_layer_norm))
        return (x,) if RETURNS_TUPLES else x


class DecoderLayer(_Layer):
    """A decoder layer, with or without a cache, of packed tokens or of a padded batch."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = True,
        **kwargs: Any,
    ) -> Any:
        """See transformers."""
        names = {
            "attention_mask": attention_mask, "encoder_hidden_states": encoder_hidden_states,
            "encoder_attention_mask": encoder_attention_mask, "past_key_values": past_key_values,
            "use_cache": use_cache,
        }  # fmt: skip
        is_other = kwargs.get("cross_attn_layer_head_mask") is not None or not is_written_as_known(type(self))
        if is_other or _asks_for_weights(kwargs):
            return super().forward(hidden_states, **names, **kwargs)
        kwargs.pop("cross_attn_layer_head_mask", None)
        x, mask = entered(hidden_states, attention_mask)
        options = {"past_key_values": past_key_values, **kwargs}
        attended = _attended(self.self_attn, x, attention_mask=mask, **options)
        x = self._join(attended, x, self.self_attn_layer_norm)
        if encoder_hidden_states is not None:
            with entered_memory(encoder_hidden_states, encoder_attention_mask) as (memory, mask):
                options |= {"key_value_states": memory, "attention_mask": mask}
                attended = _attended(self.encoder_attn, x, **options)
            x = self._join(attended, x, self.encoder_attn_layer_norm)
        x = self._feed_forward(x)
        return (x,) if RETURNS_TUPLES else x


def _attended(attention: Any, x: Tensor, **options: Any) -> Tensor:
    """What an attention gives. Hooks see how it is called, so it is as transformers does: by name, before 5."""
    out = attention(hidden_states=x, **options) if RETURNS_TUPLES else attention(x, **options)
    attended: Tensor = out[0]
    return attended


def _asks_for_weights(kwargs: dict[str, Any]) -> bool:
    return bool(kwargs.get("output_attentions")) or kwargs.get("layer_head_mask") is not None


class Encoder(PackingStack):
    """An encoder whose layers see packed tokens. What comes out is zeros at padding.

    Attributes:
        kinds: of its layers and of their attentions, exactly.
    """

    kinds: ClassVar[tuple[type[nn.Module], ...]]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """See transformers."""
        asked = kwargs.get("output_hidden_states") or kwargs.get("output_attentions")
        if asked or not self._may_pack():
            return super().forward(*args, **kwargs)
        with packing() as run:
            out = super().forward(*args, **kwargs | {"return_dict": True})
        if run.padding is not None:
            out.last_hidden_state = run.leave(out.last_hidden_state)
        return out.to_tuple() if gives_tuple(self.config, kwargs) else out

    def _may_pack(self) -> bool:
        config: Any = self.config
        asked = (config.output_hidden_states, config.output_attentions)
        return is_led(self) and not any(asked) and self.may_leave_out()

    def has_known_layers(self) -> bool:
        """See `PackingStack`."""
        return all(map(self._is_ours, self._layers()))

    def _layers(self) -> Sequence[nn.Module]:
        layers: Any = self.layers
        return list(layers)

    def _is_ours(self, layer: Any) -> bool:
        return are_of(self.kinds, layer, "self_attn")


_MEMORY = ("encoder_hidden_states", "encoder_attention_mask")


class Decoder(Causal):
    """A decoder whose layers see packed tokens, of its own and of the encoder's. Out come zeros at its padding.

    Attributes:
        kinds: of its layers and of their attentions, exactly.
    """

    kinds: ClassVar[tuple[type[nn.Module], ...]]
    layers: Any

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """See transformers."""
        own = {name: value for name, value in kwargs.items() if name not in _MEMORY}
        padding = None if self._fills_cache(kwargs) else self._padding(args, own)
        if padding is None:
            return super().forward(*args, **kwargs)
        memory, mask = (kwargs.get(name) for name in _MEMORY)
        memory_padding = None if memory is None else _memory_padding(memory, mask, padding.shape[0])
        if memory is not None and memory_padding is None:
            return super().forward(*args, **kwargs)
        with packing(padding, memory=memory_padding) as run:
            out = super().forward(*args, **kwargs | {"return_dict": True})
        out.last_hidden_state = run.leave(out.last_hidden_state)
        return out.to_tuple() if gives_tuple(self.config, kwargs) else out

    def _layers(self) -> Sequence[nn.Module]:
        return list(self.layers)

    def _is_ours(self, layer: Any) -> bool:
        return are_of(self.kinds, layer, "self_attn", "encoder_attn")


def are_of(kinds: Sequence[type[nn.Module]], layer: nn.Module, *names: str) -> bool:
    """Whether a layer and what it has under these names are exactly of one of these classes."""
    return type(layer) in kinds and all(type(getattr(layer, name, None)) in kinds for name in names)


def _memory_padding(memory: Any, mask: Any, batch: int) -> Padding | None:
    """Where an encoder's output (batch, seqlen, dim) is padding; None where it is another's, or a row has no tokens."""
    if type(memory) is not Tensor or memory.dim() != 3 or memory.shape[0] != batch:
        return None
    if mask is not None and (type(mask) is not Tensor or mask.shape != memory.shape[:2]):
        return None
    padding = read_padding(memory, None if mask is None else mask == 0, True)
    # Before transformers 5 such a row attends to everything, and to nothing where it is packed.
    return None if padding is None or not bool(padding.layout.read_seqlens().all()) else padding


_NAMES_BEFORE_MASK = 3  # input_ids, attention_mask, decoder_input_ids


class Seq2SeqModel(LanguageModel):
    """A language model that keeps its decoder from packing where labels count at its padding, or it ends with some."""

    def _sees_padding(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        mask, labels = kwargs.get("decoder_attention_mask"), kwargs.get("labels")
        if len(args) > _NAMES_BEFORE_MASK:
            return True
        if labels is None and isinstance(mask, Tensor) and mask.dim() == 2:
            # Who generates goes on from the last logits.
            return not bool(mask[:, -1:].all())
        return labels_count_at_padding(mask, labels)


def _encoding(name: str) -> Any:
    """A method of transformers' that `generate` calls to run the encoder, whose padding it masks in each step.

    It is all of `generate` that may leave padding out: the rest also calls code of yours, which may read an encoder.
    """

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.granting(lambda: True):
            return getattr(super(Seq2SeqModel, self), name)(*args, **kwargs)

    return method


# As versions of transformers call it.
for _name in ("_prepare_encoder_decoder_kwargs_for_generation", "_prepare_text_encoder_decoder_kwargs_for_generation"):
    if hasattr(GenerationMixin, _name):
        setattr(Seq2SeqModel, _name, _encoding(_name))


class BartEncoderLayer(EncoderLayer, bart.BartEncoderLayer):
    """Fused."""


class BartDecoderLayer(DecoderLayer, bart.BartDecoderLayer):
    """Fused."""


@keeps_recording
@signed_as(bart.BartEncoder)
class BartEncoder(Encoder, bart.BartEncoder):
    """Packed."""

    kinds = (BartEncoderLayer, bart.BartAttention)


@keeps_recording
@signed_as(bart.BartDecoder)
class BartDecoder(Decoder, bart.BartDecoder):
    """Packed."""

    kinds = (BartDecoderLayer, bart.BartAttention)


BartForConditionalGeneration = derive(__name__, bart.BartForConditionalGeneration, Seq2SeqModel)
BartWithLoss = derive(__name__, bart.BartForConditionalGeneration, Seq2SeqModel, Seq2SeqLoss, name="BartWithLoss")
BartForCausalLM = derive(__name__, bart.BartForCausalLM, KeepsPadding)
BartForQuestionAnswering = derive(__name__, bart.BartForQuestionAnswering, KeepsPadding)
BartForSequenceClassification = derive(__name__, bart.BartForSequenceClassification, KeepsPadding)


BartModel = derive(__name__, bart.BartModel, Owner)


SWAPS = (
    Swap(bart.BartModel, BartModel),
    Swap(bart.BartEncoderLayer, BartEncoderLayer),
    Swap(bart.BartDecoderLayer, BartDecoderLayer),
    Swap(bart.BartEncoder, BartEncoder),
    Swap(bart.BartDecoder, BartDecoder),
    Swap(bart.BartForConditionalGeneration, BartForConditionalGeneration),
    Swap(bart.BartForCausalLM, BartForCausalLM),
    Swap(bart.BartForQuestionAnswering, BartForQuestionAnswering),
    Swap(bart.BartForSequenceClassification, BartForSequenceClassification),
)
LOSS_SWAPS = (Swap(bart.BartForConditionalGeneration, BartWithLoss),)
