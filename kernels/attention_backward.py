"""Attention, backward: dQ, dK, dV (and the gradient of an additive mask) from out and lse; scores are recomputed.

    P  = exp(scale * Q K^T + mask - lse)            dV = dropout(P)^T dO
    dP = dropout'(dO V^T)                           dS = P * (dP - delta),  delta = rowsum(dO * out)
    dK = scale * dS^T Q                             dQ = scale * dS K

(With a soft cap c of the scores, dS * (1 - tanh^2(scale * Q K^T / c)) takes the place of dS.)

`_rows_kernel` runs first: it computes delta, sets lse to +inf for empty rows (so that their P is 0), and zeroes what no
program might write: a dQ that will be summed with atomics, and all gradients of packed rows. A program of
`_dkdv_kernel` owns BLOCK_N keys of one query head and loops over the rows that see them, with five products if it also
adds dS K to an fp32 dQ with atomics, else four. It works on transposed tiles, so that P^T and dS^T enter the next
products from registers. If there is only one block of keys, dQ is stored and not added, and the sums for P and delta of
each row are recomputed instead of taken from lse and out. `_round_dq_kernel` rounds a dQ that was summed. `_dq_kernel`
(in its own file) is the second half of the deterministic variant, which has 4 + 3 = 7 products and a fixed order of
summation. Configs marked `split` use this variant too, because five products would spill.
fp32: scores, P, dP, dS, delta and all accumulators; P and dS are rounded to the inputs' dtype for the products.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastformer.kernels import _attention_hopper
from fastformer.kernels._attention_common import (
    COUNTS,
    Problem,
    block_start,
    broadcast_strides,
    contiguous_strides,
    is_readable,
    load_mask,
    load_tile,
    locate,
    mask_bytes,
    mask_kind,
    mask_ptrs,
    mask_strides,
    needs_exact_weights,
    plane_ptr,
    plane_strides,
    planes_of,
    readable,
    row_range,
    score_tile,
    softmax_weights,
    spans_of,
    store_zeros,
)
from fastformer.kernels._attention_configs import Config, backward_config, call_of, choose_dq_config, tile_of
from fastformer.kernels._attention_dq import _dq_kernel
from fastformer.kernels._dropout import keep_mask_tile, kept_or_zero, load_dropout
from fastformer.kernels._launch import Launch, architecture, cdiv, contiguous, stride_unit


def _dkdv_products(arguments: dict[str, Any]) -> list[int]:
    """Returns the rows of the result of each product, in all loops: K Q^T, V dO^T, P^T dO, dS^T Q and dS K."""
    dq = [] if arguments["DQ"] == "none" else [arguments["BLOCK_M"]]
    return (1 if arguments["DQ"] == "store" else 2) * ([arguments["BLOCK_N"]] * 4 + dq)


PRODUCTS = {"_dkdv_kernel": _dkdv_products}


@triton.jit(do_not_specialize=["num_heads", "seqlen_q", "seqlen_k", "num_blocks"])
def _rows_kernel(
    out_ptr, dout_ptr, lse_ptr, delta_ptr, row_lse_ptr, dq_ptr, dk_ptr, dv_ptr, num_heads, seqlen_q, seqlen_k,
    num_blocks, out_strides, dout_strides, dq_strides, dk_strides, HEAD_DIM: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Computes delta = rowsum(out * dout), lse with +inf for empty rows, and zeros, for BLOCK_M rows of a plane.

    dq_ptr, dk_ptr, dv_ptr: None if a program writes each of their rows; dk and dv have seqlen_k rows.
    """
    plane = tl.program_id(0) // num_blocks
    first_row = (tl.program_id(0) % num_blocks) * BLOCK_M
    batch = (plane // num_heads).to(tl.int64)
    head = (plane % num_heads).to(tl.int64)
    rows = first_row + tl.arange(0, BLOCK_M)
    out_ptr = plane_ptr(out_ptr, out_strides, batch, 0, head, UNIT)
    dout_ptr = plane_ptr(dout_ptr, dout_strides, batch, 0, head, UNIT)
    out = load_tile(out_ptr, first_row, seqlen_q, out_strides[1] * UNIT, BLOCK_M, HEAD_DIM, BLOCK_D, True)
    dout = load_tile(dout_ptr, first_row, seqlen_q, dout_strides[1] * UNIT, BLOCK_M, HEAD_DIM, BLOCK_D, True)
    at = plane.to(tl.int64) * seqlen_q + rows
    lse = tl.load(lse_ptr + at, mask=rows < seqlen_q, other=0.0)
    row_lse = tl.where(lse == float("-inf"), float("inf"), lse)
    tl.store(delta_ptr + at, tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1), mask=rows < seqlen_q)
    tl.store(row_lse_ptr + at, row_lse, mask=rows < seqlen_q)
    if dq_ptr is not None:
        store_zeros(dq_ptr, dq_strides, batch, head, rows, seqlen_q, HEAD_DIM, UNIT, BLOCK_M, BLOCK_D)
    if dk_ptr is not None:
        store_zeros(dk_ptr, dk_strides, batch, head, rows, seqlen_k, HEAD_DIM, UNIT, BLOCK_M, BLOCK_D)
        store_zeros(dv_ptr, dk_strides, batch, head, rows, seqlen_k, HEAD_DIM, UNIT, BLOCK_M, BLOCK_D)


