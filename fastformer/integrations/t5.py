"""transformers' T5: norms and the FFN fused, attention with its position bias led to ours, a packed encoder.

The bias goes by where tokens stand, so attention alone is of the padded batch. The decoder stays padded: it keeps a
cache in training, too. The gated FFN runs as transformers has it: our op wants its two first weights as one, which they
aren't.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.models.t5 import modeling_t5 as t5

from fastformer.integrations.attention_interface import attend_padded
from fastformer.integrations.bart import Encoder
from fastformer.integrations.causal import EncoderHead, TokenLabels, signed_as
from fastformer.integrations.hugging_face import (
    RETURNS_TUPLES,
    entered,
    fused_feed_forward,
    going_on,
    keeping_padding,
    keeps_recording,
    know,
    plain_dropout,
)
from fastformer.integrations.rms import RMSNorm
from fastformer.integrations.swap import Swap
from fastformer.nn.fusing import is_traced, is_written_as_known

know(t5)


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
    """Of packed tokens, too, which are padded again between the projections."""

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
        if run is None or (padding := run.padding) is None:
            return super().forward(hidden_states, mask, key_value_states, position_bias, past_key_values, **kwargs)
        q, k, v = (
            padding.unpack(projection(hidden_states)[0]).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
            for projection in (self.q, self.k, self.v)
        )
        if position_bias is None:
            seqlen = padding.shape[1]
            # The first block's is all blocks', and zero where it has none.
            position_bias = (
                self.compute_bias(seqlen, seqlen, device=q.device)
                if self.has_relative_attention_bias
                else q.new_zeros(1, self.n_heads, seqlen, seqlen)
            )
        dropout_p = self.dropout if self.training else 0.0
        out, _ = attend_padded(
            self, q, k, v, mask, dropout_p, self.scaling, False, position_bias=position_bias, **kwargs
        )
        return self.o(padding.pack(out.flatten(2))[None]), position_bias, None


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
class T5Stack(Encoder, t5.T5Stack):
    """Packed where it is an encoder."""

    block: Any

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """See transformers."""
        mask = args[1] if len(args) > 1 else kwargs.get("attention_mask")
        if is_traced() or mask is None or self.is_decoder or _has_tokens(mask):
            return super().forward(*args, **kwargs)
        with keeping_padding():
            return super().forward(*args, **kwargs)

    def _is_ours(self) -> bool:
        attends = [(block, block.layer[0], block.layer[0].SelfAttention) for block in self.block]
        kinds = (T5Block, t5.T5LayerSelfAttention, T5Attention)
        return not self.is_decoder and all(tuple(map(type, each)) == kinds for each in attends)


@keeps_recording
@signed_as(t5.T5ForTokenClassification)
class T5ForTokenClassification(EncoderHead, TokenLabels, t5.T5ForTokenClassification):
    """Packed where no label counts at padding."""


SWAPS: tuple[Swap, ...] = (
    Swap(t5.T5LayerNorm, T5LayerNorm),
    Swap(t5.T5DenseActDense, T5DenseActDense),
)
if not RETURNS_TUPLES:  # before 5 attention is written out in the model
    SWAPS += (
        Swap(t5.T5Attention, T5Attention),
        Swap(t5.T5Block, T5Block),
        Swap(t5.T5Stack, T5Stack),
        Swap(t5.T5ForTokenClassification, T5ForTokenClassification),
    )
