"""Speech is told from silence, and times in the speech become those of the recording."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from fastformer.audio import VadOptions, voice
from fastformer.audio.reading import Recording, Spliced
from fastformer.audio.voice import Part, speech_parts
from tests.audio.speech import sound

SECOND = 16_000


@pytest.fixture
def by_energy(monkeypatch) -> None:
    monkeypatch.setattr(voice, "_silero", lambda: None)


def between_silence() -> np.ndarray:
    noise = np.random.default_rng(0).standard_normal(12 * SECOND) * 1e-3
    noise[3 * SECOND : 5 * SECOND] += sound(2)
    noise[8 * SECOND : 9 * SECOND] += sound(1, 1)
    return noise.astype(np.float32)


def test_speech_between_silence_is_found_by_its_energy(by_energy) -> None:
    parts = speech_parts(Recording.of(between_silence()), VadOptions(speech_pad_ms=100, min_silence_duration_ms=1500))
    assert len(parts) == 2
    assert np.abs(np.array(parts) / SECOND - [[3, 5], [8, 9]]).max() < 0.6
    assert speech_parts(Recording.of(np.zeros(3 * SECOND, np.float32)), VadOptions()) == []
    assert speech_parts(Recording.of(np.zeros(0, np.float32)), VadOptions()) == []


@pytest.mark.parametrize("options", [{}, {"max_speech_duration_s": 2.0}, {"min_silence_duration_ms": 100}])
def test_parts_are_in_order_and_within_the_recording(options, monkeypatch) -> None:
    random = np.random.default_rng(3)
    for _ in range(20):
        probabilities = np.repeat(random.random(60), random.integers(1, 12)).astype(np.float32)
        samples = np.zeros(len(probabilities) * 512 - 77, np.float32)
        monkeypatch.setattr(voice, "speech_probabilities", lambda samples, found=probabilities: found)
        parts = speech_parts(Recording.of(samples), VadOptions(**options, speech_pad_ms=60))
        borders = [border for part in parts for border in part]
        assert borders == sorted(borders) and all(0 <= border <= len(samples) for border in borders)
        longest = options.get("max_speech_duration_s", 1e9)
        assert all(stop - start <= longest * SECOND for start, stop in parts)


def test_times_are_those_of_the_recording() -> None:
    parts = [Part(SECOND, 3 * SECOND), Part(10 * SECOND, 11 * SECOND)]
    recording = Recording.of(np.arange(12 * SECOND, dtype=np.float32))
    spliced = Spliced(recording, parts)
    for seconds in (0.0, 1.5, 1.99, 2.0, 2.5):
        place = int(spliced.read(int(seconds * SECOND), int(seconds * SECOND) + 1)[0])
        assert spliced.original(seconds, spliced.part_of(seconds)) == round(place / SECOND, 2)
    assert spliced.original(2.0, spliced.part_of(2.0, is_end=True)) == 3.0


@pytest.mark.slow  # for its package
def test_sileros_model_reads_blocks_as_it_reads_the_whole(monkeypatch) -> None:
    if voice._silero() is None:
        pytest.skip("neither silero-vad nor faster-whisper is installed")
    recording = Recording.of(between_silence())
    whole = voice.speech_probabilities(recording)
    monkeypatch.setattr(voice, "_BLOCK", 37)
    np.testing.assert_allclose(voice.speech_probabilities(recording), whole, atol=1e-5)
    assert len(speech_parts(recording, VadOptions())) <= 2


@pytest.mark.parametrize(
    "files",  # of which the first is taken
    [
        ("faster_whisper/assets/silero_vad_v6.onnx", "silero_vad/data/silero_vad_16k_sequence.onnx"),
        ("silero_vad/data/silero_vad_16k_sequence.onnx", "faster_whisper/assets/silero_encoder_v5.onnx"),
    ],
    ids=["both", "another version of faster-whisper's"],
)
def test_the_copy_of_faster_whisper_comes_first_and_no_package_is_imported(files, tmp_path, monkeypatch) -> None:
    for file in ("onnxruntime/x", *files):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
        package = file.partition("/")[0]
        (tmp_path / package / "__init__.py").write_text("raise AssertionError('imported')")
        monkeypatch.delitem(sys.modules, package, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(voice, "_onnx_session", lambda file: file)
    assert voice._silero.__wrapped__().args == (tmp_path / files[0],)


def test_a_model_without_onnxruntime_is_left_alone(tmp_path, monkeypatch) -> None:
    file = tmp_path / "silero_vad/data/silero_vad_16k_sequence.onnx"
    file.parent.mkdir(parents=True)
    file.touch()
    (tmp_path / "silero_vad/__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "silero_vad", raising=False)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.setattr(voice, "_silero", voice._silero.__wrapped__)
    assert len(speech_parts(Recording.of(between_silence()), VadOptions())) == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [("threshold", 2), ("max_speech_duration_s", 0), ("min_silence_duration_ms", -1), ("speech_pad_ms", "x")],
)
def test_wrong_options_are_refused(name, value) -> None:
    with pytest.raises(ValueError, match=name):
        VadOptions(**{name: value})
