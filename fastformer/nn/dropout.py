"""What the modules share about dropout: its present probability, and a seed for it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastformer.ops import draw_seed


def present_p(dropout: nn.Dropout) -> float:
    """The probability in the module's present mode. The layers keep `nn.Dropout`s, as torch.nn's do, but fuse them."""
    return dropout.p if dropout.training else 0.0


def dropout_seed(dropout_p: float, device: torch.device) -> Tensor | None:
    """A fresh seed where there is something to drop, else None."""
    return draw_seed(device) if dropout_p > 0.0 else None
