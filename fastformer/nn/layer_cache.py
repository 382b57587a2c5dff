"""What one layer, and one attention of it, sees of a `KVCache`, and what a cache is handed for all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fastformer.nn.block_pool import Ints
from fastformer.nn.embedding import RotaryPositions
from fastformer.nn.layout import SequenceLayout
from fastformer.nn.masks import add_bias
from fastformer.ops.attention import attention
from fastformer.ops.decode_attention import decode_attention
from fastformer.ops.varlen_attention import varlen_attention


@dataclass
class AttentionCache:
    """One attention's part of a `KVCache`: views, so that writing into them writes into the cache.

    Attributes:
        k, v: (num_blocks, block_size, num_kv_heads, head_dim).
        slot_table: (rows, width) int32, which token of `k.flatten(0, 1)` each position of a row is; as wide as the
            longest row with what is reserved, in whole blocks, or as there is room for.
        seqlens: (rows,) int32, how much of each row is filled.
        batch_index: of cross-attention, int32: the table's row that each query row (or packed query token) reads.
        rows_per_source: of cross-attention without batch_index: so many rows side by side read one row of the table.
        reserved: the next tokens that every row has slots for.
        is_static: True for cross-attention: nothing is appended.
        is_empty: True before the first tokens of a self-attention.
        packed_slots: (tokens,) int64 slots of the packed prompts that are reserved; None: padded ones are.
    """

    k: Tensor
    v: Tensor
    slot_table: Tensor
    seqlens: Tensor
    batch_index: Tensor | None = None
    reserved: int = 0
    is_static: bool = False
    is_empty: bool = False
    packed_slots: Tensor | None = None
    rows_per_source: int = 1

    def attend(self, q: Tensor) -> Tensor:
        """Cross-attention of q: (rows, seqlen_q, num_heads, head_dim), or packed (total, num_heads, head_dim)."""
        packed, index = q.dim() == 3, self.batch_index
        if packed and index is not None:
            # Each token reads the source of its own row; those behind the last sequence read any.
            q, index = q[:, None], F.pad(index, (0, len(q) - len(index)))
        if self.rows_per_source > 1:
            # Rows of one token each: as queries of one row they share what is read of their source.
            q = q.reshape(-1, self.rows_per_source, *q.shape[2:])
        out = decode_attention(
            q, self.k, self.v, self.seqlens, cache_batch_idx=index, slot_table=self.slot_table, is_causal=False
        )
        if self.rows_per_source > 1:
            return out.reshape(-1, 1, *q.shape[2:])
        return out.flatten(0, 1) if packed else out

    def append(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window_left: int | None,
        packed: SequenceLayout | None,
        position_bias: Tensor | None = None,
        rotary: RotaryPositions | None = None,
    ) -> Tensor:
        """Stores k and v, and attends from q to them and to what the rows hold before them.

        Args:
            q: (rows, seqlen, num_heads, head_dim), or packed (total, num_heads, head_dim).
            k, v: likewise, of num_kv_heads.
            window_left: how many keys before its own a query sees; None = all.
            packed: the layout of packed prompts.
            position_bias: added to the scores; see `MultiheadAttention`.
            rotary: rotates q and k; without positions of its own, by those in the cache.

        Raises:
            ValueError: another number of rows than the cache has, tokens that were not reserved.
        """
        batch, seqlen = q.shape[:2] if packed is None else (packed.batch_size, packed.max_seqlen)
        if seqlen > self.reserved:
            raise ValueError(f"expected the tokens to be reserved first (KVCache.reserve), got {seqlen} more")
        is_step = packed is None and not (self.is_empty and seqlen > 1)
        tables: dict[str, Any] = {}
        if rotary is not None:
            if is_step and rotary.positions is None and position_bias is None:
                tables = {"cos": rotary.cos, "sin": rotary.sin, "interleaved": rotary.interleaved}
            else:
                if is_step and rotary.positions is None:
                    rotary = rotary._replace(positions=self.seqlens[:, None] + torch.arange(seqlen, device=q.device))
                q, k = rotary.rotate(q, k)
        if is_step:
            if position_bias is not None:
                return self._append_and_gather(q, k, v, window_left, position_bias)
            return decode_attention(
                q, self.k, self.v, self.seqlens, k=k, v=v, slot_table=self.slot_table, window_left=window_left, **tables
            )
        if batch != len(self.seqlens):
            raise ValueError(f"expected the {len(self.seqlens)} rows of the cache, got a batch of {batch}")
        if k.shape[-2:] != self.k.shape[-2:]:
            expected, got = tuple(self.k.shape[-2:]), tuple(k.shape[-2:])
            raise ValueError(f"expected num_kv_heads and head_dim {expected}, as the cache has, got {got}")
        window = (window_left, 0)
        if packed is not None:
            if not self.is_empty or self.packed_slots is None or packed.cu_seqlens is None:
                raise ValueError("expected rows that are empty, reserved with their lengths, for packed prompts")
            cu_seqlens, slots = packed.cu_seqlens, self.packed_slots
            if position_bias is None:
                out = varlen_attention(q, k, v, cu_seqlens, cu_seqlens, seqlen, seqlen, window_size=window)
            else:
                out = attention_unpacked(q, k, v, packed, position_bias, window)
            k, v = k[: len(slots)], v[: len(slots)]
        else:
            # The first tokens see each other alone: the kernel that skips the triangle, then one copy.
            out = attention(q, k, v, attn_mask=position_bias, window_size=window)
            slots = self.slot_table[:, :seqlen].flatten().long()
            k, v = k.flatten(0, 1), v.flatten(0, 1)
        self._write(slots, k, v)
        return out

    def _write(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        self.k.flatten(0, 1).index_copy_(0, slots, k.to(self.k.dtype))
        self.v.flatten(0, 1).index_copy_(0, slots, v.to(self.v.dtype))

    def _append_and_gather(
        self, q: Tensor, k: Tensor, v: Tensor, window_left: int | None, position_bias: Tensor
    ) -> Tensor:
        """No kernel for a cache takes a bias: what the rows hold is copied side by side."""
        rows, seqlen, until = q.shape[0], q.shape[1], position_bias.shape[-1]
        if rows != len(self.seqlens) or until > self.slot_table.shape[1]:
            raise ValueError(
                f"expected {len(self.seqlens)} rows, and a position_bias of at most {self.slot_table.shape[1]} keys, "
                f"got {rows} and {until}"
            )
        own = self.seqlens[:, None].long() + torch.arange(seqlen, device=q.device)
        self._write(self.slot_table.gather(1, own).flatten().long(), k.flatten(0, 1), v.flatten(0, 1))
        position = torch.arange(until, device=q.device)
        # Behind a row's end there may be anything: block 0 is zeros.
        slots = self.slot_table[:, :until].long().masked_fill(position > own[:, -1:], 0)
        keys, values = (cache.flatten(0, 1)[slots] for cache in (self.k, self.v))
        seen = position <= own[..., None]
        if window_left is not None:
            seen &= position >= own[..., None] - window_left
        return attention(q, keys, values, attn_mask=add_bias(position_bias, seen[:, None]))


@dataclass
class LayerCache:
    """One layer's part of a `KVCache`, `cache[layer]`: what a lone layer takes as `cache=`."""

    self_attention: AttentionCache
    cross_attention: AttentionCache | None = None


