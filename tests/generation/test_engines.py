"""All engines follow one contract: each row decodes as if alone, whichever rows join, move and leave."""

from __future__ import annotations

import copy
import math
import random
import re
import weakref
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from fastformer.cache.block_pool import CacheFullError
from fastformer.generation import Ensemble, engines
from fastformer.generation.engines import ENGINES, Batch, Engine, Prompt, Sample, Selection, choose_engine
from fastformer.generation.engines.cpp import CppEngine
from fastformer.generation.engines.graph import GraphEngine
from fastformer.generation.engines.kv_cache import KVCacheEngine
from fastformer.generation.engines.recompute import RecomputeEngine
from fastformer.generation.engines.recurrent import RecurrentEngine
from fastformer.generation.engines.sampling import sample
from fastformer.generation.model_protocols import dtype_precision, own_precision
from fastformer.generation.requests import Request
from fastformer.generation.scheduler import Scheduler, run
from fastformer.generation.search import BeamSearch, RowSearch, Sampling
from fastformer.models import GPT
from fastformer.nn import KVCache
from tests.covering import by_turns
from tests.generation import toy
from tests.generation.small import CPP, DEFAULT, EOS, HAS_CPP, VOCAB, coarse, next_logits

PAIRS = [
    *([("cpp", "model"), ("cpp", "gpt"), ("cpp", "hybrid")] if HAS_CPP else []),
    ("graph", "model"),
    ("kv_cache", "model"),
    ("recompute", "model"),
    ("graph", "gpt"),
    ("kv_cache", "gpt"),
    ("recompute", "gpt"),
    ("recompute", "hybrid"),
    ("recurrent", "lstm"),
    ("ensemble", "ensemble"),
    ("toy", "toy"),
]
COUNTED = {"cpp", "graph", "kv_cache", "recurrent", "ensemble"}


class Driven(NamedTuple):
    """An engine, and its expected results."""

    engine: Engine
    model: Any  # None: the toy's own

    @property
    def vocab(self) -> int:
        return VOCAB if self.model is not None else toy.VOCAB

    def prompt(self, dice: random.Random) -> Prompt:
        def ids(low: int, high: int) -> list[int]:
            return [dice.randrange(3, self.vocab) for _ in range(dice.randint(low, high))]

        if self.model is None:
            return Prompt([dice.randrange(3)], [0, *ids(0, 4)])
        if isinstance(self.model, GPT):
            return Prompt(None, ids(1, 20))
        return Prompt(ids(1, 20), [0, *(ids(1, 18) if dice.random() < 0.4 else [])])

    def expected(self, prompt: Prompt, tokens: list[int]) -> Tensor:
        """Returns the expected logits of the next token; `tokens` are all tokens of the decoder, including the
        prompt's.
        """
        if self.model is None:
            assert isinstance(self.engine, toy.ToyEngine) and prompt.source is not None
            before, last = (0, *tokens)[-2:]
            return self.engine.table[prompt.source[0], before, last]
        if isinstance(self.model, Ensemble):
            shares = self.model.weights
            each = [next_logits(m, prompt.source, tokens[1:], start=tokens[0])[-1].double() for m in self.model.members]
            return sum(w * one.softmax(-1) for w, one in zip(shares, each, strict=True)).log()
        if prompt.source is None:
            return next_logits(self.model, tokens, [])[-1]
        return next_logits(self.model, prompt.source, tokens[1:], start=tokens[0])[-1]


@pytest.fixture(params=PAIRS, ids="-".join)
def driven(request) -> Driven:
    name, which, *how = request.param
    if name == "toy":
        return Driven(toy.ToyEngine(3), None)
    model = request.getfixturevalue(which)
    if how == ["bf16"]:
        model = copy.deepcopy(model).bfloat16()
    elif how == ["own logits"]:
        model = coarse(model)
    return Driven(choose_engine(model, named(name)), model)


def named(name: str) -> str | None:
    """Returns the arguments of `choose_engine`."""
    return None if name == "ensemble" else name  # which has to be none's name


class Group:
    """A request as the driver of the engine sees it: the tokens of each row."""

    def __init__(self, prompt: Prompt) -> None:
        self.prompt, self.steps = prompt, 0
        self.rows = [list(prompt.tokens[:-1])]


