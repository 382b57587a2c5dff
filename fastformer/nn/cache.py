"""The keys and values that decoding keeps, so that no token is computed twice."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class AttentionCache:
    """What one attention of one layer sees of a `KVCache`: views, so that writing into them writes into the cache.

    Attributes:
        k, v: (rows, max_seqlen, num_kv_heads, head_dim).
        seqlens: (rows,) int32, how much of each row is filled.
        batch_index: (batch,) int32, the cache row of each query row; None when they are the same.
        is_static: True for cross-attention: nothing is appended.
        is_empty: True before the first tokens of a self-attention.
    """

    k: Tensor
    v: Tensor
    seqlens: Tensor
    batch_index: Tensor | None = None
    is_static: bool = False
    is_empty: bool = False


@dataclass
class LayerCache:
    """One layer's part of a `KVCache`, `cache[layer]`: what a lone layer takes as `cache=`."""

    self_attention: AttentionCache
    cross_attention: AttentionCache | None = None


class KVCache:
    """Static key and value tensors for all layers of a decoder. For inference: no gradient flows through it.

    The keys and values of the tokens are allocated once and updated in place, and the lengths live on the device, so
    that a decoding step needs no host sync. A stack given `cache=` appends the new tokens' keys and values and advances
    the lengths itself. The keys and values of a source are stored once, however many beams read them.

    Attributes:
        k, v: (num_layers, batch, max_seqlen, num_kv_heads, head_dim).
        seqlens: (batch,) int32, the tokens in each row.
        length_bound: no row is longer than this; kept on the host to catch an overflow without a sync.
        cross_k, cross_v: (num_layers, num_sources, source_seqlen, num_kv_heads, head_dim), or None before `set_memory`.
        source_seqlens: (num_sources,) int32, or None.
        source_index: (batch,) int32, which source each row reads, or None when row i reads source i.
    """

    def __init__(
        self,
        num_layers: int,
        batch_size: int,
        max_seqlen: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        sizes = (num_layers, batch_size, max_seqlen, num_kv_heads, head_dim)
        if not all(isinstance(size, int) for size in sizes) or min(sizes) < 1:
            raise ValueError(
                "expected num_layers, batch_size, max_seqlen, num_kv_heads and head_dim of at least 1, got "
                f"{num_layers}, {batch_size}, {max_seqlen}, {num_kv_heads}, {head_dim}"
            )
        shape = (num_layers, batch_size, max_seqlen, num_kv_heads, head_dim)
        # Zeros: a kernel may load what lies behind a row's length before it masks it, and 0 * NaN would be NaN.
        self.k = torch.zeros(shape, device=device, dtype=dtype)
        self.v = torch.zeros(shape, device=device, dtype=dtype)
        self.seqlens = torch.zeros(batch_size, dtype=torch.int32, device=device)
        self.length_bound = 0
        self.cross_k: Tensor | None = None
        self.cross_v: Tensor | None = None
        self.source_seqlens: Tensor | None = None
        self.source_index: Tensor | None = None

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return self.k.shape[0]

    @property
    def batch_size(self) -> int:
        """The number of rows that decode together (sources times beams)."""
        return self.k.shape[1]

    @property
    def max_seqlen(self) -> int:
        """The tokens that each row has room for."""
        return self.k.shape[2]

    @property
    def has_memory(self) -> bool:
        """Whether the keys and values of the source are there."""
        return self.cross_k is not None

    def __getitem__(self, layer: int) -> LayerCache:
        """The part of one layer."""
        own = AttentionCache(self.k[layer], self.v[layer], self.seqlens, is_empty=self.length_bound == 0)
        if self.cross_k is None or self.cross_v is None or self.source_seqlens is None:
            return LayerCache(own)
        k, v = self.cross_k[layer], self.cross_v[layer]
        return LayerCache(own, AttentionCache(k, v, self.source_seqlens, self.source_index, is_static=True))

    def positions(self, num_tokens: int) -> Tensor:
        """The positions of the next tokens of each row: (batch, num_tokens) int64."""
        return self.seqlens[:, None] + torch.arange(num_tokens, device=self.seqlens.device)

    def check_room(self, num_tokens: int) -> None:
        """Raises ValueError when `num_tokens` more don't fit, by what the host knows."""
        if self.length_bound + num_tokens > self.max_seqlen:
            raise ValueError(
                f"the cache has room for {self.max_seqlen} tokens a row and holds up to {self.length_bound}; "
                f"{num_tokens} more don't fit: make it with a larger max_seqlen"
            )

    def advance(self, num_tokens: int, seqlens: Tensor | None = None) -> None:
        """Counts tokens that were just appended. The stacks call it; a lone layer's caller calls it.

        Args:
            num_tokens: the tokens appended to each row.
            seqlens: (batch,) the real ones among them where the rows differ (right-padded prompts); what was written
                behind them is overwritten by the next tokens.
        """
        self.check_room(num_tokens)
        self.seqlens.add_(num_tokens if seqlens is None else seqlens)
        self.length_bound += num_tokens

    def set_memory(
        self,
        keys: list[Tensor],
        values: list[Tensor],
        seqlens: Tensor | None = None,
        source_index: Tensor | None = None,
    ) -> None:
        """Stores the cross-attention's keys and values, once per source.

        Args:
            keys, values: one tensor a layer, (num_sources, source_seqlen, num_kv_heads, head_dim).
            seqlens: (num_sources,) real tokens of each source; None: all.
            source_index: (batch,) which source each row reads. None: row i reads source i // (batch / num_sources), so
                that the beams of one source stand side by side.

        Raises:
            ValueError: another number of layers, or of sources than divides the batch.
        """
        num_sources, source_seqlen = keys[0].shape[:2]
        if len(keys) != self.num_layers or len(values) != self.num_layers:
            raise ValueError(f"expected keys and values of {self.num_layers} layers, got {len(keys)} and {len(values)}")
        device = self.k.device
        if source_index is None and num_sources != self.batch_size:
            if self.batch_size % num_sources != 0:
                raise ValueError(
                    f"expected a batch that is a multiple of the {num_sources} sources, or a source_index; "
                    f"got a cache of {self.batch_size} rows"
                )
            beams = self.batch_size // num_sources
            source_index = torch.arange(self.batch_size, device=device) // beams
        self.cross_k = torch.stack([k.to(self.k.dtype) for k in keys])
        self.cross_v = torch.stack([v.to(self.v.dtype) for v in values])
        if seqlens is None:
            seqlens = torch.full((num_sources,), source_seqlen, device=device)
        self.source_seqlens = seqlens.to(device=device, dtype=torch.int32)
        self.source_index = None if source_index is None else source_index.to(device=device, dtype=torch.int32)

    def reorder(self, index: Tensor) -> None:
        """Row i becomes what row index[i] was, in place: a beam search keeps its survivors.

        Args:
            index: (batch,) integers.
        """
        if index.shape != (self.batch_size,):
            raise ValueError(f"expected an index of shape ({self.batch_size},), got {tuple(index.shape)}")
        for cache in (self.k, self.v):
            filled = cache[:, :, : self.length_bound]
            filled.copy_(filled.index_select(1, index))
        self.seqlens.copy_(self.seqlens.index_select(0, index))
        if self.source_index is not None:
            self.source_index.copy_(self.source_index.index_select(0, index))
        elif self.cross_k is not None:
            # Rows of one beam each: the rows move, the sources stay.
            self.source_index = index.to(torch.int32)

    def select(self, rows: Tensor) -> None:
        """Keeps some rows: finished sequences leave the batch.

        What is filled moves to the front, and `k` and `v` become views of those rows: a copy of the whole width, most
        of it empty, would cost more than the decoding.

        Args:
            rows: (new_batch,) integers, the rows that stay, in their new order; no more than there are.

        Raises:
            ValueError: more rows than the cache has.
        """
        if len(rows) > self.batch_size:
            raise ValueError(f"expected at most the {self.batch_size} rows of the cache, got {len(rows)}")
        for cache in (self.k, self.v):
            for layer in cache[:, :, : self.length_bound]:
                layer[: len(rows)].copy_(layer.index_select(0, rows))
        self.k, self.v = self.k[:, : len(rows)], self.v[:, : len(rows)]
        self.seqlens = self.seqlens.index_select(0, rows)
        if self.source_index is not None:
            self.source_index = self.source_index.index_select(0, rows)
        elif self.cross_k is not None and self.cross_v is not None and self.source_seqlens is not None:
            self.cross_k, self.cross_v = self.cross_k.index_select(1, rows), self.cross_v.index_select(1, rows)
            self.source_seqlens = self.source_seqlens.index_select(0, rows)

    def reset(self) -> None:
        """Forgets the tokens and the source, and keeps the memory for the next batch."""
        self.seqlens.zero_()
        self.length_bound = 0
        self.cross_k = self.cross_v = self.source_seqlens = self.source_index = None
