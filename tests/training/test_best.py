"""Tests the choice of the best model: the measure, and the comparison."""

from __future__ import annotations

import importlib.util
import math

import pytest

from fastformer.training import TrainConfig
from fastformer.training.best import Best, ScoreRecord, choose_measure
from fastformer.training.evaluate import Scores


@pytest.mark.parametrize(
    ("settings", "measure"),
    [
        ({"task": "numbers"}, "exact_match"),
        ({"task": "numbers", "best_by": "bleu"}, "bleu"),
        ({"train_tsv": "x"}, "bleu"),
        ({"train_tsv": "x", "best_by": "chrf"}, "chrf"),
        ({"train_tsv": "x", "best_by": "nll"}, "nll"),
        ({"train_tsv": "x", "val_examples": 0}, "nll"),
        ({"task": "numbers", "val_examples": 0}, "nll"),
        ({"model": "gpt", "train_text": "x"}, "nll"),
        ({"model": "lstm", "batching": "random", "train_tsv": "x"}, "bleu"),
    ],
)
def test_the_measure_fits_the_task(settings, measure) -> None:
    assert choose_measure(TrainConfig(**settings)) == measure


CHINESE = ["我喜欢吃苹果。", "他昨天去北京了。", "one of four spaced words"]


def test_chrf_decides_if_bleu_finds_no_words(caplog) -> None:
    for given, measure in (
        ({}, "chrf"),
        ({"best_by": "bleu"}, "bleu"),
        ({"bleu_tokenize": "zh"}, "bleu"),
        ({"best_by": "nll"}, "nll"),
    ):
        caplog.clear()
        assert choose_measure(TrainConfig(train_tsv="x", **given), CHINESE) == measure
        assert ("--bleu_tokenize zh" in caplog.text) == ("zh" not in given.values() and "nll" not in given.values())
    assert choose_measure(TrainConfig(train_tsv="x"), ["good day to you all"]) == "bleu"
    with pytest.raises(ImportError, match="ja-mecab"):
        choose_measure(TrainConfig(train_tsv="x", bleu_tokenize="ja-mecab"))


def test_without_sacrebleu(monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert choose_measure(TrainConfig(train_tsv="x")) == "nll"
    assert choose_measure(TrainConfig(task="numbers")) == "exact_match"
    with pytest.raises(ValueError, match=r"\bbest_by\b.*\bsacrebleu\b"):
        choose_measure(TrainConfig(train_tsv="x", best_by="bleu"))


def test_a_requested_measure_that_is_impossible() -> None:
    with pytest.raises(ValueError, match=r"\bbest_by\b.*\bval_examples\b"):
        choose_measure(TrainConfig(train_tsv="x", best_by="chrf", val_examples=0))
    with pytest.raises(ValueError, match=r"\bbest_by\b.*\bgpt\b"):
        choose_measure(TrainConfig(model="gpt", train_text="x", best_by="exact_match"))


def record(nll: float, bleu: float | None = None, data: str = "x", translated: int = 5, **more: float) -> ScoreRecord:
    return ScoreRecord(1, data, translated, nll, bleu, more.get("chrf"), more.get("exact_match"))


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        (record(2.0, 30.0), record(1.0, 29.9)),  # the measure counts
        (record(1.0, 0.0), record(2.0, 0.0)),  # single words: BLEU is 0 on both
        (record(1.0, 30.0), record(2.0, 30.0)),  # a tie
        (record(1.0, 0.001, chrf=20.0), record(2.0, 0.002, chrf=30.0)),  # both are shown as 0.00
        (record(1.0, 0.0, chrf=20.0), record(2.0, 0.0, chrf=30.0)),
        (record(2.0, 5.0, chrf=1.0), record(1.0, 4.0, chrf=20.0)),
        (record(3.0, 0.1), record(1.0, 0.0)),
        (record(1.0), record(2.0, 30.0)),  # nothing translated now: a likelihood is no BLEU
        (record(1.0, 10.0), record(2.0)),
        (record(1.0, 10.0, translated=9), record(2.0, 30.0)),  # of other sentences
        (record(9.0, 1.0, data="other"), record(1.0, 30.0)),  # nothing is known of the other here
        (record(1.0, 5.0), record(1.0, math.nan)),
        (record(1.0), record(math.nan)),
    ],
)
def test_better(better, worse) -> None:
    assert better.beats(worse, "bleu")
    if better.data == worse.data:
        assert not worse.beats(better, "bleu")
    assert not worse.beats(worse, "bleu")


def test_each_measure_looks_at_its_own_score() -> None:
    one = record(1.0, 10.0, chrf=50.0, exact_match=0.1)
    other = record(2.0, 9.0, chrf=51.0, exact_match=0.1)
    assert one.beats(other, "bleu") and other.beats(one, "chrf")
    assert one.beats(other, "nll") and one.beats(other, "exact_match")
    assert (one.show("bleu"), one.show("nll")) == ("BLEU 10.00, nll 1.0000", "nll 1.0000")
    assert record(1.0, 0.0, chrf=5.0).show("bleu") == "BLEU 0.00, nll 1.0000"
    assert record(1.0).show("bleu") == "nll 1.0000"


def test_bad_validations_in_a_row() -> None:
    best = Best("nll", "x", 0)
    assert [best.add(step, Scores(nll)) for step, nll in enumerate((3.0, 2.0, 2.0, 2.5, 1.0, 1.5), 1)] == [
        True, True, False, False, True, False,
    ]  # fmt: skip
    assert best.bad_validations == 1 and best.record.step == 5
    other = Best("nll", "x", 0)
    other.load_state_dict(best.state_dict())
    assert other.bad_validations == 1 and other.record == best.record
    assert not other.add(7, Scores(1.0)) and other.bad_validations == 2
    other.load_state_dict(Best("nll", "x", 0).state_dict())
    assert other.record is None and other.bad_validations == 0
