"""The feed-forward network, beside linear, activation, dropout, linear."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.measure.case import Benchmark, Inputs, Shape, beside_eager
from fastformer.ops import feed_forward


def make_inputs(shape: Shape, device: str) -> Inputs:
    """Makes x (rows, dim) and the four parameters, scaled like those of a trained network."""
    rows, dim, hidden = shape["rows"], shape["dim"], shape["hidden_dim"]
    inputs = {
        "x": torch.randn(rows, dim, device=device),
        "weight1": torch.randn(hidden, dim, device=device) * dim**-0.5,
        "bias1": torch.randn(hidden, device=device) * 0.1,
        "weight2": torch.randn(dim, hidden, device=device) * hidden**-0.5,
        "bias2": torch.randn(dim, device=device) * 0.1,
    }
    inputs = {name: tensor.requires_grad_() for name, tensor in inputs.items()}
    return inputs | {"seed": torch.tensor([1, 2], device=device)}


def ours(x: Inputs, shape: Shape) -> torch.Tensor:
    """Calls fastformer.ops.feed_forward."""
    parameters = x["weight1"], x["bias1"], x["weight2"], x["bias2"]
    return feed_forward(
        x["x"], *parameters, activation=shape["activation"], dropout_p=shape["dropout_p"], dropout_seed=x["seed"]
    )


def eager(x: Inputs, shape: Shape) -> torch.Tensor:
    """Makes four calls of PyTorch."""
    hidden = F.dropout(getattr(F, shape["activation"])(F.linear(x["x"], x["weight1"], x["bias1"])), shape["dropout_p"])
    return F.linear(hidden, x["weight2"], x["bias2"])


def moved(shape: Shape, mode: str, itemsize: int) -> float:
    """Counts x, both weights, out; backward dout, x, both weights and their gradients. Hidden values don't count."""
    rows, weights = shape["rows"] * shape["dim"], 2 * shape["dim"] * shape["hidden_dim"]
    return float(itemsize * (2 * rows + weights if mode == "fwd" else 5 * rows + 3 * weights))


def _shapes(rows: int, *dims: int) -> list[dict[str, Any]]:
    return [
        {"rows": rows, "dim": dim, "hidden_dim": 4 * dim, "activation": activation, "dropout_p": dropout_p}
        for dim in dims
        for activation in ("relu", "gelu")
        for dropout_p in (0.0, 0.1)
    ]


BENCHMARKS = [
    Benchmark(
        name="feed_forward",
        shapes={
            "cpu": _shapes(2048, 512),
            "cuda": _shapes(8192, 512, 1024),
        },
        make_inputs=make_inputs,
        quick=2,
        flops=lambda s, mode: (4 if mode == "fwd" else 12) * s["rows"] * s["dim"] * s["hidden_dim"],
        moved=moved,
        **beside_eager(ours, eager),
    )
]
