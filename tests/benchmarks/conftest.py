"""Checks that the tests of the benchmarks leave nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def nothing_outlives_a_test(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """malloc's settings can't be undone, and the best time of the user's machine isn't a test's to set."""
    monkeypatch.setattr("benchmarks.run.keep_freed_memory", lambda: None)
    monkeypatch.setattr("benchmarks.measure.noise_monitor.BEST", tmp_path / "cache" / "fixed_work.json")
