"""nn.TransformerEncoder at sizes where the overhead of a call counts: torch.nn's, accelerated, and fastformer.nn's.

The stacks are post-norm with `batch_first`, have the same weights, and get no mask. A timed call does only the work:
the module and its list of parameters are looked up by size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import fastformer
from benchmarks.cases.models.bench_modules import flops_of, make_rival
from benchmarks.measure.case import Benchmark, Inputs, Provider, Shape

THREADS = (1, 2)
# (dim, layers, batch, seqlen), from the smallest up.
SIZES = (
    (32, 2, 1, 8),
    (64, 2, 1, 16),
    (64, 4, 32, 32),
    (128, 4, 16, 64),
    (256, 6, 8, 128),
    (512, 6, 1, 32),
    (512, 6, 4, 256),
)
KINDS = ("fastformer", "accelerated", "torch.nn")


class TimedStack(NamedTuple):
    """A module, and the tensors that its training step differentiates by."""

    module: nn.Module
    parameters: list[nn.Parameter]


def make(kind: str, shape: Shape, *, training: bool, dtype: torch.dtype) -> TimedStack:
    """Makes the stack of one provider; the weights depend only on the sizes."""
    module = make_rival(kind, "encoder", shape).to(dtype).train(training)
    if kind == "accelerated":
        fastformer.accelerate(module)
    return TimedStack(module, list(module.parameters()))


def make_inputs(shape: Shape, device: str) -> Inputs:
    """Makes x and the gradient of the output, (batch, seqlen, dim)."""
    size = shape["batch"], shape["seqlen"], shape["dim"]
    return {"x": torch.randn(size, device=device, requires_grad=True), "dout": torch.randn(size, device=device)}


class StackProvider:
    """A provider: evaluation, or a training step's forward and backward."""

    def __init__(self, kind: str, *, training: bool) -> None:
        self._kind, self._training = kind, training
        self._stacks: dict[tuple[Any, ...], TimedStack] = {}

    def __call__(self, inputs: Inputs, shape: Shape) -> Tensor | list[Tensor]:
        """Returns the output, or in training the gradients of the input and of all parameters."""
        x = inputs["x"]
        key = shape["dim"], shape["layers"], shape.get("dropout_p", 0.0), x.dtype
        stack = self._stacks.get(key)
        if stack is None:
            stack = self._stacks[key] = make(self._kind, shape, training=self._training, dtype=x.dtype)
        if not self._training:
            out: Tensor = stack.module(x)
            return out
        return list(torch.autograd.grad(stack.module(x), [x, *stack.parameters], inputs["dout"]))


def _shapes(**more: Any) -> list[dict[str, Any]]:
    return [
        {
            "dim": dim,
            "layers": layers,
            "heads": 4 if dim <= 64 else 8,
            "batch": batch,
            "seqlen": seqlen,
            "threads": threads,
            **more,
        }
        for dim, layers, batch, seqlen in SIZES
        for threads in THREADS
    ]


def _benchmark(name: str, *, training: bool) -> Benchmark:
    providers: dict[str, Provider] = {kind: StackProvider(kind, training=training) for kind in KINDS}
    return Benchmark(
        name=name,
        suite="modules",
        shapes={"cpu": _shapes(**({"dropout_p": 0.1} if training else {}))},
        make_inputs=make_inputs,
        providers=providers,
        baseline="torch.nn",
        modes=("step" if training else "fwd",),
        dtypes=("float32",),
        quick=len(THREADS),
        # Each provider draws its own dropout; `encoder_training` checks a stack's dropout against the reference.
        checked=lambda shape: {key: value for key, value in shape.items() if key != "dropout_p"},
        flops=lambda shape, mode: flops_of("encoder", shape, training),
        tokens=lambda shape: shape["batch"] * shape["seqlen"],
    )


BENCHMARKS = [_benchmark("small_work", training=False), _benchmark("small_work_training", training=True)]
