"""Segments, words and times are those of faster-whisper, whose results are in tests/foreign/speech_texts.json."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastformer import BatchedInferencePipeline, WhisperModel
from fastformer.audio import voice
from fastformer.audio.features import Features
from fastformer.audio.model import SpeechModel
from fastformer.audio.reading import open_audio
from fastformer.checkpoints.speech import load_speech
from tests.audio.speech import folder
from tests.foreign import speech_texts

EXPECTED = json.loads(speech_texts.FILE.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> WhisperModel:
    return WhisperModel(folder(tmp_path_factory.mktemp("speech"), frames=3000, length=448), compute_type="float32")


@pytest.mark.parametrize("name", EXPECTED)
def test_segments_are_those_of_faster_whisper(name, model, monkeypatch) -> None:
    monkeypatch.setattr(voice, "speech_probabilities", lambda samples: speech_texts.loud(samples.read(0, len(samples))))
    cases = {**speech_texts.CASES, **speech_texts.BATCHES}
    options = {**speech_texts._USUAL, **cases[name]}
    run = BatchedInferencePipeline(model) if name in speech_texts.BATCHES else model
    size = {"batch_size": 2} if name in speech_texts.BATCHES else {}
    segments, info = run.transcribe(speech_texts.audio(), **options, **size)
    speech, expected = EXPECTED[name]
    assert info.duration_after_vad == pytest.approx(speech, abs=1e-6)
    for segment, row in zip(list(segments), expected, strict=True):
        *facts, log_prob, no_speech, words = row
        assert speech_texts._plain(segment)[:6] == facts
        assert segment.avg_logprob == pytest.approx(log_prob, abs=2e-3)
        assert segment.no_speech_prob == pytest.approx(no_speech, abs=2e-3)
        assert (segment.words is None) == (words is None)
        for word, (text, start, end) in zip(segment.words or (), words or (), strict=True):
            assert word.word == text
            assert np.abs([word.start - start, word.end - end]).max() <= 0.021


REAL = os.environ.get("FASTFORMER_TEST_WHISPER")
SPOKEN = os.environ.get("FASTFORMER_TEST_SPEECH")
real = pytest.mark.skipif(
    not (REAL and SPOKEN), reason="FASTFORMER_TEST_WHISPER and FASTFORMER_TEST_SPEECH name no folders"
)


@pytest.mark.slow
@real
def test_windows_of_real_speech_have_the_tokens_of_ctranslate2() -> None:
    ctranslate2 = pytest.importorskip("ctranslate2")
    ours = SpeechModel(load_speech(Path(str(REAL))), precision="fp32", num_threads=1)
    other = ctranslate2.models.Whisper(str(REAL), compute_type="float32", intra_threads=1)
    config = ours.config
    language = next((token for token, name in config.languages.items() if name == "<|en|>"), None)
    transcribe = config.no_timestamps - 4
    prompt = [config.sot, language, transcribe] if language is not None else [config.sot]
    windows = []
    for path in sorted(Path(str(SPOKEN)).iterdir()):
        recording = open_audio(path)
        features = Features(recording, config.n_mels, config.max_frames)
        windows += [features.window(at, 3000) for at in range(0, features.num_frames - 200, 3000)]
    windows = windows[:: max(1, len(windows) // 24)]
    assert len(windows) >= 20
    differing = 0
    for window in windows:
        states = ours.encode(window[None])
        expected = other.encode(ctranslate2.StorageView.from_array(window[None]), to_cpu=True)
        assert np.abs(states - np.asarray(expected)).max() < 2e-3 * np.abs(states).max()
        if config.is_multilingual:
            known = dict(other.detect_language(expected)[0])
            assert max(abs(known[token] - share) for token, share in ours.detect_language(states)[0]) < 1e-3
        for beams in (1, 5):
            (found,) = ours.generate(states, [prompt], beam_size=beams, return_scores=True)
            (each,) = other.generate(expected, [prompt], beam_size=beams, return_scores=True)
            assert found.scores == pytest.approx(each.scores, abs=5e-3)  # of a near tie, too
            differing += found.sequences_ids != each.sequences_ids
    assert differing <= len(windows) // 20, f"{differing} searches of {2 * len(windows)} differ"


@pytest.mark.slow
@real
@pytest.mark.parametrize("is_batch", [False, True])
def test_real_speech_is_written_as_faster_whisper_writes_it(is_batch) -> None:
    faster_whisper = pytest.importorskip("faster_whisper")
    # CTranslate2's own choice of 4 threads makes it wait for each of them on a machine with fewer cores.
    ours: Any = WhisperModel(str(REAL), compute_type="float32", cpu_threads=1)
    other = faster_whisper.WhisperModel(str(REAL), device="cpu", compute_type="float32", cpu_threads=1)
    if is_batch:
        ours, other = BatchedInferencePipeline(ours), faster_whisper.BatchedInferencePipeline(other)
    near, count = 0, 0
    for path in sorted(Path(str(SPOKEN)).iterdir()):
        options = {"word_timestamps": True, "temperature": [0.0], "beam_size": 1}  # beams: the test above
        segments, expected = (list(each.transcribe(str(path), **options)[0]) for each in (ours, other))
        assert [segment.text for segment in segments] == [segment.text for segment in expected], path.name
        pairs = [
            pair
            for ones, others in zip(segments, expected, strict=True)
            for pair in zip(ones.words, others.words, strict=True)
        ]
        count += len(pairs)
        near += sum(max(abs(one.start - each.start), abs(one.end - each.end)) <= 0.04 for one, each in pairs)
    assert count and near >= 0.95 * count
