"""Compares the searches in Python, in C++ and on the device with plain ones, and with each other.

Those in Python and C++ are held to the plain ones and to all that there is to find. Step by step, those in C++ and on
the device are held to those in Python, to the last tie.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from fastformer.generation.engines import Selection
from fastformer.generation.engines.device_search import DeviceSearch
from fastformer.generation.engines.sampling import choose
from fastformer.generation.native_search import NativeSearch, SearchRules
from fastformer.generation.search import BeamSearch, RowSearch, Sampling, Search, TransformersBeamSearch
from fastformer.generation.search import Hypothesis as Found
from tests.covering import covering
from tests.generation.small import needs_cpp
from tests.generation.toy import (
    EOS,
    VALUES,
    VOCAB,
    Hypothesis,
    ToyEngine,
    ask,
    candidates,
    decode,
    every_hypothesis,
    plain_beam_search,
    plain_greedy,
    plain_transformers_search,
)
from tests.no_sync import NoSync


def beams_of(engine: ToyEngine, limits: list[int], beams: int, *, ends: Collection[int] = (EOS,), **options):
    """Returns the results of a beam search for each source, all of which are decoded together."""
    kind = options.pop("kind", BeamSearch)
    requests = [
        ask(source, partial(kind, limit, frozenset(ends), beams, **options)) for source, limit in enumerate(limits)
    ]
    return decode(engine, requests, max_rows=10_000)


KINDS = [pytest.param(BeamSearch, id="python"), pytest.param(NativeSearch.beams, id="cpp", marks=needs_cpp)]
BY_TRANSFORMERS_RULES = [
    pytest.param(TransformersBeamSearch, id="python"),
    pytest.param(partial(NativeSearch.beams, beam_rules="transformers"), id="cpp", marks=needs_cpp),
]
GREEDY = [pytest.param(RowSearch, id="python"), pytest.param(NativeSearch.greedy, id="cpp", marks=needs_cpp)]


def assert_found(engine: ToyEngine, source: int, found: list[Found], expected: list[Hypothesis]) -> None:
    """Checks tokens and their order, scores, and the engine's log-probabilities."""
    assert [tuple(hypothesis.tokens) for hypothesis in found] == [tokens for _, tokens in expected]
    for hypothesis, (score, tokens) in zip(found, expected, strict=True):
        assert abs(hypothesis.score - score) < 1e-5
        assert hypothesis.log_probs == pytest.approx(engine.log_probs(source, tokens), abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_a_wide_beam_equals_brute_force(alpha, kind) -> None:
    # A beam as wide as all that there is misses nothing: 21 hypotheses that finish, and 43 of those that are cut.
    engine = ToyEngine(3)
    for source, found in enumerate(beams_of(engine, [3] * 3, 64, kind=kind, alpha=alpha, num_return=64)):
        assert_found(engine, source, found, every_hypothesis(engine, source, 3, alpha)[:64])


@pytest.mark.parametrize("groups", [1, 3])
def test_missing_hypotheses_are_not_invented(groups) -> None:
    # Each row says 2, 3 and EOS, and nothing else: one hypothesis exists, for each group.
    engine = ToyEngine(1)
    engine.table[:] = torch.tensor([-math.inf, 0.0, -math.inf, -math.inf, -math.inf])
    engine.table[0, 0, 0] = torch.tensor([-math.inf, -math.inf, 0.0, -math.inf, -math.inf])
    engine.table[0, 0, 2] = torch.tensor([-math.inf, -math.inf, -math.inf, 0.0, -math.inf])
    (found,) = beams_of(engine, [6], 6, num_return=6, num_groups=groups)
    assert [hypothesis.tokens for hypothesis in found] == [[2, 3, EOS]] * groups
    assert found[0].score == 0.0 and found[0].log_probs == [0.0] * 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "beams, returned, early_stopping, alpha",
    covering([(2, 1), (2, 2), (3, 1), (4, 3)], [False, True], [-1.0, 0.0, 0.6, 2.0]),
)
def test_beam_search_equals_the_plain_one(beams, returned, early_stopping, alpha, kind) -> None:
    # Likely ends and unlikely ones, and limits that differ between the sources.
    options = {"kind": kind, "alpha": alpha, "num_return": returned, "early_stopping": early_stopping}
    for eos in (-1.0, 1.0):
        engine = ToyEngine(10, eos=eos)
        limits = [1 + 3 * source % 14 for source in range(10)]
        for source, found in enumerate(beams_of(engine, limits, beams, **options)):
            expected = plain_beam_search(engine, source, limits[source], beams, alpha, returned, early_stopping)
            assert_found(engine, source, found, expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("early_stopping", [False, True])
@pytest.mark.parametrize("ends", [(1,), (1, 2), (3, 5, 7)], ids=str)
def test_several_ends_and_a_vocabulary_of_which_little_is_seen(ends, early_stopping, kind) -> None:
    # Where the ends are the best that may follow, the beams still go on with what stands behind them.
    for lift in (-1.0, 2.0, 6.0):
        engine = ToyEngine(6, vocab=30)
        engine.table[..., list(ends)] += lift
        options = {"kind": kind, "num_return": 3, "early_stopping": early_stopping, "ends": ends}
        for source, found in enumerate(beams_of(engine, [6] * 6, 3, **options)):
            expected = plain_beam_search(engine, source, 6, 3, 0.6, 3, early_stopping, ends=ends)
            assert_found(engine, source, found, expected)


@pytest.mark.parametrize("kind", BY_TRANSFORMERS_RULES)
@pytest.mark.parametrize(
    "beams, returned, early_stopping, alpha",
    covering([(2, 1), (3, 3), (4, 2)], [False, True, "never"], [-0.3, 0.0, 0.6, 2.0]),
)
def test_transformers_rules_equal_the_plain_ones(beams, returned, early_stopping, alpha, kind) -> None:
    options = {"alpha": alpha, "num_return": returned, "early_stopping": early_stopping}
    for ends, begun, lift in (
        ((EOS,), 0, -1.0),
        ((EOS,), 0, 4.0),
        ((3, 5), 0, 1.0),
        ((EOS,), 2, 1.0),
        ((EOS,), 2, 4.0),
    ):
        engine = ToyEngine(10, vocab=20)
        engine.table[..., list(ends)] += lift
        limits = [1 + 3 * source % 14 for source in range(10)]
        together = beams_of(engine, limits, beams, kind=kind, ends=ends, begun=begun, **options)
        for source, found in enumerate(together):
            plain = engine, source, limits[source], beams, alpha, returned, early_stopping
            assert_found(engine, source, found, plain_transformers_search(*plain, ends=ends, begun=begun))


@pytest.mark.parametrize("kind", BY_TRANSFORMERS_RULES)
@pytest.mark.parametrize(
    ("early_stopping", "alpha", "length"), [(False, 1.0, 2), ("never", 1.0, 4), (False, -1.0, 2), ("never", -1.0, 2)]
)
@pytest.mark.parametrize(("mean", "goes_on"), [(-2.0, False), (-1.875, True)])
def test_by_transformers_rules_a_search_does_not_wait_for_equal_scores(
    mean, goes_on, early_stopping, alpha, length, kind
) -> None:
    search = kind(4, frozenset({EOS}), 2, alpha=alpha, early_stopping=early_stopping)
    assert search.advance([[3, EOS, 4, 5]], [[-1.0, -2.0, -3.0, -9.0]], 0) == [0, 0]
    # Now two have ended, the worse with -2 for each of two tokens; the best that goes on has `mean` for each of those
    # that count for it.
    values = [[-3.0, mean * length + 1.0, -99.0, -99.0], [-99.0] * 4]
    assert bool(search.advance([[EOS, 3, 4, 5]] * 2, values, 0)) == goes_on


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("last", "early_stopping", "goes_on"), [(-2.875, False, [0, 0]), (-3.0, False, [0]), (-3.0, True, [0, 0])]
)
def test_beams_that_can_at_best_tie_are_dropped(kind, last, early_stopping, goes_on) -> None:
    # What has ended has -2. At the limit a sum is divided by (5 + 4) / 6.
    search = kind(4, frozenset({EOS}), 2, alpha=1.0, early_stopping=early_stopping)
    assert search.advance([[3, EOS, 4, 5]], [[-1.0, -2.0, last, -9.0]], 0) == goes_on
    assert search.num_rows == len(goes_on) and search.last_tokens() == [3, 4][: len(goes_on)]


