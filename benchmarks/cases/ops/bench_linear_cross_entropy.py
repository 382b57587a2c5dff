"""The loss over a vocabulary, in chunks, beside logits in memory."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from benchmarks.measure.case import Benchmark, Inputs, Shape, beside_eager
from fastformer.ops import linear_cross_entropy


def make_inputs(shape: Shape, device: str) -> Inputs:
    """Makes x (rows, dim), weight (vocab_size, dim), and target (rows,) with a tenth ignored."""
    rows, dim, vocab_size = shape["rows"], shape["dim"], shape["vocab_size"]
    target = torch.randint(vocab_size, (rows,), device=device)
    target[::10] = -100
    return {
        "x": torch.randn(rows, dim, device=device, requires_grad=True),
        "weight": (torch.randn(vocab_size, dim, device=device) * dim**-0.5).requires_grad_(),
        "target": target,
    }


def ours(x: Inputs, shape: Shape) -> torch.Tensor:
    """Calls fastformer.ops.linear_cross_entropy."""
    return linear_cross_entropy(x["x"], x["weight"], x["target"], label_smoothing=0.1)


def eager(x: Inputs, shape: Shape) -> torch.Tensor:
    """Computes F.linear, and F.cross_entropy on fp32 logits."""
    logits = F.linear(x["x"], x["weight"])
    return F.cross_entropy(
        logits if logits.dtype == torch.float64 else logits.float(), x["target"], label_smoothing=0.1
    )


def flops(shape: Shape, mode: str) -> float:
    """Counts the products for logits, dx and dweight, of the rows that count."""
    return 6.0 * (shape["rows"] - -(-shape["rows"] // 10)) * shape["dim"] * shape["vocab_size"]


def moved(shape: Shape, mode: str, itemsize: int) -> float:
    """Counts x and weight, dx and dweight; logits don't count."""
    return 2.0 * (shape["rows"] + shape["vocab_size"]) * shape["dim"] * itemsize


BENCHMARKS = [
    Benchmark(
        name="linear_cross_entropy",
        shapes={
            "cpu": [
                {"rows": 1024, "dim": 512, "vocab_size": 8000},
                {"rows": 4096, "dim": 512, "vocab_size": 32000},
            ],
            "cuda": [
                {"rows": 8192, "dim": 512, "vocab_size": 32000},
                {"rows": 4096, "dim": 4096, "vocab_size": 128000},
            ],
        },
        make_inputs=make_inputs,
        modes=("fwdbwd",),
        flops=flops,
        moved=moved,
        **beside_eager(ours, eager),
    )
]
