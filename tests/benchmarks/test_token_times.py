"""Times of tokens belong to their positions, the first includes the prompt, and medians are per position."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from benchmarks import token_times as token_times_module
from benchmarks.cases.models.bench_decoding import ENGINES
from benchmarks.measure import record
from benchmarks.peers.cases import make_model
from benchmarks.token_times import Line, lines, main, token_times


def test_each_token_has_a_time() -> None:
    model = make_model({"name": "tiny"})
    for name in ("recompute", "kv_cache"):
        seconds = token_times(model, [5, 6, 7], 4, Line(name, None))
        assert len(seconds) == 4 and min(seconds) > 0


def test_lines() -> None:
    assert lines(["kv_cache", "recompute"], ["int8"]) == [("kv_cache", None), ("recompute", None)]
    drawn = lines(None, ["fp32", "int8"])
    assert [line.engine for line in drawn if line.engine != "cpp"] == ["recompute", "cross_cache", "kv_cache"]
    if "cpp" in ENGINES:
        assert {line.precision for line in drawn if line.engine == "cpp"} == {"fp32", "int8"}


def test_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="not installed: pip install matplotlib")
    picture, out = tmp_path / "plot.svg", tmp_path / "times.jsonl"
    engines = ["kv_cache", "cross_cache"]
    assert main(["tiny", "--picture", str(picture), "--tokens", "9", "--rounds", "1", "--engines", *engines,
                 "--out", str(out), "--threads", str(torch.get_num_threads())]) == 0  # fmt: skip
    assert picture.stat().st_size > 1000
    rows = list(map(json.loads, out.read_text().splitlines()))
    assert [(row["provider"], row["curve"]["x"]) for row in rows] == [(name, list(range(2, 10))) for name in engines]
    assert all(len(row["curve"]["y"]) == 8 and min(row["curve"]["y"]) > 0 for row in rows)
    for row in rows:
        record.check(row)
    assert capsys.readouterr().out.count("ms at the end") == 2


def test_printed_scores_omit_the_encoders_token(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An eighth of the tokens at either end, the first token, which has the encoder's time, in neither."""
    seconds = [5.0, 0.001, 0.003, *[0.010] * 12, 0.004, 0.008]
    monkeypatch.setattr(token_times_module, "token_times", lambda *_, **__: seconds)
    assert main(["tiny", "--tokens", str(len(seconds)), "--rounds", "1", "--engines", "kv_cache"]) == 0
    printed = re.search(r"([\d.]+) ms a token at the start, ([\d.]+) ms at the end", capsys.readouterr().out)
    assert printed is not None and [float(each) for each in printed.groups()] == [2.0, 6.0]


def test_bad_commands(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for arguments, message in ((["tiny", "--tokens", "1"], "--tokens"), ([str(tmp_path / "none")], "none")):
        with pytest.raises(SystemExit) as error:
            main(arguments)
        assert error.value.code == 2 and message in capsys.readouterr().err
