"""transformers' T5: norms and the FFN fused, attention with its position bias led to ours.

Its batches stay padded: the bias goes by where tokens stand. The gated FFN runs as transformers has it: our op wants
its two first weights as one, which they aren't.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.models.t5 import modeling_t5 as t5

from fastformer.integrations.hugging_face import fused_feed_forward, plain_dropout
from fastformer.integrations.rms import RMSNorm
from fastformer.integrations.swap import Swap


class T5LayerNorm(RMSNorm, t5.T5LayerNorm):
    """Fused."""


class T5DenseActDense(t5.T5DenseActDense):
    """One op."""

    wi: Any
    wo: Any

    def forward(self, hidden_states: Tensor) -> Tensor:
        """See transformers."""
        dropout_p = plain_dropout(self.dropout)
        weights = (getattr(self.wi, "weight", None), getattr(self.wo, "weight", None))
        dtypes = {weight.dtype for weight in weights if isinstance(weight, Tensor)}
        # In half precision the second weight may be kept in fp32.
        if dropout_p is not None and len(dtypes) == 1 and torch.float16 not in dtypes | {hidden_states.dtype}:
            out = fused_feed_forward(hidden_states, self.wi, self.act, self.wo, dropout_p)
            if out is not None:
                return out
        return super().forward(hidden_states)


SWAPS = (
    Swap(t5.T5LayerNorm, T5LayerNorm),
    Swap(t5.T5DenseActDense, T5DenseActDense),
)
