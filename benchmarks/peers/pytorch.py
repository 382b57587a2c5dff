"""Models of torch.nn and transformers: unchanged, accelerated, compiled, both, and accelerated with the fused loss."""

from __future__ import annotations

import time
from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import fastformer
from benchmarks.measure.timing import keep_freed_memory
from benchmarks.peers.job import JobResult, Missing, Peer, StepJob
from benchmarks.peers.models import Workload, gradients, make_work, outputs

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.float32}  # int8 is rounded from fp32


class Runtime(Peer):
    """A way to run a model; its model is a case of `models`."""

    order = StepJob

    def __init__(self, model: dict[str, Any], precision: str, threads: int, options: dict[str, str]) -> None:
        torch.set_num_threads(threads)
        keep_freed_memory()
        self.case, self.precision, self.threads = model, precision, threads
        self.work = self._work()
        self.prepared = self.prepare(self.work)

    def _work(self, *, drops: bool = True) -> Workload:
        return make_work(self.case, DTYPES[self.precision], drops=drops)

    @abstractmethod
    def prepare(self, work: Workload) -> Any:
        """Prepares the model for this way."""

    @abstractmethod
    def run(self, work: Workload, prepared: Any) -> Tensor:
        """Runs `Workload.step`; all of it is timed."""

    def turn(self, job: StepJob) -> JobResult:
        """Runs one step. A step that is checked has no dropout: other masks would give other results."""
        if job.results is not None and self.work.learns:
            work = self._work(drops=False)
            prepared = self.prepare(work)
        else:
            work, prepared = self.work, self.prepared
        work.order = job.order
        torch.manual_seed(0)
        began = time.perf_counter()
        result = self.run(work, prepared)
        seconds = time.perf_counter() - began
        parameters = list(work.model.parameters())
        if job.results is not None:
            values = gradients(result, parameters) if work.learns else outputs(result)
            torch.save(tuple(values), job.results)
        for parameter in parameters:
            parameter.grad = None
        return JobResult(seconds, None)


class AsItIs(Runtime):
    """PyTorch, with attention "sdpa": the baseline of all other ways."""

    name = "as it is"
    precisions: ClassVar[tuple[str, ...]] = ("bf16", "fp32")

    def prepare(self, work: Workload) -> nn.Module:
        return work.model

    def run(self, work: Workload, prepared: nn.Module) -> Tensor:
        return work.step(prepared)


class Accelerated(AsItIs):
    """The model after `fastformer.accelerate`."""

    name = "accelerated"
    precisions: ClassVar[tuple[str, ...]] = ("int8", "bf16", "fp32")
    fused_loss = False

    def prepare(self, work: Workload) -> nn.Module:
        if self.precision == "int8" and work.learns:
            raise Missing("int8 is a precision of evaluation")
        precision: Any = "int8" if self.precision == "int8" else None  # the model has its dtype already
        # The work reads real tokens alone. Transformers' models show that, but a stack of torch.nn has to be told.
        padding: Any = "skip" if isinstance(work.model, nn.TransformerEncoder) else "auto"
        model = fastformer.accelerate(work.model, fused_loss=self.fused_loss, precision=precision, padding=padding)
        report = fastformer.report(model)
        if not report.swapped:
            raise ValueError(f"expected that accelerate takes the model, but it left all of it: {report}")
        return work.model


class TorchCompile(AsItIs):
    """torch.compile of the unchanged model."""

    name = "torch.compile"

    def prepare(self, work: Workload) -> Any:
        torch._dynamo.reset()
        return torch.compile(super().prepare(work))

    def run(self, work: Workload, prepared: nn.Module) -> Tensor:
        output = super().run(work, prepared)
        if not counters["stats"]["unique_graphs"]:
            raise Missing("torch.compile did not compile it")
        return output


class AcceleratedCompiled(TorchCompile, Accelerated):
    """torch.compile of the accelerated model."""

    precisions = AsItIs.precisions
    name = "accelerated, torch.compile"


class FusedLossPeer(Accelerated):
    """The accelerated model in training, without logits."""

    precisions = AsItIs.precisions
    name = "accelerated, fused loss"
    fused_loss = True
