"""The search against brute force, the rungs against each other, the processors against their formulas."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from fastformer.generation import generate
from fastformer.generation.processors import forbid_repeated_ngrams, penalise_repetition, warp
from fastformer.generation.search import Processing, beam_search
from fastformer.models import GPT, Transformer

VOCAB, EOS = 5, 1
NEAR_TIE = 1e-4


@pytest.fixture(scope="module")
def model() -> Transformer:
    torch.manual_seed(1)
    return Transformer.from_preset("tiny", vocab_size=40, d_model=32, d_ff=64, num_heads=4).eval()


@pytest.fixture(scope="module")
def gpt() -> GPT:
    torch.manual_seed(1)
    return GPT.from_preset("tiny", vocab_size=40, d_model=32, num_layers=2, num_heads=4).eval()


def mixed_sources(count: int, longest: int = 12) -> torch.Tensor:
    source = torch.randint(3, 40, (count, longest))
    for i in range(count):
        source[i, 2 + i % (longest - 1) :] = 0
    return source


class ToyEngine:
    """A language of five tokens whose probabilities depend on the last two: small enough to enumerate."""

    def __init__(self, sources: int, beams: int) -> None:
        generator = torch.Generator().manual_seed(sources)
        self.table = torch.randn(sources, VOCAB, VOCAB, VOCAB, generator=generator) * 1.5
        self.beams, self.sources = beams, torch.arange(sources)
        self.previous = torch.zeros(sources * beams, dtype=torch.long)

    def first_tokens(self) -> torch.Tensor:
        return torch.zeros(len(self.previous), dtype=torch.long)

    def logits(self, source: int, before: int, last: int) -> torch.Tensor:
        return self.table[source, before, last]

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        rows = self.sources.repeat_interleave(self.beams)
        logits = self.table[rows, self.previous, tokens]
        self.previous = tokens
        return logits

    def reorder(self, index: torch.Tensor) -> None:
        self.previous = self.previous[index]

    def select(self, sources: torch.Tensor) -> None:
        self.previous = self.previous.view(-1, self.beams)[sources].flatten()
        self.sources = self.sources[sources]


def every_hypothesis(engine: ToyEngine, source: int, length: int, alpha: float) -> list[tuple[float, tuple[int, ...]]]:
    """All finished sequences of up to `length` tokens with their penalised scores, best first."""
    found = []
    for size in range(1, length + 1):
        for body in itertools.product([t for t in range(VOCAB) if t != EOS], repeat=size - 1):
            sequence, score, before, last = (*body, EOS), 0.0, 0, 0
            for token in sequence:
                score += float(engine.logits(source, before, last).log_softmax(-1)[token])
                before, last = last, token
            found.append((score / ((5 + size) / 6) ** alpha, sequence))
    return sorted(found, reverse=True)


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_wide_beam_finds_what_brute_force_finds(alpha) -> None:
    # A beam as wide as all prefixes misses nothing.
    length, beams = 4, 64
    engine = ToyEngine(3, beams)
    found, scores = beam_search(engine, [length] * 3, EOS, -1, Processing(), beams, alpha, 5, False)
    for source in range(3):
        expected = every_hypothesis(ToyEngine(3, 1), source, length, alpha)[:5]
        for i, (score, sequence) in enumerate(expected):
            assert tuple(t for t in found[source, i].tolist() if t != -1) == sequence
            assert abs(scores[source, i].item() - score) < 1e-5


def test_beam_four_agrees_with_brute_force_where_the_beam_keeps_the_best() -> None:
    alpha, length = 0.6, 5
    found, scores = beam_search(ToyEngine(20, 4), [length] * 20, EOS, -1, Processing(), 4, alpha, 1, False)
    hits = 0
    for source in range(20):
        best, sequence = every_hypothesis(ToyEngine(20, 1), source, length, alpha)[0]
        assert scores[source, 0].item() <= best + 1e-5  # never better than the best there is
        hits += tuple(t for t in found[source, 0].tolist() if t != -1) == sequence
    assert hits >= 18


def test_beam_scores_are_the_models(model) -> None:
    source = mixed_sources(4)
    out = generate(model, source, num_beams=4, max_new_tokens=10, length_penalty=0.6, return_dict_in_generate=True)
    target_in = torch.nn.functional.pad(out.sequences[:, :-1], (1, 0))
    log_probabilities = model(source, target_in).log_softmax(-1).gather(2, out.sequences[:, :, None])[:, :, 0]
    for i, row in enumerate(out.sequences.tolist()):
        length = row.index(EOS) + 1 if EOS in row else len(row)
        expected = log_probabilities[i, :length].sum() / ((5 + length) / 6) ** 0.6
        assert abs(out.scores[i].item() - expected.item()) < 1e-4


def check_rungs(model, source: torch.Tensor, **options) -> int:
    """All rungs give the tokens of the first; a difference is allowed where the scores are near ties. Counts them."""
    outs = [
        generate(model, source, rung=rung, return_dict_in_generate=True, **options)
        for rung in ("naive", "encoder_once", "cross_cached", "cached")
    ]
    ties = 0
    for out in outs[1:]:
        for row in range(len(source)):
            a, b = outs[0].sequences[row].tolist(), out.sequences[row].tolist()
            width = max(len(a), len(b))
            if a + [0] * (width - len(a)) != b + [0] * (width - len(b)):
                assert abs(outs[0].scores[row].item() - out.scores[row].item()) < NEAR_TIE
                ties += 1
    return ties


@pytest.mark.parametrize("num_beams", [1, 4])
def test_rungs_agree(model, num_beams) -> None:
    assert check_rungs(model, mixed_sources(12), num_beams=num_beams, max_new_tokens=16) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("num_beams", [1, 4])
def test_rungs_agree_on_200_sources(model, num_beams) -> None:
    ties = check_rungs(model, mixed_sources(200, 24), num_beams=num_beams, max_new_tokens=30)
    print(f"{ties} near ties among 600 comparisons")
    assert ties <= 6


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True, "seed": 3, "num_return_sequences": 2}])
def test_gpt_cached_equals_naive_and_padding_side_is_free(gpt, options) -> None:
    prompts = mixed_sources(6, 8)
    cached = generate(gpt, prompts, max_new_tokens=10, **options)
    assert torch.equal(cached, generate(gpt, prompts, max_new_tokens=10, use_cache=False, **options))
    left = torch.stack([row.roll(int((row == 0).sum())) for row in prompts])
    mask = (left != 0).long()
    assert torch.equal(cached, generate(gpt, left, attention_mask=mask, max_new_tokens=10, **options))


def test_rows_do_not_depend_on_their_batch(model) -> None:
    source = mixed_sources(8)
    for options in ({}, {"num_beams": 4}):
        together = generate(model, source, max_new_tokens=12, **options)
        for i in range(8):
            alone = generate(model, source[i : i + 1], max_new_tokens=12, **options)[0].tolist()
            row = together[i].tolist()
            assert row[: len(alone)] == alone and not any(row[len(alone) :])


def test_greedy_follows_the_argmax(model) -> None:
    source = mixed_sources(3)
    out = generate(model, source, max_new_tokens=8)
    target_in = torch.nn.functional.pad(out[:, :-1], (1, 0))
    best = model(source, target_in).argmax(-1)
    real = (out != 0) | ((out == 0) & (best == 0))
    assert torch.equal(best[real], out[real])


def test_sampling_is_seeded_and_follows_the_distribution(model) -> None:
    source = mixed_sources(1).repeat(2000, 1)
    one = generate(model, source, do_sample=True, seed=5, max_new_tokens=1)
    assert torch.equal(one, generate(model, source, do_sample=True, seed=5, max_new_tokens=1))
    assert not torch.equal(one, generate(model, source, do_sample=True, seed=6, max_new_tokens=1))
    expected = model(source[:1], torch.zeros(1, 1, dtype=torch.long))[0, 0].softmax(-1)
    counted = torch.bincount(one.flatten(), minlength=40) / 2000
    assert (counted - expected).abs().max() < 5 * math.sqrt(0.25 / 2000)


def test_warp() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]])
    assert warp(logits, 2.0, 0, 1.0).tolist() == [[0.5, 1.5, 1.0, 0.0]]
    assert warp(logits, 1.0, 2, 1.0).tolist() == [[-math.inf, 3.0, 2.0, -math.inf]]
    # softmax is .087 .644 .237 .032: .6 needs one token, .65 two, .9 three
    for top_p, kept in ((0.6, [1]), (0.65, [1, 2]), (0.9, [0, 1, 2])):
        assert warp(logits, 1.0, 0, top_p).isfinite()[0].nonzero().flatten().tolist() == kept


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


def test_no_repeat_ngram_holds_in_the_output(model) -> None:
    for options in ({}, {"num_beams": 3}):
        for row in generate(model, mixed_sources(6), max_new_tokens=20, no_repeat_ngram_size=2, **options).tolist():
            row = row[: row.index(EOS)] if EOS in row else [t for t in row if t]
            grams = list(zip(row, row[1:], strict=False))
            assert len(grams) == len(set(grams))


def test_min_new_tokens(model) -> None:
    out = generate(model, mixed_sources(6), max_new_tokens=12, min_new_tokens=9)
    assert not (out[:, :9] == EOS).any()


def test_num_return_sequences(model) -> None:
    out = generate(
        model, mixed_sources(3), num_beams=4, num_return_sequences=3, max_new_tokens=8, return_dict_in_generate=True
    )
    assert out.sequences.shape[0] == 9
    scores = out.scores.view(3, 3)
    assert (scores[:, :-1] >= scores[:, 1:]).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2, "do_sample": True}, "expected do_sample or num_beams > 1, got both"),
        ({"num_beams": 2, "num_return_sequences": 3}, "at most num_beams 2, got 3"),
        ({"num_return_sequences": 2}, "expected num_return_sequences 1 for greedy"),
        ({"temperature": 0.0}, "expected temperature > 0"),
        ({"max_new_tokens": 100_000}, "max_len is"),
        ({"max_new_tokens": 0}, "max_new_tokens of at least 1"),
        ({"rung": "fast"}, "expected a rung out of"),
        ({"attention_mask": torch.ones(1, 1)}, "expected attention_mask of input_ids' shape"),
    ],
)
def test_errors(model, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        generate(model, mixed_sources(2), **options)


def test_empty_input(model) -> None:
    with pytest.raises(ValueError, match="at least one token in each input"):
        generate(model, torch.zeros(1, 3, dtype=torch.long))
