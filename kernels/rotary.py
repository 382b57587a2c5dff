"""Rotary position embedding in one pass: each pair is read, rotated and written once; backward rotates the other way.

A program handles whole heads of some tokens. In the half layout, it reads the two halves of a head as two tiles; in the
interleaved layout, it reads one tile, which is split and joined again in registers, so that both layouts read 16 bytes
at a time. All heads of a token read its table rows from L1.

Bytes per element in half dtypes: 4 (x, out), and the tables once: num_positions * rotary_dim * 4 in fp32. FLOPs: 3 per
element of rotary_dim. Saved for backward: the tables and positions, but not x. fp32: the rotation, rounded once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fastformer.kernels._launch import (
    cdiv,
    contiguous,
    launch,
    next_power_of_2,
    stride_unit,
    unsupported_device,
    unsupported_dtype,
)
from fastformer.kernels._rows import load_rows, row_ptrs

# The elements of a tile: 8 of each half per thread.
TILE = 2048

# Arguments whose values must not lead to another binary.
_COUNTS = ["num_rows", "num_heads", "seqlen", "num_positions", "x_strides", "table_strides"]


@triton.jit
def load_turned(
    ptrs, positions, here, tables, INTERLEAVED: tl.constexpr, TABLE_UNIT: tl.constexpr, HALF: tl.constexpr,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Loads heads and rotates them by their positions: (rows, BLOCK_D), rounded, with 0 where `here` is false.

    This is for other kernels, which read only a few heads: each element is loaded again together with the other one of
    its pair, so that neither layout moves data between threads. Positions beyond the tables use the last row.

    tables: (cos, sin, number of positions, row strides of cos and of sin in TABLE_UNITs).
    """
    cos_ptr, sin_ptr, num_positions, cos_stride, sin_stride = tables
    dims = tl.arange(0, BLOCK_D)
    positions = tl.minimum(positions, num_positions - 1)
    if INTERLEAVED:
        pairs = dims // 2
        others = dims ^ 1
        is_first = dims % 2 == 0
    else:
        pairs = dims % HALF
        others = (dims + HALF) % (2 * HALF)
        is_first = dims < HALF
    real = here[:, None] & (dims < DIM)[None, :]
    turns = real & (dims < 2 * HALF)[None, :]
    x = tl.load(ptrs[:, None] + dims[None, :], mask=real, other=0.0)
    other = tl.load(ptrs[:, None] + others[None, :], mask=turns, other=0.0).to(tl.float32)
    cos = tl.load(row_ptrs(cos_ptr, positions, cos_stride, pairs, TABLE_UNIT), mask=turns, other=1.0)
    sin = tl.load(row_ptrs(sin_ptr, positions, sin_stride, pairs, TABLE_UNIT), mask=turns, other=0.0)
    sin = sin.to(tl.float32)
    sin = tl.where(is_first[None, :], -sin, sin)
    return (x.to(tl.float32) * cos.to(tl.float32) + other * sin).to(x.dtype)


