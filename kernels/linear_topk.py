"""The k best outputs of a last linear map for few rows. No program writes its logits: only the k best of its block.

With z = x weight^T (capped, if asked), the k largest z_j of each row in descending order and their j; with `log_probs`
z_j - log(sum(exp(z))). A program multiplies up to 64 rows by BLOCK_N rows of the weight, and sorts its products as keys
of 64 bits: the number, whose bits are rearranged to be ordered like integers, then the negated column. So equal numbers
are ordered by their column, and a merge is the same sort again. One more program for each row merges the blocks.

Bytes: the weight once (in int8 or int4, as in `quantized_linear.py`, if it has scales), and for each row and block 8 k
of keys. Its logits in fp32 would be 4 BLOCK_N, and the choice would read them several times. fp32: products, sums.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastformer.kernels._launch import (
    cdiv,
    dot_precision,
    launch,
    next_power_of_2,
    num_sms,
    unsupported_dtype,
    unsupported_products,
)
from fastformer.kernels._softcap import soft_capped
from fastformer.kernels.quantized_linear import product_of

LARGEST_K = 64  # more would be as many bytes as the logits
MERGED = 2048  # keys that are merged at a time
CHUNK_ROWS = 1024  # rows whose keys are in memory at a time
# The number of rows of each product; the even and the odd columns of int4 have one each.
PRODUCTS = {"_linear_topk_kernel": lambda a: [a["BLOCK_M"]] * (2 if a["BITS"] == 4 else 1)}
_COUNTS = ["num_rows", "num_columns", "num_blocks"]
_NO_KEY = tl.constexpr(-(2**63))  # comes after all others


@triton.jit
def _keys_of(values, columns):
    bits = (values + 0.0).to(tl.int32, bitcast=True)  # + 0.0 turns minus zero into zero
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32) - columns


@triton.jit
def _parts_of(keys):
    """Returns the values and the columns of keys."""
    columns = (-keys) & 0xFFFFFFFF
    bits = ((keys + columns) >> 32).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True), columns


@triton.jit(do_not_specialize=_COUNTS)
def _linear_topk_kernel(
    x_ptr, weight_ptr, scale_ptr, zero_ptr, keys_ptr, sums_ptr, softcap, num_rows, num_columns, depth, x_row,
    weight_row, groups, BITS: tl.constexpr, EVEN: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Writes the K best keys of BLOCK_M rows in a block of columns and, unless sums_ptr is None, sum(exp(z - max(z)))
    over the block.
    """
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    has_column, has_row = columns < num_columns, rows < num_rows
    logits = product_of(
        x_ptr, weight_ptr, scale_ptr, zero_ptr, rows, columns, has_row, has_column, depth, x_row, weight_row, groups,
        BITS, EVEN, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION,
    )  # fmt: skip
    if softcap is not None:
        logits, _ = soft_capped(logits, softcap, True)
    # NaN breaks a row as +inf does, but its bits may come last.
    logits = tl.where(logits == logits, logits, float("inf"))
    keys = tl.where(has_column[None, :], _keys_of(logits, columns.to(tl.int64)[None, :]), _NO_KEY)
    places = rows.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    tl.store(keys_ptr + places[:, None] * K + tl.arange(0, K)[None, :], tl.topk(keys, K), mask=has_row[:, None])
    if sums_ptr is not None:
        logits = tl.where(has_column[None, :], logits, float("-inf"))
        largest = tl.max(logits, 1)
        largest = tl.where(largest == float("-inf"), 0.0, largest)
        tl.store(sums_ptr + places, tl.sum(tl.exp(logits - largest[:, None]), 1), mask=has_row)


