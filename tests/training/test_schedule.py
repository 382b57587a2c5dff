"""Compares learning rates with their formulas, update by update."""

from __future__ import annotations

import pytest

from fastformer.training import TrainConfig, start
from fastformer.training.schedule import FLOOR, rate_of, surprises
from tests.training.tiny import changed


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
