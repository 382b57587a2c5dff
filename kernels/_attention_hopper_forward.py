"""Attention, forward, for sm_90 in Gluon: warps have different roles, so that products and softmax overlap.

The math, the arguments and the results are those of `attention.py`, which remains the reference and computes the calls
that this kernel doesn't support. Here a program processes tiles of 128 rows of a head (a persistent grid; under causal
masks, the heaviest tiles come first) and gives its warps roles:

- A producer warp copies Q, K and V to shared memory by TMA. K and V go through rings of STAGES buffers, each with two
  barriers: `full` (the copy has arrived) and `empty` (all consumers have read it).
- Two consumers, a warpgroup each, own 64 rows each.

A consumer issues Q K^T of block j, then P V of block j - 1, waits for only the first, and computes the softmax of block
j while the second runs. ptxas moves that softmax after the wait for the second, so that it overlaps with the products
of the other consumer.

Blocks run from the last to the first, so that those at the diagonal and at the tail, the only masked ones, come first.
TMA descriptors are "ragged": the hardware returns zeros beyond the length of each sequence, dense or packed.

fp32: scores, softmax statistics, the accumulator, lse. P is rounded to V's dtype for the second product.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fastformer.kernels import _attention_common, _dropout

# The same functions, compiled as Gluon.
_key_range = gluon.jit(_attention_common.key_range.fn)
_load_dropout = gluon.jit(_dropout.load_dropout.fn)
_philox = gluon.jit(_dropout._philox.fn)
# Triton 3.8 renamed this function, and 3.9 removed the old name.
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared

# For the compile report. Each consumer has a copy of both products in each of the two or three copies of the loop, and
# of the first Q K^T and the last P V.
PRODUCTS = {
    "_attention_hopper_fwd_kernel": lambda a: [64] * 2 * (6 if a["window"][0] is None else 8),
}
# The 128 threads of a consumer share 64 rows of the scores of a block.
SCORES = {"_attention_hopper_fwd_kernel": lambda arguments: arguments["k_desc"].block_shape[3] / 2}

# The number of consumers, and the rows of each.
CONSUMERS = gl.constexpr(2)
CONSUMER_ROWS = gl.constexpr(64)
# The middle row of a ragged descriptor; see `ragged_descriptor`.
RAGGED_ROWS = gl.constexpr(2**30)


@gluon.jit
def _which_tile(tile, planes, lengths, TILE: gl.constexpr, LENGTHS: gl.constexpr, LAST_FIRST: gl.constexpr):
    """Returns the position of a tile of TILE rows.

    It is (first_row, plane, (batch, head, kv_head), (start_q, start_k), bounds), as in `locate`.
    """
    num_heads, group, num_planes, num_blocks, together = planes
    seqlens_q_ptr, seqlens_k_ptr, seqlen_q, seqlen_k = lengths
    first_plane = tile // (together * num_blocks) * together
    in_group = gl.minimum(num_planes - first_plane, together)
    inside = tile - first_plane * num_blocks
    block = inside // in_group
    plane = first_plane + inside % in_group
    if LAST_FIRST:
        block = num_blocks - 1 - block
    batch = plane // num_heads
    head = plane % num_heads
    if LENGTHS == "packed":
        start_q = gl.load(seqlens_q_ptr + batch)
        start_k = gl.load(seqlens_k_ptr + batch)
        len_q = gl.load(seqlens_q_ptr + batch + 1) - start_q
        len_k = gl.load(seqlens_k_ptr + batch + 1) - start_k
        diagonal = len_k - len_q
    else:
        start_q = batch * 0
        start_k = start_q
        len_q = start_q + seqlen_q
        len_k = start_q + seqlen_k
        diagonal = len_k - len_q
        if LENGTHS == "seqlens_k":
            len_k = gl.minimum(gl.load(seqlens_k_ptr + batch).to(gl.int32), len_k)
    return block * TILE, plane, (batch, head, head // group), (start_q, start_k), (len_q, len_k, diagonal)


@gluon.jit
def _blocks_of(first_row, bounds, window, TILE: gl.constexpr, BLOCK_N: gl.constexpr):
    """Returns the key blocks of a tile, from the last to the first: (last_start, masked, masked_or_full, blocks).

    The first of `blocks` blocks starts at last_start, and each further one BLOCK_N keys earlier. The first `masked`
    blocks cross the diagonal or the length, and those from `masked_or_full` on the left window. There is at least one
    block.
    """
    first, full_first, full_last, last = _key_range(first_row, bounds, window, TILE, BLOCK_N)
    masked = (last - full_last + BLOCK_N - 1) // BLOCK_N
    full = (full_last - full_first) // BLOCK_N
    blocks = gl.maximum(masked + full + (full_first - first) // BLOCK_N, 1)
    return first + (blocks - 1) * BLOCK_N, masked, masked + full, blocks


@gluon.jit
def _copy_rows(descriptor, batch_rows, start, row, length, head, barrier, buffer):
    """Starts to copy rows [row, row + block) of the sequence at `start`, with zeros beyond its `length`."""
    start = batch_rows + start
    coordinates = [RAGGED_ROWS, start + length, head, RAGGED_ROWS - length + row, 0]
    async_load(descriptor, coordinates, barrier, buffer)


@gluon.jit
def _produce(
    q_desc, k_desc, v_desc, buffers, barriers, planes, lengths, window, batch_rows, num_tiles, LENGTHS: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Runs the producer: copies the consumers' inputs in the order in which they read them."""
    q_buffers, k_buffers, v_buffers = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    TILE: gl.constexpr = CONSUMERS * CONSUMER_ROWS
    count = 0  # of key blocks so far
    tiles = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        first_row, plane, where, starts, bounds = _which_tile(
            tile, planes, lengths, TILE, LENGTHS, window[1] is not None
        )
        batch, head, kv_head = where
        start_q, start_k = starts
        len_q, len_k, diagonal = bounds
        if first_row < len_q:
            start, masked, masked_or_full, blocks = _blocks_of(first_row, bounds, window, TILE, BLOCK_N)
            q_rows, k_rows, v_rows = batch_rows
            for consumer in gl.static_range(CONSUMERS):
                mbarrier.wait(q_empty.index(consumer), (tiles & 1) ^ 1)
                mbarrier.expect(q_full.index(consumer), q_desc.block_type.nbytes)
                _copy_rows(
                    q_desc, q_rows * batch, start_q, first_row + consumer * CONSUMER_ROWS, len_q, head,
                    q_full.index(consumer), q_buffers.index(consumer),
                )  # fmt: skip
            for step in range(0, blocks + 1):
                # K of block `step`, then V of the previous block, in the order in which the consumers need them.
                if step < blocks:
                    stage = count & (STAGES - 1)
                    mbarrier.wait(k_empty.index(stage), ((count // STAGES) & 1) ^ 1)
                    mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
                    _copy_rows(
                        k_desc, k_rows * batch, start_k, start - step * BLOCK_N, len_k, kv_head,
                        k_full.index(stage), k_buffers.index(stage),
                    )  # fmt: skip
                if step > 0:
                    stage = (count - 1) & (STAGES - 1)
                    mbarrier.wait(v_empty.index(stage), (((count - 1) // STAGES) & 1) ^ 1)
                    mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
                    _copy_rows(
                        v_desc, v_rows * batch, start_k, start - (step - 1) * BLOCK_N, len_k, kv_head,
                        v_full.index(stage), v_buffers.index(stage),
                    )  # fmt: skip
                count += 1
            count -= 1
            tiles += 1


@gluon.jit
def _keep_words(first_row, first_column, plane, drawn, BLOCK_N: gl.constexpr):
    """Returns dropout's keep mask of 64 rows x BLOCK_N columns from first_column (a multiple of 64) on.

    The result is int32 (64, BLOCK_N / 2). A word is for two adjacent columns, as in `_pack`: 16 bits each, all set if
    the column is kept. The decisions are those of `_dropout.keep_mask_tile`. A Philox call covers the 16 of 64 columns
    of a row that one thread holds of a wgmma result, so each thread makes the calls for its own elements, and threads
    exchange nothing.
    """
    key0, key1, offset, threshold, keep_scale = drawn
    GROUPS: gl.constexpr = BLOCK_N // 64
    # The registers of a thread hold rows r and r + 8 of each group; the lowest bits of the lane select the call.
    DRAWN: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0], [0, 4]] if GROUPS == 2 else [[8, 0]],
        [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 4 * GROUPS],
    )  # fmt: skip
    calls = first_column // 64 * 4 + gl.arange(0, 4 * GROUPS, layout=gl.SliceLayout(0, DRAWN))
    rows = first_row + gl.arange(0, CONSUMER_ROWS, layout=gl.SliceLayout(1, DRAWN))
    w0, w1, w2, w3 = _philox(
        calls[None, :].to(gl.uint32), rows[:, None].to(gl.uint32), plane.to(gl.uint32), offset, key0, key1
    )
    words = gl.join(gl.join(w0, w2), gl.join(w1, w3))  # (row, call, 2, 2), in the order of the words
    # Two bytes at a time, each in 16 bits: bit 15 of byte + 0x8000 - threshold is set if byte >= threshold.
    bias = (0x8000 - threshold) * 0x10001
    even = (words & 0x00FF00FF) + bias
    odd = ((words >> 8) & 0x00FF00FF) + bias
    # Copies that bit to all 16 bits of the column: prmt with 8 added to a selector digit repeats the sign of a byte.
    keep = gl.join(
        gl.inline_asm_elementwise("prmt.b32 $0, $1, $2, 0xDD99;", "=r,r,r", [even, odd], gl.int32, True, 1),
        gl.inline_asm_elementwise("prmt.b32 $0, $1, $2, 0xFFBB;", "=r,r,r", [even, odd], gl.int32, True, 1),
    )
    # (row, group, call, pair) -> (row, 32 * group + 4 * pair + call): two columns each
    keep = keep.reshape([CONSUMER_ROWS, GROUPS, 4, 8]).permute((0, 1, 3, 2))
    return keep.reshape([CONSUMER_ROWS, BLOCK_N // 2])


@gluon.jit
def _no_sums():
    """Returns zeros (64, 8): eight partial sums of each row, where column c is for all columns c + 8 * i of a block."""
    LAYOUT: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [8, 0]], [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 8]
    )
    return gl.zeros([CONSUMER_ROWS, 8], gl.float32, LAYOUT)


@gluon.jit
def _weights(s, start, rows, peak, total, bounds, window, factor, S_LAYOUT: gl.constexpr, CHECK: gl.constexpr):
    """Runs a step of the online softmax; returns (p, fade, peak, total).

    peak: in the units of the scores. factor: scale * log2(e).
    total: eight partial sums of each row, as `_no_sums` lays them out. So a thread only adds what it holds itself, and
    the threads of a row exchange their sums once, after all blocks, instead of once per block.
    """
    len_q, len_k, diagonal = bounds
    if CHECK:
        # Columns and their limits are relative to `start`. Two bits of a column depend on the lane. With these bits
        # moved to the limits, a thread compares with constants and needs no register for each column.
        columns = gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, S_LAYOUT))[None, :]
        of_lane = columns & 6
        columns = columns & ~6
        end = rows * 0 + len_k
        if window[1] is not None:
            end = gl.minimum(rows + (diagonal + window[1] + 1), end)
        visible = columns < (end - start)[:, None] - of_lane
        if window[0] is not None:
            visible = visible & (columns >= (rows + (diagonal - window[0] - start))[:, None] - of_lane)
        s = gl.where(visible, s, float("-inf"))
    new_peak = gl.maximum(peak, gl.max(s, 1))
    base = new_peak
    if CHECK:
        # A row that has seen no key yet has peak -inf, and -inf - -inf is NaN.
        base = gl.where(new_peak == float("-inf"), 0.0, new_peak)
    p = gl.exp2(s * factor - (base * factor)[:, None])
    fade = gl.exp2((peak - base) * factor)
    SUMS: gl.constexpr = total.type.layout
    sums = gl.sum(p.reshape([p.shape[0], p.shape[1] // 8, 8]), 1)
    total *= gl.convert_layout(fade, gl.SliceLayout(1, SUMS), assert_trivial=True)[:, None]
    return p, fade, new_peak, total + gl.convert_layout(sums, SUMS, assert_trivial=True)


@gluon.jit
def _pack(weights, DTYPE: gl.constexpr):
    """Returns weights rounded to DTYPE, with two adjacent columns in a 32-bit word: int32 (rows, columns / 2).

    Otherwise the loop would carry 16-bit values one by one, and pack them again for the product.
    """
    even, odd = gl.split(weights.reshape([weights.shape[0], weights.shape[1] // 2, 2]))
    ROUND: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if gl.bfloat16 == DTYPE else "cvt.rn.f16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(ROUND, "=r,r,r", [even, odd], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _unpack(words, DTYPE: gl.constexpr, P_LAYOUT: gl.constexpr):
    """Returns the result of `_pack` as the operand of a product."""
    even = words.to(gl.int16).to(DTYPE, bitcast=True)
    odd = (words >> 16).to(gl.int16).to(DTYPE, bitcast=True)
    p = gl.join(even, odd).reshape([words.shape[0], words.shape[1] * 2])
    return gl.convert_layout(p, P_LAYOUT)


@gluon.jit
def _issue_scores(q, buffers, barriers, at, S_LAYOUT: gl.constexpr, STAGES: gl.constexpr):
    """Waits for the K of the at-th block since the start, and issues Q K^T."""
    k_buffers, k_full = buffers[1], barriers[2]
    BLOCK_N: gl.constexpr = k_buffers.shape[4]
    stage = at & (STAGES - 1)
    mbarrier.wait(k_full.index(stage), (at // STAGES) & 1)
    k = k_buffers.index(stage).reshape([BLOCK_N, k_buffers.shape[5]])
    s = gl.zeros([CONSUMER_ROWS, BLOCK_N], gl.float32, S_LAYOUT)
    return warpgroup_mma(q, k.permute((1, 0)), s, use_acc=False, is_async=True)


@gluon.jit
def _issue_sum(p, acc, buffers, barriers, at, STAGES: gl.constexpr):
    """Waits for the V of the at-th block since the start, and issues acc + P V."""
    v_buffers, v_full = buffers[2], barriers[4]
    stage = at & (STAGES - 1)
    mbarrier.wait(v_full.index(stage), (at // STAGES) & 1)
    v = v_buffers.index(stage).reshape([v_buffers.shape[4], v_buffers.shape[5]])
    return warpgroup_mma(p, v, acc, is_async=True)


@gluon.jit
def _steps(
    first_step, last_step, q, buffers, barriers, count, start, rows, state, bounds, window, factor, first_row, plane,
    drawn, S_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr, STAGES: gl.constexpr, CHECK: gl.constexpr,
    DROPOUT: gl.constexpr,
):  # fmt: skip
    """Runs steps [first_step, last_step) of a consumer: each issues Q K^T of its block and P V of the previous one."""
    k_buffers, k_empty, v_empty = buffers[1], barriers[3], barriers[5]
    words, acc, peak, total = state
    for step in range(first_step, last_step):
        at = count + step
        p = _unpack(words, k_buffers.dtype, P_LAYOUT)
        s = _issue_scores(q, buffers, barriers, at, S_LAYOUT, STAGES)
        acc = _issue_sum(p, acc, buffers, barriers, at - 1, STAGES)
        first_column = start - step * k_buffers.shape[4]
        if DROPOUT:
            keep = _keep_words(first_row, first_column, plane, drawn, k_buffers.shape[4])
        s = warpgroup_mma_wait(1, deps=[s])
        mbarrier.arrive(k_empty.index(at & (STAGES - 1)), count=1)
        weights, fade, peak, total = _weights(
            s, first_column, rows, peak, total, bounds, window, factor, S_LAYOUT, CHECK
        )
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_empty.index((at - 1) & (STAGES - 1)), count=1)
        acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, acc.type.layout))[:, None]
        words = _pack(weights, k_buffers.dtype)
        if DROPOUT:
            words = words & gl.convert_layout(keep, words.type.layout, assert_trivial=True)
    return words, acc, peak, total


@gluon.jit
def _attend(
    q, buffers, barriers, count, tile_blocks, rows, state, bounds, window, factor, first_row, plane, drawn,
    S_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr, STAGES: gl.constexpr, DROPOUT: gl.constexpr,
):  # fmt: skip
    """Runs all blocks of a tile up to P V of the last one, which the caller issues; returns (words, acc, peak, total).

    words: P of the last block, packed. count: the number of blocks before this tile. tile_blocks: see `_blocks_of`.
    """
    k_buffers, k_empty = buffers[1], barriers[3]
    acc, peak, total = state
    start, masked, masked_or_full, blocks = tile_blocks
    s = _issue_scores(q, buffers, barriers, count, S_LAYOUT, STAGES)
    if DROPOUT:
        keep = _keep_words(first_row, start, plane, drawn, k_buffers.shape[4])
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(k_empty.index(count & (STAGES - 1)), count=1)
    weights, fade, peak, total = _weights(s, start, rows, peak, total, bounds, window, factor, S_LAYOUT, True)
    words = _pack(weights, k_buffers.dtype)
    if DROPOUT:
        words = words & gl.convert_layout(keep, words.type.layout, assert_trivial=True)
    state = (words, acc, peak, total)
    state = _steps(
        1, masked, q, buffers, barriers, count, start, rows, state, bounds, window, factor, first_row, plane, drawn,
        S_LAYOUT, P_LAYOUT, STAGES, True, DROPOUT,
    )  # fmt: skip
    state = _steps(
        gl.maximum(masked, 1), masked_or_full, q, buffers, barriers, count, start, rows, state, bounds, window, factor,
        first_row, plane, drawn, S_LAYOUT, P_LAYOUT, STAGES, False, DROPOUT,
    )  # fmt: skip
    if window[0] is not None:
        state = _steps(
            gl.maximum(masked_or_full, 1), blocks, q, buffers, barriers, count, start, rows, state, bounds, window,
            factor, first_row, plane, drawn, S_LAYOUT, P_LAYOUT, STAGES, True, DROPOUT,
        )  # fmt: skip
    return state


@gluon.jit
def _consume(
    consumer: gl.constexpr, out_ptr, lse_ptr, buffers, barriers, planes, lengths, window, dropout, softmax_scale,
    out_strides, lse_strides, num_tiles, LENGTHS: gl.constexpr, HEAD_DIM: gl.constexpr, UNIT: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Runs a consumer: 64 rows of each tile, from their scores to out and lse."""
    q_buffers, k_buffers, v_buffers = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    BLOCK_N: gl.constexpr = k_buffers.shape[4]
    BLOCK_D: gl.constexpr = k_buffers.shape[5]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    TILE: gl.constexpr = CONSUMERS * CONSUMER_ROWS
    factor = softmax_scale * 1.4426950408889634
    DROPOUT: gl.constexpr = dropout[0] is not None
    drawn = _load_dropout(dropout)
    count = 0  # of key blocks before this tile
    tiles = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        first_row, plane, where, starts, bounds = _which_tile(
            tile, planes, lengths, TILE, LENGTHS, window[1] is not None
        )
        batch, head, kv_head = where
        start_q, start_k = starts
        len_q, len_k, diagonal = bounds
        if first_row < len_q:
            tile_blocks = _blocks_of(first_row, bounds, window, TILE, BLOCK_N)
            first_row += consumer * CONSUMER_ROWS
            rows = first_row + gl.arange(0, CONSUMER_ROWS, layout=gl.SliceLayout(1, S_LAYOUT))
            mbarrier.wait(q_full.index(consumer), tiles & 1)
            q = q_buffers.index(consumer).reshape([CONSUMER_ROWS, BLOCK_D])
            peak = gl.full([CONSUMER_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
            acc = gl.zeros([CONSUMER_ROWS, BLOCK_D], gl.float32, O_LAYOUT)
            state = (acc, peak, _no_sums())
            words, acc, peak, total = _attend(
                q, buffers, barriers, count, tile_blocks, rows, state, bounds, window, factor, first_row, plane,
                drawn, S_LAYOUT, P_LAYOUT, STAGES, DROPOUT,
            )  # fmt: skip
            # All products with Q are done, so the producer may load the Q of the next tile.
            mbarrier.arrive(q_empty.index(consumer), count=1)
            count += tile_blocks[3]
            p = _unpack(words, k_buffers.dtype, P_LAYOUT)
            acc = _issue_sum(p, acc, buffers, barriers, count - 1, STAGES)
            # A row that sees no key has total 0, out 0 and lse -inf.
            total = gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, S_LAYOUT))
            lse = peak * softmax_scale + gl.log2(total) * 0.6931471805599453
            lse = gl.where(total > 0, lse, gl.where(total == 0, float("-inf"), total))
            lse_ptrs = lse_ptr + batch.to(gl.int64) * lse_strides[0] + head.to(gl.int64) * lse_strides[1]
            gl.store(lse_ptrs + start_q + rows, lse, mask=rows < len_q)
            scale = drawn[4] / gl.where(total == 0, 1.0, total)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(v_empty.index((count - 1) & (STAGES - 1)), count=1)
            out = (acc * gl.convert_layout(scale, gl.SliceLayout(1, O_LAYOUT))[:, None]).to(k_buffers.dtype)
            _store_rows(
                out, out_ptr, out_strides, batch, start_q, first_row, head, len_q, HEAD_DIM, UNIT,
            )  # fmt: skip
            tiles += 1


@gluon.jit
def _store_rows(
    out, out_ptr, strides, batch, start, first_row, head, length, HEAD_DIM: gl.constexpr, UNIT: gl.constexpr
):
    """Writes 64 rows, up to the end of the sequence: 16 bytes per thread, four adjacent threads per row."""
    BLOCK_D: gl.constexpr = out.shape[1]
    LAYOUT: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64]] if BLOCK_D == 128 else
        [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, BLOCK_D],
    )  # fmt: skip
    out = gl.convert_layout(out, LAYOUT)
    rows = first_row + gl.arange(0, CONSUMER_ROWS, layout=gl.SliceLayout(1, LAYOUT))
    dims = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, LAYOUT))
    out_ptr += (batch.to(gl.int64) * strides[0] + head.to(gl.int64) * strides[2]) * UNIT
    pointers = out_ptr + ((start + rows).to(gl.int64) * (strides[1] * UNIT))[:, None] + dims[None, :]
    here = (rows < length)[:, None] & (dims < HEAD_DIM)[None, :]
    gl.store(pointers, out, mask=here)


@gluon.jit(do_not_specialize=["planes", "lengths", "window", "dropout", "num_tiles", "batch_rows"])
def _attention_hopper_fwd_kernel(
    q_desc, k_desc, v_desc, out_ptr, lse_ptr, planes, lengths, window, dropout, batch_rows, num_tiles, softmax_scale,
    out_strides, lse_strides, LENGTHS: gl.constexpr, HEAD_DIM: gl.constexpr, UNIT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Computes out and lse of every num_programs-th tile, starting with the program's own."""
    q_buffers = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS] + q_desc.block_type.shape, q_desc.layout)
    k_buffers = gl.allocate_shared_memory(k_desc.dtype, [STAGES] + k_desc.block_type.shape, k_desc.layout)
    v_buffers = gl.allocate_shared_memory(v_desc.dtype, [STAGES] + v_desc.block_type.shape, v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=CONSUMERS)
        mbarrier.init(v_empty.index(i), count=CONSUMERS)
    fence_async_shared()
    buffers = (q_buffers, k_buffers, v_buffers)
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[3]
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    0, out_ptr, lse_ptr, buffers, barriers, planes, lengths, window, dropout, softmax_scale,
                    out_strides, lse_strides, num_tiles, LENGTHS, HEAD_DIM, UNIT, STAGES,
                ),
            ),
            (
                _consume,
                (
                    1, out_ptr, lse_ptr, buffers, barriers, planes, lengths, window, dropout, softmax_scale,
                    out_strides, lse_strides, num_tiles, LENGTHS, HEAD_DIM, UNIT, STAGES,
                ),
            ),
            (
                _produce,
                (
                    q_desc, k_desc, v_desc, buffers, barriers, planes, lengths, window, batch_rows, num_tiles,
                    LENGTHS, BLOCK_N, STAGES,
                ),
            ),
        ],
        [4, 1],
        [232, 40],  # the registers of the second consumer and of the producer; the first consumer gets the others, 232
    )  # fmt: skip
