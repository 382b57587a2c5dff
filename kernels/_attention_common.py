"""The shared part of the attention kernels: the position of a block of work, its key and row ranges, and arguments."""

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

# Arguments whose values must not lead to another binary: Triton specialises on 1 and on multiples of 16.
COUNTS = ["planes", "lengths", "window", "dropout"]
# K and V (or Q and dO) of a group of heads stay in L2 while all of its blocks run: half of Hopper's 50 MB.
L2_BYTES = 24 * 2**20
# The bound for windows and lengths, far below int32's maximum, so that row + diagonal + window can't overflow.
FAR = 2**29


@triton.jit
def which_block(num_blocks, num_planes, planes_together, LAST_FIRST: tl.constexpr):
    """Returns (block, plane) of this program. A plane is a (batch, head); `planes_together` planes run at a time.

    A group of planes runs block by block, so that under causal masks the heaviest blocks start first and the lightest
    ones fill the gaps at the end. LAST_FIRST: the last block is the heaviest.
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
    """Returns the work of this program: (block, plane, (batch, head, kv_head), (start_q, start_k), bounds).

    Args:
        planes: (num_heads, group, num_planes, num_blocks, together), `together` for `which_block`.
        lengths: (seqlens_q_ptr, seqlens_k_ptr, seqlen_q, seqlen_k).
        LENGTHS: "dense"; "seqlens_k" (seqlens_k_ptr holds the number of keys of each sequence, and the diagonal is that
            of the tensor); "packed" (both pointers hold cumulative lengths, and each sequence has its own diagonal).

    Returns:
        Indices and starts (rows of q and of k) as int64; bounds = (len_q, len_k, diagonal) of the program's sequence.
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
    """Returns a pointer to row `row` of (batch, head). Offsets are int64: a batch's can exceed 2**31, even in UNITs."""
    return ptr + (batch * strides[0] + row * strides[1] + head * strides[2]) * UNIT


