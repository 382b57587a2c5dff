"""Splits large products of options: some cases always run, and the rest are slow; or many short ones are one test."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch


def each(names: str, cases: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Runs all cases of a test as one test: pytest takes four milliseconds for a test, and many cases less.

    Each case has the random numbers of a test of its own, an error names its case, and a case may be skipped.

    Args:
        names, cases: as in pytest.mark.parametrize.
    """
    keys, rows = names.replace(",", " ").split(), [*cases]

    def wrap(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**others: Any) -> None:
            skipped = []
            for row in rows:
                case = dict(zip(keys, row if len(keys) > 1 else (row,), strict=True))
                name = ", ".join(f"{key} = {value}" for key, value in case.items())
                torch.manual_seed(0)
                try:
                    test(**case, **others)
                except pytest.skip.Exception as reason:
                    skipped.append(reason)
                    print(f"{name}: skipped: {reason}")
                except (Exception, pytest.fail.Exception) as error:  # the latter is that of pytest.raises
                    raise AssertionError(f"{name}: {type(error).__name__}: {error}") from error
            if len(skipped) == len(rows):
                raise skipped[0]

        signature = inspect.signature(test)
        others = [parameter for name, parameter in signature.parameters.items() if name not in keys]
        run.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return run

    return wrap


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


def by_turns(*axes: Sequence[Any]) -> list[Any]:
    """Returns the product of all axes for parametrize; each value occurs in some case that isn't slow.

    Shorter axes repeat. This is for axes that the tested code treats independently.

    Args:
        axes: the values of each axis; a tuple in any but the first is several arguments.
    """
    chosen = {tuple(turn % len(axis) for axis in axes) for turn in range(max(map(len, axes)))}
    params = []
    for case in itertools.product(*map(range, map(len, axes))):
        first, *others = (axis[index] for axis, index in zip(axes, case, strict=True))
        flat = itertools.chain.from_iterable(value if isinstance(value, tuple) else (value,) for value in others)
        params.append(pytest.param(first, *flat, marks=() if case in chosen else pytest.mark.slow))
    return params


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def on_backends(
    name: str,
    cases: Sequence[Any],
    backends: Sequence[str],
    dtypes: Sequence[str],
    lacks: Callable[[Any, torch.dtype, str], bool],
    slow_on_triton: Iterable[str] = (),
) -> pytest.MarkDecorator:
    """Runs each case in each dtype on each backend, the fixture `backend`; what shares results comes together.

    Operators of PyTorch are written once for all dtypes, so on the reference and the fallback each case has one of the
    dtypes in turn, and its others are slow.

    Args:
        name: the argument that is a case.
        lacks: whether a backend on this machine can't run a case in a dtype, or another test does: it is left out.
        slow_on_triton: the cases that are slow on Triton.
    """

    def is_slow(case: Any, turn: bool, backend: str) -> bool:
        return str(case) in slow_on_triton if backend == "triton" else backend != "cpp" and not turn

    return pytest.mark.parametrize(
        (name, "dtype", "backend"),
        [
            pytest.param(
                case, DTYPES[dtype], backend, id=f"{case}-{dtype}-{backend}",
                marks=pytest.mark.slow if is_slow(case, turn == i % len(dtypes), backend) else (),
            )
            for i, case in enumerate(cases)
            for turn, dtype in enumerate(dtypes)
            for backend in backends
            if not lacks(case, DTYPES[dtype], backend)
        ],
        indirect=["backend"],
    )  # fmt: skip
