"""The base of the models that predict the next token: logits, the best tokens and the loss from hidden states."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastformer.models.common import chosen_log_probs
from fastformer.models.pretrained import PretrainedModel
from fastformer.nn.linear import linear
from fastformer.ops._common import soft_capped
from fastformer.ops.linear_cross_entropy import linear_cross_entropy
from fastformer.ops.linear_topk import TopK, best_of_logits, linear_topk


class NextTokenModel(PretrainedModel):
    """A model whose `decode` returns hidden states, which a last projection maps to logits of the next token."""

    @property
    def output_weight(self) -> Tensor:
        """The weight of the LM head, (vocab_size, d_model)."""
        raise NotImplementedError

    @property
    def softcap(self) -> float:
        """The cap of the logits; 0: no cap."""
        return 0.0

    def logits(self, hidden: Tensor) -> Tensor:
        """Computes logits (..., vocab_size) of hidden (..., d_model), scaled, with a bias or capped as configured."""
        return soft_capped(linear(*self._last_layer(hidden)), self.softcap)

    def top_tokens(self, hidden: Tensor, k: int, *, log_probs: bool = True) -> TopK:
        """Returns each position's k best next tokens with log-probabilities (or logits), without holding all logits.

        If a subclass or an instance overrides `logits`, the tokens are chosen by its results.

        Args:
            hidden: (..., d_model), from `decode`.
            k: the number of tokens, from 1 to vocab_size.
            log_probs: return log-probabilities instead of logits, which are cheaper.

        Returns:
            (values (..., k), fp32 or fp64, downward; indices (..., k), int64). See `ops.linear_topk`.

        Raises:
            ValueError: a k that is not an integer from 1 to vocab_size.
        """
        if self._has_own_logits():
            return best_of_logits(self.logits(hidden), k, log_probs=log_probs)
        return linear_topk(*self._last_product(hidden), k, log_probs=log_probs, softcap=self.softcap)

    def token_log_probs(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Computes the log-probability of a given next token at each position, without holding all logits in memory.

        If a subclass or an instance overrides `logits`, its results are used.

        Args:
            hidden: (..., d_model), from `decode`.
            tokens: (...) ids.

        Returns:
            (...), fp32 (fp64 for a model in fp64).
        """
        if self._has_own_logits():
            return chosen_log_probs(self.logits, hidden, tokens)
        return self._cross_entropy(hidden, tokens, reduction="none").neg()

    def _has_own_logits(self) -> bool:
        return type(self).logits is not NextTokenModel.logits or "logits" in self.__dict__

    def _cross_entropy(self, hidden: Tensor, tokens: Tensor, **options: Any) -> Tensor:
        return linear_cross_entropy(*self._last_product(hidden), tokens, softcap=self.softcap, **options)

    def _last_layer(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns the input, the weight and the bias of the last projection."""
        return hidden, self.output_weight, None

    def _last_product(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Returns two factors whose product is the logits; a bias becomes one more column, multiplied by one."""
        hidden, weight, bias = self._last_layer(hidden)
        if bias is None:
            return hidden, weight
        bias_columns = F.pad(bias[:, None], (0, 7))  # eight columns, so that rows stay aligned
        ones = F.pad(hidden.new_ones(1), (0, 7)).expand(*hidden.shape[:-1], 8)
        return torch.cat((hidden, ones), -1), torch.cat((weight, bias_columns), 1)
