"""`python -m benchmarks.speech` times fastformer on a stranger's recordings, and says who is missing."""

from __future__ import annotations

import pytest

from benchmarks.measure import record
from benchmarks.publish.latest import latest
from benchmarks.speech import main, word_errors
from tests.audio.speech import folder, sound
from tests.audio.test_reading import wav


def test_word_errors() -> None:
    assert word_errors("The dog, runs.", "the dog runs") == 0
    assert word_errors("a dog runs fast", "the dog runs") == pytest.approx(2 / 3)
    assert word_errors("", "one two") == 1 and word_errors("one", "") == 1


def test_a_recording_is_timed(tmp_path, capsys) -> None:
    model = folder(tmp_path / "model")
    (tmp_path / "a.wav").write_bytes(wav(sound(3)))
    words = [str(model), str(tmp_path / "a.wav"), "--rounds", "1", "--precisions", "fp32", "--threads", "1"]
    words += ["--providers", "fastformer"]
    assert main([*words, "--precisions", "int8", "fp32", "--out", str(tmp_path / "rows.jsonl")]) == 0
    out = capsys.readouterr().out
    assert all(f"fastformer, int8, {mode}: " in out for mode in ("one by one", "batched"))
    assert "fastformer, fp32, batched: " not in out, "fp32 is what int8 is compared with"
    assert "faster-whisper" not in out, "which was not measured"
    rows = record.read(tmp_path / "rows.jsonl")
    assert [row["shape"]["windows"] for row in rows] == [1, 8] * 2
    assert latest(rows) == rows, "one run"
    for row in rows:
        record.check(row)
        assert row["speedup"] is None and row["baseline"] is None and row["peak_mib"] > 0
        assert row["value"] > 0 and row["shape"]["seconds"] == 3
    (tmp_path / "a.wav").write_bytes(b"no audio")
    assert main(words) == 0
