"""Dropout, residual add and LayerNorm or RMSNorm: one pass over the rows in forward, and one in backward.

In forward, a program holds whole rows in registers. It reads x and the residual, applies dropout, writes the new
residual stream, computes the mean and then the variance of the centred values (E[s^2] - E[s]^2 would cancel), and
writes y. The norm is applied to the stream as it is stored, rounded, because backward only has that.

In backward, a fixed number of programs (two per SM, as many as its registers allow) stride over the rows and write both
input gradients. Each holds its sums for dweight and dbias in fp32 registers and writes them once. A second kernel adds
them for both parameters, always in the same order, so that gradients are reproducible to the last bit. PyTorch
differentiates rows so wide that they leave no registers for the sums.

Bytes per element in half dtypes: forward 4 (x, y), with a residual or dropout 8 (residual, stream); backward 6 (dy,
stream, dx), plus 2 for the stream's own gradient, plus 2 for dresidual if it differs from dx because of dropout or
dtypes. Partial sums: 8 bytes * dim * programs, written and read once, 1 MB at dim 512 on 132 SMs. FLOPs per element:
about 8 forward and 14 backward, and 12 more for dropout, so the kernels are memory-bound. Saved for backward: the
stream (which is the next op's input) and two fp32 numbers per row. fp32: all arithmetic, statistics, sums.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastformer.kernels._dropout import drop_tile
from fastformer.kernels._launch import (
    Launch,
    cdiv,
    contiguous,
    dropout_arguments,
    next_power_of_2,
    num_sms,
    stride_unit,
    unsupported_device,
    unsupported_dtype,
)
from fastformer.kernels._plans import Plan, planned
from fastformer.kernels._rows import as_rows, existing, load_rows, load_vector, row_ptrs, store_rows

WIDEST = 16384  # 32 elements per thread with 16 warps
# Backward also holds sums: its rows are narrower, and it reads at most so many bytes for a tile.
WIDEST_BACKWARD, MOST_BYTES = 8192, 65536

# Arguments whose values must not lead to another binary. Strides are in units of 8 elements if that divides them, which
# is all that 16-byte loads need to know.
_COUNTS = ["num_rows", "num_tiles", "num_partials", "strides", "dropout"]


@triton.jit(do_not_specialize=_COUNTS)
def _add_layer_norm_fwd_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, residual_out_ptr, mean_ptr, rstd_ptr, num_rows, strides, eps,
    dropout, RMS_NORM: tl.constexpr, UNIT: tl.constexpr, DIM: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Computes y, the stream and the statistics of BLOCK_M rows. strides: those of x and of the residual."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_N)
    real = rows < num_rows
    here = existing(real, columns, DIM, BLOCK_N)
    s = load_rows(x_ptr, rows, strides[0], columns, here, UNIT)
    if residual_ptr is not None:
        residual = tl.load(row_ptrs(residual_ptr, rows, strides[1], columns, UNIT), mask=here, other=0.0)
    s = drop_tile(s, rows, 0, dropout, BLOCK_M, BLOCK_N)
    if residual_ptr is not None:
        s += residual.to(tl.float32)
    if residual_out_ptr is not None:
        rounded = tl.cast(s, residual_out_ptr.dtype.element_ty)
        tl.store(row_ptrs(residual_out_ptr, rows, DIM, columns, 1), rounded, mask=here)
        s = rounded.to(tl.float32)
    centred = s
    if not RMS_NORM:
        mean = tl.div_rn(tl.sum(s, 1), tl.full((BLOCK_M,), DIM, dtype=tl.float32))
        centred = s - mean[:, None]
        if DIM != BLOCK_N:
            centred = tl.where(here, centred, 0.0)
        tl.store(mean_ptr + rows, mean, mask=real)
    variance = tl.div_rn(tl.sum(centred * centred, 1), tl.full((BLOCK_M,), DIM, dtype=tl.float32))
    rstd = tl.rsqrt(variance + eps)
    tl.store(rstd_ptr + rows, rstd, mask=real)
    y = centred * rstd[:, None]
    if weight_ptr is not None:
        y *= load_vector(weight_ptr, columns, DIM, BLOCK_N)
    if bias_ptr is not None:
        y += load_vector(bias_ptr, columns, DIM, BLOCK_N)
    store_rows(y_ptr, rows, DIM, columns, y, here)


@triton.jit
def _load_step(
    dy_ptr, dresidual_out_ptr, s_ptr, mean_ptr, rstd_ptr, rows, real, columns, here, strides, RMS_NORM: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """Returns (dy, the normalised stream, rstd, the stream's own stored gradient, if any) of a tile."""
    dy = load_rows(dy_ptr, rows, strides[0], columns, here, UNIT)
    normal = load_rows(s_ptr, rows, strides[2], columns, here, UNIT)
    dresidual_out = dy
    if dresidual_out_ptr is not None:
        dresidual_out = tl.load(row_ptrs(dresidual_out_ptr, rows, strides[1], columns, UNIT), mask=here, other=0.0)
    rstd = tl.load(rstd_ptr + rows, mask=real, other=0.0)[:, None]
    if not RMS_NORM:
        normal -= tl.load(mean_ptr + rows, mask=real, other=0.0)[:, None]
    # Columns beyond the row have the value -mean * rstd here. That is harmless: dy is 0 there, and ds is not stored.
    return dy, normal * rstd, rstd, dresidual_out


@triton.jit
def _store_step(
    ds, dresidual_out, dresidual_out_ptr, dx_ptr, dresidual_ptr, rows, columns, here, dropout,
    DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Writes a tile of both input gradients. `ds`: the part of the stream's gradient that comes from the norm."""
    if dresidual_out_ptr is not None:
        ds += dresidual_out.to(tl.float32)
    if dresidual_ptr is not None:
        store_rows(dresidual_ptr, rows, DIM, columns, ds, here)
    ds = drop_tile(ds, rows, 0, dropout, BLOCK_M, BLOCK_N)
    store_rows(dx_ptr, rows, DIM, columns, ds, here)


@triton.jit
def _store_partials(
    partial_ptr, dweight, dbias, part, num_parts, columns, SUM_WEIGHT: tl.constexpr, SUM_BIAS: tl.constexpr,
    DIM: tl.constexpr,
):  # fmt: skip
    """Writes sums over the rows of the tiles to partial_ptr (kinds, num_parts, DIM): dweight's, then dbias's."""
    if SUM_WEIGHT:
        tl.store(partial_ptr + part * DIM + columns, tl.sum(dweight, 0), mask=columns < DIM)
        part += num_parts
    if SUM_BIAS:
        tl.store(partial_ptr + part * DIM + columns, tl.sum(dbias, 0), mask=columns < DIM)


@triton.jit(do_not_specialize=_COUNTS)
def _add_layer_norm_bwd_kernel(
    dy_ptr, dresidual_out_ptr, s_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, dresidual_ptr, partial_ptr, num_rows,
    num_tiles, strides, dropout, RMS_NORM: tl.constexpr, SUM_WEIGHT: tl.constexpr, SUM_BIAS: tl.constexpr,
    UNIT: tl.constexpr, DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Computes both input gradients of every num_programs-th tile of BLOCK_M rows, and sums for the parameters.

    strides: those of dy, dresidual_out and s.
    """
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    columns = tl.arange(0, BLOCK_N)
    # With wider rows, the weight would take registers that the sums need; it is then read from L1.
    HOIST: tl.constexpr = BLOCK_N <= 2048
    if weight_ptr is not None and HOIST:
        weight = load_vector(weight_ptr, columns, DIM, BLOCK_N)
    # The sums are tiles, so that rows are summed across threads once and not in every step.
    dweight = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    dbias = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for tile in tl.range(program, num_tiles, num_programs, num_stages=STAGES):
        rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        real = rows < num_rows
        here = existing(real, columns, DIM, BLOCK_N)
        dy, normal, rstd, dresidual_out = _load_step(
            dy_ptr, dresidual_out_ptr, s_ptr, mean_ptr, rstd_ptr, rows, real, columns, here, strides, RMS_NORM, UNIT
        )
        if SUM_WEIGHT:
            dweight += dy * normal
        if SUM_BIAS:
            dbias += dy
        if weight_ptr is not None:
            if not HOIST:
                weight = load_vector(weight_ptr, columns, DIM, BLOCK_N)
            dy *= weight
        if RMS_NORM:
            ds = dy - normal * (tl.sum(dy * normal, 1) * (1.0 / DIM))[:, None]
        else:
            # One reduction of pairs has half the barriers of two reductions.
            products, sums = tl.split(tl.sum(tl.join(dy * normal, dy), 1) * (1.0 / DIM))
            ds = dy - normal * products[:, None] - sums[:, None]
        _store_step(
            ds * rstd, dresidual_out, dresidual_out_ptr, dx_ptr, dresidual_ptr, rows, columns, here, dropout, DIM,
            BLOCK_M, BLOCK_N,
        )  # fmt: skip
    _store_partials(partial_ptr, dweight, dbias, program, num_programs, columns, SUM_WEIGHT, SUM_BIAS, DIM)


@triton.jit(do_not_specialize=_COUNTS)
def _sum_partials_kernel(
    partial_ptr, dweight_ptr, dbias_ptr, num_partials, DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Adds the partial sums of BLOCK_N columns of a parameter's gradient; the second grid axis is the parameter."""
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    kind = tl.program_id(1)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, num_partials, BLOCK_M):
        partials = start + tl.arange(0, BLOCK_M)
        here = (partials < num_partials)[:, None] & (columns < DIM)[None, :]
        total += tl.load(
            partial_ptr + (kind * num_partials + partials)[:, None] * DIM + columns[None, :], mask=here, other=0.0
        )
    gradient = tl.sum(total, 0)
    if dweight_ptr is not None and dbias_ptr is not None:
        if kind == 0:
            tl.store(dweight_ptr + columns, tl.cast(gradient, dweight_ptr.dtype.element_ty), mask=columns < DIM)
        else:
            tl.store(dbias_ptr + columns, tl.cast(gradient, dbias_ptr.dtype.element_ty), mask=columns < DIM)
    elif dweight_ptr is not None:
        tl.store(dweight_ptr + columns, tl.cast(gradient, dweight_ptr.dtype.element_ty), mask=columns < DIM)
    else:
        tl.store(dbias_ptr + columns, tl.cast(gradient, dbias_ptr.dtype.element_ty), mask=columns < DIM)


class RowTile(NamedTuple):
    """The rows and columns that a program holds at once, and its number of warps."""

    block_m: int
    block_n: int
    num_warps: int


def row_tile(dim: int, num_rows: int) -> RowTile:
    """Returns a tile of whole rows with about 2048 elements, 16 per thread (more for the widest rows)."""
    block_n = max(8, next_power_of_2(dim))
    block_m = max(1, min(2048 // block_n, next_power_of_2(num_rows)))
    return RowTile(block_m, block_n, max(1, min(16, block_m * block_n // 512)))


def bytes_each(*tensors: Tensor | None) -> int:
    """Returns the bytes of an element of all tensors together."""
    return sum(t.element_size() for t in tensors if t is not None)


def backward_tile(dim: int, num_rows: int, loaded: int) -> RowTile:
    """Returns a row_tile with 8 elements per thread, or 16 small ones: each also needs two sums and a weight."""
    tile = row_tile(dim, num_rows)
    per_thread = 16 if dim > 2048 and tile.block_n * loaded <= 32768 else 8
    return tile._replace(num_warps=max(1, min(16, tile.block_m * tile.block_n // (32 * per_thread))))


def why_unsupported(op_name: str, **arguments: Tensor | None) -> str | None:
    """Returns why the kernels don't support a call of add_layer_norm_fwd or _bwd, or None if they do."""
    names = ("dy", "dresidual_out", "s", "weight") if op_name.endswith("_bwd") else ("x", "residual", "weight", "bias")
    x = arguments[names[0]]
    assert x is not None
    if (reason := unsupported_dtype(*(t.dtype for t in map(arguments.get, names) if t is not None))) is not None:
        return reason
    if x.shape[-1] > WIDEST:
        return f"rows of {x.shape[-1]} elements, more than {WIDEST}, don't fit a program's registers"
    if op_name.endswith("_bwd"):
        width = max(2048, next_power_of_2(x.shape[-1]))  # a tile of narrow rows has several
        loaded = width * bytes_each(x, arguments["s"], arguments["dresidual_out"])
        if width > WIDEST_BACKWARD or loaded > MOST_BYTES:
            return f"{loaded} bytes of {width} columns, and as many sums, don't fit a program's registers"
    return unsupported_device(x)


def _strides(unit: int, *tensors: Tensor | None) -> tuple[int, ...]:
    """Returns the strides of the rows in `unit`s."""
    return tuple(0 if t is None else t.stride(0) // unit for t in tensors)


def _is_copied(*tensors: Tensor | None) -> bool:
    """Returns whether the rows of any tensor have to be copied; otherwise kernels use its strides and address."""
    return any(t is not None and as_rows(t).data_ptr() != t.data_ptr() for t in tensors)


def plan_add_layer_norm_fwd(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, dropout_p: float,
    dropout_seed: Tensor | None, rms_norm: bool,
) -> Plan:  # fmt: skip
    """Plans `add_layer_norm_fwd` for calls of this geometry."""
    dim = x.shape[-1]
    num_rows = x.numel() // dim
    num_means = 0 if rms_norm else num_rows
    has_residual_out = residual is not None or dropout_p > 0.0
    seed, *drop = dropout_arguments(dropout_p, dropout_seed)
    drops = seed is not None
    tile = row_tile(dim, num_rows)
    is_copied = _is_copied(x, residual)
    x, residual = as_rows(x), None if residual is None else as_rows(residual)
    unit = stride_unit(x, residual)
    strides = _strides(unit, x, residual)
    launch = Launch(
        _add_layer_norm_fwd_kernel, (cdiv(num_rows, tile.block_m),),
        RMS_NORM=rms_norm, UNIT=unit, DIM=dim, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, num_warps=tile.num_warps,
    )  # fmt: skip

    def run(
        x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, _eps: float, _p: float,
        dropout_seed: Tensor | None, _rms_norm: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        stream = x if residual is None else residual
        residual_out = (
            torch.empty_like(stream, memory_format=torch.contiguous_format) if has_residual_out else stream.new_empty(0)
        )
        mean = x.new_empty(num_means, dtype=torch.float32)
        rstd = x.new_empty(num_rows, dtype=torch.float32)
        if is_copied:
            x, residual = as_rows(x), None if residual is None else as_rows(residual)
        if num_rows > 0:
            launch(
                x, residual, contiguous(weight), contiguous(bias), y, residual_out if has_residual_out else None,
                None if rms_norm else mean, rstd, num_rows, strides, eps,
                (contiguous(dropout_seed) if drops else None, *drop),
            )  # fmt: skip
        return y, residual_out, mean, rstd

    return run


def plan_add_layer_norm_bwd(
    dy: Tensor, dresidual_out: Tensor | None, s: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor,
    dropout_p: float, dropout_seed: Tensor | None, rms_norm: bool, has_bias: bool, x_dtype: torch.dtype,
) -> Plan:  # fmt: skip
    """Plans `add_layer_norm_bwd` for calls of this geometry."""
    dim = s.shape[-1]
    num_rows = s.numel() // dim
    same = dropout_p == 0.0 and x_dtype == s.dtype
    parameter_dtype = s.dtype if weight is None else weight.dtype
    dresidual_shape = (0,) if same else s.shape
    num_weights, num_biases = 0 if weight is None else dim, dim if has_bias else 0

    is_copied = _is_copied(dy, s, dresidual_out)
    dy, s = as_rows(dy), as_rows(s)
    dresidual_out = None if dresidual_out is None else as_rows(dresidual_out)
    unit = stride_unit(dy, s, dresidual_out)
    strides = _strides(unit, dy, dresidual_out, s)
    seed, *drop = dropout_arguments(dropout_p, dropout_seed)
    drops = seed is not None
    kinds = (weight is not None) + has_bias
    flags = {
        "RMS_NORM": rms_norm, "SUM_WEIGHT": weight is not None, "SUM_BIAS": has_bias, "UNIT": unit, "DIM": dim,
    }  # fmt: skip
    loaded = bytes_each(dy, s, dresidual_out)
    tile = backward_tile(dim, num_rows, loaded)
    num_tiles = cdiv(num_rows, tile.block_m)
    num_partials = min(num_tiles, num_sms(s.device) * (2 if tile.num_warps <= 8 else 1))
    # Two stages load the next rows into shared memory in the meantime. This requires that it is large enough on every
    # architecture, and that the masks of 8192 padded columns leave enough registers.
    is_small = loaded * tile.block_m * tile.block_n <= 49152 and (tile.block_n < 8192 or dim == tile.block_n)
    launch = Launch(
        _add_layer_norm_bwd_kernel, (num_partials,), **flags, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
        STAGES=2 if num_partials < num_tiles and is_small else 1, num_warps=tile.num_warps, maxnreg=128,
    )  # fmt: skip
    launch_sums = Launch(_sum_partials_kernel, (cdiv(dim, 32), kinds), DIM=dim, BLOCK_M=64, BLOCK_N=32, num_warps=4)
    partial_size = kinds * num_partials * dim

    def run(
        dy: Tensor, dresidual_out: Tensor | None, s: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor,
        _p: float, dropout_seed: Tensor | None, *_: object,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        dx = torch.empty_like(s, dtype=x_dtype, memory_format=torch.contiguous_format)
        dresidual = s.new_empty(dresidual_shape)
        new = s.new_empty if num_rows else s.new_zeros
        dweight, dbias = new(num_weights, dtype=parameter_dtype), new(num_biases, dtype=parameter_dtype)
        if num_rows == 0:
            return dx, dresidual, dweight, dbias
        if is_copied:
            dy, s = as_rows(dy), as_rows(s)
            dresidual_out = None if dresidual_out is None else as_rows(dresidual_out)
        statistics = None if rms_norm else mean, rstd
        outputs = dx, None if same else dresidual
        weight = contiguous(weight)
        dropout = contiguous(dropout_seed) if drops else None, *drop
        partial = s.new_empty(partial_size, dtype=torch.float32) if kinds else None
        launch(dy, dresidual_out, s, weight, *statistics, *outputs, partial, num_rows, num_tiles, strides, dropout)
        if kinds:
            launch_sums(partial, None if weight is None else dweight, dbias if has_bias else None, num_partials)
        return dx, dresidual, dweight, dbias

    return run


add_layer_norm_fwd = planned(plan_add_layer_norm_fwd)  # returns (y, residual_out, mean, rstd)
add_layer_norm_bwd = planned(plan_add_layer_norm_bwd)  # returns (dx, dresidual, dweight, dbias)
