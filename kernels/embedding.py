"""Token embedding: gather, scale, position and dropout in one pass; gradients summed in one order.

Forward, a program takes some tokens and up to 1024 columns: it reads the token's row and the position's, and writes
their sum. Rows of the padding id are not read.

Backward sorts the ids, so that all tokens of an id stand together, and sums them in two steps, in one order always. The
sorted tokens are cut into chunks of CHUNK. Within a chunk the first token of each run of equal ids adds up the run's
rows of dout; a run that lies in one chunk goes straight to its row of dweight, one that goes on leaves an fp32 sum for
each chunk, and a second kernel adds these. So a word that makes up a tenth of the batch is summed by many programs.
The gradient of a learned position table is the same sum with positions in the place of ids (in order they need no
sort). Nothing depends on a number that the host would have to wait for. On request atomics add the tokens up as they
come, in fp32: no sort, but no order either.

Bytes an element of tokens * dim in half dtypes: forward 6 (the token's and the position's row, out; the table stays
in L2: 4), backward 2 of dout for each table that learns, and the gradient of the whole table once, zeros included: 4
(zeroed, and written where tokens are). FLOPs: 2 an element, 12 more for dropout. Kept for backward: ids and positions.
fp32: sums and products, rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastformer.kernels._dropout import drop_tile
from fastformer.kernels._launch import (
    cdiv,
    contiguous,
    dropout_arguments,
    launch,
    next_power_of_2,
    stride_unit,
    unsupported_device,
    unsupported_dtype,
)
from fastformer.kernels._rows import as_rows, existing, load_rows, row_ptrs, store_rows

CHUNK = 64

# Arguments whose value must not make another binary.
_COUNTS = ["num_tokens", "seqlen", "num_embeddings", "num_positions", "padding_idx", "skipped", "dropout"]
_COUNTS += ["weight_row", "table_row", "dout_row", "num_chunks", "num_rows"]


@triton.jit(do_not_specialize=_COUNTS)
def _embedding_fwd_kernel(
    ids_ptr,
    weight_ptr,
    table_ptr,
    positions_ptr,
    out_ptr,
    num_tokens,
    seqlen,
    num_embeddings,
    num_positions,
    weight_row,
    table_row,
    scale,
    padding_idx,
    dropout,
    UNIT: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """BLOCK_N columns of BLOCK_M tokens. Without table_ptr no positions."""
    tokens = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    first_column = tl.program_id(1) * BLOCK_N
    columns = first_column + tl.arange(0, BLOCK_N)
    real = tokens < num_tokens
    here = existing(real, columns, DIM, BLOCK_N)
    ids = tl.load(ids_ptr + tokens, mask=real, other=0).to(tl.int64)
    known = (ids >= 0) & (ids < num_embeddings)
    tl.device_assert(known, "a token id is outside the vocabulary")
    # One that is outside, where nothing asserts, must not reach other memory.
    reads = here & (known & (ids != padding_idx))[:, None]
    out = load_rows(weight_ptr, ids, weight_row, columns, reads, UNIT) * scale
    if table_ptr is not None:
        if positions_ptr is not None:
            positions = tl.load(positions_ptr + tokens, mask=real, other=0).to(tl.int64)
            inside = (positions >= 0) & (positions < num_positions)
            tl.device_assert(inside, "a position is outside the table")
            reads = here & inside[:, None]
        else:
            positions = (tokens % seqlen).to(tl.int64)
            reads = here
        out += load_rows(table_ptr, positions, table_row, columns, reads, UNIT)
    out = drop_tile(out, tokens, first_column, dropout, BLOCK_M, BLOCK_N)
    store_rows(out_ptr, tokens, DIM, columns, out, here)


@triton.jit
def _load_dout(
    dout_ptr,
    tokens,
    here,
    first_column,
    dout_row,
    dropout,
    UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """BLOCK_N columns of dropout(dout) of some tokens, fp32; 0 where not `here`."""
    columns = first_column + tl.arange(0, BLOCK_N)
    dout = load_rows(dout_ptr, tokens, dout_row, columns, here, UNIT)
    return drop_tile(dout, tokens, first_column, dropout, BLOCK_M, BLOCK_N)


@triton.jit(do_not_specialize=_COUNTS)
def _sum_runs_kernel(
    keys_ptr,
    order_ptr,
    dout_ptr,
    sums_ptr,
    partial_ptr,
    num_tokens,
    num_rows,
    skipped,
    dout_row,
    scale,
    dropout,
    UNIT: tl.constexpr,
    DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """What one run of equal keys in one chunk sums to: into sums_ptr, or partial_ptr where it crosses a chunk's end.

    keys_ptr: sorted; order_ptr: the token of each. partial_ptr: (chunks, 2, DIM) fp32: of the run that a chunk starts
    with, and of the one that it ends with where that is another.
    """
    start = tl.program_id(0)
    first_column = tl.program_id(1) * BLOCK_N
    key = tl.load(keys_ptr + start)
    before = tl.load(keys_ptr + tl.maximum(start - 1, 0))
    at_start = start % CHUNK == 0
    starts_run = (start == 0) | (before != key)
    if (at_start | starts_run) & (key != skipped) & (key >= 0) & (key < num_rows):
        last = tl.minimum(start // CHUNK * CHUNK + CHUNK, num_tokens)
        ahead = start + tl.arange(0, CHUNK)
        run = tl.sum((tl.load(keys_ptr + ahead, mask=ahead < last, other=-1) == key).to(tl.int32), 0)
        columns = first_column + tl.arange(0, BLOCK_N)
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for step in range(0, run, BLOCK_M):
            inside = step + tl.arange(0, BLOCK_M)
            tokens = tl.load(order_ptr + start + inside, mask=inside < run, other=0)
            here = existing(inside < run, columns, DIM, BLOCK_N)
            total += _load_dout(dout_ptr, tokens, here, first_column, dout_row, dropout, UNIT, BLOCK_M, BLOCK_N)
        total = tl.sum(total, 0) * scale
        end = start + run
        after = tl.load(keys_ptr + tl.minimum(end, num_tokens - 1))
        goes_on = (end < num_tokens) & (after == key)
        if starts_run & (goes_on == 0):
            sums_ptrs = sums_ptr + tl.cast(key, tl.int64) * DIM + columns
            tl.store(sums_ptrs, tl.cast(total, sums_ptr.dtype.element_ty), mask=columns < DIM)
        else:
            slot = start // CHUNK * 2 + tl.where(at_start, 0, 1)
            tl.store(partial_ptr + tl.cast(slot, tl.int64) * DIM + columns, total, mask=columns < DIM)


@triton.jit(do_not_specialize=_COUNTS)
def _sum_chunks_kernel(
    keys_ptr,
    sums_ptr,
    partial_ptr,
    num_tokens,
    num_rows,
    num_chunks,
    skipped,
    DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The run that starts in a chunk and goes on in the next ones, out of the sums of each."""
    chunk = tl.program_id(0)
    first = chunk * CHUNK
    key = tl.load(keys_ptr + tl.minimum(first + CHUNK, num_tokens) - 1)
    goes_on = tl.load(keys_ptr + tl.minimum(first + CHUNK, num_tokens - 1)) == key
    alone = tl.load(keys_ptr + first) == key
    starts_here = (chunk == 0) | (tl.load(keys_ptr + tl.maximum(first - 1, 0)) != key) | (alone == 0)
    goes_on = goes_on & (chunk + 1 < num_chunks) & starts_here
    if goes_on & (key != skipped) & (key >= 0) & (key < num_rows):
        columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        slot = chunk * 2 + tl.where(alone, 0, 1)
        own = tl.load(partial_ptr + tl.cast(slot, tl.int64) * DIM + columns, mask=columns < DIM, other=0.0)
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        following = chunk + 1
        found = 1
        while found > 0:
            chunks = following + tl.arange(0, BLOCK_M)
            same = chunks < num_chunks
            same = same & (tl.load(keys_ptr + chunks * CHUNK, mask=same, other=-1) == key)
            here = same[:, None] & (columns < DIM)[None, :]
            total += tl.load(
                partial_ptr + (chunks.to(tl.int64) * 2 * DIM)[:, None] + columns[None, :], mask=here, other=0.0
            )
            found = tl.where(tl.sum(same.to(tl.int32), 0) == BLOCK_M, 1, 0)
            following += BLOCK_M
        total = own + tl.sum(total, 0)
        sums_ptrs = sums_ptr + tl.cast(key, tl.int64) * DIM + columns
        tl.store(sums_ptrs, tl.cast(total, sums_ptr.dtype.element_ty), mask=columns < DIM)


