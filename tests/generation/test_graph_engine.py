"""The engine "graph" gives the tokens of recomputation, and the host never waits between steps.

On a CPU a graph is a tape here (tests/tape.py): what is decided while it is captured is decided for all replays.
"""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from fastformer.cache import KVCache
from fastformer.cache.block_pool import CacheFullError
from fastformer.cache.fixed_shape import FixedShapeCache
from fastformer.engine.frozen import notes_of
from fastformer.generation import GenerateOutput, GenerationConfig, generate
from fastformer.generation import requests as requests_module
from fastformer.generation import scheduler as scheduler_module
from fastformer.generation.engines import Engine, choose_engine
from fastformer.generation.engines import graph as graph_module
from fastformer.generation.engines import sampling as engine_sampling
from fastformer.generation.engines.captured_step import bucket, rounded
from fastformer.generation.engines.cpp import CppEngine
from fastformer.generation.engines.graph import GraphBatch, GraphEngine
from fastformer.generation.engines.recompute import RecomputeEngine
from fastformer.generation.request_builder import RequestBuilder
from fastformer.generation.requests import Request
from fastformer.generation.scheduler import Scheduler, run
from fastformer.graphs import CaptureError
from fastformer.models import GPT, Transformer
from fastformer.ops import _extension, record_backends, use_backend
from tests.covering import by_turns
from tests.generation.small import VOCAB, coarse
from tests.generation.test_generate_options import Listener
from tests.generation.toy import finish
from tests.generation.weights import CONFIGS, RELATIVE, drawn
from tests.no_sync import NoSync
from tests.tape import TapeGraphs

pytestmark = pytest.mark.skipif(_extension.module() is None, reason="no C++ extension for this CPU")


class Watched(TapeGraphs):
    """The graphs of all engines, which also count the steps that ran one by one on the host."""

    single = 0


@pytest.fixture(autouse=True)
def watched(monkeypatch) -> Iterator[Watched]:
    seen = Watched("cpu")
    run_searches = GraphBatch.run_searches

    def watched_run(self: GraphBatch, *args: Any) -> list[int]:
        steps = run_searches(self, *args)
        seen.single += not any(steps)
        return steps

    monkeypatch.setattr(graph_module, "Graphs", lambda device: seen)
    monkeypatch.setattr(GraphBatch, "run_searches", watched_run)
    yield seen


def both(model: Any, inputs: list[list[int]], **options: Any) -> tuple[GenerateOutput, GenerateOutput]:
    """Returns the results of the engine and of recomputing."""
    found = []
    for engine in ("graph", "recompute"):
        out = generate(model, inputs, engine=engine, return_dict_in_generate=True, **options)
        assert isinstance(out, GenerateOutput)
        found.append(out)
    return found[0], found[1]


def assert_same(found: GenerateOutput, expected: GenerateOutput) -> None:
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(found.scores, expected.scores, rtol=0, atol=2e-4)


def ids(*lengths: int, vocab: int = 33) -> list[list[int]]:
    dice = random.Random(sum(lengths))
    return [[dice.randrange(3, vocab) for _ in range(length)] for length in lengths]


def asked(model: Any, own: Engine, rows: list[list[int]], prefix: Sequence[int] = (), **settings: Any) -> list[Request]:
    """Makes requests to an engine."""
    log_probs = settings.pop("log_probs", True)
    builder = RequestBuilder(model, GenerationConfig(**settings), engine=own, log_probs=log_probs)
    return [builder.build(builder.check(row, prefix), place=i) for i, row in enumerate(rows)]


def tokens_of(requests: Sequence[Request]) -> list[list[list[int]]]:
    return [[one.tokens for one in request.results] for request in requests]


def served(own: Engine, requests: list[Request]) -> list[list[list[int]]]:
    """Runs requests together, and returns the tokens of their results."""
    run(Scheduler(own, max_rows=64, max_bytes=2**24), requests)
    return tokens_of(requests)


WAYS: list[dict[str, Any]] = [
    {},
    {"num_beams": 4, "num_return_sequences": 2},
    {"num_beams": 3, "length_penalty": 1.4, "min_new_tokens": 4, "suppress_tokens": [7, 8]},
    {"min_new_tokens": 9, "suppress_tokens": [5]},
    {"num_beams": 2, "early_stopping": True, "eos_token_id": (1, 9, 11)},
    {"num_beams": 5, "length_penalty": -0.5, "eos_token_id": (4, 3)},
]


