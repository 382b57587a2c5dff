"""Tests the logits processors: their formulas, their order, and user-defined ones in shared batches."""

from __future__ import annotations

import math
import re
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from fastformer.generation import generate
from fastformer.generation.config import GenerationConfig
from fastformer.generation.engines import Prompt, Sample
from fastformer.generation.engines.sampling import sample, warp
from fastformer.generation.processors import (
    BadWords,
    EndWhereNothingFollows,
    ForcedToken,
    LeastShare,
    MinNewTokens,
    NoRepeatNgrams,
    RepetitionPenalty,
    SuppressTokens,
    make_processors,
)
from fastformer.generation.requests import Request
from fastformer.generation.scheduler import Scheduler, run
from fastformer.generation.search import BeamSearch, RowSearch, Sampling
from tests.covering import each
from tests.generation.small import CPP
from tests.generation.toy import EOS, START, VOCAB, ToyEngine, ask, decode, finish, plain_greedy

NEVER = -math.inf


def forbidden(scores: Tensor) -> list[list[int]]:
    """Returns the ids that may not follow, for each row."""
    return [row.isneginf().nonzero().flatten().tolist() for row in scores]


def test_warp() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]])
    assert warp(logits, 2.0, 0, 1.0).tolist() == [[-1.0, 0.0, -0.5, -1.5]]
    assert warp(logits, 1.0, 2, 1.0).tolist() == [[NEVER, 0.0, -1.0, NEVER]]
    # softmax is .087 .644 .237 .032: .6 needs one token, .65 two, .9 three
    for top_p, kept in ((0.6, [1]), (0.65, [1, 2]), (0.9, [0, 1, 2])):
        assert warp(logits, 1.0, 0, top_p).isfinite()[0].nonzero().flatten().tolist() == kept


def test_warp_keeps_k_tokens_and_the_temperature_comes_before_top_p() -> None:
    logits = torch.randn(7, 30)
    for k in (1, 2, 29, 30, 31, 0):
        assert (warp(logits, 1.0, k, 1.0).isfinite().sum(-1) == (k if 0 < k < 30 else 30)).all()
    for temperature in (0.5, 2.0):
        probabilities = (logits / temperature).softmax(-1)
        kept = warp(logits, temperature, 0, 0.7).isfinite()
        for row in range(7):
            ranked = probabilities[row].sort(descending=True).values
            needed = int((ranked.cumsum(0) < 0.7).sum()) + 1
            assert kept[row].sum() == needed
            assert torch.equal(probabilities[row][kept[row]].sort(descending=True).values, ranked[:needed])


@pytest.mark.parametrize("temperature", [1e-6, 1e-38, 1e-39, 1e-45, 1e-50, 5e-324])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (3, 1.0), (0, 0.9), (3, 0.5)])
def test_the_smallest_temperatures_draw_the_best(temperature, top_k, top_p) -> None:
    logits = torch.tensor([[5.0, 9.0, -20.0, 8.0], [-3.0, -7.0, -1.0, NEVER], [NEVER, 0.0, 3e38, -1.0]])
    for uniform in (0.0, 0.5, 1 - 2**-53):
        assert sample(logits, [Sample(temperature, top_k, top_p, uniform)] * 3).tolist() == [1, 2, 2]
    # Of equal best ones each has its share.
    tied = torch.tensor([[7.0, 1.0, 7.0, 2.0]])
    assert [sample(tied, [Sample(temperature, top_k, 1.0, uniform)]).item() for uniform in (0.4, 0.6)] == [0, 2]
    nothing = torch.full((1, 4), NEVER)
    assert warp(nothing, temperature, top_k, 1.0).isneginf().all()


def test_close_logits_far_below_the_best_are_distinguished() -> None:
    logits = torch.tensor([[1e4, 1e-4, 2e-4, 3e-4]])  # less the best they would be equal
    assert forbidden(warp(logits, 1.0, 2, 1.0)) == [[1, 2]]


def test_top_p_applies_after_top_k() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    # Of the two best .4 is 57 %: enough for a half, where of all four it isn't.
    assert forbidden(warp(logits, 1.0, 2, 0.5)) == [[1, 2, 3]]
    assert forbidden(warp(logits, 1.0, 0, 0.5)) == [[2, 3]]


def test_repetition_penalty() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.5], [2.0, -2.0, 1.0, 0.5]])
    history = torch.tensor([[3, 2, 0, 1, 1], [3, 2, 2, 2, 2]])
    found = RepetitionPenalty(2.0)(history, logits)
    assert found.tolist() == [[1.0, -4.0, 0.5, 0.25], [2.0, -2.0, 0.5, 0.25]]


