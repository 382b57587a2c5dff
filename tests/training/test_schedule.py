"""Learning rates by their formulas, update by update."""

from __future__ import annotations

import pytest

from fastformer.training.schedule import FLOOR, learning_rate


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