@pytest.mark.parametrize("place, name", list(enumerate(name for name in CONFIGS if name not in RELATIVE)))
def test_the_tokens_are_those_of_recomputing(place, name, watched) -> None:
    kind, options = CONFIGS[name]
    model = drawn(kind, **options)
    assert_same(*both(model, ids(3, 9, 14, 1, 6), max_new_tokens=24, **WAYS[place % len(WAYS)]))
    assert watched.single == 0
    # Of each shape a first step that warms up; all others are replays.
    assert watched.warm_ups <= 8 and watched.captures <= watched.warm_ups and watched.replays > 20


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
def test_searches_by_transformers_rules_run_on_the_device(early_stopping, model, watched) -> None:
    way = {"num_beams": 3, "num_return_sequences": 3, "beam_rules": "transformers", "length_penalty": 1.5}
    for ends in ((1,), (1, 9, 11)):
        options = {**way, "eos_token_id": ends, "early_stopping": early_stopping}
        assert_same(*both(model, ids(3, 9, 14, 1, 6, vocab=VOCAB), max_new_tokens=20, **options))
    assert watched.single == 0 and watched.replays > 20


@pytest.mark.parametrize("way", [0, 1, 2])
def test_ties_fall_as_they_do_on_the_host(way, model, watched) -> None:
    assert_same(*both(coarse(model), ids(4, 8, 2, 11, vocab=VOCAB), max_new_tokens=24, **WAYS[way]))
    assert watched.single == 0


@pytest.mark.parametrize("way", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=["bf16", "fp64"])
def test_other_dtypes(way, dtype, model, watched) -> None:
    other = copy.deepcopy(model).to(dtype)
    found, expected = both(other, ids(4, 8, 2, vocab=VOCAB), max_new_tokens=12, **WAYS[way])
    same = (found.sequences == expected.sequences).double().mean()
    assert same == 1 if dtype == torch.float64 else same > 0.5  # products in 16 bits depend on the number of rows
    assert watched.single == 0


# Of each kind of search one.
DRAWN: list[dict[str, Any]] = [
    {"do_sample": True, "seed": 3, "num_return_sequences": 2, "top_p": 0.9},
    {"do_sample": True, "seed": 4, "top_k": 5, "temperature": 0.7},
]
UNWATCHED: list[dict[str, Any]] = [*WAYS[:3], *DRAWN]


@pytest.mark.parametrize(
    "way, name", by_turns(range(len(UNWATCHED)), ["rms gelu gqa", "two vocabularies", "rotary windows", "gpt windows"])
)
def test_a_step_never_waits_for_the_device_and_gives_the_same_tokens(name, way, monkeypatch) -> None:
    """Whole steps, including the search, run where no value may be read; the tokens are those of recomputing."""
    step, steps = GraphBatch._step_once, []

    def guarded(self: GraphBatch, captured: Any) -> None:
        with NoSync() as mode:
            step(self, captured)
        steps.append(mode.calls)

    monkeypatch.setattr(GraphBatch, "_step_once", guarded)
    monkeypatch.setattr(GraphBatch, "_capture", lambda self, captured: None)  # each step is a call
    model = drawn(CONFIGS[name][0], **CONFIGS[name][1])
    if way != 2 and name.startswith("r"):  # they choose among logits that Python sees
        model = coarse(model)
    inputs, options = ids(5, 2, 7), {"max_new_tokens": 9, "return_dict_in_generate": True, **UNWATCHED[way]}
    expected = generate(model, inputs, engine="recompute", **options)
    monkeypatch.setattr(engine_sampling, "sample", None)  # by which the host draws tokens behind a step
    found = generate(model, inputs, engine="graph", **options)
    assert isinstance(found, GenerateOutput) and isinstance(expected, GenerateOutput)
    assert len(steps) >= 8 and min(steps) > 40
    assert_same(found, expected)


def test_rows_sampled_by_different_options_draw_the_same_tokens_together_and_alone(model, watched) -> None:
    together: list[list[list[int]]] = []
    alone: list[list[list[int]]] = []
    for own, found in ((GraphEngine(model), together), (RecomputeEngine(model), alone)):
        requests = [asked(model, own, [row], max_new_tokens=8, **DRAWN[i % 2])[0] for i, row in enumerate(ids(3, 5, 4))]
        found += served(own, requests) if own.name == "graph" else [served(own, [one])[0] for one in requests]
    assert together == alone and watched.replays > 3


