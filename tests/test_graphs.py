"""Tests graphs without a GPU, the mode that checks what may be captured, and real captures on a GPU."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from fastformer import graphs as graphs_module
from fastformer.graphs import CaptureError, Graphs


def test_on_a_cpu_a_graph_is_a_call() -> None:
    total, added = torch.zeros(()), torch.ones(())
    graphs = Graphs("cpu")

    def add() -> None:
        total.add_(added)

    graphs.warm_up(add)
    assert total == 1
    graph = graphs.capture(add)
    assert total == 1  # nothing is computed while capturing
    added.fill_(5.0)
    graph.replay()
    graph.replay()
    assert total == 11


class StubGraph:
    """An empty graph."""


class StubGenerator:
    """A generator whose states are numbers."""

    def __init__(self, state: int = 0) -> None:
        self.state = state

    def clone_state(self) -> StubGenerator:
        return StubGenerator(self.state + 1)

    def graphsafe_set_state(self, other: StubGenerator) -> None:
        self.state = other.state


class StubCuda:
    """The part of torch.cuda that `Graphs` uses; the end of a capture raises if the capture waited for a stream."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ended: list[object] = []  # the graphs of captures that ended normally
        self.made: list[weakref.ref[StubGraph]] = []
        self.waited = False
        self.stream: object = "current"
        self.generator = StubGenerator()
        stubs: dict[str, Any] = {
            "Stream": lambda device: SimpleNamespace(device_index=0),
            "current_stream": lambda device: self.stream,
            "set_stream": lambda stream: setattr(self, "stream", stream),
            "graph_pool_handle": lambda: (0, 1),
            "CUDAGraph": self.new_graph,
            "device": lambda device: contextlib.nullcontext(),
            "graph": self.capture,
            "default_generators": (self.generator,),
        }
        for name, stub in stubs.items():
            monkeypatch.setattr(torch.cuda, name, stub)
        monkeypatch.setattr(graphs_module, "_broken", [])

    def new_graph(self) -> object:
        graph = StubGraph()
        self.made.append(weakref.ref(graph))
        return graph

    def alive(self) -> list[bool]:
        """Returns for each graph that was made whether something refers to it."""
        gc.collect(0)  # all that the test has made, since no automatic collection has seen it
        return [graph() is not None for graph in self.made]

    @contextlib.contextmanager
    def capture(self, graph: object, pool: object, stream: object, capture_error_mode: str) -> Iterator[None]:
        before, self.stream, self.waited = self.stream, stream, False
        try:
            yield
        finally:
            if self.waited:
                raise RuntimeError("the capture was invalidated")
        self.ended.append(graph)
        self.stream = before

    def wait(self) -> None:
        self.waited = True
        raise RuntimeError("not permitted when stream is capturing")


@pytest.fixture
def _only_asked_collections() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_only_asked_collections")
def test_after_a_broken_capture_the_process_captures_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    stub = StubCuda(monkeypatch)
    graphs = Graphs("cuda")
    graphs.capture(lambda: None)
    with pytest.raises(CaptureError, match="not permitted"):
        graphs.capture(stub.wait)
    # The allocator goes on asking the broken graph; the generator's state would draw nothing.
    assert stub.stream == "current" and stub.generator.state == 1
    with pytest.raises(CaptureError, match=r"\bbroke\b.*not permitted"):
        Graphs("cuda").capture(lambda: None)
    assert len(stub.ended) == 1 and len(stub.made) == 2
    stub.ended.clear()
    assert stub.alive() == [False, True]


@pytest.mark.usefixtures("_only_asked_collections")
def test_a_function_that_raises_does_not_break_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    stub = StubCuda(monkeypatch)
    graphs = Graphs("cuda")
    with pytest.raises(CaptureError, match="ValueError: no"):
        graphs.capture(Mock(side_effect=ValueError("no")))
    stub.ended.clear()
    assert not any(stub.alive()) and stub.stream == "current" and stub.generator.state == 0
    assert graphs.capture(lambda: None) is stub.ended[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_replay_draws_what_a_call_would_draw() -> None:
    from fastformer.ops import draw_seed

    drawn = torch.zeros(2, 2, dtype=torch.int64, device="cuda")

    def draw() -> None:
        drawn[0] = draw_seed("cuda")
        drawn[1] = draw_seed("cuda")

    graphs = Graphs("cuda")
    torch.manual_seed(3)
    expected = []
    for _ in range(4):
        graphs.warm_up(draw)
        expected.append(drawn.clone())
    after = torch.cuda.get_rng_state()
    torch.manual_seed(3)
    graphs.warm_up(draw)
    draws_of_graph = [drawn.clone()]
    graph = graphs.capture(draw)
    for _ in range(3):
        graph.replay()
        draws_of_graph.append(drawn.clone())
    assert torch.equal(torch.stack(draws_of_graph), torch.stack(expected))
    assert torch.equal(torch.cuda.get_rng_state(), after)  # so that a checkpoint is the same
    assert len({tuple(pair) for draws in draws_of_graph for pair in draws.tolist()}) == 8


BROKEN = """
import torch
from fastformer.graphs import CaptureError, Graphs

x, graphs = torch.ones(3, device="cuda"), Graphs("cuda")
current = torch.cuda.current_stream()
try:
    graphs.capture(lambda: x.mul_(x.sum().item()))
except CaptureError as error:
    assert "captur" in str(error), error
    print("refused")
assert torch.cuda.current_stream() == current
assert x.tolist() == [1.0, 1.0, 1.0]
# Numbers are drawn, memory comes and goes; no other graph is captured.
assert torch.rand(4, device="cuda").unique().numel() == 4
graphs.warm_up(lambda: x.add_(torch.rand(3, device="cuda") * 0 + 1))
assert x.tolist() == [2.0, 2.0, 2.0]
try:
    graphs.capture(lambda: x.add_(1))
except CaptureError as error:
    assert "captur" in str(error), error
    print("refused")
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_code_that_cannot_be_captured_is_an_error() -> None:
    # In a process of its own: PyTorch's allocator takes a broken capture for one that goes on.
    proc = subprocess.run([sys.executable, "-c", BROKEN], capture_output=True, text=True)
    assert (proc.returncode, proc.stdout) == (0, "refused\nrefused\n"), proc.stderr