@pytest.mark.parametrize("kind", BY_TRANSFORMERS_RULES)
@pytest.mark.parametrize(
    ("last", "early_stopping", "goes_on"),
    [(-2.875, "never", [0, 0]), (-3.0, "never", [0]), (-3.0, False, []), (-3.0, True, [])],
)
def test_by_transformers_rules_a_search_ends_at_the_best_possible(kind, last, early_stopping, goes_on) -> None:
    search = kind(4, frozenset({EOS, 2}), 2, alpha=1.0, early_stopping=early_stopping)
    assert search.advance([[EOS, 2, 3, 4, 5, 6]], [[-0.25, -0.75, -1.0, last, -9.0, -9.0]], 0) == goes_on


@pytest.mark.parametrize(
    "beams, groups, returned, diversity, early_stopping",
    covering([(4, 2, 1), (4, 4, 4), (6, 3, 6), (6, 2, 4)], [0.0, 0.3, 5.0], [False, True]),
)
def test_diverse_beam_search_equals_the_plain_one(beams, groups, returned, diversity, early_stopping) -> None:
    options = {"num_return": returned, "num_groups": groups, "diversity_penalty": diversity}
    for eos in (-1.0, 0.5, 2.0):
        engine = ToyEngine(12, vocab=24, eos=eos)
        limits = [2 + source % 5 for source in range(12)]
        together = beams_of(engine, limits, beams, early_stopping=early_stopping, **options)
        for source, found in enumerate(together):
            plain = {"groups": groups, "diversity": diversity}
            expected = plain_beam_search(engine, source, limits[source], beams, 0.6, returned, early_stopping, **plain)
            assert_found(engine, source, found, expected)


