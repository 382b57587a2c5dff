"""A benchmark's declaration: shapes, inputs, providers, and the cost of the work. The runner does the rest."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.measure.record import SUITES as SUITES
from fastformer.ops import use_backend

Shape = Mapping[str, Any]
Inputs = dict[str, Tensor]  # tensors that require a gradient are differentiated
Provider = Callable[[Inputs, Shape], Any]


class Need(NamedTuple):
    """The module that a provider needs, and the command that installs it."""

    module: str
    install: str


@dataclass(frozen=True)
class Benchmark:
    """A benchmark of one op, or of one job, as data.

    Attributes:
        name: the op's stem, or the job's name.
        suite: its suite, one of SUITES.
        also_ours: the providers, besides the first, whose kernels are compiled ahead of a GPU run (`gpu/ahead.py`).
        compares_stages: whether all providers are fastformer's, and are compared only with the baseline.
        shapes: by device, "cpu" and "cuda". "threads" in a shape is PyTorch's number of threads. If a shape has a
            dropout_p, fastformer is checked against its reference backend with the same seed; the other providers draw
            masks of their own, and are checked without dropout.
        make_inputs: (shape, device) -> fp32 or integer tensors; floating-point ones are cast to the dtype.
        providers: by name; the first is fastformer.
        baseline: the provider that ratios refer to, and whose fp64 result is correct by definition.
        modes: "fwd", "bwd" (the graph of one forward pass, differentiated repeatedly), "fwdbwd", "step" (the provider
            does all of it), and "replay" ("fwd" as a CUDA graph, as a decoding engine replays it).
        dtypes: the names of torch dtypes.
        quick: how many of the shapes `--quick` runs: the first ones, in the first dtype.
        flops: (shape, mode) -> the arithmetic of the useful work.
        moved: (shape, mode, itemsize) -> the minimum number of bytes read and written.
        tokens: (shape) -> the tokens of a call, for a speed in tokens per second; None if that has no meaning.
        only_on: provider -> the one device that it supports.
        agreement: provider -> the share of its integers that have to equal the baseline's; by default all of them.
        compiled: the providers made by torch.compile, for which the runner checks that they were compiled.
        checked: (shape) -> the shape at which it is checked, if the baseline in fp64 would take too much memory.
        without_dropout: (shape) -> that shape without dropout; None if the providers' dropout comes from elsewhere, and
            another benchmark checks them.
        oracles: provider -> the provider that is correct in fp64, if that isn't the baseline: the providers of a
            benchmark may compute different things, such as attention with a causal mask.
        left_out: (provider, shape) -> why it isn't timed at a shape, such as the memory it would take; None if it is.
            fastformer and the baseline always are.
        needs: provider -> the package that it needs; if that is missing, the row says how to install it.
    """

    name: str
    shapes: Mapping[str, list[dict[str, Any]]]
    make_inputs: Callable[[Shape, str], Inputs]
    providers: Mapping[str, Provider]
    baseline: str
    modes: tuple[str, ...] = ("fwd", "fwdbwd")
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    quick: int = 1
    flops: Callable[[Shape, str], float] = lambda shape, mode: 0.0
    moved: Callable[[Shape, str, int], float] = lambda shape, mode, itemsize: 0.0
    tokens: Callable[[Shape], int] | None = None
    only_on: Mapping[str, str] = field(default_factory=dict)
    agreement: Mapping[str, float] = field(default_factory=dict)
    compiled: tuple[str, ...] = ()
    checked: Callable[[Shape], Shape] = lambda shape: shape
    without_dropout: Callable[[Shape], Shape | None] = lambda shape: {**shape, "dropout_p": 0.0}
    oracles: Mapping[str, Provider] = field(default_factory=dict)
    left_out: Callable[[str, Shape], str | None] = lambda provider, shape: None
    needs: Mapping[str, Need] = field(default_factory=dict)
    suite: str = "ops"
    compares_stages: bool = False
    also_ours: tuple[str, ...] = ()

    @property
    def ours(self) -> str:
        """The name of fastformer's provider."""
        return next(iter(self.providers))

    def offered(self, device: str) -> dict[str, Provider]:
        """Returns the providers for a device."""
        return {name: call for name, call in self.providers.items() if self.only_on.get(name, device) == device}

    def missing(self, device: str) -> dict[str, str]:
        """Returns the providers for a device whose packages are missing, each with the way to install it."""
        offered = self.offered(device)
        return {
            name: need.install
            for name, need in self.needs.items()
            if name in offered and importlib.util.find_spec(need.module) is None
        }


