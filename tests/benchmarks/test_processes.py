"""The benchmark of training on several processes starts and reads the right ones, and writes valid rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import processes
from fastformer.commands import _parsing
from fastformer.commands import train as command
from fastformer.training import TrainConfig
from tests.benchmarks.running import checked_rows


def test_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Fake trainings report given results; the flags with which they are started are valid."""
    speeds = {None: 100.0, "ddp": 180.0, "fsdp": 150.0}
    started: list[str | None] = []

    def trained(words: list[str], run: Path) -> float:
        after = words[words.index("train") + 1 :]
        values = _parsing.parse(command, "train", after)
        config = TrainConfig.from_dict({k: v for k, v in values.items() if k not in ("run", "config", "resume")})
        assert (config.steps, config.accumulate) == (16, 2) and Path(str(config.train_data)).is_dir()
        kind = config.sharding if "torch.distributed.run" in words else None
        started.append(kind)
        run.mkdir()
        lines = [{"kind": "train", "tokens_per_second": speed} for speed in (1.0, 1.0, *[speeds[kind]] * 3)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return 1 / processes.tokens_a_second(run)

    monkeypatch.setattr(processes, "train", trained)
    monkeypatch.setattr(processes, "_PAIRS", 200)
    monkeypatch.setattr(processes, "_VOCABULARY", 80)
    monkeypatch.setattr("benchmarks.processes.take_turns", lambda turns, rounds, pause: take(turns, rounds))
    out = tmp_path / "rows.jsonl"
    assert processes.main(["--rounds", "2", "--steps", "16", "--out", str(out)]) == 0
    assert started == [None, "ddp", "fsdp"] * 2
    rows = checked_rows(out)
    assert [row["shape"]["processes"] for row in rows] == [1, 2, 2]
    assert [row["speedup"] for row in rows] == pytest.approx([1.0, 1.8, 1.5])
    assert len(capsys.readouterr().out.splitlines()) >= 3


def take(turns, rounds):
    samples: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(rounds):
        for name, turn in turns.items():
            samples[name].append(turn())
    return samples


@pytest.mark.slow  # 40 s: the trainings of the benchmark run, and say a speed
def test_a_training_of_each_kind_runs(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    sizes = ["--d_model", "32", "--layers", "1", "--max_tokens", "256", "--steps", "8", "--rounds", "1"]
    assert processes.main([*sizes, "--out", str(out)]) == 0
    assert all(row["tokens_s"] > 0 for row in checked_rows(out))