@pytest.mark.parametrize("kind", GREEDY)
@pytest.mark.parametrize("ends", [(EOS,), (EOS, 3)], ids=str)
def test_greedy_takes_the_best_and_sums_its_scores(ends, kind) -> None:
    engine = ToyEngine(20)
    limits = [1 + source % 7 for source in range(20)]
    requests = [ask(i, partial(kind, limit, frozenset(ends))) for i, limit in enumerate(limits)]
    for source, (found,) in enumerate(decode(engine, requests)):
        assert tuple(found.tokens) == plain_greedy(engine, source, limits[source], ends)
        assert found.log_probs == pytest.approx(engine.log_probs(source, found.tokens), abs=1e-5)
        assert found.score == pytest.approx(sum(found.log_probs), abs=1e-5)


def test_without_log_probs_the_tokens_are_the_same() -> None:
    def requests(**options):
        sampling = Sampling(1.3, 4, 0.95, seed=3)
        return [
            ask(i, partial(RowSearch, 6, frozenset({EOS}), 1, s), **options) for i in range(8) for s in (None, sampling)
        ]

    with_them, without = (decode(ToyEngine(8), requests(log_probs=wanted)) for wanted in (True, False))
    assert [f[0].tokens for f in with_them] == [f[0].tokens for f in without]
    assert any(value > 0 for (found,) in without for value in found.log_probs)  # logits: nothing was computed


