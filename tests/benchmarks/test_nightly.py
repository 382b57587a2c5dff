"""`python -m benchmarks.nightly` measures every headline, keeps each night, and fails when a ratio drops."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="not installed: pip install matplotlib")

from benchmarks import nightly
from benchmarks.measure import record
from benchmarks.peers.__main__ import _options
from benchmarks.publish.latest import Results


@pytest.fixture
def night(tmp_path: Path, monkeypatch):
    """Returns a function that runs a night: the committed rows of what the jobs ask for, changed by a function."""
    rows, change = Results().rows, [lambda row: row]

    def measure(job: str, rounds: int, out: Path) -> None:
        options = _options([*shlex.split(job), "--rounds", str(rounds)])  # the command accepts it
        for row in rows:
            number_format = row.get("dtype") or row.get("precision")
            is_asked = row.get("model") == options.case and row["provider"] in options.peer
            is_asked &= all(str(row["shape"].get(field)) == value for field, value in options.shape)
            if is_asked and number_format in options.precision and (changed := change[0]({**row})):
                record.append(out, changed)

    monkeypatch.setattr(nightly, "measure", measure)

    def run(by=lambda row: row) -> int:
        change[0] = by
        words = ["--results", str(tmp_path / "nightly.jsonl"), "--picture", str(tmp_path / "trend.svg")]
        return nightly.main(words)

    return run


def slower(factor: float, **fields: Any):
    """Returns a function that makes fastformer's answers of a Llama slower."""

    def by(row: dict[str, Any]) -> dict[str, Any]:
        if row["provider"] == "fastformer" and row["model"] == "llama":
            row["ms_p50"] *= factor
        if row["model"] == "llama":  # the ratio is that of the medians
            row.pop("ours", None)
        return row | fields

    return by


def test_a_drop_fails_and_a_small_one_does_not(night, tmp_path, capsys) -> None:
    assert night(slower(1)) == 0, "the first night, in which all are measured"
    assert night(slower(1.08)) == 0
    capsys.readouterr()
    assert night(slower(1.3)) == 1
    worse = [line for line in capsys.readouterr().out.splitlines() if "WORSE" in line]
    assert len(worse) == 2 and all("llama.cpp" in line for line in worse)
    assert len({row["night"] for row in record.read(tmp_path / "nightly.jsonl")}) == 3
    assert (tmp_path / "trend.svg").is_file()


def test_each_kind_of_cpu_has_a_trend_of_its_own(night, capsys) -> None:
    intel = {"device": "Intel(R) Xeon(R) Processor, family 6, model 143"}
    assert night(slower(1)) == 0
    capsys.readouterr()
    for other in (intel, {"cores": 64}, {"capability": "AVX2"}):
        assert night(slower(1.5, **other)) == 0, f"{other} has no earlier night"
        (heading,) = [line for line in capsys.readouterr().out.splitlines() if " minutes: " in line]
        assert all(str(value) in heading for value in other.values())
    assert night(slower(1)) == 0, "compared with the first night alone"
    assert night(slower(2, **intel)) == 1
    worse = [line for line in capsys.readouterr().out.splitlines() if "WORSE" in line]
    assert len(worse) == 2 and all("llama.cpp" in line for line in worse)


def test_a_night_that_is_ended_keeps_what_it_has_measured(night, tmp_path, monkeypatch) -> None:
    measure = nightly.measure
    measured: list[str] = []

    def until_the_third(job: str, rounds: int, out: Path) -> None:
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(job)
        measure(job, rounds, out)

    monkeypatch.setattr(nightly, "measure", until_the_third)
    with pytest.raises(KeyboardInterrupt):
        night()
    kept = {(row["model"], row.get("dtype") or row.get("precision")) for row in record.read(tmp_path / "nightly.jsonl")}
    assert kept == {("minilm", "int8"), ("minilm", "fp32")}


def test_what_was_not_measured_fails(night, capsys) -> None:
    assert night(lambda row: None if row["provider"] == "ctranslate2" else row) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "not measured" in line]
    assert "CTranslate2" in line
