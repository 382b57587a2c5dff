"""Tests what is written to metrics.jsonl, and what a resumed run keeps of it."""

from __future__ import annotations

import json
import re

import pytest

from fastformer.data import Batch, Example, collate
from fastformer.training import TrainConfig, start
from fastformer.training.evaluate import Scores
from fastformer.training.progress import Meter, Progress, duration
from fastformer.training.schedule import FLOOR, rate_of, surprises
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


# Compares learning rates with their formulas, update by update.


def config_of(**settings) -> TrainConfig:
    return TrainConfig(train_tsv="x", **settings)


def learning_rate(step: int, *, d_model: int, **settings) -> float:
    return rate_of(config_of(**settings), step, d_model)


def test_values_of_the_papers() -> None:
    options = {"lr": 2.0, "warmup": 8000, "steps": 300_000, "d_model": 512}
    # tensor2tensor's peak and later values
    assert learning_rate(8000, schedule="t2t", **options) == pytest.approx(9.882e-4, rel=1e-3)
    assert learning_rate(100_000, schedule="t2t", **options) == pytest.approx(2.80e-4, rel=2e-3)
    paper = {"lr": 1.0, "warmup": 4000, "steps": 100_000, "d_model": 512}
    assert learning_rate(4000, schedule="noam", **paper) == pytest.approx(6.988e-4, rel=1e-3)
    assert learning_rate(1, schedule="noam", **paper) == pytest.approx(6.988e-4 / 4000, rel=1e-3)


@pytest.mark.parametrize("schedule", ["noam", "t2t", "linear", "cosine", "constant"])
def test_warmup_is_linear_from_the_first_update_to_the_peak(schedule) -> None:
    options = {"schedule": schedule, "lr": 1e-3, "warmup": 10, "steps": 110, "d_model": 64}
    peak = learning_rate(10, **options)
    for step in range(1, 11):
        assert learning_rate(step, **options) == pytest.approx(peak * step / 10)
    if schedule in ("linear", "cosine", "constant"):
        assert peak == 1e-3
    assert learning_rate(11, **options) == peak if schedule == "constant" else learning_rate(11, **options) < peak


def test_decays() -> None:
    options = {"lr": 1e-3, "warmup": 10, "steps": 110, "d_model": 64}
    for schedule in ("linear", "cosine"):
        assert learning_rate(110, schedule=schedule, **options) == pytest.approx(FLOOR * 1e-3)
        assert learning_rate(60, schedule=schedule, **options) == pytest.approx((1 + FLOOR) / 2 * 1e-3)
        assert learning_rate(500, schedule=schedule, **options) == pytest.approx(FLOOR * 1e-3)
    assert learning_rate(35, schedule="linear", **options) == pytest.approx((1 - 0.25 * (1 - FLOOR)) * 1e-3)
    assert learning_rate(35, schedule="cosine", **options) > learning_rate(35, schedule="linear", **options)
    assert learning_rate(100, schedule="constant", **options) == 1e-3
    assert learning_rate(1, schedule="constant", **{**options, "warmup": 0}) == 1e-3


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"steps": 10, "warmup": 500}, ("500", "10", "2 %", "--warmup 1")),
        ({"steps": 8}, ("200", "8", "4 %", "--warmup")),
        ({"steps": 100, "warmup": 200, "schedule": "noam"}, ("200", "100", "50 %")),
        ({"steps": 1000, "warmup": 200}, ()),
        ({"steps": 100, "warmup": 50, "schedule": "constant"}, ()),
        ({"steps": 10, "warmup": 0}, ()),
        ({"steps": 1}, ()),
    ],
)
def test_a_warmup_that_never_ends_is_mentioned(settings, said) -> None:
    found = surprises(config_of(**settings), 64)
    assert len(found) == bool(said)
    assert all(word in sentence for sentence in found for word in said)


@pytest.mark.parametrize(
    ("before", "after", "jumps"),
    [
        ({}, {"steps": 40}, True),  # the linear schedule had ended
        ({"schedule": "constant"}, {"steps": 40}, False),
        ({"schedule": "noam"}, {"steps": 40}, False),
        ({"schedule": "constant"}, {"steps": 40, "lr": 0.1}, True),
        ({"schedule": "constant"}, {"steps": 40, "lr": 1e-6}, True),
        ({}, {"steps": 40, "schedule": "constant"}, True),
        ({"steps": 2000}, {}, False),  # interrupted
        ({"steps": 2000, "warmup": 19}, {}, False),
    ],
)
def test_a_jump_of_the_rate_on_resume_is_reported(before, after, jumps) -> None:
    settings = {"steps": 20, "warmup": 5} | before
    last = rate_of(config_of(**settings), 20, 64)
    found = surprises(config_of(**(settings | after)), 64, 20, last)
    assert len(found) == jumps
    if jumps:
        assert f"{last:.2e}" in found[0] and f"--lr {last:.3g}" in found[0]


def test_runs_mention_them(config, tmp_path, caplog) -> None:
    start(changed(config, warmup=50, steps=4), tmp_path / "run").train()
    assert "--warmup" in caplog.text
    caplog.clear()
    start(changed(config, warmup=1, steps=4), tmp_path / "other").train()
    start(changed(config, warmup=1, steps=4), tmp_path / "other", resume=True)
    assert "rate" not in caplog.text
    start(changed(config, warmup=1, steps=40), tmp_path / "other", resume=True)
    assert "--schedule constant" in caplog.text
