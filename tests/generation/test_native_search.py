"""Searches in C++ refuse unsafe arguments, and a scheduler lets them take many steps at once."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial
from unittest.mock import Mock

import pytest

from fastformer.generation.config import GenerationConfig
from fastformer.generation.native_search import NativeSearch
from fastformer.generation.processors import ForcedToken
from fastformer.generation.request_builder import RequestBuilder
from fastformer.generation.scheduler import Scheduler, run
from fastformer.generation.search import RowSearch, Search
from tests.generation.small import needs_cpp
from tests.generation.toy import EOS, VALUES, RunningEngine, ToyEngine, ask, candidates, finish, plain_greedy

pytestmark = needs_cpp

VOCAB = 9
ENDS = frozenset({EOS})


def test_the_score_of_greedy_is_the_exact_sum() -> None:
    plain, native = RowSearch(3, ENDS), NativeSearch.greedy(3, ENDS)
    for value in (-1.0, -(2.0**-53), -(2.0**-53)):  # each a 32-bit float
        for search in (plain, native):
            search.advance([[3]], [[value]], 0)
    assert native.results() == plain.results() and native.results()[0].score < -1.0


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize(("row", "place"), [(0, 0), (1, 0), (0, 5)])  # behind the best, too
def test_nan_ends_a_search_with_an_error(value: float, beams: int, row: int, place: int) -> None:
    search = NativeSearch.beams(5, ENDS, beams) if beams > 1 else NativeSearch.greedy(5, ENDS)
    assert len(search.advance([[4, 3, 2, 5, 6, 7]], [[-1.0] * 6], 0)) == beams
    values = [[-1.0] * 6 for _ in range(beams)]
    values[row % beams][place * (beams > 1)] = value  # greedy search reads the best alone
    with pytest.raises(ValueError, match="NaN"):
        search.advance([[4, 3, 2, 5, 6, 7]] * beams, values, 0)
    assert search.handle.is_broken and search.handle.is_done and search.num_rows == 0


def test_arguments_that_would_read_out_of_bounds_are_refused() -> None:
    search = NativeSearch.beams(5, ENDS, 2)
    search.advance([[4, 3, 2, 5]], [[-1.0, -2.0, -3.0, -4.0]], 0)
    for row in (2, -1):
        with pytest.raises(IndexError, match=r"\b2 rows\b"):
            search.tokens(row)
    with pytest.raises(ValueError, match="made a step"):
        NativeSearch.greedy(5, ENDS).last_tokens()
    for returned in (0, 3):
        with pytest.raises(ValueError, match=rf"\bnum_return\b.*\bnum_beams = 2\b.*{returned}"):
            NativeSearch.beams(5, ENDS, 2, num_return=returned)


# With a scheduler


def native_greedy(limit: int) -> Callable[[], Search]:
    return partial(NativeSearch.greedy, limit, ENDS)


def native_beams(limit: int, width: int, **options) -> Callable[[], Search]:
    return partial(NativeSearch.beams, limit, ENDS, width, num_return=width, **options)


def engine_of(sources: int, **options) -> RunningEngine:
    return RunningEngine(sources, vocab=VOCAB, **{"eos": -1.0, **options})


def test_a_request_alone_takes_one_call() -> None:
    for search in (native_greedy(20), native_beams(20, 3)):
        engine = engine_of(1, eos=-9.0)
        request = ask(0, search)
        run(Scheduler(engine, max_rows=4, max_bytes=1000), [request])
        assert engine.runs == [20] and len(request.results[0].tokens) == 20


def test_a_forced_last_token_needs_no_step_of_the_model(calls_of) -> None:
    for search in (native_greedy(20), native_beams(20, 3)):
        engine, forced = engine_of(1, eos=-9.0), [ForcedToken(4, 20)]
        steps, told = calls_of(engine, "step"), list[int]()
        request, plain = ask(0, search, processors=forced, search_suffices=True), ask(0, search, processors=forced)
        if plain.search.peak_rows == 1:
            request.listen(told.append)
        run(Scheduler(engine, max_rows=4, max_bytes=1000), [request])
        assert len(steps) == 19
        run(Scheduler(engine, max_rows=4, max_bytes=1000), [plain])
        assert request.results == plain.results
        assert request.results[0].tokens[-1] == 4 and told in ([], request.results[0].tokens)


@pytest.mark.parametrize(
    "max_rows, limits, runs, ends",
    [
        (2, (3, 7, 5, 4), [3, 4, 4], [[0], [1], [2, 3]]),  # the last two wait for no request
        (4, (3, 4, 5, 6), [6], [[0, 1, 2, 3]]),  # nor have these
        (8, (1, 2, 3, 4, 5, 6, 7, 8, 9, 9), [2, 9], [[0, 1], [2, 3, 4, 5, 6, 7, 8, 9]]),  # two are a quarter
    ],
)
def test_a_call_ends_when_waiting_requests_can_join_or_with_the_last_search(max_rows, limits, runs, ends) -> None:
    engine = engine_of(len(limits), eos=-9.0)
    requests = [ask(i, native_greedy(limit)) for i, limit in enumerate(limits)]
    scheduler = Scheduler(engine, max_rows=max_rows, max_bytes=1000, is_endless=True)
    ended = [[requests.index(request) for request in some] for some in finish(scheduler, requests)]
    assert engine.runs == runs and ended == ends
    for i, request in enumerate(requests):
        assert tuple(request.results[0].tokens) == plain_greedy(engine, i, request.search.limit)
        assert request.length == 1 + request.search.limit


def test_if_memory_is_short_a_request_joins_when_any_other_ends() -> None:
    engine = engine_of(3, eos=-9.0)
    requests = [ask(i, native_greedy(limit)) for i, limit in enumerate((3, 7, 2))]
    scheduler = Scheduler(engine, max_rows=8, max_bytes=16 * engine.token_bytes)
    assert finish(scheduler, requests) == [requests[:1], requests[1:]] and engine.runs == [3, 4]


def test_a_listener_gets_the_first_tokens_one_by_one_and_later_ones_after_each_run() -> None:
    engine = engine_of(2, eos=-9.0)
    told: list[int] = []
    scheduler = Scheduler(engine, max_rows=2, max_bytes=1000)
    scheduler.submit([ask(0, native_greedy(5), on_token=told.append), ask(1, native_greedy(9))])
    for step in range(1, 5):
        scheduler.step()
        assert told == list(plain_greedy(engine, 0, step))
    finish(scheduler)
    assert told == list(plain_greedy(engine, 0, 5))
    assert engine.runs[:4] == [1] * 4 and sum(engine.runs) == 9 and len(engine.runs) < 9


def test_a_listener_that_fails_ends_its_own_request() -> None:
    engine, refuse = engine_of(2, eos=-9.0), Mock(side_effect=RuntimeError("no more, please"))
    requests = [ask(0, native_greedy(5), on_token=refuse), ask(1, native_greedy(5))]
    finish(Scheduler(engine, max_rows=2, max_bytes=1000), requests)
    assert str(requests[0].error) == "no more, please" and requests[0].results == []
    assert tuple(requests[1].results[0].tokens) == plain_greedy(engine, 1, 5)


def test_time_limits_and_cancellation_end_running_searches(clock) -> None:
    engine = engine_of(3, eos=-9.0, patience=2)
    requests = [ask(0, native_greedy(9), max_time=5.0), ask(1, native_beams(9, 2)), ask(2, native_greedy(9))]
    scheduler = Scheduler(engine, max_rows=9, max_bytes=1000)
    scheduler.submit(requests)
    assert scheduler.step() == []
    clock.now += 5.0  # exactly five
    assert scheduler.step() == [requests[0]]
    assert tuple(requests[0].results[0].tokens) == plain_greedy(engine, 0, 4)
    requests[1].cancel()
    assert scheduler.step() == [requests[1]] and requests[1].results == [] and requests[1].error is None
    run(scheduler, [])
    assert tuple(requests[2].results[0].tokens) == plain_greedy(engine, 2, 9)


@pytest.mark.parametrize(
    ("settings", "is_native"),
    [
        ({}, True),
        ({"told": 2, "beam_rules": "transformers", "num_beams": 3, "num_return_sequences": 2}, True),
        ({"told": 1, "beam_rules": "transformers", "num_beams": 2, "early_stopping": "never"}, True),
        ({"told": 2, "num_beams": 3, "length_penalty": 2.0}, True),
        ({"num_beams": 3, "num_return_sequences": 2, "length_penalty": 1.7, "early_stopping": True}, True),
        ({"num_beams": 4, "eos_token_id": (1, 7)}, True),
        ({"num_beams": 4, "num_return_sequences": 3, "beam_rules": "transformers"}, True),
        ({"num_beams": 3, "length_penalty": 2.0, "beam_rules": "transformers", "early_stopping": "never"}, True),
        ({"num_beams": 3, "length_penalty": 2.0, "beam_rules": "transformers", "early_stopping": True}, True),
        ({"do_sample": True, "seed": 1}, False),
        ({"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}, False),
    ],
    ids=str,
)
def test_requests_search_in_cpp_if_it_supports_their_options(model, settings, is_native) -> None:
    told = [7, 8][: settings.get("told", 0)]
    wanted = GenerationConfig(max_new_tokens=6, **{name: value for name, value in settings.items() if name != "told"})
    makers = [RequestBuilder(model, wanted, engine=engine(1, vocab=40)) for engine in (RunningEngine, ToyEngine)]
    dice = random.Random(0)
    for _ in range(20):
        native, plain = (
            builder.build(builder.check([5, 6], told, num_language_tokens=len(told))).search for builder in makers
        )
        assert isinstance(native, NativeSearch) == is_native and not isinstance(plain, NativeSearch)
        while is_native and native.num_rows:
            rows = [candidates(dice, 8, plain.num_candidates, VALUES["plain"]) for _ in range(plain.num_rows)]
            ids, values = (list(column) for column in zip(*rows, strict=True))
            assert native.advance(ids, values, 0) == plain.advance(ids, values, 0)
            assert native.results() == plain.results()