def test_ever_new_temperatures_use_few_graphs(model, watched) -> None:
    engine, plain = GraphEngine(model), RecomputeEngine(model)
    for i in range(2 * graph_module.MAX_SAMPLINGS):
        options = {"do_sample": True, "seed": i, "temperature": 1 + i / 100, "max_new_tokens": 5}
        found, expected = (served(own, asked(model, own, ids(4, 3), **options)) for own in (engine, plain))
        assert found == expected
    kinds = [shape.sampling for shape in engine.shapes]
    assert len({*kinds} - {None}) == graph_module.MAX_SAMPLINGS and None in kinds


def test_groups_that_leave_and_join_use_few_graphs(model, watched) -> None:
    engine, plain = GraphEngine(model), RecomputeEngine(model)

    def said(own: Engine) -> list[list[list[int]]]:
        options: dict[str, Any] = {"num_beams": 2, "eos_token_id": 39}
        rows = enumerate(ids(2, 3, 4, 5, 6, vocab=VOCAB))  # they end in turn
        return served(own, [asked(model, own, [row], max_new_tokens=6 + 5 * i, **options)[0] for i, row in rows])

    expected = said(plain)
    for turn in range(3):
        assert said(engine) == expected
        # 5 groups in captured for 8, then 4, 2 and 1; tables for 64 tokens are wide enough.
        assert watched.captures == watched.warm_ups == 4, turn
    assert watched.single == 0
    shapes = engine.shapes
    assert sorted(shape.num_groups for shape in shapes) == [1, 2, 4, 8] and {shape.width for shape in shapes} == {64}


def test_a_longer_row_gets_a_wider_table(gpt, watched) -> None:
    assert_same(*both(gpt, ids(50, 3, vocab=VOCAB), max_new_tokens=70, num_beams=2, eos_token_id=39))
    assert watched.captures in (2, 3) and watched.single == 0  # 64 and 128 columns; one of the two may leave


