"""What the models have in common: what may be chosen, checks of sizes, a cache's dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

IGNORE_INDEX = -100
_ROWS = 256  # whose logits `chosen_log_probs` holds at a time

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


def chosen_log_probs(logits_of: Callable[[Tensor], Tensor], hidden: Tensor, tokens: Tensor) -> Tensor:
    """The log-probability of a token at each position, by a function that makes logits, for a few rows at a time.

    Args:
        logits_of: hidden states (rows, d_model) -> (rows, vocab_size).
        hidden: (..., d_model).
        tokens: (...) ids, int64.

    Returns:
        (...), fp32 (fp64 for logits in fp64).
    """
    found = []
    for rows, ids in zip(hidden.flatten(0, -2).split(_ROWS), tokens.flatten().split(_ROWS), strict=True):
        logits = logits_of(rows)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        found.append(logits.gather(-1, ids[:, None]).squeeze(-1) - logits.logsumexp(-1))
    return torch.cat(found).view(tokens.shape)