@triton.jit(do_not_specialize=_COUNTS)
def _merge_topk_kernel(
    keys_ptr, sums_ptr, values_ptr, indices_ptr, num_blocks, k, K: tl.constexpr, BLOCK: tl.constexpr
):
    """Merges the keys of a row's blocks, and computes its values."""
    row = tl.program_id(0).to(tl.int64)
    first, places = row * num_blocks, tl.arange(0, BLOCK)
    best = tl.full((K,), _NO_KEY, tl.int64)
    for begin in range(0, num_blocks * K, BLOCK):
        here = begin + places < num_blocks * K
        keys = tl.load(keys_ptr + first * K + begin + places, mask=here, other=_NO_KEY)
        best = tl.topk(tl.reshape(tl.join(best, tl.topk(keys, K)), (2 * K,)), K)
    values, columns = _parts_of(best)
    largest = tl.max(values, 0)
    ranks = tl.arange(0, K)
    if sums_ptr is not None:
        total = 0.0
        for begin in range(0, num_blocks, BLOCK):
            here = begin + places < num_blocks
            peaks, _ = _parts_of(tl.load(keys_ptr + (first + begin + places) * K, mask=here, other=0))
            sums = tl.load(sums_ptr + first + begin + places, mask=here, other=0.0)
            total += tl.sum(tl.where(here, sums * tl.exp(peaks - largest), 0.0))
        values = values - largest - tl.log(total)
    is_broken = largest == float("inf")
    tl.store(values_ptr + row * k + ranks, tl.where(is_broken, float("nan"), values), mask=ranks < k)
    tl.store(indices_ptr + row * k + ranks, tl.where(is_broken, ranks, columns), mask=ranks < k)


def why_unsupported(op_name: str, *, x: Tensor, k: int, **_: object) -> str | None:
    """Returns why the kernels don't support a call, or None."""
    if k > LARGEST_K:
        return f"k is {k}, more than {LARGEST_K}"
    return unsupported_dtype(x.dtype) or unsupported_products(x)


def linear_topk(x: Tensor, weight: Tensor, k: int, log_probs: bool, softcap: float) -> tuple[Tensor, Tensor]:
    """Implements `fastformer::linear_topk`; returns (values, indices), (rows, k) each."""
    return quantized_topk(x, weight, None, None, k, log_probs, softcap)


def quantized_topk(
    x: Tensor, weight: Tensor, scale: Tensor | None, zero: Tensor | None, k: int, log_probs: bool, softcap: float
) -> tuple[Tensor, Tensor]:
    """Implements `fastformer::quantized_topk`; without a scale, the weight has x's dtype."""
    (num_rows, depth), num_columns = x.shape, weight.shape[0]
    x, weight = (part if part.stride(1) == 1 else part.contiguous() for part in (x, weight))
    bits = 8 * weight.element_size() if weight.dtype != torch.uint8 else 4
    block_m, largest_k = min(max(next_power_of_2(num_rows), 16), 64), max(2, next_power_of_2(k))
    # Smaller tiles, so that all SMs read, and because larger ones spill registers in int4 and fp32.
    block_n = 64 if bits in (8, 16) and num_columns >= 64 * num_sms(x.device) else max(32, largest_k)
    block_k = 128 if bits < 16 else 1024 // bits
    num_blocks, at_once = cdiv(num_columns, block_n), min(num_rows, CHUNK_ROWS)
    keys = x.new_empty(at_once, num_blocks, largest_k, dtype=torch.int64)
    sums = x.new_empty(at_once, num_blocks, dtype=torch.float32) if log_probs else None
    values = x.new_empty(num_rows, k, dtype=torch.float32)
    indices = x.new_empty(num_rows, k, dtype=torch.int64)
    for part, best, chosen in zip(*(t.split(CHUNK_ROWS) for t in (x, values, indices)), strict=True):
        rows = part.shape[0]
        launch(
            _linear_topk_kernel, (num_blocks, cdiv(rows, block_m)), part, weight, scale, zero, keys, sums,
            softcap or None, rows, num_columns, depth, x.stride(0), weight.stride(0),
            scale.shape[1] if scale is not None and bits == 4 else 1, BITS=bits, EVEN=depth % block_k == 0, K=largest_k,
            BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, PRECISION=dot_precision(x), num_warps=4, num_stages=4,
            maxnreg=128 if block_m < 64 else 240,
        )  # fmt: skip
        launch(
            _merge_topk_kernel, (rows,), keys, sums, best, chosen, num_blocks, k, K=largest_k,
            BLOCK=MERGED, num_warps=8, maxnreg=128,
        )  # fmt: skip
    return values, indices
