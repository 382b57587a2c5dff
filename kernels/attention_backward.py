"""Attention, backward: dQ, dK, dV (and the gradient of an additive mask) from out and lse; the matrix is recomputed.

    P  = exp(scale * Q K^T + mask - lse)            dV = dropout(P)^T dO
    dP = dropout'(dO V^T)                           dS = P * (dP - delta),  delta = rowsum(dO * out)
    dK = scale * dS^T Q                             dQ = scale * dS K

`_rows_kernel` goes first: delta, and lse with +inf for an empty row (so that its P is 0).
`_dkdv_kernel` owns BLOCK_N keys of one query head and walks over the rows that see them: five products when it also
adds dS K into an fp32 dQ with atomics, four when it does not. It works on transposed tiles, so that P^T and dS^T enter
the next products from registers. One key block in all: dQ is stored, not added, and each row's P and delta are summed
anew instead of taken from lse and out.
`_dq_kernel` (its own file) is the other half of the deterministic form: 4 + 3 = 7 products, nothing added in an order
of chance. Configs marked `split` take that form too, where five products' registers would spill.
fp32: scores, P, dP, dS, delta and all accumulators; P and dS are rounded to the inputs' dtype for the products.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastformer.kernels._attention_common import (
    COUNTS,
    Problem,
    architecture,
    block_start,
    last_dim_contiguous,
    load_tile,
    mask_bytes,
    mask_kind,
    mask_strides,
    planes_together,
    row_range,
    sequence_bounds,
    softmax_weights,
    stride_unit,
    strides,
    visible_tile,
    which_block,
)
from fastformer.kernels._attention_configs import Config, backward_config, call_of, choose_dq_config
from fastformer.kernels._attention_dq import _dq_kernel
from fastformer.kernels._dropout import keep_mask_tile_transposed, load_dropout_key


def _dkdv_products(arguments: dict) -> list[int]:
    """The rows of each product's result, for the two copies of the loop: K Q^T, V dO^T, P^T dO, dS^T Q and dS K."""
    dq = [] if arguments["DQ"] == "none" else [arguments["BLOCK_M"]]
    return 2 * ([arguments["BLOCK_N"]] * 4 + dq)


PRODUCTS = {"_dkdv_kernel": _dkdv_products}


