"""Checks that the tests of the benchmarks leave nothing behind, and that commands refuse."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from benchmarks.measure.timing import Rounds, time_interleaved


@pytest.fixture(autouse=True)
def nothing_outlives_a_test(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Protects malloc's settings, which can't be undone, and the stored best time of the user's machine.

    What the machine can do at most is measured in few turns, where a user's takes two seconds.
    """
    monkeypatch.setattr("benchmarks.run.keep_freed_memory", lambda: None)

    def soon(functions: Mapping[str, Callable[[], object]], *, device: str, **_: object) -> Rounds:
        return time_interleaved(functions, rounds=1, device=device, seconds=0.0)

    monkeypatch.setattr("benchmarks.measure.roofline.time_interleaved", soon)
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