def test_no_repeat_ngram() -> None:
    history = torch.tensor([[5, 6, 7, 5, 6], [5, 6, 5, 7, 6]])
    assert forbidden(NoRepeatNgrams(3)(history, torch.zeros(2, 10))) == [[7], []]
    assert forbidden(NoRepeatNgrams(2)(history, torch.zeros(2, 10))) == [[7], [5]]
    assert forbidden(NoRepeatNgrams(1)(history, torch.zeros(2, 10))) == [[5, 6, 7]] * 2


def test_ngrams_count_from_the_first_that_can_repeat() -> None:
    # After n tokens the first n-gram stands, and only then may one repeat.
    for size in (1, 2, 3):
        history = torch.full((1, size), 4)
        assert forbidden(NoRepeatNgrams(size)(history, torch.zeros(1, 6))) == [[4]]
        assert forbidden(NoRepeatNgrams(size)(history[:, 1:], torch.zeros(1, 6))) == [[]]


def test_bad_words() -> None:
    history = torch.tensor([[0, 5, 6], [0, 6, 5]])
    words = BadWords([(3,), (6, 4), (5, 6, 7), (6, 5, 8), (0, 5, 6, 2), (9, 0, 6, 5, 2)])
    assert forbidden(words(history, torch.zeros(2, 10))) == [[2, 3, 4, 7], [3, 8]]


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 6])
def test_bad_words_may_be_longer_than_the_output(length) -> None:
    word = (5, 6, 7, 8, 9, 10)
    ids = torch.tensor([[*word[5 - length : 5]], [3] * length]).long()  # what stands right before the last one
    found = BadWords((word, (4,)))(ids, torch.zeros(2, 11))
    assert forbidden(found) == [[4, 10] if length >= 5 and ids[0, -5:].tolist() == [*word[:5]] else [4], [4]]


def test_suppressed_tokens_and_the_least_number() -> None:
    logits = torch.randn(2, 6)
    found = SuppressTokens((1, 4))(torch.zeros(2, 1, dtype=torch.long), logits)
    assert forbidden(found) == [[1, 4]] * 2 and torch.equal(found[:, [0, 2, 3, 5]], logits[:, [0, 2, 3, 5]])
    least = MinNewTokens(2, 3, (1, 5))
    for length, expected in ((3, [1, 5]), (4, [1, 5]), (5, []), (6, [])):
        assert forbidden(least(torch.zeros(2, length, dtype=torch.long), logits)) == [expected] * 2


def test_an_end_without_candidates() -> None:
    logits = torch.tensor([[NEVER, NEVER, NEVER], [NEVER, NEVER, 0.5]])
    found = EndWhereNothingFollows((1, 2))(torch.zeros(2, 1, dtype=torch.long), logits)
    assert found.tolist() == [[NEVER, 0.0, NEVER], [NEVER, NEVER, 0.5]]


def test_a_forced_token_appears_only_at_its_position() -> None:
    logits = torch.randn(2, 5)
    forced = ForcedToken(3, 4)
    for length in (3, 5):
        assert torch.equal(forced(torch.zeros(2, length, dtype=torch.long), logits), logits)
    assert forced(torch.zeros(2, 4, dtype=torch.long), logits).tolist() == [[NEVER, NEVER, NEVER, 0.0, NEVER]] * 2


def test_processors_do_not_change_the_models_logits() -> None:
    logits, history = torch.randn(2, 6), torch.tensor([[2, 3], [3, 3]])
    before = logits.clone()
    for processor in (
        RepetitionPenalty(1.5),
        NoRepeatNgrams(1),
        BadWords([(4,)]),
        SuppressTokens([2]),
        MinNewTokens(3, 0, (1,)),
        ForcedToken(2, 2),
    ):
        assert not torch.equal(processor(history, logits), before)
        assert torch.equal(logits, before)
    dead = torch.full((1, 3), NEVER)
    EndWhereNothingFollows((1,))(history, dead)
    assert dead.isneginf().all()


def made(**options) -> tuple:
    return make_processors(GenerationConfig(**options), (1, 2), 3, 10)


def test_settings_make_the_processors_that_they_name() -> None:
    assert made() == ()
    ends = EndWhereNothingFollows((1, 2))
    assert made(repetition_penalty=1.5) == (RepetitionPenalty(1.5), ends)
    assert made(no_repeat_ngram_size=2) == (NoRepeatNgrams(2), ends)
    assert made(bad_words_ids=[[1]]) == ()  # as in transformers, a word that is only EOS; not one that begins with it
    assert made(bad_words_ids=[[1], [1, 4], [4, 1]]) == (BadWords(((1, 4), (4, 1))), ends)
    assert made(bad_words_ids=[[4]]) == (BadWords(((4,),)), ends)
    assert made(suppress_tokens=[4]) == (SuppressTokens((4,)), ends)
    assert made(min_new_tokens=2) == (MinNewTokens(2, 3, (1, 2)), ends)
    assert made(forced_bos_token_id=0) == (ForcedToken(0, 1),)  # as in transformers, after one id
    assert made(forced_eos_token_id=2) == (ForcedToken(2, 12),)  # the tenth new token has twelve before it
    own = [lambda ids, scores: scores, lambda ids, scores: scores]
    assert made(suppress_tokens=[4], logits_processor=own) == (SuppressTokens((4,)), ends, *own)
    assert made(logits_processor=own[0]) == (own[0],)


