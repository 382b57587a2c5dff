"""Attention, forward: softmax(scale * Q K^T + mask) V without the matrix in between, dense or packed.

One program owns BLOCK_M rows of one head and walks over the keys that they may see, with the online softmax of Dao
et al. 2022 ("FlashAttention"). What a bound can skip is skipped by the loop's bounds (causal, windows, lengths): blocks
that every row sees in full run without a mask, the diagonal's and the tail's with one, the others are not loaded.

Fused: scale, mask (boolean or additive, broadcast by stride 0), windows, lengths, dropout, grouped K/V heads.
Work: 4 * seqlen_q * seqlen_k * head_dim FLOPs a head (half of it when causal); memory: Q, K, V, out once, lse 4 bytes
a row. fp32: scores, softmax statistics, the accumulator, lse. P is rounded to V's dtype for the second product. fp32
inputs are multiplied as three TF32 products each (relative error about 2**-21 a product).
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
    describe,
    key_range,
    last_dim_contiguous,
    load_tile,
    mask_bytes,
    mask_kind,
    mask_strides,
    planes_together,
    sequence_bounds,
    softmax_weights,
    stride_unit,
    strides,
    visible_tile,
    which_block,
)
from fastformer.kernels._attention_configs import LARGEST_FP32_HEAD_DIM, Config, call_of, forward_config
from fastformer.kernels._dropout import keep_mask_tile, load_dropout_key
from fastformer.kernels.attention_backward import launch_backward

# The rows of each product's result, for the two copies of the loop: Q K^T and P V.
PRODUCTS = {"_attention_fwd_kernel": lambda arguments: [arguments["BLOCK_M"]] * 4}


@triton.jit
def _attend_blocks(
    acc,
    total,
    peak,
    q,
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
    """The online softmax over key blocks (see block_start). CHECK: a column may be beyond the length or the window."""
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
        # The peak is in natural units, as lse is: fp32 gradients feel each rounding of lse.
        new_peak = tl.maximum(peak, tl.max(s, 1) * scale)
        # A row that has seen nothing yet has peak -inf, and -inf - -inf is NaN.
        base = new_peak
        if CHECK or MASK != "none":
            base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        p = softmax_weights(s, scale, base[:, None], q.dtype == tl.float32)
        fade = tl.exp2((peak - base) * 1.4426950408889634)
        total = total * fade + tl.sum(p, 1)
        if DROPOUT:
            keep = keep_mask_tile(rows, start, plane, key0, key1, offset, threshold, BLOCK_M, BLOCK_N)
            p = tl.where(keep, p, 0.0)
        v = load_tile(v_ptr, start, len_k, stride_vn, BLOCK_N, HEAD_DIM, BLOCK_D, CHECK)
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
        peak = new_peak
    return acc, total, peak


@triton.jit(do_not_specialize=COUNTS)
def _attention_fwd_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
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
    stride_ob,
    stride_om,
    stride_oh,
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
    stride_ob *= UNIT
    stride_om *= UNIT
    stride_oh *= UNIT
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
    batch64 = batch.to(tl.int64)
    head64 = head.to(tl.int64)
    kv_head = (head // group).to(tl.int64)
    q_ptr += batch64 * stride_qb + start_q * stride_qm + head64 * stride_qh
    k_ptr += batch64 * stride_kb + start_k * stride_kn + kv_head * stride_kh
    v_ptr += batch64 * stride_vb + start_k * stride_vn + kv_head * stride_vh
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
    acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    peak = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    first, full_first, full_last, last = key_range(
        first_row, len_q, len_k, diagonal, window_left, window_right, HAS_LEFT, HAS_RIGHT, BLOCK_M, BLOCK_N
    )
    full_blocks = (full_last - full_first) // BLOCK_N
    acc, total, peak = _attend_blocks(
        acc, total, peak, q, k_ptr, v_ptr, mask_ptrs, rows, full_first, 0, 0, full_blocks, len_q, len_k, diagonal,
        window_left, window_right, stride_kn, stride_vn, stride_mask_n, softmax_scale, plane, key0, key1, offset,
        threshold, work_ptr, HAS_LEFT, HAS_RIGHT, MASK, DROPOUT, False, COUNT_WORK, HEAD_DIM, BLOCK_M, BLOCK_N,
        BLOCK_D, PRECISION,
    )  # fmt: skip
    left_blocks = (full_first - first) // BLOCK_N
    edge_blocks = left_blocks + (last - full_last + BLOCK_N - 1) // BLOCK_N
    edge = first
    if not HAS_LEFT:
        edge = full_last
    acc, total, peak = _attend_blocks(
        acc, total, peak, q, k_ptr, v_ptr, mask_ptrs, rows, edge, left_blocks, full_last, edge_blocks, len_q, len_k,
        diagonal, window_left, window_right, stride_kn, stride_vn, stride_mask_n, softmax_scale, plane, key0, key1,
        offset, threshold, work_ptr, HAS_LEFT, HAS_RIGHT, MASK, DROPOUT, True, COUNT_WORK, HEAD_DIM, BLOCK_M, BLOCK_N,
        BLOCK_D, PRECISION,
    )  # fmt: skip

    # A row with nothing to attend to: total 0, out 0, lse -inf.
    lse = peak + tl.log2(total) * 0.6931471805599453
    lse = tl.where(total > 0, lse, tl.where(total == 0, float("-inf"), total))
    acc = acc * (keep_scale / tl.where(total == 0, 1.0, total))[:, None]
    lse_ptrs = lse_ptr + batch64 * stride_lb + head64 * stride_lh + start_q + rows
    tl.store(lse_ptrs, lse, mask=rows < len_q)
    dims = tl.arange(0, BLOCK_D)
    out_ptr += batch64 * stride_ob + (start_q + first_row) * stride_om + head64 * stride_oh
    out_ptrs = out_ptr + tl.arange(0, BLOCK_M)[:, None] * stride_om + dims[None, :]
    here = (rows < len_q)[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=here)


def launch_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    problem: Problem,
    *,
    config: Config | None = None,
    work_counter: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Runs the forward kernel on a described call. Tests pass `config` and `work_counter` (int32: block products)."""
    packed = problem.lengths == "packed"
    q, k, v = last_dim_contiguous(q), last_dim_contiguous(k), last_dim_contiguous(v)
    if packed:
        # Rows beyond the last sequence belong to no program.
        out = q.new_zeros(q.shape)
        lse = torch.full((problem.num_heads, q.shape[0]), float("-inf"), dtype=torch.float32, device=q.device)
    else:
        out = q.new_empty(q.shape)
        shape = (problem.batch, problem.num_heads, problem.seqlen_q)
        lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    if q.numel() == 0 or problem.seqlen_q == 0:
        return out, lse
    config = config or forward_config(call_of(architecture(q), problem, q.dtype, attn_mask is not None))
    unit = stride_unit(q, k, v, out)
    num_blocks = triton.cdiv(problem.seqlen_q, config.block_m)
    num_planes = problem.batch * problem.num_heads
    kv_bytes = 2 * problem.seqlen_k * problem.head_dim * q.element_size() // problem.group
    dropped = max(problem.threshold, 0)
    _attention_fwd_kernel[(num_blocks * num_planes,)](
        q, k, v, out, lse,
        mask_bytes(attn_mask),
        problem.seqlens_q, problem.seqlens_k, problem.dropout_seed, work_counter,
        problem.softmax_scale, 65536 / (65536 - dropped) if dropped < 65536 else 0.0, dropped,
        problem.seqlen_q, problem.seqlen_k, problem.window_left or 0, problem.window_right or 0,
        problem.num_heads, problem.group, num_planes, num_blocks, planes_together(num_planes, kv_bytes),
        *strides(q, packed, unit), *strides(k, packed, unit), *strides(v, packed, unit), *strides(out, packed, unit),
        0 if packed else lse.stride(0), lse.stride(-2),
        *mask_strides(attn_mask),
        LENGTHS=problem.lengths,
        HAS_LEFT=problem.window_left is not None,
        HAS_RIGHT=problem.window_right is not None,
        MASK=mask_kind(attn_mask),
        DROPOUT=problem.threshold >= 0,
        COUNT_WORK=work_counter is not None,
        HEAD_DIM=problem.head_dim,
        UNIT=unit,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_D=problem.block_d,
        PRECISION=problem.precision,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )  # fmt: skip
    return out, lse


