"""Attention, backward: dQ alone, by rows: the second half of the deterministic form (see attention_backward.py)."""

from __future__ import annotations

import triton
import triton.language as tl

from fastformer.kernels._attention_common import (
    COUNTS,
    block_start,
    key_range,
    load_tile,
    sequence_bounds,
    softmax_weights,
    visible_tile,
    which_block,
)
from fastformer.kernels._dropout import keep_mask_tile, load_dropout_key

# The rows of each product's result, for the two copies of the loop: Q K^T, dO V^T and dS K.
PRODUCTS = {"_dq_kernel": lambda arguments: [arguments["BLOCK_M"]] * 6}


@triton.jit
def _dq_blocks(
    dq,
    q,
    dout,
    row_lse,
    delta,
    k_ptr,
    v_ptr,
    mask_ptrs,
    rows,
    first,
    left_blocks,
    second,
    blocks,
    len_q,
    len_k,
    diagonal,
    window_left,
    window_right,
    stride_kn,
    stride_vn,
    stride_mask_n,
    softmax_scale,
    keep_scale,
    plane,
    key0,
    key1,
    offset,
    threshold,
    work_ptr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    MASK: tl.constexpr,
    DROPOUT: tl.constexpr,
    CHECK: tl.constexpr,
    COUNT_WORK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    for step in range(0, blocks):
        start = block_start(step, first, left_blocks, second, BLOCK_N, CHECK and HAS_LEFT)
        columns = start + tl.arange(0, BLOCK_N)
        if COUNT_WORK:
            tl.atomic_add(work_ptr, 1)
        k = load_tile(k_ptr, start, len_k, stride_kn, BLOCK_N, HEAD_DIM, BLOCK_D, CHECK)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # (BLOCK_M, BLOCK_N)
        scale = softmax_scale
        if MASK != "none":
            here = (rows < len_q)[:, None] & (columns < len_k)[None, :]
            bias = tl.load(mask_ptrs + columns.to(tl.int64)[None, :] * stride_mask_n, mask=here, other=0)
            if MASK == "bool":
                s = tl.where(bias != 0, s, float("-inf"))
            else:
                s = s * softmax_scale + bias.to(tl.float32)
                scale = 1.0
        if CHECK:
            visible = visible_tile(
                rows[:, None], columns[None, :], len_k, diagonal, window_left, window_right, HAS_LEFT, HAS_RIGHT
            )
            s = tl.where(visible, s, float("-inf"))
        p = softmax_weights(s, scale, row_lse[:, None], q.dtype == tl.float32)
        v = load_tile(v_ptr, start, len_k, stride_vn, BLOCK_N, HEAD_DIM, BLOCK_D, CHECK)
        dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION)  # (BLOCK_M, BLOCK_N)
        if DROPOUT:
            keep = keep_mask_tile(rows, start, plane, key0, key1, offset, threshold, BLOCK_M, BLOCK_N)
            dp = tl.where(keep, dp * keep_scale, 0.0)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit(do_not_specialize=COUNTS)
