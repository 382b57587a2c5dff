"""What the modules share about dropout: how much of it acts now, and a seed for it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastformer.ops import draw_seed


def active_dropout(dropout: nn.Dropout) -> float:
    """The probability in the module's mode: 0 in evaluation. Layers keep `nn.Dropout`s and fuse them."""
    return dropout.p if dropout.training else 0.0


def dropout_seed(dropout_p: float, device: torch.device) -> Tensor | None:
    """A fresh seed where there is something to drop, else None."""
    return draw_seed(device) if dropout_p > 0.0 else None
