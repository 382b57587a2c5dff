"""The views of a `KVCache` that the layers of a stack use in one step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from fastformer.cache.block_pool import Ints


class AttentionCache(NamedTuple):
    """The views of a `KVCache` for one attention. Writing to the views writes to the cache.

    Attributes:
        k, v: (num_blocks, block_size, num_kv_heads, head_dim).
        slot_table: (rows, width) int32, the slot of each position in `k.flatten(0, 1)`. Its width is the length of the
            longest row after the step, in whole blocks, or the greatest length that a row can have.
        seqlens: (rows,) int32, the number of tokens in each row before the step.
        num_tokens: the number of new tokens that every row has slots for; 0 in cross-attention.
        is_empty: whether all rows of a self-attention are without tokens.
        packed_slots: (tokens,) int64, the slots of packed prompts; None: the step's tokens are padded.
        is_static: True for cross-attention, to which no token is appended.
        batch_index: int32, for cross-attention: the row of the table that each query row, or each packed token, reads.
        rows_per_source: for cross-attention without batch_index: the number of adjacent rows that read one row of the
            table.
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
    """The views of a `KVCache` for one layer in one step, which the layer takes as `cache=`."""

    self_attention: AttentionCache
    cross_attention: AttentionCache | None = None


class StepTables(NamedTuple):
    """One step of a `KVCache`, from `KVCache.begin` to `KVCache.commit`: the slots that its layers read and write.

    The tensors belong to the cache. They are valid until the cache changes, and so until the commit.

    Attributes:
        k, v: the keys and values of each layer; see `AttentionCache`.
        slot_table, seqlens, packed_slots: the tables of the rows; see `AttentionCache`.
        source_slots, source_seqlens: the same tables for the sources; None without sources.
        batch_index: see `AttentionCache`.
        num_tokens: the most new tokens that a row gets.
        counts: (rows,) the number of new tokens in each row, if the numbers differ.
        first_row: the index of the first row.
        longest: the number of tokens in the longest row before the step.
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
        """Returns the views for one layer."""
        k, v = self.k[index], self.v[index]
        self_attn = AttentionCache(
            k, v, self.slot_table, self.seqlens, self.num_tokens, self.longest == 0, self.packed_slots
        )
        if self.source_slots is None or self.source_seqlens is None:
            return LayerCache(self_attn)
        slots, seqlens = self.source_slots, self.source_seqlens
        cross = AttentionCache(k, v, slots, seqlens, 0, False, None, True, self.batch_index, self.rows_per_source)
        return LayerCache(self_attn, cross)
