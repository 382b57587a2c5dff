"""Encoded examples, stored compactly."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor

from fastformer.special_ids import SpecialIds


@dataclass(frozen=True)
class Example:
    """One training example: source and target ids, both ending in EOS; for a language model no source and a window of
    text, whose last token is only predicted."""

    source: list[int]
    target: list[int]

    @property
    def lengths(self) -> tuple[int, int]:
        """The numbers of source and target tokens that a model computes."""
        return len(self.source), len(self.target) if self.source else len(self.target) - 1


class Examples(Sequence[Example]):
    """A sequence of `Example` in 4 bytes a token and 16 bytes an example; lists need tens of bytes a token."""

    def __init__(self, examples: Iterable[Example] = ()) -> None:
        self._ids = array("i")  # source, target, source, target, ...
        self._ends = array("q", [0])  # the end of each of them
        for example in examples:
            self.append(example.source, example.target)

    def append(self, source: Iterable[int], target: Iterable[int]) -> None:
        """Adds one example.

        Raises:
            ValueError: ids that are not integers of 32 bits; the examples stay unchanged.
        """
        whole = len(self._ends)
        for side in (source, target):
            try:
                self._ids.extend(side)
            except (TypeError, OverflowError) as error:
                del self._ends[whole:], self._ids[self._ends[whole - 1] :]
                raise ValueError(f"expected ids, integers of 32 bits, got {side!r:.60}") from error
            self._ends.append(len(self._ids))

    def extend(self, others: Examples) -> None:
        """Adds all of the given examples."""
        before = len(self._ids)
        self._ids.extend(others._ids)
        self._ends.extend(before + end for end in others._ends[1:])

    def take(self, places: Iterable[int]) -> Examples:
        """Returns the examples at some places."""
        examples = Examples()
        for place in places:
            example = self._example(place)
            examples.append(example.source, example.target)
        return examples

    def __len__(self) -> int:
        return len(self._ends) // 2

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        places = range(len(self))[index]  # negative indices and those out of range behave as in a list
        return self._example(places) if isinstance(places, int) else [self._example(place) for place in places]

    def _example(self, place: int) -> Example:
        begin, middle, end = self._ends[2 * place : 2 * place + 3]
        return Example(self._ids[begin:middle].tolist(), self._ids[middle:end].tolist())

    @property
    def lengths(self) -> Tensor:
        """The `Example.lengths` of each example, (examples, 2) int64."""
        lengths = torch.frombuffer(self._ends, dtype=torch.int64).diff().view(-1, 2)
        lengths[:, 1] -= (lengths[:, 0] == 0).long()  # the last token of a window is only predicted
        return lengths

    @property
    def num_tokens(self) -> tuple[int, int]:
        """The number of source and target tokens of all examples."""
        source, target = self.lengths.sum(0).tolist()
        return source, target

    def fingerprint(self) -> str:
        """Returns a SHA-256 over all ids in their order, which is the same only for the same examples."""
        digest = hashlib.sha256(self._ids)
        digest.update(self._ends)
        return digest.hexdigest()


def encode_pair(source: list[int], target: list[int], *, special_ids: SpecialIds = SpecialIds()) -> Example:
    """Builds a translator's example; both sides end with the first of the EOS ids."""
    return Example([*source, special_ids.first_eos], [*target, special_ids.first_eos])


def windows(ids: Sequence[int], seqlen: int) -> Examples:
    """Cuts a long text into the examples of a language model: consecutive windows in which each token but the text's
    first is predicted once. Neighbours share a token. No EOS is added.

    Args:
        ids: the text.
        seqlen: the number of tokens that a window predicts; the last window may predict fewer.
    """
    examples = Examples()
    for begin in range(0, len(ids) - 1, seqlen):
        examples.append((), ids[begin : begin + seqlen + 1])
    return examples