def _dq_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    delta_ptr,
    row_lse_ptr,
    dq_ptr,
    mask_ptr,
    seqlens_q_ptr,
    seqlens_k_ptr,
    seed_ptr,
    work_ptr,
    softmax_scale,
    keep_scale,
    threshold,
    seqlen_q,
    seqlen_k,
    window_left,
    window_right,
    num_heads,
    group,
    num_planes,
    num_blocks,
    together,
    stride_qb,
    stride_qm,
    stride_qh,
    stride_kb,
    stride_kn,
    stride_kh,
    stride_vb,
    stride_vn,
    stride_vh,
    stride_db,
    stride_dm,
    stride_dh,
    stride_dqb,
    stride_dqm,
    stride_dqh,
    stride_lb,
    stride_lh,
    stride_mask_b,
    stride_mask_h,
    stride_mask_m,
    stride_mask_n,
    LENGTHS: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    MASK: tl.constexpr,
    DROPOUT: tl.constexpr,
    COUNT_WORK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    stride_qb *= UNIT
    stride_qm *= UNIT
    stride_qh *= UNIT
    stride_kb *= UNIT
    stride_kn *= UNIT
    stride_kh *= UNIT
    stride_vb *= UNIT
    stride_vn *= UNIT
    stride_vh *= UNIT
    stride_db *= UNIT
    stride_dm *= UNIT
    stride_dh *= UNIT
    stride_dqb *= UNIT
    stride_dqm *= UNIT
    stride_dqh *= UNIT
    block, plane = which_block(num_blocks, num_planes, together, HAS_RIGHT)
    batch = plane // num_heads
    head = plane % num_heads
    start_q, start_k, len_q, len_k, diagonal = sequence_bounds(
        batch, seqlen_q, seqlen_k, seqlens_q_ptr, seqlens_k_ptr, LENGTHS
    )
    first_row = block * BLOCK_M
    if first_row >= len_q:
        return
    rows = first_row + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    batch64 = batch.to(tl.int64)
    head64 = head.to(tl.int64)
    kv_head = (head // group).to(tl.int64)
    q_ptr += batch64 * stride_qb + start_q * stride_qm + head64 * stride_qh
    k_ptr += batch64 * stride_kb + start_k * stride_kn + kv_head * stride_kh
    v_ptr += batch64 * stride_vb + start_k * stride_vn + kv_head * stride_vh
    dout_ptr += batch64 * stride_db + start_q * stride_dm + head64 * stride_dh
    mask_ptrs = mask_ptr
    if MASK != "none":
        mask_ptrs = mask_ptr + batch64 * stride_mask_b + head64 * stride_mask_h
        mask_ptrs = mask_ptrs + rows.to(tl.int64)[:, None] * stride_mask_m
    key0 = 0
    key1 = 0
    offset = 0
    if DROPOUT:
        key0, key1, offset = load_dropout_key(seed_ptr)

    q = load_tile(q_ptr, first_row, len_q, stride_qm, BLOCK_M, HEAD_DIM, BLOCK_D, True)
    dout = load_tile(dout_ptr, first_row, len_q, stride_dm, BLOCK_M, HEAD_DIM, BLOCK_D, True)
    at_row = batch64 * stride_lb + head64 * stride_lh + start_q
    row_lse = tl.load(row_lse_ptr + at_row + rows, mask=rows < len_q, other=float("inf"))
    delta = tl.load(delta_ptr + at_row + rows, mask=rows < len_q, other=0.0)
    dq = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    first, full_first, full_last, last = key_range(
        first_row, len_q, len_k, diagonal, window_left, window_right, HAS_LEFT, HAS_RIGHT, BLOCK_M, BLOCK_N
    )
    full_blocks = (full_last - full_first) // BLOCK_N
    dq = _dq_blocks(
        dq, q, dout, row_lse, delta, k_ptr, v_ptr, mask_ptrs, rows, full_first, 0, 0, full_blocks, len_q,
        len_k, diagonal, window_left, window_right, stride_kn, stride_vn, stride_mask_n, softmax_scale, keep_scale,
        plane, key0, key1, offset, threshold, work_ptr, HAS_LEFT, HAS_RIGHT, MASK, DROPOUT, False, COUNT_WORK,
        HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, PRECISION,
    )  # fmt: skip
    left_blocks = (full_first - first) // BLOCK_N
    edge_blocks = left_blocks + (last - full_last + BLOCK_N - 1) // BLOCK_N
    edge = first
    if not HAS_LEFT:
        edge = full_last
    dq = _dq_blocks(
        dq, q, dout, row_lse, delta, k_ptr, v_ptr, mask_ptrs, rows, edge, left_blocks, full_last, edge_blocks, len_q,
        len_k, diagonal, window_left, window_right, stride_kn, stride_vn, stride_mask_n, softmax_scale, keep_scale,
        plane, key0, key1, offset, threshold, work_ptr, HAS_LEFT, HAS_RIGHT, MASK, DROPOUT, True, COUNT_WORK,
        HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, PRECISION,
    )  # fmt: skip
    dq_ptr += batch64 * stride_dqb + (start_q + first_row) * stride_dqm + head64 * stride_dqh
    here = (rows < len_q)[:, None] & (dims < HEAD_DIM)[None, :]
    dq_ptrs = dq_ptr + tl.arange(0, BLOCK_M)[:, None] * stride_dqm + dims[None, :]
    tl.store(dq_ptrs, (dq * softmax_scale).to(dq_ptr.dtype.element_ty), mask=here)
