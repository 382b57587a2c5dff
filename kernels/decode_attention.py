"""Attention of one or a few queries to a KV cache, to which their own keys and values are appended in the same pass.

A decode step reads every key and value once and computes little with them, so it is memory-bound. A program owns a tile
of rows for one K/V head: all query heads of the group and all queries of a batch row. If batch rows read the cache
through cache_batch_idx (the beams of one source), a tile has several consecutive batch rows. The program walks over the
blocks of keys of the distinct cache rows among them, and loads each block once for all rows that read it. The other
rows of the tile are masked, which costs nothing, because tl.dot needs at least 16 rows.

The walk is divided evenly among `num_splits` programs. Lengths are read on the device, and the grid depends only on
shapes, so a CUDA graph can be replayed with other lengths. A program without any blocks returns immediately. If there
are several programs per tile, a second kernel merges their results.

Attention without a cache runs here, too, if it has few queries and many keys (`_few_queries`). Such a call has no new
tokens, may have a boolean mask and no lengths, and needs lse.

The first program of a walk also writes the new keys and values to the cache. No program reads them from there: the
blocks of new tokens are read from k and v, so that no program waits for another.

With rotary tables, queries are rotated as they are read, by their positions in the cache. The walk then ends before the
new tokens: the program with the last part of the walk, which is the shortest, rotates the new keys, writes them, and
attends to them in separate blocks. This saves two launches per step, and the walk is the same as without new tokens.

Bytes: (keys + new) * head_dim * 2 per K/V head of each distinct row, q and out, 4 per key for a slot table; with
splits, another 8 * head_dim per row of out and split; 4 * rotary_dim per new token for the rotary tables. FLOPs: 4 *
keys * head_dim per query and head, and 16 / rows of the tile times as many in the tensor cores. fp32: scores, softmax
statistics (in units of log2), the accumulator, partial results, rotations. P is rounded to V's dtype for the second
product. fp32 inputs are multiplied as three TF32 products.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastformer.kernels._attention_common import FAR, mask_strides
from fastformer.kernels._decode_attention_configs import (
    LARGEST_FP32_HEAD_DIM,
    SMALLEST_TILE,
    config_of,
    most_registers,
    programs_at_once,
    rows_together,
    splits_of,
)
from fastformer.kernels._launch import (
    Launch,
    cdiv,
    dot_precision,
    next_power_of_2,
    stride_unit,
    unsupported_dtype,
    unsupported_products,
)
from fastformer.kernels._plans import Plan, planned
from fastformer.kernels._softcap import soft_capped
from fastformer.kernels.rotary import load_turned

# The number of rows in the result of each product.
PRODUCTS = {"_decode_attention_kernel": lambda a: [a["BLOCK_M"]] * (4 if a["HALF"] else 2)}
# Arguments whose values must not lead to another binary: Triton specialises on 1 and on multiples of 16.
_COUNTS = [
    "sizes", "window_left", "q_strides", "k_cache_strides", "v_cache_strides", "k_strides", "v_strides",
    "integer_strides", "mask_strides", "rotary",
]  # fmt: skip


@triton.jit
def _integers(ptr, stride, rows, here, least, end):
    """Returns (the integers of `rows`, whether they are in [least, end)). Others are clamped, for memory safety."""
    values = tl.load(ptr + rows.to(tl.int64) * stride, mask=here, other=least)
    return tl.maximum(tl.minimum(values, end - 1), least), (values >= least) & (values < end)


@triton.jit
def _token_ptrs(ptr, strides, head, row, positions, slots, TABLE: tl.constexpr, UNIT: tl.constexpr):
    """Returns pointers to tokens of one head in a cache: by slots or, without a table, by row and position."""
    ptr += head.to(tl.int64) * strides[2] * UNIT
    if TABLE:
        return ptr + slots.to(tl.int64) * strides[1] * UNIT
    return ptr + (row.to(tl.int64) * strides[0] + positions.to(tl.int64) * strides[1]) * UNIT


@triton.jit
def _query_ptrs(ptr, strides, rows, queries, heads, UNIT: tl.constexpr):
    """Returns pointers to query heads."""
    offsets = rows.to(tl.int64) * strides[0] + queries.to(tl.int64) * strides[1]
    return ptr + (offsets + heads.to(tl.int64) * strides[2]) * UNIT


@triton.jit
def _slots(table_ptr, strides, row, positions, here, TABLE: tl.constexpr):
    """Returns the slots of positions of a row; without a table, the positions themselves."""
    if TABLE:
        entries = row.to(tl.int64) * strides[2] + positions.to(tl.int64) * strides[3]
        return tl.load(table_ptr + entries, mask=here, other=0)
    else:
        return positions


@triton.jit
def _block_of_row(step, begins, ends, rows, firsts, lasts, BLOCK_N: tl.constexpr):
    """Returns the step-th block of a walk over several rows: (row, first position, end of the row)."""
    this = (begins <= step) & (step < ends)
    row = tl.sum(tl.where(this, rows, 0), 0)
    start = tl.sum(tl.where(this, firsts + (step - begins) * BLOCK_N, 0), 0)
    return row, start, tl.sum(tl.where(this, lasts, 0), 0)


@triton.jit
def _copy_tokens(from_ptrs, to_ptrs, here, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Copies one head of tokens, given (tokens,) pointers."""
    dims = tl.arange(0, BLOCK_D)[None, :]
    here = here[:, None] & (dims < HEAD_DIM)
    tl.store(to_ptrs[:, None] + dims, tl.load(from_ptrs[:, None] + dims, mask=here), mask=here)


