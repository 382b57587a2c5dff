"""What the layers of a stack see of a `KVCache` in one step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from fastformer.cache.block_pool import Ints


class AttentionCache(NamedTuple):
    """One attention's part of a `KVCache`: views, so that writing into them writes into the cache.

    Attributes:
        k, v: (num_blocks, block_size, num_kv_heads, head_dim).
        slot_table: (rows, width) int32, the slot in `k.flatten(0, 1)` of each position. It is as wide as the longest
            row is after the step, in whole blocks, or as wide as it can get.
        seqlens: (rows,) int32, the tokens of each row before the step.
        num_tokens: the new tokens that every row has slots for; 0 in cross-attention.
        is_empty: whether all rows of a self-attention are without tokens.
        packed_slots: (tokens,) int64, the slots of packed prompts; None: the step takes padded tokens.
        is_static: True for cross-attention, to which no token is appended.
        batch_index: of cross-attention, int32: the row of the table that each query row, or each packed token, reads.
        rows_per_source: of cross-attention without batch_index: so many rows side by side read one row of the table.
    """

    k: Tensor
    v: Tensor
    slot_table: Tensor
    seqlens: Tensor
    num_tokens: int = 0
    is_empty: bool = False
    packed_slots: Tensor | None = None
    is_static: bool = False
    batch_index: Tensor | None = None
    rows_per_source: int = 1


class LayerCache(NamedTuple):
    """One layer's part of a `KVCache` in one step: what a layer takes as `cache=`."""

    self_attention: AttentionCache
    cross_attention: AttentionCache | None = None


class StepTables(NamedTuple):
    """One step of a `KVCache`, from `KVCache.begin` to `KVCache.commit`: where its tokens are read and written.

    The tensors are those of the cache. They say what is here until the cache changes, so also until the commit.

    Attributes:
        k, v: of each layer, see `AttentionCache`.
        slot_table, seqlens, packed_slots: of the rows; see `AttentionCache`.
        source_slots, source_seqlens: the same of the sources; None where there are none.
        batch_index: see `AttentionCache`.
        num_tokens: the most new tokens that a row gets.
        counts: (rows,) the new tokens of each row where they differ.
        first_row: the first of the rows.
        longest: the tokens of the longest row before the step.
        rows_per_source: see `AttentionCache`.
    """

    k: Sequence[Tensor] | Tensor
    v: Sequence[Tensor] | Tensor
    slot_table: Tensor
    seqlens: Tensor
    packed_slots: Tensor | None = None
    source_slots: Tensor | None = None
    source_seqlens: Tensor | None = None
    batch_index: Tensor | None = None
    num_tokens: int = 1
    counts: Ints | None = None
    first_row: int = 0
    longest: int = 0
    rows_per_source: int = 1

    def layer(self, index: int) -> LayerCache:
        """The part of one layer."""
        k, v = self.k[index], self.v[index]
        own = AttentionCache(k, v, self.slot_table, self.seqlens, self.num_tokens, self.longest == 0, self.packed_slots)
        if self.source_slots is None or self.source_seqlens is None:
            return LayerCache(own)
        slots, seqlens = self.source_slots, self.source_seqlens
        cross = AttentionCache(k, v, slots, seqlens, 0, False, None, True, self.batch_index, self.rows_per_source)
        return LayerCache(own, cross)
