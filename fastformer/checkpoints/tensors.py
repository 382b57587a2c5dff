"""The tensors of a file by their names: a reader takes those that it knows, and none may be left."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

_T = TypeVar("_T")


def taken(left: dict[str, _T], names: Iterable[str], family: str) -> tuple[_T, ...]:
    """Removes tensors from `left` and returns them.

    Raises:
        ValueError: a tensor is missing.
    """
    names = [*names]
    missing = [name for name in names if name not in left]
    if missing:
        raise ValueError(f"expected the tensors of a {family}, got none called {some(missing)}")
    return tuple(left.pop(name) for name in names)


def check_empty(left: Iterable[str], family: str) -> None:
    """Raises ValueError for tensors that no part of a model has taken."""
    if names := [*left]:
        raise ValueError(f"expected the tensors of a {family}, got others as well: {some(names)}")


def some(names: Iterable[str]) -> str:
    """Returns the first five names, and how many more there are."""
    known = sorted(names)
    return ", ".join(known[:5]) + (f" and {len(known) - 5} more" if len(known) > 5 else "")
