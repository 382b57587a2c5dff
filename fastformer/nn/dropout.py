"""Dropout in the modules: its probability in the current mode, and its seed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastformer.nn.errors import InputError
from fastformer.ops import draw_seed


def check_dropout(dropout: float) -> float:
    """Checks a probability and returns it unchanged, in the form in which `nn.Dropout` holds it.

    Raises:
        InputError: the probability is no number in [0, 1].
    """
    if not isinstance(dropout, int | float) or not 0.0 <= dropout <= 1.0:
        raise InputError(f"expected dropout in [0, 1], got {dropout!r}")
    return dropout


def active_dropout(dropout: nn.Module) -> float:
    """Returns the current probability of a plain `nn.Dropout`: 0 in evaluation, and 0 for an `nn.Identity`."""
    return dropout.p if isinstance(dropout, nn.Dropout) and dropout.training else 0.0


def dropout_seed(dropout_p: float, device: torch.device) -> Tensor | None:
    """Returns a fresh seed if the probability isn't 0, else None."""
    return draw_seed(device) if dropout_p > 0.0 else None