@triton.jit
def key_range(first_row, bounds, window, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Returns the keys that the rows [first_row, first_row + BLOCK_M) see: (first, full_first, full_last, last).

    [first, last) are the keys that any row sees, with `first` rounded down to a block. [full_first, full_last) are the
    whole blocks in between that every row sees, so that they need no mask. Dividends are never negative.
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
    """Returns the rows that see the keys [first_key, first_key + BLOCK_N), in the form of `key_range`."""
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
    # Keys beyond the length must be masked in all blocks of rows: with score 0, exp2(0 - lse) overflows for lse < -88.
    full_last = tl.where(first_key + BLOCK_N <= len_k, full_last, 0)
    last = tl.where(first_key < len_k, last, 0)
    full_last = tl.maximum(full_last, 0) // BLOCK_M * BLOCK_M
    last = tl.maximum(last, first)
    full_first = tl.minimum(full_first, last) // BLOCK_M * BLOCK_M
    full_last = tl.maximum(full_last, full_first)
    return first, full_first, full_last, last


@triton.jit
def spans_of(first, full_first, full_last, last, BLOCK: tl.constexpr, TWO_ENDS: tl.constexpr):
    """Returns two loops over a range, each as (start, left_blocks, second, blocks): its unmasked middle, then its ends.

    One loop with masks covers both ends (see `block_start`), so the kernel contains the loop's body twice and not three
    times. TWO_ENDS: whether there may be blocks before the middle.
    """
    left_blocks = (full_first - first) // BLOCK
    edge_blocks = left_blocks + (last - full_last + BLOCK - 1) // BLOCK
    edge = first
    if not TWO_ENDS:
        edge = full_last
    return (full_first, 0, 0, (full_last - full_first) // BLOCK), (edge, left_blocks, full_last, edge_blocks)


@triton.jit
def block_start(step, span, BLOCK: tl.constexpr, TWO_ENDS: tl.constexpr):
    """Returns the start of the step-th block of a span: `left_blocks` from `start` on, the rest from `second` on."""
    start, left_blocks, second, _ = span
    if TWO_ENDS:
        return tl.where(step < left_blocks, start + step * BLOCK, second + (step - left_blocks) * BLOCK)
    return start + step * BLOCK


@triton.jit
def load_tile(
    ptr, start, length, stride, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, CHECK: tl.constexpr
):
    """Loads rows [start, start + BLOCK) of a head, (BLOCK, BLOCK_D), zero beyond HEAD_DIM and, with CHECK, `length`."""
    inside = tl.arange(0, BLOCK)
    dims = tl.arange(0, BLOCK_D)
    # `start` is int64, because rows * stride exceeds 2**31 in large batches. Within the tile, 32 bits suffice.
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
def store_zeros(
    ptr, strides, batch, head, rows, num_rows, HEAD_DIM: tl.constexpr, UNIT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Zeroes rows of a head, up to num_rows."""
    dims = tl.arange(0, BLOCK_D)
    ptrs = plane_ptr(ptr, strides, batch, rows.to(tl.int64), head, UNIT)[:, None] + dims[None, :]
    here = (rows < num_rows)[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(ptrs, tl.zeros((BLOCK_M, BLOCK_D), dtype=ptr.dtype.element_ty), mask=here)


@triton.jit
def mask_ptrs(ptr, strides, rows, columns):
    """Returns pointers to the elements of a mask; `rows` and `columns` broadcast against each other."""
    return ptr + rows.to(tl.int64) * strides[2] + columns.to(tl.int64) * strides[3]


@triton.jit
def load_mask(
    ptr, strides, rows, columns, start, bounds, MASK: tl.constexpr, CHECK_ROWS: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """Loads the argument `mask` of `score_tile`, which is broadcastable to the tile.

    Call it before the product that computes the scores: the compiler takes the layout of the softmax from the later of
    the two, and with the layout of the mask's loads the softmax would be computed twice.

    Args:
        ptr: the start of the mask of this batch and head.
        rows, columns: the indices of the tile, as for `score_tile`.
        start: the first column.
        MASK: "none", "bool" or "additive"; with the suffix "_keys" if all rows share one row of the mask.
        CHECK_ROWS, CHECK: whether row and key indices may be out of range.
    """
    len_q, len_k, _ = bounds
    if MASK == "none":
        return 0.0
    else:
        KEYS_ALONE: tl.constexpr = MASK == "bool_keys" or MASK == "additive_keys"
        if KEYS_ALONE:
            # The start is the same for the whole program. Added first, it costs a 64-bit addition per step but no
            # register (a kernel with a boolean mask has none to spare). Added last, it costs two registers and one
            # instruction per step.
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
            # A limit on the score, +inf for 1 and -inf for 0. This takes one integer multiply-add and one
            # floating-point minimum; a comparison and a selection would take four instructions.
            limit = tl.add(mask.to(tl.uint32) << 31, 0xFF800000, sanitize_overflow=False)
            return limit.to(tl.float32, bitcast=True)
        if mask.dtype == tl.bfloat16:
            # The upper half of a float32. This takes two operations per pair in a register; a conversion takes three.
            bits = mask.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
            return bits.to(tl.float32, bitcast=True)
        return mask.to(tl.float32)


# Applies the limit of a boolean mask to a score; a hidden NaN disappears. The GPU's minimum of a NaN and a number is
# the number, the interpreter's is NaN. (There are two functions because a kernel that reads a global has a slower
# launch.)
if INTERPRETED:

    @triton.jit
    def limited(s, limit):
        """Returns -inf if the limit is -inf, else s."""
        return tl.where(limit < 0, float("-inf"), s)

else:

    @triton.jit
    def limited(s, limit):
        """Returns the smaller of the two."""
        return tl.minimum(s, limit)


@triton.jit
def score_tile(
    a, b, mask, rows, columns, bounds, window, softmax_scale, softcap, MASK: tl.constexpr, CHECK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Returns a tile of scores after cap, masks, length and window: (s, scale, slope). Softmax applies to scale * s.

    slope: the derivative of the cap, by which the gradient of the scores is multiplied; 1 without a cap.

    Args:
        a, b: the operands of Q K^T, or of its transpose, as a b^T.
        mask: from `load_mask`.
        rows, columns: the indices of the tile, (BLOCK_M, 1) and (1, BLOCK_N); transposed, (1, BLOCK_M) and (BLOCK_N,
        1).
        softcap: c of c tanh(score / c), or None.
        MASK: see `load_mask`.
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
    """Returns whether `softmax_weights` subtracts in the units of `base`.

    It does so for the precision of fp32, and for additive masks with float32's lowest number, which times log2(e) is
    -inf. (For such masks, the forward pass uses `row_units` unless the inputs are fp32.)
    """
    return dtype == tl.float32 or MASK in ("additive", "additive_keys")


@triton.jit
def softmax_weights(s, scale, base, EXACT: tl.constexpr):
    """Returns exp(scale * s - base). EXACT: see `needs_exact_weights`; False saves one multiplication per element."""
    if EXACT:
        return tl.exp2((s * scale - base) * 1.4426950408889634)
    return tl.exp2(s * (scale * 1.4426950408889634) - base * 1.4426950408889634)


@triton.constexpr_function
def takes_row_units(MASK, dtype):
    """Returns whether the forward pass uses `row_units`: for additive masks, unless the inputs are fp32."""
    return dtype != tl.float32 and MASK in ("additive", "additive_keys")


@triton.jit
def row_units(peak):
    """Returns (unit, level) of rows under an additive mask, whose weights are exp2(s * unit - level).

    This takes one operation per element. unit is log2(e), and level is the peak in that unit, rounded. The rounding
    multiplies all weights under one peak, and their sum, by the same factor. The factor is about 1 for peaks at which
    scores keep their precision, and always between 2**-8 and 2**8. Weights under an earlier peak have another factor,
    an error as large as that of rounding the scores. For very large peaks, unit is 1: float32's lowest number times
    log2(e) is -inf, and scores there are at least 16 apart, so that only the highest has any weight, in either base.
    """
    unit = tl.where(tl.abs(peak) < 1.5e8, 1.4426950408889634, 1.0)
    return unit, peak * unit


class Problem(NamedTuple):
    """A call, dense or packed, in the form that all attention kernels use."""

    batch: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    seqlen_q: int  # the maximum if packed
    seqlen_k: int
    lengths: str  # see locate
    seqlens_q: Tensor | None
    seqlens_k: Tensor | None
    window: tuple[int | None, int | None]
    softmax_scale: float
    dropout: Dropout
    precision: str
    softcap: float | None = None  # the cap of the scaled scores

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def block_d(self) -> int:
        return max(16, next_power_of_2(self.head_dim))


def describe(
    q: Tensor, k: Tensor, lengths: str, seqlens_q: Tensor | None, seqlens_k: Tensor | None, seqlen_q: int,
    seqlen_k: int, softmax_scale: float, window_left: int | None, window_right: int | None, dropout_p: float,
    dropout_seed: Tensor | None, softcap: float = 0.0,
) -> Problem:  # fmt: skip
    """Returns the description of a call. Windows without an effect are dropped; with one query, causal is no mask."""
    if window_right is not None and window_right >= seqlen_q - 1:
        window_right = None
    if window_left is not None and window_left >= seqlen_k - 1:
        window_left = None
    batch = q.shape[0]
    if lengths == "packed":
        assert seqlens_q is not None  # the start of each sequence
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


# Offsets within a tile are 32-bit (see load_tile): this allows 256 rows, and the largest tile has 128.
LARGEST_ROW_STRIDE = 2**31 // 256


def is_readable(x: Tensor) -> bool:
    """Returns whether kernels can read `x`: its rows are contiguous, and its row stride isn't too large."""
    strides = x.stride()
    return strides[-1] == 1 and strides[-3] < LARGEST_ROW_STRIDE


def readable(x: Tensor) -> Tensor:
    """Returns `x` in a form that kernels can read, as a copy if necessary."""
    return x if is_readable(x) else x.contiguous()


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the strides of a new tensor of this shape, which must not be empty."""
    strides, size = [], 1
    for extent in reversed(shape):
        strides.append(size)
        size *= extent
    return tuple(reversed(strides))


def plane_strides(strides: tuple[int, ...], packed: bool, unit: int) -> tuple[int, int, int]:
    """Returns the (batch, row, head) strides of a tensor in `unit`s; the batch stride of a packed tensor is 0."""
    batch, row, head = (0, *strides[:2]) if packed else strides[:3]
    return batch // unit, row // unit, head // unit


def planes_of(problem: Problem, num_blocks: int, bytes_each: int) -> tuple[int, int, int, int, int]:
    """Returns the argument `planes` of `locate`. bytes_each: the bytes that the blocks of a plane share, through L2."""
    num_planes = problem.batch * problem.num_heads
    together = max(1, min(num_planes, L2_BYTES // max(bytes_each, 1)))
    return problem.num_heads, problem.group, num_planes, num_blocks, together


def mask_kind(attn_mask: Tensor | None) -> str:
    """Returns the constexpr MASK of `load_mask`."""
    if attn_mask is None:
        return "none"
    kind = "bool" if attn_mask.dtype == torch.bool else "additive"
    return kind + "_keys" if mask_strides(attn_mask)[2] == 0 else kind


def mask_strides(attn_mask: Tensor | None) -> tuple[int, ...]:
    """Returns the (batch, head, row, column) strides of a mask; 0 in dimensions in which it is broadcast."""
    if attn_mask is None:
        return (0, 0, 0, 0)
    return broadcast_strides(attn_mask.shape, attn_mask.stride())


def broadcast_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the strides, with 0 for dimensions of size 1."""
    return tuple(0 if size == 1 else stride for size, stride in zip(shape, strides, strict=True))


def mask_bytes(attn_mask: Tensor | None) -> Tensor | None:
    """Returns the mask as the kernels read it: booleans as bytes."""
    return attn_mask.view(torch.uint8) if attn_mask is not None and attn_mask.dtype == torch.bool else attn_mask