def host_lengths(seqlens: Sequence[int] | Tensor) -> Ints:
    """Lengths as an array on the host. A tensor on a GPU is waited for.

    Raises:
        ValueError: no one-dimensional integers.
    """
    values = seqlens.cpu().numpy() if isinstance(seqlens, Tensor) else np.asarray(seqlens)
    if values.ndim != 1 or not (values.dtype.kind in "iu" or not len(values)):
        raise ValueError(f"expected seqlens of shape (rows,) with integers, got {values.dtype} {values.shape}")
    return values.astype(np.int32)


def memory_lengths(
    keys: Sequence[Tensor], values: Sequence[Tensor], seqlens: Sequence[int] | Tensor | None, cache: Tensor
) -> Ints:
    """The lengths of the sources whose keys and values `KVCache.set_memory` is given; see there.

    Args:
        keys, values, seqlens: its arguments.
        cache: its k.
    """
    if len(keys) != len(cache) or len(values) != len(cache):
        raise ValueError(f"expected keys and values of {len(cache)} layers, got {len(keys)} and {len(values)}")
    shape, sizes = keys[0].shape, cache.shape[-2:]
    if len(shape) not in (3, 4) or shape[-2:] != sizes or any(x.shape != shape for x in (*keys, *values)):
        raise ValueError(
            f"expected keys and values of (sources, source_seqlen, {sizes[0]}, {sizes[1]}) or (total, {sizes[0]}, "
            f"{sizes[1]}), the same for all layers, got {tuple(shape)}"
        )
    padded = len(shape) == 4
    if seqlens is None and not padded:
        raise ValueError("expected seqlens along with packed keys and values")
    lengths = np.full(shape[0], shape[1], np.int32) if seqlens is None else host_lengths(seqlens)
    most, total = lengths.max(initial=0), lengths.sum()
    if lengths.min(initial=0) < 0 or (most > shape[1] or len(lengths) != shape[0] if padded else total > shape[0]):
        raise ValueError(f"expected seqlens that keys of shape {tuple(shape)} have, got {lengths.tolist()}")
    return lengths


def attention_unpacked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: SequenceLayout,
    position_bias: Tensor,
    window_size: tuple[int | None, int | None],
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
) -> Tensor:
    """Self-attention of packed sequences with a bias, which no kernel for them takes: each has a row of its own.

    Args:
        q: (total, num_heads, head_dim).
        k, v: (total, num_kv_heads, head_dim).
        layout: how they are packed.
        position_bias: (1, num_heads, max_seqlen, max_seqlen).
        window_size, dropout_p, dropout_seed: see `ops.attention`.

    Returns:
        q's shape; zeros behind the last sequence.
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
        dropout_seed=dropout_seed,
    )
    assert layout.cu_seqlens is not None
    is_real = torch.arange(len(q), device=q.device) < layout.cu_seqlens[-1]
    return layout.pack(out).where(is_real[:, None, None], 0.0)
