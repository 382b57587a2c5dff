"""Attention, forward: softmax(scale * Q K^T + mask) V without storing the matrix of scores, dense or packed.

A program owns BLOCK_M rows of one head and loops over the keys that they may see, with the online softmax of Dao
et al. 2022 ("FlashAttention"). The loop bounds skip hidden keys (causal, windows, lengths): blocks that every row sees
in full need no mask, those at the diagonal and at the tail are masked, and all others are not loaded.

Fused: scale, soft cap, mask (boolean or additive, broadcast by stride 0), windows, lengths, dropout, grouped K/V heads.
Work: 4 * seqlen_q * seqlen_k * head_dim FLOPs per head (half of that if causal); memory: Q, K, V and out once, lse 4
bytes per row. fp32: scores, softmax statistics, the accumulator, lse. P is rounded to V's dtype for the second product.
fp32 inputs are multiplied as three TF32 products (relative error about 2**-21 per product).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastformer.kernels import _attention_hopper, _few_queries
from fastformer.kernels._attention_common import (
    COUNTS,
    Problem,
    block_start,
    contiguous_strides,
    describe,
    is_readable,
    key_range,
    load_mask,
    load_tile,
    locate,
    mask_bytes,
    mask_kind,
    mask_strides,
    needs_exact_weights,
    plane_ptr,
    plane_strides,
    planes_of,
    readable,
    row_units,
    score_tile,
    softmax_weights,
    spans_of,
    store_zeros,
    takes_row_units,
)
from fastformer.kernels._attention_configs import LARGEST_FP32_HEAD_DIM, Config, call_of, forward_config, tile_of
from fastformer.kernels._dropout import keep_mask_tile, kept_or_zero, load_dropout
from fastformer.kernels._launch import (
    DTYPES,
    Launch,
    architecture,
    cdiv,
    contiguous,
    stride_unit,
    unsupported_dtype,
    unsupported_products,
)
from fastformer.kernels._plans import Plan, planned
from fastformer.kernels.attention_backward import plan_backward

# The number of rows in the result of each product, in both copies of the loop: Q K^T and P V.
PRODUCTS = {"_attention_fwd_kernel": lambda arguments: [arguments["BLOCK_M"]] * 4}


@triton.jit(do_not_specialize=COUNTS)
def _attention_fwd_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, mask_ptr, work_ptr, planes, lengths, window, dropout, softmax_scale, softcap,
    q_strides, k_strides, v_strides, out_strides, lse_strides, mask_strides, LENGTHS: tl.constexpr, MASK: tl.constexpr,
    HEAD_DIM: tl.constexpr, UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes out and lse of BLOCK_M rows of one head.

    planes, lengths: see `locate`; window: (left, right); dropout: see `load_dropout`; softcap: see `score_tile`;
    strides: (batch, row, head) in UNITs; for lse (batch, head), for the mask all four; work_ptr: a counter of block
    products, or None.
    """
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
    if MASK != "none":
        mask_ptr += batch * mask_strides[0] + head * mask_strides[1]
    drawn = load_dropout(dropout)

    q = load_tile(q_ptr, first_row, len_q, q_strides[1] * UNIT, BLOCK_M, HEAD_DIM, BLOCK_D, True)
    acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    ROW_UNITS: tl.constexpr = takes_row_units(MASK, q_ptr.dtype.element_ty)
    # With row units, float32's lowest number serves as -inf, so that no difference of two peaks is NaN.
    LOWEST: tl.constexpr = -3.4028234663852886e38 if ROW_UNITS else float("-inf")
    peak = tl.full((BLOCK_M,), LOWEST, dtype=tl.float32)
    first, full_first, full_last, last = key_range(first_row, bounds, window, BLOCK_M, BLOCK_N)
    spans = spans_of(first, full_first, full_last, last, BLOCK_N, window[0] is not None)
    EXACT: tl.constexpr = needs_exact_weights(MASK, q_ptr.dtype.element_ty)
    # The online softmax, first over blocks that all rows see. CHECK: keys may be beyond the length or the window.
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
            # The peak is in natural units, like lse, because any rounding of lse shows up in fp32 gradients.
            new_peak = tl.maximum(peak, tl.max(s, 1) * scale)
            base = new_peak
            if ROW_UNITS:
                unit, level = row_units(new_peak)
                p = tl.exp2(tl.fma(s, unit[:, None], -level[:, None]))
            else:
                # A row that has seen no key yet has peak -inf, and -inf - -inf is NaN.
                if CHECK or MASK != "none":
                    if EXACT:
                        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
                    else:
                        base = tl.maximum(new_peak, -1e38)
                p = softmax_weights(s, scale, base[:, None], EXACT)
            fade = tl.exp2((peak - base) * 1.4426950408889634)
            total = total * fade + tl.sum(p, 1)
            if dropout[0] is not None:
                p = kept_or_zero(keep_mask_tile(rows, start, plane, drawn, BLOCK_M, BLOCK_N), p, drawn)
            v = load_tile(v_ptr, start, len_k, v_strides[1] * UNIT, BLOCK_N, HEAD_DIM, BLOCK_D, CHECK)
            acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
            peak = new_peak

    # A row that sees no key has total 0, out 0 and lse -inf.
    exponent = tl.log2(total)
    if ROW_UNITS:
        unit, level = row_units(peak)
        exponent -= tl.fma(peak, unit, -level)
    lse = peak + exponent * 0.6931471805599453
    lse = tl.where(total > 0, lse, tl.where(total == 0, float("-inf"), total))
    acc = acc * (drawn[4] / tl.where(total == 0, 1.0, total))[:, None]
    lse_ptrs = lse_ptr + batch * lse_strides[0] + head * lse_strides[1] + start_q + rows
    tl.store(lse_ptrs, lse, mask=rows < len_q)
    dims = tl.arange(0, BLOCK_D)
    out_ptr = plane_ptr(out_ptr, out_strides, batch, start_q + first_row, head, UNIT)
    out_ptrs = out_ptr + tl.arange(0, BLOCK_M)[:, None] * (out_strides[1] * UNIT) + dims[None, :]
    here = (rows < len_q)[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["seqlen_q", "total"])
