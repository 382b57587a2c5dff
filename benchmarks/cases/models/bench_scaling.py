"""The cost of a layer as sequences grow: table 1 of "Attention Is All You Need" (Vaswani et al. 2017), measured.

Self-attention over n positions of width d takes O(n^2 d) operations, or O(r n d) if restricted to the last r positions;
a recurrent layer takes O(n d^2), one position after another. Memory is not in the table: materialised scores take
O(n^2), fused attention O(n). All cases are forward and backward, with one sequence, and heads * head_dim = 512, the
width of the LSTM. `benchmarks.measure.scaling_fits` computes the exponents from the rows.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases.ops.bench_attention import sdpa
from benchmarks.measure.case import Benchmark, Inputs, Provider, Shape
from fastformer.ops import attention

HEADS, HEAD_DIM = 8, 64
WINDOW = 127  # keys before a query's own; with its own, a query sees 128


@dataclass(frozen=True)
class Growth:
    """The growth that the paper, or arithmetic, predicts for a layer: exponents of n, and the whole term."""

    time: float
    memory: float
    operations: str


def make_inputs(shape: Shape, device: str) -> Inputs:
    """Makes q, k, v (1, seqlen, heads, head_dim)."""
    size = (1, shape["seqlen"], shape["heads"], HEAD_DIM)
    return {name: torch.randn(size, device=device, requires_grad=True) for name in ("q", "k", "v")}


def ours(**options: Any) -> Provider:
    """Makes the provider of fastformer.ops.attention."""
    return lambda x, shape: attention(x["q"], x["k"], x["v"], **options)


@functools.cache
def materialised(visible: str) -> Provider:
    """Makes a provider like fastformer.baseline: scores, mask and weights, each in memory.

    `visible` is "all", "causal" or "window".
    """

    def run(x: Inputs, shape: Shape) -> Tensor:
        q, k, v = (x[name].transpose(1, 2) for name in "qkv")
        scores = q @ k.transpose(-2, -1) / HEAD_DIM**0.5
        if visible != "all":
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
            scores = scores.masked_fill(~(seen.triu(-WINDOW) if visible == "window" else seen), -1e9)
        return (scores.softmax(-1) @ v).transpose(1, 2)

    return run


def left_out(provider: str, shape: Shape) -> str | None:
    """Returns why a provider is omitted: its scores would take several times an ordinary memory. None: it runs."""
    if provider != "baseline" or shape["materialised"]:
        return None
    return (
        f"its scores alone are {4 * shape['heads'] * shape['seqlen'] ** 2 / 2**30:.0f} GiB in fp32, held several times"
    )


def checked(shape: Shape) -> Shape:
    """Returns the shape to check: one head, up to a length at which its scores take 128 MiB in fp64."""
    return {**shape, "heads": 1, "seqlen": min(shape["seqlen"], 4096)}


def make_lstm_inputs(shape: Shape, device: str) -> Inputs:
    """Makes x (1, seqlen, width), and the parameters of torch.nn's LSTM."""
    width, names = shape["width"], ("input", "hidden", "bias1", "bias2")
    inputs: Inputs = dict(zip(names, torch.nn.LSTM(width, width, device=device).parameters(), strict=True))
    return inputs | {"x": torch.randn(1, shape["seqlen"], width, device=device, requires_grad=True)}


def lstm(x: Inputs, shape: Shape) -> Tensor:
    """Calls the function behind torch.nn.LSTM, for one layer."""
    state = x["x"].new_zeros(1, 1, shape["width"])
    parameters = [x["input"], x["hidden"], x["bias1"], x["bias2"]]
    return torch.lstm(x["x"], (state, state), parameters, True, 1, 0.0, True, False, True)[0]


PROVIDERS: dict[str, Provider] = {
    "fastformer": ours(),
    "fastformer causal": ours(is_causal=True),
    "fastformer window": ours(window_size=(WINDOW, 0)),
    "sdpa": sdpa(),
    "sdpa causal": lambda x, shape: sdpa()(x, {**shape, "causal": True}),
    "baseline": materialised("all"),
}

EXPECTED = {
    "fastformer": Growth(2, 1, "O(n^2 d)"),
    "fastformer causal": Growth(2, 1, "O(n^2 d / 2)"),
    "fastformer window": Growth(1, 1, "O(r n d)"),
    "sdpa": Growth(2, 1, "O(n^2 d)"),
    "sdpa causal": Growth(2, 1, "O(n^2 d / 2)"),
    "baseline": Growth(2, 2, "O(n^2 d)"),
    "torch.nn.LSTM": Growth(1, 1, "O(n d^2)"),
}


def _lengths(longest: int) -> list[int]:
    return [128 << i for i in range((longest // 128).bit_length())]


def _shapes(longest: int, materialised_to: int) -> list[dict[str, Any]]:
    return [
        {"seqlen": n, "heads": HEADS, "head_dim": HEAD_DIM, "window": WINDOW, "materialised": n <= materialised_to}
        for n in _lengths(longest)
    ]


BENCHMARKS = [
    Benchmark(
        name="scaling",
        suite="scaling",
        # The scores of 8 heads are 512 MiB in fp32 at 4096, 8 GiB at 16384.
        shapes={"cpu": _shapes(8192, materialised_to=4096), "cuda": _shapes(65536, materialised_to=16384)},
        make_inputs=make_inputs,
        providers=PROVIDERS,
        baseline="fastformer",  # ratios are relative to full attention
        oracles={name: materialised(name.partition(" ")[2] or "all") for name in PROVIDERS},
        modes=("fwdbwd",),
        quick=4,
        tokens=lambda shape: shape["seqlen"],
        checked=checked,
        left_out=left_out,
    ),
    Benchmark(
        name="scaling_lstm",
        suite="scaling",
        shapes=dict.fromkeys(("cpu", "cuda"), [{"seqlen": n, "width": HEADS * HEAD_DIM} for n in _lengths(8192)]),
        make_inputs=make_lstm_inputs,
        providers={"torch.nn.LSTM": lstm},
        baseline="torch.nn.LSTM",
        modes=("fwdbwd",),
        dtypes=("float32",),  # a CPU has no bf16 kernel for it
        quick=4,
        tokens=lambda shape: shape["seqlen"],
        checked=lambda shape: {**shape, "seqlen": 128},
    ),
]
