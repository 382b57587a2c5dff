"""Greedy decoding, sampling and beam search: each request has a search object, which chooses among the candidates."""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fastformer.generation.config import EarlyStopping
from fastformer.generation.constraints import LateMatcher, Mask, Matcher

NEVER = -math.inf  # the score of a missing hypothesis
_LEAST = math.ulp(0.0)

# Returns for each row of new tokens whether the row ends with its last token; EOS ends rows in any case.
Stop = Callable[[Sequence[Sequence[int]]], Sequence[bool]]


@dataclass(slots=True)
class Hypothesis:
    """The new tokens of a hypothesis, their log-probabilities and its score.

    Attributes:
        tokens: the new tokens, without the ids that the request began with.
        log_probs: the log-probability of each token.
        score: the sum of the log-probabilities; in the results of a beam search divided by the length penalty.
        alternatives: for each token, the likeliest tokens at its position with their log-probabilities, best first, if
            a `RowSearch` has num_alternatives; else empty.
    """

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    score: float = 0.0
    alternatives: list[list[tuple[int, float]]] = field(default_factory=list)


@dataclass(frozen=True)
class Sampling:
    """The options of sampling in a `RowSearch`.

    With `num_samples`, its single row draws the same tokens as row `sample` of num_samples rows.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    sample: int = 0
    num_samples: int | None = None


class Sample(NamedTuple):
    """How a row's next token is sampled: at `uniform`, in [0, 1), of the warped distribution's cumulative sum."""

    temperature: float
    top_k: int
    top_p: float
    uniform: float


def length_penalty(length: int, alpha: float) -> float:
    """Returns ((5 + length) / 6) ** alpha, with EOS in the length (Wu et al. 2016, equation 14; tensor2tensor)."""
    return _power((5.0 + length) / 6.0, alpha)


def _power(length: float, alpha: float) -> float:
    """Returns length ** alpha; as in C, infinity if it is too great for a float. It is never 0, so one can divide."""
    try:
        return float(max(length**alpha, _LEAST))
    except OverflowError:
        return math.inf


class Search(ABC):
    """The hypotheses of one request.

    Attributes:
        limit: the most new tokens.
        num_candidates: the number of candidates that the search needs for each row.
        num_rows: the number of rows in the next step.
        peak_rows: the most rows that the search ever has.
        matchers: the constraints of its rows; None: all tokens are allowed.
        is_sampling: whether `samples` returns a way to sample each row.
    """

    is_sampling = False
    matchers: Sequence[Matcher | LateMatcher] | None = None
    limit: int
    num_candidates: int
    num_rows: int
    peak_rows: int

    @property
    def is_masked(self) -> bool:
        """Whether a row may choose only some tokens next."""
        return self.matchers is not None and any([matcher.is_bound for matcher in self.matchers])

    @abstractmethod
    def last_tokens(self) -> list[int]:
        """Returns the last token of each row. The search has taken a step."""

    @abstractmethod
    def tokens(self, row: int) -> list[int]:
        """Returns the new tokens of a row."""

    def samples(self) -> list[Sample | None] | None:
        """Returns for each row the way to sample its next token; None if no row is sampled."""
        return None

    def fill_masks(self, masks: Mask) -> None:
        """Writes which tokens each row may choose next; see `Matcher.fill`. Only if there are `matchers`."""
        raise NotImplementedError

    @abstractmethod
    def advance(self, ids: Sequence[Sequence[int]], values: Sequence[Sequence[float]], first: int) -> list[int]:
        """Advances the search by the candidates of a step.

        Args:
            ids, values: the candidates of a step for all rows of the batch, best first in each row.
            first: the index of this request's first row.

        Returns:
            For each row that continues, the row that it continues from; an empty list when the search is done.

        Raises:
            ValueError: a value is NaN or infinite.
        """

    @abstractmethod
    def results(self) -> list[Hypothesis]:
        """Returns the hypotheses that were found; before the end, those found so far."""


def bad_numbers() -> ValueError:
    """Returns the error of a search whose candidates can't be ordered."""
    return ValueError(
        "the model gives NaN or infinite logits: its weights are damaged, or too large for this precision (try fp32)"
    )


def _check_numbers(values: Sequence[float]) -> None:
    if not values[0] < math.inf:  # NaN too
        raise bad_numbers()


