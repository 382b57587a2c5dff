"""The feed-forward network: two products, and the elementwise work between them.

In general, cuBLAS computes all products, and an elementwise kernel does the rest. In forward it computes hidden =
dropout(activation(pre)), pre = x weight1^T + bias1. In backward it takes dhidden = dout weight2, differentiates the
activation, drops the same elements, sums dbias1 over its rows and, if forward saved the pre-activation, recomputes
hidden for dweight2.

For relu on sm_90, the only activation whose fused form a device has shown to be faster, each of these two kernels is
the epilogue of its product (`fuses` decides). The other four products (hidden weight2^T + bias2, dx, dweight1,
dweight2) have nothing to fuse.

FLOPs: 4 * rows * dim * hidden forward, 8 * rows * dim * hidden backward (one and a half times that with a gate). Bytes
of the hidden layer in device memory, per element of rows * hidden in half dtypes: if fused, forward writes hidden and
reads it once (4); backward reads the saved tensor (2), writes dpre and reads it twice (6), and reads hidden again (2).
Without fusion, relu takes 4 more in each. Saved for backward: relu's hidden layer, in which kept positive elements are
positive; for other activations, only the pre-activation. fp32: accumulators, activations, dbias1.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from fastformer.kernels._activations import activate, differentiate
from fastformer.kernels._dropout import drop_tile, keep_mask_tile, load_dropout
from fastformer.kernels._launch import (
    Dropout,
    architecture,
    cdiv,
    contiguous,
    dot_precision,
    dropout_arguments,
    launch,
    next_power_of_2,
    unsupported_device,
    unsupported_dtype,
    wrong_products,
)
from fastformer.kernels.add_layer_norm import _sum_partials_kernel

GATES = ("swiglu", "geglu_tanh")  # activations with two inputs
# The number of rows in the result of each product.
PRODUCTS = {
    "_linear_relu_kernel": lambda a: [a["BLOCK_M"]],
    "_linear_relu_backward_kernel": lambda a: [a["BLOCK_M"]],
}


def fuses(x: Tensor, depth: int, rows: int, activation: str) -> bool:
    """Returns whether a product is fused with the elementwise work. depth: dim, or out_dim in backward.

    On an H200, this was faster with dims of 512 and 1024 (8192 rows, bf16). fp32 uses cuBLAS, which obeys
    torch.backends.cuda.matmul.allow_tf32.
    """
    if activation != "relu":
        return False
    arch = architecture(x)
    if arch == 0:  # the interpreter, which multiplies bfloat16 wrongly
        is_measured = x.dtype != torch.bfloat16
    else:
        is_measured = arch == 90 and x.element_size() == 2 and depth <= 1024 and rows >= 256
    return is_measured and depth % tile_of(x, rows)["BLOCK_K"] == 0


def tile_of(x: Tensor, rows: int) -> dict[str, Any]:
    """Returns the tile of the fused product and the depth of a step, as keyword arguments of the kernels."""
    # Two programs per SM, so that one multiplies while the other activates: 128 registers per thread.
    block_m, block_n, block_k, num_warps, num_stages = 128, 128, 64, 8, 3
    maxnreg: int | None = 128
    if architecture(x) == 0:
        block_m, block_n, block_k = 32, 64, 16
    elif rows <= 2048:  # to have enough tiles for all SMs
        block_m, num_warps, maxnreg = 64, 4, None
    return {
        "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "PRECISION": dot_precision(x),
        "num_warps": num_warps, "num_stages": num_stages, "maxnreg": maxnreg,
    }  # fmt: skip


# Arguments whose values must not lead to another binary: Triton specialises on 1 and on multiples of 16.
_COUNTS = ["num_rows", "row_step", "dropout"]


@triton.jit
def _which_tile(pid, num_rows, num_columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Returns (row block, column block) of the pid-th tile: eight row blocks at a time, for locality in L2."""
    row_blocks = tl.cdiv(num_rows, BLOCK_M)
    column_blocks = tl.cdiv(num_columns, BLOCK_N)
    group = pid // (8 * column_blocks)
    first = group * 8
    height = tl.minimum(row_blocks - first, 8)
    inside = pid % (8 * column_blocks)
    return first + inside % height, inside // height


