"""Updates as CUDA graphs: one launch in the place of thousands.

A graph replays on tensors of fixed sizes, so batches are padded to one of a few sizes: tokens of each side to five
leading binary digits, by at most a sixteenth (about 1 % on average, for packed batches are nearly full), sequences to
three, the longest sequence to a power of two. Tokens beyond the real ones belong to no sequence and to no loss, so that
no gradient comes from them; the sequences beyond the real ones are empty.

The first update of a size runs uncaptured, since kernels are compiled and an optimizer's state is made at first use;
the second captures it. Both draw the same random numbers as a replay, and sizes are a function of an update's
batches alone, so a run that resumes in the middle computes the same weights.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import _has_any_global_hook

from fastformer.data import Batch
from fastformer.data.batching import IGNORE_INDEX
from fastformer.engine.frozen import ModelGuards
from fastformer.graphs import CaptureError, Graph, Graphs
from fastformer.models.as_made import why_own_code
from fastformer.nn import SequenceLayout
from fastformer.training.config import TrainConfig, why_no_graphs

logger = logging.getLogger("fastformer")

# The most graphs: each takes some megabytes, and a size that is still new after so many is too rare to gain from one.
MAX_GRAPHS = 64
# The alignment of tensors within the buffer that a batch is copied by: kernels read 16 bytes at a time.
_ALIGNED = 128


class Size(NamedTuple):
    """The size that the batches of an update are padded to; source_tokens is 0 for a language model."""

    source_tokens: int
    target_tokens: int
    sequences: int
    max_seqlen: int


def has_graphs(device: torch.device) -> bool:
    """Returns whether a device has graphs. On a CPU, FASTFORMER_CPU_GRAPHS=1 lets tests take the same path."""
    return device.type == "cuda" or os.environ.get("FASTFORMER_CPU_GRAPHS") == "1"


def check_device(device: torch.device) -> None:
    """Raises a ValueError if updates on a device can't be graphs."""
    if not has_graphs(device):
        raise ValueError(f"expected an NVIDIA GPU for cuda_graphs, got device {device}: leave cuda_graphs out")


def wants_graphs(config: TrainConfig, model: nn.Module, device: torch.device, num_processes: int) -> bool:
    """Returns whether a run's updates are graphs; for cuda_graphs "auto", a GPU's log says why not.

    Raises:
        ValueError: they can't be, although cuda_graphs is True.
    """
    if config.cuda_graphs != "auto":
        if config.cuda_graphs:
            check_device(device)
        return config.cuda_graphs
    if not has_graphs(device):
        return False
    reason = why_no_graphs(config) or why_own_code(model)
    if num_processes > 1:
        reason = "no graph holds the messages of several processes"
    if getattr(model.config, "num_experts", None) is not None:
        reason = "experts compute a number of tokens that the host has to know"
    if reason is not None:
        logger.info("updates run without CUDA graphs: %s", reason)
    return reason is None


