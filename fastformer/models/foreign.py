"""What conversions from other libraries' settings and weights have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from fastformer.models.pretrained import check_depth, check_tables, make_to_load
from fastformer.models.transformer import Transformer, TransformerConfig
from fastformer.models.weights import FLOATING, Entry, check_entries, entries_of


def check_floating(state: Mapping[str, Tensor]) -> None:
    """Raises ValueError for weights that are no floating-point numbers."""
    for name, tensor in state.items():
        if tensor.dtype not in FLOATING:
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


def depth_of(settings: Mapping[str, Any], name: str, state: Mapping[str, Tensor]) -> int:
    """How many layers settings ask for.

    Raises:
        ValueError: it is no integer, or there are more layers than tensors.
    """
    value = number_of(settings, name)
    check_depth(name, value, len(state), "the settings")
    return value


def flag_of(settings: Mapping[str, Any], name: str, default: bool) -> bool:
    """A true or false among settings; what isn't there, or is null, has its default.

    Raises:
        ValueError: it is something else.
    """
    value = settings.get(name)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"expected {name} to be true or false, got {value!r}")
    return default if value is None else value


def load_foreign(
    config: TransformerConfig,
    weights: Mapping[str, Tensor],
    *,
    device: torch.device | str | None,
    dtype: torch.dtype,
) -> Transformer:
    """A `Transformer` with weights, in evaluation mode.

    Raises:
        ValueError: missing, unexpected or misshapen tensors, or positions that take far more memory than the weights.
    """

    def check(model: Transformer) -> None:
        expected = {name: Entry(tuple(tensor.shape)) for name, tensor in model.state_dict().items()}
        check_entries("the weights", "the settings", entries_of(weights), expected)
        check_tables(model, "the settings")

    model = make_to_load(lambda device: Transformer(config, device=device, dtype=dtype), device, check)
    model.load_state_dict(weights)
    return model.eval()


def some(names: Iterable[str]) -> str:
    """The first few names, and how many more there are."""
    known = sorted(names)
    return ", ".join(known[:5]) + (f" and {len(known) - 5} more" if len(known) > 5 else "")