def test_samples_have_the_scores_of_their_tokens_and_keep_their_order() -> None:
    engine = ToyEngine(5, eos=0.5)
    requests = [ask(i, partial(RowSearch, 6, frozenset({EOS}), 6, Sampling(0.7, 3, 0.9, seed=i))) for i in range(5)]
    for source, found in enumerate(decode(engine, requests)):
        assert len(found) == 6 and len({tuple(sample.tokens) for sample in found}) > 1
        assert len({len(sample.tokens) for sample in found}) > 1  # they end at different steps
        for sample in found:
            assert sample.score == pytest.approx(engine.score(source, sample.tokens), abs=1e-5)
            assert sample.log_probs == pytest.approx(engine.log_probs(source, sample.tokens), abs=1e-5)
            for i, token in enumerate(sample.tokens):
                ranked = sorted(engine.continuations(source, sample.tokens[:i]), reverse=True)
                assert engine.continuations(source, sample.tokens[:i])[token] >= ranked[2]
            assert sample.tokens[-1] == EOS or len(sample.tokens) == 6


def test_a_sample_does_not_depend_on_when_its_neighbours_end() -> None:
    # Sample i of three is sample i of six: each has numbers of its own at each step.
    engine = ToyEngine(1, vocab=12)

    def sample(ends: set[int]) -> list[tuple[int, ...]]:
        ((*found,),) = decode(engine, [ask(0, lambda: RowSearch(9, frozenset(ends), 8, Sampling(seed=4)))])
        return [tuple(one.tokens) for one in found]

    whole, ended = sample({99}), sample({EOS, 2, 3})
    assert len({len(one) for one in ended}) > 2
    for long, short in zip(whole, ended, strict=True):
        assert long[: len(short)] == short
    assert sample({99}) == whole


def test_a_row_ends_with_its_tokens_if_nothing_may_follow() -> None:
    engine = ToyEngine(2)
    engine.table[:, :, 2] = -math.inf  # behind a 2 stands nothing
    engine.table[0, 0, 0] = torch.tensor([-math.inf, -math.inf, 0.0, -math.inf, -math.inf])
    engine.table[1, 0, 0] = -math.inf
    for sampling in (None, Sampling(seed=1)):
        requests = [ask(i, partial(RowSearch, 5, frozenset({EOS}), 1, sampling)) for i in range(2)]
        (first,), (second,) = decode(engine, requests)
        assert (first.tokens, first.score) == ([2], 0.0)
        assert (second.tokens, second.score) == ([], -math.inf)
    assert [[h.tokens for h in found] for found in beams_of(engine, [5, 5], 2, num_return=2)] == [[], []]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("log_probs", [True, False])
@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize("sampling", [None, Sampling(), Sampling(top_k=2, top_p=0.5)], ids=str)
def test_a_model_that_gives_nan_is_named(value, log_probs, beams, sampling) -> None:
    engine = ToyEngine(3, eos=-5.0)
    engine.table[1, :, :, 3] = value

    def search():
        eos = frozenset({EOS})
        return BeamSearch(4, eos, beams) if beams > 1 else RowSearch(4, eos, 1, sampling)

    with pytest.raises(ValueError, match="NaN"):
        decode(engine, [ask(source, search, log_probs=log_probs or beams > 1) for source in range(3)])


@pytest.mark.parametrize("count", [1, 2, 3, VOCAB])
def test_the_lowest_of_equal_tokens_comes_first_for_any_request(count) -> None:
    # In 16 bits equal logits are common; a neighbour that asks for more candidates changes nothing.
    logits = torch.randint(0, 3, (50, 40), generator=torch.Generator().manual_seed(0)).float()
    logits[::2, 7] = -math.inf
    logits[25:, 20:] += (
        3 * torch.rand(25, 20, generator=torch.Generator().manual_seed(1)).round()
    )  # ties at other places
    logits = torch.cat((logits, torch.tensor([[0.0] * i + [1.0] + [0.0] * (39 - i) for i in range(40)])))
    found = choose(logits, Selection(count, log_probs=False))
    for row, ids, values in zip(logits.tolist(), *found, strict=True):
        assert ids == sorted(range(40), key=lambda token: (-row[token], token))[:count]
        assert values == [row[token] for token in ids]