def round_up(number: int, digits: int) -> int:
    """Returns the least multiple of 8 that is not below a number and has zeros after its first `digits` bits."""
    step = max(8, 1 << max(number.bit_length() - digits, 0))
    return -(-number // step) * step


def size_of(batches: Sequence[Batch], max_tokens: int, max_len: int) -> Size:
    """Computes the size that all of an update's batches are padded to.

    Args:
        batches: packed batches.
        max_tokens: the most tokens of a batch on each side.
        max_len: the longest sequence that the model takes.
    """
    most = round_up(max_tokens, max_tokens.bit_length())

    def tokens(counts: Iterator[int]) -> int:
        return min(round_up(max(counts), 5), most)

    layouts = [layout for batch in batches for layout in (batch.source_layout, batch.target_layout) if layout]
    return Size(
        tokens(0 if batch.source is None else batch.source.numel() for batch in batches),
        tokens(batch.target_in.numel() for batch in batches),
        round_up(max(layout.batch_size for layout in layouts), 3),
        min(round_up(max(layout.max_seqlen for layout in layouts), 1), max_len),
    )


def pad_batch(batch: Batch, size: Size, pad: int) -> Batch:
    """Pads a batch with tokens and sequences to the given size; the added ones don't affect the loss.

    Args:
        batch: packed, on the CPU.
        size: at least the batch's own.
        pad: an id of the vocabulary.
    """

    def filled(ids: Tensor, tokens: int, fill: int) -> Tensor:
        return F.pad(ids, (0, tokens - ids.numel()), value=fill)

    def extended(layout: SequenceLayout, tokens: int) -> SequenceLayout:
        seqlens = F.pad(layout.seqlens, (0, size.sequences - layout.batch_size))
        return SequenceLayout.packed(seqlens, size.max_seqlen, total=tokens)

    return replace(
        batch,
        source=None if batch.source is None else filled(batch.source, size.source_tokens, pad),
        target_in=filled(batch.target_in, size.target_tokens, pad),
        target_out=filled(batch.target_out, size.target_tokens, IGNORE_INDEX),
        source_layout=None if batch.source_layout is None else extended(batch.source_layout, size.source_tokens),
        target_layout=extended(batch.target_layout, size.target_tokens),
    )


def why_uncapturable(model: nn.Module, optimizer: torch.optim.Optimizer) -> str | None:
    """Describes the part of a model's updates that a graph would omit; None if a graph omits nothing.

    A hook is a Python function: it would run while a graph is captured and never again.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            return f"DistributedDataParallel ({name or 'the model'})"
        if (
            module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
        ):  # fmt: skip
            return f"a hook on {name or 'the model'}"
    return _hook_around(model, optimizer)


def _hook_around(model: nn.Module, optimizer: torch.optim.Optimizer) -> str | None:
    """Describes a hook that isn't on a module of the model; None if no hook is found."""
    if _has_any_global_hook():
        return "a hook on all modules"
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            return f"a hook on the gradient of {name}"
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return "a hook on the optimizer"
    return None


class _Inputs:
    """Tensors at fixed addresses, filled by one copy from the host."""

    def __init__(self, like: Sequence[Tensor], device: torch.device) -> None:
        self._device, self._places, end = device, [], 0
        for tensor in like:
            self._places.append(slice(end, end + tensor.numel() * tensor.itemsize))
            end += math.ceil(tensor.numel() * tensor.itemsize / _ALIGNED) * _ALIGNED
        self.buffer = torch.zeros(end, dtype=torch.uint8, device=device)
        self.tensors = self._views(self.buffer, like)

    def _views(self, memory: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
        return [
            memory[place].view(tensor.dtype).view(tensor.shape)
            for place, tensor in zip(self._places, like, strict=True)
        ]

    def fill(self, values: Sequence[Tensor]) -> None:
        """Copies values of the same shapes and dtypes into the tensors. On a GPU the host doesn't wait for the copy."""
        # PyTorch reuses pinned memory only once the copies from it are done.
        host = torch.empty(self.buffer.shape, dtype=torch.uint8, device="cpu", pin_memory=self._device.type == "cuda")
        for view, value in zip(self._views(host, values), values, strict=True):
            view.copy_(value)
        self.buffer.copy_(host, non_blocking=True)


@dataclass
class _Slot:
    """The updates of one size: their inputs, and the graph or function that computes them."""

    inputs: _Inputs
    function: Callable[[], None]
    graph: Graph | None = None


@dataclass
class GraphUpdates:
    """Runs updates, as graphs from the second update of a size on.

    Attributes:
        graphs: captures the graphs.
        update: (batches, numbers) -> None; reads and writes tensors at fixed addresses.
        model, optimizer: the model and its optimizer. When a module of the model or a hook has changed since the first
            capture, all graphs are dropped.
        check: raises ValueError if a graph would omit a part of an update; called before each capture.
        is_wanted: whether a run that can't be captured ends with an error; otherwise it goes on without graphs.
    """

    graphs: Graphs
    update: Callable[[list[Batch], Tensor], None]
    model: nn.Module
    optimizer: torch.optim.Optimizer
    check: Callable[[], None]
    is_wanted: bool = True
    _is_plain: bool = field(default=False, init=False)  # whether it goes on without graphs
    _guards: ModelGuards | None = field(default=None, init=False)  # of the model at the first capture
    slots: dict[tuple[Size, int], _Slot] = field(default_factory=dict, init=False)

    def __call__(self, batches: Sequence[Batch], numbers: Sequence[float]) -> None:
        """Runs one update.

        Args:
            batches: on the CPU, all padded to one size.
            numbers: the update's numbers, which become an fp32 tensor.

        Raises:
            CaptureError, ValueError: the update can't be captured, and graphs are wanted.
        """
        values = [*_tensors(batches), torch.tensor(numbers, dtype=torch.float32, device="cpu")]
        key = (padded_size(batches[0]), len(batches))
        slot = self.slots.get(key)
        if slot is None:
            slot = self.slots[key] = self._new_slot(batches, values)
            slot.inputs.fill(values)
            self.graphs.warm_up(slot.function)
            return
        slot.inputs.fill(values)
        guards = self._guards
        if guards and not (guards.hold(self.model) and _hook_around(self.model, self.optimizer) is None):
            self._guards = None
            for each in self.slots.values():
                each.graph = None
        if slot.graph is None:
            if self._is_plain or sum(other.graph is not None for other in self.slots.values()) >= MAX_GRAPHS:
                self.graphs.warm_up(slot.function)
                return
            try:
                slot.graph = self._capture(slot.function)
            except (CaptureError, ValueError) as error:
                if self.is_wanted:
                    raise
                self._is_plain = True
                logger.warning("updates run without CUDA graphs: %s", error)
                self.optimizer.zero_grad(set_to_none=True)  # gradients of a part of the update, in the graph's memory
                self.graphs.warm_up(slot.function)
                return
            self._guards = self._guards or ModelGuards(self.model)
        slot.graph.replay()

    def _capture(self, function: Callable[[], None]) -> Graph:
        self.check()
        try:
            return self.graphs.capture(function)
        except CaptureError as error:
            raise CaptureError(f"an update can't be a CUDA graph, so set cuda_graphs to false: {error}") from error

    def _new_slot(self, batches: Sequence[Batch], values: Sequence[Tensor]) -> _Slot:
        inputs = _Inputs(values, self.graphs.device)
        *tensors, numbers = inputs.tensors
        left = iter(tensors)
        fixed = [_like(batch, left) for batch in batches]
        return _Slot(inputs, lambda: self.update(fixed, numbers))


def padded_size(batch: Batch) -> Size:
    """Returns the size of a batch that `pad_batch` made."""
    source = 0 if batch.source is None else batch.source.numel()
    return Size(source, batch.target_in.numel(), batch.target_layout.batch_size, batch.target_layout.max_seqlen)


def _tensors(batches: Sequence[Batch]) -> list[Tensor]:
    """Lists all tensors of some packed batches, in the order that `_like` expects."""
    tensors: list[Tensor | None] = []
    for batch in batches:
        tensors += [batch.source, batch.target_in, batch.target_out]
        for layout in (batch.source_layout, batch.target_layout):
            if layout is not None:
                tensors += [layout.seqlens, layout.cu_seqlens, layout.positions]
    return [tensor for tensor in tensors if tensor is not None]


def _like(batch: Batch, tensors: Iterator[Tensor]) -> Batch:
    """Builds a batch of the same sizes from other tensors."""
    source = None if batch.source is None else next(tensors)
    target_in, target_out = next(tensors), next(tensors)

    def layout(like: SequenceLayout) -> SequenceLayout:
        return SequenceLayout(next(tensors), like.max_seqlen, next(tensors), next(tensors))

    source_layout = None if batch.source_layout is None else layout(batch.source_layout)
    return Batch(
        source, target_in, target_out, source_layout, layout(batch.target_layout), batch.num_source_tokens,
        batch.num_target_tokens,
    )  # fmt: skip
