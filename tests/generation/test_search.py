"""The search against searches written the plain way, and against all that there is to find."""

from __future__ import annotations

import math

import pytest
import torch

from fastformer.generation import search
from fastformer.generation.processors import Processing
from fastformer.generation.search import Sampling, beam_search, choose_rows
from tests.generation.toy import EOS, VOCAB, Hypothesis, ToyEngine, every_hypothesis, plain_beam_search

PAD = -1


def find(engine: ToyEngine, limits: list[int], beams: int, alpha: float, returned: int, early=False, **settings):
    return beam_search(engine, limits, EOS, PAD, Processing(**settings), beams, alpha, returned, early)


def assert_found(found: torch.Tensor, scores: torch.Tensor, expected: list[Hypothesis]) -> None:
    """One source's hypotheses: the same tokens in the same order, the same scores, and nothing where there is none."""
    assert len(found) >= len(expected)
    for i, row in enumerate(found.tolist()):
        tokens = tuple(token for token in row if token != PAD)
        if i < len(expected):
            assert tokens == expected[i][1] and row[: len(tokens)] == list(tokens)
            assert abs(scores[i].item() - expected[i][0]) < 1e-5
        else:
            assert tokens == () and scores[i] == -math.inf


@pytest.fixture(params=[1, 3], ids=["looks each step", "looks every third step"])
def looks(request, monkeypatch):
    """On a GPU the search looks now and then only; what it finds is the same."""
    monkeypatch.setattr(search, "_look", lambda step, device: step % request.param == request.param - 1)


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_wide_beam_finds_what_brute_force_finds(alpha, looks) -> None:
    # A beam as wide as all that there is misses nothing: 21 hypotheses that finish, and 43 of those that are cut.
    found, scores = find(ToyEngine(3, 64), [3] * 3, 64, alpha, 64)
    for source in range(3):
        assert_found(found[source], scores[source], every_hypothesis(ToyEngine(3), source, 3, alpha)[:64])


def test_cut_hypotheses_stand_behind_the_finished_with_their_scores() -> None:
    # EOS may follow the token 3 alone: five hypotheses finish, and the best of those cut fill the rest.
    def engine(beams: int) -> ToyEngine:
        toy = ToyEngine(2, beams)
        toy.table[..., EOS] = -math.inf
        toy.table[:, :, 3, EOS] = -1.0
        return toy

    found, scores = find(engine(64), [3] * 2, 64, 0.6, 30)
    for source in range(2):
        expected = every_hypothesis(engine(1), source, 3, 0.6)
        assert sum(tokens[-1] == EOS for _, tokens in expected) == 5
        assert max(score for score, _ in expected[5:]) > expected[4][0]  # by its score it would stand before
        assert_found(found[source], scores[source], expected[:30])


def test_missing_hypotheses_are_said_to_be_missing() -> None:
    # Each row says 2, 3 and EOS, and nothing else: one hypothesis exists.
    engine = ToyEngine(1, 3)
    engine.table[:] = torch.tensor([-math.inf, 0.0, -math.inf, -math.inf, -math.inf])
    engine.table[0, 0, 0] = torch.tensor([-math.inf, -math.inf, 0.0, -math.inf, -math.inf])
    engine.table[0, 0, 2] = torch.tensor([-math.inf, -math.inf, -math.inf, 0.0, -math.inf])
    found, scores = find(engine, [6], 3, 0.6, 3)
    assert found[0].tolist() == [[2, 3, EOS], [PAD] * 3, [PAD] * 3]
    assert scores[0].tolist() == [0.0, -math.inf, -math.inf]


@pytest.mark.parametrize("early_stopping", [False, True])
@pytest.mark.parametrize(("beams", "returned"), [(2, 1), (2, 2), (3, 1), (4, 3)])
@pytest.mark.parametrize("alpha", [-1.0, 0.0, 0.6, 2.0])
def test_beam_search_is_the_plain_one(beams, returned, early_stopping, alpha, looks) -> None:
    # Likely ends and unlikely ones, and limits that differ between the sources.
    for eos in (-1.0, 1.0):
        limits = [3 + source % 5 for source in range(12)]
        found, scores = find(ToyEngine(12, beams, eos=eos), limits, beams, alpha, returned, early_stopping)
        for source, limit in enumerate(limits):
            expected = plain_beam_search(ToyEngine(12, eos=eos), source, limit, beams, alpha, returned, early_stopping)
            assert_found(found[source], scores[source], expected)


