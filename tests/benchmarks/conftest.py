"""Checks that the tests of the benchmarks leave nothing behind, and that commands refuse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def nothing_outlives_a_test(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Protects malloc's settings, which can't be undone, and the stored best time of the user's machine."""
    monkeypatch.setattr("benchmarks.run.keep_freed_memory", lambda: None)
    monkeypatch.setattr("benchmarks.measure.noise_monitor.BEST", tmp_path / "cache" / "fixed_work.json")


Refused = Callable[..., str]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """Calls a command's `main` with words that it refuses, and returns what it says."""

    def call(main: Callable[[list[str]], object], *words: str) -> str:
        with pytest.raises(SystemExit) as end:
            main([*words])
        assert end.value.code == 2
        return capsys.readouterr().err

    return call
