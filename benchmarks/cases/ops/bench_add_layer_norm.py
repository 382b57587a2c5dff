"""Dropout, residual add and LayerNorm in one pass, beside the three separate operations."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from benchmarks.measure.case import Benchmark, Inputs, Shape, beside_eager
from fastformer.ops import add_layer_norm


def make_inputs(shape: Shape, device: str) -> Inputs:
    """Makes x and residual (rows, dim), weight and bias (dim,)."""
    rows, dim = shape["rows"], shape["dim"]
    sizes = {"x": (rows, dim), "residual": (rows, dim), "weight": (dim,), "bias": (dim,)}
    inputs = {name: torch.randn(size, device=device, requires_grad=True) for name, size in sizes.items()}
    return inputs | {"seed": torch.tensor([1, 2], device=device)}


def ours(x: Inputs, shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """Calls fastformer.ops.add_layer_norm: (y, the new residual)."""
    return add_layer_norm(
        x["x"], x["residual"], x["weight"], x["bias"], dropout_p=shape["dropout_p"], dropout_seed=x["seed"]
    )


def eager(x: Inputs, shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes dropout, the sum and F.layer_norm."""
    s = x["residual"] + F.dropout(x["x"], shape["dropout_p"])
    return F.layer_norm(s, s.shape[-1:], x["weight"], x["bias"]), s


def moved(shape: Shape, mode: str, itemsize: int) -> float:
    """Counts x, residual, y, s; backward dy, ds, s, dx and dresidual, of which the last two are one without dropout."""
    backward = 5 if shape["dropout_p"] else 4
    return shape["rows"] * shape["dim"] * itemsize * {"fwd": 4, "bwd": backward, "fwdbwd": 4 + backward}[mode]


BENCHMARKS = [
    Benchmark(
        name="add_layer_norm",
        shapes={
            "cpu": [{"rows": 4096, "dim": 512, "dropout_p": p} for p in (0.0, 0.1)],
            "cuda": [
                {"rows": r, "dim": d, "dropout_p": p}
                for r in (2048, 16384)
                for d in (512, 1024, 4096)
                for p in (0.0, 0.1)
            ],
        },
        make_inputs=make_inputs,
        modes=("fwd", "bwd", "fwdbwd"),
        quick=2,
        moved=moved,
        **beside_eager(ours, eager),
    )
]
