"""Dropout in the modules: its probability in the current mode. The ops draw their own seeds."""

from __future__ import annotations

from torch import nn

from fastformer.nn.errors import InputError


def check_dropout(dropout: float) -> float:
    """Checks a probability and returns it unchanged, in the form in which `nn.Dropout` holds it.

    Raises:
        InputError: the probability is not a number in [0, 1].
    """
    if not isinstance(dropout, int | float) or not 0.0 <= dropout <= 1.0:
        raise InputError(f"expected dropout in [0, 1], got {dropout!r}")
    return dropout


def active_dropout(dropout: nn.Module) -> float:
    """Returns the current probability of a plain `nn.Dropout`: 0 in evaluation, and 0 for an `nn.Identity`."""
    return dropout.p if isinstance(dropout, nn.Dropout) and dropout.training else 0.0