def why_unsupported(
    op_name: str,
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float,
    attn_mask: Tensor | None = None,
    **_: object,
) -> str | None:
    """Why the kernels can't take a call of (varlen_)attention_fwd or _bwd; None if they can."""
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"the inputs are {q.dtype}, not float16, bfloat16 or float32"
    if k.dtype != q.dtype or v.dtype != q.dtype:
        return "q, k and v differ in dtype"
    if q.shape[-1] > 256:
        return f"head_dim {q.shape[-1]} is greater than 256"
    if q.dtype == torch.float32 and q.shape[-1] > LARGEST_FP32_HEAD_DIM and q.device.type == "cuda":
        return f"head_dim {q.shape[-1]} in float32 is greater than {LARGEST_FP32_HEAD_DIM}"
    if v.shape[-1] != q.shape[-1]:
        return "v's head_dim is not q's"
    if not softmax_scale > 0:
        return f"softmax_scale {softmax_scale} is not positive"
    if attn_mask is not None and attn_mask.dtype not in (torch.bool, torch.float16, torch.bfloat16, torch.float32):
        return f"attn_mask is {attn_mask.dtype}"
    if q.device.type == "cuda":
        if architecture(q) < 80:
            return "the GPU is older than compute capability 8.0, where tl.dot has no tensor cores"
    elif isinstance(_attention_fwd_kernel, triton.runtime.JITFunction):
        return "the tensors are on the CPU and TRITON_INTERPRET=1 was not set before the kernels were imported"
    elif q.dtype == torch.bfloat16:
        return "Triton's interpreter multiplies bfloat16 wrongly"
    return None