def greedy(limit: int = 5):
    return RowSearch(limit, frozenset({EOS}))


def test_a_users_processor_sees_the_decoders_ids() -> None:
    # Hugging Face's convention: (rows, length) ids, the start token and the prefix included, and (rows, vocab) scores.
    engine, seen = ToyEngine(3, eos=-5.0), []

    def watch(input_ids: Tensor, scores: Tensor) -> Tensor:
        assert input_ids.dtype == torch.long and scores.dtype == torch.float32
        assert scores.shape == (len(input_ids), VOCAB)
        for row, values in zip(input_ids.tolist(), scores, strict=True):
            assert row[:3] == [START, 4, 2]
            expected = engine.continuations(1, row[1:])
            assert values.log_softmax(-1).tolist() == pytest.approx(expected, abs=1e-5)
        seen.append(tuple(input_ids.shape))
        return scores

    def search():
        return BeamSearch(3, frozenset({EOS}), 2, alpha=0.0, early_stopping=False)

    requests = [ask(0, greedy), ask(1, search, prefix=(4, 2), processors=[watch]), ask(2, greedy)]
    found = decode(engine, requests)
    assert seen[0] == (1, 3) and all(shape[0] <= 2 and shape[1] == 3 + i for i, shape in enumerate(seen))
    assert len(seen) > 1 and seen[1][0] == 2
    assert [tuple(found[i][0].tokens) for i in (0, 2)] == [plain_greedy(engine, i, 5) for i in (0, 2)]


def test_processors_run_in_order_before_the_choice() -> None:
    def add(input_ids: Tensor, scores: Tensor) -> Tensor:
        return torch.zeros_like(scores).index_fill(1, torch.tensor([3, 4]), 1.0)

    def double_four(input_ids: Tensor, scores: Tensor) -> Tensor:
        assert scores[0].tolist() == [0.0, 0.0, 0.0, 1.0, 1.0]
        scores[:, 4] *= 2  # in place is allowed too
        return scores

    ((found,), (other,)) = decode(ToyEngine(2), [ask(0, greedy, processors=[add, double_four]), ask(1, greedy)])
    assert found.tokens == [4] * 5
    expected = torch.tensor([0.0, 0.0, 0.0, 1.0, 2.0]).log_softmax(-1)[4].item()
    assert found.log_probs == pytest.approx([expected] * 5)
    assert tuple(other.tokens) == plain_greedy(ToyEngine(2), 1, 5)


def raises(input_ids: Tensor, scores: Tensor) -> Tensor:
    if input_ids.shape[1] == 3:
        raise RuntimeError("mine")
    return scores


def forgets(input_ids: Tensor, scores: Tensor) -> None:
    return None


def narrows(input_ids: Tensor, scores: Tensor) -> Tensor:
    return scores[:, 1:]


@each(
    "processor, kind, message",
    [
        (raises, RuntimeError, "mine"),
        (forgets, ValueError, r"\(1, 5\).*\bNoneType\b.*\bforgets\b"),
        (narrows, ValueError, r"\(1, 5\).*\(1, 4\).*\bnarrows\b"),
        (lambda ids, scores: scores.to("meta"), ValueError, r"\bcpu\b.*\bmeta\b.*<lambda>"),
        (lambda ids, scores: scores > 0, ValueError, "torch.bool"),
        (lambda ids, scores: scores + 0j, ValueError, "torch.complex64"),
        (lambda ids, scores: scores.to_sparse(), ValueError, "sparse"),
        (lambda ids, scores: scores.tolist(), ValueError, r"\blist\b"),
        (lambda ids, scores: scores.numpy() > 0, ValueError, r"\bndarray\b"),
        (lambda ids, scores: scores.numpy().astype(str), ValueError, r"\bndarray\b"),
    ],
)
def test_a_failing_processor_affects_only_its_own_request(processor, kind, message) -> None:
    engine = ToyEngine(3, eos=-9.0)
    requests: list[Request] = [
        ask(0, greedy),
        ask(1, greedy, processors=[processor, SuppressTokens([4])]),  # the message names the one that did it
        ask(2, greedy, processors=[lambda input_ids, scores: scores]),
    ]
    finish(Scheduler(engine, max_rows=8, max_bytes=0), requests)
    for source in (0, 2):
        assert requests[source].error is None
        assert tuple(requests[source].results[0].tokens) == plain_greedy(engine, source, 5)
    assert requests[1].is_done and requests[1].results == []
    assert isinstance(requests[1].error, kind) and re.search(message, str(requests[1].error))
    with pytest.raises(kind, match=message):
        decode(engine, [ask(0, greedy), ask(1, greedy, processors=[processor])])


