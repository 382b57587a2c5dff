"""Splits large products of options: some cases always run, and the rest are slow."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def covering(*axes: Sequence[Any]) -> list[Any]:
    """Returns the product of all axes for parametrize; cases that add no new pair of values are slow.

    Each value of an axis occurs with each value of every other axis in some case that isn't slow.

    Args:
        axes: the values of each axis; a tuple is several arguments.
    """
    product = list(itertools.product(*map(range, map(len, axes))))

    def pairs(case: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
        return set(itertools.combinations(enumerate(case), 2))

    missing = set().union(*map(pairs, product))
    chosen = set()
    while missing:
        best = max(product, key=lambda case: len(pairs(case) & missing))
        chosen.add(best)
        missing -= pairs(best)
    params = []
    for case in product:
        values = (axis[index] for axis, index in zip(axes, case, strict=True))
        flat = itertools.chain.from_iterable(value if isinstance(value, tuple) else (value,) for value in values)
        params.append(pytest.param(*flat, marks=() if case in chosen else pytest.mark.slow))
    return params


def by_turns(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    """Returns the product of two axes for parametrize; each value occurs in one case that isn't slow.

    The shorter axis repeats. This is for axes that the tested code treats independently.

    Args:
        first, second: the values of each axis; a tuple in the second is several arguments.
    """
    length = min(len(first), len(second))
    return [
        pytest.param(
            value, *(other if isinstance(other, tuple) else (other,)),
            marks=() if i % length == j % length and (i < length or j < length) else pytest.mark.slow,
        )
        for i, value in enumerate(first)
        for j, other in enumerate(second)
    ]  # fmt: skip
