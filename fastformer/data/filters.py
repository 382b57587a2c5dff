"""Filters that omit training pairs, with the reason for each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from fastformer.settings import Amount, Count

Pair = tuple[str, str]


@dataclass
class Filters:
    """Filters of training pairs; the log counts the omitted pairs by reason. Lengths are in characters.

    Attributes:
        max_length_ratio: the most times that the longer side of a pair is as long as the shorter one; 0 = any.
        min_chars: the least length of a side, without white space at its ends; 0 = any.
        max_chars: the greatest length of a side, in characters; 0 = any.
        drop_duplicates: omit a pair that came before, in any corpus.
        drop_identical: omit a pair whose sides are the same.
    """

    max_length_ratio: Amount = 0.0
    min_chars: Count = 0
    max_chars: Count = 0
    drop_duplicates: bool = False
    drop_identical: bool = False


class PairFilter(Filters):
    """Applies `Filters` to pairs; false if the filters can omit nothing."""

    def __bool__(self) -> bool:
        return self != PairFilter()

    def apply(self, corpora: Sequence[Sequence[Pair]]) -> tuple[list[list[Pair]], Counter[str]]:
        """Returns the pairs of each corpus that stay, in their order, and the number of omitted pairs for each reason.

        A pair with several faults is counted once, under the first reason that applies.
        """
        left_out: Counter[str] = Counter()
        seen: set[Pair] = set()
        remaining: list[list[Pair]] = []
        for corpus in corpora:
            remaining.append([])
            for pair in corpus:
                reason = self.why_not(pair)
                if reason is None and self.drop_duplicates:
                    reason = "duplicate" if pair in seen else None
                    seen.add(pair)
                if reason is None:
                    remaining[-1].append(pair)
                else:
                    left_out[reason] += 1
        return remaining, left_out

    def why_not(self, pair: Pair) -> str | None:
        """Returns the reason to omit a pair, regardless of the pairs before it; None: it stays."""
        source, target = (side.strip() for side in pair)
        shorter, longer = sorted((len(source), len(target)))
        if self.max_length_ratio and longer > self.max_length_ratio * shorter:
            return f"of a length ratio above {self.max_length_ratio:g}"
        if shorter < self.min_chars:
            return f"of fewer than {self.min_chars} characters"
        if self.max_chars and longer > self.max_chars:
            return f"of more than {self.max_chars} characters"
        if self.drop_identical and source == target:
            return "with identical sides"
        return None
