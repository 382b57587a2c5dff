"""What the attention kernels share: where a block of work lies, how far it reaches, what a launch needs."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# Arguments whose value must not make another binary: Triton compiles apart for 1 and for multiples of 16.
COUNTS = ["seqlen_q", "seqlen_k", "num_planes", "num_heads", "group", "together", "window_left", "window_right"]
COUNTS += ["threshold", "num_blocks"]
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
def sequence_bounds(batch, seqlen_q, seqlen_k, seqlens_q_ptr, seqlens_k_ptr, LENGTHS: tl.constexpr):
    """(first row of q, first row of k, len_q, len_k, diagonal) of one sequence.

    LENGTHS: "dense"; "seqlens_k" (seqlens_k_ptr holds each sequence's number of keys, the diagonal stays the tensor's);
    "packed" (both pointers hold cumulative lengths, and each sequence has its own diagonal).
    """
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
    return start_q.to(tl.int64), start_k.to(tl.int64), len_q, len_k, diagonal


@triton.jit
def key_range(
    first_row,
    len_q,
    len_k,
    diagonal,
    window_left,
    window_right,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Which keys the rows [first_row, first_row + BLOCK_M) see: (first, full_first, full_last, last).

    [first, last) is what any row sees, `first` cut down to a block; in between, [full_first, full_last) are whole
    blocks that every row sees, so that they need no mask. Sums stay non-negative before they are divided.
    """
    last_row = tl.minimum(first_row + BLOCK_M, len_q) - 1
    first = first_row * 0
    full_first = first
    last = len_k
    full_last = len_k
    if HAS_LEFT:
        first = tl.maximum(first_row + diagonal - window_left, 0) // BLOCK_N * BLOCK_N
        full_first = (tl.maximum(last_row + diagonal - window_left, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    if HAS_RIGHT:
        last = tl.minimum(last, last_row + diagonal + window_right + 1)
        full_last = tl.minimum(full_last, first_row + diagonal + window_right + 1)
    full_last = tl.maximum(full_last, 0) // BLOCK_N * BLOCK_N
    last = tl.maximum(last, first)
    full_first = tl.minimum(full_first, last) // BLOCK_N * BLOCK_N
    full_last = tl.maximum(full_last, full_first)
    return first, full_first, full_last, last


@triton.jit
def row_range(
    first_key,
    len_q,
    len_k,
    diagonal,
    window_left,
    window_right,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Which rows see the keys [first_key, first_key + BLOCK_N): (first, full_first, full_last, last), as key_range."""
    last_key = tl.minimum(first_key + BLOCK_N, len_k) - 1
    first = first_key * 0
    full_first = first
    last = len_q
    full_last = len_q
    if HAS_RIGHT:
        first = tl.maximum(first_key - diagonal - window_right, 0) // BLOCK_M * BLOCK_M
        full_first = (tl.maximum(last_key - diagonal - window_right, 0) + BLOCK_M - 1) // BLOCK_M * BLOCK_M
    if HAS_LEFT:
        last = tl.minimum(last, last_key - diagonal + window_left + 1)
        full_last = tl.minimum(full_last, first_key - diagonal + window_left + 1)
    # Keys beyond the length must be masked in every block of rows: scored 0, exp2(0 - lse) overflows where lse < -88.
    full_last = tl.where(first_key + BLOCK_N <= len_k, full_last, 0)
    last = tl.where(first_key < len_k, last, 0)
    full_last = tl.maximum(full_last, 0) // BLOCK_M * BLOCK_M
    last = tl.maximum(last, first)
    full_first = tl.minimum(full_first, last) // BLOCK_M * BLOCK_M
    full_last = tl.maximum(full_last, full_first)
    return first, full_first, full_last, last


@triton.jit
def block_start(step, first, left_blocks, second, BLOCK: tl.constexpr, TWO_ENDS: tl.constexpr):
    """Where the step-th block of a loop starts: from `first` on and, after `left_blocks` of them, from `second` on.

    So one loop with masks serves both ends of a range around its unmasked middle: two copies of the loop's body
    in the kernel, not three.
    """
    if TWO_ENDS:
        return tl.where(step < left_blocks, first + step * BLOCK, second + (step - left_blocks) * BLOCK)
    return first + step * BLOCK


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
def visible_tile(
    rows,
    columns,
    len_k,
    diagonal,
    window_left,
    window_right,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
):
    """Which keys a row sees by length and window; `rows` and `columns` broadcast against each other."""
    visible = (columns < len_k) & (rows >= 0)
    if HAS_RIGHT:
        visible = visible & (columns <= rows + (diagonal + window_right))
    if HAS_LEFT:
        visible = visible & (columns >= rows + (diagonal - window_left))
    return visible


@triton.jit
def softmax_weights(s, scale, base, EXACT: tl.constexpr):
    """exp(scale * s - base). EXACT (fp32) subtracts in the units of `base`; else one multiplication less an element."""
    if EXACT:
        return tl.exp2((s * scale - base) * 1.4426950408889634)
    return tl.exp2(s * (scale * 1.4426950408889634) - base * 1.4426950408889634)


class Problem(NamedTuple):
    """One call, dense or packed, in the terms that the kernels share."""

    batch: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    seqlen_q: int  # the longest, when packed
    seqlen_k: int
    lengths: str  # see sequence_bounds
    seqlens_q: Tensor | None
    seqlens_k: Tensor | None
    window_left: int | None
    window_right: int | None
    softmax_scale: float
    threshold: int  # dropout; -1 = none
    dropout_seed: Tensor | None
    precision: str

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def block_d(self) -> int:
        return max(16, triton.next_power_of_2(self.head_dim))


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
) -> Problem:
    """Collects a call's facts; drops windows that no row can feel (causal with one query is no mask at all)."""
    if window_right is not None and window_right >= seqlen_q - 1:
        window_right = None
    if window_left is not None and window_left >= seqlen_k - 1:
        window_left = None
    dropped = round(dropout_p * 65536)
    return Problem(
        batch=q.shape[0] if lengths != "packed" else seqlens_q.numel() - 1,
        num_heads=q.shape[-2],
        num_kv_heads=k.shape[-2],
        head_dim=q.shape[-1],
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        lengths=lengths,
        seqlens_q=seqlens_q,
        seqlens_k=seqlens_k,
        window_left=None if window_left is None else max(window_left, -FAR),
        window_right=None if window_right is None else max(window_right, -FAR),
        softmax_scale=softmax_scale,
        threshold=dropped if dropped > 0 else -1,
        dropout_seed=dropout_seed,
        # Three TF32 products carry about 21 bits of fp32's 24; plain TF32 would carry 10. The interpreter is exact.
        precision="tf32x3" if q.device.type == "cuda" else "ieee",
    )


def last_dim_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def stride_unit(*tensors: Tensor) -> int:
    """8 where every stride is a multiple of 8, else 1: kernels take strides in this unit.

    They multiply by it, so that the compiler sees that rows can be read 16 bytes at a time also where a stride is no
    multiple of 16 (head_dim 40), which is all that Triton tells it about an integer.
    """
    return 8 if all(stride % 8 == 0 for x in tensors for stride in x.stride()[:-1]) else 1


def strides(x: Tensor, packed: bool, unit: int) -> tuple[int, int, int]:
    """(batch, row, head) strides in `unit`s; a packed tensor has no batch stride."""
    batch, row, head = (0, *x.stride()[:2]) if packed else x.stride()[:3]
    return batch // unit, row // unit, head // unit


def planes_together(num_planes: int, bytes_each: int) -> int:
    """How many planes run side by side, so that what they share stays in L2."""
    return max(1, min(num_planes, L2_BYTES // max(bytes_each, 1)))


def architecture(x: Tensor) -> int:
    """The device's compute capability as in sm_90 -> 90; 0 under the interpreter."""
    if x.device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(x.device)
    return major * 10 + minor


def mask_kind(attn_mask: Tensor | None) -> str:
    return "none" if attn_mask is None else "bool" if attn_mask.dtype == torch.bool else "additive"


def mask_strides(attn_mask: Tensor | None) -> tuple[int, ...]:
    """(batch, head, row, column) strides, 0 where the mask is broadcast."""
    if attn_mask is None:
        return (0, 0, 0, 0)
    return tuple(0 if size == 1 else stride for size, stride in zip(attn_mask.shape, attn_mask.stride(), strict=True))


def mask_bytes(attn_mask: Tensor | None) -> Tensor | None:
    """The mask as the kernels read it: booleans as bytes."""
    return attn_mask.view(torch.uint8) if attn_mask is not None and attn_mask.dtype == torch.bool else attn_mask