@triton.jit
def _attend(s, v_ptrs, dims, here, visible, member, state, PRECISION: tl.constexpr):
    """Runs a step of the online softmax with a block of keys and values; returns (acc, weight, peak).

    Args:
        s: (BLOCK_M, keys) scores; `visible`: which of them count.
        v_ptrs: (keys,) pointers to the values; `here`: which of (keys, dims) exist.
        member: (BLOCK_M,), which rows read this block; None: all.
    """
    acc, weight, peak = state
    s = tl.where(visible, s, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(s, 1))
    # A row that has seen no key yet has peak -inf, and -inf - -inf is NaN.
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    p = tl.exp2(s - base[:, None])
    fade = tl.exp2(peak - base)
    weight = weight * fade + tl.sum(p, 1)
    v = tl.load(v_ptrs[:, None] + dims[None, :], mask=here, other=0.0)
    sums = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
    if member is not None:
        # 0 * inf is NaN, so values of one source must not be multiplied into the rows of another.
        sums = tl.where(member[:, None], sums, acc)
    return sums, weight, new_peak


@triton.jit
def _visible(positions, aligned, seen, window_left, IS_CAUSAL: tl.constexpr):
    """Returns (BLOCK_M, keys): which keys at `positions`, among those with `seen`, each query sees."""
    visible = seen[None, :]
    if IS_CAUSAL:
        visible = visible & (positions[None, :] <= aligned[:, None])
    if window_left is not None:
        visible = visible & (positions[None, :] >= (aligned - window_left)[:, None])
    return visible


