"""Attention of one or a few queries against a key-value cache, which their own keys and values enter in the same pass.

A decoding step reads every key and value once and computes little with them, so memory decides. A program owns a tile
of rows for one K/V head: all heads of the group and all queries of one row of the batch, and, where rows of the batch
read the cache through cache_batch_idx (the beams of one source), several rows that stand side by side. It walks over
the blocks of keys of the distinct cache rows among them and loads each block once, however many rows read
it. Rows that a block is not for take no part in it; tl.dot works on 16 rows at least, so they cost nothing.

The walk is divided among `num_splits` programs, evenly whatever the lengths are: they are read on the device, and the
grid depends on shapes alone, so a CUDA graph replays it with other lengths. A program without a share leaves at once.
What the programs of a tile found is merged by a second kernel, where there are several.

The program that begins a walk also writes the new keys and values into the cache. No program reads them there: their
blocks come from k and v, so that no program waits for another.

Where rotary tables are given, queries are turned as they are read, by their positions in the cache. The walk ends at
the new tokens then: the program with its last share, which is the shortest, turns the new keys, writes them and attends
to them in blocks of their own. So a step is two launches less, and the walk itself is as it is without new tokens.

Bytes: (keys + new) * head_dim * 2 a K/V head of each distinct row, q and out, 4 a key for a slot table; in splits
another 8 * head_dim a row of out and share; of the rotary tables 4 * rotary_dim a new token. FLOPs: 4 * keys * head_dim
a query and head, 16 / rows of the tile times as many in the tensor cores. fp32: scores, softmax statistics (in units of
log2), the accumulator, partial results, rotations. P is rounded to V's dtype for the second product. fp32 inputs are
multiplied as three TF32 products each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastformer.kernels._attention_common import FAR
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
    cdiv,
    dot_precision,
    launch,
    next_power_of_2,
    stride_unit,
    unsupported_dtype,
    unsupported_products,
)
from fastformer.kernels._softcap import soft_capped
from fastformer.kernels.rotary import load_turned

# The rows of each product's result.
PRODUCTS = {"_decode_attention_kernel": lambda a: [a["BLOCK_M"]] * (4 if a["HALF"] else 2)}
# Arguments whose values must not make another binary: Triton compiles apart for 1 and for multiples of 16.
_COUNTS = [
    "sizes", "window_left", "q_strides", "k_cache_strides", "v_cache_strides", "k_strides", "v_strides",
    "integer_strides", "rotary",
]  # fmt: skip


@triton.jit
def _integers(ptr, stride, rows, here, least, end):
    """(those of `rows`, whether they are in [least, end)); values outside are cut, so that no other memory is read."""
    found = tl.load(ptr + rows.to(tl.int64) * stride, mask=here, other=least)
    return tl.maximum(tl.minimum(found, end - 1), least), (found >= least) & (found < end)


@triton.jit
def _token_ptrs(ptr, strides, head, row, positions, slots, TABLE: tl.constexpr, UNIT: tl.constexpr):
    """Where tokens of a cache begin, of one head: by their slots or, without a table, by their row and positions."""
    ptr += head.to(tl.int64) * strides[2] * UNIT
    if TABLE:
        return ptr + slots.to(tl.int64) * strides[1] * UNIT
    return ptr + (row.to(tl.int64) * strides[0] + positions.to(tl.int64) * strides[1]) * UNIT


@triton.jit
def _query_ptrs(ptr, strides, rows, queries, heads, UNIT: tl.constexpr):
    """Where heads of queries begin."""
    offsets = rows.to(tl.int64) * strides[0] + queries.to(tl.int64) * strides[1]
    return ptr + (offsets + heads.to(tl.int64) * strides[2]) * UNIT


@triton.jit
def _slots(table_ptr, strides, row, positions, here, TABLE: tl.constexpr):
    """Which tokens of a store the positions of a row are; the positions themselves without a table."""
    if TABLE:
        entries = row.to(tl.int64) * strides[2] + positions.to(tl.int64) * strides[3]
        return tl.load(table_ptr + entries, mask=here, other=0)
    else:
        return positions


@triton.jit
def _block_of_row(step, begins, ends, rows, firsts, lasts, BLOCK_N: tl.constexpr):
    """The step-th block of a walk over several rows: (row, first position, the row's end)."""
    this = (begins <= step) & (step < ends)
    row = tl.sum(tl.where(this, rows, 0), 0)
    start = tl.sum(tl.where(this, firsts + (step - begins) * BLOCK_N, 0), 0)
    return row, start, tl.sum(tl.where(this, lasts, 0), 0)


@triton.jit
def _copy_tokens(from_ptrs, to_ptrs, here, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Copies one head of tokens that begin at (tokens,) pointers."""
    dims = tl.arange(0, BLOCK_D)[None, :]
    here = here[:, None] & (dims < HEAD_DIM)
    tl.store(to_ptrs[:, None] + dims, tl.load(from_ptrs[:, None] + dims, mask=here), mask=here)


@triton.jit
def _attend(s, v_ptrs, dims, here, visible, member, state, PRECISION: tl.constexpr):
    """One step of the online softmax: (acc, weight, peak) with a block of keys and values.

    Args:
        s: (BLOCK_M, keys) scores; `visible`: which of them count.
        v_ptrs: (keys,) where the values begin; `here`: which of (keys, dims) are there.
        member: (BLOCK_M,) the rows that the block is for; None: all.
    """
    acc, weight, peak = state
    s = tl.where(visible, s, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(s, 1))
    # A row that has seen nothing yet has peak -inf, and -inf - -inf is NaN.
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    p = tl.exp2(s - base[:, None])
    fade = tl.exp2(peak - base)
    weight = weight * fade + tl.sum(p, 1)
    v = tl.load(v_ptrs[:, None] + dims[None, :], mask=here, other=0.0)
    sums = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
    if member is not None:
        # 0 * inf is NaN: values of one source must not reach the rows of another.
        sums = tl.where(member[:, None], sums, acc)
    return sums, weight, new_peak


@triton.jit
def _visible(positions, aligned, seen, window_left, IS_CAUSAL: tl.constexpr):
    """(BLOCK_M, keys): which of the keys at `positions`, where `seen`, each query sees."""
    visible = seen[None, :]
    if IS_CAUSAL:
        visible = visible & (positions[None, :] <= aligned[:, None])
    if window_left is not None:
        visible = visible & (positions[None, :] >= (aligned - window_left)[:, None])
    return visible


@triton.jit(do_not_specialize=_COUNTS)
def _decode_attention_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    partial_ptr,
    stats_ptr,
    seqlens_ptr,
    rows_ptr,
    table_ptr,
    sizes,
    window_left,
    scale,
    softcap,
    q_strides,
    k_cache_strides,
    v_cache_strides,
    k_strides,
    v_strides,
    integer_strides,
    rotary,
    IS_CAUSAL: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    UNIT: tl.constexpr,
    TABLE_UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_NEW: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A share of the walk of one tile and K/V head: its rows of out or, in splits, what `_merge_kernel` makes them of.

    sizes: (batch, seqlen_q, group, num_kv_heads, cache_batch, max_seqlen, num_tokens, seqlen_new, num_splits), where
    num_tokens are those of the store behind a table; scale, softcap (or None): of the scores, times log2(e); strides:
    (row, token, head) in UNITs; integer_strides: of the lengths, of cache_batch_idx, of the table's rows and columns.
    rotary: (cos, sin, their positions, strides of their rows in TABLE_UNITs), or None. ROWS: rows of the batch in a
    tile; more than one only through cache_batch_idx, and then there is no rotary. HALF: half of what is turned of a
    head, 0 = nothing.
    partial_ptr, stats_ptr: see `_merge_kernel`; None without splits. BLOCK_NEW: new tokens that are copied at once, and
    with rotary attended to, 0 = none.
    """
    batch, seqlen_q, group, num_kv_heads, cache_batch, max_seqlen, num_tokens, seqlen_new, num_splits = sizes
    TABLE: tl.constexpr = table_ptr is not None
    pid = tl.program_id(0)
    kv_head = pid % num_kv_heads
    split = pid // num_kv_heads % num_splits
    tile = pid // num_kv_heads // num_splits
    room = max_seqlen - seqlen_new
    rows_of_one = seqlen_q * group

    # Which query and head each row of the tile is, and which keys the tile sees: [first, last) of each cache row.
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
        wanted, has_row = _integers(rows_ptr, integer_strides[1], batch_rows, real, 0, cache_batch)
        totals, has_room = _integers(seqlens_ptr, integer_strides[0], wanted, real, 0, room + 1)
        wanted = tl.where(real, wanted, -1)
        r = tl.arange(0, ROWS)
        exists = tile * ROWS + r < batch
        cache_rows, _ = _integers(rows_ptr, integer_strides[1], tile * ROWS + r, exists, 0, cache_batch)
        lasts, _ = _integers(seqlens_ptr, integer_strides[0], cache_rows, exists, 0, room + 1)
        firsts = lasts * 0
        if window_left is not None:
            firsts = tl.maximum(lasts - seqlen_q - window_left, 0)
        # A row that stands before has what this one needs.
        before = (cache_rows[:, None] == cache_rows[None, :]) & (r[None, :] < r[:, None])
        repeats = tl.sum(before.to(tl.int32), 1)
        blocks = tl.where(repeats == 0, tl.cdiv(tl.maximum(lasts - firsts, 0), BLOCK_N), 0)
        ends = tl.cumsum(blocks, 0)
        begins = ends - blocks
        num_blocks = tl.sum(blocks, 0)
    query = inside // group
    head = kv_head * group + inside % group
    aligned = totals - seqlen_q + query  # the position of the key that stands beside each query
    is_right = has_row & has_room
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
        # Each new token of a head is written once: by the first tile's program with the first share or, turned, where
        # it is attended to.
        writes = first_inside == 0
        if HALF > 0:
            new_tokens = tl.where(split == num_splits - 1, tl.where(writes, seqlen_new, last_new), 0)
        else:
            new_tokens = tl.where((split == 0) & writes, seqlen_new, 0)
        # Loads ahead would take the turned tokens' tables twice, with large heads more than an SM's shared memory.
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
                stored = stored & writes
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

    # The weight of a row that has seen no key. A kernel can't raise an error: a bad length, row or slot gives NaN.
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
            # The new ones are on their way into the cache: they are read where they come from.
            tokens = positions - filled
            new_k = _token_ptrs(k_ptr, k_strides, kv_head, batch_row, tokens, tokens, False, UNIT)
            new_v = _token_ptrs(v_ptr, v_strides, kv_head, batch_row, tokens, tokens, False, UNIT)
            k_ptrs = tl.where(tokens < 0, k_ptrs, new_k)
            v_ptrs = tl.where(tokens < 0, v_ptrs, new_v)
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
            member = wanted == cache_row
            visible = visible & member[:, None]
        acc, weight, peak = _attend(s, v_ptrs, dims, here, visible, member, (acc, weight, peak), PRECISION)
        # The slots of the next block, a step ahead: loads of keys that would wait for them are not pipelined.
        if ROWS == 1:
            start += BLOCK_N
        else:
            cache_row, start, last = _block_of_row(step + 1, begins, ends, cache_rows, firsts, lasts, BLOCK_N)
        positions = start + tl.arange(0, BLOCK_N)
        slots = _slots(table_ptr, integer_strides, cache_row, positions, positions < last, TABLE)

    # A row that saw nothing has weight 0, and out is 0.
    if partial_ptr is not None:
        tl.store(stats_ptrs, peak, mask=real)
        tl.store(stats_ptrs + 1, weight, mask=real)
        partial_ptrs = partial_ptr + (out_rows * num_splits + split)[:, None] * HEAD_DIM + dims[None, :]
        tl.store(partial_ptrs, acc, mask=(real & (weight != 0))[:, None] & (dims < HEAD_DIM)[None, :])
    else:
        acc = acc / tl.where(weight == 0, 1.0, weight)[:, None]
        out_ptrs = out_ptr + out_rows[:, None] * HEAD_DIM + dims[None, :]
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=real[:, None] & (dims < HEAD_DIM)[None, :])


@triton.jit(do_not_specialize=["num_splits"])
def _merge_kernel(
    partial_ptr,
    stats_ptr,
    out_ptr,
    num_splits,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One row of out, from what `num_splits` programs found, weighted by how much of the softmax each saw.

    partial_ptr: (rows, num_splits, HEAD_DIM) sums of weighted values, written where a weight is not 0; stats_ptr:
    (rows, num_splits, 2) largest score and sum of the weights. SPLITS: num_splits as a power of two.
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
    acc = acc / tl.where(total == 0, 1.0, total)
    tl.store(out_ptr + row * HEAD_DIM + dims, acc.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)


def why_unsupported(
    op_name: str,
    *,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    **_: object,
) -> str | None:
    """Why the kernel can't take a call of decode_attention; None if it can."""
    if (reason := unsupported_dtype(*(x.dtype for x in (q, cos, sin) if x is not None))) is not None:
        return reason
    if q.shape[-1] > 256:
        return f"head_dim {q.shape[-1]} is greater than 256"
    if q.dtype == torch.float32 and q.shape[-1] > LARGEST_FP32_HEAD_DIM and q.device.type == "cuda":
        return f"head_dim {q.shape[-1]} in float32 is greater than {LARGEST_FP32_HEAD_DIM}"
    if k_cache.stride(-1) != 1 or v_cache.stride(-1) != 1:
        return "it reads caches that are contiguous in head_dim"
    return unsupported_products(q)


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cache_batch_idx: Tensor | None,
    slot_table: Tensor | None,
    softmax_scale: float,
    is_causal: bool,
    window_left: int | None,
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
    softcap: float = 0.0,
) -> Tensor:
    """`fastformer::decode_attention`: out; k and v are in the cache then."""
    out = q.new_empty(q.shape)
    batch, seqlen_q, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[2]
    if out.numel() == 0 and (k is None or k.numel() == 0):
        return out
    seqlen_new = 0 if k is None else k.shape[1]
    cache_batch, max_seqlen = (k_cache if slot_table is None else slot_table).shape[:2]
    # Without new tokens the caches stand in their place; nothing is read from there.
    q, k, v = (
        x if x.stride(-1) == 1 else x.contiguous()
        for x in (q, k_cache if k is None else k, v_cache if v is None else v)
    )
    if window_left is not None:
        # A window that reaches the first key from the last hides nothing.
        window_left = None if window_left >= max_seqlen - 1 else max(window_left, -FAR)

    config = config_of(q)
    rows_of_one = seqlen_q * num_heads // num_kv_heads
    turns = cos is not None and cos.shape[1] > 0
    rows = 1
    if cache_batch_idx is not None:
        wanted = programs_at_once(q, config.largest_m)
        rows = rows_together(batch, max(rows_of_one, 1), num_kv_heads, config.largest_m, wanted)
    block_m = max(SMALLEST_TILE, min(config.largest_m, next_power_of_2(rows * rows_of_one)))
    tiles = cdiv(batch, rows) if rows > 1 else batch * max(1, cdiv(rows_of_one, block_m))
    wanted = programs_at_once(q, block_m)
    num_splits = splits_of(tiles * num_kv_heads, cdiv(max_seqlen, config.block_n), wanted)
    partial = stats = None
    if num_splits > 1:
        partial = out.new_empty((batch, seqlen_q, num_heads, num_splits, head_dim), dtype=torch.float32)
        stats = out.new_empty((batch, seqlen_q, num_heads, num_splits, 2), dtype=torch.float32)
    rotary, half, table_unit = None, 0, 1
    if turns and cos is not None and sin is not None:
        cos, sin = (t if t.stride(1) == 1 else t.contiguous() for t in (cos, sin))
        half, table_unit = cos.shape[1], stride_unit(cos, sin)
        rotary = cos, sin, cos.shape[0], cos.stride(0) // table_unit, sin.stride(0) // table_unit
    unit = stride_unit(q, k_cache, v_cache, k, v)
    block_d = max(16, next_power_of_2(head_dim))
    block_new = 0
    if seqlen_new:
        block_new = SMALLEST_TILE if half else min(SMALLEST_TILE, next_power_of_2(seqlen_new))
    launch(
        _decode_attention_kernel, (tiles * num_splits * num_kv_heads,),
        q, k_cache, v_cache, k, v, out, partial, stats, cache_seqlens, cache_batch_idx, slot_table,
        (
            batch, seqlen_q, num_heads // num_kv_heads, num_kv_heads, cache_batch, max_seqlen,
            k_cache.shape[0] * k_cache.shape[1], seqlen_new, num_splits,
        ),
        window_left, softmax_scale * 1.4426950408889634, softcap * 1.4426950408889634 if softcap else None,
        *(strides_of(x, unit) for x in (q, k_cache, v_cache, k, v)),
        (
            cache_seqlens.stride(0),
            0 if cache_batch_idx is None else cache_batch_idx.stride(0),
            *((0, 0) if slot_table is None else slot_table.stride()),
        ),
        rotary,
        IS_CAUSAL=is_causal and seqlen_q > 1, ROWS=rows, HEAD_DIM=head_dim, HALF=half, INTERLEAVED=interleaved,
        UNIT=unit, TABLE_UNIT=table_unit, BLOCK_M=block_m, BLOCK_N=config.block_n, BLOCK_D=block_d, BLOCK_NEW=block_new,
        PRECISION=dot_precision(q), num_warps=config.num_warps, num_stages=config.num_stages,
        maxnreg=most_registers(q, block_m, block_d, turns, bool(softcap)),
    )  # fmt: skip
    if num_splits > 1:
        splits = next_power_of_2(num_splits)
        launch(
            _merge_kernel, (batch * seqlen_q * num_heads,),
            partial, stats, out, num_splits, HEAD_DIM=head_dim, SPLITS=splits, BLOCK_S=min(16, splits), BLOCK_D=block_d,
            num_warps=4 if block_d > 64 else 2,
        )  # fmt: skip
    return out


def strides_of(x: Tensor, unit: int) -> tuple[int, int, int]:
    """(row, token, head) strides in `unit`s. Blocks of one token lie as far apart as their tokens."""
    row, token, head = x.stride()[:3]
    return row // unit, (row if x.shape[1] == 1 else token) // unit, head // unit