@triton.jit(do_not_specialize=_COUNTS)
def _scatter_kernel(
    keys_ptr,
    dout_ptr,
    sums_ptr,
    num_tokens,
    num_rows,
    skipped,
    dout_row,
    scale,
    dropout,
    UNIT: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Adds BLOCK_N columns of BLOCK_M tokens of dropout(dout) to the fp32 rows of their keys, by atomics."""
    tokens = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    first_column = tl.program_id(1) * BLOCK_N
    columns = first_column + tl.arange(0, BLOCK_N)
    keys = tl.load(keys_ptr + tokens, mask=tokens < num_tokens, other=-1).to(tl.int64)
    here = existing((keys >= 0) & (keys < num_rows) & (keys != skipped), columns, DIM, BLOCK_N)
    dout = _load_dout(dout_ptr, tokens, here, first_column, dout_row, dropout, UNIT, BLOCK_M, BLOCK_N)
    tl.atomic_add(row_ptrs(sums_ptr, keys, DIM, columns, 1), dout * scale, mask=here, sem="relaxed")


def why_unsupported(op_name: str, *, ids: Tensor, **arguments: Any) -> str | None:
    """Why the kernels can't take a call of embedding_fwd or _bwd; None if they can."""
    if op_name == "embedding_fwd":
        weight, table = arguments["weight"], arguments["position_table"]
        dtypes = [weight.dtype] if table is None else [weight.dtype, table.dtype]
    else:
        dtypes = [arguments["dout"].dtype, arguments["dtype"]]
    return unsupported_dtype(*dtypes) or unsupported_device(ids)


def _token_tile(num_tokens: int, dim: int) -> tuple[int, int, int]:
    """(BLOCK_M, BLOCK_N, num_warps) of a kernel that takes tokens in their order."""
    block_n = min(1024, max(8, next_power_of_2(dim)))
    block_m = max(1, min(2048 // block_n, next_power_of_2(num_tokens)))
    return block_m, block_n, max(1, min(4, block_m * block_n // 512))


def embedding_fwd(
    ids: Tensor,
    weight: Tensor,
    position_table: Tensor | None,
    positions: Tensor | None,
    scale: float,
    padding_idx: int,
    dropout_p: float,
    dropout_seed: Tensor | None,
    atomics: bool,
) -> Tensor:
    """`fastformer::embedding_fwd`: the sum, dropped. `atomics` waits for backward."""
    num_tokens, dim = ids.numel(), weight.shape[1]
    out = weight.new_empty(*ids.shape, dim)
    if num_tokens == 0:
        return out
    weight = as_rows(weight)
    table = None if position_table is None else as_rows(position_table)
    unit = stride_unit(weight, table)
    block_m, block_n, num_warps = _token_tile(num_tokens, dim)
    launch(
        _embedding_fwd_kernel,
        (cdiv(num_tokens, block_m), cdiv(dim, block_n)),
        ids.contiguous(),
        weight,
        table,
        contiguous(positions),
        out,
        num_tokens,
        ids.shape[-1],
        weight.shape[0],
        0 if table is None else table.shape[0],
        weight.stride(0) // unit,
        0 if table is None else table.stride(0) // unit,
        scale,
        padding_idx,
        dropout_arguments(dropout_p, dropout_seed),
        UNIT=unit,
        DIM=dim,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=num_warps,
        debug=True,
        sanitize_overflow=False,
    )
    return out


def _sum_by_key(
    keys: Tensor,
    order: Tensor,
    dout: Tensor,
    num_rows: int,
    scale: float,
    skipped: int,
    dropout_p: float,
    dropout_seed: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """(num_rows, dim): row k is the sum of the rows order[i] of dropout(dout) with keys[i] == k; keys are sorted."""
    num_tokens, dim = dout.shape
    sums = dout.new_zeros(num_rows, dim, dtype=dtype)
    unit = stride_unit(dout)
    num_chunks = cdiv(num_tokens, CHUNK)
    partial = dout.new_empty(num_chunks, 2, dim, dtype=torch.float32)
    block_n = min(512, max(8, next_power_of_2(dim)))
    block_m = max(2, min(2048 // block_n, 16))
    column_blocks = cdiv(dim, block_n)
    launch(
        _sum_runs_kernel,
        (num_tokens, column_blocks),
        keys,
        order,
        dout,
        sums,
        partial,
        num_tokens,
        num_rows,
        skipped,
        dout.stride(0) // unit,
        scale,
        dropout_arguments(dropout_p, dropout_seed),
        UNIT=unit,
        DIM=dim,
        CHUNK=CHUNK,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=max(1, min(4, block_m * block_n // 256)),
    )
    if num_chunks > 1:
        launch(
            _sum_chunks_kernel, (num_chunks, column_blocks),
            keys, sums, partial, num_tokens, num_rows, num_chunks, skipped,
            DIM=dim, CHUNK=CHUNK, BLOCK_M=block_m, BLOCK_N=block_n, num_warps=4,
        )  # fmt: skip
    return sums


def _sum_by_atomics(
    keys: Tensor,
    dout: Tensor,
    num_rows: int,
    scale: float,
    skipped: int,
    dropout_p: float,
    dropout_seed: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """What `_sum_by_key` gives, of keys in any order."""
    num_tokens, dim = dout.shape
    sums = dout.new_zeros(num_rows, dim, dtype=torch.float32)
    unit = stride_unit(dout)
    block_m, block_n, num_warps = _token_tile(num_tokens, dim)
    launch(
        _scatter_kernel,
        (cdiv(num_tokens, block_m), cdiv(dim, block_n)),
        keys.contiguous(),
        dout,
        sums,
        num_tokens,
        num_rows,
        skipped,
        dout.stride(0) // unit,
        scale,
        dropout_arguments(dropout_p, dropout_seed),
        UNIT=unit,
        DIM=dim,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=num_warps,
    )
    return sums.to(dtype)


def _sorted(indices: Tensor) -> tuple[Tensor, Tensor]:
    """(keys, order). As int32, which a radix sort passes over half as often; stable, so that sums repeat."""
    return torch.sort(indices.reshape(-1).to(torch.int32), stable=True)


def embedding_bwd(
    dout: Tensor,
    ids: Tensor,
    positions: Tensor | None,
    num_embeddings: int,
    num_positions: int,
    scale: float,
    padding_idx: int,
    dropout_p: float,
    dropout_seed: Tensor | None,
    dtype: torch.dtype,
    atomics: bool,
) -> tuple[Tensor, Tensor]:
    """`fastformer::embedding_bwd`: (dweight, dposition_table)."""
    num_tokens, dim = ids.numel(), dout.shape[-1]
    if num_tokens == 0:
        empty = dout.new_zeros(*((num_positions, dim) if num_positions else (0,)), dtype=dtype)
        return dout.new_zeros(num_embeddings, dim, dtype=dtype), empty
    dout = as_rows(dout)
    dropout = (dropout_p, dropout_seed)
    if atomics:
        dweight = _sum_by_atomics(ids, dout, num_embeddings, scale, padding_idx, *dropout, dtype)
    else:
        dweight = _sum_by_key(*_sorted(ids), dout, num_embeddings, scale, padding_idx, *dropout, dtype)
    if num_positions == 0:
        return dweight, dout.new_empty(0, dtype=dtype)
    if positions is not None:
        if atomics:
            return dweight, _sum_by_atomics(positions, dout, num_positions, 1.0, -1, *dropout, dtype)
        keys, order = _sorted(positions)
    else:
        seqlen = ids.shape[-1]
        order = torch.arange(num_tokens, device=ids.device).view(-1, seqlen).T.reshape(-1)
        keys = (
            torch.arange(seqlen, dtype=torch.int32, device=ids.device)
            .view(-1, 1)
            .expand(-1, num_tokens // seqlen)
            .reshape(-1)
        )
    return dweight, _sum_by_key(keys, order, dout, num_positions, 1.0, -1, *dropout, dtype)