def _clear_kernel(
    out_ptr, lse_ptr, seqlens_q_ptr, seqlen_q, total, out_strides, HEAD_DIM: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Zeroes the packed rows of a sequence and head that may belong to no program of the forward pass.

    These are the rows beyond seqlen_q, the longest sequence that was announced, and all after the last sequence.
    """
    batch, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    start = tl.load(seqlens_q_ptr + batch)
    end = tl.load(seqlens_q_ptr + batch + 1)
    first = start + tl.minimum(end - start, seqlen_q)
    end = tl.where(batch == tl.num_programs(0) - 1, total, end)
    for row in range(first, end, BLOCK_M):
        rows = row + tl.arange(0, BLOCK_M)
        store_zeros(out_ptr, out_strides, head * 0, head, rows, end, HEAD_DIM, UNIT, BLOCK_M, BLOCK_D)
        empty = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
        tl.store(lse_ptr + head * total + rows, empty, mask=rows < end)


def plan_forward(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, problem: Problem, *, config: Config | None = None
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Plans the forward pass for calls of this geometry.

    Returns:
        (q, k, v, attn_mask, seqlens_q, seqlens_k, dropout_seed, work_counter=None) -> (out, lse). Tests pass
        `work_counter` (int32), which counts block products.
    """
    packed = problem.lengths == "packed"
    is_copied = not all(is_readable(x) for x in (q, k, v))
    q, k, v = readable(q), readable(k), readable(v)
    by_hopper = config is None and _attention_hopper.takes(problem, q, k, v, attn_mask)
    num_rows = q.shape[0] if packed else problem.seqlen_q
    lse_shape = (problem.num_heads, num_rows) if packed else (problem.batch, problem.num_heads, num_rows)
    config = config or forward_config(call_of(architecture(q), problem, q.dtype, mask_kind(attn_mask)))
    unit = stride_unit(q, k, v) if problem.head_dim % 8 == 0 else 1  # out is contiguous
    kv_bytes = 2 * problem.seqlen_k * problem.head_dim * q.element_size() // problem.group
    planes = planes_of(problem, cdiv(problem.seqlen_q, config.block_m), kv_bytes)
    strides = (
        *(plane_strides(x.stride(), packed, unit) for x in (q, k, v)),
        plane_strides(contiguous_strides(q.shape), packed, unit),
        (0 if packed else problem.num_heads * num_rows, num_rows), mask_strides(attn_mask),
    )  # fmt: skip
    seqlens = problem.seqlen_q, problem.seqlen_k
    window, softmax_scale, softcap = problem.window, problem.softmax_scale, problem.softcap
    drops, drop = problem.dropout[0] is not None, problem.dropout[1:]
    is_empty = q.numel() == 0 or planes[2] * planes[3] == 0
    hopper = _attention_hopper.plan_forward(problem._replace(seqlens_q=None, seqlens_k=None, dropout=(None, *drop)))
    run = Launch(
        _attention_fwd_kernel, (planes[2] * planes[3],), LENGTHS=problem.lengths, MASK=mask_kind(attn_mask),
        HEAD_DIM=problem.head_dim, UNIT=unit, BLOCK_D=problem.block_d, **tile_of(config, problem),
    )  # fmt: skip
    clear = Launch(
        _clear_kernel, (problem.batch, problem.num_heads), HEAD_DIM=problem.head_dim, UNIT=unit,
        BLOCK_M=max(1, min(64, 4096 // problem.block_d)), BLOCK_D=problem.block_d, num_warps=4,
    )  # fmt: skip

    def forward(
        q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, seqlens_q: Tensor | None, seqlens_k: Tensor | None,
        dropout_seed: Tensor | None, work_counter: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        if is_copied:
            q, k, v = readable(q), readable(k), readable(v)
        if is_empty:
            return q.new_zeros(q.shape), q.new_full(lse_shape, float("-inf"), dtype=torch.float32)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = q.new_empty(lse_shape, dtype=torch.float32)
        lengths = contiguous(seqlens_q), contiguous(seqlens_k), *seqlens
        dropout = contiguous(dropout_seed) if drops else None, *drop
        if packed:
            clear(out, lse, lengths[0], seqlens[0], num_rows, strides[3])
        if by_hopper and work_counter is None:
            hopper((q, k, v, out, lse), lengths, dropout)
        else:
            run(
                q, k, v, out, lse, mask_bytes(attn_mask), work_counter, planes, lengths, window, dropout,
                softmax_scale, softcap, *strides,
            )  # fmt: skip
        return out, lse

    return forward


def why_unsupported(
    op_name: str, *, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, attn_mask: Tensor | None = None,
    **_: object,
) -> str | None:  # fmt: skip
    """Returns why the kernels don't support a call of (varlen_)attention_fwd or _bwd, or None if they do."""
    if (reason := unsupported_dtype(q.dtype)) is not None:
        return reason
    if k.dtype != q.dtype or v.dtype != q.dtype:
        return "q, k and v differ in dtype"
    if q.shape[-1] > 256:
        return f"head_dim {q.shape[-1]} is greater than 256"
    if q.dtype == torch.float32 and q.shape[-1] > LARGEST_FP32_HEAD_DIM and q.is_cuda:
        return f"head_dim {q.shape[-1]} in float32 is greater than {LARGEST_FP32_HEAD_DIM}"
    if v.shape[-1] != q.shape[-1]:
        return "v's head_dim is not q's"
    if not softmax_scale > 0:
        return f"softmax_scale {softmax_scale} is not positive"
    if attn_mask is not None and attn_mask.dtype not in (torch.bool, *DTYPES):
        return f"attn_mask is {attn_mask.dtype}"
    return unsupported_products(q)


def plan_attention_fwd(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, seqlens_k: Tensor | None, *options: Any
) -> Plan:
    """Plans `attention_fwd` for calls of this geometry. The options are the schema's, from softmax_scale on."""
    if _few_queries.takes(q, k, v, attn_mask, seqlens_k, *options):
        return _few_queries.plan_few_queries(q, k, v, attn_mask, seqlens_k, *options)
    problem = describe_dense(q, k, seqlens_k, *options)
    forward = plan_forward(q, k, v, attn_mask, problem)
    return lambda q, k, v, mask, lengths, _scale, _left, _right, _p, seed, *_: forward(
        q, k, v, mask, None, lengths, seed
    )


def plan_attention_bwd(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, attn_mask: Tensor | None,
    seqlens_k: Tensor | None, softmax_scale: float, window_left: int | None, window_right: int | None,
    dropout_p: float, dropout_seed: Tensor | None, needs_mask_grad: bool, softcap: float = 0.0,
) -> Plan:  # fmt: skip
    """Plans `attention_bwd` for calls of this geometry."""
    problem = describe_dense(
        q, k, seqlens_k, softmax_scale, window_left, window_right, dropout_p, dropout_seed, softcap
    )
    backward = plan_backward(dout, q, k, v, out, lse, attn_mask, problem, needs_mask_grad)
    return lambda dout, q, k, v, out, lse, mask, lengths, _scale, _left, _right, _p, seed, *_: backward(
        dout, q, k, v, out, lse, mask, None, lengths, seed
    )


def plan_varlen_attention_fwd(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *options: Any
) -> Plan:
    """Plans `varlen_attention_fwd` for calls of this geometry. The options are the schema's, from max_seqlen_q on."""
    problem = describe(q, k, "packed", cu_seqlens_q, cu_seqlens_k, *options)
    forward = plan_forward(q, k, v, None, problem)
    return lambda q, k, v, cu_q, cu_k, _max_q, _max_k, _scale, _left, _right, _p, seed, *_: forward(
        q, k, v, None, cu_q, cu_k, seed
    )


def plan_varlen_attention_bwd(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor, *options: Any,
) -> Plan:  # fmt: skip
    """Plans `varlen_attention_bwd` for calls of this geometry. The options are the schema's, from max_seqlen_q on."""
    problem = describe(q, k, "packed", cu_seqlens_q, cu_seqlens_k, *options)
    backward = plan_backward(dout, q, k, v, out, lse, None, problem, False)
    return lambda dout, q, k, v, out, lse, cu_q, cu_k, _max_q, _max_k, _scale, _left, _right, _p, seed, *_: backward(
        dout, q, k, v, out, lse, None, cu_q, cu_k, seed
    )[:3]


attention_fwd = planned(plan_attention_fwd)  # returns (out, lse)
attention_bwd = planned(plan_attention_bwd)  # returns (dq, dk, dv, dmask)
varlen_attention_fwd = planned(plan_varlen_attention_fwd)  # returns (out, lse)
varlen_attention_bwd = planned(plan_varlen_attention_bwd)  # returns (dq, dk, dv)


def describe_dense(q: Tensor, k: Tensor, seqlens_k: Tensor | None, *options: Any) -> Problem:
    """Returns the description of a dense call; the options are the last arguments of `describe`."""
    lengths = "dense" if seqlens_k is None else "seqlens_k"
    return describe(q, k, lengths, None, seqlens_k, q.shape[1], k.shape[1], *options)
