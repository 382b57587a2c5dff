"""Rotary positions in one pass, beside slices, four products and a concatenation."""

from __future__ import annotations

import torch

from benchmarks.measure.case import Benchmark, Inputs, Shape, beside_eager
from fastformer.ops import rotary, rotary_tables


def make_inputs(shape: Shape, device: str) -> Inputs:
    """Makes x (batch, seqlen, heads, head_dim), and tables for its positions."""
    size = (shape["batch"], shape["seqlen"], shape["heads"], shape["head_dim"])
    cos, sin = rotary_tables(shape["seqlen"], shape["head_dim"], device=device)
    return {"x": torch.randn(size, device=device, requires_grad=True), "cos": cos, "sin": sin}


def ours(x: Inputs, shape: Shape) -> torch.Tensor:
    """Calls fastformer.ops.rotary."""
    return rotary(x["x"], x["cos"], x["sin"])


def eager(x: Inputs, shape: Shape) -> torch.Tensor:
    """Rotates the two halves as models do (GPT-NeoX, Llama)."""
    first, second = x["x"].chunk(2, dim=-1)
    cos, sin = x["cos"][:, None], x["sin"][:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def moved(shape: Shape, mode: str, itemsize: int) -> float:
    """Counts a read and a write of every element; the tables stay in a cache."""
    tensor = shape["batch"] * shape["seqlen"] * shape["heads"] * shape["head_dim"] * itemsize
    return tensor * {"fwd": 2, "bwd": 2, "fwdbwd": 4}[mode]


BENCHMARKS = [
    Benchmark(
        name="rotary",
        shapes={
            "cpu": [{"batch": 4, "seqlen": 512, "heads": 8, "head_dim": 64}],
            "cuda": [
                {"batch": 4, "seqlen": n, "heads": h, "head_dim": d}
                for n in (512, 4096)
                for h, d in ((16, 64), (16, 128))
            ],
        },
        make_inputs=make_inputs,
        modes=("fwd", "bwd", "fwdbwd"),
        moved=moved,
        **beside_eager(ours, eager),
    )
]
