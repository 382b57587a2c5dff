"""Tests what is written to metrics.jsonl, and what a resumed run keeps of it."""

from __future__ import annotations

import json
import re

import pytest

from fastformer.data import Batch, Example, collate
from fastformer.training import start
from fastformer.training.evaluate import Scores
from fastformer.training.progress import Meter, Progress, duration
from tests.training.tiny import changed, lines


def test_repeated_and_damaged_lines_are_dropped(tmp_path) -> None:
    kept = [
        '{"step": 1, "kind": "train", "loss": 3.0}',
        '{"step": 2, "kind": "validation", "nll": 3.0}',
        '{"step": 4, "kind": "train", "loss": 2.0}',
    ]
    dropped = [
        '{"step": 4, "kind": "validation", "nll": 2.0}',  # it was begun and has to be done again
        '{"step": 5, "kind": "train", "loss": 1.0}',
        '{"step": null, "kind": "train"}',
        '{"step": "4", "kind": "train"}',
        '{"kind": "train"}',
        "[1, 2]",
        "null",
        '{"step": 4, "ki',
    ]
    file = tmp_path / "metrics.jsonl"
    file.write_text("\n".join([*kept, *dropped]))
    Progress(10, 4, 2, tmp_path).close()
    assert file.read_text().splitlines() == kept
    Progress(10, 4, 4, tmp_path).close()
    assert file.read_text().splitlines() == kept


def test_a_validation_in_words_and_in_numbers(tmp_path, capsys) -> None:
    progress = Progress(10, 0, 0, tmp_path)
    scores = Scores(1.5, exact_match=0.25, bleu=30.125, chrf=50.0, signatures={"bleu_signature": "x"})
    scores.samples = [("a", "b", "b"), ("c", "d", "e")]
    progress.validation(3, scores, kept=True)
    progress.validation(3, Scores(2.0, nll_per_character=0.5), kept=False, average=True)
    progress.close()
    first, second = (json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert first == {
        "step": 3, "kind": "validation", "nll": 1.5, "kept": True, "exact_match": 0.25, "bleu": 30.125, "chrf": 50.0,
        "bleu_signature": "x", "samples": [["a", "b", "b"], ["c", "d", "e"]],
    }  # fmt: skip
    assert second == {"step": 3, "kind": "average", "nll": 2.0, "nll_per_character": 0.5, "kept": False}
    said = capsys.readouterr().out.splitlines()
    numbers = [set(re.findall(r"\d+\.\d+", line)) for line in said]
    assert {"1.5000", "0.2500", "30.12", "50.00"} in numbers and numbers[-1] == {"2.0000", "0.5000"}
    assert "average" in said[-1] and "average" not in said[0]
    # The samples: the source, the translation, and the reference where that is another one.
    assert [line.split()[-1].strip("()") for line in said[1:-1]] == ["a", "b", "c", "d", "e"]


def test_the_meter_counts_real_tokens_and_continues_after_a_checkpoint() -> None:
    batch = collate([Example([5, 6, 1], [7, 1]), Example([8, 1], [9, 9, 9, 1])], packed=False)
    meter = Meter()

    def add(m: Meter, loss: float, batches: list[Batch]) -> None:
        m.count(batches)
        m.loss += loss

    add(meter, 2.0, [batch])
    other = Meter()
    other.load_state_dict(meter.state_dict())
    for m in (meter, other):
        add(m, 4.0, [batch, batch])
        assert m.mean_loss() == 3.0
        assert m.report()["padding"] == pytest.approx(1 - 11 / 14)  # 5 + 6 of 2 * (3 + 4)
    place = meter.loss
    meter.reset()
    assert meter.loss is place and meter.mean_loss() == 0.0 and meter.report()["padding"] == 1.0
    add(meter, 7.0, [batch])
    assert meter.mean_loss() == 7.0


class Clock:
    """A clock that a test moves."""

    def __init__(self, monkeypatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("fastformer.training.progress.time.perf_counter", lambda: self.now)


def test_the_speed_after_a_checkpoint_is_that_of_training(monkeypatch) -> None:
    clock, batch = Clock(monkeypatch), collate([Example([5, 6, 1], [7, 1])], packed=False)
    meter = Meter()
    meter.count([batch])
    clock.now += 2.0
    assert meter.report()["tokens_per_second"] == 2.5
    state = meter.state_dict()
    clock.now += 1000.0  # until the run goes on, in another process
    other = Meter()
    other.load_state_dict(state)
    assert other.report()["tokens_per_second"] == 2.5
    clock.now += 3.0
    other.count([batch])
    assert other.report()["tokens_per_second"] == 2.0


def test_other_folders_do_not_count_as_trainings(monkeypatch) -> None:
    clock, batch = Clock(monkeypatch), collate([Example([5, 6, 1], [7, 1])], packed=False)
    meter = Meter()
    meter.count([batch])
    clock.now += 1.0
    with meter.paused():
        clock.now += 50.0
        assert meter.state_dict()["meter"]["seconds"] == 1.0
    clock.now += 1.0
    assert meter.report()["tokens_per_second"] == 2.5
    with pytest.raises(KeyboardInterrupt), meter.paused():
        clock.now += 50.0
        raise KeyboardInterrupt
    assert meter.report()["tokens_per_second"] == 2.5


@pytest.mark.parametrize("what", ["validate", "save"])
def test_the_line_after_a_validation_or_a_save_has_the_speed_of_training(config, tmp_path, monkeypatch, what) -> None:
    clock = Clock(monkeypatch)
    config = changed(config, steps=9, log_every=4, **{f"{'val' if what == 'validate' else 'save'}_every": 3})
    trainer = start(config, tmp_path / "run")
    update, slow = trainer.update, getattr(trainer, what)

    def timed(batches):
        clock.now += 1.0
        return update(batches)

    def waited(*arguments):
        clock.now += 600.0
        return slow(*arguments)

    trainer.update = timed
    setattr(trainer, what, waited)
    trainer.train()
    for line in lines(tmp_path / "run", "train"):
        assert 20 < line["tokens_per_second"] <= 128, line


@pytest.mark.slow
def test_tensorboard_gets_the_numbers(tmp_path, monkeypatch) -> None:
    pytest.importorskip("tensorboard", reason="the curves are for TensorBoard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.undo()  # the other tests do without
    progress = Progress(10, 0, 0, tmp_path)
    progress.validation(3, Scores(1.5), kept=True)
    progress.close()
    found = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in found.Scalars("validation/nll")] == [(3, 1.5)]


def test_duration() -> None:
    assert [duration(s) for s in (0, 59.6, 61, 3599.7, 3723)] == ["0:00", "1:00", "1:01", "1:00:00", "1:02:03"]
