"""The engine "graph" with real CUDA graphs gives the results of plain steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fastformer.generation import GenerateOutput, generate
from fastformer.generation.engines import choose_engine
from fastformer.generation.engines import graph as graph_module
from fastformer.generation.engines.graph import GraphBatch, GraphEngine
from fastformer.generation.scheduler import Scheduler, run
from fastformer.models import GPT
from fastformer.ops import _extension
from tests.generation.test_graph_engine import asked, ids
from tests.generation.weights import CONFIGS, drawn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.skipif(_extension.module() is None, reason="the searches live in the C++ extension"),
]

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 4, "num_return_sequences": 2},
    "edited": {"num_beams": 3, "min_new_tokens": 6, "suppress_tokens": [7, 8]},
}


class Watched:
    """Records of engines: the steps that were calls, replays and captures, and those that ran on the host."""

    def __init__(self) -> None:
        self.plain = self.replays = self.captures = self.single = 0


@pytest.fixture(autouse=True)
def watched(monkeypatch) -> Iterator[Watched]:
    seen = Watched()
    replay, capture, run_searches = GraphBatch._replay, GraphBatch._capture, GraphBatch.run_searches

    def counted_replay(self: GraphBatch, captured: Any) -> None:
        replay(self, captured)
        seen.replays += isinstance(captured.graph, torch.cuda.CUDAGraph)
        seen.plain += captured.graph is None

    def counted_capture(self: GraphBatch, captured: Any) -> None:
        capture(self, captured)
        seen.captures += 1

    def watched_run(self: GraphBatch, *args: Any) -> list[int]:
        steps = run_searches(self, *args)
        seen.single += not any(steps)
        return steps

    monkeypatch.setattr(GraphBatch, "_replay", counted_replay)
    monkeypatch.setattr(GraphBatch, "_capture", counted_capture)
    monkeypatch.setattr(GraphBatch, "run_searches", watched_run)
    yield seen


def decode(model: Any, inputs: list[list[int]], engine: str, **options: Any) -> GenerateOutput:
    out = generate(model, inputs, engine=engine, return_dict_in_generate=True, **options)
    assert isinstance(out, GenerateOutput)
    return out


def assert_same(found: GenerateOutput, expected: GenerateOutput) -> None:
    """Checks that tokens are equal or, if other tokens are as likely, that scores are."""
    torch.testing.assert_close(found.scores, expected.scores, rtol=0, atol=2e-3)
    width = min(found.sequences.shape[1], expected.sequences.shape[1])
    same = (found.sequences[:, :width] == expected.sequences[:, :width]).all(1)
    assert same.double().mean() >= 0.75


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["transformer", "post-norm", "windows", "two vocabularies", "llama", "rotary windows"])
def test_replays_give_the_results_of_calls(name, way, watched) -> None:
    kind, options = CONFIGS[name]
    model = drawn(kind, **options)
    inputs = ids(3, 9, 14, 1, 6)
    expected = decode(model, inputs, "recompute", max_new_tokens=24, **WAYS[way])
    model = model.cuda()
    found = decode(model, inputs, "graph", max_new_tokens=24, **WAYS[way])
    cached = decode(model, inputs, "kv_cache", max_new_tokens=24, **WAYS[way])
    moved = GenerateOutput(found.sequences.cpu(), found.scores.cpu(), found.token_log_probs.cpu())
    assert_same(moved, expected)
    assert_same(found, cached)
    assert watched.single == 0 and watched.captures >= 1 and watched.replays > 2 * watched.plain
    # Again, by graphs alone.
    plain = watched.plain
    again = decode(model, inputs, "graph", max_new_tokens=24, **WAYS[way])
    assert torch.equal(again.sequences, found.sequences) and torch.equal(again.scores, found.scores)
    assert watched.plain == plain


def test_a_step_never_waits_for_the_device(monkeypatch, watched) -> None:
    step = GraphBatch._step_once

    def guarded(self: GraphBatch, captured: Any) -> None:
        torch.cuda.set_sync_debug_mode("error")
        try:
            step(self, captured)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(GraphBatch, "_step_once", guarded)
    for name in ("rms gelu gqa", "gpt windows"):
        model = drawn(CONFIGS[name][0], **CONFIGS[name][1]).cuda()
        for way in WAYS.values():
            decode(model, ids(5, 2, 7), "graph", max_new_tokens=9, **way)
    assert watched.plain >= 6


def test_groups_that_leave_and_join_switch_graphs(watched) -> None:
    model = drawn(*[CONFIGS["transformer"][0]]).cuda()
    engine, cached = GraphEngine(model), choose_engine(model, "kv_cache")
    results = []
    for own in (engine, engine, cached):
        options: dict[str, Any] = {"num_beams": 2, "eos_token_id": 69}
        rows = enumerate(ids(2, 3, 4, 5, 6))
        requests = [asked(model, own, [row], max_new_tokens=6 + 5 * i, **options)[0] for i, row in rows]
        run(Scheduler(own, max_rows=64, max_bytes=2**24), requests)
        results.append([[one.score for one in request.results] for request in requests])
    assert results[0] == results[1] and watched.captures >= 3
    for found, expected in zip(results[0], results[2], strict=True):
        assert found == pytest.approx(expected, abs=2e-3)
    groups = sorted(shape.num_groups for shape in engine.shapes)
    assert groups[0] == 1 and groups[-1] == 8
    assert all(isinstance(captured.graph, torch.cuda.CUDAGraph) for captured in engine._state.captured.values())


def test_graphs_read_weights_in_place_and_are_remade_if_these_move(watched) -> None:
    model = drawn(GPT).cuda()
    inputs = ids(4, 7)
    options: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": 69}
    before = decode(model, inputs, "graph", **options)
    with torch.no_grad():
        model.decoder.layers[1].linear1.weight.mul_(-1.0)
    captures = watched.captures
    assert_same(decode(model, inputs, "graph", **options), decode(model, inputs, "kv_cache", **options))
    assert watched.captures == captures
    weight = -model.decoder.layers[1].linear1.weight.detach()
    model.decoder.layers[1].linear1.weight = torch.nn.Parameter(weight)
    assert torch.equal(decode(model, inputs, "graph", **options).sequences, before.sequences)
    assert watched.captures > captures


def test_dropped_graphs_leave_no_memory_behind(watched, monkeypatch) -> None:
    model = drawn(GPT, d_model=128, num_layers=4).cuda()
    engine = GraphEngine(model)
    engine.open(64, 4000)
    monkeypatch.setattr(graph_module, "MAX_SHAPES", 3)

    def once(count: int) -> None:
        requests = asked(model, engine, ids(*range(3, 3 + count)), max_new_tokens=12, eos_token_id=69)
        run(Scheduler(engine, max_rows=64, max_bytes=2**26), requests)

    for count in (1, 2, 3, 5, 9, 17):
        once(count)
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved()  # by this process: others may be testing on the same device
    for count in (1, 2, 3, 5, 9, 17) * 3:
        once(count)
    assert len(engine.shapes) == 3
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - held < 128 * 2**20  # what comes and goes leaves nothing behind
