"""What happens to the logits between the model and the choice. Pure functions of tensors, no host sync."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Processing:
    """The settings of a search's scores; the defaults change nothing.

    Attributes:
        min_new_tokens: no EOS before so many tokens.
        repetition_penalty: logits of tokens that were there are divided (positive) or multiplied (negative) by it
            (Keskar et al. 2019, "CTRL", section 4.1).
        no_repeat_ngram_size: no n-gram comes twice; 0 = off. A row that has nothing else left to say ends.
    """

    min_new_tokens: int = 0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0

    def __call__(self, logits: Tensor, history: Tensor, length: int, eos_id: int) -> Tensor:
        """Applies them.

        Args:
            logits: (rows, vocab_size) fp32.
            history: (rows, length) the tokens chosen so far.
            length: how many.
            eos_id: the id of EOS.
        """
        if self.repetition_penalty != 1.0 and length:
            logits = penalise_repetition(logits, history, self.repetition_penalty)
        if self.no_repeat_ngram_size and length >= self.no_repeat_ngram_size:
            logits = forbid_repeated_ngrams(logits, history, self.no_repeat_ngram_size)
        if length < self.min_new_tokens:
            logits = logits.clone()
            logits[:, eos_id] = -torch.inf
        if self.no_repeat_ngram_size:
            mute = (logits == -torch.inf).all(-1)
            ending = torch.arange(logits.shape[-1], device=logits.device) == eos_id
            logits = logits.masked_fill(mute[:, None] & ending, 0.0)
        return logits


def penalise_repetition(logits: Tensor, history: Tensor, penalty: float) -> Tensor:
    """Divides the positive and multiplies the negative logits of tokens in the history (rows, length)."""
    seen = logits.gather(1, history)
    return logits.scatter(1, history, torch.where(seen > 0, seen / penalty, seen * penalty))


def forbid_repeated_ngrams(logits: Tensor, history: Tensor, size: int) -> Tensor:
    """-inf for each token that would complete an n-gram that the row's history (rows, length) has already."""
    grams = history.unfold(1, size, 1)  # (rows, count, size)
    repeats = (grams[:, :, :-1] == history[:, None, history.shape[1] - size + 1 :]).all(-1)
    banned = torch.zeros_like(logits, dtype=torch.long).scatter_add_(1, grams[:, :, -1], repeats.long())
    return logits.masked_fill(banned > 0, -torch.inf)


def warp(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Temperature, then the top_k best, then the smallest set that holds top_p (Holtzman et al. 2020).

    Args:
        logits: (rows, vocab_size).
        temperature: > 0; below 1 sharpens.
        top_k: 0 = all.
        top_p: 1 = all; the best token always stays.
    """
    logits = logits / temperature
    if 0 < top_k < logits.shape[-1]:
        kth = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if top_p < 1.0:
        ranked, order = logits.sort(dim=-1, descending=True)
        # A token goes when those before it hold top_p already.
        before = ranked.softmax(-1).cumsum(-1).roll(1, dims=-1)
        before[:, 0] = 0.0
        remove = torch.zeros_like(logits, dtype=torch.bool).scatter(1, order, before >= top_p)
        logits = logits.masked_fill(remove, -torch.inf)
    return logits