GIVEN = {
    "fp64": lambda scores: scores.double(),
    "fp16": lambda scores: scores.half(),
    "bf16": lambda scores: scores.bfloat16(),
    "int64": lambda scores: scores.long(),
    "uint8": lambda scores: scores.to(torch.uint8),
    "NumPy": lambda scores: scores.numpy(),
    "NumPy fp64": lambda scores: scores.numpy().astype(np.float64),
    "NumPy fp16": lambda scores: scores.numpy().astype(np.float16),
    "NumPy backwards": lambda scores: scores.numpy()[:, ::-1][:, ::-1],
    "a view": lambda scores: scores.T.contiguous().T,
}


@pytest.mark.parametrize("kind", GIVEN)
@pytest.mark.parametrize(
    "engine",  # slow: the engines in Python, which take scores by the same function
    [CPP, *(pytest.param(name, marks=pytest.mark.slow) for name in ("kv_cache", "recompute"))],
)
def test_scores_may_be_any_numbers(kind, engine, model) -> None:
    def numbers(input_ids: Tensor, scores: Tensor) -> Tensor:
        return (scores - scores.amin(-1, keepdim=True)).round()  # which all of the types hold

    def given(input_ids: Tensor, scores: Tensor) -> object:
        return GIVEN[kind](numbers(input_ids, scores))

    options = {"engine": engine, "max_new_tokens": 6, "return_dict_in_generate": True}
    for more in ({}, {"num_beams": 3}, {"do_sample": True, "seed": 3, "temperature": 2.0}):
        due = generate(model, [[5, 6, 7], [8]], logits_processor=numbers, **options, **more)
        found = generate(model, [[5, 6, 7], [8]], logits_processor=given, **options, **more)
        assert torch.equal(found.sequences, due.sequences) and torch.equal(found.scores, due.scores)


@pytest.mark.parametrize("make", [lambda word: SuppressTokens([word]), lambda word: MinNewTokens(4, 1, (word,))])
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("engine", [CPP])
def test_the_callers_own_rules_count_as_the_configs_do(engine, beams, make, model) -> None:
    options = {"engine": engine, "max_new_tokens": 6, "num_beams": beams}
    (plain,) = generate(model, [[5, 6, 7]], **options).tolist()
    rule = make(plain[1])
    (found,) = generate(model, [[5, 6, 7]], logits_processor=rule, **options).tolist()
    (due,) = generate(model, [[5, 6, 7]], logits_processor=lambda *given: rule(*given), **options).tolist()
    assert found == due != plain


def test_requests_with_equal_options_are_processed_together(calls_of) -> None:
    # Of three that do, with one between them that only draws, and one that asks for something else.
    calls = calls_of(MinNewTokens, "__call__")

    def requests() -> list[Request]:
        kinds = [(4,), (4,), (), (4,), (2,)]
        eos = frozenset([EOS])
        return [
            Request(
                Prompt([i], [0]),
                partial(RowSearch, 6, eos, 1, None if kind else Sampling(seed=i)),
                processors=tuple(MinNewTokens(count, 1, (EOS,)) for count in kind),
            )
            for i, kind in enumerate(kinds)
        ]

    def said(batches: list[list[Request]]) -> list[list[int]]:
        for batch in batches:
            run(Scheduler(ToyEngine(5, eos=2.0), max_rows=9, max_bytes=1000), batch)
        return [request.results[0].tokens for batch in batches for request in batch]

    together = said([requests()])
    assert [tuple(call.result.shape) for call in calls[:2]] == [(3, VOCAB), (1, VOCAB)]
    assert together == said([[request] for request in requests()])


@pytest.mark.parametrize("temperature", [1.0, 0.3, 2.5])
def test_a_least_share_is_that_of_transformers(temperature) -> None:
    transformers = pytest.importorskip("transformers", reason="the right values are transformers'")
    torch.manual_seed(0)
    ids, logits = torch.zeros(3, 1, dtype=torch.long), 3 * torch.randn(3, 50)
    for share in (0.01, 0.2, 1.0):
        theirs = transformers.MinPLogitsWarper(share)(ids, logits / temperature)
        found = LeastShare(share, temperature)(ids, logits)
        assert forbidden(found) == forbidden(theirs)
        assert torch.equal(found[~found.isneginf()], logits[~found.isneginf()])
