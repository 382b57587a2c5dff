"""The processors against their formulas."""

from __future__ import annotations

import math

import torch

from fastformer.generation.processors import Processing, forbid_repeated_ngrams, penalise_repetition, warp


def test_warp() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]])
    assert warp(logits, 2.0, 0, 1.0).tolist() == [[0.5, 1.5, 1.0, 0.0]]
    assert warp(logits, 1.0, 2, 1.0).tolist() == [[-math.inf, 3.0, 2.0, -math.inf]]
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


def test_repetition_penalty() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.5]])
    assert penalise_repetition(logits, torch.tensor([[0, 1, 1]]), 2.0).tolist() == [[1.0, -4.0, 1.0, 0.5]]


def test_no_repeat_ngram() -> None:
    history = torch.tensor([[5, 6, 7, 5, 6], [5, 6, 5, 7, 6]])
    found = forbid_repeated_ngrams(torch.zeros(2, 10), history, 3)
    assert found[0].isneginf().nonzero().flatten().tolist() == [7] and not found[1].isneginf().any()
    found = forbid_repeated_ngrams(torch.zeros(2, 10), history, 2)
    assert found[1].isneginf().nonzero().flatten().tolist() == [5]
    found = forbid_repeated_ngrams(torch.zeros(2, 10), history, 1)
    assert found[0].isneginf().nonzero().flatten().tolist() == [5, 6, 7]


def test_ngrams_count_from_the_first_that_can_repeat() -> None:
    # After n tokens the first n-gram stands, and only then may one repeat.
    for size in (1, 2, 3):
        processing = Processing(no_repeat_ngram_size=size)
        history = torch.full((1, size), 4)
        assert processing(torch.zeros(1, 6), history, size, 1)[0, 4] == -math.inf
        assert processing(torch.zeros(1, 6), history[:, 1:], size - 1, 1)[0].isfinite().all()


def test_processing_leaves_the_logits_as_they_were() -> None:
    logits, history = torch.randn(2, 6), torch.tensor([[2, 3], [3, 3]])
    before = logits.clone()
    for processing in (Processing(3, 1.5, 2), Processing(3), Processing(0, 1.5), Processing(0, 1.0, 1)):
        assert not torch.equal(processing(logits, history, 2, 1), before)
        assert torch.equal(logits, before)
