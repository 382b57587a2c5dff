"""Token embedding: gather, scale, positions and dropout in one pass; gradients are summed in a fixed order.

In forward, a program handles some tokens and up to 1024 columns: it reads the rows of the token and of the position,
and writes their sum. Rows of the padding id are not read.

Backward sorts the ids, so that all tokens of an id are adjacent, and sums them in two steps, always in the same order.
The sorted tokens are split into chunks of CHUNK. Within a chunk, the first token of each run of equal ids adds the rows
of dout of the run. If the run is in one chunk only, its sum is written to dweight; if it spans several chunks, each
leaves an fp32 sum, and a second kernel adds these. So many programs sum a word that makes up a tenth of the batch.
The gradient of a learned position table is the same sum with positions instead of ids (consecutive positions need no
sort). Nothing depends on a number for which the host would have to wait. On request, atomics add the tokens in fp32 in
any order, without a sort.

Bytes per element of tokens * dim in half dtypes: forward 6 (the rows of the token and of the position, out), or 4 if
the position table stays in L2; backward 2 (dout) for each table that has a gradient, and 4 per element of the table's
gradient (zeroed, and written for its tokens). FLOPs per element: 2, and 12 more for dropout. Saved for backward: ids
and positions. fp32: sums and products, rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastformer.kernels._dropout import drop_tile
from fastformer.kernels._launch import (
    Dropout,
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

# Arguments whose values must not lead to another binary.
_COUNTS = ["num_tokens", "seqlen", "num_embeddings", "num_positions", "padding_idx", "skipped", "dropout"]
_COUNTS += ["weight_row", "table_row", "dout_row", "num_chunks", "num_rows"]


@triton.jit(do_not_specialize=_COUNTS)
def _embedding_fwd_kernel(
    ids_ptr, weight_ptr, table_ptr, positions_ptr, out_ptr, num_tokens, seqlen, num_embeddings, num_positions,
    weight_row, table_row, scale, padding_idx, dropout, UNIT: tl.constexpr, DIM: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Computes BLOCK_N columns of BLOCK_M tokens. table_ptr: None without positions."""
    tokens = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    first_column = tl.program_id(1) * BLOCK_N
    columns = first_column + tl.arange(0, BLOCK_N)
    real = tokens < num_tokens
    here = existing(real, columns, DIM, BLOCK_N)
    ids = tl.load(ids_ptr + tokens, mask=real, other=0).to(tl.int64)
    in_range = (ids >= 0) & (ids < num_embeddings)
    tl.device_assert(in_range, "a token id is outside the vocabulary")
    # An id out of range must not read other memory, even if assertions are off.
    reads = here & (in_range & (ids != padding_idx))[:, None]
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
    dout_ptr, tokens, here, first_column, dout_row, dropout, UNIT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Loads BLOCK_N columns of dropout(dout) of some tokens as fp32, with 0 where `here` is false."""
    columns = first_column + tl.arange(0, BLOCK_N)
    dout = load_rows(dout_ptr, tokens, dout_row, columns, here, UNIT)
    return drop_tile(dout, tokens, first_column, dropout, BLOCK_M, BLOCK_N)


@triton.jit(do_not_specialize=_COUNTS)
def _sum_runs_kernel(
    keys_ptr, order_ptr, dout_ptr, sums_ptr, partial_ptr, num_tokens, num_rows, skipped, dout_row, scale, dropout,
    UNIT: tl.constexpr, DIM: tl.constexpr, CHUNK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Sums one run of equal keys in a chunk, into sums_ptr, or into partial_ptr if the run crosses a chunk boundary.

    keys_ptr: sorted keys; order_ptr: their tokens. partial_ptr: (chunks, 2, DIM) fp32, for the run at the start of a
    chunk, and for the run at its end if that is another one.
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
    keys_ptr, sums_ptr, partial_ptr, num_tokens, num_rows, num_chunks, skipped, DIM: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Adds the sums of a run that starts in a chunk and continues in the next ones."""
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
        first_sum = tl.load(partial_ptr + tl.cast(slot, tl.int64) * DIM + columns, mask=columns < DIM, other=0.0)
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        following = chunk + 1
        has_more = 1
        while has_more > 0:
            chunks = following + tl.arange(0, BLOCK_M)
            same = chunks < num_chunks
            same = same & (tl.load(keys_ptr + chunks * CHUNK, mask=same, other=-1) == key)
            here = same[:, None] & (columns < DIM)[None, :]
            total += tl.load(
                partial_ptr + (chunks.to(tl.int64) * 2 * DIM)[:, None] + columns[None, :], mask=here, other=0.0
            )
            has_more = tl.where(tl.sum(same.to(tl.int32), 0) == BLOCK_M, 1, 0)
            following += BLOCK_M
        total = first_sum + tl.sum(total, 0)
        sums_ptrs = sums_ptr + tl.cast(key, tl.int64) * DIM + columns
        tl.store(sums_ptrs, tl.cast(total, sums_ptr.dtype.element_ty), mask=columns < DIM)


