"""Processors edit the logits before a token is chosen; stopping criteria end rows (`make_stop`).

A processor has the interface of Hugging Face's: `processor(input_ids, scores) -> scores`, with the ids that the decoder
has read, (rows, length), its start token or prompt included, and the logits of the next token, (rows, vocab_size) fp32.
For beams by transformers' rules, the scores are log-probabilities, as in transformers. The result may have another
floating-point or integer dtype, or be a NumPy array: it is cast. The rows are those of one request: its beams, or its
samples. You can use Hugging Face's processors, and any function. The processors of this module treat each row
independently, and are called with the rows of several requests that have the same settings.

All tokens before the next one count as repeated, as in transformers, vLLM and TGI: the prompt, or the start token of a
decoder and the ids after it.

Processors get logits that a model in 16 bits has rounded to 16 bits. A request without processors chooses among sums
that aren't rounded. If two tokens are nearly equal, the choice may therefore change even with a processor that changes
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastformer.generation.config import GenerationConfig, Processor, StoppingCriterion
from fastformer.generation.search import Stop


class RowWise:
    """A processor that processes each row independently. Equal objects process rows equally."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Returns the edited scores; see the module."""
        raise NotImplementedError


class AtOneLength(RowWise):
    """A `RowWise` that acts only at one position: when `position` ids are before the next token."""

    position: int


def make_processors(
    config: GenerationConfig,
    eos: Sequence[int],
    prompt_length: int,
    limit: int,
    *,
    min_tokens: int | None = None,
    has_shortlist: bool = False,
) -> tuple[Processor, ...]:
    """Makes the processors of a config; the user's own come last.

    Args:
        config: the options of the search.
        eos: the ids that end a row.
        prompt_length: the number of ids before the first new one.
        limit: the most new tokens.
        min_tokens: the number of new tokens before which a row can't end; None: the config's number for this prompt.
        has_shortlist: whether the engine itself restricts tokens to the config's shortlist.
    """
    min_tokens = config.least_tokens(prompt_length) if min_tokens is None else min_tokens
    processors: list[Processor] = []
    if config.shortlist and not has_shortlist:
        processors.append(Shortlist(tuple(sorted({*config.shortlist, *eos}))))
    if config.repetition_penalty != 1.0:
        processors.append(RepetitionPenalty(config.repetition_penalty))
    if config.no_repeat_ngram_size:
        processors.append(NoRepeatNgrams(config.no_repeat_ngram_size))
    # As in transformers, a bad word that is only an id of eos forbids nothing.
    words = [word for word in config.bad_words_ids if len(word) > 1 or word[0] not in eos]
    if words:
        processors.append(BadWords(tuple(words)))
    if config.suppress_tokens:
        processors.append(SuppressTokens(config.suppress_tokens))
    if min_tokens and eos:
        processors.append(MinNewTokens(min_tokens, prompt_length, tuple(eos)))
    if processors and eos:
        processors.append(EndWhereNothingFollows(tuple(eos)))
    if config.forced_bos_token_id is not None:
        processors.append(ForcedToken(config.forced_bos_token_id, 1))  # as in transformers, after exactly one id
    if config.forced_eos_token_id is not None:
        processors.append(ForcedToken(config.forced_eos_token_id, prompt_length + limit - 1))
    processors += _own(config)
    if processors and config.beam_rules == "transformers" and config.num_beams > 1:
        processors.insert(1 if isinstance(processors[0], Shortlist) else 0, LogProbs())
    return tuple(processors)


def _own(config: GenerationConfig) -> Sequence[Processor]:
    given = config.logits_processor
    return (given,) if callable(given) else given


