"""`python -m benchmarks.speech` times fastformer on a stranger's recordings, and says who is missing."""

from __future__ import annotations

import argparse
import os

import numpy as np
import pytest

from benchmarks import speech
from benchmarks.measure import record
from benchmarks.publish.latest import latest
from benchmarks.speech import ggml_file, main, word_errors
from fastformer.extension import cpu_flags
from tests.audio.speech import ctranslate2_folder, sound
from tests.audio.test_reading import wav


def test_word_errors() -> None:
    assert word_errors("The dog, runs.", "the dog runs") == 0
    assert word_errors("a dog runs fast", "the dog runs") == pytest.approx(2 / 3)
    assert word_errors("", "one two") == 1 and word_errors("one", "") == 1


def test_a_file_of_whisper_cpp_is_measured_with_its_precision(tmp_path) -> None:
    file = tmp_path / "ggml-base.bin"
    sizes = [51865, 1500, 512, 8, 6, 448, 512, 8, 6, 80]
    for kind, precision in {1: "fp32", 7: "int8", 2007: "int8"}.items():
        np.array([0x67676D6C, *sizes, kind], "<u4").tofile(file)
        assert ggml_file(str(file)) == (precision, str(file))
    np.array([0x67676D6C, *sizes, 2002], "<u4").tofile(file)
    with pytest.raises(argparse.ArgumentTypeError, match="got type 2"):
        ggml_file(str(file))
    for content in (b"RIFF" * 20, b""):
        file.write_bytes(content)
        with pytest.raises(argparse.ArgumentTypeError, match=r"expected a file of whisper\.cpp"):
            ggml_file(str(file))
    with pytest.raises(argparse.ArgumentTypeError, match="No such file"):
        ggml_file(str(tmp_path / "none"))


def test_whisper_cpp_is_measured_where_it_has_a_file_and_batches(tmp_path, monkeypatch, capsys) -> None:
    class Fake:
        missing: dict[str, str] = {}

        def __init__(self, job: speech.Job, *_: object) -> None:
            self.job = job

        def ask(self, mode: str) -> dict[str, object]:
            return {"elapsed": 1.0, "seconds": 30.0, "texts": ["a dog"], "peak_mib": 1.0}

        def close(self) -> None:
            pass

    monkeypatch.setattr(speech, "Worker", Fake)
    np.array([0x67676D6C, *[1] * 10, 7], "<u4").tofile(tmp_path / "q8.bin")
    words = ["model", "a.wav", "--threads", "1", "--providers", "fastformer", "whisper.cpp"]
    words += ["--whisper.cpp", str(tmp_path / "q8.bin"), "--out", str(tmp_path / "rows.jsonl")]
    assert main(words) == 0
    found = {
        (row["provider"], row["precision"], row["shape"]["windows"]) for row in record.read(tmp_path / "rows.jsonl")
    }
    ours = {("fastformer", precision, windows) for precision in ("int8", "fp32") for windows in (1, speech.BATCH)}
    assert found == ours | {("whisper.cpp", "int8", 1)}
    assert "whisper.cpp, fp32" in capsys.readouterr().out, "for which there is no file"


def test_programs_are_compared_in_turns_of_the_same_rounds(tmp_path, monkeypatch) -> None:
    seconds = {"fastformer": [9.0, 1.0, 2.0], "faster-whisper": [9.0, 4.0, 2.0]}  # the first turn warms up

    class Fake:
        missing: dict[str, str] = {}

        def __init__(self, job: speech.Job, *_: object) -> None:
            self.left = list(seconds[job.provider])
            self.job = job

        def ask(self, mode: str) -> dict[str, object]:
            return {"elapsed": self.left.pop(0), "seconds": 30.0, "texts": ["a dog"], "peak_mib": 1.0}

        def close(self) -> None:
            pass

    monkeypatch.setattr(speech, "Worker", Fake)
    words = ["model", "a.wav", "--threads", "1", "--providers", "fastformer", "faster-whisper", "--rounds", "2"]
    assert main([*words, "--precisions", "fp32", "--modes", "one by one", "--out", str(tmp_path / "rows.jsonl")]) == 0
    row, rival = record.read(tmp_path / "rows.jsonl")
    assert row["speedup"] == rival["ours"] == 2.5
    assert (row["ms_p50"], rival["ms_p50"]) == pytest.approx((1500, 3000))
    assert rival["speedup"] == 1


def test_a_recording_is_timed(tmp_path, capsys, monkeypatch) -> None:
    model = ctranslate2_folder(tmp_path / "model")
    (tmp_path / "a.wav").write_bytes(wav(sound(3)))
    words = [str(model), str(tmp_path / "a.wav"), "--rounds", "1", "--precisions", "fp32", "--threads", "1"]
    words += ["--providers", "fastformer"]
    if "amx_tile" not in cpu_flags():  # with which the engine imports PyTorch
        (tmp_path / "torch.py").write_text("raise ImportError('a worker measures its memory without PyTorch')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
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
    (dies := tmp_path / "dies").write_text("#!/bin/sh\necho '{}'\n")
    dies.chmod(0o700)
    monkeypatch.setattr("sys.executable", str(dies))  # as a worker that a recording ends
    assert main(words) == 0