@triton.jit(do_not_specialize=_COUNTS)
def _scatter_kernel(
    keys_ptr, dout_ptr, sums_ptr, num_tokens, num_rows, skipped, dout_row, scale, dropout, UNIT: tl.constexpr,
    DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Adds BLOCK_N columns of BLOCK_M tokens of dropout(dout) to the fp32 rows of their keys, by atomics."""
    tokens = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    first_column = tl.program_id(1) * BLOCK_N
    columns = first_column + tl.arange(0, BLOCK_N)
    keys = tl.load(keys_ptr + tokens, mask=tokens < num_tokens, other=-1).to(tl.int64)
    here = existing((keys >= 0) & (keys < num_rows) & (keys != skipped), columns, DIM, BLOCK_N)
    dout = _load_dout(dout_ptr, tokens, here, first_column, dout_row, dropout, UNIT, BLOCK_M, BLOCK_N)
    tl.atomic_add(row_ptrs(sums_ptr, keys, DIM, columns, 1), dout * scale, mask=here, sem="relaxed")


def why_unsupported(op_name: str, *, ids: Tensor, **arguments: Any) -> str | None:
    """Returns why the kernels don't support a call of embedding_fwd or _bwd, or None if they do."""
    if op_name == "embedding_fwd":
        weight, table = arguments["weight"], arguments["position_table"]
        dtypes = [weight.dtype] if table is None else [weight.dtype, table.dtype]
    else:
        dtypes = [arguments["dout"].dtype, arguments["dtype"]]
    return unsupported_dtype(*dtypes) or unsupported_device(ids)


def _token_tile(num_tokens: int, dim: int) -> tuple[int, int, int]:
    """Returns (BLOCK_M, BLOCK_N, num_warps) for a kernel that processes tokens in order."""
    block_n = min(1024, max(8, next_power_of_2(dim)))
    block_m = max(1, min(2048 // block_n, next_power_of_2(num_tokens)))
    return block_m, block_n, max(1, min(4, block_m * block_n // 512))


def embedding_fwd(
    ids: Tensor, weight: Tensor, position_table: Tensor | None, positions: Tensor | None, scale: float,
    padding_idx: int, dropout_p: float, dropout_seed: Tensor | None, atomics: bool,
) -> Tensor:  # fmt: skip
    """Implements `fastformer::embedding_fwd`; returns the sum after dropout. `atomics` is only used by backward."""
    num_tokens, dim = ids.numel(), weight.shape[1]
    out = weight.new_empty(*ids.shape, dim)
    if num_tokens == 0:
        return out
    weight = as_rows(weight)
    table = None if position_table is None else as_rows(position_table)
    unit = stride_unit(weight, table)
    block_m, block_n, num_warps = _token_tile(num_tokens, dim)
    launch(
        _embedding_fwd_kernel, (cdiv(num_tokens, block_m), cdiv(dim, block_n)),
        ids.contiguous(), weight, table, contiguous(positions), out, num_tokens, ids.shape[-1], weight.shape[0],
        0 if table is None else table.shape[0], weight.stride(0) // unit,
        0 if table is None else table.stride(0) // unit, scale, padding_idx, dropout_arguments(dropout_p, dropout_seed),
        UNIT=unit, DIM=dim, BLOCK_M=block_m, BLOCK_N=block_n, num_warps=num_warps, debug=True, sanitize_overflow=False,
    )  # fmt: skip
    return out


def _sum_by_key(
    keys: Tensor, order: Tensor, dout: Tensor, num_rows: int, scale: float, skipped: int, dropout: Dropout,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Returns (num_rows, dim): row k is the sum of rows order[i] of dropout(dout) for keys[i] == k. keys: sorted."""
    num_tokens, dim = dout.shape
    sums = dout.new_zeros(num_rows, dim, dtype=dtype)
    unit = stride_unit(dout)
    num_chunks = cdiv(num_tokens, CHUNK)
    partial = dout.new_empty(num_chunks, 2, dim, dtype=torch.float32)
    block_n = min(512, max(8, next_power_of_2(dim)))
    block_m = max(2, min(2048 // block_n, 16))
    column_blocks = cdiv(dim, block_n)
    launch(
        _sum_runs_kernel, (num_tokens, column_blocks),
        keys, order, dout, sums, partial, num_tokens, num_rows, skipped, dout.stride(0) // unit, scale, dropout,
        UNIT=unit, DIM=dim, CHUNK=CHUNK, BLOCK_M=block_m, BLOCK_N=block_n,
        num_warps=max(1, min(4, block_m * block_n // 256)),
    )  # fmt: skip
    if num_chunks > 1:
        launch(
            _sum_chunks_kernel, (num_chunks, column_blocks),
            keys, sums, partial, num_tokens, num_rows, num_chunks, skipped,
            DIM=dim, CHUNK=CHUNK, BLOCK_M=block_m, BLOCK_N=block_n, num_warps=4,
        )  # fmt: skip
    return sums


def _sum_by_atomics(
    keys: Tensor, dout: Tensor, num_rows: int, scale: float, skipped: int, dropout: Dropout, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Returns the result of `_sum_by_key` for keys in any order."""
    num_tokens, dim = dout.shape
    sums = dout.new_zeros(num_rows, dim, dtype=torch.float32)
    unit = stride_unit(dout)
    block_m, block_n, num_warps = _token_tile(num_tokens, dim)
    launch(
        _scatter_kernel, (cdiv(num_tokens, block_m), cdiv(dim, block_n)),
        keys.contiguous(), dout, sums, num_tokens, num_rows, skipped, dout.stride(0) // unit, scale, dropout,
        UNIT=unit, DIM=dim, BLOCK_M=block_m, BLOCK_N=block_n, num_warps=num_warps,
    )  # fmt: skip
    return sums.to(dtype)


def _sorted(indices: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (keys, order), sorted as int32 to halve the passes of a radix sort; stable, for reproducible sums."""
    return torch.sort(indices.reshape(-1).to(torch.int32), stable=True)


def embedding_bwd(
    dout: Tensor, ids: Tensor, positions: Tensor | None, num_embeddings: int, num_positions: int, scale: float,
    padding_idx: int, dropout_p: float, dropout_seed: Tensor | None, dtype: torch.dtype, atomics: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Implements `fastformer::embedding_bwd`; returns (dweight, dposition_table)."""
    num_tokens, dim = ids.numel(), dout.shape[-1]
    if num_tokens == 0:
        empty = dout.new_zeros(*((num_positions, dim) if num_positions else (0,)), dtype=dtype)
        return dout.new_zeros(num_embeddings, dim, dtype=dtype), empty
    dout = as_rows(dout)
    dropout = dropout_arguments(dropout_p, dropout_seed)
    if atomics:
        dweight = _sum_by_atomics(ids, dout, num_embeddings, scale, padding_idx, dropout, dtype)
    else:
        dweight = _sum_by_key(*_sorted(ids), dout, num_embeddings, scale, padding_idx, dropout, dtype)
    if num_positions == 0:
        return dweight, dout.new_empty(0, dtype=dtype)
    if positions is not None:
        if atomics:
            return dweight, _sum_by_atomics(positions, dout, num_positions, 1.0, -1, dropout, dtype)
        keys, order = _sorted(positions)
    else:
        seqlen = ids.shape[-1]
        order = torch.arange(num_tokens, device=ids.device).view(-1, seqlen).T.reshape(-1)
        keys = torch.arange(seqlen, dtype=torch.int32, device=ids.device).repeat_interleave(num_tokens // seqlen)
    return dweight, _sum_by_key(keys, order, dout, num_positions, 1.0, -1, dropout, dtype)