class RowSearch(Search):
    """Greedy decoding or sampling, with independent rows.

    Args:
        limit: the most new tokens.
        eos: the ids that end a row.
        num_rows: 1, or the number of samples.
        sampling: the options of sampling; None: the best token is chosen.
        make_end: makes for each row a function that takes each new token and returns whether the row ends with it.
        stop: a further criterion that ends rows; None: only EOS ends a row.
        num_alternatives: the number of likeliest tokens to record at each position.
        matcher: the beginning of a constraint for each row; None: tokens are free.

    Attributes:
        matchers: the state of each row's constraint; None: tokens are free.
    """

    def __init__(
        self,
        limit: int,
        eos: frozenset[int],
        num_rows: int = 1,
        sampling: Sampling | None = None,
        make_end: Callable[[], Callable[[int], bool]] | None = None,
        *,
        stop: Stop | None = None,
        num_alternatives: int = 0,
        matcher: Matcher | LateMatcher | None = None,
    ) -> None:
        self.matchers = None if matcher is None else [matcher.copy() for _ in range(num_rows)]
        self.limit, self.eos, self.sampling, self._stop = limit, eos, sampling, stop
        self._noted = num_alternatives
        # The first candidate of a sampled row is the token that was drawn; the best tokens follow it.
        self._first_noted = int(sampling is not None)
        self.num_candidates = max(1, num_alternatives + self._first_noted)
        self._ends = None if make_end is None else [make_end() for _ in range(num_rows)]
        self.num_rows = self.peak_rows = num_rows
        self._rows = [Hypothesis() for _ in range(num_rows)]
        self._alive = list(range(num_rows))
        self._random = None if sampling is None else random.Random(sampling.seed)
        self.is_sampling = sampling is not None

    def last_tokens(self) -> list[int]:
        """Returns the last token of each row that continues."""
        return [self._rows[place].tokens[-1] for place in self._alive]

    def tokens(self, row: int) -> list[int]:
        """Returns the new tokens of a row that continues."""
        return self._rows[self._alive[row]].tokens

    def samples(self) -> list[Sample | None] | None:
        sampling, numbered = self.sampling, self._random
        if sampling is None or numbered is None:
            return None
        # Each sample has its own random number at each step, whichever of the other samples have ended.
        numbers = [numbered.random() for _ in range(sampling.num_samples or len(self._rows))]
        first = sampling.sample
        return [
            Sample(sampling.temperature, sampling.top_k, sampling.top_p, numbers[first + place])
            for place in self._alive
        ]

    def advance(self, ids: Sequence[Sequence[int]], values: Sequence[Sequence[float]], first: int) -> list[int]:
        parents, alive = [], []
        for parent, place in enumerate(self._alive):
            value, row = values[first + parent], self._rows[place]
            _check_numbers(value)
            if value[0] == NEVER:  # every token is forbidden
                if self.matchers is not None:
                    raise ValueError("expected options that leave a token which the constraint allows, got none")
                continue
            token = ids[first + parent][0]
            row.tokens.append(token)
            row.log_probs.append(value[0])
            if self._noted:
                noted = slice(self._first_noted, self._first_noted + self._noted)
                row.alternatives.append([*zip(ids[first + parent][noted], value[noted], strict=True)])
            is_ended = self._ends is not None and self._ends[place](token)
            if self.matchers is not None:
                self.matchers[place].take(token)
                is_ended = is_ended or self.matchers[place].is_complete
            if token not in self.eos and len(row.tokens) < self.limit and not is_ended:
                parents.append(parent)
                alive.append(place)
        if self._stop is not None and alive:
            stops = self._stop([self._rows[place].tokens for place in alive])
            parents = [parent for parent, ends in zip(parents, stops, strict=True) if not ends]
            alive = [place for place, ends in zip(alive, stops, strict=True) if not ends]
        self._alive, self.num_rows = alive, len(alive)
        return parents

    def fill_masks(self, masks: Mask) -> None:
        for place, mask in zip(self._alive, masks, strict=True):
            assert self.matchers is not None
            self.matchers[place].fill(mask)

    def results(self) -> list[Hypothesis]:
        """Returns the hypothesis of each row, in order."""
        for row in self._rows:
            row.score = math.fsum(row.log_probs) if row.tokens else NEVER
        return self._rows


class _Beams:
    """Beams that compete with each other: the live and the finished hypotheses."""

    def __init__(self, width: int, num_return: int) -> None:
        self.width, self.num_return = width, num_return
        self.alive = [Hypothesis()]  # all beams begin equal, so one is enough
        self.finished: list[Hypothesis] = []


