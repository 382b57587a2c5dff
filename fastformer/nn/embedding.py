"""Token embeddings and positions: absolute (sinusoidal, learned), rotary and relative."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fastformer.ops.embedding import embedding, sinusoidal_positions
from fastformer.ops.rotary import rotary, rotary_tables

# The number of bits in the significand of each half dtype. Numbers of wider dtypes are not rounded here.
_BITS = {torch.bfloat16: 8, torch.float16: 11}


def _rounded(number: float, dtype: torch.dtype) -> float:
    """Rounds a number of usual size to a dtype, without a tensor, so that a compiler can trace it."""
    if dtype not in _BITS:
        return number
    significand, exponent = math.frexp(number)
    return math.ldexp(round(math.ldexp(significand, _BITS[dtype])), exponent - _BITS[dtype])


SINUSOIDS = ("interleaved", "halves", "concatenated")


class PositionalEncoding(nn.Module):
    """Adds positions to embeddings, then drops out.

    Args:
        dim: size of an embedding.
        max_len: number of positions.
        dropout: probability while training, rounded to a multiple of 1/256.
        kind: "interleaved" (sin and cos alternate; the paper, section 3.5), "halves" (the same sines, then the
            cosines; Marian), "concatenated" (as "halves" with a slightly different divisor; tensor2tensor), or
            "learned" (a parameter `table`).
        batch_first: True for (batch, seqlen, dim), False for (seqlen, batch, dim), as in torch.nn.
        device, dtype: the device and dtype of the table.
        first: the position of the first token for sines and cosines (2 in fairseq's models).

    Raises:
        ValueError: kind is unknown; a sequence is longer than max_len.
    """

    table: Tensor

    def __init__(
        self,
        dim: int,
        max_len: int = 5000,
        dropout: float = 0.0,
        kind: str = "interleaved",
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        first: int = 0,
    ) -> None:
        super().__init__()
        if kind not in (*SINUSOIDS, "learned"):
            raise ValueError(f"expected a kind in {(*SINUSOIDS, 'learned')}, got {kind!r}")
        self.dim, self.max_len, self.dropout, self.kind, self.batch_first = dim, max_len, dropout, kind, batch_first
        if kind == "learned":
            self.table = nn.Parameter(torch.empty(max_len, dim, device=device, dtype=dtype))
        else:
            dtype = dtype or torch.get_default_dtype()
            table = sinusoidal_positions(max_len, dim, kind, first=first, device=device, dtype=dtype)
            self.register_buffer("table", table, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialises a learned table from N(0, 0.02), as in GPT-2."""
        if isinstance(self.table, nn.Parameter):
            nn.init.normal_(self.table, std=0.02)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Computes dropout(x + table[positions]).

        Args:
            x: (batch, seqlen, dim) or, without batch_first, (seqlen, batch, dim); packed (total, dim) with positions.
            positions: x's shape without dim; None: the index along the sequence.
        """
        if positions is None:
            seqlen = x.shape[-2] if self.batch_first or x.dim() == 2 else x.shape[0]
            if seqlen > self.max_len:
                raise ValueError(f"expected at most max_len = {self.max_len} positions, got a sequence of {seqlen}")
            added = self.table[:seqlen]
            if not self.batch_first and x.dim() == 3:
                added = added[:, None]
        else:
            added = self.table[positions]
        return nn.functional.dropout(x + added, self.dropout, self.training)

    def extra_repr(self) -> str:
        """Returns the options that print shows for the module."""
        return f"{self.dim}, max_len={self.max_len}, dropout={self.dropout}, kind={self.kind!r}"


class Embedding(nn.Embedding):
    """`torch.nn.Embedding` with the scale, the positions and the dropout of a Transformer's input in the same pass.

    Parameters: `weight`, as in torch.nn, and those of `position`. The embedding of `padding_idx` is zeros (plus its
    position), whatever its row of the weight holds: if the matrix is also the output projection's, that row is trained.

    Args:
        num_embeddings, embedding_dim, padding_idx, device, dtype: as in `torch.nn.Embedding`.
        max_norm, norm_type, scale_grad_by_freq, sparse: not supported; they only complete torch.nn's signature.
        scale: the factor of an embedding, sqrt(d_model) in the paper (section 3.4).
        round_scale: whether the scale is rounded to the weight's dtype first, as in Gemma.
        dropout: probability while training, after the positions, rounded to a multiple of 1/256.
        position: a `PositionalEncoding` whose table is added; its own dropout is not used.
        atomics: on a GPU, add gradients up by atomics instead of sorting the ids first; see `fastformer.ops.embedding`.

    Raises:
        ValueError: an option isn't supported; a sequence is longer than the position table.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: Tensor | None = None,
        _freeze: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        scale: float = 1.0,
        dropout: float = 0.0,
        position: PositionalEncoding | None = None,
        atomics: bool = False,
        round_scale: bool = False,
    ) -> None:
        if max_norm is not None or scale_grad_by_freq or sparse:
            raise ValueError(
                "max_norm, scale_grad_by_freq and sparse are not supported: use torch.nn.Embedding for them"
            )
        super().__init__(
            num_embeddings, embedding_dim, padding_idx, _weight=_weight, _freeze=_freeze, device=device, dtype=dtype
        )
        self.scale = scale
        self.round_scale = round_scale
        self.dropout = dropout
        self.position = position
        self.atomics = atomics

    @property
    def acting_scale(self) -> float:
        """The factor by which the rows of the weight are multiplied."""
        return _rounded(self.scale, self.weight.dtype) if self.round_scale else self.scale

    def forward(
        self,
        input: Tensor,  # noqa: A002 (torch.nn's name)
        positions: Tensor | None = None,
        *,
        position: PositionalEncoding | None = None,
    ) -> Tensor:
        """Computes dropout(weight[input] * scale + position.table[positions]).

        Args:
            input: (..., seqlen) integer ids.
            positions: input's shape; None: the index along the last dimension. Not used without a `position`.
            position: replaces the module's own, for tokens with the same embeddings but other positions.

        Returns:
            (..., seqlen, embedding_dim).
        """
        position = self.position if position is None else position
        table = None if position is None else position.table
        if table is not None and positions is None and input.shape[-1] > table.shape[0]:
            raise ValueError(f"expected at most {table.shape[0]} positions, got a sequence of {input.shape[-1]}")
        return embedding(
            input,
            self.weight,
            position_table=table,
            positions=None if table is None else positions,
            scale=self.acting_scale,
            padding_idx=self.padding_idx,
            dropout_p=self.dropout if self.training else 0.0,
            atomics=self.atomics,
        )


