"""Greedy and beam search in C++ (csrc/engine/search.cpp), for engines that take many steps in one call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple, Protocol

from fastformer.extension import extension_module
from fastformer.generation.config import BeamRules, EarlyStopping
from fastformer.generation.search import NEVER, Hypothesis, Search, bad_numbers


class SearchHandle(Protocol):
    """The interface of the extension's search object, which an engine passes to its own C++ code."""

    limit: int
    num_candidates: int
    num_tokens: int
    num_rows: int
    peak_rows: int
    scores: list[float]
    is_done: bool
    is_broken: bool

    def advance(self, ids: Sequence[Sequence[int]], values: Sequence[Sequence[float]], first: int) -> list[int]:
        """Advances the search by a step; see `Search.advance`. A value that is NaN or infinite sets is_broken."""

    def tokens(self, row: int) -> list[int]:
        """Returns the new tokens of a row that continues."""

    def results(self) -> list[tuple[list[int], list[float], float]]:
        """Returns the hypotheses found, each as its tokens, their log-probabilities and its score."""


class SearchRules(NamedTuple):
    """The rules of a search that an engine runs.

    Attributes:
        num_beams: the number of beams; 0: greedy.
        eos: the ids that end a row, in ascending order.
        min_tokens: the number of new tokens before which no id of eos is chosen.
        suppressed: ids that are never chosen, in ascending order.
        keeps_shares: whether log-probabilities are those of a choice among all ids, also the forbidden ones.
    """

    num_beams: int
    eos: tuple[int, ...]
    min_tokens: int
    suppressed: tuple[int, ...]
    keeps_shares: bool = False


class NativeSearch(Search):
    """A search in C++ that finds what `RowSearch` (one row, the best token), `BeamSearch` (without groups) and
    `TransformersBeamSearch` find.

    Args:
        handle: the search of the extension.
        rules: the rules of the search. The score of a greedy search is the sum of its row's log-probabilities.

    Attributes:
        handle, rules: see above; an engine may advance the handle too.
    """

    def __init__(self, handle: SearchHandle, rules: SearchRules) -> None:
        self.handle, self.rules = handle, rules
        self.limit, self.num_candidates, self.peak_rows = handle.limit, handle.num_candidates, handle.peak_rows

    @classmethod
    def greedy(
        cls, limit: int, eos: frozenset[int], *, min_tokens: int = 0, suppressed: Sequence[int] = ()
    ) -> NativeSearch:
        """Makes a greedy search that is equivalent to a `RowSearch`.

        Args:
            limit, eos: see `RowSearch`.
            min_tokens: the number of new tokens before which the row can't end. An engine that runs the search applies
                this rule; else processors do.
            suppressed: ids that are never chosen, applied in the same way.
        """
        handle = extension_module().greedy_search(limit, sorted(eos), min_tokens, suppressed)
        return cls(handle, SearchRules(0, tuple(sorted(eos)), min_tokens, tuple(sorted(suppressed))))

    @classmethod
    def beams(
        cls,
        limit: int,
        eos: frozenset[int],
        num_beams: int,
        *,
        beam_rules: BeamRules = "tensor2tensor",
        alpha: float = 0.6,
        num_return: int = 1,
        early_stopping: EarlyStopping = False,
        min_tokens: int = 0,
        suppressed: Sequence[int] = (),
        begun: int = 0,
        keeps_shares: bool = False,
    ) -> NativeSearch:
        """Makes a search that is equivalent to a `BeamSearch` or a `TransformersBeamSearch`.

        min_tokens and suppressed are as in `greedy`; begun is as in `TransformersBeamSearch`, and ignored by the other
        rules; for keeps_shares, see `SearchRules`.
        """
        handle = extension_module().beam_search(
            limit,
            sorted(eos),
            num_beams,
            alpha,
            num_return,
            early_stopping is True,
            min_tokens,
            suppressed,
            beam_rules == "transformers",
            early_stopping == "never",
            begun,
            keeps_shares,
        )
        rules = SearchRules(num_beams, tuple(sorted(eos)), min_tokens, tuple(sorted(suppressed)), keeps_shares)
        return cls(handle, rules)

    num_rows = property(attrgetter("handle.num_rows"))  # the engine changes it too

    @property
    def error(self) -> ValueError | None:
        """The error of a search that ended because a value was NaN or infinite; else None."""
        return bad_numbers() if self.handle.is_broken else None

    def last_tokens(self) -> list[int]:
        return list(extension_module().last_tokens([self.handle]))

    def tokens(self, row: int) -> list[int]:
        return self.handle.tokens(row)

    def advance(self, ids: Sequence[Sequence[int]], values: Sequence[Sequence[float]], first: int) -> list[int]:
        parents = self.handle.advance(ids, values, first)
        if (error := self.error) is not None:
            raise error
        return parents

    def results(self) -> list[Hypothesis]:
        hypotheses = [Hypothesis(*one) for one in self.handle.results()]
        if not self.rules.num_beams:
            for row in hypotheses:
                row.score = math.fsum(row.log_probs) if row.tokens else NEVER
        return hypotheses