@pytest.mark.parametrize("seed", [0, 1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_each_row_decodes_as_if_alone_while_others_come_and_go(seed, model, gpt, watched, monkeypatch) -> None:
    monkeypatch.setattr(requests_module, "_EXPECTED", 2)  # memory runs out, and some begin anew
    dice, which = random.Random(seed), (model, gpt)[seed % 2]
    options: list[dict[str, Any]] = [
        {"num_beams": 1 + seed, "max_new_tokens": 18, "num_return_sequences": 1 + seed // 2},
        {"num_beams": 1 + seed, "max_new_tokens": 11, "min_new_tokens": 3, "num_return_sequences": 1},
    ]
    if seed == 3:
        options.append({"do_sample": True, "num_return_sequences": 2, "max_new_tokens": 6, "seed": 5})
    engine, plain = GraphEngine(which), RecomputeEngine(which)
    pairs: list[list[Request]] = []
    for i in range(14):
        row = [dice.randrange(3, VOCAB) for _ in range(dice.randint(1, 20))]
        prefix = [dice.randrange(3, VOCAB) for _ in range(dice.choice([0, 0, 4]))] if which is model else []
        pairs.append([asked(which, own, [row], prefix, **options[i % len(options)])[0] for own in (engine, plain)])
        run(Scheduler(plain, max_rows=8, max_bytes=2**24), pairs[-1][1:])
    # Memory for about five of them, and rows for four.
    scheduler = Scheduler(engine, max_rows=4 * (1 + seed), max_bytes=engine.token_bytes * 500, is_endless=True)
    waiting = [pair[0] for pair in pairs]
    while waiting or not scheduler.is_idle:
        for _ in range(min(len(waiting), dice.randrange(3))):
            scheduler.submit([waiting.pop(0)])
        scheduler.step()
    for found, expected in pairs:
        assert found.error is None
        assert [h.tokens for h in found.results] == [h.tokens for h in expected.results]
        for one, due in zip(found.results, expected.results, strict=True):
            assert one.score == pytest.approx(due.score, abs=1e-3)
    assert watched.replays > (5 if seed == 3 else 60)


def test_rows_reach_the_last_position(watched) -> None:
    gpt = drawn(GPT, max_len=64, positions="learned", window_size=9)
    with torch.no_grad():
        gpt.output_weight[69] = 0.0  # it never ends by itself
    for way in (0, 1):
        # 56, 2 and 7 tokens until the end of the positions: between two looks most of them are beyond it.
        for lengths in ((62, 8, 57), (61, 1), (63,)):
            engine, plain = GraphEngine(gpt), RecomputeEngine(gpt)
            found, due = (asked(gpt, own, ids(*lengths), **WAYS[way], eos_token_id=69) for own in (engine, plain))
            assert served(engine, found) == served(plain, due)
            assert all(len(one.prompt.tokens) + len(one.results[0].tokens) == 64 for one in found)
    assert watched.single == 0


def test_choices_of_the_host_are_replayed_too(model, watched) -> None:
    engine, plain = GraphEngine(model), RecomputeEngine(model)
    settings: list[dict[str, Any]] = [
        {"do_sample": True, "seed": 3, "num_return_sequences": 3, "temperature": 1.5},
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
        {"repetition_penalty": 1.3},
    ]
    for options in settings:
        found, due = (
            served(own, asked(model, own, ids(3, 9, vocab=VOCAB), max_new_tokens=14, **options))
            for own in (engine, plain)
        )
        assert found == due
    assert watched.replays > 25 and watched.captures <= watched.warm_ups <= 6


def test_searches_of_several_kinds_go_step_by_step(model, watched) -> None:
    engine, plain = GraphEngine(model), RecomputeEngine(model)
    settings: list[dict[str, Any]] = [{}, {"num_beams": 3}, {"suppress_tokens": [6], "min_new_tokens": 7}]
    found, due = (
        [
            asked(model, own, ids(3 + i, vocab=VOCAB), max_new_tokens=9 + i, **options)[0]
            for i, options in enumerate(settings * 2)
        ]
        for own in (engine, plain)
    )
    assert served(engine, found) == served(plain, due)
    assert watched.single > 5


def test_a_streamer_gets_each_token_at_once(model, watched) -> None:
    listener = Listener()
    out = generate(model, ids(6, vocab=VOCAB), engine="graph", max_new_tokens=12, streamer=listener)
    assert isinstance(out, Tensor) and listener.told == [[[0]], *([token] for token in out[0].tolist())]
    assert listener.ended == 1
    assert watched.single == 0


@pytest.mark.parametrize("num_beams", [1, 3])
def test_a_model_that_gives_nan_fails_its_own_request(num_beams, model, watched) -> None:
    broken = copy.deepcopy(model)
    broken.source_embedding.weight.data[20] = torch.nan
    engine = GraphEngine(broken)
    hurt, sound = asked(broken, engine, [[5, 20, 7], [5, 6, 7]], max_new_tokens=10, num_beams=num_beams)
    finish(Scheduler(engine, max_rows=64, max_bytes=2**24), [hurt, sound])
    assert "NaN or infinite logits" in str(hurt.error) and sound.error is None
    alone = both(model, [[5, 6, 7]], max_new_tokens=10, num_beams=num_beams)[1]
    assert sound.results[0].tokens == [token for token in alone.sequences[0].tolist() if token]


# The pool of graphs


def decode(engine: GraphEngine, model: Any, *lengths: int, **options: Any) -> list[list[int]]:
    options = {"max_new_tokens": 12, "eos_token_id": 39, **options}
    return [best for best, *_ in served(engine, asked(model, engine, ids(*lengths, vocab=VOCAB), **options))]


def test_the_least_recently_used_are_freed(model, watched, monkeypatch) -> None:
    engine = GraphEngine(model)
    engine.open(8, 1000)  # the cache that all of them find
    expected = decode(engine, model, 3, 4)
    monkeypatch.setattr(graph_module, "MAX_SHAPES", 2)
    for lengths in ((4,), (3, 4), (3, 4, 4)):  # 1, 2 and 4 groups
        decode(engine, model, *lengths)
    assert [shape.num_groups for shape in engine.shapes] == [2, 4]
    before = watched.captures
    assert decode(engine, model, 3, 4) == expected and watched.captures == before
    decode(engine, model, 4)
    assert watched.captures == before + 1


@pytest.mark.parametrize("what", ["capture", "hook"])
def test_an_uncapturable_step_runs_plainly_with_one_warning(what, model, watched, monkeypatch, caplog) -> None:
    expected, hooked = decode(GraphEngine(model), model, 3, 4), copy.deepcopy(model)
    calls: list[int] = []
    if what == "hook":
        hooked.decoder.layers[0].register_forward_hook(lambda *_: calls.append(1))
        reason = "its decoder.layers.0 has a forward hook"
    else:
        reason = "RuntimeError: a device reads"
        monkeypatch.setattr(TapeGraphs, "capture", Mock(side_effect=CaptureError(reason)))
    with pytest.raises(RuntimeError, match=reason):
        decode(GraphEngine(hooked), hooked, 3, 4)
    monkeypatch.setenv("FASTFORMER_STRICT", "0")
    calls.clear()
    engine = GraphEngine(hooked)
    for _ in range(2):
        assert decode(engine, hooked, 3, 4) == expected
    assert sum(reason in line for line in caplog.messages) == 1
    assert len(calls) == (24 if what == "hook" else 0)


def test_graphs_are_dropped_when_the_model_gets_other_weights(model, watched) -> None:
    own = copy.deepcopy(model)
    engine = GraphEngine(own)
    before = decode(engine, own, 3, 4)
    own.decoder.layers[1].linear1.weight.data.mul_(-1.0)  # in place: the graph reads what is there
    changed = decode(engine, own, 3, 4)
    assert watched.captures == 1 and changed != before
    own.decoder.layers[1].linear1.weight = torch.nn.Parameter(model.decoder.layers[1].linear1.weight.detach().clone())
    assert decode(engine, own, 3, 4) == before
    assert watched.captures == 2


@pytest.fixture
def on_gpu(monkeypatch) -> None:
    """Lets engines choose as for a model on a GPU."""
    monkeypatch.setattr(graph_module, "DEVICES", ("cpu",))
    monkeypatch.setattr(KVCache, "_is_host", staticmethod(lambda device: False))  # as a GPU has tables of its own
    monkeypatch.setattr(CppEngine, "why_unsupported", classmethod(lambda *_: "the model is on a GPU"))


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True, "top_k": 5}], ids=str)
def test_graphs_are_the_default_on_a_gpu(options: dict[str, Any], model, watched, on_gpu) -> None:
    inputs, found = ids(3, 9, 5, vocab=VOCAB), []
    for engine in (None, "kv_cache"):
        torch.manual_seed(0)
        found.append(generate(copy.deepcopy(model), inputs, engine=engine, max_new_tokens=10, **options))
        assert watched.captures >= 1  # by the first of the two
    assert torch.equal(*found)


