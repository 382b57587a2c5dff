"""What happens to the logits between the model and the choice.

A processor is called as Hugging Face's are: `processor(input_ids, scores) -> scores`, with the ids that the decoder has
behind it, (rows, length), its start token or prompt included, and the logits of what may follow, (rows, vocab_size)
fp32. The rows are those of one request: its beams, or its samples. Theirs work here, and so does any function. Those of
this module look at each row alone, and are given the rows of several requests that ask for the same at once.

The logits of a model in 16 bits are rounded to these, while a request without processors chooses among sums that are
not: of two nearly equal tokens, a processor that changes nothing may see the other one chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fastformer.generation.settings import GenerationSettings

Processor: TypeAlias = Callable[[Tensor, Tensor], Tensor]


class RowWise:
    """A processor that looks at each row alone; two that are equal do the same."""


def make_processors(
    settings: GenerationSettings,
    eos: Sequence[int],
    prompt_length: int,
    limit: int,
    *,
    has_shortlist: bool = False,
) -> tuple[Processor, ...]:
    """The processors that the settings ask for, the user's own last.

    Args:
        settings: what was asked for.
        eos: the ids that end a row.
        prompt_length: the ids that stand before the first new one.
        limit: the most new tokens.
        has_shortlist: the engine itself keeps to the settings' shortlist.
    """
    found: list[Processor] = []
    if settings.shortlist and not has_shortlist:
        found.append(Shortlist(tuple(sorted({*settings.shortlist, *eos}))))
    if settings.repetition_penalty != 1.0:
        found.append(RepetitionPenalty(settings.repetition_penalty, prompt_length))
    if settings.no_repeat_ngram_size:
        found.append(NoRepeatNgrams(settings.no_repeat_ngram_size, prompt_length))
    if settings.bad_words_ids:
        found.append(BadWords(settings.bad_words_ids))
    if settings.suppress_tokens:
        found.append(SuppressTokens(settings.suppress_tokens))
    if settings.min_new_tokens:
        found.append(MinNewTokens(settings.min_new_tokens, prompt_length, tuple(eos)))
    if found:
        found.append(EndWhereNothingFollows(tuple(eos)))
    if settings.forced_bos_token_id is not None:
        found.append(ForcedToken(settings.forced_bos_token_id, prompt_length))
    if settings.forced_eos_token_id is not None:
        found.append(ForcedToken(settings.forced_eos_token_id, prompt_length + limit - 1))
    own = settings.logits_processor
    return (*found, own) if callable(own) else (*found, *own)


@dataclass(frozen=True)
class RepetitionPenalty(RowWise):
    """Divides the positive and multiplies the negative logits of new tokens that were there.

    As Keskar et al. 2019, "CTRL", section 4.1.
    """

    penalty: float
    prompt_length: int

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """See the module."""
        history = input_ids[:, self.prompt_length :]
        seen = scores.gather(1, history)
        return scores.scatter(1, history, torch.where(seen > 0, seen / self.penalty, seen * self.penalty))


@dataclass(frozen=True)
class NoRepeatNgrams(RowWise):
    """Forbids each token that would complete an n-gram which the new tokens have already."""

    size: int
    prompt_length: int

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """See the module."""
        history = input_ids[:, self.prompt_length :]
        if history.shape[1] < self.size:
            return scores
        grams = history.unfold(1, self.size, 1)  # (rows, count, size)
        repeats = (grams[:, :, :-1] == history[:, None, history.shape[1] - self.size + 1 :]).all(-1)
        banned = torch.zeros_like(scores, dtype=torch.long).scatter_add_(1, grams[:, :, -1], repeats.long())
        return scores.masked_fill(banned > 0, -torch.inf)


@dataclass(frozen=True)
class BadWords(RowWise):
    """Forbids the last token of each of some sequences where the others stand before it."""

    sequences: Sequence[Sequence[int]]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """See the module."""
        scores = scores.clone()
        for sequence in self.sequences:
            before = len(sequence) - 1
            if before > input_ids.shape[1]:
                continue
            start = input_ids.new_tensor(sequence[:-1])
            matches = (input_ids[:, input_ids.shape[1] - before :] == start).all(-1)
            scores[matches, sequence[-1]] = -torch.inf
        return scores


@dataclass(frozen=True)
class SuppressTokens(RowWise):
    """Forbids tokens."""

    ids: Sequence[int]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """See the module."""
        return scores.index_fill(1, torch.tensor(self.ids, device=scores.device), -torch.inf)


@dataclass(frozen=True)
class Shortlist(RowWise):
    """Forbids all tokens but some."""

    ids: tuple[int, ...]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """See the module."""
        index = torch.tensor(self.ids, device=scores.device)
        return torch.full_like(scores, -torch.inf).index_copy(1, index, scores[:, index])


@dataclass(frozen=True)
class MinNewTokens(RowWise):
    """Forbids the end before so many new tokens."""

    count: int
    prompt_length: int
    eos: tuple[int, ...]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """See the module."""
        if input_ids.shape[1] - self.prompt_length >= self.count:
            return scores
        return scores.index_fill(1, torch.tensor(self.eos, device=scores.device), -torch.inf)


@dataclass(frozen=True)
class EndWhereNothingFollows(RowWise):
    """Lets a row end that has nothing else left to say."""

    eos: tuple[int, ...]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """See the module."""
        mute = (scores == -torch.inf).all(-1)
        scores = scores.clone()
        scores[mute, self.eos[0]] = 0.0
        return scores


@dataclass(frozen=True)
class ForcedToken(RowWise):
    """Allows one token alone where so many ids stand before it."""

    token: int
    position: int

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """See the module."""
        if input_ids.shape[1] != self.position:
            return scores
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self.token] = 0.0
        return forced


# What the searches in C++ are told, and an engine that runs them sees to, as long as there is something left to say.
SEARCH_RULES = (SuppressTokens, MinNewTokens, EndWhereNothingFollows)
