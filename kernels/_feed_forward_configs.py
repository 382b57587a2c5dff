"""Which kernel computes the feed-forward network's first product, in which tiles: static tables, as for attention."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
from torch import Tensor

from fastformer.kernels._launch import architecture

GATES = ("swiglu", "geglu_tanh")  # activations of two products


class Config(NamedTuple):
    """A tile of the result, the depth of a step, and how a program runs.

    maxnreg: registers a thread at most. programs: 0 for a program a tile; else the grid is fixed, so many programs an
    SM, each with one tile after another.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    maxnreg: int | None = None
    programs: int = 0


# Whether the forward product runs as a fixed grid, each program with one tile after another, where that compiles well.
# Off unless the environment says so: no device has shown it faster yet.
PERSISTENT = os.environ.get("FASTFORMER_PERSISTENT_FEED_FORWARD") == "1"


class Row(NamedTuple):
    """Where the fused product is taken: its depth (dim, or out_dim in backward) at most this, rows at least that."""

    most_depth: int
    fewest_rows: int


# The kernel for the product, by (compute capability, bytes of an element); pairs that are not listed use cuBLAS. No row
# has been measured yet. They follow from bytes and FLOPs: a pass over the hidden layer costs as much as a product of
# depth 300 does (at 700 TFLOP/s and 4.8 TB/s), and that is what Triton's product loses to cuBLAS's at depth 1200 if it
# runs at 80 % of its rate. fp32 is cuBLAS's, which follows torch.backends.cuda.matmul.allow_tf32. The interpreter is
# (0, ...).
FUSED_GEMM = {
    (0, 4): Row(2**31, 0),
    (0, 2): Row(2**31, 0),
    (80, 2): Row(1024, 256),
    (86, 2): Row(512, 256),
    (89, 2): Row(512, 256),
    (90, 2): Row(1024, 256),
    (100, 2): Row(512, 256),
    (120, 2): Row(512, 256),
}


def fuses(x: Tensor, depth: int, rows: int) -> bool:
    """Whether the fused product is taken."""
    arch = architecture(x)
    row = FUSED_GEMM.get((arch, x.element_size()))
    if arch == 0 and x.dtype == torch.bfloat16:
        return False  # Triton's interpreter multiplies bfloat16 wrongly
    return row is not None and depth <= row.most_depth and rows >= row.fewest_rows


def config_of(x: Tensor, depth: int, rows: int, backward: bool, activation: str) -> Config:
    """The tile of the fused product."""
    config = _config_of(x, depth, rows, backward, activation)
    if not PERSISTENT or backward:
        return config
    arch = architecture(x)
    # Of sm_90 the two sums of a gate are not carried through the one loop: each product would be waited for. Of sm_80
    # gelu's spill (Triton 3.6.0).
    is_good = activation not in GATES if arch == 90 else arch == 80 and activation == "relu"
    if arch == 0 or (is_good and config.block_m == 128):
        return config._replace(programs=2, maxnreg=128)
    return config


def _config_of(x: Tensor, depth: int, rows: int, backward: bool, activation: str) -> Config:
    arch = architecture(x)
    if arch == 0:
        return Config(32, 64, 32, 4, 1)
    two_products = activation in GATES and not backward
    if x.element_size() == 4 or depth % 64:
        # Three products for one, or masks and narrow loads: small tiles, or the registers overflow.
        return Config(64, 32 if two_products else 64, 32, 4, 2)
    block_m = 64 if rows <= 2048 else 128  # enough tiles for every SM
    if arch in (90, 100):
        # Two programs an SM, so that one multiplies while the other activates: 128 registers a thread.
        block_n = 64 if two_products and arch == 90 else 128
        return Config(block_m, block_n, 64, block_m // 16, 3, 128 if block_m == 128 and arch == 90 else None)
    # On sm_120 ptxas keeps to 128 registers by itself, and spills.
    maxnreg = 168 if arch == 120 and block_m == 128 and not two_products else None
    return Config(block_m, 64 if two_products else 128, 32, block_m // 16, 3, maxnreg)