@torch.inference_mode()
def step(driven: Driven, batch: Batch, groups: list[Group], dice: random.Random, selection: Selection):
    """Steps all rows, at first with the prompts' last tokens. Returns the candidates and the expected logits."""
    tokens, expected = [], []
    for group in groups:
        for row in group.rows:
            token = dice.randrange(driven.vocab) if group.steps else group.prompt.tokens[-1]
            row.append(token)
            tokens.append(token)
        group.steps += 1
    found = batch.step(tokens, selection)
    for group in groups:
        expected += [driven.expected(group.prompt, row) for row in group.rows]
    return found, expected


def fork(batch: Batch, groups: list[Group], dice: random.Random, widest: int) -> None:
    parents = [[dice.randrange(len(group.rows)) for _ in range(dice.randint(1, widest))] for group in groups]
    batch.fork(parents)
    for group, places in zip(groups, parents, strict=True):
        group.rows = [list(group.rows[place]) for place in places]


# What comes, moves and goes is drawn; the other seeds draw more of the same.
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_each_row_decodes_as_if_alone(driven, seed) -> None:
    dice = random.Random(seed)
    engine = driven.engine
    groups: list[Group] = []
    batch = engine.open(24, 10_007)  # no whole number of blocks
    room = batch.free_tokens()
    for turn in range(22):
        if turn < 2 or (dice.random() < 0.25 and len([row for group in groups for row in group.rows]) < 12):
            new = [driven.prompt(dice) for _ in range(dice.randint(1, 3))]
            batch.prefill(new)
            groups += [Group(prompt) for prompt in new]
        if not groups:
            continue
        found, expected = step(driven, batch, groups, dice, Selection(4))
        for ids, values, logits in zip(*found, expected, strict=True):
            due = logits.log_softmax(-1)
            assert values == pytest.approx(due.topk(4).values.tolist(), abs=2e-4)
            assert values == pytest.approx(due[ids].tolist(), abs=2e-4) and len(set(ids)) == 4
        if dice.random() < 0.6:
            fork(batch, groups, dice, 3 if len(groups) < 5 else 2)
        if dice.random() < 0.3:
            leaving = sorted(dice.sample(range(len(groups)), dice.randint(1, len(groups))))
            batch.free(leaving)
            groups = [group for i, group in enumerate(groups) if i not in leaving]
    batch.free(range(len(groups)))
    assert batch.free_tokens() == room and batch.step_tokens() == 0


@pytest.mark.parametrize("asks, log_probs, is_processed", by_turns(["all", "some"], [True, False], [True, False]))
def test_processed_and_sampled_rows_are_in_order(driven, asks, log_probs, is_processed) -> None:
    dice = random.Random(1)
    engine = driven.engine
    batch = engine.open(16, 10_000)
    new = [driven.prompt(dice) for _ in range(3)]
    batch.prefill(new)
    groups = [Group(prompt) for prompt in new]
    step(driven, batch, groups, dice, Selection(1))
    fork(batch, groups, dice, 3)
    count = sum(len(group.rows) for group in groups)
    asked = [row for row in range(count) if row % 4 != 1 or asks == "all"]
    seen: list[Tensor] = []

    def process(logits: Tensor) -> Tensor:
        assert logits.shape == (len(asked), driven.vocab) and logits.dtype == torch.float32
        seen.append(logits.clone())
        return logits - 3 * torch.arange(driven.vocab) * (torch.tensor(asked)[:, None] % 2)

    uniform = [dice.random() for _ in range(count)]
    draws = {row: Sample(1.3, 3, 0.9, uniform[row]) if row % 3 else None for row in asked}
    editing = process if is_processed else None
    selection = Selection(2, log_probs, asked, editing, list(draws.values()))
    found, expected = step(driven, batch, groups, dice, selection)
    for row, (ids, values, logits) in enumerate(zip(*found, expected, strict=True)):
        due = logits
        if is_processed and row in asked:
            assert (seen[0][asked.index(row)] - logits).abs().max() < 2e-4
            due = logits - 3 * torch.arange(driven.vocab) * (row % 2)
        exact = due.log_softmax(-1) if log_probs else due
        if draws.get(row) is None:
            assert values == pytest.approx(exact.topk(2).values.tolist(), abs=2e-4)
            assert values == pytest.approx(exact[ids].tolist(), abs=2e-4)
            continue
        assert values[0] == pytest.approx(exact[ids[0]].item(), abs=2e-4)
        # Of the three best, after the temperature, in the order of their ids.
        kept = sorted((due / 1.3).topk(3).indices.tolist())
        shares = (due / 1.3)[kept].softmax(-1)
        ranked = shares.sort(descending=True)
        shares[ranked.indices[ranked.values.cumsum(0) - ranked.values >= 0.9]] = 0.0
        ends = (shares / shares.sum()).cumsum(0).tolist()
        assert ids[0] == kept[next(i for i, end in enumerate(ends) if uniform[row] < end)]
    every, _ = step(driven, batch, groups, dice, Selection(10**6, log_probs))
    assert all(sorted(ids) == list(range(driven.vocab)) for ids in every.ids)  # all there are, when more are asked for