@needs_cpp
@pytest.mark.parametrize("alpha", [1e4, -1e4])
@pytest.mark.parametrize("rules", ["tensor2tensor", "transformers"])
def test_a_penalty_that_no_float_holds_orders_as_in_cpp(alpha: float, rules: Any) -> None:
    plain = BeamSearch if rules == "tensor2tensor" else TransformersBeamSearch
    kinds = (plain, partial(NativeSearch.beams, beam_rules=rules))
    ours, theirs = (beams_of(ToyEngine(6), [5] * 6, 3, kind=kind, alpha=alpha, num_return=3) for kind in kinds)
    assert ours == theirs and all(len(found) == 3 for found in ours)


# Step by step, held to the searches in Python.


def pair(dice: random.Random, eos: frozenset[int]) -> tuple[Search, NativeSearch]:
    """Returns the same search in Python and in C++."""
    limit = dice.randint(1, 7)
    if dice.random() < 0.25:
        return RowSearch(limit, eos), NativeSearch.greedy(limit, eos)
    beams = dice.randint(1, 6)
    options: dict[str, Any] = {"alpha": dice.choice([-1.0, 0.0, 0.6, 1.3]), "num_return": dice.randint(1, beams)}
    if dice.random() < 0.5:
        options["early_stopping"] = dice.random() < 0.3
        return BeamSearch(limit, eos, beams, **options), NativeSearch.beams(limit, eos, beams, **options)
    options["early_stopping"] = dice.choice([True, False, "never"])
    native = NativeSearch.beams(limit, eos, beams, beam_rules="transformers", **options)
    return TransformersBeamSearch(limit, eos, beams, **options), native


def state(search: Search) -> tuple[list[int], list[list[int]], list[Found]]:
    tokens = search.last_tokens() if search.num_rows else []
    return tokens, [search.tokens(row) for row in range(search.num_rows)], search.results()


@needs_cpp
@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_each_step_in_cpp_equals_that_in_python(values: list[float]) -> None:
    dice, steps = random.Random(len(values)), 0
    for _ in range(100):
        vocab = dice.choice([3, 8, 40])
        eos = frozenset(dice.sample(range(vocab), dice.randint(1, min(3, vocab - 1))))
        plain, native = pair(dice, eos)
        for name in ("limit", "num_candidates", "num_rows", "peak_rows"):
            assert getattr(native, name) == getattr(plain, name)
        assert native.results() == plain.results() and native.samples() is None
        wanted = plain.num_candidates + dice.choice([0, 0, 5])  # a neighbour may want more
        before = dice.randint(0, 3)  # rows of a neighbour
        while True:
            rows = [candidates(dice, vocab, wanted, values) for _ in range(before + plain.num_rows)]
            ids, given = (list(column) for column in zip(*rows, strict=True))
            parents = native.advance(ids, given, before)
            assert parents == plain.advance(ids, given, before)
            assert native.num_rows == plain.num_rows == len(parents)
            steps += 1
            assert native.handle.is_done == (not parents) and native.error is None
            if not parents:
                break
            assert state(native) == state(plain)
        assert native.results() == plain.results()  # tokens, log-probabilities and scores, to the last bit
        assert native.advance(ids, given, before) == [] and native.results() == plain.results()
    assert steps > 200


GROUPS, STEPS = 5, 4


