"""The tuning run reports failing configurations, and always has the fastest so far on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")

from triton.runtime.errors import OutOfResources, PTXASError  # noqa: E402

from fastformer.kernels import _tuning  # noqa: E402

CALL = (90, "bf16")


@pytest.fixture(autouse=True)
def _own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FASTFORMER_TUNING_FILE", str(tmp_path / "tuning.json"))
    _tuning.forget()
    yield
    _tuning.forget()


def test_failing_configurations_are_skipped() -> None:
    failures = {(1,): PTXASError("no registers"), (2,): OutOfResources(9, 8, "shared"), (3,): RuntimeError("a pass")}

    def run(config: tuple) -> None:
        if config in failures:
            raise failures[config]

    timed, failed = _tuning.tune("k", CALL, [(1,), (5,), (2,), (4,), (3,)], run, lambda f: float(f.args[0][0]))
    assert timed == [(4.0, (4,)), (5.0, (5,))]
    assert list(failed) == ["(1,)", "(2,)", "(3,)"]
    assert "PTXASError" in failed["(1,)"] and "a pass" in failed["(3,)"]
    _tuning.forget()
    assert _tuning.measured("k", CALL) == (4,)


def test_configurations_of_the_same_speed_need_no_order() -> None:
    configs = [(64, None), (64, 168), (32, None)]
    timed, failed = _tuning.tune("k", CALL, configs, lambda config: None, lambda f: 1.0)
    assert timed == [(1.0, config) for config in configs] and not failed
    assert _tuning.measured("k", CALL) == configs[0]


def test_an_interruption_keeps_the_results_so_far() -> None:
    def run(config: tuple) -> None:
        if config == (1,):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _tuning.tune("k", CALL, [(5,), (3,), (4,), (1,)], run, lambda f: float(f.args[0][0]))
    _tuning.forget()
    assert _tuning.measured("k", CALL) == (3,)


def test_if_nothing_runs_nothing_is_recorded() -> None:
    def run(config: tuple) -> None:
        raise RuntimeError("never")

    timed, failed = _tuning.tune("k", CALL, [(1,), (2,)], run, lambda f: 1.0)
    assert timed == [] and len(failed) == 2 and not _tuning.path().exists()