def test_a_beam_of_four_finds_the_best_where_it_keeps_it() -> None:
    found, scores = find(ToyEngine(8, 4), [5] * 8, 4, 0.6, 1)
    hits = 0
    for source in range(8):
        best, sequence = every_hypothesis(ToyEngine(8), source, 5, 0.6)[0]
        assert scores[source, 0].item() <= best + 1e-5  # never better than the best there is
        hits += tuple(token for token in found[source, 0].tolist() if token != PAD) == sequence
    assert hits >= 7


def test_greedy_takes_the_best_and_sums_its_scores(looks) -> None:
    limits = [1 + source % 7 for source in range(20)]
    found, scores = choose_rows(ToyEngine(20), limits, EOS, 0, Processing(), None)
    toy = ToyEngine(20)
    longest = 0
    for source, limit in enumerate(limits):
        tokens: tuple[int, ...] = ()
        while len(tokens) < limit and EOS not in tokens:
            gained = toy.continuations(source, tokens)
            tokens = (*tokens, gained.index(max(gained)))
        assert found[source].tolist() == [*tokens, *[0] * (found.shape[1] - len(tokens))]
        assert abs(scores[source].item() - toy.score(source, tokens)) < 1e-5
        longest = max(longest, len(tokens))
    assert found.shape[1] == longest


def test_samples_have_the_scores_of_their_tokens(looks) -> None:
    generator = torch.Generator().manual_seed(0)
    sampling = Sampling(0.7, 3, 0.9, generator)
    found, scores = choose_rows(ToyEngine(20), [6] * 20, EOS, PAD % VOCAB, Processing(), sampling)
    toy = ToyEngine(20)
    for source, row in enumerate(found.tolist()):
        tokens = tuple(row[: row.index(EOS) + 1] if EOS in row else row)
        assert abs(scores[source].item() - toy.score(source, tokens)) < 1e-5


@pytest.mark.parametrize("least", [0, 1, 2, 4])
@pytest.mark.parametrize("beams", [1, 3])
def test_min_new_tokens_is_kept_exactly(least, beams) -> None:
    # A language that wants to end at once ends as soon as it may.
    if beams == 1:
        found, _ = choose_rows(ToyEngine(6, eos=20.0), [6] * 6, EOS, 0, Processing(min_new_tokens=least), None)
    else:
        found = find(ToyEngine(6, beams, eos=20.0), [6] * 6, beams, 0.6, 1, min_new_tokens=least)[0][:, 0]
    assert found.shape[1] == least + 1
    assert (found[:, least] == EOS).all() and (found[:, :least] != EOS).all()


def test_nothing_left_to_say_ends_the_row() -> None:
    # Without repeating a token there are four to say; then even min_new_tokens can't keep it from ending.
    settings = Processing(min_new_tokens=8, no_repeat_ngram_size=1)
    for found in (
        choose_rows(ToyEngine(4), [8] * 4, EOS, 0, settings, None)[0],
        find(ToyEngine(4, 2), [8] * 4, 2, 0.6, 1, min_new_tokens=8, no_repeat_ngram_size=1)[0][:, 0],
    ):
        for row in found.tolist():
            assert sorted(row[:4]) == [0, 2, 3, 4] and row[4] == EOS


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_model_that_gives_nan_is_named(value, looks) -> None:
    for beams in (1, 2):
        for sampling in (None, Sampling()):
            engine = ToyEngine(3, beams, eos=-5.0)
            engine.table[1, :, :, 3] = value
            with pytest.raises(ValueError, match="the model gives NaN or infinite logits"):
                if beams == 1:
                    choose_rows(engine, [4] * 3, EOS, 0, Processing(), sampling)
                else:
                    find(engine, [4] * 3, beams, 0.6, 1)
