"""A graph for CPU tensors that behaves like a GPU's: it replays operations, but no Python code.

On a CPU, `fastformer.graphs.Graphs` calls the captured function again, which sees the current Python values. A CUDA
graph
never does: a Python float keeps its value from the capture. `TapeGraphs` records the operations of a capture and
replays them on the same tensors, so that a test notices such a mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fastformer.cache import KVCache
from fastformer.generation.engines import graph as graph_module
from tests.no_sync import NoSync


def _tensors(values: Any) -> Iterator[Tensor]:
    return (value for value in tree_leaves(values) if isinstance(value, Tensor))


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Tape(TorchDispatchMode):
    """Records operations while it is active, and afterwards restores the tensors that existed before."""

    def __init__(self, graphs: TapeGraphs) -> None:
        super().__init__()
        self._graphs = graphs
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]] = []
        self.written: dict[int, tuple[Tensor, Tensor]] = {}  # place -> (tensor, its values before)
        self._own: set[int] = set()  # addresses of tensors that the recorded operations created

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        schema = func._schema.arguments
        named = [(argument, options[argument.name]) for argument in schema if argument.name in options]
        for argument, value in (*zip(schema, args, strict=False), *named):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in _tensors(value):
                    if _place(tensor) not in self._own | self.written.keys():
                        whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
                        self.written[_place(tensor)] = (whole, whole.clone())
        result = func(*args, **options)
        outputs = list(_tensors(result))
        inputs = {_place(tensor) for tensor in _tensors((args, options))}
        self._own |= {_place(output) for output in outputs} - inputs
        self.calls.append((func, args, options, outputs))
        return result

    def restore(self) -> None:
        """Restores the values of all tensors that existed before the recording."""
        for tensor, before in self.written.values():
            tensor.copy_(before)

    @torch.no_grad()
    def replay(self) -> None:
        """Runs the operations again, and writes each result to its old address."""
        self._graphs.replays += 1
        for func, args, options, outputs in self.calls:
            for output, value in zip(outputs, _tensors(func(*args, **options)), strict=True):
                if _place(output) != _place(value):
                    output.detach().copy_(value)


def as_gpu(monkeypatch: pytest.MonkeyPatch) -> TapeGraphs:
    """Has engines treat the CPU as a GPU, whose graphs are those that this returns."""
    graphs = TapeGraphs("cpu")
    monkeypatch.setattr(graph_module, "DEVICES", ("cpu",))
    monkeypatch.setattr(graph_module, "Graphs", lambda device: graphs)
    monkeypatch.setattr(KVCache, "_is_host", staticmethod(lambda device: False))  # as a GPU has tables of its own
    return graphs


class TapeGraphs:
    """`Graphs` with tapes. It never waits for a device, and counts its calls."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.warm_ups = self.captures = self.replays = 0

    def warm_up(self, function: Callable[[], None]) -> None:
        self.warm_ups += 1
        with NoSync():
            function()

    def capture(self, function: Callable[[], None]) -> Tape:
        self.captures += 1
        random, tape = torch.get_rng_state(), Tape(self)
        with NoSync(), tape:
            function()
        tape.restore()
        torch.set_rng_state(random)
        return tape
