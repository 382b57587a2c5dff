"""What a benchmark declares: shapes, inputs, providers, and what the work costs. The runner does the rest."""

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
Inputs = dict[str, Tensor]  # those that require a gradient are differentiated
Provider = Callable[[Inputs, Shape], Any]


class Need(NamedTuple):
    """What a provider is imported from, and how a reader gets it."""

    module: str
    install: str


@dataclass(frozen=True)
class Benchmark:
    """One op, or one job, as data.

    Attributes:
        name: the op's stem, or the job's name.
        suite: which of SUITES it belongs to.
        compares_stages: all providers are ours, and are compared with the baseline alone.
        shapes: by device, "cpu" and "cuda". "threads" in a shape is how many PyTorch computes with. Where a shape has
            a dropout_p, ours is checked against its reference backend with the same seed; the others draw masks of
            their own, and are checked without.
        make_inputs: (shape, device) -> fp32 or integer tensors; floating ones are cast to the dtype.
        providers: by name; the first is ours.
        baseline: the provider that ratios are against, and that is right in fp64.
        modes: "fwd", "bwd" (the graph of one forward pass, differentiated again and again), "fwdbwd", "step" (the
            provider does all by itself), and "replay" ("fwd" as a CUDA graph, as a decoding engine replays it).
        dtypes: names of torch dtypes.
        quick: how many of the shapes `--quick` runs: those that come first, in the first dtype.
        flops: (shape, mode) -> arithmetic of the useful work.
        moved: (shape, mode, itemsize) -> bytes read and written at least.
        tokens: (shape) -> tokens of a call, for a speed in tokens per second; None where it means nothing.
        only_on: provider -> the one device that it is for.
        agreement: provider -> the share of its integers that have to be the baseline's; all of them where nothing is
            said.
        compiled: the providers that torch.compile makes, which have to prove that they were compiled.
        checked: (shape) -> the shape at which it is checked, where the baseline in fp64 would take too much memory.
        without_dropout: (shape) -> that shape without dropout; None where providers have their dropout from elsewhere,
            and another benchmark checks them.
        oracles: provider -> what is right in fp64 for it, where that isn't the baseline: cases may ask several
            questions, such as what a causal mask leaves.
        left_out: (provider, shape) -> why it isn't timed at a shape, such as the memory it would take; None where it
            is. Ours and the baseline always are.
        needs: provider -> what has to be installed for it; where it isn't, the row says how to install it.
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

    @property
    def ours(self) -> str:
        """The name of the provider that is this library."""
        return next(iter(self.providers))

    def offered(self, device: str) -> dict[str, Provider]:
        """The providers of a device."""
        return {name: call for name, call in self.providers.items() if self.only_on.get(name, device) == device}

    def missing(self, device: str) -> dict[str, str]:
        """Those of a device that aren't installed, each with how to install it."""
        offered = self.offered(device)
        return {
            name: need.install
            for name, need in self.needs.items()
            if name in offered and importlib.util.find_spec(need.module) is None
        }


def cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """Fresh leaves in a dtype; what needed a gradient needs one again."""
    return {
        name: t.detach().to(dtype).clone().requires_grad_(t.requires_grad) if t.is_floating_point() else t
        for name, t in inputs.items()
    }


def on_reference(call: Provider) -> Provider:
    """A provider of ours on the plain PyTorch that runs where there is no kernel. Forward only."""

    def run(x: Inputs, shape: Shape) -> Any:
        with use_backend("reference"):
            return call(x, shape)

    return run


def outputs_of(result: Any) -> list[Tensor]:
    """What a provider returned, as a list of tensors."""
    return [result] if isinstance(result, Tensor) else [t for t in result if isinstance(t, Tensor)]


def gradients(outputs: list[Tensor], inputs: Inputs, douts: list[Tensor] | None, **options: bool) -> list[Tensor]:
    """Those of the inputs that require one, for the given output gradients (None: ones)."""
    outputs = [output for output in outputs if output.requires_grad]
    douts = (
        [torch.ones_like(o) for o in outputs]
        if douts is None
        else [d.to(o) for d, o in zip(douts, outputs, strict=True)]
    )
    return list(torch.autograd.grad(outputs, [t for t in inputs.values() if t.requires_grad], douts, **options))


def results(call: Provider, inputs: Inputs, shape: Shape, mode: str, douts: list[Tensor] | None) -> list[Tensor]:
    """Outputs and, unless only they are asked for, gradients."""
    if mode == "step":
        return outputs_of(call(inputs, shape))
    if mode in ("fwd", "replay"):
        with torch.no_grad():
            return outputs_of(call(inputs, shape))
    outputs = outputs_of(call(inputs, shape))
    return [*outputs, *gradients(outputs, inputs, douts)]


def timed_call(call: Provider, inputs: Inputs, shape: Shape, mode: str) -> Callable[[], object]:
    """What a mode times. The output gradients are there beforehand, as they are in training."""
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
    """The function's work as a CUDA graph: what replays it; on a CPU the function. A failed capture breaks nothing.

    Raises:
        RuntimeError: the function can't be captured; it waits for the host, say.
    """
    from fastformer.graphs import Graphs

    def work() -> None:
        function()

    graphs = Graphs(device)
    graphs.warm_up(work)
    return graphs.capture(work).replay