@pytest.mark.parametrize(("kind", "options", "why"), [
    (*CONFIGS[RELATIVE[0]], "relative positions"),
    (GPT, {"num_experts": 3}, "experts"),
    (GPT, {"attention_sinks": True}, "sinks"),
])  # fmt: skip
def test_a_model_that_graphs_cannot_hold_decodes_without_and_the_log_says_why(
    kind, options, why, on_gpu, caplog
) -> None:
    with caplog.at_level("INFO", logger="fastformer"):
        assert choose_engine(drawn(kind, **options)).name == "kv_cache"
    (line,) = [record.getMessage() for record in caplog.records if "'graph'" in record.getMessage()]
    assert why in line


def test_a_model_with_code_of_its_own_decodes_without_unless_graphs_are_asked_for(on_gpu, caplog) -> None:
    class Counting(GPT):
        """A graph would hold what its code did once."""

    kind, options = next((kind, options) for kind, options in CONFIGS.values() if kind is GPT)
    inside = drawn(kind, **options)
    own = Counting(inside.config)
    with caplog.at_level("INFO", logger="fastformer"):
        assert choose_engine(own).name == "kv_cache" and choose_engine(own, "graph").name == "graph"
    assert any("Counting" in record.getMessage() for record in caplog.records)
    assert choose_engine(inside).name == "graph"
    inside.decoder.layers[0].dropout3 = type("Own", (torch.nn.Dropout,), {"__module__": "user"})(0.0)
    assert choose_engine(inside).name == "kv_cache"