def beside_eager(ours: Provider, eager: Provider, **others: Provider) -> dict[str, Any]:
    """Returns the fields of a benchmark of fastformer beside eager PyTorch, the same compiled, and others by name."""
    compiled = torch.compile(eager, dynamic=False)
    return {
        "providers": {"fastformer": ours, "eager": eager, "torch.compile": compiled, **others},
        "baseline": "eager",
        "compiled": ("torch.compile",),
    }


def cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """Copies the inputs as leaves in a dtype; those that required a gradient require one again."""
    return {
        name: t.detach().to(dtype).clone().requires_grad_(t.requires_grad) if t.is_floating_point() else t
        for name, t in inputs.items()
    }


def on_reference(call: Provider) -> Provider:
    """Runs a provider on fastformer's reference backend, plain PyTorch. Forward only."""

    def run(x: Inputs, shape: Shape) -> Any:
        with use_backend("reference"):
            return call(x, shape)

    return run


def outputs_of(result: Any) -> list[Tensor]:
    """Returns the result of a provider as a list of tensors."""
    return [result] if isinstance(result, Tensor) else [t for t in result if isinstance(t, Tensor)]


def gradients(outputs: list[Tensor], inputs: Inputs, douts: list[Tensor] | None, **options: bool) -> list[Tensor]:
    """Returns the gradients of the inputs that require one, for the given output gradients (None: ones)."""
    outputs = [output for output in outputs if output.requires_grad]
    douts = (
        [torch.ones_like(o) for o in outputs]
        if douts is None
        else [d.to(o) for d, o in zip(douts, outputs, strict=True)]
    )
    return list(torch.autograd.grad(outputs, [t for t in inputs.values() if t.requires_grad], douts, **options))


def results(call: Provider, inputs: Inputs, shape: Shape, mode: str, douts: list[Tensor] | None) -> list[Tensor]:
    """Returns the outputs of a provider and, unless the mode has only outputs, the gradients."""
    if mode == "step":
        return outputs_of(call(inputs, shape))
    if mode in ("fwd", "replay"):
        with torch.no_grad():
            return outputs_of(call(inputs, shape))
    outputs = outputs_of(call(inputs, shape))
    return [*outputs, *gradients(outputs, inputs, douts)]


def timed_call(call: Provider, inputs: Inputs, shape: Shape, mode: str) -> Callable[[], object]:
    """Makes the call that a mode times. The output gradients exist beforehand, as in training."""
    if mode in ("fwd", "step"):
        return lambda: results(call, inputs, shape, mode, None)
    if mode == "replay":
        device = next(iter(inputs.values())).device
        return captured(lambda: results(call, inputs, shape, mode, None), device)
    outputs = outputs_of(call(inputs, shape))
    douts = [torch.randn_like(output) for output in outputs if output.requires_grad]
    if mode == "bwd":
        return lambda: gradients(outputs, inputs, douts, retain_graph=True)
    return lambda: gradients(outputs_of(call(inputs, shape)), inputs, douts)


def captured(function: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Captures the function as a CUDA graph, and returns a function that replays it; on a CPU, returns the function.

    A failed capture leaves the device usable.

    Raises:
        RuntimeError: the function can't be captured: it waits for the host, say.
    """
    from fastformer.graphs import Graphs

    def work() -> None:
        function()

    graphs = Graphs(device)
    graphs.warm_up(work)
    return graphs.capture(work).replay