@triton.jit
def _inside(indices, size, BLOCK: tl.constexpr):
    """Returns indices to load without a mask: those beyond the matrix become 0, and their results are never stored."""
    return tl.max_contiguous(tl.multiple_of(tl.where(indices < size, indices, 0), BLOCK), BLOCK)


@triton.jit
def _product(
    a_ptr, b_ptr, rows, columns, depth, a_strides, b_strides, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Returns a tile of a b in fp32."""
    ks = tl.arange(0, BLOCK_K)
    # int64, because rows * stride exceeds 2**31 in large batches.
    a_ptrs = a_ptr + rows.to(tl.int64)[:, None] * a_strides[0] + ks[None, :] * a_strides[1]
    b_ptrs = b_ptr + ks[:, None] * b_strides[0] + columns.to(tl.int64)[None, :] * b_strides[1]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for _ in range(0, depth, BLOCK_K):
        acc = tl.dot(tl.load(a_ptrs), tl.load(b_ptrs), acc, input_precision=PRECISION)
        a_ptrs += BLOCK_K * a_strides[1]
        b_ptrs += BLOCK_K * b_strides[0]
    return acc


@triton.jit
def _halves(tile, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Returns the left and the right half of a tile's columns; no element moves between threads."""
    return tl.split(tl.permute(tl.reshape(tile, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))


@triton.jit
def _quarters(tile, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Splits the columns of a tile into four parts, because whole tiles of all operands don't fit into registers."""
    left, right = _halves(tile, BLOCK_M, BLOCK_N)
    left0, left1 = _halves(left, BLOCK_M, BLOCK_N // 2)
    right0, right1 = _halves(right, BLOCK_M, BLOCK_N // 2)
    return left0, left1, right0, right1


@triton.jit(do_not_specialize=_COUNTS)
def _linear_relu_kernel(
    x_ptr, weight_ptr, bias_ptr, hidden_ptr, dropout, num_rows, hidden_dim, depth, x_strides, weight_strides,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes hidden = dropout(relu(x weight^T + bias))."""
    row_block, column_block = _which_tile(tl.program_id(0), num_rows, hidden_dim, BLOCK_M, BLOCK_N)
    rows = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = column_block * BLOCK_N + tl.arange(0, BLOCK_N)
    pre = _product(
        x_ptr, weight_ptr, _inside(rows, num_rows, BLOCK_M), _inside(columns, hidden_dim, BLOCK_N), depth,
        x_strides, (weight_strides[1], weight_strides[0]), BLOCK_M, BLOCK_N, BLOCK_K, PRECISION,
    )  # fmt: skip
    if bias_ptr is not None:
        pre += tl.load(bias_ptr + columns, mask=columns < hidden_dim, other=0.0).to(tl.float32)[None, :]
    hidden = drop_tile(activate(pre, pre, "relu"), rows, column_block * BLOCK_N, dropout, BLOCK_M, BLOCK_N)
    here = (rows < num_rows)[:, None] & (columns < hidden_dim)[None, :]
    ptrs = hidden_ptr + rows.to(tl.int64)[:, None] * hidden_dim + columns[None, :]
    tl.store(ptrs, hidden.to(hidden_ptr.dtype.element_ty), mask=here)


@triton.jit
def _load_saved(saved_ptr, rows64, columns, here, hidden_dim, ACTIVATION: tl.constexpr):
    """Loads (pre, up) of a tile as fp32. For relu, pre is the hidden layer; without a gate, up is pre."""
    if ACTIVATION == "swiglu" or ACTIVATION == "geglu_tanh":
        ptrs = saved_ptr + rows64[:, None] * (2 * hidden_dim) + columns[None, :]
        pre = tl.load(ptrs, mask=here, other=0.0).to(tl.float32)
        return pre, tl.load(ptrs + hidden_dim, mask=here, other=0.0).to(tl.float32)
    else:
        ptrs = saved_ptr + rows64[:, None] * hidden_dim + columns[None, :]
        pre = tl.load(ptrs, mask=here, other=0.0).to(tl.float32)
        return pre, pre


@triton.jit
def _differentiate_tile(
    dhidden, pre, up, dpre_ptr, hidden_ptr, dropout, rows, first_column, columns, here, hidden_dim,
    ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Stores dpre and, except for relu, hidden of a tile. Returns (dpre, dup) in fp32, zero outside the matrix."""
    dtype = dpre_ptr.dtype.element_ty
    rows64 = rows.to(tl.int64)
    drawn = load_dropout(dropout)
    if dropout[0] is not None:
        if ACTIVATION == "relu":
            # An element that is positive after dropout was kept, so the mask need not be generated again.
            dhidden *= drawn[4]
        else:
            keep = keep_mask_tile(rows, first_column, 0, drawn, BLOCK_M, BLOCK_N)
            dhidden = tl.where(keep, dhidden * drawn[4], 0.0)
    hidden, dpre, dup = differentiate(dhidden, pre, up, ACTIVATION)
    dpre = tl.where(here, dpre, 0.0)
    width = hidden_dim
    if ACTIVATION == "swiglu" or ACTIVATION == "geglu_tanh":
        width = 2 * hidden_dim
    ptrs = dpre_ptr + rows64[:, None] * width + columns[None, :]
    tl.store(ptrs, dpre.to(dtype), mask=here)
    if ACTIVATION == "swiglu" or ACTIVATION == "geglu_tanh":
        dup = tl.where(here, dup, 0.0)
        tl.store(ptrs + hidden_dim, dup.to(dtype), mask=here)
    if ACTIVATION != "relu":
        if dropout[0] is not None:
            hidden = tl.where(keep, hidden * drawn[4], 0.0)
        tl.store(hidden_ptr + rows64[:, None] * hidden_dim + columns[None, :], hidden.to(dtype), mask=here)
    return dpre, dup


@triton.jit
def _store_dbias(dbias_ptr, part, dbias, dbias_up, columns, hidden_dim, ACTIVATION: tl.constexpr):
    """Writes sums over some rows to row `part` of the partial sums."""
    width = hidden_dim
    if ACTIVATION == "swiglu" or ACTIVATION == "geglu_tanh":
        width = 2 * hidden_dim
    ptrs = dbias_ptr + tl.cast(part, tl.int64) * width + columns
    tl.store(ptrs, dbias, mask=columns < hidden_dim)
    if ACTIVATION == "swiglu" or ACTIVATION == "geglu_tanh":
        tl.store(ptrs + hidden_dim, dbias_up, mask=columns < hidden_dim)


@triton.jit(do_not_specialize=_COUNTS)
def _linear_relu_backward_kernel(
    dout_ptr, weight_ptr, saved_ptr, dpre_ptr, dbias_ptr, dropout, num_rows, hidden_dim, depth, dout_strides,
    weight_strides, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes a tile of dhidden = dout weight, dpre from it, and its sum over rows, a row of dbias."""
    row_block, column_block = _which_tile(tl.program_id(0), num_rows, hidden_dim, BLOCK_M, BLOCK_N)
    rows = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = column_block * BLOCK_N + tl.arange(0, BLOCK_N)
    dhidden = _product(
        dout_ptr, weight_ptr, _inside(rows, num_rows, BLOCK_M), _inside(columns, hidden_dim, BLOCK_N), depth,
        dout_strides, weight_strides, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION,
    )  # fmt: skip
    QUARTER: tl.constexpr = BLOCK_N // 4
    quarters = _quarters(dhidden, BLOCK_M, BLOCK_N)
    for part in tl.static_range(4):
        first = column_block * BLOCK_N + part * QUARTER
        columns = first + tl.arange(0, QUARTER)
        here = (rows < num_rows)[:, None] & (columns < hidden_dim)[None, :]
        hidden, up = _load_saved(saved_ptr, rows.to(tl.int64), columns, here, hidden_dim, "relu")
        dpre, dup = _differentiate_tile(
            quarters[part], hidden, up, dpre_ptr, None, dropout, rows, first, columns, here, hidden_dim, "relu",
            BLOCK_M, QUARTER,
        )  # fmt: skip
        if dbias_ptr is not None:
            _store_dbias(dbias_ptr, row_block, tl.sum(dpre, 0), tl.sum(dup, 0), columns, hidden_dim, "relu")


@triton.jit(do_not_specialize=_COUNTS)
def _activation_kernel(
    pre_ptr, hidden_ptr, dropout, num_rows, hidden_dim, ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Computes hidden = dropout(activation(pre)) after a cuBLAS product; hidden_ptr may be pre_ptr."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    first_column = tl.program_id(1) * BLOCK_N
    columns = first_column + tl.arange(0, BLOCK_N)
    here = (rows < num_rows)[:, None] & (columns < hidden_dim)[None, :]
    rows64 = rows.to(tl.int64)
    pre, up = _load_saved(pre_ptr, rows64, columns, here, hidden_dim, ACTIVATION)
    hidden = activate(pre, up, ACTIVATION)
    hidden = drop_tile(hidden, rows, first_column, dropout, BLOCK_M, BLOCK_N)
    ptrs = hidden_ptr + rows64[:, None] * hidden_dim + columns[None, :]
    tl.store(ptrs, hidden.to(hidden_ptr.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=_COUNTS)
def _activation_backward_kernel(
    dhidden_ptr, saved_ptr, dpre_ptr, hidden_ptr, dbias_ptr, dropout, num_rows, row_step, hidden_dim,
    ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Computes dpre (and hidden) of row_step rows after a cuBLAS product, and the sum over rows, a row of dbias.

    dpre_ptr or hidden_ptr may be dhidden_ptr: each element is read before it is written, by the same thread.
    """
    first_column = tl.program_id(1) * BLOCK_N
    columns = first_column + tl.arange(0, BLOCK_N)
    first = tl.program_id(0) * row_step
    last = tl.minimum(first + row_step, num_rows)
    dbias = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    dbias_up = dbias
    for start in range(first, last, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        here = (rows < last)[:, None] & (columns < hidden_dim)[None, :]
        rows64 = rows.to(tl.int64)
        pre, up = _load_saved(saved_ptr, rows64, columns, here, hidden_dim, ACTIVATION)
        ptrs = dhidden_ptr + rows64[:, None] * hidden_dim + columns[None, :]
        dhidden = tl.load(ptrs, mask=here, other=0.0).to(tl.float32)
        dpre, dup = _differentiate_tile(
            dhidden, pre, up, dpre_ptr, hidden_ptr, dropout, rows, first_column, columns, here,
            hidden_dim, ACTIVATION, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        dbias += dpre
        if ACTIVATION == "swiglu" or ACTIVATION == "geglu_tanh":
            dbias_up += dup
    if dbias_ptr is not None:
        part = tl.program_id(0)
        _store_dbias(dbias_ptr, part, tl.sum(dbias, 0), tl.sum(dbias_up, 0), columns, hidden_dim, ACTIVATION)


def _elementwise_block(hidden_dim: int) -> tuple[int, int]:
    block_n = min(256, max(16, next_power_of_2(hidden_dim)))
    return 2048 // block_n, block_n


# The programs of the elementwise backward kernel: several per SM, but few rows of partial sums for dbias.
ELEMENTWISE_PROGRAMS = 2048


def _activated(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, dropout: Dropout, needs_saved: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns (hidden, saved): dropout(activation(x weight^T + bias)), and the tensor for backward, or (0,)."""
    num_rows, depth = x.shape
    hidden_dim = weight.shape[0] // 2 if activation in GATES else weight.shape[0]
    if not fuses(x, depth, num_rows, activation):
        product = F.linear(x, weight, bias)
        in_place = activation == "relu" or not (needs_saved or activation in GATES)
        hidden = product if in_place else x.new_empty(num_rows, hidden_dim)
        block_m, block_n = _elementwise_block(hidden_dim)
        if hidden.numel():
            launch(
                _activation_kernel, (cdiv(num_rows, block_m), cdiv(hidden_dim, block_n)),
                product, hidden, dropout, num_rows, hidden_dim,
                ACTIVATION=activation, BLOCK_M=block_m, BLOCK_N=block_n, num_warps=4,
            )  # fmt: skip
        return hidden, product if needs_saved else x.new_empty(0)
    hidden = x.new_empty(num_rows, hidden_dim)
    tile = tile_of(x, num_rows)
    programs = cdiv(num_rows, tile["BLOCK_M"]) * cdiv(hidden_dim, tile["BLOCK_N"])
    if hidden.numel():
        launch(
            _linear_relu_kernel, (programs,), x, weight, contiguous(bias), hidden, dropout, num_rows, hidden_dim, depth,
            x.stride(), weight.stride(), **tile,
        )  # fmt: skip
    return hidden, hidden if needs_saved else x.new_empty(0)


def _activated_backward(
    dout: Tensor, weight: Tensor, saved: Tensor, activation: str, dropout: Dropout, has_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns (dpre, hidden, dbias) from dhidden = dout weight; dbias is (0,) without a bias."""
    num_rows, depth = dout.shape
    hidden_dim, columns = weight.shape[1], saved.shape[1]
    fused = fuses(dout, depth, num_rows, activation)
    tile = tile_of(dout, num_rows)
    if fused:
        row_step = tile["BLOCK_M"]
        dhidden = None
    else:
        block_m, block_n = _elementwise_block(hidden_dim)
        most = max(1, min(cdiv(num_rows, block_m), ELEMENTWISE_PROGRAMS // max(1, cdiv(hidden_dim, block_n))))
        row_step = max(block_m, cdiv(cdiv(num_rows, most), block_m) * block_m)
        dhidden = torch.mm(dout, weight)
    parts = cdiv(num_rows, row_step)
    dbias = dout.new_empty((parts, columns), dtype=torch.float32) if has_bias else None
    # dpre overwrites cuBLAS's dhidden. With a gate, dpre is twice as wide, so hidden does.
    dpre = dout.new_empty(num_rows, columns) if dhidden is None or activation in GATES else dhidden
    hidden = saved
    if activation != "relu":
        hidden = dhidden if dhidden is not None and activation in GATES else dout.new_empty(num_rows, hidden_dim)
    if fused and dpre.numel():
        launch(
            _linear_relu_backward_kernel, (parts * cdiv(hidden_dim, tile["BLOCK_N"]),), dout, weight, saved, dpre,
            dbias, dropout, num_rows, hidden_dim, depth, dout.stride(), weight.stride(), **tile,
        )  # fmt: skip
    elif dpre.numel():
        launch(
            _activation_backward_kernel, (parts, cdiv(hidden_dim, block_n)), dhidden, saved, dpre,
            None if activation == "relu" else hidden, dbias, dropout, num_rows, row_step, hidden_dim,
            ACTIVATION=activation, BLOCK_M=block_m, BLOCK_N=block_n, num_warps=4,
        )  # fmt: skip
    total = dout.new_empty(0 if dbias is None else columns)
    if dbias is not None and columns:
        launch(
            _sum_partials_kernel, (cdiv(columns, 32), 1), dbias, total, None, parts,
            DIM=columns, BLOCK_M=64, BLOCK_N=32, num_warps=4,
        )  # fmt: skip
    return dpre, hidden, total


def why_unsupported(op_name: str, *, x: Tensor, **arguments: object) -> str | None:
    """Returns why the kernels don't support a call of feed_forward_fwd or _bwd, or None if they do."""
    if (reason := unsupported_dtype(x.dtype)) is not None:
        return reason
    if any(isinstance(a, Tensor) and a.is_floating_point() and a.dtype != x.dtype for a in arguments.values()):
        return "the inputs differ in dtype"
    return wrong_products(x) or unsupported_device(x)


def feed_forward_fwd(
    x: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, bias2: Tensor | None, activation: str,
    dropout_p: float, dropout_seed: Tensor | None, needs_saved: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Implements `fastformer::feed_forward_fwd`; returns (out, saved)."""
    rows = x.reshape(-1, x.shape[-1])
    dropout = dropout_arguments(dropout_p, dropout_seed)
    hidden, saved = _activated(rows, weight1, bias1, activation, dropout, needs_saved)
    return F.linear(hidden, weight2, bias2).view(*x.shape[:-1], weight2.shape[0]), saved


def _weight_gradient(dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Returns dy^T x: contiguous for a contiguous weight, else (the weight is a transposed view) a transposed view."""
    return torch.mm(dy.T, x) if weight.is_contiguous() else torch.mm(x.T, dy).T


def feed_forward_bwd(
    dout: Tensor, x: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, saved: Tensor, activation: str,
    dropout_p: float, dropout_seed: Tensor | None, has_bias2: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Implements `fastformer::feed_forward_bwd`; returns (dx, dweight1, dbias1, dweight2, dbias2)."""
    rows, drows = x.reshape(-1, x.shape[-1]), dout.reshape(-1, dout.shape[-1])
    dropout = dropout_arguments(dropout_p, dropout_seed)
    dpre, hidden, dbias1 = _activated_backward(drows, weight2, saved, activation, dropout, bias1 is not None)
    return (
        torch.mm(dpre, weight1).view(x.shape),
        _weight_gradient(dpre, rows, weight1),
        dbias1,
        _weight_gradient(drows, hidden, weight2),
        drows.sum(0) if has_bias2 else x.new_empty(0),
    )