@triton.jit(do_not_specialize=["num_heads", "seqlen_q", "num_blocks"])
def _rows_kernel(
    out_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
    row_lse_ptr,
    num_heads,
    seqlen_q,
    num_blocks,
    stride_ob,
    stride_om,
    stride_oh,
    stride_db,
    stride_dm,
    stride_dh,
    HEAD_DIM: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """delta = rowsum(out * dout), and lse with +inf for empty rows, for BLOCK_M rows of one plane of lse."""
    stride_ob *= UNIT
    stride_om *= UNIT
    stride_oh *= UNIT
    stride_db *= UNIT
    stride_dm *= UNIT
    stride_dh *= UNIT
    plane = tl.program_id(0) // num_blocks
    first_row = (tl.program_id(0) % num_blocks) * BLOCK_M
    batch = (plane // num_heads).to(tl.int64)
    head = (plane % num_heads).to(tl.int64)
    rows = first_row + tl.arange(0, BLOCK_M)
    out_ptr += batch * stride_ob + head * stride_oh
    dout_ptr += batch * stride_db + head * stride_dh
    out = load_tile(out_ptr, first_row, seqlen_q, stride_om, BLOCK_M, HEAD_DIM, BLOCK_D, True).to(tl.float32)
    dout = load_tile(dout_ptr, first_row, seqlen_q, stride_dm, BLOCK_M, HEAD_DIM, BLOCK_D, True).to(tl.float32)
    at = plane.to(tl.int64) * seqlen_q + rows
    lse = tl.load(lse_ptr + at, mask=rows < seqlen_q, other=0.0)
    row_lse = tl.where(lse == float("-inf"), float("inf"), lse)
    tl.store(delta_ptr + at, tl.sum(out * dout, 1), mask=rows < seqlen_q)
    tl.store(row_lse_ptr + at, row_lse, mask=rows < seqlen_q)


@triton.jit
def _dkdv_blocks(
    dk,
    dv,
    k,
    v,
    q_ptr,
    dout_ptr,
    delta_ptr,
    row_lse_ptr,
    dq_ptr,
    mask_ptrs,
    dmask_ptrs,
    columns,
    first_key,
    first,
    left_blocks,
    second,
    blocks,
    len_q,
    len_k,
    diagonal,
    window_left,
    window_right,
    stride_qm,
    stride_dm,
    stride_dqm,
    stride_mask_m,
    stride_dmask_m,
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
    DQ: tl.constexpr,
    DMASK: tl.constexpr,
    CHECK: tl.constexpr,
    TWO_ENDS: tl.constexpr,
    COUNT_WORK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    for step in range(0, blocks):
        start = block_start(step, first, left_blocks, second, BLOCK_M, CHECK and TWO_ENDS)
        rows = start + tl.arange(0, BLOCK_M)
        if COUNT_WORK:
            tl.atomic_add(work_ptr, 1)
        q = load_tile(q_ptr, start, len_q, stride_qm, BLOCK_M, HEAD_DIM, BLOCK_D, CHECK)
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # (BLOCK_N, BLOCK_M)
        scale = softmax_scale
        if CHECK:
            row_lse = tl.load(row_lse_ptr + rows, mask=rows < len_q, other=float("inf"))
            delta = tl.load(delta_ptr + rows, mask=rows < len_q, other=0.0)
        else:
            row_lse = tl.load(row_lse_ptr + rows)
            delta = tl.load(delta_ptr + rows)
        here = (columns < len_k)[:, None] & (rows < len_q)[None, :]
        if MASK != "none":
            bias = tl.load(mask_ptrs + rows.to(tl.int64)[None, :] * stride_mask_m, mask=here, other=0)
            if MASK == "bool":
                s = tl.where(bias != 0, s, float("-inf"))
            else:
                s = s * softmax_scale + bias.to(tl.float32)
                scale = 1.0
        if CHECK:
            visible = visible_tile(
                rows[None, :], columns[:, None], len_k, diagonal, window_left, window_right, HAS_LEFT, HAS_RIGHT
            )
            s = tl.where(visible, s, float("-inf"))
        p = softmax_weights(s, scale, row_lse[None, :], q.dtype == tl.float32)
        if DQ == "store":
            # All keys of a row are here, so that neither its lse nor its output, rounded both, need be relied upon.
            total = tl.sum(p, 0)
            p = p / tl.where(total > 0.0, total, 1.0)[None, :]
        dout = load_tile(dout_ptr, start, len_q, stride_dm, BLOCK_M, HEAD_DIM, BLOCK_D, CHECK)
        dp = tl.dot(v, tl.trans(dout), input_precision=PRECISION)  # (BLOCK_N, BLOCK_M)
        kept = p
        if DROPOUT:
            keep = keep_mask_tile_transposed(rows, first_key, plane, key0, key1, offset, threshold, BLOCK_M, BLOCK_N)
            kept = tl.where(keep, p * keep_scale, 0.0)
            dp = tl.where(keep, dp * keep_scale, 0.0)
        dv = tl.dot(kept.to(dout.dtype), dout, dv, input_precision=PRECISION)
        if DQ == "store":
            delta = tl.sum(p * dp, 0)
        ds = p * (dp - delta[None, :])
        if DMASK != "none":
            dmask_at = dmask_ptrs + rows.to(tl.int64)[None, :] * stride_dmask_m
            if DMASK == "store":
                tl.store(dmask_at, ds.to(dmask_ptrs.dtype.element_ty), mask=here)
            else:
                tl.atomic_add(dmask_at, ds, mask=here, sem="relaxed")
        ds = ds.to(q.dtype)
        dk = tl.dot(ds, q, dk, input_precision=PRECISION)
        if DQ != "none":
            dq = tl.dot(tl.trans(ds), k, input_precision=PRECISION) * softmax_scale  # (BLOCK_M, BLOCK_D)
            dims = tl.arange(0, BLOCK_D)
            dq_at = dq_ptr + tl.cast(start, tl.int64) * stride_dqm
            dq_at = dq_at + tl.arange(0, BLOCK_M)[:, None] * stride_dqm + dims[None, :]
            inside = (rows < len_q)[:, None] & (dims < HEAD_DIM)[None, :]
            if DQ == "atomic":
                tl.atomic_add(dq_at, dq, mask=inside, sem="relaxed")
            else:
                tl.store(dq_at, dq.to(dq_ptr.dtype.element_ty), mask=inside)
    return dk, dv


@triton.jit(do_not_specialize=COUNTS)
def _dkdv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    delta_ptr,
    row_lse_ptr,
    dq_ptr,
    dk_ptr,
    dv_ptr,
    mask_ptr,
    dmask_ptr,
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
    stride_dkb,
    stride_dkn,
    stride_dkh,
    stride_lb,
    stride_lh,
    stride_mask_b,
    stride_mask_h,
    stride_mask_m,
    stride_mask_n,
    stride_dmask_b,
    stride_dmask_h,
    stride_dmask_m,
    stride_dmask_n,
    LENGTHS: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    MASK: tl.constexpr,
    DROPOUT: tl.constexpr,
    DQ: tl.constexpr,
    DMASK: tl.constexpr,
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
    stride_dkb *= UNIT
    stride_dkn *= UNIT
    stride_dkh *= UNIT
    # The first keys of a causal matrix have the most rows, so their blocks start first.
    block, plane = which_block(num_blocks, num_planes, together, HAS_LEFT and not HAS_RIGHT)
    batch = plane // num_heads
    head = plane % num_heads
    start_q, start_k, len_q, len_k, diagonal = sequence_bounds(
        batch, seqlen_q, seqlen_k, seqlens_q_ptr, seqlens_k_ptr, LENGTHS
    )
    # Rows of dk and dv that exist: those beyond seqlens_k get zeros.
    stored_k = len_k
    if LENGTHS == "seqlens_k":
        stored_k = len_k * 0 + seqlen_k
    first_key = block * BLOCK_N
    if first_key >= stored_k:
        return
    columns = first_key + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    batch64 = batch.to(tl.int64)
    head64 = head.to(tl.int64)
    kv_head64 = (head // group).to(tl.int64)
    k_ptr += batch64 * stride_kb + start_k * stride_kn + kv_head64 * stride_kh
    v_ptr += batch64 * stride_vb + start_k * stride_vn + kv_head64 * stride_vh
    key0 = 0
    key1 = 0
    offset = 0
    if DROPOUT:
        key0, key1, offset = load_dropout_key(seed_ptr)

    k = load_tile(k_ptr, first_key, len_k, stride_kn, BLOCK_N, HEAD_DIM, BLOCK_D, True)
    v = load_tile(v_ptr, first_key, len_k, stride_vn, BLOCK_N, HEAD_DIM, BLOCK_D, True)
    dk = tl.zeros((BLOCK_N, BLOCK_D), dtype=tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), dtype=tl.float32)
    first, full_first, full_last, last = row_range(
        first_key, len_q, len_k, diagonal, window_left, window_right, HAS_LEFT, HAS_RIGHT, BLOCK_M, BLOCK_N
    )
    if DQ == "store":
        # The one key block writes dq of every row, also of those that see no key.
        first = first * 0
        last = len_q
    full_blocks = (full_last - full_first) // BLOCK_M
    left_blocks = (full_first - first) // BLOCK_M
    edge_blocks = left_blocks + (last - full_last + BLOCK_M - 1) // BLOCK_M
    TWO_ENDS: tl.constexpr = HAS_RIGHT or DQ == "store"
    edge = first
    if not TWO_ENDS:
        edge = full_last
    at_q = q_ptr + batch64 * stride_qb + start_q * stride_qm + head64 * stride_qh
    at_dout = dout_ptr + batch64 * stride_db + start_q * stride_dm + head64 * stride_dh
    at_dq = dq_ptr
    if DQ != "none":
        at_dq = dq_ptr + batch64 * stride_dqb + start_q * stride_dqm + head64 * stride_dqh
    at_row = batch64 * stride_lb + head64 * stride_lh + start_q
    at_mask = mask_ptr
    at_dmask = dmask_ptr
    if MASK != "none":
        at_mask = mask_ptr + batch64 * stride_mask_b + head64 * stride_mask_h
        at_mask = at_mask + columns.to(tl.int64)[:, None] * stride_mask_n
    if DMASK != "none":
        at_dmask = dmask_ptr + batch64 * stride_dmask_b + head64 * stride_dmask_h
        at_dmask = at_dmask + columns.to(tl.int64)[:, None] * stride_dmask_n
    dk, dv = _dkdv_blocks(
        dk, dv, k, v, at_q, at_dout, delta_ptr + at_row, row_lse_ptr + at_row, at_dq, at_mask, at_dmask, columns,
        first_key, full_first, 0, 0, full_blocks, len_q, len_k, diagonal, window_left, window_right,
        stride_qm, stride_dm, stride_dqm, stride_mask_m, stride_dmask_m, softmax_scale, keep_scale, plane,
        key0, key1, offset, threshold, work_ptr, HAS_LEFT, HAS_RIGHT, MASK, DROPOUT, DQ, DMASK, False, TWO_ENDS,
        COUNT_WORK, HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, PRECISION,
    )  # fmt: skip
    dk, dv = _dkdv_blocks(
        dk, dv, k, v, at_q, at_dout, delta_ptr + at_row, row_lse_ptr + at_row, at_dq, at_mask, at_dmask, columns,
        first_key, edge, left_blocks, full_last, edge_blocks, len_q, len_k, diagonal, window_left, window_right,
        stride_qm, stride_dm, stride_dqm, stride_mask_m, stride_dmask_m, softmax_scale, keep_scale, plane,
        key0, key1, offset, threshold, work_ptr, HAS_LEFT, HAS_RIGHT, MASK, DROPOUT, DQ, DMASK, True, TWO_ENDS,
        COUNT_WORK, HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, PRECISION,
    )  # fmt: skip

    here = (columns < stored_k)[:, None] & (dims < HEAD_DIM)[None, :]
    at = batch64 * stride_dkb + (start_k + first_key) * stride_dkn + head64 * stride_dkh
    inside = tl.arange(0, BLOCK_N)[:, None] * stride_dkn + dims[None, :]
    tl.store(dk_ptr + at + inside, (dk * softmax_scale).to(dk_ptr.dtype.element_ty), mask=here)
    tl.store(dv_ptr + at + inside, dv.to(dv_ptr.dtype.element_ty), mask=here)


def launch_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    attn_mask: Tensor | None,
    problem: Problem,
    needs_mask_grad: bool,
    *,
    config: Config | None = None,
    dq_config: Config | None = None,
    work_counter: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Runs the backward kernels on a described call. Tests pass configs and `work_counter` as to `launch_forward`."""
    packed = problem.lengths == "packed"
    q, k, v, dout, out = (last_dim_contiguous(x) for x in (q, k, v, dout, out))
    new = torch.Tensor.new_zeros if packed or q.numel() == 0 or k.numel() == 0 else torch.Tensor.new_empty
    # Each query head has programs of its own, and a group's shares of dk and dv are added up afterwards.
    shared_heads = problem.group > 1
    per_head = (*k.shape[:-2], problem.num_heads, problem.head_dim)
    grad_dtype = torch.float32 if shared_heads else k.dtype
    dk, dv = new(k, per_head, dtype=grad_dtype), new(v, per_head, dtype=grad_dtype)
    dmask = q.new_empty(0)
    if q.numel() == 0 or k.numel() == 0:
        if needs_mask_grad:
            dmask = torch.zeros(attn_mask.shape, dtype=attn_mask.dtype, device=q.device)
        return new(q, q.shape), new(k, k.shape), new(v, v.shape), dmask

    call = call_of(architecture(q), problem, q.dtype, attn_mask is not None)
    config = config or backward_config(call)
    deterministic = torch.are_deterministic_algorithms_enabled()
    if problem.seqlen_k <= config.block_n:
        dq_mode, dq = "store", new(q, q.shape)
    elif deterministic or config.split:
        dq_mode, dq = "none", new(q, q.shape)
    else:
        dq_mode, dq = "atomic", torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    dmask_mode = "none"
    if needs_mask_grad:
        dmask_mode, dmask = _dmask_buffer(attn_mask, problem, deterministic)

    unit = stride_unit(q, k, v, dout, out, dq, dk)
    delta, row_lse = torch.empty_like(lse), torch.empty_like(lse)
    rows = lse.shape[-1]
    rows_block = max(1, min(64, 4096 // problem.block_d))
    rows_blocks = triton.cdiv(rows, rows_block)
    _rows_kernel[(rows_blocks * (lse.numel() // rows),)](
        out, dout, lse, delta, row_lse, problem.num_heads, rows, rows_blocks,
        *strides(out, packed, unit), *strides(dout, packed, unit),
        HEAD_DIM=problem.head_dim, UNIT=unit, BLOCK_M=rows_block, BLOCK_D=problem.block_d, num_warps=4,
    )  # fmt: skip

    dropped = max(problem.threshold, 0)
    keep_scale = 65536 / (65536 - dropped) if dropped < 65536 else 0.0
    lse_strides = (0 if packed else lse.stride(0), lse.stride(-2))
    shared = {
        "LENGTHS": problem.lengths,
        "HAS_LEFT": problem.window_left is not None,
        "HAS_RIGHT": problem.window_right is not None,
        "MASK": mask_kind(attn_mask),
        "DROPOUT": problem.threshold >= 0,
        "COUNT_WORK": work_counter is not None,
        "HEAD_DIM": problem.head_dim,
        "UNIT": unit,
        "BLOCK_D": problem.block_d,
    }
    sizes = (
        problem.softmax_scale, keep_scale, dropped, problem.seqlen_q, problem.seqlen_k,
        problem.window_left or 0, problem.window_right or 0, problem.num_heads, problem.group,
    )  # fmt: skip

    num_blocks = triton.cdiv(problem.seqlen_k, config.block_n)
    num_planes = problem.batch * problem.num_heads
    q_bytes = 2 * problem.seqlen_q * problem.head_dim * q.element_size()
    _dkdv_kernel[(num_blocks * num_planes,)](
        q, k, v, dout, delta, row_lse, None if dq_mode == "none" else dq, dk, dv,
        mask_bytes(attn_mask), dmask if dmask_mode != "none" else None,
        problem.seqlens_q, problem.seqlens_k, problem.dropout_seed, work_counter,
        *sizes, num_planes, num_blocks, planes_together(num_planes, q_bytes),
        *strides(q, packed, unit), *strides(k, packed, unit), *strides(v, packed, unit), *strides(dout, packed, unit),
        *strides(dq, packed, unit), *strides(dk, packed, unit), *lse_strides,
        *mask_strides(attn_mask), *mask_strides(dmask if dmask_mode != "none" else None),
        **shared,
        DQ=dq_mode, DMASK=dmask_mode,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, PRECISION="ieee" if config.exact else problem.precision,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip

    if dq_mode == "none":
        config = dq_config or choose_dq_config(call)
        num_blocks = triton.cdiv(problem.seqlen_q, config.block_m)
        num_planes = problem.batch * problem.num_heads
        kv_bytes = 2 * problem.seqlen_k * problem.head_dim * q.element_size() // problem.group
        _dq_kernel[(num_blocks * num_planes,)](
            q, k, v, dout, delta, row_lse, dq, mask_bytes(attn_mask),
            problem.seqlens_q, problem.seqlens_k, problem.dropout_seed, work_counter,
            *sizes, num_planes, num_blocks, planes_together(num_planes, kv_bytes),
            *strides(q, packed, unit), *strides(k, packed, unit), *strides(v, packed, unit),
            *strides(dout, packed, unit), *strides(dq, packed, unit), *lse_strides, *mask_strides(attn_mask),
            **shared,
            BLOCK_M=config.block_m, BLOCK_N=config.block_n, PRECISION="ieee" if config.exact else problem.precision,
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
    if dmask_mode != "none":
        broadcast = [dim for dim in range(4) if attn_mask.shape[dim] == 1 and dmask.shape[dim] != 1]
        dmask = (dmask.sum(broadcast, keepdim=True) if broadcast else dmask).to(attn_mask.dtype)
    if shared_heads:
        dk, dv = (x.unflatten(-2, (problem.num_kv_heads, problem.group)).sum(-2).to(k.dtype) for x in (dk, dv))
    return dq.to(q.dtype), dk, dv, dmask


def _dmask_buffer(attn_mask: Tensor, problem: Problem, deterministic: bool) -> tuple[str, Tensor]:
    """How the gradient of an additive mask is written, and the zeros that it is written to (skipped blocks stay 0).

    A mask shared by batches or heads adds up in fp32 by atomics. One shared by rows or keys, and any shared one in the
    deterministic form, takes the full matrix in fp32, summed afterwards: atomics would meet at one address.
    """
    full = (problem.batch, problem.num_heads, problem.seqlen_q, problem.seqlen_k)
    device = attn_mask.device
    if attn_mask.shape == full:
        return "store", torch.zeros(full, dtype=attn_mask.dtype, device=device)
    if deterministic or attn_mask.shape[2:] != full[2:]:
        return "store", torch.zeros(full, dtype=torch.float32, device=device)
    return "atomic", torch.zeros(attn_mask.shape, dtype=torch.float32, device=device)