@torch.inference_mode()
@pytest.mark.parametrize("asked", [[2], [0, 3], [1, 2, 3], [0, 1, 2, 3]], ids=str)
@pytest.mark.parametrize("pair", [("kv_cache", "model"), ("kv_cache", "gpt"), ("recompute", "gpt")], ids="-".join)
def test_in_16_bits_a_row_has_the_same_values_if_its_neighbours_are_sampled(pair, asked, request) -> None:
    model = copy.deepcopy(request.getfixturevalue(pair[1])).bfloat16()
    engine, found = choose_engine(model, pair[0]), []
    draws = [Sample(1.0, 0, 1.0, 0.5)] * len(asked)
    for selection in (Selection(3), Selection(3, logit_rows=asked, samples=draws, process=lambda logits: logits)):
        batch = engine.open(4, 10_000)
        batch.prefill([Prompt(None if pair[1] == "gpt" else [5, 6 + i], [3 + i]) for i in range(4)])
        found.append(batch.step([3, 4, 5, 6], selection))
    alone, beside = found
    for row in range(4):
        if row not in asked:
            assert alone.ids[row] == beside.ids[row] and alone.values[row] == pytest.approx(
                beside.values[row], abs=1e-5
            )
        else:  # it was rounded: this test would notice
            assert alone.values[row] != pytest.approx(beside.values[row], abs=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair[0] in COUNTED], ids="-".join)
def test_the_estimated_memory_is_sufficient(pair, seed, request) -> None:
    model = request.getfixturevalue(pair[1])
    driven, dice = Driven(choose_engine(model, named(pair[0])), model), random.Random(seed)
    engine = driven.engine
    assert engine.token_bytes > 0
    prompts = [driven.prompt(dice) for _ in range(3)]
    widest, new_tokens = [dice.randint(1, 4) for _ in prompts], dice.choice([3, 16, 17, 40])
    needed = [engine.tokens_needed(p, rows, new_tokens) for p, rows in zip(prompts, widest, strict=True)]
    batch = engine.open(sum(widest), sum(needed))
    assert batch.free_tokens() >= sum(needed)
    batch.prefill(prompts)
    sizes = [1] * 3
    for _ in range(new_tokens):
        taken = batch.step_tokens()
        assert 0 <= taken <= batch.free_tokens()
        free = batch.free_tokens()
        batch.step([5] * sum(sizes), Selection(1))
        if pair[0] in ("cpp", "kv_cache"):
            assert free - batch.free_tokens() <= taken  # it also finds blocks that no row names
        wanted = [dice.randint(size, most) for size, most in zip(sizes, widest, strict=True)]
        parents = [[dice.randrange(size) for _ in range(new)] for size, new in zip(sizes, wanted, strict=True)]
        batch.fork(parents)
        sizes = list(map(len, parents))
    for i in range(3):
        before = batch.free_tokens()
        batch.free([0])
        assert batch.free_tokens() > before
        assert batch.free_tokens() - before <= needed[i]
    assert batch.free_tokens() >= sum(needed)


