"""Attention of a few queries to many keys, by the kernels of decode_attention, which divide the keys of a row.

A tile of attention's own kernel would consist mostly of empty rows, and a batch of one would leave most SMs idle.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastformer.kernels._attention_common import mask_bytes
from fastformer.kernels._decode_attention_configs import (
    FEW_BLOCKS,
    SMALLEST_TILE,
    config_of,
    programs_at_once,
    splits_of,
)
from fastformer.kernels._launch import cdiv, next_power_of_2
from fastformer.kernels._plans import Plan
from fastformer.kernels.decode_attention import plan_decode_attention


def takes(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, seqlens_k: Tensor | None, softmax_scale: float,
    window_left: int | None, window_right: int | None, dropout_p: float, *_: object,
) -> bool:  # fmt: skip
    """Returns whether a call of attention_fwd has a plan here: few queries and many keys, without dropout.

    A tile has the queries of all heads of a group. If these are more than the smallest tile has, a call whose tiles
    fill the device by themselves stays with attention's own kernel.
    """
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    config, rows = config_of(q), seqlen_q * (q.shape[2] // k.shape[2])
    if window_right is not None and window_right >= seqlen_q - 1:
        window_right = None
    is_banded = window_left is not None or window_right is not None
    return (
        q.numel() > 0
        and dropout_p == 0.0
        and window_right in (None, 0)
        # With lengths, windows end at the last key of the tensors there, and at each row's own last key here.
        and not (seqlens_k is not None and is_banded)
        and (attn_mask is None or attn_mask.dtype == torch.bool)
        and rows <= config.largest_m
        and seqlen_k > FEW_BLOCKS * config.block_n
        and k.stride(-1) == v.stride(-1) == 1
        and (
            rows <= SMALLEST_TILE
            or splits_of(
                q.shape[0] * k.shape[2], cdiv(seqlen_k, config.block_n), programs_at_once(q, next_power_of_2(rows))
            )
            > 1
        )
    )


def plan_few_queries(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, seqlens_k: Tensor | None, softmax_scale: float,
    window_left: int | None, window_right: int | None, _p: float, _seed: Tensor | None, softcap: float = 0.0,
) -> Plan:  # fmt: skip
    """Plans `attention_fwd` for calls of this geometry, which `takes` accepts."""
    options = (None, None, None, None, softmax_scale, window_right == 0, window_left, None, None, False)
    walk = plan_decode_attention(q, k, v, seqlens_k, *options, softcap, attn_mask=attn_mask)

    def run(
        q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, seqlens_k: Tensor | None, *_: object
    ) -> tuple[Tensor, Tensor]:
        lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
        return walk(q, k, v, seqlens_k, *options, lse=lse, mask=mask_bytes(attn_mask)), lse

    return run
