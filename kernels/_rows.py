"""What the kernels over rows share: pointers to a tile of a matrix, which of its elements exist, parameters."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def row_ptrs(ptr, rows, stride, columns, UNIT: tl.constexpr):
    """Pointers to (rows, columns) elements; `stride` in UNITs. int64: rows * stride passes 2**31 in long batches."""
    return ptr + (rows.to(tl.int64) * stride * UNIT)[:, None] + columns[None, :]


@triton.jit
def load_rows(ptr, rows, stride, columns, here, UNIT: tl.constexpr):
    """The tile in fp32, 0 where not `here`."""
    return tl.load(row_ptrs(ptr, rows, stride, columns, UNIT), mask=here, other=0.0).to(tl.float32)


@triton.jit
def store_rows(ptr, rows, stride, columns, values, here):
    """Writes a tile where `here`, rounded to what the memory holds."""
    tl.store(row_ptrs(ptr, rows, stride, columns, 1), tl.cast(values, ptr.dtype.element_ty), mask=here)


@triton.jit
def existing(real, columns, DIM: tl.constexpr, BLOCK_N: tl.constexpr):
    """Which elements of a tile exist: (BLOCK_M, 1) or, where the columns don't fill blocks, (BLOCK_M, BLOCK_N).

    real: (BLOCK_M,) which rows exist.
    """
    here = real[:, None]
    if DIM % BLOCK_N != 0:
        here = here & (columns < DIM)[None, :]
    return here


@triton.jit
def load_vector(ptr, columns, DIM: tl.constexpr, BLOCK_N: tl.constexpr):
    """A parameter in fp32, (1, BLOCK_N)."""
    if DIM % BLOCK_N == 0:
        vector = tl.load(ptr + columns)
    else:
        vector = tl.load(ptr + columns, mask=columns < DIM, other=0.0)
    return vector.to(tl.float32)[None, :]


def as_rows(x: Tensor) -> Tensor:
    """(rows, dim) with neighbouring columns side by side; a view where one exists."""
    rows = x.numel() // x.shape[-1]
    # The size is spelled out: -1 is ambiguous where there are no rows.
    x = x.reshape(rows, x.shape[-1])
    return x if x.stride(1) == 1 or x.shape[1] == 1 and x.stride(0) != 0 else x.contiguous()