def attention_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    seqlens_k: Tensor | None,
    softmax_scale: float,
    window_left: int | None,
    window_right: int | None,
    dropout_p: float,
    dropout_seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`fastformer::attention_fwd`: (out, lse)."""
    problem = describe_dense(q, k, seqlens_k, softmax_scale, window_left, window_right, dropout_p, dropout_seed)
    return launch_forward(q, k, v, attn_mask, problem)


def attention_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    attn_mask: Tensor | None,
    seqlens_k: Tensor | None,
    softmax_scale: float,
    window_left: int | None,
    window_right: int | None,
    dropout_p: float,
    dropout_seed: Tensor | None,
    needs_mask_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`fastformer::attention_bwd`: (dq, dk, dv, dmask)."""
    problem = describe_dense(q, k, seqlens_k, softmax_scale, window_left, window_right, dropout_p, dropout_seed)
    return launch_backward(dout, q, k, v, out, lse, attn_mask, problem, needs_mask_grad)


def varlen_attention_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    window_left: int | None,
    window_right: int | None,
    dropout_p: float,
    dropout_seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`fastformer::varlen_attention_fwd`: (out, lse)."""
    problem = describe(
        q, k, lengths="packed", seqlens_q=cu_seqlens_q, seqlens_k=cu_seqlens_k, seqlen_q=max_seqlen_q,
        seqlen_k=max_seqlen_k, softmax_scale=softmax_scale, window_left=window_left, window_right=window_right,
        dropout_p=dropout_p, dropout_seed=dropout_seed,
    )  # fmt: skip
    return launch_forward(q, k, v, None, problem)


def varlen_attention_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    window_left: int | None,
    window_right: int | None,
    dropout_p: float,
    dropout_seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`fastformer::varlen_attention_bwd`: (dq, dk, dv)."""
    problem = describe(
        q, k, lengths="packed", seqlens_q=cu_seqlens_q, seqlens_k=cu_seqlens_k, seqlen_q=max_seqlen_q,
        seqlen_k=max_seqlen_k, softmax_scale=softmax_scale, window_left=window_left, window_right=window_right,
        dropout_p=dropout_p, dropout_seed=dropout_seed,
    )  # fmt: skip
    return launch_backward(dout, q, k, v, out, lse, None, problem, False)[:3]


def describe_dense(
    q: Tensor,
    k: Tensor,
    seqlens_k: Tensor | None,
    softmax_scale: float,
    window_left: int | None,
    window_right: int | None,
    dropout_p: float,
    dropout_seed: Tensor | None,
) -> Problem:
    """A dense call's facts, from its op's arguments."""
    return describe(
        q, k, lengths="dense" if seqlens_k is None else "seqlens_k", seqlens_q=None, seqlens_k=seqlens_k,
        seqlen_q=q.shape[1], seqlen_k=k.shape[1], softmax_scale=softmax_scale, window_left=window_left,
        window_right=window_right, dropout_p=dropout_p, dropout_seed=dropout_seed,
    )  # fmt: skip
