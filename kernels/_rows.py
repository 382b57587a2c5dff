"""The shared part of kernels that work on rows: pointers to a tile of a matrix, its valid elements, parameters."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def row_ptrs(ptr, rows, stride, columns, UNIT: tl.constexpr):
    """Returns pointers to (rows, columns); `stride` is in UNITs. rows * stride is int64, since it may exceed 2**31."""
    return ptr + (rows.to(tl.int64) * stride * UNIT)[:, None] + columns[None, :]


@triton.jit
def load_rows(ptr, rows, stride, columns, here, UNIT: tl.constexpr):
    """Loads a tile as fp32, with 0 where `here` is false."""
    return tl.load(row_ptrs(ptr, rows, stride, columns, UNIT), mask=here, other=0.0).to(tl.float32)


@triton.jit
def store_rows(ptr, rows, stride, columns, values, here):
    """Writes a tile where `here` is true, rounded to the dtype of the memory."""
    tl.store(row_ptrs(ptr, rows, stride, columns, 1), tl.cast(values, ptr.dtype.element_ty), mask=here)


@triton.jit
def existing(real, columns, DIM: tl.constexpr, BLOCK_N: tl.constexpr):
    """Returns which elements of a tile exist: (BLOCK_M, 1) or, if the columns don't fill blocks, (BLOCK_M, BLOCK_N).

    real: (BLOCK_M,), which rows exist.
    """
    here = real[:, None]
    if DIM % BLOCK_N != 0:
        here = here & (columns < DIM)[None, :]
    return here


@triton.jit
def load_vector(ptr, columns, DIM: tl.constexpr, BLOCK_N: tl.constexpr):
    """Loads a parameter as fp32, (1, BLOCK_N)."""
    if DIM % BLOCK_N == 0:
        vector = tl.load(ptr + columns)
    else:
        vector = tl.load(ptr + columns, mask=columns < DIM, other=0.0)
    return vector.to(tl.float32)[None, :]


def as_rows(x: Tensor) -> Tensor:
    """Returns x as (rows, dim) with contiguous columns, as a view if possible."""
    rows = x.numel() // x.shape[-1]
    # Not -1, which is ambiguous if there are no rows.
    x = x.reshape(rows, x.shape[-1])
    return x if x.stride(1) == 1 or x.shape[1] == 1 and x.stride(0) != 0 else x.contiguous()
