"""A few rows times a matrix in int8 or int4, whose numbers become the dtype of the rows in registers.

A step of decoding reads each weight once for all of its rows, so its time is that of reading them: in int8 half, and in
int4 a good quarter of the bytes of 16 bits. The formats are those of `ops.quantized_linear`. A number of int8 (-127 to
127) is exact in both 16-bit dtypes, so products are summed with whole numbers, and the scale of the weight's row
multiplies the sum. In int4, 32 columns have a scale of their own: scale * (q - zero) is computed in fp32 and rounded
once, which gives the numbers that the weight has in its dtype.

A program computes BLOCK_N columns of the result for up to 64 rows; no other program reads its part of the weight.
Bytes: columns * depth in int8, and columns * depth * 9 / 16 in int4. FLOPs: 2 * rows * columns * depth. fp32: sums and
scales.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastformer.kernels._launch import cdiv, contiguous, launch, next_power_of_2, num_sms, unsupported_products

# The number of rows of each product; the even and the odd columns of int4 have one each.
PRODUCTS = {"_quantized_linear_kernel": lambda a: [a["BLOCK_M"]] * (2 if a["BITS"] == 4 else 1)}
_COUNTS = ["num_rows", "num_columns"]


@triton.jit
def _expanded(ptr, columns, groups, first_group, here, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr):
    """Loads a number for each group of 32 columns of the weight as fp32, (BLOCK_K / 2, BLOCK_N): one for each byte."""
    group = first_group + tl.arange(0, BLOCK_K // 32)
    ptrs = ptr + columns.to(tl.int64)[None, :] * groups + group[:, None]
    values = tl.load(ptrs, mask=here[None, :] & (group < groups)[:, None], other=0).to(tl.float32)
    return tl.reshape(tl.broadcast_to(values[:, None, :], (BLOCK_K // 32, 16, BLOCK_N)), (BLOCK_K // 2, BLOCK_N))


@triton.jit
def product_of(
    x_ptr, q_ptr, scale_ptr, zero_ptr, rows, columns, has_row, has_column, depth, x_row, q_row, groups,
    BITS: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Returns BLOCK_M rows and BLOCK_N columns of x weight^T in fp32.

    x_row, q_row: the strides of rows; groups: the scales of a row in int4. BITS: those of a number of the weight; 16
    and 32 have no scales. EVEN: BLOCK_K divides depth.
    """
    PACKED: tl.constexpr = 2 if BITS == 4 else 1
    ks, bytes_ = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_K // PACKED)
    x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * x_row + ks[None, :]
    # Columns beyond the matrix read the first one, and are not stored.
    q_ptrs = q_ptr + tl.where(has_column, columns, 0).to(tl.int64)[None, :] * q_row + bytes_[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for first in range(0, depth, BLOCK_K):
        if EVEN:
            x = tl.load(x_ptrs, mask=has_row[:, None], other=0.0)
            q = tl.load(q_ptrs)
        else:
            x = tl.load(x_ptrs, mask=has_row[:, None] & (ks < depth - first)[None, :], other=0.0)
            q = tl.load(q_ptrs, mask=(bytes_ * PACKED < depth - first)[:, None], other=0)
        if BITS == 4:
            first_group = first // 32
            scale = _expanded(scale_ptr, columns, groups, first_group, has_column, BLOCK_K, BLOCK_N)
            zero = 8.0
            if zero_ptr is not None:
                zero = _expanded(zero_ptr, columns, groups, first_group, has_column, BLOCK_K, BLOCK_N)
            even, odd = tl.split(tl.reshape(x, (BLOCK_M, BLOCK_K // 2, 2)))
            low = ((q & 15).to(tl.float32) - zero) * scale
            high = ((q >> 4).to(tl.float32) - zero) * scale
            acc = tl.dot(even, low.to(x.dtype), acc)
            acc = tl.dot(odd, high.to(x.dtype), acc)
        else:
            acc = tl.dot(x, q.to(x.dtype), acc, input_precision=PRECISION)
        x_ptrs += BLOCK_K
        q_ptrs += BLOCK_K // PACKED
    if BITS == 8:
        acc *= tl.load(scale_ptr + columns, mask=has_column, other=0.0)[None, :]
    return acc


@triton.jit(do_not_specialize=_COUNTS)
def _quantized_linear_kernel(
    x_ptr, q_ptr, scale_ptr, zero_ptr, bias_ptr, out_ptr, num_rows, num_columns, depth, x_row, q_row, groups,
    BITS: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Computes BLOCK_M rows and BLOCK_N columns of x weight^T + bias."""
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    has_column, has_row = columns < num_columns, rows < num_rows
    acc = product_of(
        x_ptr, q_ptr, scale_ptr, zero_ptr, rows, columns, has_row, has_column, depth, x_row, q_row, groups, BITS, EVEN,
        BLOCK_M, BLOCK_N, BLOCK_K, "ieee",
    )  # fmt: skip
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + columns, mask=has_column, other=0.0).to(tl.float32)[None, :]
    out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=has_row[:, None] & has_column[None, :])


def why_unsupported(op_name: str, *, x: Tensor, **_: object) -> str | None:
    """Returns why the kernel doesn't support a call, or None."""
    if x.dtype not in (torch.float16, torch.bfloat16):
        return f"the inputs are {x.dtype}, not float16 or bfloat16"
    return unsupported_products(x)


def quantized_linear(
    x: Tensor, q: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, is_wide: bool
) -> Tensor:
    """Computes x (rows, depth) times the transpose of a quantised matrix: see `ops.quantized_linear`."""
    (num_rows, depth), num_columns = x.shape, q.shape[0]
    x, bias = x if x.stride(1) == 1 else x.contiguous(), contiguous(bias)
    out = x.new_empty(num_rows, num_columns, dtype=torch.float32 if is_wide else x.dtype)
    is_int4 = q.dtype == torch.uint8
    block_k = 128  # a line of the cache in int8
    block_m = min(max(next_power_of_2(num_rows), 16), 64)
    # Smaller tiles, so that all SMs read; in int4, larger ones spill registers on some architectures.
    block_n = 64 if not is_int4 and num_columns >= 64 * num_sms(x.device) else 32
    launch(
        _quantized_linear_kernel, (cdiv(num_columns, block_n), cdiv(num_rows, block_m)), x, q, scale, zero, bias, out,
        num_rows, num_columns, depth, x.stride(0), q.shape[1], scale.shape[1] if is_int4 else 1,
        BITS=4 if is_int4 else 8, EVEN=depth % block_k == 0, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
        num_warps=4, num_stages=4,
    )  # fmt: skip
    return out