class BeamSearch(Search):
    """Beam search as in tensor2tensor: 2 * num_beams candidates a step, finished hypotheses in a separate list.

    A live hypothesis is dropped when it can't beat the num_return-th finished one any more: its score can only fall,
    and the penalty of the longest length improves it the most. The search is done when no live hypothesis is left, or,
    with early_stopping, when num_beams are finished. It is also done at its limit. Hypotheses that are cut there rank
    after the finished ones, whatever their scores.

    With num_groups > 1 it is diverse beam search (Vijayakumar et al. 2018): the groups choose in turn, and a token
    costs `diversity_penalty` for each time that an earlier group has just chosen it. Scores then include the penalty.

    Args:
        limit: the most new tokens.
        eos: the ids that end a hypothesis.
        num_beams: the number of hypotheses that are followed.
        alpha: the exponent of `length_penalty`.
        num_return: the number of results, at most num_beams.
        early_stopping: see above.
        num_groups: the number of groups; it divides num_beams.
        diversity_penalty: see above.
        stop: a further criterion that ends hypotheses; None: only EOS ends a hypothesis.
    """

    def __init__(
        self,
        limit: int,
        eos: frozenset[int],
        num_beams: int,
        *,
        alpha: float = 0.6,
        num_return: int = 1,
        early_stopping: bool = False,
        num_groups: int = 1,
        diversity_penalty: float = 0.0,
        stop: Stop | None = None,
    ) -> None:
        self.limit, self.eos, self.alpha, self.early_stopping = limit, eos, alpha, early_stopping
        self._stop = stop
        self.num_return, self.diversity_penalty = num_return, diversity_penalty
        self.num_rows, self.peak_rows = num_groups, num_beams
        width = num_beams // num_groups
        self._groups = [_Beams(width, min(num_return, width)) for _ in range(num_groups)]
        self._alive = [hypothesis for group in self._groups for hypothesis in group.alive]
        # Enough candidates for `width` of them to continue, whichever of them end.
        self._wanted = self._ending = (1 + len(eos)) * width
        # The penalty applies to tokens of other groups' beams: enough candidates are left without these.
        self.num_candidates = self._wanted + num_beams - width
        self._length = 0
        # The largest penalty, which improves a score below zero the most.
        self._best_penalty = length_penalty(limit if alpha > 0 else 1, alpha)

    def last_tokens(self) -> list[int]:
        """Returns the last token of each beam."""
        return [hypothesis.tokens[-1] for hypothesis in self._alive]

    def tokens(self, row: int) -> list[int]:
        """Returns the new tokens of a beam."""
        return self._alive[row].tokens

    def advance(self, ids: Sequence[Sequence[int]], values: Sequence[Sequence[float]], first: int) -> list[int]:
        self._length += 1
        parents: list[int] = []
        chosen: dict[int, int] = {}
        row = first
        for group in self._groups:
            before = len(group.alive)
            origin = self._advance_group(group, ids, values, row, chosen) if before else []
            parents += [row - first + place for place in origin]
            if len(self._groups) > 1:
                for hypothesis in group.alive:
                    chosen[hypothesis.tokens[-1]] = chosen.get(hypothesis.tokens[-1], 0) + 1
            row += before
        if self._length >= self.limit:
            parents = []
        self._alive = [hypothesis for group in self._groups for hypothesis in group.alive]
        self.num_rows = len(parents)
        return parents

    def _advance_group(
        self,
        group: _Beams,
        ids: Sequence[Sequence[int]],
        values: Sequence[Sequence[float]],
        first: int,
        chosen: dict[int, int],
    ) -> list[int]:
        # Negated, so that an ascending sort puts the best first, and among equals the first beam's lowest id.
        pool: list[tuple[float, int, int, float]] = []
        for beam, hypothesis in enumerate(group.alive):
            score, tokens, row = hypothesis.score, ids[first + beam], values[first + beam]
            _check_numbers(row)
            if not chosen:
                pool += [(-score - value, beam, token, value) for token, value in zip(tokens, row, strict=True)]
                continue
            for token, value in zip(tokens, row, strict=True):
                cost = self.diversity_penalty * chosen.get(token, 0)
                pool.append((-score - value + cost, beam, token, value))
        pool.sort()
        penalty = self._penalty(self._length)
        alive: list[Hypothesis] = []
        origin: list[int] = []
        ended = False
        best = [one for one in pool[: self._wanted] if one[0] < math.inf]
        ends = [token in self.eos for _, _, token, _ in best]
        if self._stop is not None and best:
            stops = self._stop([[*group.alive[beam].tokens, token] for _, beam, token, _ in best])
            ends = [end or stop for end, stop in zip(ends, stops, strict=True)]
        for rank, (negative, beam, token, value) in enumerate(best):
            parent = group.alive[beam]
            if ends[rank]:
                if rank >= self._ending:
                    continue
                score = -negative / penalty
                group.finished.append(Hypothesis([*parent.tokens, token], [*parent.log_probs, value], score))
                ended = True
            elif len(alive) < group.width:
                alive.append(Hypothesis([*parent.tokens, token], [*parent.log_probs, value], -negative))
                origin.append(beam)
        group.alive = alive
        if ended:
            group.finished.sort(key=lambda hypothesis: -hypothesis.score)
            del group.finished[group.width :]
        self._drop_hopeless(group)
        return origin[: len(group.alive)]

    def _drop_hopeless(self, group: _Beams) -> None:
        """Drops the live hypotheses of a group that can't become results.

        With a single group, its worst hypotheses may be dropped alone: their successors rank below those of all other
        hypotheses, whose results don't change. With several groups, the diversity penalty needs their tokens.
        """
        if self._is_done(group):
            group.alive.clear()
        while len(self._groups) == 1 and group.alive and self._is_hopeless(group, group.alive[-1].score):
            group.alive.pop()

    def _penalty(self, length: int) -> float:
        return length_penalty(length, self.alpha)

    def _is_done(self, group: _Beams) -> bool:
        if self.early_stopping:
            return len(group.finished) == group.width
        return bool(group.alive) and self._is_hopeless(group, group.alive[0].score)

    def _is_hopeless(self, group: _Beams, score: float) -> bool:
        """Returns whether no continuation of a hypothesis with this score can be among the results."""
        if self.early_stopping or len(group.finished) < group.num_return:
            return False
        return group.finished[group.num_return - 1].score >= score / self._best_penalty

    def results(self) -> list[Hypothesis]:
        """Returns the finished hypotheses, best first, then the cut ones, best first; at most num_return."""
        finished = [hypothesis for group in self._groups for hypothesis in group.finished]
        penalty = length_penalty(self._length, self.alpha)
        cut = [Hypothesis(h.tokens, h.log_probs, h.score / penalty) for h in self._alive if h.tokens]
        for part in (finished, cut):
            part.sort(key=lambda hypothesis: -hypothesis.score)
        return (finished + cut)[: self.num_return]


