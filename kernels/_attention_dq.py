"""Attention, backward: only dQ, by rows: the second half of the deterministic variant (see attention_backward.py)."""

from __future__ import annotations

import triton
import triton.language as tl

from fastformer.kernels._attention_common import (
    COUNTS,
    block_start,
    key_range,
    load_mask,
    load_tile,
    locate,
    needs_exact_weights,
    plane_ptr,
    score_tile,
    softmax_weights,
    spans_of,
)
from fastformer.kernels._dropout import keep_mask_tile, load_dropout

# The number of rows in the result of each product, in both copies of the loop: Q K^T, dO V^T and dS K.
PRODUCTS = {"_dq_kernel": lambda arguments: [arguments["BLOCK_M"]] * 6}


@triton.jit(do_not_specialize=COUNTS)
def _dq_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, delta_ptr, row_lse_ptr, dq_ptr, mask_ptr, work_ptr, planes, lengths, window, dropout,
    softmax_scale, softcap, q_strides, k_strides, v_strides, dout_strides, dq_strides, lse_strides, mask_strides,
    LENGTHS: tl.constexpr, MASK: tl.constexpr, HEAD_DIM: tl.constexpr, UNIT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes dq of BLOCK_M rows of one head; the arguments are those of `_attention_fwd_kernel`."""
    block, plane, where, starts, bounds = locate(planes, lengths, LENGTHS, window[1] is not None)
    batch, head, kv_head = where
    start_q, start_k = starts
    len_q, len_k, _ = bounds
    first_row = block * BLOCK_M
    if first_row >= len_q:
        return
    rows = first_row + tl.arange(0, BLOCK_M)
    q_ptr = plane_ptr(q_ptr, q_strides, batch, start_q, head, UNIT)
    k_ptr = plane_ptr(k_ptr, k_strides, batch, start_k, kv_head, UNIT)
    v_ptr = plane_ptr(v_ptr, v_strides, batch, start_k, kv_head, UNIT)
    dout_ptr = plane_ptr(dout_ptr, dout_strides, batch, start_q, head, UNIT)
    if MASK != "none":
        mask_ptr += batch * mask_strides[0] + head * mask_strides[1]
    drawn = load_dropout(dropout)

    q = load_tile(q_ptr, first_row, len_q, q_strides[1] * UNIT, BLOCK_M, HEAD_DIM, BLOCK_D, True)
    dout = load_tile(dout_ptr, first_row, len_q, dout_strides[1] * UNIT, BLOCK_M, HEAD_DIM, BLOCK_D, True)
    at_row = batch * lse_strides[0] + head * lse_strides[1] + start_q
    row_lse = tl.load(row_lse_ptr + at_row + rows, mask=rows < len_q, other=float("inf"))
    delta = tl.load(delta_ptr + at_row + rows, mask=rows < len_q, other=0.0)
    dq = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    first, full_first, full_last, last = key_range(first_row, bounds, window, BLOCK_M, BLOCK_N)
    spans = spans_of(first, full_first, full_last, last, BLOCK_N, window[0] is not None)
    EXACT: tl.constexpr = needs_exact_weights(MASK, q_ptr.dtype.element_ty)
    for CHECK in tl.static_range(2):
        for step in range(0, spans[CHECK][3]):
            start = block_start(step, spans[CHECK], BLOCK_N, CHECK and window[0] is not None)
            columns = start + tl.arange(0, BLOCK_N)
            if work_ptr is not None:
                tl.atomic_add(work_ptr, 1)
            k = load_tile(k_ptr, start, len_k, k_strides[1] * UNIT, BLOCK_N, HEAD_DIM, BLOCK_D, CHECK)
            mask = load_mask(mask_ptr, mask_strides, rows[:, None], columns[None, :], start, bounds, MASK, True, CHECK)
            s, scale, slope = score_tile(
                q, k, mask, rows[:, None], columns[None, :], bounds, window, softmax_scale, softcap, MASK, CHECK,
                PRECISION,
            )  # fmt: skip
            p = softmax_weights(s, scale, row_lse[:, None], EXACT)
            v = load_tile(v_ptr, start, len_k, v_strides[1] * UNIT, BLOCK_N, HEAD_DIM, BLOCK_D, CHECK)
            dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION)  # (BLOCK_M, BLOCK_N)
            if dropout[0] is not None:
                dp = tl.where(keep_mask_tile(rows, start, plane, drawn, BLOCK_M, BLOCK_N), dp * drawn[4], 0.0)
            ds = p * (dp - delta[:, None])
            if softcap is not None:
                ds = ds * slope
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    dims = tl.arange(0, BLOCK_D)
    dq_ptr = plane_ptr(dq_ptr, dq_strides, batch, start_q + first_row, head, UNIT)
    here = (rows < len_q)[:, None] & (dims < HEAD_DIM)[None, :]
    dq_ptrs = dq_ptr + tl.arange(0, BLOCK_M)[:, None] * (dq_strides[1] * UNIT) + dims[None, :]
    tl.store(dq_ptrs, (dq * softmax_scale).to(dq_ptr.dtype.element_ty), mask=here)
