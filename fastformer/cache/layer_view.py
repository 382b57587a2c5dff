"""What one layer, and one attention of it, sees of a `KVCache`, and what a cache is handed for all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from fastformer.cache.block_pool import Ints


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
