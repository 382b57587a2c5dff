"""The kernel and tiles for the first product of the feed-forward network: static tables, as for attention."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastformer.kernels._launch import architecture

GATES = ("swiglu", "geglu_tanh")  # activations with two inputs


class FfnConfig(NamedTuple):
    """The tile of the result, the depth of a step, and how programs run."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    maxnreg: int | None = None  # the most registers per thread


class FfnRow(NamedTuple):
    """When the fused product is used: its largest depth (dim, or out_dim in backward) and smallest number of rows."""

    most_depth: int
    fewest_rows: int


# The kernel for the product, by (compute capability, bytes of an element). Other pairs use cuBLAS. No row has been
# measured yet; they follow from bytes and FLOPs. A pass over the hidden layer costs as much as a product of depth 300
# (at 700 TFLOP/s and 4.8 TB/s), which is also what Triton's product loses against cuBLAS's at depth 1200 if it runs at
# 80 % of its speed. fp32 uses cuBLAS, which obeys torch.backends.cuda.matmul.allow_tf32. (0, ...) is the interpreter.
FUSED_GEMM = {
    (0, 4): FfnRow(2**31, 0),
    (0, 2): FfnRow(2**31, 0),
    (80, 2): FfnRow(1024, 256),
    (86, 2): FfnRow(512, 256),
    (89, 2): FfnRow(512, 256),
    (90, 2): FfnRow(1024, 256),
    (100, 2): FfnRow(512, 256),
    (120, 2): FfnRow(512, 256),
}


def fuses(x: Tensor, depth: int, rows: int) -> bool:
    """Returns whether the fused product is used."""
    arch = architecture(x)
    row = FUSED_GEMM.get((arch, x.element_size()))
    if arch == 0 and x.dtype == torch.bfloat16:
        return False  # Triton's interpreter multiplies bfloat16 wrongly
    return row is not None and depth <= row.most_depth and rows >= row.fewest_rows


def config_of(x: Tensor, depth: int, rows: int, backward: bool, activation: str) -> FfnConfig:
    """Returns the tile of the fused product."""
    arch = architecture(x)
    if arch == 0:
        return FfnConfig(32, 64, 32, 4, 1)
    two_products = activation in GATES and not backward
    if x.element_size() == 4 or depth % 64:
        # Three products instead of one, or masks and narrow loads: larger tiles would spill.
        return FfnConfig(64, 32 if two_products else 64, 32, 4, 2)
    block_m = 64 if rows <= 2048 else 128  # to have enough tiles for all SMs
    if arch in (90, 100):
        # Two programs per SM, so that one multiplies while the other activates: 128 registers per thread.
        block_n = 64 if two_products and arch == 90 else 128
        return FfnConfig(block_m, block_n, 64, block_m // 16, 3, 128 if block_m == 128 and arch == 90 else None)
    # On sm_120, ptxas would use at most 128 registers and spill.
    maxnreg = 168 if arch == 120 and block_m == 128 and not two_products else None
    return FfnConfig(block_m, 64 if two_products else 128, 32, block_m // 16, 3, maxnreg)
