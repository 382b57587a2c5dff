"""Products of options that are too long for every run: a part of the cases is in it, the rest is slow."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def covering(*axes: Sequence[Any]) -> list[Any]:
    """For pytest's parametrize: the product of all axes; slow is what holds no pair of two axes' values of its own.

    Each value of an axis meets each of every other axis in some case that isn't slow.

    Args:
        axes: the values of each; a tuple gives several arguments.
    """
    product = list(itertools.product(*map(range, map(len, axes))))

    def pairs(case: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
        return set(itertools.combinations(enumerate(case), 2))

    missing = set().union(*map(pairs, product))
    kept = set()
    while missing:
        best = max(product, key=lambda case: len(pairs(case) & missing))
        kept.add(best)
        missing -= pairs(best)
    found = []
    for case in product:
        values = (axis[index] for axis, index in zip(axes, case, strict=True))
        given = itertools.chain.from_iterable(value if isinstance(value, tuple) else (value,) for value in values)
        found.append(pytest.param(*given, marks=() if case in kept else pytest.mark.slow))
    return found


def by_turns(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    """For pytest's parametrize: the product of two axes, of which each value stands in one case that isn't slow.

    The shorter axis goes around. For axes of which the code that is tested treats neither by the other.

    Args:
        first, second: the values of each; a tuple of the second gives several arguments.
    """
    length = min(len(first), len(second))
    return [
        pytest.param(
            one, *(other if isinstance(other, tuple) else (other,)),
            marks=() if i % length == j % length and (i < length or j < length) else pytest.mark.slow,
        )
        for i, one in enumerate(first)
        for j, other in enumerate(second)
    ]  # fmt: skip