@triton.jit
def _store_lse(lse_ptr, out_rows, seqlen_q, num_heads, peak, weight, here):
    """Stores the natural log of the sum of a row's exponentials, which is weight * 2 ** peak, by rows of out."""
    lse = (peak + tl.log2(weight)) * 0.6931471805599453
    lse = tl.where(weight > 0, lse, tl.where(weight == 0, float("-inf"), weight))
    batch_heads = out_rows // (seqlen_q * num_heads) * num_heads + out_rows % num_heads
    tl.store(lse_ptr + batch_heads * seqlen_q + out_rows // num_heads % seqlen_q, lse, mask=here)


@triton.jit(do_not_specialize=_COUNTS)
def _decode_attention_kernel(
    q_ptr, k_cache_ptr, v_cache_ptr, k_ptr, v_ptr, out_ptr, partial_ptr, stats_ptr, seqlens_ptr, rows_ptr, table_ptr,
    lse_ptr, mask_ptr, sizes, window_left, scale, softcap, q_strides, k_cache_strides, v_cache_strides, k_strides,
    v_strides, integer_strides, mask_strides, rotary, IS_CAUSAL: tl.constexpr, ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, UNIT: tl.constexpr, TABLE_UNIT: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_NEW: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Runs one split of the walk of a tile and K/V head; writes rows of out or, with splits, input of `_merge_kernel`.

    sizes: (batch, seqlen_q, group, num_kv_heads, cache_batch, max_seqlen, num_tokens, seqlen_new, num_splits), where
    num_tokens is the number of slots; scale, softcap (or None): those of the scores, times log2(e); strides:
    (row, token, head) in UNITs; integer_strides: those of the lengths, of cache_batch_idx, and of the table's rows and
    columns. seqlens_ptr: None if all of the cache is filled. lse_ptr: (batch, num_heads, seqlen_q), or None; written
    only without splits. mask_ptr: bytes, not 0 = attend, or None, with all four strides; only without new tokens, and
    with ROWS 1. rotary: (cos, sin, number of positions, row strides in TABLE_UNITs), or None. ROWS: batch rows per
    tile; more than one only with cache_batch_idx and without rotary. HALF: half of the number of rotated features of a
    head; 0: no rotation. ALIGNED: every token's keys and values, cached or new, begin at a multiple of 16 bytes.
    partial_ptr, stats_ptr: see `_merge_kernel`; None without splits. BLOCK_NEW: the number of new tokens that are
    copied (with rotary, also attended to) at once; 0: there are none.
    """
    batch, seqlen_q, group, num_kv_heads, cache_batch, max_seqlen, num_tokens, seqlen_new, num_splits = sizes
    TABLE: tl.constexpr = table_ptr is not None
    pid = tl.program_id(0)
    kv_head = pid % num_kv_heads
    split = pid // num_kv_heads % num_splits
    tile = pid // num_kv_heads // num_splits
    room = max_seqlen - seqlen_new
    rows_of_one = seqlen_q * group

    # The query and head of each row of the tile, and the keys [first, last) of each cache row that the tile sees.
    m = tl.arange(0, BLOCK_M)
    if ROWS == 1:
        tiles_of_one = tl.maximum(tl.cdiv(rows_of_one, BLOCK_M), 1)
        batch_row = tile // tiles_of_one
        first_inside = tile % tiles_of_one * BLOCK_M
        inside = first_inside + m
        real = inside < rows_of_one
        batch_rows = batch_row + m * 0
        cache_row = batch_row
        has_row = batch_row >= 0
        if rows_ptr is not None:
            cache_row, has_row = _integers(rows_ptr, integer_strides[1], batch_row, True, 0, cache_batch)
        filled, has_room = room, room >= 0
        if seqlens_ptr is not None:
            filled, has_room = _integers(seqlens_ptr, integer_strides[0], cache_row, True, 0, room + 1)
        total = filled + seqlen_new
        totals = total + m * 0
        first = total * 0
        last = total
        if window_left is not None:
            first = tl.maximum(total - seqlen_q + first_inside // group - window_left, 0)
        if IS_CAUSAL:
            last_inside = tl.minimum(first_inside + BLOCK_M, rows_of_one) - 1
            last = tl.minimum(last, total - seqlen_q + last_inside // group + 1)
        last_new = last - filled
        if HALF > 0:
            last = tl.minimum(last, filled)
        num_blocks = tl.cdiv(tl.maximum(last - first, 0), BLOCK_N)
    else:
        batch_rows = tile * ROWS + m // rows_of_one
        inside = m % rows_of_one
        real = (m // rows_of_one < ROWS) & (batch_rows < batch)
        rows_read, has_row = _integers(rows_ptr, integer_strides[1], batch_rows, real, 0, cache_batch)
        totals, has_room = _integers(seqlens_ptr, integer_strides[0], rows_read, real, 0, room + 1)
        rows_read = tl.where(real, rows_read, -1)
        r = tl.arange(0, ROWS)
        exists = tile * ROWS + r < batch
        cache_rows, _ = _integers(rows_ptr, integer_strides[1], tile * ROWS + r, exists, 0, cache_batch)
        lasts, _ = _integers(seqlens_ptr, integer_strides[0], cache_rows, exists, 0, room + 1)
        firsts = lasts * 0
        if window_left is not None:
            firsts = tl.maximum(lasts - seqlen_q - window_left, 0)
        # An earlier row of the tile has the same cache row.
        before = (cache_rows[:, None] == cache_rows[None, :]) & (r[None, :] < r[:, None])
        repeats = tl.sum(before.to(tl.int32), 1)
        blocks = tl.where(repeats == 0, tl.cdiv(tl.maximum(lasts - firsts, 0), BLOCK_N), 0)
        ends = tl.cumsum(blocks, 0)
        begins = ends - blocks
        num_blocks = tl.sum(blocks, 0)
    query = inside // group
    head = kv_head * group + inside % group
    aligned = totals - seqlen_q + query  # the position of each query among the keys
    is_right = has_row
    if lse_ptr is None:  # lengths of `attention` may be larger than the keys are many, as in its own kernel
        is_right = is_right & has_room
    if HALF > 0:
        is_right = is_right & (total <= rotary[2])

    dims = tl.arange(0, BLOCK_D)
    if HALF > 0:
        q_ptrs = _query_ptrs(q_ptr, q_strides, batch_rows, query, head, UNIT)
        q = load_turned(q_ptrs, aligned, real, rotary, INTERLEAVED, TABLE_UNIT, HALF, HEAD_DIM, BLOCK_D)
        acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
        weight = tl.zeros((BLOCK_M,), dtype=tl.float32)
        peak = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)

    if BLOCK_NEW > 0:
        # Each new token of a head is written once: by the first split of the first tile or, if it is rotated, by the
        # program that attends to it.
        writes = first_inside == 0
        if HALF > 0:
            new_tokens = tl.where(split == num_splits - 1, tl.where(writes, seqlen_new, last_new), 0)
        else:
            new_tokens = tl.where((split == 0) & writes, seqlen_new, 0)
        # Pipelined loads would need the rotary tables twice, which for large heads exceeds an SM's shared memory.
        for start in tl.range(0, new_tokens, BLOCK_NEW, num_stages=1 if HALF > 0 else None):
            tokens = start + tl.arange(0, BLOCK_NEW)
            new = tokens < seqlen_new
            stored = new
            positions = filled + tokens
            slots = _slots(table_ptr, integer_strides, cache_row, positions, new, TABLE)
            if TABLE:
                in_store = (slots >= 0) & (slots < num_tokens)
                is_right = is_right & (tl.min((in_store | (tokens >= seqlen_new)).to(tl.int32), 0) > 0)
                stored = new & in_store
            new_k = _token_ptrs(k_ptr, k_strides, kv_head, batch_row, tokens, tokens, False, UNIT)
            new_v = _token_ptrs(v_ptr, v_strides, kv_head, batch_row, tokens, tokens, False, UNIT)
            k_to = _token_ptrs(k_cache_ptr, k_cache_strides, kv_head, cache_row, positions, slots, TABLE, UNIT)
            v_to = _token_ptrs(v_cache_ptr, v_cache_strides, kv_head, cache_row, positions, slots, TABLE, UNIT)
            if HALF > 0:
                # `writes`, as a block: with a scalar, the interpreter of Triton 3.9 makes an integer of the mask.
                stored = stored & (first_inside + tokens * 0 == 0)
                k = load_turned(new_k, positions, new, rotary, INTERLEAVED, TABLE_UNIT, HALF, HEAD_DIM, BLOCK_D)
                tl.store(k_to[:, None] + dims[None, :], k, mask=stored[:, None] & (dims < HEAD_DIM)[None, :])
                s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
                if softcap is not None:
                    s, slope = soft_capped(s, softcap, q.dtype == tl.float32)
                acc, weight, peak = _attend(
                    s, new_v, dims, new[:, None] & (dims < HEAD_DIM)[None, :],
                    _visible(positions, aligned, new, window_left, IS_CAUSAL), None, (acc, weight, peak), PRECISION,
                )  # fmt: skip
            else:
                _copy_tokens(new_k, k_to, stored, HEAD_DIM, BLOCK_D)
            _copy_tokens(new_v, v_to, stored, HEAD_DIM, BLOCK_D)

    # The initial weight of a row. A kernel can't raise an error, so an invalid length, row or slot gives NaN.
    nothing = tl.where(is_right, 0.0, float("nan")) + m * 0.0

    share = tl.cdiv(num_blocks, num_splits)
    begin = split * share
    end = tl.minimum(begin + share, num_blocks)
    out_rows = (batch_rows.to(tl.int64) * seqlen_q + query) * (num_kv_heads * group) + head
    if partial_ptr is not None:
        stats_ptrs = stats_ptr + (out_rows * num_splits + split) * 2
        is_idle = begin >= end
        if HALF > 0:
            is_idle = is_idle & (split < num_splits - 1)
        if is_idle:
            tl.store(stats_ptrs, float("-inf"), mask=real)
            tl.store(stats_ptrs + 1, nothing, mask=real)
            return

    if HALF > 0:
        weight += nothing
    else:
        q_ptrs = _query_ptrs(q_ptr, q_strides, batch_rows, query, head, UNIT)
        q = tl.load(q_ptrs[:, None] + dims[None, :], mask=real[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
        acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
        weight = nothing
        peak = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    if ROWS == 1:
        start = first + begin * BLOCK_N
    else:
        cache_row, start, last = _block_of_row(begin, begins, ends, cache_rows, firsts, lasts, BLOCK_N)
    positions = start + tl.arange(0, BLOCK_N)
    slots = _slots(table_ptr, integer_strides, cache_row, positions, positions < last, TABLE)
    for step in range(begin, end):
        seen = positions < last
        k_ptrs = _token_ptrs(k_cache_ptr, k_cache_strides, kv_head, cache_row, positions, slots, TABLE, UNIT)
        v_ptrs = _token_ptrs(v_cache_ptr, v_cache_strides, kv_head, cache_row, positions, slots, TABLE, UNIT)
        if BLOCK_NEW > 0 and HALF == 0:
            # New tokens may not be in the cache yet, so they are read from k and v.
            tokens = positions - filled
            new_k = _token_ptrs(k_ptr, k_strides, kv_head, batch_row, tokens, tokens, False, UNIT)
            new_v = _token_ptrs(v_ptr, v_strides, kv_head, batch_row, tokens, tokens, False, UNIT)
            k_ptrs = tl.where(tokens < 0, k_ptrs, new_k)
            v_ptrs = tl.where(tokens < 0, v_ptrs, new_v)
            if ALIGNED:  # Triton 3.8 and later don't infer it for a choice between pointers
                k_ptrs = tl.multiple_of(k_ptrs, 16)
                v_ptrs = tl.multiple_of(v_ptrs, 16)
        here = seen[:, None]
        if HEAD_DIM != BLOCK_D:
            here = here & (dims < HEAD_DIM)[None, :]
        k = tl.load(k_ptrs[:, None] + dims[None, :], mask=here, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if softcap is not None:
            s, slope = soft_capped(s, softcap, q.dtype == tl.float32)
        visible = _visible(positions, aligned, seen, window_left, IS_CAUSAL)
        member = None
        if ROWS > 1:
            member = rows_read == cache_row
            visible = visible & member[:, None]
        if mask_ptr is not None:
            mask_rows = batch_rows.to(tl.int64) * mask_strides[0] + head.to(tl.int64) * mask_strides[1]
            mask_rows += query.to(tl.int64) * mask_strides[2]
            mask_ptrs = mask_ptr + mask_rows[:, None] + positions.to(tl.int64)[None, :] * mask_strides[3]
            visible = visible & (tl.load(mask_ptrs, mask=real[:, None] & seen[None, :], other=0) != 0)
        acc, weight, peak = _attend(s, v_ptrs, dims, here, visible, member, (acc, weight, peak), PRECISION)
        # Load the slots of the next block a step ahead, because loads of keys that wait for slots are not pipelined.
        if ROWS == 1:
            start += BLOCK_N
        else:
            cache_row, start, last = _block_of_row(step + 1, begins, ends, cache_rows, firsts, lasts, BLOCK_N)
        positions = start + tl.arange(0, BLOCK_N)
        slots = _slots(table_ptr, integer_strides, cache_row, positions, positions < last, TABLE)

    # A row that saw no key has weight 0, and its out is 0.
    if partial_ptr is not None:
        tl.store(stats_ptrs, peak, mask=real)
        tl.store(stats_ptrs + 1, weight, mask=real)
        partial_ptrs = partial_ptr + (out_rows * num_splits + split)[:, None] * HEAD_DIM + dims[None, :]
        tl.store(partial_ptrs, acc, mask=(real & (weight != 0))[:, None] & (dims < HEAD_DIM)[None, :])
    else:
        if lse_ptr is not None:
            _store_lse(lse_ptr, out_rows, seqlen_q, num_kv_heads * group, peak, weight, real)
        acc = acc / tl.where(weight == 0, 1.0, weight)[:, None]
        out_ptrs = out_ptr + out_rows[:, None] * HEAD_DIM + dims[None, :]
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=real[:, None] & (dims < HEAD_DIM)[None, :])


@triton.jit(do_not_specialize=["num_splits", "seqlen_q", "num_heads"])
def _merge_kernel(
    partial_ptr, stats_ptr, out_ptr, lse_ptr, num_splits, seqlen_q, num_heads, HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Merges the results of `num_splits` programs into a row of out, weighted by their parts of the softmax.

    partial_ptr: (rows, num_splits, HEAD_DIM) weighted sums of values, written only if the weight is not 0; stats_ptr:
    (rows, num_splits, 2), the largest score and the sum of the weights. SPLITS: num_splits rounded up to a power of
    two. lse_ptr: see `_decode_attention_kernel`.
    """
    row = tl.program_id(0).to(tl.int64)
    stats_ptr += row * num_splits * 2
    all_splits = tl.arange(0, SPLITS)
    peaks = tl.load(stats_ptr + all_splits * 2, mask=all_splits < num_splits, other=float("-inf"))
    base = tl.max(peaks, 0)
    base = tl.where(base == float("-inf"), 0.0, base)
    dims = tl.arange(0, BLOCK_D)
    acc = tl.zeros((BLOCK_D,), dtype=tl.float32)
    total = tl.zeros((1,), dtype=tl.float32)
    for begin in range(0, num_splits, BLOCK_S):
        splits = begin + tl.arange(0, BLOCK_S)
        here = splits < num_splits
        fade = tl.exp2(tl.load(stats_ptr + splits * 2, mask=here, other=float("-inf")) - base)
        weight = tl.load(stats_ptr + splits * 2 + 1, mask=here, other=0.0)
        sums_ptrs = partial_ptr + (row * num_splits + splits)[:, None] * HEAD_DIM + dims[None, :]
        sums = tl.load(sums_ptrs, mask=(weight != 0)[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
        acc += tl.sum(sums * fade[:, None], 0)
        total += tl.sum(weight * fade, 0)
    if lse_ptr is not None:
        _store_lse(lse_ptr, row + tl.zeros((1,), dtype=tl.int64), seqlen_q, num_heads, base, total, None)
    acc = acc / tl.where(total == 0, 1.0, total)
    tl.store(out_ptr + row * HEAD_DIM + dims, acc.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)


def why_unsupported(
    op_name: str, *, q: Tensor, k_cache: Tensor, v_cache: Tensor, cos: Tensor | None, sin: Tensor | None, **_: object,
) -> str | None:  # fmt: skip
    """Returns why the kernel doesn't support a call of decode_attention, or None if it does."""
    if (reason := unsupported_dtype(*(x.dtype for x in (q, cos, sin) if x is not None))) is not None:
        return reason
    if q.shape[-1] > 256:
        return f"head_dim {q.shape[-1]} is greater than 256"
    if q.dtype == torch.float32 and q.shape[-1] > LARGEST_FP32_HEAD_DIM and q.device.type == "cuda":
        return f"head_dim {q.shape[-1]} in float32 is greater than {LARGEST_FP32_HEAD_DIM}"
    if k_cache.stride(-1) != 1 or v_cache.stride(-1) != 1:
        return "it reads caches that are contiguous in head_dim"
    return unsupported_products(q)


def plan_decode_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor | None, k: Tensor | None, v: Tensor | None,
    cache_batch_idx: Tensor | None, slot_table: Tensor | None, softmax_scale: float, is_causal: bool,
    window_left: int | None, cos: Tensor | None, sin: Tensor | None, interleaved: bool, softcap: float = 0.0, *,
    attn_mask: Tensor | None = None,
) -> Plan:  # fmt: skip
    """Plans `decode_attention` for calls of this geometry; with `attn_mask`, see `_few_queries`."""
    batch, seqlen_q, num_heads, head_dim = shape = q.shape
    num_kv_heads = k_cache.shape[2]
    if q.numel() == 0 and (k is None or k.numel() == 0):
        return lambda q, *_: q.new_empty(shape)
    seqlen_new = 0 if k is None else k.shape[1]
    cache_batch, max_seqlen = (k_cache if slot_table is None else slot_table).shape[:2]
    # Without new tokens, the caches are placeholders for them, which are not read.
    q, k, v = _in_rows(q, k_cache if k is None else k, v_cache if v is None else v)
    if window_left is not None:
        # A window that reaches from the last key to the first hides nothing.
        window_left = None if window_left >= max_seqlen - 1 else max(window_left, -FAR)

    config = config_of(q)
    rows_of_one = seqlen_q * num_heads // num_kv_heads
    turns = cos is not None and cos.shape[1] > 0
    rows = 1
    if cache_batch_idx is not None:
        num_programs = programs_at_once(q, config.largest_m)
        rows = rows_together(batch, max(rows_of_one, 1), num_kv_heads, config.largest_m, num_programs)
    block_m = max(SMALLEST_TILE, min(config.largest_m, next_power_of_2(rows * rows_of_one)))
    tiles = cdiv(batch, rows) if rows > 1 else batch * max(1, cdiv(rows_of_one, block_m))
    num_programs = programs_at_once(q, block_m)
    num_splits = splits_of(tiles * num_kv_heads, cdiv(max_seqlen, config.block_n), num_programs)
    half, table_unit = 0, 1
    table_numbers: tuple[int, ...] = ()
    if turns and cos is not None and sin is not None:
        cos, sin = _in_rows(cos, sin)
        half, table_unit = cos.shape[1], stride_unit(cos, sin)
        table_numbers = cos.shape[0], cos.stride(0) // table_unit, sin.stride(0) // table_unit
    unit = stride_unit(q, k_cache, v_cache, k, v)
    aligned = unit == 8 and all(x.data_ptr() % 16 == 0 for x in (k_cache, v_cache, k, v))
    block_d = max(16, next_power_of_2(head_dim))
    block_new = 0
    if seqlen_new:
        block_new = SMALLEST_TILE if half else min(SMALLEST_TILE, next_power_of_2(seqlen_new))
    numbers = (
        (
            batch, seqlen_q, num_heads // num_kv_heads, num_kv_heads, cache_batch, max_seqlen,
            k_cache.shape[0] * k_cache.shape[1], seqlen_new, num_splits,
        ),
        window_left, softmax_scale * 1.4426950408889634, softcap * 1.4426950408889634 if softcap else None,
        *(strides_of(x, unit) for x in (q, k_cache, v_cache, k, v)),
        (
            0 if cache_seqlens is None else cache_seqlens.stride(0),
            0 if cache_batch_idx is None else cache_batch_idx.stride(0),
            *((0, 0) if slot_table is None else slot_table.stride()),
        ),
        None if attn_mask is None else mask_strides(attn_mask),
    )  # fmt: skip
    walk = Launch(
        _decode_attention_kernel, (tiles * num_splits * num_kv_heads,),
        IS_CAUSAL=is_causal and seqlen_q > 1, ROWS=rows, HEAD_DIM=head_dim, HALF=half, INTERLEAVED=interleaved,
        UNIT=unit, TABLE_UNIT=table_unit, ALIGNED=aligned, BLOCK_M=block_m, BLOCK_N=config.block_n, BLOCK_D=block_d,
        BLOCK_NEW=block_new, PRECISION=dot_precision(q), num_warps=config.num_warps, num_stages=config.num_stages,
        maxnreg=most_registers(q, block_m, block_d, turns, bool(softcap)),
    )  # fmt: skip
    splits = next_power_of_2(num_splits)
    merge = Launch(
        _merge_kernel, (batch * seqlen_q * num_heads,),
        HEAD_DIM=head_dim, SPLITS=splits, BLOCK_S=min(16, splits), BLOCK_D=block_d, num_warps=4 if block_d > 64 else 2,
    )  # fmt: skip

    def run(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, k: Tensor | None, v: Tensor | None,
        cache_batch_idx: Tensor | None, slot_table: Tensor | None, _scale: float, _causal: bool, _left: int | None,
        cos: Any, sin: Any, *_: object, lse: Tensor | None = None, mask: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        out = q.new_empty(shape)
        q, k, v = _in_rows(q, k_cache if k is None else k, v_cache if v is None else v)
        partial = stats = None
        if num_splits > 1:
            partial = q.new_empty((*shape[:3], num_splits, head_dim), dtype=torch.float32)
            stats = q.new_empty((*shape[:3], num_splits, 2), dtype=torch.float32)
        rotary = (*_in_rows(cos, sin), *table_numbers) if half else None
        walk(
            q, k_cache, v_cache, k, v, out, partial, stats, cache_seqlens, cache_batch_idx, slot_table, lse, mask,
            *numbers, rotary,
        )  # fmt: skip
        if num_splits > 1:
            merge(partial, stats, out, lse, num_splits, *shape[1:3])
        return out

    return run


decode_attention = planned(plan_decode_attention)  # returns out, and appends k and v to the cache


def _in_rows(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Returns tensors whose last dimension is contiguous."""
    return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in tensors)


def strides_of(x: Tensor, unit: int) -> tuple[int, int, int]:
    """Returns (row, token, head) strides in `unit`s. For blocks of one token, that of a token is that of a block."""
    row, token, head = x.stride()[:3]
    return row // unit, (row if x.shape[1] == 1 else token) // unit, head // unit