class TransformersBeamSearch(BeamSearch):
    """Beam search by the rules of Hugging Face transformers' `generate`.

    The rules are those of version 5.24 (`_beam_search` in its generation/utils.py). They differ from tensor2tensor's in
    these points:

    - A score is the sum of the log-probabilities, divided by length ** alpha. The length is that of the new tokens, EOS
      included.
    - A hypothesis ends if its EOS is among the num_beams best continuations of all beams; any other EOS is dropped. The
      best num_beams of those that ended are kept.
    - Before its limit the search is done as soon as num_beams hypotheses have ended and the worst of these is at least
      as good as the best live one, whose sum is divided by its present length ** alpha, without regard to its future.
      With early_stopping "never" and alpha > 0 the limit replaces the present length. With True the search is done as
      soon as num_beams have ended.
    - Hypotheses that are cut at the limit compete with those that ended.

    Args:
        limit, eos, num_beams, num_return: see `BeamSearch`.
        alpha: the exponent, which transformers calls length_penalty.
        early_stopping: see above.
        may_rise: whether a token may have a value above 0, so that a live hypothesis's score has no bound.
        stop: see `BeamSearch`.
        begun: the number of tokens before the new ones that count in lengths, such as the token of the target language.
    """

    def __init__(
        self,
        limit: int,
        eos: frozenset[int],
        num_beams: int,
        *,
        alpha: float = 1.0,
        num_return: int = 1,
        early_stopping: EarlyStopping = False,
        may_rise: bool = False,
        stop: Stop | None = None,
        begun: int = 0,
    ) -> None:
        super().__init__(
            limit, eos, num_beams, alpha=alpha, num_return=num_return, early_stopping=early_stopping is True, stop=stop
        )
        self._ending, self._may_rise, self._begun = num_beams, may_rise, begun
        self._looks_ahead = early_stopping == "never" and alpha > 0

    def _penalty(self, length: int) -> float:
        return _power(float(self._begun + length), self.alpha)

    def _is_done(self, group: _Beams) -> bool:
        if self._length >= self.limit or len(group.finished) < group.width or not group.alive:
            return False
        if self.early_stopping:
            return True
        best = group.alive[0].score / self._penalty(self.limit if self._looks_ahead else self._length)
        return group.finished[-1].score >= best

    def _is_hopeless(self, group: _Beams, score: float) -> bool:
        if self._may_rise or self._length >= self.limit or len(group.finished) < group.width:
            return False
        return group.finished[-1].score >= score / self._penalty(self.limit if self.alpha > 0 else self._length)

    def results(self) -> list[Hypothesis]:
        """Returns the finished and the cut hypotheses together, best first; at most num_return."""
        (group,) = self._groups
        cut = [
            Hypothesis(h.tokens, h.log_probs, h.score / self._penalty(self._length)) for h in group.alive if h.tokens
        ]
        return sorted(group.finished + cut, key=lambda hypothesis: -hypothesis.score)[: self.num_return]