def test_the_next_engine_of_a_model_finds_the_graphs(model, watched, monkeypatch) -> None:
    monkeypatch.setattr(graph_module, "DEVICES", ("cpu",))
    monkeypatch.setattr(KVCache, "_is_host", staticmethod(lambda device: False))  # as a GPU has tables of its own
    own = copy.deepcopy(model)
    inputs = ids(3, 9, 5, vocab=VOCAB)
    found = [generate(own, inputs, engine="graph", num_beams=2, max_new_tokens=10) for _ in range(3)]
    before = watched.captures
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2]) and watched.captures == watched.warm_ups
    idle = GraphEngine(own)  # leaves the graphs to others, since it opens no batch
    generate(own, inputs, engine="graph", num_beams=2, max_new_tokens=10)
    del idle
    generate(own, inputs, engine="graph", num_beams=2, max_new_tokens=10)
    assert watched.captures == before
    generate(own, inputs[:2], engine="graph", num_beams=2, max_new_tokens=10)
    assert watched.captures == before + 1  # for fewer groups
    busy = GraphEngine(own)
    busy.open(4, 100)  # what one engine has, another one can't have
    generate(own, inputs, engine="graph", num_beams=2, max_new_tokens=10)
    assert watched.captures > before + 1
    del busy
    own.bfloat16()
    bf16 = generate(own, inputs, engine="graph", num_beams=2, max_new_tokens=10)  # in a cache of its own dtype
    assert bf16.shape[0] == 3
    kept = weakref.ref(next(iter(notes_of(own).findings["graphs"].captured.values())))
    del own
    gc.collect()
    assert kept() is None


def test_a_shape_is_a_little_larger_than_needed() -> None:
    sizes = [bucket(count) for count in range(1, 400)]
    assert all(count <= size <= max(2 * count - 1, 1) for count, size in enumerate(sizes, 1))
    assert sorted(set(sizes)) == [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512]
    for count in (1, 7, 16, 17, 999, 1000, 2**20 + 1):
        assert count <= rounded(count) <= count * 9 / 8
    assert len({rounded(count) for count in range(1024, 2048)}) <= 9


# Two words and the end: after a step there are two beams for five captured, and then a request joins.
WORDS = [{1, 7, 20}, {1, 9}]


@pytest.mark.parametrize("words, steps_per_look, num_beams", [(WORDS[0], 1, 5), (WORDS[1], 3, 5), (WORDS[0], 1, 1)])
def test_few_words_leave_lanes_without_a_hypothesis(
    words, steps_per_look, num_beams, model, watched, monkeypatch
) -> None:
    options: dict[str, Any] = {"num_beams": num_beams, "num_return_sequences": num_beams}
    options["suppress_tokens"] = sorted({*range(VOCAB)} - words)
    engine, plain = GraphEngine(model), RecomputeEngine(model)
    monkeypatch.setattr(graph_module, "STEPS_PER_LOOK", steps_per_look)
    pairs = [
        [asked(model, own, [row], max_new_tokens=9 + i, min_new_tokens=6, **options)[0] for own in (engine, plain)]
        for i, row in enumerate(ids(3, 5, 4, 6, vocab=VOCAB))
    ]
    scheduler = Scheduler(engine, max_rows=64, max_bytes=2**24, is_endless=True)
    monkeypatch.setattr(scheduler_module, "_RUN_SECONDS", 0.0)  # one look, and a request comes
    for found, expected in pairs:
        run(Scheduler(plain, max_rows=8, max_bytes=2**24), [expected])
        scheduler.submit([found])
        scheduler.step()
    run(scheduler, [])
    assert all(tokens_of([found]) == tokens_of([expected]) for found, expected in pairs)
    assert watched.single == 0


