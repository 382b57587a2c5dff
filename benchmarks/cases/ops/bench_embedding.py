"""Gather, scale, position and dropout in one pass, beside the separate steps."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from benchmarks.measure.case import Benchmark, Inputs, Shape, beside_eager
from fastformer.ops import embedding, sinusoidal_positions


def make_inputs(shape: Shape, device: str) -> Inputs:
    """Makes ids (batch, seqlen), weight (vocab_size, dim) and the position table."""
    return {
        "ids": torch.randint(1, shape["vocab_size"], (shape["batch"], shape["seqlen"]), device=device),
        "weight": torch.randn(shape["vocab_size"], shape["dim"], device=device, requires_grad=True),
        "table": sinusoidal_positions(shape["seqlen"], shape["dim"]).to(device),
        "seed": torch.tensor([1, 2], device=device),
    }


def ours(x: Inputs, shape: Shape) -> torch.Tensor:
    """Calls fastformer.ops.embedding."""
    return embedding(
        x["ids"], x["weight"], position_table=x["table"], scale=shape["dim"] ** 0.5, padding_idx=0,
        dropout_p=shape["dropout_p"], dropout_seed=x["seed"],
    )  # fmt: skip


def eager(x: Inputs, shape: Shape) -> torch.Tensor:
    """Computes F.embedding, a product, a sum and F.dropout."""
    rows = F.embedding(x["ids"], x["weight"], padding_idx=0) * shape["dim"] ** 0.5
    return F.dropout(rows + x["table"], shape["dropout_p"])


def moved(shape: Shape, mode: str, itemsize: int) -> float:
    """Counts a row of weight and of out for each token; backward, dout and the gradient of the whole weight."""
    tokens = shape["batch"] * shape["seqlen"]
    rows = 2 * tokens if mode == "fwd" else 3 * tokens + shape["vocab_size"]
    return float(rows * shape["dim"] * itemsize)


BENCHMARKS = [
    Benchmark(
        name="embedding",
        shapes={
            "cpu": [{"batch": 64, "seqlen": 32, "dim": 512, "vocab_size": 8000, "dropout_p": p} for p in (0.1, 0.0)],
            "cuda": [{"batch": 64, "seqlen": 256, "dim": 512, "vocab_size": 32000, "dropout_p": p} for p in (0.1, 0.0)],
        },
        make_inputs=make_inputs,
        moved=moved,
        **beside_eager(ours, eager),
    )
]
