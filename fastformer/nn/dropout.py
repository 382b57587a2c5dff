"""What the modules share about dropout: how much of it acts now, and a seed for it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastformer.nn.errors import InputError
from fastformer.ops import draw_seed


def check_dropout(dropout: float) -> float:
    """The probability as it came, as `nn.Dropout` holds its own.

    Raises:
        InputError: it is no number in [0, 1].
    """
    if not isinstance(dropout, int | float) or not 0.0 <= dropout <= 1.0:
        raise InputError(f"expected dropout in [0, 1], got {dropout!r}")
    return dropout


def active_dropout(dropout: nn.Module) -> float:
    """The probability in the mode of a plain `nn.Dropout`: 0 in evaluation, and that of an `nn.Identity`."""
    return dropout.p if isinstance(dropout, nn.Dropout) and dropout.training else 0.0


def dropout_seed(dropout_p: float, device: torch.device) -> Tensor | None:
    """A fresh seed where there is something to drop, else None."""
    return draw_seed(device) if dropout_p > 0.0 else None
