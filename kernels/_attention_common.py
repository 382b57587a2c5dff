"""What the attention kernels share: where a block of work lies, how far it reaches, what a launch needs."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastformer.kernels._launch import (
    INTERPRETED,
    Dropout,
    contiguous,
    dot_precision,
    dropout_arguments,
    next_power_of_2,
)
from fastformer.kernels._softcap import soft_capped

# Arguments whose values must not make another binary: Triton compiles apart for 1 and for multiples of 16.
COUNTS = ["planes", "lengths", "window", "dropout"]
# One group of heads keeps its K and V (or Q and dO) in L2 while all of its blocks run: half of Hopper's 50 MB.
L2_BYTES = 24 * 2**20
# Windows and lengths stay far from int32's end, so that row + diagonal + window can't wrap.
FAR = 2**29


@triton.jit
def which_block(num_blocks, num_planes, planes_together, LAST_FIRST: tl.constexpr):
    """(block, plane) of this program: `planes_together` planes (batch x head) at a time, their first blocks first.

    Blocks go in one order over a whole group of planes, so that with causal masks the heaviest start first and the
    lightest fill the gaps at the end. LAST_FIRST: the last block is the heaviest.
    """
    pid = tl.program_id(0)
    group = pid // (planes_together * num_blocks)
    first_plane = group * planes_together
    in_group = tl.minimum(num_planes - first_plane, planes_together)
    inside = pid - first_plane * num_blocks
    block = inside // in_group
    plane = first_plane + inside % in_group
    if LAST_FIRST:
        block = num_blocks - 1 - block
    return block, plane


@triton.jit
def locate(planes, lengths, LENGTHS: tl.constexpr, LAST_FIRST: tl.constexpr):
    """Whose work this program does: (block, plane, (batch, head, kv_head), (start_q, start_k), bounds).

    Args:
        planes: (num_heads, group, num_planes, num_blocks, together), `together` for `which_block`.
        lengths: (seqlens_q_ptr, seqlens_k_ptr, seqlen_q, seqlen_k).
        LENGTHS: "dense"; "seqlens_k" (seqlens_k_ptr holds each sequence's number of keys, the diagonal stays the
            tensor's); "packed" (both pointers hold cumulative lengths, and each sequence has its own diagonal).

    Returns:
        Indices and starts (rows of q and of k) as int64; bounds = (len_q, len_k, diagonal) of the one sequence.
    """
    num_heads, group, num_planes, num_blocks, together = planes
    seqlens_q_ptr, seqlens_k_ptr, seqlen_q, seqlen_k = lengths
    block, plane = which_block(num_blocks, num_planes, together, LAST_FIRST)
    batch = plane // num_heads
    head = plane % num_heads
    if LENGTHS == "packed":
        start_q = tl.load(seqlens_q_ptr + batch)
        start_k = tl.load(seqlens_k_ptr + batch)
        len_q = tl.load(seqlens_q_ptr + batch + 1) - start_q
        len_k = tl.load(seqlens_k_ptr + batch + 1) - start_k
        diagonal = len_k - len_q
    else:
        start_q = batch * 0
        start_k = start_q
        len_q = start_q + seqlen_q
        len_k = start_q + seqlen_k
        diagonal = len_k - len_q
        if LENGTHS == "seqlens_k":
            len_k = tl.minimum(tl.load(seqlens_k_ptr + batch).to(tl.int32), len_k)
    where = (batch.to(tl.int64), head.to(tl.int64), (head // group).to(tl.int64))
    return block, plane, where, (start_q.to(tl.int64), start_k.to(tl.int64)), (len_q, len_k, diagonal)


@triton.jit
def plane_ptr(ptr, strides, batch, row, head, UNIT: tl.constexpr):
    """Where row `row` of (batch, head) starts; all int64, since a batch's offset passes 2**31, also in UNITs."""
    return ptr + (batch * strides[0] + row * strides[1] + head * strides[2]) * UNIT


@triton.jit
def key_range(first_row, bounds, window, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Which keys the rows [first_row, first_row + BLOCK_M) see: (first, full_first, full_last, last).

    [first, last) is what any row sees, `first` cut down to a block; in between, [full_first, full_last) are whole
    blocks that every row sees, so that they need no mask. Sums stay non-negative before they are divided.
    """
    len_q, len_k, diagonal = bounds
    left, right = window
    last_row = tl.minimum(first_row + BLOCK_M, len_q) - 1
    first = first_row * 0
    full_first = first
    last = len_k
    full_last = len_k
    if left is not None:
        first = tl.maximum(first_row + diagonal - left, 0) // BLOCK_N * BLOCK_N
        full_first = (tl.maximum(last_row + diagonal - left, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    if right is not None:
        last = tl.minimum(last, last_row + diagonal + right + 1)
        full_last = tl.minimum(full_last, first_row + diagonal + right + 1)
    full_last = tl.maximum(full_last, 0) // BLOCK_N * BLOCK_N
    last = tl.maximum(last, first)
    full_first = tl.minimum(full_first, last) // BLOCK_N * BLOCK_N
    full_last = tl.maximum(full_last, full_first)
    return first, full_first, full_last, last


@triton.jit
def row_range(first_key, bounds, window, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Which rows see the keys [first_key, first_key + BLOCK_N): (first, full_first, full_last, last), as key_range."""
    len_q, len_k, diagonal = bounds
    left, right = window
    last_key = tl.minimum(first_key + BLOCK_N, len_k) - 1
    first = first_key * 0
    full_first = first
    last = len_q
    full_last = len_q
    if right is not None:
        first = tl.maximum(first_key - diagonal - right, 0) // BLOCK_M * BLOCK_M
        full_first = (tl.maximum(last_key - diagonal - right, 0) + BLOCK_M - 1) // BLOCK_M * BLOCK_M
    if left is not None:
        last = tl.minimum(last, last_key - diagonal + left + 1)
        full_last = tl.minimum(full_last, first_key - diagonal + left + 1)
    # Keys beyond the length must be masked in every block of rows: scored 0, exp2(0 - lse) overflows where lse < -88.
    full_last = tl.where(first_key + BLOCK_N <= len_k, full_last, 0)
    last = tl.where(first_key < len_k, last, 0)
    full_last = tl.maximum(full_last, 0) // BLOCK_M * BLOCK_M
    last = tl.maximum(last, first)
    full_first = tl.minimum(full_first, last) // BLOCK_M * BLOCK_M
    full_last = tl.maximum(full_last, full_first)
    return first, full_first, full_last, last


@triton.jit
def spans_of(first, full_first, full_last, last, BLOCK: tl.constexpr, TWO_ENDS: tl.constexpr):
    """The loops over a range, (start, left_blocks, second, blocks) each: its middle, free of masks, then its ends.

    One loop with masks serves both ends around the middle (see `block_start`): two copies of the loop's body in the
    kernel, not three. TWO_ENDS: whether there may be blocks before the middle.
    """
    left_blocks = (full_first - first) // BLOCK
    edge_blocks = left_blocks + (last - full_last + BLOCK - 1) // BLOCK
    edge = first
    if not TWO_ENDS:
        edge = full_last
    return (full_first, 0, 0, (full_last - full_first) // BLOCK), (edge, left_blocks, full_last, edge_blocks)


@triton.jit
def block_start(step, span, BLOCK: tl.constexpr, TWO_ENDS: tl.constexpr):
    """Where the step-th block of a span starts: from `start` on and, after `left_blocks` of them, from `second` on."""
    start, left_blocks, second, _ = span
    if TWO_ENDS:
        return tl.where(step < left_blocks, start + step * BLOCK, second + (step - left_blocks) * BLOCK)
    return start + step * BLOCK


@triton.jit
def load_tile(
    ptr, start, length, stride, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, CHECK: tl.constexpr
):
    """Rows [start, start + BLOCK) of a head, (BLOCK, BLOCK_D); zeros beyond HEAD_DIM and, with CHECK, `length`."""
    inside = tl.arange(0, BLOCK)
    dims = tl.arange(0, BLOCK_D)
    # int64 before the product: rows * stride passes 2**31 in long batches. Inside the tile 32 bits do.
    ptrs = ptr + tl.cast(start, tl.int64) * stride + inside[:, None] * stride + dims[None, :]
    if CHECK:
        here = (start + inside < length)[:, None]
        if HEAD_DIM != BLOCK_D:
            here = here & (dims < HEAD_DIM)[None, :]
        return tl.load(ptrs, mask=here, other=0.0)
    if HEAD_DIM != BLOCK_D:
        return tl.load(ptrs, mask=(dims < HEAD_DIM)[None, :], other=0.0)
    return tl.load(ptrs)


@triton.jit
def mask_ptrs(ptr, strides, rows, columns):
    """Where a mask's elements lie; `rows` and `columns` broadcast against each other."""
    return ptr + rows.to(tl.int64) * strides[2] + columns.to(tl.int64) * strides[3]


@triton.jit
def load_mask(
    ptr,
    strides,
    rows,
    columns,
    start,
    bounds,
    MASK: tl.constexpr,
    CHECK_ROWS: tl.constexpr,
    CHECK: tl.constexpr,
):
    """What `score_tile` applies as `mask`, broadcastable to the tile.

    Call it before the scores' product: the compiler settles the layout of the softmax by which of the two comes last,
    and that of a mask's loads would have the softmax computed twice.

    Args:
        ptr: where the mask of this batch and head starts.
        rows, columns: of the tile, as `score_tile` takes them.
        start: the first of the columns.
        MASK: "none", or "bool" or "additive", with "_keys" where all rows share one row of it.
        CHECK_ROWS, CHECK: whether rows and keys may be beyond their number.
    """
    len_q, len_k, _ = bounds
    if MASK == "none":
        return 0.0
    else:
        KEYS_ALONE: tl.constexpr = MASK == "bool_keys" or MASK == "additive_keys"
        if KEYS_ALONE:
            # A start is one number for the whole program. Added first, it costs a 64-bit sum a step and no register (a
            # boolean mask's kernel has none to spare); added last, a register pair and one instruction a step.
            before = tl.cast(start, tl.int64) * strides[3]
            inside = (columns - start).to(tl.int64) * strides[3]
            if MASK == "bool_keys":
                ptrs = (ptr + before) + inside
            else:
                ptrs = (ptr + inside) + before
            here = columns < len_k
        else:
            ptrs = mask_ptrs(ptr, strides, rows, columns)
            here = (rows < len_q) & (columns >= 0)
            if CHECK:
                here = here & (columns < len_k)
        if CHECK or (CHECK_ROWS and not KEYS_ALONE):
            mask = tl.load(ptrs, mask=here, other=0)
        else:
            mask = tl.load(ptrs)
        if MASK == "bool" or MASK == "bool_keys":
            # A limit on the score, +inf for 1 and -inf for 0: one multiplication and addition of integers, and one
            # minimum of floats, where comparing and selecting takes four.
            limit = tl.add(mask.to(tl.uint32) << 31, 0xFF800000, sanitize_overflow=False)
            return limit.to(tl.float32, bitcast=True)
        if mask.dtype == tl.bfloat16:
            # The upper half of a float32: two operations a pair that shares a register, where a conversion takes three.
            bits = mask.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
            return bits.to(tl.float32, bitcast=True)
        return mask.to(tl.float32)


# A score under the limit that a boolean mask sets it; a NaN that is hidden goes. A machine's minimum takes the number
# of two, the interpreter's keeps the NaN. (Two functions: with a global a kernel would lose its quick launch.)
if INTERPRETED:

    @triton.jit
    def limited(s, limit):
        """-inf where the limit is, else s."""
        return tl.where(limit < 0, float("-inf"), s)

else:

    @triton.jit
    def limited(s, limit):
        """The smaller of two numbers."""
        return tl.minimum(s, limit)


@triton.jit
def score_tile(
    a,
    b,
    mask,
    rows,
    columns,
    bounds,
    window,
    softmax_scale,
    softcap,
    MASK: tl.constexpr,
    CHECK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A tile of scores after cap, masks, length and window: (s, scale, slope); the softmax is that of scale * s.

    slope: what a gradient of the scores is multiplied by on its way through the cap; 1 without one.

    Args:
        a, b: a b^T is Q K^T, or its transpose.
        mask: from `load_mask`.
        rows, columns: of the tile, (BLOCK_M, 1) and (1, BLOCK_N), or the transpose's (1, BLOCK_M) and (BLOCK_N, 1).
        softcap: c of c tanh(score / c), or None.
        MASK: as to `load_mask`.
        CHECK: whether keys may be beyond the length or the window.
    """
    _, len_k, diagonal = bounds
    s = tl.dot(a, tl.trans(b), input_precision=PRECISION)
    scale = softmax_scale
    slope = 1.0
    if softcap is not None:
        s, slope = soft_capped(s * softmax_scale, softcap, a.dtype == tl.float32)
        scale = 1.0
    if MASK == "bool" or MASK == "bool_keys":
        s = limited(s, mask)
    elif MASK != "none":
        s = s * scale + mask
        scale = 1.0
    if CHECK:
        visible = (columns < len_k) & (rows >= 0)
        if window[1] is not None:
            visible = visible & (columns <= rows + (diagonal + window[1]))
        if window[0] is not None:
            visible = visible & (columns >= rows + (diagonal - window[0]))
        s = tl.where(visible, s, float("-inf"))
    return s, scale, slope


@triton.constexpr_function
def needs_exact_weights(MASK, dtype):
    """Whether `softmax_weights` subtracts in the units of `base`.

    For fp32's precision, and for added masks of float32's lowest number, which times log2(e) is no number (the forward
    pass takes `row_units` for those, where the inputs are no fp32).
    """
    return dtype == tl.float32 or MASK in ("additive", "additive_keys")


@triton.jit
def softmax_weights(s, scale, base, EXACT: tl.constexpr):
    """exp(scale * s - base). EXACT: see `needs_exact_weights`; else one multiplication less an element."""
    if EXACT:
        return tl.exp2((s * scale - base) * 1.4426950408889634)
    return tl.exp2(s * (scale * 1.4426950408889634) - base * 1.4426950408889634)


@triton.constexpr_function
def takes_row_units(MASK, dtype):
    """Whether the forward pass weighs by `row_units`: added masks, where fp32's precision isn't asked for."""
    return dtype != tl.float32 and MASK in ("additive", "additive_keys")


@triton.jit
def row_units(peak):
    """(unit, level) of rows, whose weights are exp2(s * unit - level): one operation an element, for added masks.

    unit is log2(e) and level the peak in it, rounded. That rounding multiplies all weights under one peak, and their
    sum, by one factor: 1 beside peaks that leave scores their digits, between 2**-8 and 2**8 at most. Weights under an
    earlier peak keep theirs, an error like that of the scores' own roundings. Far peaks have unit 1: float32's lowest
    number times log2(e) is no number, and scores lie 16 apart there, so that beside the highest none has weight in
    either base.
    """
    unit = tl.where(tl.abs(peak) < 1.5e8, 1.4426950408889634, 1.0)
    return unit, peak * unit


class Problem(NamedTuple):
    """One call, dense or packed, in the terms that the kernels share."""

    batch: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    seqlen_q: int  # the longest, when packed
    seqlen_k: int
    lengths: str  # see locate
    seqlens_q: Tensor | None
    seqlens_k: Tensor | None
    window: tuple[int | None, int | None]
    softmax_scale: float
    dropout: Dropout
    precision: str
    softcap: float | None = None  # of the scaled scores

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def block_d(self) -> int:
        return max(16, next_power_of_2(self.head_dim))


def describe(
    q: Tensor,
    k: Tensor,
    *,
    lengths: str,
    seqlens_q: Tensor | None,
    seqlens_k: Tensor | None,
    seqlen_q: int,
    seqlen_k: int,
    softmax_scale: float,
    window_left: int | None,
    window_right: int | None,
    dropout_p: float,
    dropout_seed: Tensor | None,
    softcap: float = 0.0,
) -> Problem:
    """Collects a call's facts; drops windows without an effect (with one query, causal is no mask)."""
    if window_right is not None and window_right >= seqlen_q - 1:
        window_right = None
    if window_left is not None and window_left >= seqlen_k - 1:
        window_left = None
    batch = q.shape[0]
    if lengths == "packed":
        assert seqlens_q is not None  # where each sequence begins
        batch = seqlens_q.numel() - 1
    return Problem(
        batch=batch,
        num_heads=q.shape[-2],
        num_kv_heads=k.shape[-2],
        head_dim=q.shape[-1],
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        lengths=lengths,
        seqlens_q=contiguous(seqlens_q),
        seqlens_k=contiguous(seqlens_k),
        window=(
            None if window_left is None else max(window_left, -FAR),
            None if window_right is None else max(window_right, -FAR),
        ),
        softmax_scale=softmax_scale,
        dropout=dropout_arguments(dropout_p, dropout_seed),
        precision=dot_precision(q),
        softcap=softcap or None,
    )


# A tile's rows are told apart in 32 bits (see load_tile): 256 of them, the largest tile has 128.
LARGEST_ROW_STRIDE = 2**31 // 256


def is_readable(x: Tensor) -> bool:
    """Whether kernels can read `x`: elements of a row side by side, rows not too far apart."""
    strides = x.stride()
    return strides[-1] == 1 and strides[-3] < LARGEST_ROW_STRIDE


def readable(x: Tensor) -> Tensor:
    """`x` as the kernels read it, a copy where need be."""
    return x if is_readable(x) else x.contiguous()


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Those of a new tensor that is not empty."""
    strides, size = [], 1
    for extent in reversed(shape):
        strides.append(size)
        size *= extent
    return tuple(reversed(strides))


def plane_strides(strides: tuple[int, ...], packed: bool, unit: int) -> tuple[int, int, int]:
    """(batch, row, head) strides of a tensor in `unit`s; a packed tensor has no batch stride."""
    batch, row, head = (0, *strides[:2]) if packed else strides[:3]
    return batch // unit, row // unit, head // unit


def planes_of(problem: Problem, num_blocks: int, bytes_each: int) -> tuple[int, int, int, int, int]:
    """The argument `planes` of `locate`; bytes_each: what the blocks of a plane share and should find in L2."""
    num_planes = problem.batch * problem.num_heads
    together = max(1, min(num_planes, L2_BYTES // max(bytes_each, 1)))
    return problem.num_heads, problem.group, num_planes, num_blocks, together


def mask_kind(attn_mask: Tensor | None) -> str:
    """The constexpr MASK of `load_mask`."""
    if attn_mask is None:
        return "none"
    kind = "bool" if attn_mask.dtype == torch.bool else "additive"
    return kind + "_keys" if mask_strides(attn_mask)[2] == 0 else kind


def mask_strides(attn_mask: Tensor | None) -> tuple[int, ...]:
    """(batch, head, row, column) strides, 0 where the mask is broadcast."""
    if attn_mask is None:
        return (0, 0, 0, 0)
    return broadcast_strides(attn_mask.shape, attn_mask.stride())


def broadcast_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """The strides, 0 where one element serves the whole dimension."""
    return tuple(0 if size == 1 else stride for size, stride in zip(shape, strides, strict=True))


def mask_bytes(attn_mask: Tensor | None) -> Tensor | None:
    """The mask as the kernels read it: booleans as bytes."""
    return attn_mask.view(torch.uint8) if attn_mask is not None and attn_mask.dtype == torch.bool else attn_mask