@triton.jit(do_not_specialize=_COUNTS)
def _rotary_kernel(
    x_ptr, cos_ptr, sin_ptr, positions_ptr, out_ptr, num_rows, num_heads, seqlen, num_positions, x_strides,
    table_strides, INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr, UNIT: tl.constexpr, TABLE_UNIT: tl.constexpr,
    DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Rotates BLOCK_M rows; a row is one head of one token.

    BLOCK_N: HALF, padded. REST: the number of features after both halves, padded.
    x_strides: (batch, token, head) in UNITs; table_strides: the row strides of cos and sin in TABLE_UNITs.
    """
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = rows < num_rows
    token = rows // num_heads
    if positions_ptr is not None:
        position = tl.load(positions_ptr + token, mask=real, other=0).to(tl.int64)
        inside = (position >= 0) & (position < num_positions)
        tl.device_assert(inside, "a position is outside the tables")
        # A position out of range must not read other memory, even if assertions are off.
        position = tl.where(inside, position, 0)
    else:
        position = (token % seqlen).to(tl.int64)
    # Divisions are 32-bit, products 64-bit, because offsets exceed 2**31 in large batches.
    x_rows = (token // seqlen).to(tl.int64) * x_strides[0] + (token % seqlen).to(tl.int64) * x_strides[1]
    x_rows += (rows % num_heads).to(tl.int64) * x_strides[2]
    x_rows = x_ptr + (x_rows * UNIT)[:, None]
    out_rows = out_ptr + (rows.to(tl.int64) * DIM)[:, None]

    pairs = tl.arange(0, BLOCK_N)[None, :]
    here = real[:, None]
    if HALF != BLOCK_N:
        here = here & (pairs < HALF)
    cos = load_rows(cos_ptr, position, table_strides[0], tl.arange(0, BLOCK_N), here, TABLE_UNIT)
    sin = load_rows(sin_ptr, position, table_strides[1], tl.arange(0, BLOCK_N), here, TABLE_UNIT)
    if INVERSE:
        sin = -sin
    if INTERLEAVED:
        columns = tl.arange(0, 2 * BLOCK_N)[None, :]
        both = real[:, None]
        if HALF != BLOCK_N:
            both = both & (columns < 2 * HALF)
        x = tl.load(x_rows + columns, mask=both, other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(x, (BLOCK_M, BLOCK_N, 2)))
        turned = tl.join(first * cos - second * sin, second * cos + first * sin)
        out = tl.reshape(turned, (BLOCK_M, 2 * BLOCK_N))
        tl.store(out_rows + columns, tl.cast(out, out_ptr.dtype.element_ty), mask=both)
    else:
        first = tl.load(x_rows + pairs, mask=here, other=0.0).to(tl.float32)
        second = tl.load(x_rows + HALF + pairs, mask=here, other=0.0).to(tl.float32)
        tl.store(out_rows + pairs, tl.cast(first * cos - second * sin, out_ptr.dtype.element_ty), mask=here)
        tl.store(out_rows + HALF + pairs, tl.cast(second * cos + first * sin, out_ptr.dtype.element_ty), mask=here)
    if REST > 0:
        columns = 2 * HALF + tl.arange(0, REST)[None, :]
        beyond = real[:, None] & (columns < DIM)
        tl.store(out_rows + columns, tl.load(x_rows + columns, mask=beyond, other=0.0), mask=beyond)


def why_unsupported(op_name: str, *, x: Tensor, cos: Tensor, sin: Tensor, **_: object) -> str | None:
    """Returns why the kernel doesn't support a call of rotary_fwd, or None if it does."""
    if (reason := unsupported_dtype(x.dtype, cos.dtype, sin.dtype)) is not None:
        return reason
    if x.shape[-1] > 2048:
        return f"heads of {x.shape[-1]} elements, more than 2048, don't fit a program's registers"
    return unsupported_device(x)


def rotary_fwd(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool, inverse: bool
) -> Tensor:
    """Implements `fastformer::rotary_fwd`; with `inverse`, it is its own backward."""
    out = x.new_empty(x.shape)
    if x.numel() == 0:
        return out
    half = cos.shape[1]
    if half == 0:
        return out.copy_(x)
    seqlen, num_heads, dim = x.shape[-3:]
    num_rows = x.numel() // dim
    # (batch, seqlen, heads, dim), as a view for all usual projections and transpositions.
    x = x.reshape(num_rows // (seqlen * num_heads), seqlen, num_heads, dim)
    x, cos, sin = (t if t.stride(-1) == 1 else t.contiguous() for t in (x, cos, sin))
    unit, table_unit = stride_unit(x), stride_unit(cos, sin)
    block_n = next_power_of_2(half)
    block_m = max(1, min(TILE // (2 * block_n), next_power_of_2(num_rows)))
    rest = dim - 2 * half
    launch(
        _rotary_kernel, (cdiv(num_rows, block_m),),
        x, cos, sin, contiguous(positions), out, num_rows, num_heads, seqlen, cos.shape[0],
        tuple(stride // unit for stride in x.stride()[:3]), (cos.stride(0) // table_unit, sin.stride(0) // table_unit),
        INTERLEAVED=interleaved, INVERSE=inverse, UNIT=unit, TABLE_UNIT=table_unit, DIM=dim, HALF=half, BLOCK_M=block_m,
        BLOCK_N=block_n, REST=next_power_of_2(rest) if rest else 0, num_warps=max(1, min(4, block_m * block_n // 256)),
        debug=positions is not None, sanitize_overflow=False,
    )  # fmt: skip
    return out
