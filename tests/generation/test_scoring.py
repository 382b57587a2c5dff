"""Compares forced decoding with plain computation, and with the scores of a search."""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
import random
from typing import Any

import pytest
import torch

from fastformer.data import ByteTokenizer
from fastformer.generation import Translator, generate, score
from fastformer.generation.text_io import TokenScored
from fastformer.models import GPT, Transformer
from tests.generation.small import EOS, VOCAB, louder, next_logits, real, tiny

DICE = random.Random(5)


def ids(low: int, high: int) -> list[int]:
    return [DICE.randrange(3, VOCAB) for _ in range(DICE.randint(low, high))]


SOURCES = [ids(1, 20) for _ in range(9)]
TARGETS = [[*ids(0, 20), EOS] for _ in range(8)] + [[]]


def plain(model: Any, source: list[int], target: list[int]) -> list[float]:
    """Returns the log-probabilities of a target; for a GPT, those after the source."""
    logits = next_logits(model, source, target)[: len(target)].double()
    return logits.log_softmax(-1)[range(len(target)), target].tolist()


@pytest.mark.parametrize("max_tokens", [1, 60, 10_000])
def test_each_token_equals_the_token_alone(any_model, max_tokens) -> None:
    if isinstance(any_model, GPT):
        found = score(any_model, SOURCES, max_tokens=max_tokens)
        due = [plain(any_model, row[:1], row[1:]) for row in SOURCES]
    else:
        found = score(any_model, SOURCES, TARGETS, max_tokens=max_tokens)
        due = [plain(any_model, *pair) for pair in zip(SOURCES, TARGETS, strict=True)]
    assert [len(row) for row in found] == [len(row) for row in due] and any(due)
    for row, expected in zip(found, due, strict=True):
        assert row == pytest.approx(expected, abs=2e-5)


def test_the_score_of_a_greedy_result_is_that_of_the_search(any_model) -> None:
    out = generate(any_model, SOURCES, max_new_tokens=20, return_dict_in_generate=True)
    for number, source in enumerate(SOURCES):
        sequence = real(out.sequences[number])
        if isinstance(any_model, GPT):
            (found,) = score(any_model, [sequence])
            found = found[len(source) - 1 :]
        else:
            (found,) = score(any_model, [source], [sequence])
        assert math.fsum(found) == pytest.approx(out.scores[number].item(), abs=1e-4)
        assert found == pytest.approx(out.token_log_probs[number][: len(found)].tolist(), abs=1e-4)


@pytest.mark.parametrize("kind", ["bf16", "fp64", "own logits"])
def test_other_precisions_and_logits_of_the_models_own(kind, model, gpt) -> None:
    source, target = [5, 17, 9, 30, 12, 8], [7, 21, 33, 9, 14, 1]
    for which in (model, gpt):
        other = copy.deepcopy(which)
        if kind == "own logits":
            other.logits = lambda hidden, logits=other.logits: logits(hidden) * -2.0
            other = other.double()
        else:
            other = other.bfloat16() if kind == "bf16" else other.double()
        (found,) = score(other, [source]) if which is gpt else score(other, [source], [target])
        pair = (source[:1], source[1:]) if which is gpt else (source, target)
        # In 16 bits logits that were written are rounded; the scores need not be.
        assert found == pytest.approx(plain(other, *pair), abs=0.1 if kind == "bf16" else 1e-9)
        if kind == "bf16":
            assert found != pytest.approx(plain(which, *pair), abs=1e-5)
            assert any(value != torch.tensor(value).bfloat16().item() for value in found)


@pytest.mark.parametrize("context", [1, 7, 16, None])
def test_a_long_text_is_scored_in_overlapping_windows(gpt, context) -> None:
    small = GPT(type(gpt.config)(**{**vars(gpt.config), "max_len": 16})).eval()
    small.load_state_dict({k: v[:16] if "position" in k else v for k, v in gpt.state_dict().items()})
    for length in (1, 2, 16, 17, 33):
        row = [DICE.randrange(VOCAB) for _ in range(length)]
        (found,) = score(small, [row], context=context)
        assert len(found) == length - 1
        known, least = 0, 8 if context is None else context
        for place, value in enumerate(found, 1):
            # What it must have been told: one of the stretches before it, and no shorter one than was asked for.
            stretches = range(min(place, least), min(place, 16) + 1)
            due = [next_logits(small, row[place - n : place], [])[-1].log_softmax(-1)[row[place]] for n in stretches]
            near = [n for n, expected in zip(stretches, due, strict=True) if abs(expected - value) < 1e-4]
            assert near
            known += max(near)
        if context == 16:
            assert known == sum(min(place, 16) for place in range(1, length))


def test_a_model_in_training_is_scored_without_dropout(model) -> None:
    dropping = Transformer(dataclasses.replace(model.config, dropout=0.5)).train()
    dropping.load_state_dict(model.state_dict())
    assert score(dropping, SOURCES, TARGETS) == score(model, SOURCES, TARGETS)
    assert all(module.training for module in dropping.modules())