@pytest.mark.parametrize("words", [{*range(VOCAB)}, {1, 7, 20}], ids=["many words", "fewer words than beams"])
def test_beams_continue_after_steps_with_other_requests(words, model, watched, monkeypatch) -> None:
    monkeypatch.setattr(scheduler_module, "_RUN_SECONDS", 0.0)
    monkeypatch.setattr(graph_module, "STEPS_PER_LOOK", 1)
    engine, plain = GraphEngine(model), RecomputeEngine(model)
    scheduler = Scheduler(engine, max_rows=64, max_bytes=2**24, is_endless=True)
    options: dict[str, Any] = {"max_new_tokens": 40, "num_beams": 4, "num_return_sequences": 4, "eos_token_id": 39}
    options["suppress_tokens"] = sorted({*range(VOCAB)} - words)
    ((found,), (expected,)) = (asked(model, own, ids(7, vocab=VOCAB), **options) for own in (engine, plain))
    run(Scheduler(plain, max_rows=8, max_bytes=2**24), [expected])
    scheduler.submit([found])
    scheduler.step()
    scheduler.submit(asked(model, engine, [[5, 6]], max_new_tokens=3, do_sample=True, seed=1, eos_token_id=39))
    scheduler.step()
    run(scheduler, [])
    assert tokens_of([found]) == tokens_of([expected])
    assert found.results[0].score == pytest.approx(expected.results[0].score, abs=1e-4)
    assert watched.single == 0  # the device goes on with the scores that the host knows


def test_a_run_has_the_steps_that_there_is_memory_for(gpt, watched, monkeypatch) -> None:
    monkeypatch.setattr(requests_module, "_EXPECTED", 2)  # more requests are admitted than have memory to the end
    engine, plain = GraphEngine(gpt), RecomputeEngine(gpt)
    options: dict[str, Any] = {"max_new_tokens": 90, "min_new_tokens": 90}
    found, due = (asked(gpt, own, ids(1, 5, 9, 13, vocab=VOCAB), **options) for own in (engine, plain))
    refused, reserve = Mock(), FixedShapeCache.reserve_run

    def watched_reserve(self: FixedShapeCache, *args: Any) -> None:
        try:
            reserve(self, *args)
        except CacheFullError:
            refused(args[0])
            raise

    monkeypatch.setattr(FixedShapeCache, "reserve_run", watched_reserve)
    run(Scheduler(engine, max_rows=64, max_bytes=engine.token_bytes * 250), found)
    assert tokens_of(found) == served(plain, due)
    assert refused.call_args_list and watched.single == 0


def test_log_probabilities_are_available_on_request(model) -> None:
    for wanted in (False, True):
        engine = GraphEngine(model)
        (request,) = asked(model, engine, [[5, 6, 7]], max_new_tokens=5, log_probs=wanted)
        run(Scheduler(engine, max_rows=4, max_bytes=2**20), [request])
        (shape,) = engine.shapes
        assert shape.log_probs == wanted
        values = request.results[0].log_probs
        assert (max(values) <= 0) == wanted  # else they are logits, of which the best is positive here


def with_own_logits(model: Any) -> Any:
    """Makes a model choose among logits on the host, because no Triton kernel chooses tokens."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("with a GPU kernels are compiled: test_graph_engine_gpu.py")
    kind = type(model)
    model.__class__ = type("OwnLogits", (kind,), {"logits": lambda self, hidden: kind.logits(self, hidden)})
    return model


def test_steps_of_triton_kernels_give_the_same_tokens(watched) -> None:
    options = CONFIGS["rms gelu gqa"][1] | {"num_encoder_layers": 1, "num_decoder_layers": 1}
    model = with_own_logits(drawn(Transformer, **options))
    settings: dict[str, Any] = {"num_beams": 2, "max_new_tokens": 4, "eos_token_id": 69}
    expected = generate(model, ids(3, 7), engine="recompute", **settings)
    with use_backend("triton"), record_backends() as ran:
        found = generate(model, ids(3, 7), engine="graph", **settings)
    assert isinstance(found, Tensor) and isinstance(expected, Tensor) and torch.equal(found, expected)
    assert ("decode_attention", "triton") in ran and watched.replays == 3


@pytest.mark.parametrize("interleaved", [False, True])
def test_steps_of_triton_kernels_rotate_within_attention(interleaved: bool, watched) -> None:
    model = with_own_logits(drawn(GPT, **CONFIGS["rotary windows"][1] | {"num_layers": 1}))
    assert model.rotary is not None
    model.rotary.interleaved = interleaved
    settings: dict[str, Any] = {"max_new_tokens": 4}
    expected = generate(model, ids(1, 1), engine="recompute", **settings)
    with use_backend("triton"), record_backends() as ran:
        found = generate(model, ids(1, 1), engine="graph", **settings)  # without a prompt before the first step
    assert isinstance(found, Tensor) and isinstance(expected, Tensor) and torch.equal(found, expected)
    assert ("decode_attention", "triton") in ran and not any(op == "rotary_fwd" for op, _ in ran)
