"""One vector for each sequence of a batch, padded or packed."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from fastformer.nn.layout import SequenceLayout

Pooling = Literal["cls", "lasttoken", "max", "mean", "mean_sqrt_len_tokens", "weightedmean"]
POOLINGS: tuple[str, ...] = get_args(Pooling)


def pool(hidden: Tensor, layout: SequenceLayout | None, kind: str) -> Tensor:
    """Pools each sequence to one vector; see `BERT.pooled`. Sums are in fp32, or in fp64 for fp64 inputs.

    Args:
        hidden: (batch, seqlen, dim), or packed (total, dim).
        layout: None: nothing is padding.
        kind: one of `POOLINGS`.

    Returns:
        (batch, dim), hidden's dtype; zeros for a sequence without tokens.

    Raises:
        ValueError: hidden states that don't fit the layout.
    """
    is_packed = layout is not None and layout.is_packed
    if hidden.dim() != (2 if is_packed else 3):
        expected = "(total, dim) with a packed layout" if is_packed else "(batch, seqlen, dim)"
        raise ValueError(f"expected hidden states of shape {expected}, got {tuple(hidden.shape)}")
    rows = hidden
    if layout is not None and is_packed:
        rows = layout.unpack(hidden)
    elif layout is not None and (layout.batch_size, layout.max_seqlen) != tuple(hidden.shape[:2]):
        expected = f"({layout.batch_size}, {layout.max_seqlen}, dim), as the layout has"
        raise ValueError(f"expected hidden states of shape {expected}, got {tuple(hidden.shape)}")
    batch, width, dim = rows.shape
    if not width:
        return rows.new_zeros(batch, dim)
    seqlens = torch.full((batch,), width, device=rows.device) if layout is None else layout.seqlens.to(rows.device)
    has_tokens = (seqlens > 0)[:, None]
    if kind in ("cls", "lasttoken"):
        position = torch.zeros_like(seqlens) if kind == "cls" else (seqlens - 1).clamp(min=0)
        pooled = rows[torch.arange(batch, device=rows.device), position.long()]
        return torch.where(has_tokens, pooled, 0.0)
    position = torch.arange(width, device=rows.device)
    real = (position < seqlens[:, None])[..., None]
    if kind == "max":
        return torch.where(has_tokens, rows.masked_fill(~real, float("-inf")).amax(1), 0.0)
    wide = rows if rows.dtype == torch.float64 else rows.float()
    states = torch.where(real, wide, 0.0)  # padding may hold NaN
    count = seqlens.clamp(min=1)[:, None].to(wide.dtype)
    if kind == "weightedmean":
        total = (states * (position + 1).to(wide.dtype)[:, None]).sum(1) / (count * (count + 1) / 2)
    else:
        total = states.sum(1) / (count.sqrt() if kind == "mean_sqrt_len_tokens" else count)
    return total.to(rows.dtype)
