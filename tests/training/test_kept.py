"""Tests which model and which checkpoints a run keeps, and what it averages."""

from __future__ import annotations

import importlib.util
import math

import pytest
import torch
from safetensors.torch import load_file

from fastformer.checkpoints import load_model
from fastformer.checkpoints.training_state import average_weights, checkpoints, load_checkpoint, step_of
from fastformer.commands.average import average
from fastformer.models.weights import read_notes
from fastformer.training import TrainConfig, start
from fastformer.training.best import Best, ScoreRecord, choose_measure
from fastformer.training.evaluate import Scores
from tests.training.tiny import SIZES, changed, lines, scripted


def kept(run) -> list[int]:
    return [line["step"] for line in lines(run, "validation") if line["kept"]]


def test_the_best_model_is_kept_and_named(config, tmp_path, capsys) -> None:
    run = tmp_path / "run"
    trainer = start(changed(config, val_every=3), run)
    snapshots = {}
    validate = {3: 3.0, 6: 2.0, 9: 2.0, 12: 2.5}

    def scores(model):
        snapshots[trainer.step] = {name: weight.clone() for name, weight in model.state_dict().items()}
        return Scores(validate[trainer.step])

    trainer.validate = scores
    trainer.train()
    assert kept(run) == [3, 6]  # what is only as good is not better
    saved = load_file(run / "model.safetensors")
    assert all(torch.equal(saved[name], weight) for name, weight in snapshots[6].items())
    assert read_notes(run) == {"model": "update 6", "scores": "nll 2.0000"}
    *_, last = capsys.readouterr().out.splitlines()
    assert str(run) in last and "update 6" in last and "nll 2.0000" in last


def test_numbers_are_kept_by_exact_match(tmp_path, monkeypatch) -> None:
    config = TrainConfig(task="numbers", tokenizer="bytes", settings=SIZES, steps=2, val_every=1, max_tokens=64)
    monkeypatch.setattr(
        "fastformer.training.examples.number_texts", lambda seed: ([("a", "b")] * 4, [("a", "b"), ("c", "d")])
    )
    trainer = start(config, tmp_path / "run")
    exact = {1: 0.5, 2: 0.75}
    trainer.validate = lambda model: Scores(2.0 + trainer.step, exact_match=exact[trainer.step], bleu=0.0, chrf=1.0)
    trainer.train()
    assert kept(tmp_path / "run") == [1, 2] and trainer.best.record.step == 2


@pytest.mark.parametrize("patience", [1, 2])
def test_patience_counts_validations_without_a_better_one(config, tmp_path, patience) -> None:
    config = changed(config, val_every=1, patience=patience, steps=9)
    nll = {1: 3.0, 2: 2.0, 3: 2.0} | dict.fromkeys(range(4, 10), 2.5)
    trainer = scripted(start(config, tmp_path / "run"), nll)
    trainer.train()
    assert trainer.step == 2 + patience and trainer.position.finished
    assert len(lines(tmp_path / "run", "validation")) == 2 + patience  # none twice
    again = scripted(start(changed(config, patience=patience + 1), tmp_path / "run", resume=True), nll)
    again.train()
    assert again.step == 3 + patience  # those before count


def test_a_worse_model_does_not_overwrite_the_best_after_resuming(config, tmp_path) -> None:
    run = tmp_path / "run"
    start(changed(config, val_examples=4), run).train()
    before = (run / "model.safetensors").read_bytes()
    for changes in ({"lr": 1.0, "schedule": "constant"}, {"lr": 1.0, "schedule": "constant", "val_examples": 0}):
        trainer = start(changed(config, steps=start(config, run, resume=True).step + 3, **changes), run, resume=True)
        bad = trainer.best.bad_validations
        trainer.train()
        assert trainer.best.bad_validations == bad + 1 and trainer.best.record.step == 12
    assert (run / "model.safetensors").read_bytes() == before


def test_an_average_that_stays_is_named(config, tmp_path, capsys) -> None:
    run = tmp_path / "run"
    scripted(start(changed(config, save_every=4), run), {12: 1.0}).train()
    average(str(run))
    scripted(start(changed(config, save_every=4, steps=13), run, resume=True), {13: 2.0}).train()
    assert read_notes(run)["model"] == "the average of updates 4, 8, 12"
    *_, last = capsys.readouterr().out.splitlines()
    assert all(word in last for word in (str(run), "4, 8, 12", "update, 12", "nll 1.0000"))


@pytest.mark.parametrize("keep_last", [1, 5])
def test_average_last_is_the_model_in_the_folder(config, tmp_path, capsys, keep_last) -> None:
    run = tmp_path / "run"
    trainer = start(changed(config, save_every=2, val_every=4, keep_last=keep_last, average_last=3), run)
    nll = {4: 1.0, 8: 2.0, 12: 3.0}  # the best single update is an early one: the average was asked for all the same
    scripted(trainer, nll).train()
    assert [step_of(path) for path in checkpoints(run)] == [4, 6, 8, 10, 12][-max(keep_last, 3) :]
    paths = checkpoints(run)[-3:]
    states = [load_checkpoint(path)["model"] for path in paths]
    saved = load_file(run / "model.safetensors")
    for name, weight in saved.items():
        mean = sum(state[name].double() for state in states) / 3
        assert torch.allclose(weight.double(), mean, atol=1e-7), name
    assert read_notes(run)["model"] == "the average of updates 8, 10, 12"
    *_, last = capsys.readouterr().out.splitlines()
    assert all(word in last for word in (str(run), "8, 10, 12", "nll 3.0000", "nll 1.0000"))
    assert [line["step"] for line in lines(run, "average")] == [12]
    assert [line["step"] for line in lines(run, "validation")] == [4, 8, 12]


def test_the_average_with_ema_is_of_the_running_averages(config, tmp_path, calls_of) -> None:
    run = tmp_path / "run"
    trainer = start(changed(config, steps=4, save_every=2, average_last=2, ema=0.9), run)
    validated = calls_of(trainer, "validate")
    scores = trainer.train()
    states = [load_checkpoint(path)["ema"]["module.embedding.weight"] for path in checkpoints(run)]
    saved = load_file(run / "model.safetensors")["embedding.weight"]
    assert torch.allclose(saved, (states[0] + states[1]) / 2, atol=1e-7)
    assert len(validated) == 2 and scores.nll == trainer.validate(load_model(run)[0]).nll


def test_average_of_one_checkpoint_is_itself(config, tmp_path, caplog) -> None:
    start(changed(config, steps=2, save_every=5, average_last=3), tmp_path / "run").train()
    assert "average_last" in caplog.text
    assert read_notes(tmp_path / "run")["model"] == "update 2"
    state = average_weights(checkpoints(tmp_path / "run"))
    saved = load_file(tmp_path / "run" / "model.safetensors")
    assert all(torch.equal(state[name], weight) for name, weight in saved.items())


# Tests the choice of the best model: the measure, and the comparison.


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
