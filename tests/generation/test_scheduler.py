"""Each request gets its result as if alone, in its turn and within the memory, and leaves nothing behind."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from functools import partial

import pytest

from fastformer.generation import generate
from fastformer.generation import requests as requests_module
from fastformer.generation import scheduler as scheduler_module
from fastformer.generation.engines import Candidates, Prompt, choose_engine
from fastformer.generation.native_search import NativeSearch
from fastformer.generation.processors import NoRepeatNgrams, SuppressTokens
from fastformer.generation.requests import Request
from fastformer.generation.scheduler import Scheduler, run
from fastformer.generation.search import BeamSearch, RowSearch, Sampling, Search
from fastformer.models import GPT
from tests.generation.small import needs_cpp
from tests.generation.toy import EOS, MeteredEngine, RunningEngine, ToyEngine, ask, decode, finish, plain_greedy
from tests.generation.weights import drawn

VOCAB = 9
ENDS = frozenset({EOS})


@pytest.fixture
def few_expected(monkeypatch) -> None:
    """Gives requests memory for two new tokens when they begin, although they need more."""
    monkeypatch.setattr(requests_module, "_EXPECTED", 2)


def greedy(limit: int) -> Callable[[], Search]:
    return partial(RowSearch, limit, ENDS)


def samples(limit: int, count: int = 1, seed: int = 3) -> Callable[[], Search]:
    return partial(RowSearch, limit, ENDS, count, Sampling(1.5, 6, 0.95, seed))


def beams(limit: int, width: int = 3, **options) -> Callable[[], Search]:
    return partial(BeamSearch, limit, ENDS, width, num_return=width, **options)


def random_options(dice: random.Random) -> tuple[dict, Callable[[], Search]]:
    """Draws the options of a request: a search, a source length, a prefix, processors, and the C++ search, if there is
    one.
    """
    limit, width, early = dice.randint(1, 12), dice.randint(2, 4), {"early_stopping": dice.random() < 0.5}
    drawn = samples(limit, dice.choice([1, 2, 4]), dice.random())
    diverse = beams(limit, 4, num_groups=2, diversity_penalty=0.5)
    kinds: list[tuple[Callable[[], Search], Callable[[], Search]]] = [
        (greedy(limit), partial(NativeSearch.greedy, limit, ENDS)),
        (drawn, drawn),
        (beams(limit, width, **early), partial(NativeSearch.beams, limit, ENDS, width, num_return=width, **early)),
        (diverse, diverse),
    ]
    search, native = dice.choice(kinds + kinds[:2])
    options = {
        "make_search": search,
        "length": dice.randint(1, 6),
        "prefix": [dice.randrange(VOCAB) for _ in range(dice.choice([0, 0, 3]))],
        "processors": dice.choice([(), (), (SuppressTokens([4]),), (NoRepeatNgrams(1),)]),
        "log_probs": dice.random() < 0.8 or isinstance(search(), BeamSearch),
    }
    return options, native


class Fails(MeteredEngine):
    """An engine that refuses more than `most` new prompts at once."""

    most = 99

    def prefill(self, prompts: Sequence[Prompt]) -> None:
        if len(prompts) > self.most:
            raise ValueError("no such source")
        super().prefill(prompts)


def assert_same(found: Request, alone: Request, scores: bool) -> None:
    assert [hypothesis.tokens for hypothesis in found.results] == [hypothesis.tokens for hypothesis in alone.results]
    if scores:
        for one, other in zip(found.results, alone.results, strict=True):
            assert one.score == pytest.approx(other.score, abs=1e-4)
            assert one.log_probs == pytest.approx(other.log_probs, abs=1e-4)


def assert_empty(scheduler: Scheduler, engine: MeteredEngine, *, opens: bool = False) -> None:
    """Checks that nothing is left, and that the next requests can use all memory, in the same batch or in a new one."""
    assert scheduler.is_idle and (opens or (engine.groups == [] and engine.used() == 0))
    rows = min(scheduler.max_rows, scheduler.max_tokens // 3)
    probes = [ask(0, greedy(1)) for _ in range(rows)]  # three tokens each
    scheduler.submit(probes)
    engine.most_rows = 0
    scheduler.step()
    assert engine.most_rows == rows and all(probe.is_done for probe in probes) and scheduler.is_idle


@pytest.mark.parametrize(
    ("seed", "is_native"),
    [*((seed, False) for seed in range(20)), *(pytest.param(seed, True, marks=needs_cpp) for seed in range(20))],
)
def test_each_request_gets_its_result_as_if_alone(seed, is_native, few_expected) -> None:
    dice = random.Random(seed)
    count = 12
    sizes = {"vocab": VOCAB, "eos": dice.choice([-2.0, 0.5, 2.0]), "seed": seed}
    engine, quiet = MeteredEngine(count, **sizes), MeteredEngine(count, **sizes)
    if is_native:
        engine = RunningEngine(count, patience=dice.choice([1, 3, 10**6]), **sizes)
    quiet.table = engine.table
    if seed % 2:
        engine.table[dice.randrange(count), :, 3] = math.nan
    wanted = [random_options(dice) for _ in range(count)]
    requests: list[Request] = []
    told: dict[int, list[int]] = {}
    cancelled, failing = set(), set()
    for i, (options, native) in enumerate(wanted):
        options = {**options, "make_search": native} if is_native else dict(options)
        if options["make_search"]().peak_rows == 1:
            told[i] = []
            options["on_token"] = told[i].append
        if dice.random() < 0.1:
            failing.add(i)
            options["processors"] = [lambda input_ids, scores: scores[:0]]
        requests.append(ask(i, **options))
    max_rows, max_bytes = dice.randint(1, 12), dice.randint(15, 120)
    scheduler = Scheduler(engine, max_rows=max_rows, max_bytes=max_bytes)
    coming, ended, began = list(requests), [], []
    for _ in range(2000):
        if coming and (scheduler.is_idle or dice.random() < 0.4):
            arriving = dice.randint(1, 5)
            scheduler.submit(coming[:arriving])
            del coming[:arriving]
        if dice.random() < 0.05:
            victim = dice.randrange(count)
            cancelled.add(victim)
            requests[victim].cancel()
        ended += scheduler.step()
        began += [request for request in scheduler.running if request not in began]
        assert len(engine.groups) == len(scheduler.running)
        wide = [request for request in scheduler.running if request.search.peak_rows > max_rows]
        assert not wide or len(scheduler.running) == 1
        if not coming and scheduler.is_idle:
            break
    assert not coming and scheduler.is_idle, "a request starves"
    assert sorted(map(requests.index, ended)) == list(range(count))  # each of them once
    assert began == sorted(began, key=requests.index)  # each in its turn
    for rows, tokens in engine.starts:
        assert rows <= max(max_rows, 4) and tokens <= max(max_bytes, 6 + 4 + 4 * 12)
    for i, request in enumerate(requests):
        assert request.is_done
        if request.is_cancelled and not request.results:
            assert i in cancelled
        elif i in failing and not request.results:
            assert "expected a processor to give scores of shape" in str(request.error) or "NaN" in str(request.error)
        else:
            alone = ask(i, **wanted[i][0])
            finish(Scheduler(quiet, max_rows=9, max_bytes=10_000), [alone])
            assert str(request.error) == str(alone.error)
            assert_same(request, alone, scores=wanted[i][0]["log_probs"])
            assert request.error or i not in told or told[i] == request.results[0].tokens
    assert_empty(scheduler, engine)


@pytest.mark.parametrize(
    "make", [greedy, samples, partial(samples, count=3), beams], ids=["greedy", "one", "n", "beams"]
)
def test_a_request_that_gives_memory_back_gets_the_same_result_and_streams_nothing_twice(make, few_expected) -> None:
    engine = MeteredEngine(5, vocab=VOCAB, eos=-9.0)
    told: list[list[int]] = [[] for _ in range(5)]
    rows = make(10)().peak_rows
    tellers = [{"on_token": told[i].append} if rows == 1 else {} for i in range(5)]
    requests = [ask(i, make(10), **tellers[i]) for i in range(5)]
    # Memory for all tokens of one, and the first of others.
    scheduler = Scheduler(engine, max_rows=64, max_bytes=2 + 12 * rows)
    run(scheduler, requests)
    assert len(engine.admitted) > 5, "no request had to give its memory back"
    assert len(engine.starts) == 1 and engine.most_used <= engine.num_tokens == 2 + 12 * rows
    assert list(dict.fromkeys(engine.admitted)) == list(range(5))
    for i, request in enumerate(requests):
        alone = ask(i, make(10))
        decode(ToyEngine(5, vocab=VOCAB, eos=-9.0), [alone])
        assert_same(request, alone, scores=True)
        assert len(request.results[0].tokens) > 5
        assert rows > 1 or told[i] == request.results[0].tokens
    assert_empty(scheduler, engine)


def test_the_youngest_request_gives_way_and_waits_first_in_the_queue(few_expected) -> None:
    engine = MeteredEngine(4, vocab=VOCAB, eos=-9.0)
    requests = [ask(i, greedy(8)) for i in range(4)]
    scheduler = Scheduler(engine, max_rows=8, max_bytes=14)
    scheduler.submit(requests)
    scheduler.step()
    assert scheduler.running == requests[:3]  # four tokens each
    scheduler.step()
    assert scheduler.running == requests[:3]
    scheduler.step()  # nine, of which three a step
    assert scheduler.running == requests[:2] and list(scheduler.waiting) == requests[2:]
    run(scheduler, [])
    assert [request.is_done for request in requests] == [True] * 4


def test_a_request_larger_than_the_budget_runs_alone_and_frees_its_memory() -> None:
    engine = MeteredEngine(6, vocab=VOCAB, eos=-9.0)
    requests = [ask(i, beams(12) if i == 2 else greedy(4)) for i in range(6)]
    scheduler = Scheduler(engine, max_rows=2, max_bytes=20)
    scheduler.submit(requests)
    while not scheduler.is_idle:
        scheduler.step()
        assert requests[2] not in scheduler.running or len(scheduler.running) == 1
    assert len(requests[2].results) == 3
    # Two of six tokens each at first; then the one of two and thirty-six, of three rows; then the budget again.
    assert engine.starts == [(2, 20), (3, 38), (2, 20)]
    assert_empty(scheduler, engine)


def test_a_request_that_shared_memory_gets_its_own_when_it_needs_more(few_expected) -> None:
    engine = MeteredEngine(2, vocab=VOCAB, eos=-9.0)
    told: list[int] = []
    requests = [ask(0, greedy(3)), ask(1, greedy(20), on_token=told.append)]
    scheduler = Scheduler(engine, max_rows=4, max_bytes=14)
    run(scheduler, requests)
    assert engine.admitted == [0, 1, 1] and engine.starts == [(2, 14), (2, 22)]
    assert told == requests[1].results[0].tokens == list(plain_greedy(engine, 1, 20))


def test_a_request_that_needs_more_memory_than_estimated_gets_twice_as_much() -> None:
    class Modest(MeteredEngine):
        def tokens_needed(self, prompt: Prompt, num_rows: int, new_tokens: int) -> int:
            return 4

    engine = Modest(1, vocab=VOCAB, eos=-9.0)
    scheduler = Scheduler(engine, max_rows=4, max_bytes=6)
    run(scheduler, [found := ask(0, greedy(9))])
    assert tuple(found.results[0].tokens) == plain_greedy(engine, 0, 9)
    assert engine.starts == [(1, 4), (1, 8), (1, 16)]
    run(scheduler, [ask(0, greedy(2))])
    assert engine.starts[3:] == [(1, 6)]  # the others are content with the budget


def test_a_later_request_joins_the_existing_rows() -> None:
    engine = MeteredEngine(9, vocab=VOCAB, eos=-9.0)
    requests = [ask(i, greedy(4)) for i in range(9)]
    scheduler = Scheduler(engine, max_rows=8, max_bytes=1000)
    scheduler.submit(requests[:1])
    scheduler.step()
    scheduler.submit(requests[1:])
    run(scheduler, [])
    assert engine.starts == [(1, 6), (8, 48)] and engine.admitted == list(range(9))


def test_if_more_requests_will_come_all_memory_is_allocated_at_first() -> None:
    engine = MeteredEngine(4, vocab=VOCAB, eos=-9.0)
    requests = [ask(0, greedy(9)), ask(1, greedy(3)), ask(2, beams(40)), ask(3, greedy(2))]
    scheduler = Scheduler(engine, max_rows=2, max_bytes=50, is_endless=True)
    for request in requests[:2]:
        scheduler.submit([request])
        scheduler.step()
    assert engine.starts == [(2, 50)] and scheduler.running == requests[:2]
    scheduler.submit(requests[2:])  # one that needs more than that, and one behind it
    run(scheduler, [])
    assert engine.starts == [(2, 50), (3, 122), (2, 50)] and engine.admitted == [0, 1, 2, 3]


def test_more_is_wanted_while_fewer_rows_wait_than_a_batch_has() -> None:
    scheduler = Scheduler(MeteredEngine(3, vocab=VOCAB, eos=-9.0), max_rows=5, max_bytes=10_000)
    assert scheduler.wants_more
    scheduler.submit([ask(0, beams(4, 4))])
    assert scheduler.wants_more
    scheduler.submit([ask(1, greedy(4)), ask(2, greedy(4))])
    assert not scheduler.wants_more
    scheduler.step()  # the first two run
    assert scheduler.wants_more
    late = [ask(0, greedy(4)) for _ in range(4)]
    scheduler.submit(late)
    assert not scheduler.wants_more
    for request in late:
        request.cancel()
    scheduler.step()
    assert scheduler.wants_more


def test_reserved_memory_is_not_given_to_later_requests() -> None:
    engine = MeteredEngine(3, vocab=VOCAB, eos=-9.0)
    requests = [ask(i, greedy(10)) for i in range(3)]  # of twelve tokens, of which most are free for now
    scheduler = Scheduler(engine, max_rows=3, max_bytes=30, is_endless=True)
    for request in requests:
        scheduler.submit([request])
        scheduler.step()
    assert scheduler.running == requests[:2] and engine.free_tokens() > 12
    run(scheduler, [])
    assert engine.admitted == [0, 1, 2] and all(request.results for request in requests)


def test_memory_beyond_the_reservation_is_not_given_twice(few_expected) -> None:
    engine = MeteredEngine(2, vocab=VOCAB, eos=-9.0)
    requests = [ask(0, greedy(12)), ask(1, greedy(2))]
    scheduler = Scheduler(engine, max_rows=2, max_bytes=14, is_endless=True)
    scheduler.submit(requests[:1])
    for _ in range(9):
        scheduler.step()
    assert engine.free_tokens() == 3  # and the second wants four
    scheduler.submit(requests[1:])
    run(scheduler, [])
    assert engine.admitted == [0, 1] and all(request.results for request in requests)
    assert engine.most_used == 14


@needs_cpp
def test_cached_prompts_that_no_request_holds_are_no_room() -> None:
    """Of nine blocks, earlier prompts keep four each. Both prompts together need five each."""
    model, dice = drawn(GPT, max_len=96), random.Random(0)
    prompts = [[dice.randrange(3, 70) for _ in range(80)] for _ in range(2)]
    expected = generate(model, prompts, max_new_tokens=1, engine="kv_cache")[:, 80:].tolist()
    engine = choose_engine(model, "cpp")
    scheduler = Scheduler(engine, max_rows=4, max_bytes=9 * 16 * engine.token_bytes, is_endless=True)
    for together in ([0], [1], [0, 1]):
        requests = [Request(Prompt((), prompts[i]), greedy(1)) for i in together]
        run(scheduler, requests)
        assert [request.results[0].tokens for request in requests] == [expected[i] for i in together]
    assert [request.cached_tokens for request in requests] == [64, 64]


@needs_cpp
@pytest.mark.parametrize("cache_dtype", [None, "int8"])
def test_others_go_on_while_a_long_prompt_is_read(cache_dtype, monkeypatch) -> None:
    monkeypatch.setattr(scheduler_module, "_RUN_SECONDS", 0.0)  # a step at a time
    monkeypatch.setattr(scheduler_module, "_PIECE_SHARE", 0.0)
    model = drawn(GPT, num_layers=1, d_model=16, num_heads=1, max_len=32_200, positions="rotary")
    dice = random.Random(0)
    prompts = [[dice.randrange(3, 70) for _ in range(count)] for count in (5, 32_000, 9)]
    searches = [partial(NativeSearch.greedy, limit, frozenset({-1})) for limit in (150, 4, 6)]
    going, long, behind = (Request(Prompt(None, one), search) for one, search in zip(prompts, searches, strict=True))
    engine = choose_engine(model, "cpp", None, cache_dtype)
    scheduler = Scheduler(engine, max_rows=4, max_bytes=33_000 * engine.token_bytes, is_endless=True)
    scheduler.submit([going])
    scheduler.step()
    scheduler.submit([long, behind])
    turns = 0
    while not long.steps:
        before = going.steps
        scheduler.step()
        turns += 1
        assert going.steps == before + 1
    assert turns >= 32_000 // 512 and behind.is_done and not going.is_done
    run(scheduler, [])
    load = scheduler.load()
    assert (load.read_tokens, load.cached_tokens, long.cached_tokens) == (sum(map(len, prompts)), 0, 0)
    for request in (going, long, behind):
        alone = Request(request.prompt, searches[(going, long, behind).index(request)])
        run(Scheduler(engine, max_rows=1, max_bytes=2**30), [alone])
        assert alone.results[0].tokens == request.results[0].tokens


def test_a_batch_that_is_nearly_full_waits_for_a_quarter() -> None:
    # Eight rows that end one by one: those that wait come in twos, and the last, when they are fewer, at once.
    engine = MeteredEngine(13, vocab=VOCAB, eos=-9.0)
    limits = [1 + i for i in range(8)] + [20] * 5
    requests = [ask(i, greedy(limit)) for i, limit in enumerate(limits)]
    scheduler = Scheduler(engine, max_rows=8, max_bytes=10_000)
    scheduler.submit(requests)
    admitted = []
    while not scheduler.is_idle:
        before = len(engine.admitted)
        scheduler.step()
        admitted.append(len(engine.admitted) - before)
    assert admitted[:7] == [8, 0, 2, 0, 2, 1, 0]
    assert sum(admitted) == 13


def test_sources_are_read_a_few_thousand_tokens_at_a_time(monkeypatch) -> None:
    monkeypatch.setattr(scheduler_module, "_PREFILL_TOKENS", 20)
    engine = MeteredEngine(6, vocab=VOCAB, eos=-9.0)
    lengths = [9, 9, 1, 30, 3, 3]  # and one of the prompt each
    requests = [ask(i, greedy(3), length=length) for i, length in enumerate(lengths)]
    scheduler = Scheduler(engine, max_rows=100, max_bytes=10_000)
    scheduler.submit(requests)
    scheduler.step()
    assert engine.admitted == [0, 1]
    scheduler.step()
    assert engine.admitted == [0, 1, 2]  # the next is long, and others are running
    run(scheduler, [])
    assert engine.admitted == [0, 1, 2, 3, 4, 5] and all(request.results for request in requests)


def test_cancelled_requests_free_their_memory_before_the_next_step() -> None:
    engine = MeteredEngine(5, vocab=VOCAB, eos=-9.0)
    requests = [ask(i, beams(6) if i == 1 else greedy(6)) for i in range(5)]
    scheduler = Scheduler(engine, max_rows=5, max_bytes=10_000)
    scheduler.submit(requests)
    assert scheduler.step() == [] and scheduler.running == requests[:3] and engine.used() == 3 * 2 + 3
    requests[1].cancel()
    requests[4].cancel()
    ended = scheduler.step()
    assert ended == [requests[4], requests[1]] and all(r.is_done and not r.results and r.error is None for r in ended)
    assert scheduler.running == [requests[0], requests[2], requests[3]]
    run(scheduler, [])
    for i in (0, 2, 3):
        assert tuple(requests[i].results[0].tokens) == plain_greedy(engine, i, 6)
    assert_empty(scheduler, engine)


def test_a_cancellation_during_the_scan_of_the_queue_is_not_lost() -> None:
    engine = MeteredEngine(3, vocab=VOCAB, eos=-9.0)
    first, second, late = ask(0, greedy(6)), ask(1, greedy(6)), ask(2, greedy(6), max_time=1000.0)
    scheduler = Scheduler(engine, max_rows=1, max_bytes=10_000)
    scheduler.submit([first, second, late])
    assert scheduler.step() == [] and scheduler.running == [first]
    late.is_late = lambda now: second.cancel() or True  # as another thread cancels one that has been looked at
    assert scheduler.step() == [late]
    assert scheduler.step() == [second] and not second.results


def test_at_the_time_limit_running_requests_return_partial_results_and_waiting_ones_none(clock) -> None:
    engine = MeteredEngine(6, vocab=VOCAB, eos=-9.0)
    limit = {"max_time": 5.0}
    requests = [
        ask(0, greedy(9), **limit),
        ask(1, beams(9, 2), **limit),
        ask(2, greedy(6)),
        ask(3, greedy(9), **limit),  # waits, and so does the next
        ask(4, beams(9, 2), **limit),
        ask(5, greedy(6)),
    ]
    scheduler = Scheduler(engine, max_rows=4, max_bytes=10_000)
    scheduler.submit(requests)
    for _ in range(3):
        clock.now += 1.5
        assert scheduler.step() == []
    clock.now += 0.5  # exactly five
    assert set(scheduler.step()) == {requests[0], requests[1], requests[3], requests[4]}
    assert tuple(requests[0].results[0].tokens) == plain_greedy(engine, 0, 4)
    found = requests[1].results
    assert [len(hypothesis.tokens) for hypothesis in found] == [4, 4] and found[0].score > found[1].score
    assert [(h.tokens, h.score) for h in requests[3].results] == [([], float("-inf"))] and requests[4].results == []
    run(scheduler, [])
    for i in (2, 5):
        assert tuple(requests[i].results[0].tokens) == plain_greedy(engine, i, 6)
    assert_empty(scheduler, engine)


def test_streamed_tokens_count_when_time_ends_a_restarted_request(clock, few_expected) -> None:
    engine = MeteredEngine(2, vocab=VOCAB, eos=-9.0)
    told: list[int] = []
    requests = [ask(0, greedy(9)), ask(1, greedy(9), max_time=10.0, on_token=told.append)]
    scheduler = Scheduler(engine, max_rows=4, max_bytes=12)
    scheduler.submit(requests)
    while requests[1] not in scheduler.running or not told:
        scheduler.step()
    while requests[1] in scheduler.running:
        scheduler.step()
    assert len(told) > 1 and not requests[1].is_done  # it gave its memory back
    clock.now += 10.0
    run(scheduler, [])
    assert requests[1].results[0].tokens == told == list(plain_greedy(engine, 1, len(told)))
    assert tuple(requests[0].results[0].tokens) == plain_greedy(engine, 0, 9)


def test_the_longest_of_several_prefixes_counts() -> None:
    def begun(*lengths: int) -> list[int]:
        request = ask(0, greedy(9))
        for length in lengths:
            request.restart()
            for token in range(2, 2 + length):
                assert request.advance(Candidates([[token]], [[-1.0]]), 0) == [0]
        request.finish()
        return request.results[0].tokens

    assert begun(1) == [2] and begun(3, 1) == begun(3, 1, 1) == begun(1, 3, 2) == [2, 3, 4]
    assert begun(3, 4) == begun(4) == [2, 3, 4, 5]


def test_an_error_ends_all_requests_and_leaves_nothing_behind() -> None:
    engine = MeteredEngine(4, vocab=VOCAB, eos=-9.0)
    told: list[int] = []

    def listen(token: int) -> None:
        told.append(token)
        if len(told) == 3:
            raise RuntimeError("no more, please")

    scheduler = Scheduler(engine, max_rows=2, max_bytes=10_000)
    with pytest.raises(RuntimeError, match="no more, please"):
        run(scheduler, [ask(0, greedy(9)), ask(1, greedy(9), on_token=listen), ask(2, greedy(9))])
    assert tuple(told) == plain_greedy(engine, 1, 3)
    assert_empty(scheduler, engine, opens=True)


def test_after_a_failed_engine_the_next_batch_starts_fresh() -> None:
    engine = Fails(4, vocab=VOCAB, eos=-9.0)
    scheduler = Scheduler(engine, max_rows=4, max_bytes=10_000)
    scheduler.submit([ask(0, greedy(9)), ask(1, greedy(9))])
    scheduler.step()
    engine.most = 0
    scheduler.submit([ask(2, greedy(9))])
    with pytest.raises(ValueError, match="no such source"):
        run(scheduler, [])
    engine.most = 99
    scheduler.clear()
    run(scheduler, [found := ask(3, greedy(4))])
    assert tuple(found.results[0].tokens) == plain_greedy(engine, 3, 4)
    assert_empty(scheduler, engine)


def test_requests_that_could_not_be_admitted_still_wait() -> None:
    engine = Fails(4, vocab=VOCAB, eos=-9.0)
    scheduler = Scheduler(engine, max_rows=4, max_bytes=10_000)
    requests = [ask(i, greedy(9)) for i in range(4)]
    scheduler.submit(requests[:1])
    scheduler.step()
    engine.most = 1
    scheduler.submit(requests[1:])
    for _ in range(2):
        with pytest.raises(ValueError, match="no such source"):
            for _ in range(20):
                scheduler.step()
        assert [*scheduler.running, *scheduler.waiting] == [r for r in requests if not r.is_done]
        assert list(scheduler.waiting) == requests[1:] and scheduler.wants_more
    engine.most = 99
    run(scheduler, [])
    for i, request in enumerate(requests):
        assert tuple(request.results[0].tokens) == plain_greedy(engine, i, 9)
    assert_empty(scheduler, engine)


def test_the_queue_is_checked_while_a_request_has_a_deadline(clock, few_expected, calls_of) -> None:
    looks = calls_of(Request, "is_late")
    engine = MeteredEngine(9, vocab=VOCAB, eos=-9.0)
    requests = [ask(i, greedy(9), max_time=10.0 if i == 1 else None) for i in range(9)]
    scheduler = Scheduler(engine, max_rows=4, max_bytes=12)
    scheduler.submit(requests)
    while requests[1] not in scheduler.running:
        scheduler.step()
    while requests[1] in scheduler.running:  # it gives its memory back, and waits again
        scheduler.step()
    clock.now += 10.0
    assert scheduler.step() == [requests[1]]
    assert requests[8] in [look.args[0] for look in looks] and requests[8] in scheduler.waiting
    looks.clear()
    scheduler.step()
    assert requests[8] in scheduler.waiting and requests[8] not in [look.args[0] for look in looks]
    run(scheduler, [])
    assert all(request.is_done for request in requests)


def test_a_streamer_does_not_change_results() -> None:
    class Counting(RowSearch):
        asked = 0

        def results(self):
            Counting.asked += 1
            return super().results()

    engine = MeteredEngine(1, vocab=VOCAB, eos=-9.0)
    told: list[int] = []
    request = ask(0, lambda: Counting(12, ENDS), on_token=told.append)
    run(Scheduler(engine, max_rows=1, max_bytes=1000), [request])
    assert told == request.results[0].tokens == list(plain_greedy(engine, 0, 12))
    assert Counting.asked <= 2  # at the end, not at each token


def test_only_one_row_can_be_streamed() -> None:
    for search in (beams(4), samples(4, 2)):
        with pytest.raises(ValueError, match=r"\bone row\b"):
            ask(0, search, on_token=print)
    ask(0, samples(4), on_token=print)


@pytest.mark.parametrize(("limit", "length", "expected"), [(5, 1, 5), (100, 1, 32), (100, 40, 40), (36, 40, 36)])
def test_memory_is_reserved_for_the_likely_length(limit, length, expected) -> None:
    assert ask(0, greedy(limit), length=length).expected_tokens == expected