@torch.inference_mode()
@pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair[0] in COUNTED], ids="-".join)
def test_a_long_source_or_prompt_is_counted_once_and_not_much_too_high(pair, request) -> None:
    engine = choose_engine(request.getfixturevalue(pair[1]), named(pair[0]))
    long = [5 + i % 30 for i in range(100)]
    prompts = [Prompt(None, long)] if pair[1] in ("gpt", "hybrid") else [Prompt(long, [0]), Prompt([5], [0, *long])]
    for prompt in prompts:
        batch = engine.open(1, 10_000)
        before = batch.free_tokens()
        batch.prefill([prompt])
        for _ in range(3):
            batch.step([5], Selection(1))
        used = before - batch.free_tokens() + batch.step_tokens()
        assert used <= engine.tokens_needed(prompt, 1, 4) <= used + 32
        more = engine.tokens_needed(prompt, 4, 4) - engine.tokens_needed(prompt, 1, 4)
        # What the rows share is there once. A row's own: new tokens, a source, or a state of 6 * 9 numbers for each of
        # eight heads, with rows of 16, and three inputs of a convolution.
        state = -(-4 * 2 * (4 * 6 * 16 + 3 * (2 * 2 * 6 + 4 * 9)) // (16 * engine.token_bytes)) * 16
        of_row = 32 + (state if pair[1] == "hybrid" else 0)
        assert more == 3 * (len(prompt.source or ()) if pair[0] == "recurrent" else of_row)


@torch.inference_mode()
@pytest.mark.parametrize("same", [True, False], ids=["one parent", "each its own"])
@pytest.mark.parametrize(
    "pair", [pair for pair in PAIRS if pair[0] in ("cpp", "kv_cache") and pair[1] != "hybrid"], ids="-".join
)
def test_a_step_takes_the_memory_of_its_estimate(pair, same, request) -> None:
    engine = choose_engine(request.getfixturevalue(pair[1]), pair[0])
    batch = engine.open(4, (9 if pair[0] == "cpp" else 8) * 16)
    batch.prefill([Prompt(None if pair[1] == "gpt" else [5, 6], [0])])
    batch.fork([[0] * 4])
    steps = 0
    while batch.step_tokens() <= batch.free_tokens():
        batch.step([5 + steps % 7] * 4, Selection(1))
        steps += 1
        batch.fork([[0] * 4 if same else [3, 2, 1, 0]])
    with pytest.raises(ValueError if pair[0] == "cpp" else CacheFullError, match="the cache has"):
        batch.step([5] * 4, Selection(1))
    # Nine blocks. Rows that all go on from one of them share what lies behind them, and take a new one each.
    shared, own = (96, 32) if pair[1] == "gpt" else (80, 32)
    assert steps == (shared if same else own)


@pytest.mark.parametrize("name", [CPP, "kv_cache"])
def test_beams_that_shrink_and_grow_again_get_enough_memory(name, model, calls_of) -> None:
    # At every other step only the last beam may go on.
    def gate(input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] % 2:
            return scores
        scores[:-1] = -math.inf
        scores[-1, 1:] = -math.inf
        return scores

    def ask() -> Request:
        return Request(Prompt([5, 6, 7], [0]), partial(BeamSearch, 110, frozenset({VOCAB - 1}), 8), processors=[gate])

    small, large = ask(), ask()
    engine = choose_engine(model, name)
    starts = calls_of(engine, "open")
    run(Scheduler(engine, max_rows=8, max_bytes=1), [small])
    assert len(starts) == 2
    run(Scheduler(choose_engine(model, "recompute"), max_rows=8, max_bytes=1), [large])
    assert small.results[0].tokens == large.results[0].tokens and len(small.results[0].tokens) > 100


SEARCHES = {
    "greedy": partial(RowSearch, 9, frozenset({EOS})),
    "beams": partial(BeamSearch, 9, frozenset({EOS}), 3, num_return=3),
    "samples": partial(RowSearch, 9, frozenset({EOS}), 2, Sampling(0.8, 10, 0.95, seed=5)),
}


# Where an engine has two ways to the best tokens: in 16 bits and with logits of the model's own, each with one search.
VARIED = [
    *((*pair, "bf16") for pair in PAIRS if pair[1] in ("model", "gpt", "hybrid")),
    *((*pair, "own logits") for pair in PAIRS if pair[1] in ("model", "gpt") and pair[0] != "cpp"),
]


@pytest.mark.parametrize(
    ("driven", "search"),
    [*by_turns(PAIRS, [*SEARCHES]), *by_turns(VARIED, [*SEARCHES])],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
    indirect=["driven"],
)
def test_a_row_that_joins_midway_decodes_as_if_alone(driven, search) -> None:
    dice = random.Random(3)
    # PyTorch's own products in 16 bits may depend on the number of rows, in their last bits.
    is_narrow = driven.model is not None and next(driven.model.parameters()).dtype == torch.bfloat16
    prompts = [driven.prompt(dice) for _ in range(2)]
    alone = []
    for prompt in prompts:
        request = Request(prompt, SEARCHES[search])
        run(Scheduler(driven.engine, max_rows=8, max_bytes=2**24), [request])
        alone.append(request.results)
    scheduler = Scheduler(driven.engine, max_rows=64, max_bytes=2**24)
    others = [Request(driven.prompt(dice), SEARCHES[kind]) for kind in ("greedy", "beams", "samples") * 3]
    others[0].processors = (lambda input_ids, scores: scores,)
    requests = [Request(prompt, SEARCHES[search]) for prompt in prompts]
    scheduler.submit(others[:4])
    # The engine begins with rows for all of those that wait: some of them leave again, and others find room.
    for other in others[4:]:
        scheduler.submit([other])
    for request in requests:
        scheduler.submit([request])
        for _ in range(2):
            scheduler.step()
    run(scheduler, [])
    for request, expected in zip(requests, alone, strict=True):
        assert [found.tokens for found in request.results] == [found.tokens for found in expected]
        for found, due in zip(request.results, expected, strict=True):
            assert found.score == pytest.approx(due.score, abs=5e-3 if is_narrow else 1e-3)


def test_the_memory_of_a_dropped_batch_is_free_for_the_next(model, monkeypatch) -> None:
    engine = choose_engine(model, "kv_cache")
    kept: list[weakref.ref[Tensor]] = []
    held: list[int] = []  # by all caches, each time that there is a new one
    empty_cache = type(model).empty_cache

    def watched(*args: Any, **options: Any) -> KVCache:
        cache = empty_cache(*args, **options)
        kept.append(weakref.ref(cache.k))
        held.append(sum(2 * k.numel() * k.element_size() for ref in kept if (k := ref()) is not None))
        return cache

    monkeypatch.setattr(type(model), "empty_cache", watched)
    for _ in range(3):
        batch: Batch | None = engine.open(4, 1000)
        assert batch is not None and batch.free_tokens() >= 1000 - 16
        batch = None
    assert 1000 * engine.token_bytes <= max(held) < 1100 * engine.token_bytes


def test_a_registered_engine_decodes_if_its_name_is_given(gpt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_REGISTERED", {})  # so that no other test sees the engine
    opened = []

    class Counting(RecomputeEngine):
        name = "counting"

        def open(self, max_rows: int, num_tokens: int) -> Batch:
            opened.append(max_rows)
            return super().open(max_rows, num_tokens)

    engines.register(Counting)
    options = {"num_beams": 2, "max_new_tokens": 4}
    expected = gpt.generate([[3, 5]], **options)
    assert not opened
    assert torch.equal(gpt.generate([[3, 5]], engine="counting", **options), expected) and opened
    Counting.name = "cpp"  # the name of another engine
    for wrong in (Counting, Engine, "counting", RecomputeEngine):
        with pytest.raises(ValueError, match=r"\bengine\b"):
            engines.register(wrong)


def test_each_pair_of_an_engine_and_a_model_works_or_says_why_not(model, gpt, lstm) -> None:
    decodes: dict[type[Engine], tuple[bool, bool, bool]] = {
        CppEngine: (HAS_CPP, HAS_CPP, False),
        GraphEngine: (True, True, False),
        KVCacheEngine: (True, True, False),
        RecomputeEngine: (True, True, False),
        RecurrentEngine: (False, False, True),
    }
    assert set(ENGINES) == {engine.name for engine in decodes}
    for engine, is_able_to in decodes.items():
        name = engine.name
        for which, is_able in zip((model, gpt, lstm), is_able_to, strict=True):
            reason = engine.why_unsupported(which)
            assert (reason is None) == is_able
            if is_able:
                assert type(choose_engine(which, name)) is engine
                continue
            with pytest.raises(ValueError, match=f"'{name}'.*{type(which).__name__}.*{re.escape(str(reason))}"):
                choose_engine(which, name)


def test_the_fastest_engine_is_the_default(model, gpt, lstm) -> None:
    assert [choose_engine(which).name for which in (model, gpt, lstm)] == [DEFAULT, DEFAULT, "recurrent"]
    # What the C++ engine can't do (a model's own logits, which it would not ask for) the cached modules do.
    assert choose_engine(coarse(model)).name == "kv_cache"
    with pytest.raises(ValueError, match=r"\bengine\b.*kv_cache.*'fast'"):
        choose_engine(model, "fast")
    with pytest.raises(ValueError, match="'cpp'.*Linear.*'kv_cache'.*'recurrent'"):
        choose_engine(torch.nn.Linear(2, 2))


def test_an_engine_that_calls_the_modules_only_has_their_precision(model, gpt, lstm) -> None:
    for engine in (GraphEngine, KVCacheEngine, RecomputeEngine, RecurrentEngine):
        which = lstm if engine is RecurrentEngine else model
        assert [engine.why_unsupported(which, p) for p in (None, "fp32")] == [None, None]
        for precision, advice in (("bf16", "model.bfloat16()"), ("fp16", "model.half()"), ("int4", "engine 'cpp'")):
            assert advice in str(engine.why_unsupported(which, precision))
        with torch.autocast("cpu", torch.bfloat16):
            if engine is GraphEngine:
                assert "autocast" in str(engine.why_unsupported(which))
                continue
            assert [engine.why_unsupported(which, p) for p in (None, "bf16")] == [None, None]
            assert "autocast" in str(engine.why_unsupported(which, "fp32"))
    half = copy.deepcopy(gpt).bfloat16()
    assert KVCacheEngine.why_unsupported(half, "bf16") is None and own_precision(half) == "bf16"
    assert "decode with model.float()" in str(KVCacheEngine.why_unsupported(half, "fp32"))
    half.decoder.norm.float()
    assert own_precision(half) == "mixed" and KVCacheEngine.why_unsupported(half) is None
    assert own_precision(copy.deepcopy(gpt).double()) == "float64"
    quantised = gpt.quantize()
    assert own_precision(quantised) == "int8" and dtype_precision(quantised) == "fp32"
    # Its weights are rounded, which any engine can compute with; computing in int8 is another matter.
    assert KVCacheEngine.why_unsupported(quantised) is None
    assert "'cpp'" in str(KVCacheEngine.why_unsupported(quantised, "int8"))
    with pytest.raises(ValueError, match="'kv_cache'.*GPT.*int8"):
        choose_engine(quantised, "kv_cache", "int8")
    odd = copy.copy(gpt)  # it decodes like a GPT but isn't one, so only its own modules can decode it
    odd.__class__ = type("Odd", (GPT,), {})
    with pytest.raises(ValueError, match="'kv_cache', 'recompute'.*Odd.*int8"):
        choose_engine(odd, None, "int8")
    with pytest.raises(ValueError, match=r"\bprecision\b.*'int2'"):
        choose_engine(gpt, None, "int2")


def test_draws_follow_the_distribution_to_its_ends() -> None:
    logits = torch.tensor([[-math.inf, 0.0, math.log(2), -math.inf, math.log(5)]]).repeat(6, 1)
    points = [0.0, 0.1249, 0.1251, 0.3749, 0.3751, 1 - 2**-53]
    assert sample(logits, [Sample(1.0, 0, 1.0, point) for point in points]).tolist() == [1, 1, 2, 2, 4, 4]


def test_each_of_many_unlikely_tokens_may_be_drawn() -> None:
    # Behind the first token's sum of nearly 1, fp32 can't tell four neighbours of this probability apart.
    count, small = 4096, math.exp(-18)
    logits = torch.tensor([[0.0, *[-18.0] * count]])
    points = [(1 + small * (place + 0.5)) / (1 + small * count) for place in range(1000, 1064)]
    drawn = sample(logits.expand(64, -1), [Sample(1.0, 0, 1.0, point) for point in points]).tolist()
    assert drawn == [*range(drawn[0], drawn[0] + 64)]  # in fp32, the first one's own probability is a few places off
    assert abs(drawn[0] - 1001) < 8


def test_each_row_is_drawn_in_its_own_way() -> None:
    logits = torch.randn(4, 50).repeat(6, 1)
    kinds = [(1.0, 0, 1.0), (1.0, 2, 1.0), (1.0, 0, 0.1), (0.01, 0, 1.0), (3.0, 5, 0.5), (1.0, 2, 1.0)]
    draws = [Sample(*kind, 0.99 - 0.17 * row) for kind in kinds for row in range(4)]
    together = sample(logits, draws).tolist()
    assert together == [int(sample(logits[i : i + 1], [one])) for i, one in enumerate(draws)]
    assert len(set(zip(together[::4], together[1::4], together[2::4], strict=True))) > 3  # it matters