@dataclass(frozen=True)
class LogProbs(RowWise):
    """A processor that turns logits into log-probabilities."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.log_softmax(-1)


@dataclass(frozen=True)
class RepetitionPenalty(RowWise):
    """Divides the positive and multiplies the negative scores of tokens that have occurred.

    Source: Keskar et al. 2019, "CTRL", section 4.1.
    """

    penalty: float

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        seen = scores.gather(1, input_ids)
        return scores.scatter(1, input_ids, torch.where(seen > 0, seen / self.penalty, seen * self.penalty))


@dataclass(frozen=True)
class CountPenalties(RowWise):
    """Subtracts penalties from the scores of tokens that have occurred, as OpenAI's API does.

    The first `ignored` ids don't count. A token that occurred n times loses frequency * n + presence.
    """

    presence: float
    frequency: float
    ignored: int

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        history = input_ids[:, self.ignored :]
        counts = torch.zeros_like(scores).scatter_add_(1, history, torch.ones_like(history, dtype=scores.dtype))
        return scores - (self.frequency * counts + self.presence * (counts > 0))


@dataclass(frozen=True)
class TokenBias(RowWise):
    """Adds a number to the scores of some tokens.

    Attributes:
        biases: pairs of an id and its number.
    """

    biases: tuple[tuple[int, float], ...]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        ids = torch.tensor([i for i, _ in self.biases], device=scores.device)
        return scores.index_add(1, ids, scores.new_tensor([[bias for _, bias in self.biases]]).expand(len(scores), -1))


@dataclass(frozen=True)
class LeastShare(RowWise):
    """Forbids tokens that are less likely than a share of the likeliest token's probability: min_p.

    Source: Nguyen et al. 2024, "Turning Up the Heat: Min-p Sampling", section 3.

    Attributes:
        share: the share, between 0 and 1.
        temperature: the temperature at which the probabilities count.
    """

    share: float
    temperature: float = 1.0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        least = scores.amax(-1, keepdim=True) + self.temperature * math.log(self.share)
        return scores.masked_fill(scores < least, -torch.inf)


@dataclass(frozen=True)
class NoRepeatNgrams(RowWise):
    """Forbids each token that would repeat an n-gram."""

    size: int

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        length = input_ids.shape[1]
        if length < self.size:
            return scores
        grams = input_ids.unfold(1, self.size, 1)  # (rows, count, size)
        repeats = (grams[:, :, :-1] == input_ids[:, None, length - self.size + 1 :]).all(-1)
        banned = torch.zeros_like(scores, dtype=torch.long).scatter_add_(1, grams[:, :, -1], repeats.long())
        return scores.masked_fill(banned > 0, -torch.inf)


@dataclass(frozen=True)
class BadWords(RowWise):
    """Forbids the last token of each sequence if the other tokens of the sequence are right before it."""

    sequences: Sequence[Sequence[int]]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
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
        return scores.index_fill(1, torch.tensor(self.ids, device=scores.device), -torch.inf)


@dataclass(frozen=True)
class Shortlist(RowWise):
    """Forbids all tokens except the given ones."""

    ids: tuple[int, ...]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        index = torch.tensor(self.ids, device=scores.device)
        return torch.full_like(scores, -torch.inf).index_copy(1, index, scores[:, index])


@dataclass(frozen=True)
class MinNewTokens(RowWise):
    """Forbids the ids that end a row before a minimum number of new tokens."""

    count: int
    prompt_length: int
    eos: tuple[int, ...]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] - self.prompt_length >= self.count:
            return scores
        return scores.index_fill(1, torch.tensor(self.eos, device=scores.device), -torch.inf)


@dataclass(frozen=True)
class EndWhereNothingFollows(RowWise):
    """Allows EOS in rows in which every token is forbidden."""

    eos: tuple[int, ...]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        mute = (scores == -torch.inf).all(-1)
        scores = scores.clone()
        scores[mute, self.eos[0]] = 0.0
        return scores


@dataclass(frozen=True)
class ForcedToken(AtOneLength):
    """Allows only one token, at one position."""

    token: int
    position: int

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] != self.position:
            return scores
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self.token] = 0.0
        return forced


@dataclass(frozen=True)
class SuppressTokensAt(AtOneLength):
    """Forbids some tokens, at one position."""

    ids: tuple[int, ...]
    position: int

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] != self.position:
            return scores
        return scores.index_fill(1, torch.tensor(self.ids, device=scores.device), -torch.inf)


# A search that an engine runs in C++ replaces these processors as long as some token is allowed: it forbids tokens, and
# normalises the rest to log-probabilities.
SEARCH_RULES = (LogProbs, SuppressTokens, MinNewTokens, EndWhereNothingFollows)


def does_search(config: GenerationConfig, processors: Sequence[Processor]) -> bool:
    """Returns whether a C++ search does the same as a request's processors, except at the steps of an `AtOneLength`."""
    if any(isinstance(one, SEARCH_RULES) for one in _own(config)):  # the search knows only those of the config
        return False
    return all(isinstance(one, (*SEARCH_RULES, AtOneLength)) for one in processors)


def make_stop(
    criteria: StoppingCriterion | Sequence[StoppingCriterion], prompt: Sequence[int], device: torch.device
) -> Stop | None:
    """Makes a function that applies the caller's criteria to rows of new tokens; None if there are no criteria.

    A criterion has the interface of Hugging Face's: `criterion(input_ids, scores)` with the ids of some rows of one
    request, (rows, length), the start token or the prompt and the latest token included. The scores are None. It
    returns whether each row ends, as (rows,) booleans, or whether all rows end, as one boolean. A row ends if any
    criterion ends it. A beam that a criterion ends counts as one that ends in EOS.

    Args:
        criteria: see above.
        prompt: the ids before the first new one.
        device: the device of the criteria's tensors.
    """
    functions = [criteria] if callable(criteria) else criteria
    if not functions:
        return None
    before = list(prompt)

    def stop(rows: Sequence[Sequence[int]]) -> list[bool]:
        input_ids = torch.tensor([[*before, *row] for row in rows], dtype=torch.long, device=device)
        ends = [False] * len(rows)
        for criterion in functions:
            ended = _checked(criterion(input_ids, None), len(rows), criterion)
            ends = [one or other for one, other in zip(ends, ended, strict=True)]
        return ends

    return stop


def any_of(*stops: Stop | None) -> Stop | None:
    """Combines functions into one that ends a row if any of them does. Returns None if all of them are None."""
    given = [stop for stop in stops if stop is not None]
    if len(given) < 2:
        return given[0] if given else None
    return lambda rows: [any(ends) for ends in zip(*(stop(rows) for stop in given), strict=True)]


def _checked(ends: Any, count: int, criterion: object) -> list[bool]:
    if isinstance(ends, bool):
        return [ends] * count
    values = ends.tolist() if isinstance(ends, Tensor) or hasattr(ends, "tolist") else ends
    if isinstance(values, bool):
        return [values] * count
    if isinstance(values, list) and len(values) == count and all(isinstance(value, bool) for value in values):
        return values
    name = getattr(criterion, "__name__", type(criterion).__name__)
    raise ValueError(
        f"expected a stopping criterion to return a boolean, or {count} of them, got {ends!r:.60} from {name}"
    )
