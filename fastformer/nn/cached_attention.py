"""Attention with a key-value cache: stores keys and values, and chooses the op that reads them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastformer.cache import AttentionCache
from fastformer.cache.block_pool import NULL_BLOCK
from fastformer.errors import InputError
from fastformer.nn.embedding import RotaryPositions
from fastformer.nn.layout import SequenceLayout
from fastformer.nn.masks import add_bias
from fastformer.ops.attention import attention
from fastformer.ops.decode_attention import decode_attention
from fastformer.ops.varlen_attention import varlen_attention

ScoreOptions = Mapping[str, Any]
_BY_DEFAULT: ScoreOptions = MappingProxyType({})


def attend_cached(cache: AttentionCache, q: Tensor, scores: ScoreOptions = _BY_DEFAULT) -> Tensor:
    """Computes cross-attention of q (rows, seqlen_q, num_heads, head_dim), or packed (total, num_heads, head_dim)."""
    packed, index = q.dim() == 3, cache.batch_index
    if packed and index is not None:
        # Each token reads the source of its own row; tokens after the last sequence read an arbitrary one.
        q, index = q[:, None], F.pad(index, (0, len(q) - len(index)))
    if cache.rows_per_source > 1:
        # Rows of one token each: as queries of one row they share the reads of their source.
        q = q.reshape(-1, cache.rows_per_source, *q.shape[2:])
    out = decode_attention(
        q, cache.k, cache.v, cache.seqlens, cache_batch_idx=index, slot_table=cache.slot_table, is_causal=False,
        **scores,
    )  # fmt: skip
    if cache.rows_per_source > 1:
        return out.reshape(-1, 1, *q.shape[2:])
    return out.flatten(0, 1) if packed else out


def append_cached(
    cache: AttentionCache,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window_left: int | None,
    packed: SequenceLayout | None,
    position_bias: Tensor | None = None,
    rotary: RotaryPositions | None = None,
    scores: ScoreOptions = _BY_DEFAULT,
) -> Tensor:
    """Stores k and v, and attends from q to them and to the earlier tokens of the rows.

    Args:
        cache: the cache of a self-attention.
        q: (rows, seqlen, num_heads, head_dim), or packed (total, num_heads, head_dim).
        k, v: of the same form, with num_kv_heads.
        window_left: the number of keys before its own that a query sees; None = all.
        packed: the layout of packed prompts.
        position_bias: added to the scores; see `MultiheadAttention`.
        rotary: rotates q and k, by their positions in the cache if it has none of its own.
        scores: the ops' options for the scores, such as softmax_scale.

    Raises:
        InputError: the number of rows differs from the cache's, or there are more tokens than the step has.
    """
    batch, seqlen = q.shape[:2] if packed is None else (packed.batch_size, packed.max_seqlen)
    if seqlen > cache.num_tokens:
        raise InputError(f"expected at most the num_tokens = {cache.num_tokens} of KVCache.begin, got {seqlen} tokens")
    if packed is None and not (cache.is_empty and seqlen > 1):
        return _append_step(cache, q, k, v, window_left, position_bias, rotary, scores)
    if rotary is not None:
        q, k = rotary.rotate(q, k)
    if batch != len(cache.seqlens):
        raise InputError(f"expected the {len(cache.seqlens)} rows of the cache, got a batch of {batch}")
    if k.shape[-2:] != cache.k.shape[-2:]:
        expected, got = tuple(cache.k.shape[-2:]), tuple(k.shape[-2:])
        raise InputError(f"expected num_kv_heads and head_dim {expected}, as the cache has, got {got}")
    window = (window_left, 0)
    if packed is not None:
        if not cache.is_empty or cache.packed_slots is None or packed.cu_seqlens is None:
            raise InputError("expected packed prompts for rows that are empty (KVCache.begin(is_packed=True))")
        cu_seqlens, slots = packed.cu_seqlens, cache.packed_slots
        if position_bias is None:
            out = varlen_attention(q, k, v, cu_seqlens, cu_seqlens, seqlen, seqlen, window_size=window, **scores)
        else:
            out = attention_unpacked(q, k, v, packed, position_bias, window, scores=scores)
        k, v = k[: len(slots)], v[: len(slots)]
    else:
        # The first tokens see only each other: the kernel that skips the triangle, then one copy.
        out = attention(q, k, v, attn_mask=position_bias, window_size=window, **scores)
        slots = cache.slot_table[:, :seqlen].flatten().long()
        k, v = k.flatten(0, 1), v.flatten(0, 1)
    _write(cache, slots, k, v)
    return out


def placed(rotary: RotaryPositions, cache: AttentionCache, q: Tensor) -> RotaryPositions:
    """Returns rotary positions that are those in the cache if they were none of their own."""
    if rotary.positions is not None:
        return rotary
    return rotary._replace(positions=cache.seqlens[:, None] + torch.arange(q.shape[1], device=q.device))


def _append_step(
    cache: AttentionCache, q: Tensor, k: Tensor, v: Tensor, window_left: int | None, position_bias: Tensor | None,
    rotary: RotaryPositions | None, scores: ScoreOptions,
) -> Tensor:  # fmt: skip
    """Computes `append_cached` for tokens that follow earlier ones, or for one token in each row."""
    tables: dict[str, Any] = {}
    gathers = position_bias is not None or "sinks" in scores
    if rotary is not None and rotary.positions is None and rotary.growth is None and not gathers:
        # The kernel rotates by the positions in the cache.
        tables = {"cos": rotary.cos, "sin": rotary.sin, "interleaved": rotary.interleaved}
    elif rotary is not None:
        q, k = placed(rotary, cache, q).rotate(q, k)
    if gathers:
        return _append_and_gather(cache, q, k, v, window_left, position_bias, scores)
    return decode_attention(
        q, cache.k, cache.v, cache.seqlens, k=k, v=v, slot_table=cache.slot_table, window_left=window_left,
        **tables, **scores,
    )  # fmt: skip


def _write(cache: AttentionCache, slots: Tensor, k: Tensor, v: Tensor) -> None:
    cache.k.flatten(0, 1).index_copy_(0, slots, k.to(cache.k.dtype))
    cache.v.flatten(0, 1).index_copy_(0, slots, v.to(cache.v.dtype))


def _append_and_gather(
    cache: AttentionCache, q: Tensor, k: Tensor, v: Tensor, window_left: int | None, position_bias: Tensor | None,
    scores: ScoreOptions,
) -> Tensor:  # fmt: skip
    # No kernel for a cache takes a bias or sinks, so the keys and values of each row are gathered.
    rows, seqlen, until = q.shape[0], q.shape[1], cache.slot_table.shape[1]
    if position_bias is not None:
        until = position_bias.shape[-1]
    elif q.device.type == "cpu" and rows:  # reading a number is free here
        until = int(cache.seqlens.max()) + seqlen
    if rows != len(cache.seqlens) or until > cache.slot_table.shape[1]:
        raise InputError(
            f"expected {len(cache.seqlens)} rows of at most {cache.slot_table.shape[1]} keys, got {rows} of {until}"
        )
    own = cache.seqlens[:, None].long() + torch.arange(seqlen, device=q.device)
    _write(cache, cache.slot_table.gather(1, own).flatten().long(), k.flatten(0, 1), v.flatten(0, 1))
    position = torch.arange(until, device=q.device)
    # Behind a row's end the table may hold anything. The null block's values are finite.
    slots = cache.slot_table[:, :until].long().masked_fill(position > own[:, -1:], NULL_BLOCK)
    keys, values = (x.flatten(0, 1)[slots] for x in (cache.k, cache.v))
    seen = position <= own[..., None]
    if window_left is not None:
        seen &= position >= own[..., None] - window_left
    mask = seen[:, None] if position_bias is None else add_bias(position_bias, seen[:, None])
    return attention(q, keys, values, attn_mask=mask, **scores)


def attention_unpacked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: SequenceLayout,
    position_bias: Tensor,
    window_size: tuple[int | None, int | None],
    dropout_p: float = 0.0,
    scores: ScoreOptions = _BY_DEFAULT,
) -> Tensor:
    """Computes self-attention of packed sequences with a bias, on a padded batch: no packed kernel supports a bias.

    Args:
        q: (total, num_heads, head_dim).
        k, v: (total, num_kv_heads, head_dim).
        layout: the packed layout of q, k and v.
        position_bias: (1, num_heads, max_seqlen, max_seqlen).
        window_size, dropout_p: see `ops.attention`.
        scores: see `append_cached`.

    Returns:
        q's shape; zeros after the last sequence.
    """
    q_rows, k_rows, v_rows = (layout.unpack(x) for x in (q, k, v))
    out = attention(
        q_rows,
        k_rows,
        v_rows,
        attn_mask=position_bias,
        seqlens_k=layout.seqlens,
        window_size=window_size,
        dropout_p=dropout_p,
        **scores,
    )
    assert layout.cu_seqlens is not None
    is_real = torch.arange(len(q), device=q.device) < layout.cu_seqlens[-1]
    return layout.pack(out).where(is_real[:, None, None], 0.0)