def test_texts_that_cannot_be_scored_are_reported(model, gpt, lstm) -> None:
    for arguments, expected in (
        ((model, [[5]]), "target_ids.*Transformer"),
        ((gpt, [[5]], [[6]]), "target_ids.*GPT"),
        ((model, [[5], [6]], [[7]]), "target_ids.* 2 "),
        ((model, [[]], [[7]]), "source"),
        ((lstm, [[]], [[7]]), "source"),
        ((model, [[5]], [[VOCAB]]), f"target ids.* {VOCAB - 1}"),
        ((model, [[-1]], [[5]]), f"source ids.* {VOCAB - 1}"),
        ((gpt, [[5, VOCAB]]), f"target ids.* {VOCAB - 1}"),
        ((model, [[5]], [[5] * 129]), "target.*max_len.*129"),
        ((model, [[5] * 129], [[5]]), "source.*max_len.*129"),
        ((torch.nn.Linear(2, 2), [[5]]), "Linear"),
    ):
        with pytest.raises(ValueError, match=expected):
            score(*arguments)
    for context in (0, 129, 1.5):
        with pytest.raises(ValueError, match=r"\bcontext\b.*\b128\b"):
            score(gpt, [[5, 6]], context=context)
    with pytest.raises(ValueError, match=r"\bcontext\b.*\bTransformer\b"):
        score(model, [[5]], [[5]], context=4)
    assert score(model, torch.tensor([[5, 6, 0], [7, 0, 0]]), torch.tensor([[7, 1, 0], [8, 9, 1]])) == score(
        model, [[5, 6], [7]], [[7, 1], [8, 9, 1]]
    )


@pytest.fixture(scope="module")
def translator() -> Translator:
    model = louder(tiny(max_len=40, tie_embeddings=False)).train()
    model.output.weight.data[130:] = model.output.weight.data[:3] = 0  # it writes ASCII, mostly
    return Translator(model, ByteTokenizer())


def test_texts_and_their_translations(translator) -> None:
    texts = ["one", "a longer one", "x"]
    made = translator.translate(texts, max_new_tokens=12, return_token_scores=True)
    found = translator.score(texts, [one.text for one in made])
    assert len({one.text for one in made}) == 3
    for due, forced in zip(made, found, strict=True):
        assert forced.text == due.text and [token for token, _ in forced.tokens][-1] == "</s>"
        cut = forced.tokens[: len(due.tokens)]  # it was cut at 12 tokens, without EOS
        assert [token for token, _ in cut] == [token for token, _ in due.tokens]
        assert [value for _, value in cut] == pytest.approx([value for _, value in due.tokens], abs=1e-4)
        assert forced.score == pytest.approx(sum(value for _, value in forced.tokens))
        assert forced.per_token == pytest.approx(forced.score / len(forced.tokens))
        assert forced.perplexity == pytest.approx(math.exp(-forced.per_token))
    assert translator.score("one", made[0].text) == found[0]
    assert translator.score(iter(texts), (one.text for one in made)) == found and translator.score([], []) == []
    assert not translator.model.encoder.layers[0].linear1.weight.is_inference() and translator.model.training


def test_pairs_that_cannot_be_scored_keep_their_places(translator, caplog) -> None:
    texts, translations = ["a", "", "b", "c" * 50, "", "d", "e"], ["x", "", "y" * 50, "z", "z", "", "\ud800"]
    for number, (text, translation) in enumerate(zip(texts, translations, strict=True), 1):
        if number in (1, 2, 6):
            translator.score([text], [translation])
            continue
        with pytest.raises(ValueError, match="text 1: .*-inf"):
            translator.score([text], [translation])
    with caplog.at_level(logging.WARNING, "fastformer"):
        found = translator.score(texts, translations, on_error="skip")
    assert [one.score == -math.inf for one in found] == [False, False, True, True, True, False, True]
    assert [one.text for one in found] == translations
    assert found[1] == TokenScored("", 0.0, []) and math.isnan(found[1].perplexity)
    assert [token for token, _ in found[5].tokens] == ["</s>"] and found[2].perplexity == math.inf
    said = [record.message for record in caplog.records]
    assert len(said) == 5 and "text 3" in said[0] and "4 of 7" in said[-1]
    assert [one.score for one in translator.score(["a", "b" * 50], ["x", "y"], skip_long=True)][1] == -math.inf
    for arguments, expected in (
        (("a", ["x"]), r"\bstr\b"),
        ((["a"], "x"), r"\bstr\b"),
        ((["a"], []), "0 of translations"),
        ((["a"], ["x", "y"]), "1 of texts"),
        ((["a"], [None]), r"translations\[0\]"),
        (([b"a"], ["x"]), r"texts\[0\]"),
        ((7, ["x"]), "texts"),
    ):
        with pytest.raises(ValueError, match=expected):
            translator.score(*arguments)
    with pytest.raises(ValueError, match="'cpp'.*int8"):
        Translator(translator.model, translator.tokenizer, precision="int8").score("a", "b")
