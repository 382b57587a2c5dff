"""A run that was stopped or interrupted continues as if nothing had happened, and loses nothing."""

from __future__ import annotations

import copy
import math
import sys
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch

from fastformer.checkpoints.training_state import (
    checkpoints,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
    step_of,
)
from fastformer.training import start
from fastformer.training import trainer as module
from fastformer.training.run_config import load_config
from fastformer.training.state import split
from fastformer.training.trainer import DivergedError
from tests.training.tiny import (
    SIZES,
    Crash,
    assert_same_lines,
    broken_from,
    changed,
    contents,
    crash_at,
    lines,
    scripted,
    weights,
)


def test_resume_after_a_crash_between_lines_and_checkpoints(config, tmp_path) -> None:
    # Dropout, the running average and the position within an epoch all have to come back.
    config = changed(config, log_every=3, save_every=5, ema=0.9, accumulate=2)
    whole = start(config, tmp_path / "whole")
    whole.train()
    trainer = start(config, tmp_path / "parts")
    crash_at(trainer, 9)
    with open(tmp_path / "parts" / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "ki')  # what a crash leaves of a line
    resumed = start(config, tmp_path / "parts", resume=True)
    assert resumed.step == 5
    resumed.train()
    assert torch.equal(weights(whole), weights(resumed)) and whole.position.epoch >= 2
    assert torch.equal(whole.ema.module.output_weight, resumed.ema.module.output_weight)
    assert replace(resumed.position, trained_seconds=0.0) == replace(whole.position, trained_seconds=0.0)
    assert [line["step"] for line in lines(tmp_path / "parts")] == [3, 6, 9, 12, 12]
    keys = ("step", "loss", "nll", "lr", "grad_norm", "padding")
    assert_same_lines(tmp_path / "whole", tmp_path / "parts", *keys)


@pytest.mark.parametrize("where", ["validate", "save_model"])
def test_a_run_that_ends_in_its_first_validation_resumes(config, tmp_path, monkeypatch, where) -> None:
    config = changed(config, val_every=3)
    start(config, tmp_path / "whole").train()
    trainer = start(config, tmp_path / "run")

    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr(trainer if where == "validate" else module, where, Mock(side_effect=Crash))
        trainer.train()
    assert [step_of(path) for path in checkpoints(tmp_path / "run")] == [3]
    start(config, tmp_path / "run", resume=True).train()
    assert_same_lines(tmp_path / "run", tmp_path / "whole", "step", "kind", "loss", "nll", "kept")


@pytest.mark.parametrize("changes", [{}, {"average_last": 2, "save_every": 1}, {"patience": 1, "val_every": 1}])
def test_a_finished_run_adds_nothing(config, tmp_path, caplog, changes) -> None:
    config = changed(config, steps=3, **changes)
    run = tmp_path / "run"
    trainer = start(config, run)
    if "patience" in changes:
        scripted(trainer, {1: 1.0, 2: 2.0})
    trainer.train()
    before = contents(run)
    caplog.set_level("INFO")
    again = start(load_config(run), run, resume=True)
    assert again.train() is None and again.step == trainer.step
    assert contents(run) == before
    assert str(run) in caplog.text


def put(state: dict, path: str, value: object) -> None:
    *parts, last = path.split("/")
    for part in parts:
        state = state[int(part) if part.isdigit() else part]
    state[last] = value(state[last]) if callable(value) else value


def misshapen(kept: dict) -> dict:
    return {number: values | {"exp_avg": torch.zeros(7, 7)} for number, values in kept.items()}


BAD_VALUES: list[tuple[str, object]] = [
    ("best", None),
    ("losses", 3),
    ("meter", {}),
    ("rng", "x"),
    ("optimizer", {}),
    ("data", None),
    ("counters/step", -5),
    ("counters/step", 10**18),
    ("counters/step", 1.5),
    ("counters/epoch", -1),
    ("counters/batch", -1),
    ("counters/batch", 10**15),
    ("counters/validated", 99),
    ("trained_seconds", math.inf),
    ("trained_seconds", -1.0),
    ("meter/seconds", math.nan),
    ("meter/tokens", -3),
    ("losses", [[1, "high"]]),
    ("model/embedding.weight", lambda weight: weight.double()),
    ("model/embedding.weight", lambda weight: weight.to_sparse()),
    ("model/embedding.weight", lambda weight: weight.clone().requires_grad_()),
    ("model/embedding.weight", lambda weight: weight * math.inf),
    ("model/embedding.weight", 3),
    ("model/3", torch.zeros(1)),
    ("optimizer/state", misshapen),
]


def test_values_that_training_never_produces(config, tmp_path) -> None:
    trainer = start(changed(config, steps=2, log_every=2), tmp_path / "run")
    trainer.train()
    good = copy.deepcopy(trainer.state_dict())
    bad = [{name: part for name, part in good.items() if name != left_out} for left_out, _ in BAD_VALUES[:6]]
    for path, value in BAD_VALUES:
        bad.append(copy.deepcopy(good))
        put(bad[-1], path, value)
    for state in bad:
        with pytest.raises(ValueError, match="step-2.pt"):
            trainer.load_state_dict(state, "step-2.pt")
    trainer.load_state_dict(good)
    other = start(changed(config, settings=SIZES | {"d_ff": 24}), tmp_path / "other")
    with pytest.raises(ValueError, match="step-2.pt"):
        other.load_state_dict(good, "step-2.pt")


@pytest.mark.parametrize(
    ("path", "value"),
    [("config", "[" * 100_000), ("config", "{}"), ("counters/epoch", -1), ("trained_seconds", math.inf)],
)
def test_a_run_with_special_values_does_not_change(config, tmp_path, ran, path, value) -> None:
    run = tmp_path / "run"
    start(changed(config, steps=2, log_every=2), run).train()
    state = load_checkpoint(checkpoints(run)[-1])
    put(state, path, value)
    save_checkpoint(run, 2, state, keep_last=1)
    before = contents(run)
    error = ran("train", str(run), "--resume", "--steps", "3", code=1).err
    assert run.name in error and "a bug" not in error
    assert contents(run) == before


def test_more_batches_than_an_epoch_has(config, tmp_path) -> None:
    trainer = start(changed(config, steps=30), tmp_path / "run")
    trainer.train()
    state = trainer.state_dict()
    state["counters"] |= {"batch": 20}
    again = start(changed(config, steps=31), tmp_path / "run", resume=True)
    again.load_state_dict(state)
    with pytest.raises(ValueError, match=r"\b20\b"):
        again.train()


def test_a_score_depends_on_the_weights_alone(config, tmp_path, monkeypatch) -> None:
    trainer = start(changed(config, steps=30, val_every=1, max_tokens=256), tmp_path / "run")
    validate = trainer.validate
    found = []

    def twice(model):
        scores = validate(model)
        found.append((scores.nll, validate(copy.deepcopy(model)).nll))
        return scores

    monkeypatch.setattr(trainer, "validate", twice)
    trainer.train()
    assert len(found) == 30 and [one for one, _ in found] == [other for _, other in found]


def test_a_run_whose_epochs_have_few_batches_resumes(config, tmp_path) -> None:
    config = changed(config, data_weights="0.005", val_every=0)  # an epoch of 40 pairs has one in five times
    start(changed(config, steps=2), tmp_path / "run").train()
    again = start(changed(config, steps=3), tmp_path / "run", resume=True)
    assert again.position.epoch > 2
    again.train()


def test_a_state_that_is_written_later_belongs_to_its_update() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def update() -> None:
        model(torch.ones(2)).sum().backward()
        optimizer.step()

    update()
    losses = [[1, 2.0]]
    rest = split({"optimizer": optimizer.state_dict(), "losses": losses})[1]
    update()
    losses[0][1] = 3.0
    assert {int(kept["step"]) for kept in rest["optimizer"]["state"].values()} == {1}
    assert rest["losses"] == [[1, 2.0]]


# What breaks.


@pytest.mark.parametrize(
    ("norm", "named"),
    [
        (None, r"\bloss\b.*\b6\b.*step-00000004.*--resume"),
        # The loss of that update is still finite, and its checkpoint would be the last one.
        (math.inf, r"\bnorm\b.*\binf\b.*\b6\b.*step-00000004"),
    ],
    ids=["loss", "norm"],
)
def test_what_is_not_finite_stops_and_keeps_the_last_good_checkpoint(config, tmp_path, norm, named) -> None:
    trainer = start(changed(config, save_every=2), tmp_path / "run")
    broken_from(trainer, 5, norm)
    with pytest.raises(DivergedError, match=named):
        trainer.train()
    latest = latest_checkpoint(tmp_path / "run")
    assert latest is not None
    path, state = latest
    assert path.stem == "step-00000004" and all(weight.isfinite().all() for weight in state["model"].values())


def test_nan_before_any_checkpoint_does_not_advise_to_resume(config, tmp_path) -> None:
    trainer = start(config, tmp_path / "run")
    broken_from(trainer, 1)
    with pytest.raises(DivergedError, match=r"\b2\b.*--lr") as caught:
        trainer.train()
    assert "--resume" not in str(caught.value)
    start(config, tmp_path / "run").train()  # nothing is in the way


@pytest.mark.skipif(sys.platform == "win32", reason="file size limits are POSIX")
def test_an_interrupted_write_keeps_the_old_file(config, tmp_path) -> None:
    import resource

    trainer = start(changed(config, steps=2), tmp_path / "run")
    trainer.train()
    before = contents(tmp_path / "run")
    with torch.no_grad():
        trainer.model.output_weight.zero_()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:  # the system refuses the rest of a file, as it does when the disk is full
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
        with pytest.raises(OSError, match=str(tmp_path / "run")):
            trainer.save()
        with pytest.raises(OSError, match=str(tmp_path / "run")):
            trainer.model.save_pretrained(tmp_path / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert contents(tmp_path / "run") == before