@needs_cpp
@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
@pytest.mark.parametrize("beams", [0, 1, 3, 4])
def test_each_step_on_the_device_equals_that_in_python(beams: int, values: list[float]) -> None:
    dice, compared, slots = random.Random(beams), 0, max(1, beams)
    for _ in range(12):
        vocab, eos = dice.choice([6, 9, 40]), tuple(sorted(dice.sample(range(6), dice.choice([1, 1, 2, 3]))))
        hosts: list[Search] = [
            BeamSearch(99, frozenset(eos), beams, alpha=1.0) if beams else RowSearch(99, frozenset(eos))
            for _ in range(GROUPS)
        ]
        count = min(hosts[0].num_candidates, vocab)
        device = DeviceSearch(SearchRules(beams, eos, 0, ()), GROUPS + 1, count, vocab, STEPS, torch.device("cpu"))
        # Each has said a word, with scores that are the same for all beams and may drown what follows.
        start = dice.choice([0.0, -40.0])
        words = [token for token in range(vocab) if token not in eos]
        if len(words) < slots:
            continue
        for host in hosts:
            host.advance([[*words, *eos][:count]], [[start] * count], 0)
        ends = frozenset(eos)
        native = NativeSearch.beams(99, ends, beams, alpha=1.0) if beams else NativeSearch.greedy(99, ends)
        native.advance([[*words, *eos][:count]], [[start] * count], 0)
        if native.handle.is_done:
            continue
        tokens = [token for host in hosts for token in host.last_tokens()]
        device.load(tokens, [native] * GROUPS, np.zeros(GROUPS, np.int32))
        scores = [[start] * host.num_rows for host in hosts]
        found: list[Any] = []
        for step in range(STEPS):
            each = [candidates(dice, vocab, count, values) for _ in range((GROUPS + 1) * slots)]
            ids, given = torch.tensor([one[0] for one in each]), torch.tensor([one[1] for one in each])
            index = torch.tensor([step])
            with NoSync():
                parents = device.advance(given, ids, index)
            assert (parents is None) == (beams == 0)
            slots_of = torch.arange(len(each)) if parents is None else parents
            assert torch.equal(slots_of // slots, torch.arange(len(each)) // slots)  # inside of their groups
            found.append((ids.numpy(), given.numpy(), slots_of.numpy(), device.tokens.numpy().copy()))
            for group, host in enumerate(hosts):
                if not host.num_rows:
                    continue
                first = group * slots
                kept = host.advance([one[0] for one in each], [one[1] for one in each], first)
                assert slots_of[first : first + len(kept)].tolist() == [first + parent for parent in kept]
                if kept:
                    said = host.last_tokens()
                    assert device.tokens[first : first + len(kept)].tolist() == said
                    pairs = [(parent, each[first + parent]) for parent in kept]
                    scores[group] = [
                        scores[group][parent] + row[1][row[0].index(token)]
                        for (parent, row), token in zip(pairs, said, strict=True)
                    ]
                compared += len(kept)
        record = device.read(STEPS)
        for name, column in zip(("ids", "values", "parents", "tokens"), zip(*found, strict=True), strict=True):
            assert np.array_equal(getattr(record, name), np.stack(column)), name
        for group, host in enumerate(hosts):
            first = group * slots
            if beams and host.num_rows:  # to the last bit
                assert device.scores[first : first + host.num_rows].tolist() == scores[group]
    assert compared > 60


@needs_cpp
def test_the_device_forbids_ids_as_processors_would() -> None:
    rules = SearchRules(2, (1, 4), 0, (3,))
    device = DeviceSearch(rules, 2, 6, 6, 1, torch.device("cpu"))
    native = NativeSearch.beams(9, frozenset(rules.eos), 2, min_tokens=2)
    device.load([0, 0], [native] * 2, np.array([2, 1], np.int32))  # the second must say one more before an end
    logits = torch.arange(6.0).expand(4, 6).contiguous()
    with NoSync():
        values, ids = device.candidates(logits, True)
    assert ids[0, :5].tolist() == [5, 4, 2, 1, 0] and ids[2, :3].tolist() == [5, 2, 0]
    assert values.isinf().sum(-1).tolist() == [1, 1, 3, 3]
    due = torch.tensor([5.0, 2.0, 0.0]).log_softmax(-1)
    torch.testing.assert_close(values[3, :3], due)
    values, _ = device.candidates(logits, False)
    assert values[0, :3].tolist() == [5.0, 4.0, 2.0]
    # What was said counts.
    device.advance(values, ids, torch.tensor([0]))
    values, ids = device.candidates(logits, True)
    assert ids[2, :5].tolist() == [5, 4, 2, 1, 0]
