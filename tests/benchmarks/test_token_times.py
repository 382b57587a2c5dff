"""Times of tokens belong to their positions, the first includes the prompt, and medians are per position."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from benchmarks import token_times as token_times_module
from benchmarks.cases.models.bench_decoding import ENGINES
from benchmarks.peers.cases import make_model
from benchmarks.token_times import PlotLine, main, token_times
from fastformer.generation.scheduler import run_batch
from tests.benchmarks.running import checked_rows


@pytest.mark.parametrize("engine", [name for name in ENGINES if name in ("kv_cache", "cpp", "recompute")])
def test_each_token_is_timed_by_itself(engine, monkeypatch) -> None:
    steps = mock.Mock(wraps=run_batch)
    monkeypatch.setattr(token_times_module, "run_batch", steps)
    monkeypatch.setattr(token_times_module, "time", SimpleNamespace(perf_counter=lambda: steps.call_count))
    assert token_times(make_model({"name": "tiny"}), [5, 6, 7], 9, PlotLine(engine, None)) == [1] * 9


def test_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="not installed: pip install matplotlib")
    picture, out = tmp_path / "plot.svg", tmp_path / "times.jsonl"
    engines = ["kv_cache", "cross_cache"]
    assert main(["tiny", "--picture", str(picture), "--tokens", "9", "--rounds", "1", "--engines", *engines,
                 "--out", str(out), "--threads", str(torch.get_num_threads())]) == 0  # fmt: skip
    assert picture.stat().st_size > 1000
    rows = checked_rows(out)
    assert [(row["provider"], row["curve"]["x"]) for row in rows] == [(name, list(range(2, 10))) for name in engines]
    assert all(len(row["curve"]["y"]) == 8 and min(row["curve"]["y"]) > 0 for row in rows)
    assert capsys.readouterr().out.count("ms at the end") == 2


def test_printed_scores_omit_the_encoders_token(monkeypatch, capsys) -> None:
    """The figures are over an eighth of the tokens at either end, without the first, which includes the encoder."""
    seconds = [5.0, 0.001, 0.003, *[0.010] * 12, 0.004, 0.008]
    monkeypatch.setattr(token_times_module, "token_times", lambda *_, **__: seconds)
    assert main(["tiny", "--tokens", str(len(seconds)), "--rounds", "1", "--engines", "kv_cache"]) == 0
    printed = re.search(r"([\d.]+) ms a token at the start, ([\d.]+) ms at the end", capsys.readouterr().out)
    assert printed is not None and [float(ms) for ms in printed.groups()] == [2.0, 6.0]