class RotaryPositions(NamedTuple):
    """Tables and positions for rotating queries and keys: `RotaryEmbedding` makes them for the modules' `rotary=`."""

    cos: Tensor
    sin: Tensor
    positions: Tensor | None
    interleaved: bool
    growth: Tensor | None = None

    def rotate(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Returns q and k rotated, each (batch, seqlen, heads, head_dim), or packed if there are positions.

        Queries are multiplied by the factors of their positions, if there are any.
        """
        cos, sin, positions, interleaved, growth = self
        q = rotary(q, cos, sin, positions=positions, interleaved=interleaved)
        if growth is not None:
            factors = growth[: q.shape[-3]] if positions is None else growth[positions]
            q = q * factors[..., None, None].to(q.dtype)
        return q, rotary(k, cos, sin, positions=positions, interleaved=interleaved)


class RotaryEmbedding(nn.Module):
    """Rotary positions (Su et al. 2021): queries and keys are rotated by an angle that grows with the position.

    Args:
        head_dim: the number of features of a head that are rotated, the first ones.
        max_len: number of positions.
        base: the slowest of the angular speeds is near 1 / base.
        interleaved: rotate neighbouring pairs (the paper) instead of the two halves (GPT-NeoX, Llama).
        device, dtype: the device and dtype of the tables.
        speeds: (head_dim // 2,) radians per position instead of those that follow from the base.
        scale: the factor of cosines and sines.
        query_growth: queries at position p are multiplied by 1 + query_growth * log(1 + floor(p / query_growth_length))
            (Llama 4, Ministral 3), in fp32.
        query_growth_length: see above.
    """

    cos: Tensor
    sin: Tensor
    growth: Tensor | None

    def __init__(
        self,
        head_dim: int,
        max_len: int = 5000,
        base: float = 10000.0,
        interleaved: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        speeds: Tensor | None = None,
        scale: float = 1.0,
        query_growth: float = 0.0,
        query_growth_length: int = 8192,
    ) -> None:
        super().__init__()
        self.max_len = max_len
        self.interleaved = interleaved
        dtype = dtype or torch.get_default_dtype()
        cos, sin = rotary_tables(max_len, head_dim, base, device=device, dtype=dtype, speeds=speeds, scale=scale)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        growth = None
        if query_growth:
            steps = torch.floor(torch.arange(max_len, device=device, dtype=torch.float32) / query_growth_length)
            growth = (1 + query_growth * torch.log(1 + steps)).to(dtype)
        self.register_buffer("growth", growth, persistent=False)

    def forward(self, positions: Tensor | None = None) -> RotaryPositions:
        """Binds the tables to positions: (batch, seqlen) or (total,) integers.

        None: the index along the sequence, or if tokens are appended to a cache, their positions there.
        """
        return RotaryPositions(self.cos, self.sin, positions, self.interleaved, self.growth)


class RelativePositionBias(nn.Module):
    """A learned bias of each head's scores that depends on the distance from query to key (Raffel et al. 2020).

    Section 2.1; the buckets are Mesh TensorFlow's. Half of them hold one distance each. The others hold increasingly
    wide ranges up to max_distance, and all larger distances share the last bucket.

    Parameters: `table` (num_buckets, num_heads).

    Args:
        num_heads: the number of heads of the attention.
        num_buckets: the number of buckets for all distances.
        max_distance: larger distances count as this one.
        is_causal: whether keys after their query, which doesn't see them, have no buckets; else they have half.
        device, dtype: the device and dtype of the table.

    Raises:
        ValueError: there are fewer than 4 buckets; max_distance isn't beyond the buckets of one distance each.
    """

    def __init__(
        self,
        num_heads: int,
        num_buckets: int = 32,
        max_distance: int = 128,
        is_causal: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_buckets(num_buckets, max_distance)
        self.num_heads, self.num_buckets, self.max_distance = num_heads, num_buckets, max_distance
        self.is_causal = is_causal
        self.table = nn.Parameter(torch.empty(num_buckets, num_heads, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialises the table from N(0, 0.02), like a learned `PositionalEncoding`."""
        nn.init.normal_(self.table, std=0.02)

    def buckets(self, distances: Tensor) -> Tensor:
        """Returns the rows of the table for distances of any shape: a key's position minus its query's."""
        if self.is_causal:
            count, first, distances = self.num_buckets, torch.zeros_like(distances), (-distances).clamp(min=0)
        else:
            count = self.num_buckets // 2
            first, distances = (distances > 0).long() * count, distances.abs()
        alone = count // 2
        # In fp32 and in this order: another rounding could give another bucket.
        far = torch.log(distances.float() / alone) / math.log(self.max_distance / alone) * (count - alone)
        shared = (alone + far.clamp(min=0).long()).clamp(max=count - 1)
        return first + torch.where(distances < alone, distances, shared)

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Returns the bias that is added to the scores.

        Args:
            queries: (seqlen_q,) or (batch, seqlen_q) positions.
            keys: (seqlen_k,) positions.

        Returns:
            (1 or batch, num_heads, seqlen_q, seqlen_k), for `MultiheadAttention`'s position_bias.
        """
        queries = queries if queries.dim() == 2 else queries[None]
        found = nn.functional.embedding(self.buckets(keys - queries[..., None]), self.table)
        return found.permute(0, 3, 1, 2)

    def extra_repr(self) -> str:
        """Returns the options that print shows for the module."""
        return (
            f"{self.num_heads}, num_buckets={self.num_buckets}, max_distance={self.max_distance}, "
            f"is_causal={self.is_causal}"
        )


def check_buckets(num_buckets: int, max_distance: int) -> None:
    """Raises ValueError unless every bucket of a `RelativePositionBias` has distances."""
    if num_buckets < 4:
        raise ValueError(f"expected num_buckets of at least 4, got {num_buckets}")
    if max_distance <= num_buckets // 2:
        raise ValueError(
            f"expected max_distance to be more than half of num_buckets, {num_buckets // 2}, got {max_distance}"
        )
