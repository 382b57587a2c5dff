"""Attention, backward, for sm_90 in Gluon: dk and dv of a tile of keys stay in registers; atomics sum dq.

The math, the arguments and the results are those of `_dkdv_kernel` in `attention_backward.py` with DQ="atomic": five
products per block of scores. A program processes tiles of 128 keys of a head; its warps have roles, as in
`_attention_hopper_forward.py`:

- A producer warp copies K and V of the tile once, and Q and dO, 64 rows at a time, through rings of STAGES buffers.
- Two consumers, a warpgroup each, own 64 keys each. A consumer computes S = Q K^T and dP = dO V^T, P during the second
  product, and then dS. P and dS go through shared memory, because dV = P^T dO and dK = dS^T Q need them transposed. The
  consumers synchronise when both have stored their dS. Each then computes half of the columns of dQ = dS K over all 128
  keys, and adds them to global memory while dK runs. So dQ is added to once per tile of keys, and its sum takes half
  the registers.

fp32: scores, P, dS, the three sums. P and dS (with dropout, dS / keep_scale) are rounded to the inputs' dtype for their
products.

A consumer has 240 registers per thread. Dropout at head_dim 64 needs them all, and so does head_dim 128, where dk and
dv take 128, without dropout. So values that the launcher can compute are arguments, which instructions read without a
register (`scales`), and addresses are recomputed where they are used.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fastformer.kernels import _attention_common
from fastformer.kernels._attention_hopper_forward import (
    _copy_rows,
    _keep_words,
    _load_dropout,
    _pack,
    _store_rows,
    _unpack,
    _which_tile,
)

_row_range = gluon.jit(_attention_common.row_range.fn)

# For the compile report: six products (dq is two) in each of the two copies of the loop, for each of two consumers.
PRODUCTS = {"_attention_hopper_bwd_kernel": lambda arguments: [64] * 24}
SCORES = {"_attention_hopper_bwd_kernel": lambda arguments: 32}

ROWS = gl.constexpr(64)  # the rows of a block of Q and dO
CONSUMER_KEYS = gl.constexpr(64)
TILE_KEYS = gl.constexpr(128)


@gluon.jit
def _blocks_of(first_key, bounds, window):
    """Returns the blocks of rows that see a tile of keys: (first, left, second, edges, full_first, blocks).

    Of `blocks` blocks, the first `edges` need a mask: `left` of them from row `first` on, and the others from `second`
    on. The remaining blocks start at full_first.
    """
    first, full_first, full_last, last = _row_range(first_key, bounds, window, ROWS, TILE_KEYS)
    # No row sees a key of a tile beyond the length; its limits are then in reverse order.
    full_first = gl.maximum(full_first, first)
    full_last = gl.maximum(full_last, full_first)
    left = (full_first - first) // ROWS
    edges = left + (last - full_last + ROWS - 1) // ROWS
    return first, left, full_last, edges, full_first, edges + (full_last - full_first) // ROWS


@gluon.jit
def _first_row(step, blocks):
    """Returns the start of the step-th block of `_blocks_of`."""
    first, left, second, edges, full_first, count = blocks
    edge = gl.where(step < left, first + step * ROWS, second + (step - left) * ROWS)
    return gl.where(step < edges, edge, full_first + (step - edges) * ROWS)


@gluon.jit
def _produce(
    q_desc, dout_desc, k_desc, v_desc, buffers, barriers, planes, lengths, window, batch_rows, num_tiles,
    LENGTHS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Runs the producer: copies K and V for both consumers once per tile, and Q and dO for each block of rows."""
    q_buffers, dout_buffers, k_buffers, v_buffers, p_buffers, ds_buffers = buffers
    q_full, dout_full, row_empty, key_full, key_empty, ds_full, ds_empty = barriers
    count = 0  # of blocks of rows so far
    tiles = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        first_key, plane, where, starts, bounds = _which_tile(tile, planes, lengths, TILE_KEYS, LENGTHS, False)
        batch, head, kv_head = where
        start_q, start_k = starts
        len_q, len_k, diagonal = bounds
        blocks = _blocks_of(first_key, bounds, window)
        if blocks[5] > 0:
            q_rows, dout_rows, k_rows, v_rows = batch_rows
            for consumer in gl.static_range(2):
                full = key_full.index(consumer)
                first = first_key + consumer * CONSUMER_KEYS
                mbarrier.wait(key_empty.index(consumer), (tiles & 1) ^ 1)
                mbarrier.expect(full, 2 * k_desc.block_type.nbytes)
                _copy_rows(k_desc, k_rows * batch, start_k, first, len_k, kv_head, full, k_buffers.index(consumer))
                _copy_rows(v_desc, v_rows * batch, start_k, first, len_k, kv_head, full, v_buffers.index(consumer))
            for step in range(0, blocks[5]):
                stage = count & (STAGES - 1)
                row = _first_row(step, blocks)
                mbarrier.wait(row_empty.index(stage), ((count // STAGES) & 1) ^ 1)
                mbarrier.expect(q_full.index(stage), q_desc.block_type.nbytes)
                _copy_rows(
                    q_desc, q_rows * batch, start_q, row, len_q, head, q_full.index(stage), q_buffers.index(stage)
                )
                mbarrier.expect(dout_full.index(stage), dout_desc.block_type.nbytes)
                _copy_rows(
                    dout_desc, dout_rows * batch, start_q, row, len_q, head, dout_full.index(stage),
                    dout_buffers.index(stage),
                )  # fmt: skip
                count += 1
            tiles += 1


@gluon.jit
def _steps(
    first_step, last_step, consumer: gl.constexpr, blocks, buffers, barriers, count, first_key, state, pointers, dq_row,
    plane, bounds, window, drawn, scales, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr, CHECK: gl.constexpr,
    DROPOUT: gl.constexpr,
):  # fmt: skip
    """Runs steps [first_step, last_step) of a consumer, one block of rows each; returns (dk, dv)."""
    q_buffers, dout_buffers, k_buffers, v_buffers, p_buffers, ds_buffers = buffers
    q_full, dout_full, row_empty, key_full, key_empty, ds_full, ds_empty = barriers
    row_lse_ptr, delta_ptr, dq_ptr = pointers
    len_q, len_k, diagonal = bounds
    factor, grad_scale, drop_scale = scales
    dk, dv = state
    first_full = blocks[4] - blocks[3] * ROWS  # where the unmasked blocks would start at step 0
    BLOCK_D: gl.constexpr = k_buffers.shape[5]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CONSUMER_KEYS, 16])
    HALF_D: gl.constexpr = BLOCK_D // 2
    DQ_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF_D, 16])
    DS_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, DQ_LAYOUT, 2)
    DTYPE: gl.constexpr = k_buffers.dtype
    for step in range(first_step, last_step):
        stage = (count + step) & (STAGES - 1)
        phase = ((count + step) // STAGES) & 1
        if CHECK:
            first_row = _first_row(step, blocks)
        else:
            first_row = first_full + step * ROWS
        # A 0 that the compiler can't know. Otherwise descriptors of unchanging buffers would stay in registers and
        # spill.
        zero = (first_row >= len_q).to(gl.int32)
        own_slot, other_slot = consumer + zero, 1 - consumer + zero
        k = k_buffers.index(own_slot).reshape([CONSUMER_KEYS, BLOCK_D])
        v = v_buffers.index(own_slot).reshape([CONSUMER_KEYS, BLOCK_D])
        p_shared = p_buffers.index(own_slot)
        ds_shared = ds_buffers.index(own_slot)
        mbarrier.wait(q_full.index(stage), phase)
        q = q_buffers.index(stage).reshape([ROWS, BLOCK_D])
        zeros = gl.zeros([ROWS, CONSUMER_KEYS], gl.float32, S_LAYOUT)
        s = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
        mbarrier.wait(dout_full.index(stage), phase)
        dout = dout_buffers.index(stage).reshape([ROWS, BLOCK_D])
        dp = warpgroup_mma(dout, v.permute((1, 0)), zeros, use_acc=False, is_async=True)

        rows = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S_LAYOUT))
        if CHECK:
            # A row beyond the length, or one that sees nothing, has lse +inf: its weights are 0.
            lse = gl.load(row_lse_ptr + rows, mask=rows < len_q, other=float("inf"))
            delta = gl.load(delta_ptr + rows, mask=rows < len_q, other=0.0)
        else:
            lse = gl.load(row_lse_ptr + rows)
            delta = gl.load(delta_ptr + rows)
        if DROPOUT:
            # The sum is over dS / keep_scale = P (dP - delta / keep_scale), so the factor applies once, not to each dP.
            delta *= drop_scale
            keep = _keep_words(first_row, first_key, plane, drawn, CONSUMER_KEYS)
        s = warpgroup_mma_wait(1, deps=[s])
        if CHECK:
            # Keys and their limits are relative to first_key. Two bits of a key depend on the lane. With these bits
            # moved to the limits, a thread compares with constants and needs no register for each key.
            keys = gl.arange(0, CONSUMER_KEYS, layout=gl.SliceLayout(0, S_LAYOUT))[None, :]
            of_lane = keys & 6
            keys = keys & ~6
            end = rows * 0 + len_k
            if window[1] is not None:
                end = gl.minimum(rows + (diagonal + window[1] + 1), end)
            visible = keys < (end - first_key)[:, None] - of_lane
            if window[0] is not None:
                visible = visible & (keys >= (rows + (diagonal - window[0] - first_key))[:, None] - of_lane)
            s = gl.where(visible, s, float("-inf"))
        p = gl.exp2(s * factor - (lse * 1.4426950408889634)[:, None])
        words = _pack(p, DTYPE)
        if DROPOUT:
            keep = gl.convert_layout(keep, words.type.layout)
            words = words & keep
        p_shared.store(_unpack(words, DTYPE, S_LAYOUT))
        dp = warpgroup_mma_wait(0, deps=[dp])
        if DROPOUT:
            even, odd = gl.split(dp.reshape([ROWS, CONSUMER_KEYS // 2, 2]))
            even = gl.where((keep & 1) != 0, even, 0.0)
            odd = gl.where(keep < 0, odd, 0.0)
            dp = gl.convert_layout(gl.join(even, odd).reshape([ROWS, CONSUMER_KEYS]), S_LAYOUT)
        words = _pack(p * (dp - delta[:, None]), DTYPE)
        # The other consumer's dq of the previous step has read this dS.
        mbarrier.wait(ds_empty.index(0), ((count + step) & 1) ^ 1)
        ds_shared.store(_unpack(words, DTYPE, S_LAYOUT))
        # Makes the stored values, including the other consumer's, visible to the asynchronous units.
        fence_async_shared()
        mbarrier.arrive(ds_full.index(0), count=1)
        dq = gl.zeros([ROWS, HALF_D], gl.float32, DQ_LAYOUT)
        own_k = k.slice(consumer * HALF_D, HALF_D, dim=1)
        dq = warpgroup_mma(_unpack(words, DTYPE, DS_LAYOUT), own_k, dq, use_acc=False, is_async=True)
        dv = warpgroup_mma(p_shared.permute((1, 0)), dout, dv, is_async=True)
        mbarrier.wait(ds_full.index(0), (count + step) & 1)
        other_k = k_buffers.index(other_slot).reshape([CONSUMER_KEYS, BLOCK_D])
        other_k = other_k.slice(consumer * HALF_D, HALF_D, dim=1)
        dq = warpgroup_mma(ds_buffers.index(other_slot), other_k, dq, is_async=True)
        dk = warpgroup_mma(ds_shared.permute((1, 0)), q, dk, is_async=True)
        dq = warpgroup_mma_wait(1, deps=[dq])
        mbarrier.arrive(ds_empty.index(0), count=1)
        inside = gl.arange(0, ROWS, layout=gl.SliceLayout(1, DQ_LAYOUT))
        dims = consumer * HALF_D + gl.arange(0, HALF_D, layout=gl.SliceLayout(0, DQ_LAYOUT))
        # A product of a sum and not a sum of products, so that a thread holds none of the products in registers.
        inside += first_row
        dq_at = dq_ptr + (inside.to(gl.int64) * dq_row)[:, None] + dims[None, :]
        here = (dims < HEAD_DIM)[None, :]
        if CHECK:  # otherwise all rows of the block exist
            here = here & (inside < len_q)[:, None]
        gl.atomic_add(dq_at, dq * grad_scale, mask=here, sem="relaxed")
        dv, dk = warpgroup_mma_wait(0, deps=[dv, dk])
        mbarrier.arrive(row_empty.index(stage), count=1)
    return dk, dv


@gluon.jit
def _consume(
    consumer: gl.constexpr, row_lse_ptr, delta_ptr, dq_ptr, dk_ptr, dv_ptr, buffers, barriers, planes, lengths, window,
    dropout, scales, dq_strides, dk_strides, lse_strides, num_tiles, LENGTHS: gl.constexpr,
    HEAD_DIM: gl.constexpr, UNIT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Runs a consumer: 64 keys of each tile, their dk and dv, and their part of dq."""
    q_buffers, dout_buffers, k_buffers, v_buffers, p_buffers, ds_buffers = buffers
    q_full, dout_full, row_empty, key_full, key_empty, ds_full, ds_empty = barriers
    BLOCK_D: gl.constexpr = k_buffers.shape[5]
    D_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    DROPOUT: gl.constexpr = dropout[0] is not None
    drawn = _load_dropout(dropout)
    count = 0  # the number of blocks of rows before this tile
    tiles = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        first_key, plane, where, starts, bounds = _which_tile(tile, planes, lengths, TILE_KEYS, LENGTHS, False)
        batch, head, kv_head = where
        start_q, start_k = starts
        len_q, len_k, diagonal = bounds
        blocks = _blocks_of(first_key, bounds, window)
        first_key += consumer * CONSUMER_KEYS
        dk = gl.zeros([CONSUMER_KEYS, BLOCK_D], gl.float32, D_LAYOUT)
        dv = gl.zeros([CONSUMER_KEYS, BLOCK_D], gl.float32, D_LAYOUT)
        if blocks[5] > 0:
            at_row = batch.to(gl.int64) * lse_strides[0] + head.to(gl.int64) * lse_strides[1] + start_q
            first = batch.to(gl.int64) * dq_strides[0] + start_q.to(gl.int64) * dq_strides[1]
            first += head.to(gl.int64) * dq_strides[2]
            pointers = (row_lse_ptr + at_row, delta_ptr + at_row, dq_ptr + first * UNIT)
            # Its dq needs the keys of both consumers.
            for i in gl.static_range(2):
                mbarrier.wait(key_full.index(i), tiles & 1)
            state = (dk, dv)
            state = _steps(
                0, blocks[3], consumer, blocks, buffers, barriers, count, first_key, state, pointers,
                dq_strides[1] * UNIT, plane, bounds, window, drawn, scales, HEAD_DIM, STAGES, True, DROPOUT,
            )  # fmt: skip
            state = _steps(
                blocks[3], blocks[5], consumer, blocks, buffers, barriers, count, first_key, state, pointers,
                dq_strides[1] * UNIT, plane, bounds, window, drawn, scales, HEAD_DIM, STAGES, False, DROPOUT,
            )  # fmt: skip
            dk, dv = state
            for i in gl.static_range(2):
                mbarrier.arrive(key_empty.index(i), count=1)
            count += blocks[5]
            tiles += 1
        # Keys beyond the length have the gradient zero, if the tensor has room for them.
        stored = len_k
        if LENGTHS == "seqlens_k":
            stored = len_k * 0 + lengths[3]
        dk = (dk * scales[1]).to(dk_ptr.dtype.element_ty)
        dv = (dv * drawn[4]).to(dv_ptr.dtype.element_ty)
        _store_rows(dk, dk_ptr, dk_strides, batch, start_k, first_key, head, stored, HEAD_DIM, UNIT)
        _store_rows(dv, dv_ptr, dk_strides, batch, start_k, first_key, head, stored, HEAD_DIM, UNIT)


@gluon.jit(do_not_specialize=["planes", "lengths", "window", "dropout", "num_tiles", "batch_rows"])
def _attention_hopper_bwd_kernel(
    q_desc, dout_desc, k_desc, v_desc, row_lse_ptr, delta_ptr, dq_ptr, dk_ptr, dv_ptr, planes, lengths, window, dropout,
    batch_rows, num_tiles, scales, dq_strides, dk_strides, lse_strides, LENGTHS: gl.constexpr, HEAD_DIM: gl.constexpr,
    UNIT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Computes dk and dv of every num_programs-th tile of keys, from the program's own on, and their part of dq."""
    q_buffers = gl.allocate_shared_memory(q_desc.dtype, [STAGES] + q_desc.block_type.shape, q_desc.layout)
    dout_buffers = gl.allocate_shared_memory(q_desc.dtype, [STAGES] + q_desc.block_type.shape, q_desc.layout)
    k_buffers = gl.allocate_shared_memory(k_desc.dtype, [2] + k_desc.block_type.shape, k_desc.layout)
    v_buffers = gl.allocate_shared_memory(v_desc.dtype, [2] + v_desc.block_type.shape, v_desc.layout)
    P_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, CONSUMER_KEYS], q_desc.dtype)
    p_buffers = gl.allocate_shared_memory(q_desc.dtype, [2, ROWS, CONSUMER_KEYS], P_SHARED)
    ds_buffers = gl.allocate_shared_memory(q_desc.dtype, [2, ROWS, CONSUMER_KEYS], P_SHARED)
    key_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    key_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(key_full.index(i), count=1)
        mbarrier.init(key_empty.index(i), count=2)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    dout_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    row_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(dout_full.index(i), count=1)
        mbarrier.init(row_empty.index(i), count=2)
    ds_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    ds_empty = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(ds_full.index(0), count=2)
    mbarrier.init(ds_empty.index(0), count=2)
    fence_async_shared()
    buffers = (q_buffers, dout_buffers, k_buffers, v_buffers, p_buffers, ds_buffers)
    barriers = (q_full, dout_full, row_empty, key_full, key_empty, ds_full, ds_empty)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    0, row_lse_ptr, delta_ptr, dq_ptr, dk_ptr, dv_ptr, buffers, barriers, planes, lengths, window,
                    dropout, scales, dq_strides, dk_strides, lse_strides, num_tiles, LENGTHS, HEAD_DIM, UNIT,
                    STAGES,
                ),
            ),
            (
                _consume,
                (
                    1, row_lse_ptr, delta_ptr, dq_ptr, dk_ptr, dv_ptr, buffers, barriers, planes, lengths, window,
                    dropout, scales, dq_strides, dk_strides, lse_strides, num_tiles, LENGTHS, HEAD_DIM, UNIT,
                    STAGES,
                ),
            ),
            (
                _produce,
                (
                    q_desc, dout_desc, k_desc, v_desc, buffers, barriers, planes, lengths, window, batch_rows,
                    num_tiles, LENGTHS, STAGES,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
