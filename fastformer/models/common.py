"""What the models have in common: what may be chosen, checks of sizes, a cache's dtype."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

IGNORE_INDEX = -100

Norm = Literal["layer", "rms"]
Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "swiglu", "geglu_tanh"]


def check_heads(d_model: int, num_heads: int, num_kv_heads: int | None) -> None:
    """Whether the heads share the model's size evenly.

    Raises:
        ValueError: they do not.
    """
    if d_model % num_heads:
        raise ValueError(f"expected d_model to be a multiple of num_heads, got {d_model} and {num_heads}")
    if num_kv_heads is not None and num_heads % num_kv_heads:
        raise ValueError(f"expected num_heads to be a multiple of num_kv_heads, got {num_heads} and {num_kv_heads}")


def cache_dtype(weight: Tensor) -> torch.dtype:
    """The dtype that keys come in: autocast's where it is on, else the weights'."""
    if weight.dtype != torch.float64 and torch.is_autocast_enabled(weight.device.type):
        return torch.get_autocast_dtype(weight.device.type)
    return weight.dtype