@triton.jit
def _round_dq_kernel(sum_ptr, dq_ptr, num_elements, BLOCK_N: tl.constexpr):
    """Rounds the fp32 sum to dq."""
    at = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    dq = tl.load(sum_ptr + at, mask=at < num_elements)
    tl.store(dq_ptr + at, dq.to(dq_ptr.dtype.element_ty), mask=at < num_elements)


@triton.jit(do_not_specialize=COUNTS)
def _dkdv_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, delta_ptr, row_lse_ptr, dq_ptr, dk_ptr, dv_ptr, mask_ptr, dmask_ptr, work_ptr,
    planes, lengths, window, dropout, softmax_scale, softcap, q_strides, k_strides, v_strides, dout_strides, dq_strides,
    dk_strides, lse_strides, mask_strides, dmask_strides, LENGTHS: tl.constexpr, MASK: tl.constexpr, DQ: tl.constexpr,
    DMASK: tl.constexpr, HEAD_DIM: tl.constexpr, UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes dk and dv of BLOCK_N keys of one query head, and their part of dq and dmask.

    Arguments are as in forward.
    DQ: "atomic", "store" (there is only one block of keys) or "none"; DMASK: "atomic", "store" or "none".
    """
    # Under a causal mask, most rows see the first keys, so these blocks start first.
    block, plane, where, starts, bounds = locate(planes, lengths, LENGTHS, window[0] is not None and window[1] is None)
    batch, head, kv_head = where
    start_q, start_k = starts
    len_q, len_k, _ = bounds
    # The number of rows of dk and dv; those beyond seqlens_k get zeros.
    stored_k = len_k
    if LENGTHS == "seqlens_k":
        stored_k = len_k * 0 + lengths[3]
    first_key = block * BLOCK_N
    if first_key >= stored_k:
        return
    columns = first_key + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    q_ptr = plane_ptr(q_ptr, q_strides, batch, start_q, head, UNIT)
    k_ptr = plane_ptr(k_ptr, k_strides, batch, start_k, kv_head, UNIT)
    v_ptr = plane_ptr(v_ptr, v_strides, batch, start_k, kv_head, UNIT)
    dout_ptr = plane_ptr(dout_ptr, dout_strides, batch, start_q, head, UNIT)
    if DQ != "none":
        dq_ptr = plane_ptr(dq_ptr, dq_strides, batch, start_q, head, UNIT)
    at_row = batch * lse_strides[0] + head * lse_strides[1] + start_q
    delta_ptr += at_row
    row_lse_ptr += at_row
    if MASK != "none":
        mask_ptr += batch * mask_strides[0] + head * mask_strides[1]
    if DMASK != "none":
        dmask_ptr += batch * dmask_strides[0] + head * dmask_strides[1]
    drawn = load_dropout(dropout)

    k = load_tile(k_ptr, first_key, len_k, k_strides[1] * UNIT, BLOCK_N, HEAD_DIM, BLOCK_D, True)
    v = load_tile(v_ptr, first_key, len_k, v_strides[1] * UNIT, BLOCK_N, HEAD_DIM, BLOCK_D, True)
    dk = tl.zeros((BLOCK_N, BLOCK_D), dtype=tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), dtype=tl.float32)
    # A mask that all rows share is loaded only once.
    key_mask = 0.0
    if MASK == "bool_keys" or MASK == "additive_keys":
        key_mask = load_mask(mask_ptr, mask_strides, 0, columns[:, None], first_key, bounds, MASK, False, True)
    first, full_first, full_last, last = row_range(first_key, bounds, window, BLOCK_M, BLOCK_N)
    # A single block of keys is rarely full, so the loop without masks would only take registers. (In fp32, ptxas spills
    # without it.)
    ONE_LOOP: tl.constexpr = DQ == "store" and q_ptr.dtype.element_ty != tl.float32
    if DQ == "store":
        # The only block of keys writes dq of every row, including those that see no key.
        first = first * 0
        last = len_q
        if ONE_LOOP:
            full_first = first
            full_last = first
    TWO_ENDS: tl.constexpr = (window[1] is not None or DQ == "store") and not ONE_LOOP
    spans = spans_of(first, full_first, full_last, last, BLOCK_M, TWO_ENDS)
    EXACT: tl.constexpr = needs_exact_weights(MASK, q_ptr.dtype.element_ty)
    for CHECK in tl.static_range(ONE_LOOP, 2):
        for step in range(0, spans[CHECK][3]):
            start = block_start(step, spans[CHECK], BLOCK_M, CHECK and TWO_ENDS)
            rows = start + tl.arange(0, BLOCK_M)
            if work_ptr is not None:
                tl.atomic_add(work_ptr, 1)
            q = load_tile(q_ptr, start, len_q, q_strides[1] * UNIT, BLOCK_M, HEAD_DIM, BLOCK_D, CHECK)
            mask = key_mask
            if MASK == "bool" or MASK == "additive":
                mask = load_mask(
                    mask_ptr, mask_strides, rows[None, :], columns[:, None], first_key, bounds, MASK, CHECK, CHECK
                )
            s, scale, slope = score_tile(
                k, q, mask, rows[None, :], columns[:, None], bounds, window, softmax_scale, softcap, MASK, CHECK,
                PRECISION,
            )  # fmt: skip
            if CHECK:
                row_lse = tl.load(row_lse_ptr + rows, mask=rows < len_q, other=float("inf"))
                delta = tl.load(delta_ptr + rows, mask=rows < len_q, other=0.0)
            else:
                row_lse = tl.load(row_lse_ptr + rows)
                delta = tl.load(delta_ptr + rows)
            p = softmax_weights(s, scale, row_lse[None, :], EXACT)  # (BLOCK_N, BLOCK_M)
            if DQ == "store":
                # All keys of a row are in this tile, so neither its lse nor its output is needed, which are both
                # rounded.
                total = tl.sum(p, 0)
                p = p / tl.where(total > 0.0, total, 1.0)[None, :]
            dout = load_tile(dout_ptr, start, len_q, dout_strides[1] * UNIT, BLOCK_M, HEAD_DIM, BLOCK_D, CHECK)
            dp = tl.dot(v, tl.trans(dout), input_precision=PRECISION)  # (BLOCK_N, BLOCK_M)
            dropped_p = p
            if dropout[0] is not None:
                keep = keep_mask_tile(rows, first_key, plane, drawn, BLOCK_M, BLOCK_N, TRANSPOSED=True)
                dropped_p = kept_or_zero(keep, p * drawn[4], drawn)
                dp = tl.where(keep, dp * drawn[4], 0.0)
            dv = tl.dot(dropped_p.to(dout.dtype), dout, dv, input_precision=PRECISION)
            if DQ == "store":
                delta = tl.sum(p * dp, 0)
            ds = p * (dp - delta[None, :])
            if DMASK != "none":
                dmask_at = mask_ptrs(dmask_ptr, dmask_strides, rows[None, :], columns[:, None])
                here = (columns < len_k)[:, None] & (rows < len_q)[None, :]
                if DMASK == "store":
                    tl.store(dmask_at, ds.to(dmask_ptr.dtype.element_ty), mask=here)
                else:
                    tl.atomic_add(dmask_at, ds, mask=here, sem="relaxed")
            if softcap is not None:
                ds = ds * slope
            ds = ds.to(q.dtype)
            dk = tl.dot(ds, q, dk, input_precision=PRECISION)
            if DQ != "none":
                dq = tl.dot(tl.trans(ds), k, input_precision=PRECISION) * softmax_scale  # (BLOCK_M, BLOCK_D)
                dq_row = dq_strides[1] * UNIT
                dq_at = dq_ptr + tl.cast(start, tl.int64) * dq_row
                dq_at = dq_at + tl.arange(0, BLOCK_M)[:, None] * dq_row + dims[None, :]
                inside = (dims < HEAD_DIM)[None, :]
                # Otherwise all rows of the block exist. In fp32, ptxas spills unless both loops are alike.
                if CHECK or q_ptr.dtype.element_ty == tl.float32:
                    inside = inside & (rows < len_q)[:, None]
                if DQ == "atomic":
                    tl.atomic_add(dq_at, dq, mask=inside, sem="relaxed")
                else:
                    tl.store(dq_at, dq.to(dq_ptr.dtype.element_ty), mask=inside)

    here = (columns < stored_k)[:, None] & (dims < HEAD_DIM)[None, :]
    inside = tl.arange(0, BLOCK_N)[:, None] * (dk_strides[1] * UNIT) + dims[None, :]
    dk_ptrs = plane_ptr(dk_ptr, dk_strides, batch, start_k + first_key, head, UNIT) + inside
    dv_ptrs = plane_ptr(dv_ptr, dk_strides, batch, start_k + first_key, head, UNIT) + inside
    tl.store(dk_ptrs, (dk * softmax_scale).to(dk_ptr.dtype.element_ty), mask=here)
    tl.store(dv_ptrs, dv.to(dv_ptr.dtype.element_ty), mask=here)


def plan_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, attn_mask: Tensor | None, problem: Problem,
    needs_mask_grad: bool, *, config: Config | None = None, dq_config: Config | None = None,
) -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]:  # fmt: skip
    """Plans the backward pass for calls of this geometry.

    Returns:
        (dout, q, k, v, out, lse, attn_mask, seqlens_q, seqlens_k, dropout_seed, work_counter=None) -> (dq, dk, dv,
        dmask). For `work_counter`, see `attention.plan_forward`.
    """
    packed = problem.lengths == "packed"
    is_copied = not all(is_readable(x) for x in (q, k, v, dout, out))
    q, k, v, dout, out = (readable(x) for x in (q, k, v, dout, out))
    is_empty = q.numel() == 0 or k.numel() == 0
    if is_empty:
        return functools.partial(_nothing, needs_mask_grad)
    # Each query head has its own programs, and the dk and dv of the heads of a group are added afterwards.
    shared_heads = problem.group > 1
    per_head = (*k.shape[:-2], problem.num_heads, problem.head_dim)
    dtype, grad_dtype = q.dtype, torch.float32 if shared_heads else k.dtype

    call = call_of(architecture(q), problem, q.dtype, mask_kind(attn_mask))
    by_hopper = config is None and _attention_hopper.takes_backward(problem, q, k, v, dout, attn_mask)
    config = config or backward_config(call)
    deterministic = torch.are_deterministic_algorithms_enabled()
    if problem.seqlen_k <= config.block_n:
        dq_mode = "store"
    elif deterministic or (config.split and not by_hopper):  # `split` is for the generic kernel, not for sm_90's
        dq_mode = "none"
    else:
        dq_mode = "atomic"
    by_hopper = by_hopper and dq_mode == "atomic"
    dmask_mode, dmask_dtype = "none", q.dtype
    dmask_shape: tuple[int, ...] = ()
    if needs_mask_grad and attn_mask is not None:
        dmask_mode, dmask_shape, dmask_dtype = _dmask_buffer(attn_mask, problem, deterministic)

    unit = stride_unit(q, k, v, dout, out) if problem.head_dim % 8 == 0 else 1  # dq and dk are contiguous
    rows = lse.shape[-1]
    rows_block = max(1, min(64, 4096 // problem.block_d))
    rows_blocks = cdiv(max(rows, k.shape[0]) if packed else rows, rows_block)
    q_strides, kv_strides = (plane_strides(contiguous_strides(s), packed, unit) for s in (q.shape, per_head))
    row_strides = *(plane_strides(x.stride(), packed, unit) for x in (out, dout)), q_strides, kv_strides
    run_rows = Launch(
        _rows_kernel, (rows_blocks * (lse.numel() // rows),),
        HEAD_DIM=problem.head_dim, UNIT=unit, BLOCK_M=rows_block, BLOCK_D=problem.block_d, num_warps=4,
    )  # fmt: skip

    seqlens = problem.seqlen_q, problem.seqlen_k
    window, softmax_scale, softcap = problem.window, problem.softmax_scale, problem.softcap
    drops, drop = problem.dropout[0] is not None, problem.dropout[1:]
    strides = *(plane_strides(x.stride(), packed, unit) for x in (q, k, v, dout)), q_strides
    lse_strides = 0 if packed else lse.stride(0), lse.stride(-2)
    mask_steps = mask_strides(attn_mask)
    dmask_steps = broadcast_strides(dmask_shape, contiguous_strides(dmask_shape)) if dmask_shape else (0, 0, 0, 0)
    shared = {
        "LENGTHS": problem.lengths, "MASK": mask_kind(attn_mask), "HEAD_DIM": problem.head_dim, "UNIT": unit,
        "BLOCK_D": problem.block_d,
    }  # fmt: skip
    q_bytes = 2 * problem.seqlen_q * problem.head_dim * q.element_size()
    planes = planes_of(problem, cdiv(problem.seqlen_k, config.block_n), q_bytes)
    run_dkdv = Launch(
        _dkdv_kernel, (planes[2] * planes[3],), **shared, DQ=dq_mode, DMASK=dmask_mode, **tile_of(config, problem)
    )
    if dq_mode == "none":
        config = dq_config or choose_dq_config(call)
        kv_bytes = 2 * problem.seqlen_k * problem.head_dim * q.element_size() // problem.group
        dq_planes = planes_of(problem, cdiv(problem.seqlen_q, config.block_m), kv_bytes)
        run_dq = Launch(_dq_kernel, (dq_planes[2] * dq_planes[3],), **shared, **tile_of(config, problem))
    run_round = Launch(_round_dq_kernel, (cdiv(q.numel(), 2048),), BLOCK_N=2048, num_warps=4)
    untensored = problem._replace(seqlens_q=None, seqlens_k=None, dropout=(None, *drop))
    hopper = _attention_hopper.plan_backward(untensored)
    num_heads, num_elements = problem.num_heads, q.numel()
    adds = dq_mode == "atomic"
    rounds = adds and dtype != torch.float32
    dq_dtype, num_keys = torch.float32 if adds else dtype, k.shape[-3]

    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, attn_mask: Tensor | None,
        seqlens_q: Tensor | None, seqlens_k: Tensor | None, dropout_seed: Tensor | None,
        work_counter: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        if is_copied:
            q, k, v, dout, out = (readable(x) for x in (q, k, v, dout, out))
        if shared_heads:
            dk, dv = k.new_empty(per_head, dtype=grad_dtype), v.new_empty(per_head, dtype=grad_dtype)
        else:  # the fastest way to allocate
            dk = torch.empty_like(k, memory_format=torch.contiguous_format)
            dv = torch.empty_like(v, memory_format=torch.contiguous_format)
        dq = torch.empty_like(q, dtype=dq_dtype, memory_format=torch.contiguous_format)
        # Skipped blocks of the mask's gradient must be 0.
        dmask = None if dmask_mode == "none" else q.new_zeros(dmask_shape, dtype=dmask_dtype)
        delta, row_lse = torch.empty_like(lse), torch.empty_like(lse)
        zeroed = dq if adds or packed else None, *((dk, dv) if packed else (None, None))
        run_rows(out, dout, lse, delta, row_lse, *zeroed, num_heads, rows, num_keys, rows_blocks, *row_strides)
        mask = mask_bytes(attn_mask)
        lengths = contiguous(seqlens_q), contiguous(seqlens_k), *seqlens
        dropout = contiguous(dropout_seed) if drops else None, *drop
        if by_hopper and work_counter is None:
            hopper((dout, q, k, v, row_lse, delta, dq, dk, dv), lengths, dropout)
        else:
            run_dkdv(
                q, k, v, dout, delta, row_lse, None if dq_mode == "none" else dq, dk, dv, mask, dmask, work_counter,
                planes, lengths, window, dropout, softmax_scale, softcap, *strides, kv_strides, lse_strides,
                mask_steps, dmask_steps,
            )  # fmt: skip
        if dq_mode == "none":
            run_dq(
                q, k, v, dout, delta, row_lse, dq, mask, work_counter, dq_planes, lengths, window, dropout,
                softmax_scale, softcap, *strides, lse_strides, mask_steps,
            )  # fmt: skip
        if dmask is None:
            dmask = q.new_empty(0)
        else:
            assert attn_mask is not None
            shape = attn_mask.shape
            broadcast = [dim for dim in range(4) if shape[dim] == 1 and dmask_shape[dim] != 1]
            dmask = (dmask.sum(broadcast, keepdim=True) if broadcast else dmask).to(attn_mask.dtype)
        if shared_heads:
            heads = (untensored.num_kv_heads, untensored.group)
            dk, dv = (x.unflatten(-2, heads).sum(-2).to(dtype) for x in (dk, dv))
        if rounds:
            sums, dq = dq, torch.empty_like(q, memory_format=torch.contiguous_format)
            run_round(sums, dq, num_elements)
        return dq, dk, dv, dmask

    return backward


def _nothing(
    needs_mask_grad: bool, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    attn_mask: Tensor | None, *_: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the gradients if there are no queries or no keys."""
    mask = attn_mask if needs_mask_grad and attn_mask is not None else q.new_empty(0)
    return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape), mask.new_zeros(mask.shape)


def _dmask_buffer(attn_mask: Tensor, problem: Problem, deterministic: bool) -> tuple[str, tuple[int, ...], torch.dtype]:
    """Returns how the gradient of an additive mask is written, and the shape and dtype of its zeroed buffer.

    If batches or heads share the mask, atomics sum the gradient in fp32. If rows or keys share it, and for any shared
    mask in the deterministic variant, the full matrix is stored in fp32 and summed afterwards, because atomics would
    contend for the same addresses.
    """
    full = (problem.batch, problem.num_heads, problem.seqlen_q, problem.seqlen_k)
    if attn_mask.shape == full:
        return "store", full, attn_mask.dtype
    if deterministic or attn_mask.shape[2:] != full[2:]:
        return "store", full, torch.float32
    return "atomic", tuple(attn_mask.shape), torch.float32
