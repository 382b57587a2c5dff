"""What conversions from other libraries' settings and weights have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor


def check_floating(state: Mapping[str, Tensor]) -> None:
    """Raises ValueError for weights that are no floating-point numbers."""
    for name, tensor in state.items():
        if not tensor.is_floating_point():
            raise ValueError(f"expected floating-point weights, got {name} of {tensor.dtype}")


def joined(left: dict[str, Tensor], names: tuple[str, ...], family: str) -> Tensor:
    """Tensors one behind another; they are taken away.

    Raises:
        ValueError: one that isn't there.
    """
    missing = [name for name in names if name not in left]
    if missing:
        raise ValueError(f"expected the tensors of a {family}, got none called {some(missing)}")
    parts = [left.pop(name) for name in names]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def number_of(settings: Mapping[str, Any], name: str) -> int:
    """An integer among settings.

    Raises:
        ValueError: it is something else, or isn't there.
    """
    value = settings.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"expected {name} to be an integer, got {value!r}")
    return value


def some(names: Iterable[str]) -> str:
    """The first few names, and how many more there are."""
    known = sorted(names)
    return ", ".join(known[:5]) + (f" and {len(known) - 5} more" if len(known) > 5 else "")
