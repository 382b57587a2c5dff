"""The best tokens of a vocabulary for the rows of a decode step, beside logits in memory."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from benchmarks.measure.case import Benchmark, Inputs, Shape, beside_eager, on_reference
from fastformer.ops import linear_topk


def make_inputs(shape: Shape, device: str) -> Inputs:
    """Makes x (rows, dim) and weight (vocab_size, dim)."""
    rows, dim, vocab_size = shape["rows"], shape["dim"], shape["vocab_size"]
    return {
        "x": torch.randn(rows, dim, device=device),
        "weight": torch.randn(vocab_size, dim, device=device) * dim**-0.5,
    }


def ours(x: Inputs, shape: Shape) -> torch.Tensor:
    """Calls fastformer.ops.linear_topk. The indices are omitted: of equal values, any index is correct."""
    return linear_topk(x["x"], x["weight"], shape["k"], log_probs=shape["k"] > 1).values


def eager(x: Inputs, shape: Shape) -> torch.Tensor:
    """Computes F.linear and topk, for k above 1 of log_softmax on fp32 logits, as a beam search needs them."""
    logits = F.linear(x["x"], x["weight"])
    if shape["k"] == 1:
        values = logits.max(-1, keepdim=True).values
        return values if values.dtype == torch.float64 else values.float()
    log_probs = (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(-1)
    return log_probs.topk(shape["k"]).values


BENCHMARKS = [
    Benchmark(
        name="linear_topk",
        shapes={
            device: [
                {"rows": rows, "dim": dim, "vocab_size": vocab_size, "k": k}
                for dim, vocab_size in sizes
                for rows in (64, 256, 16, 4, 1)
                for k in (1, 8)
            ]
            for device, sizes in {
                "cpu": ((256, 6256), (512, 32000)),
                "cuda": ((512, 32000), (4096, 128000)),
            }.items()
        },
        make_inputs=make_inputs,
        modes=("fwd",),
        flops=lambda s, mode: 2 * s["rows"] * s["dim"] * s["vocab_size"],
        moved=lambda s, mode, itemsize: (s["rows"] + s["vocab_size"]) * s["dim"] * itemsize,
        **beside_eager(ours, eager, **{"fastformer reference": on_reference(ours)}),  # the reference runs on GPUs
    )
]
