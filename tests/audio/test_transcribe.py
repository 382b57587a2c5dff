"""`WhisperModel`: windows decoded together or alone, several recordings, options, and what is no speech."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fastformer import BatchedInferencePipeline, WhisperModel
from fastformer.audio import voice
from fastformer.audio.options import TranscriptionOptions
from fastformer.audio.results import FORMATS, Segment
from fastformer.audio.scheduler import SpeechScheduler
from fastformer.audio.windows import split
from tests.audio.speech import folder, sound
from tests.covering import each

QUICK = {"temperature": 0.0, "no_speech_threshold": None, "beam_size": 1}
AHEAD = {**QUICK, "without_timestamps": True, "condition_on_previous_text": False}


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Any:
    return folder(tmp_path_factory.mktemp("speech"))


@pytest.fixture(scope="module")
def model(path) -> WhisperModel:
    return WhisperModel(path, compute_type="float32", cpu_threads=1)


@pytest.fixture
def english(tmp_path) -> WhisperModel:
    return WhisperModel(folder(tmp_path, is_multilingual=False), compute_type="float32", cpu_threads=1)


@pytest.fixture(autouse=True)
def by_energy(monkeypatch) -> None:
    monkeypatch.setattr(voice, "_silero", lambda: None)


def plain(segments: Any) -> list[Any]:
    return [dataclasses.asdict(segment) for segment in segments]


def sizes(model: WhisperModel, monkeypatch: Any) -> list[int]:
    """Records how many windows are encoded at once."""
    found: list[int] = []
    encode = model.model.encode

    def counted(features: Any) -> Any:
        found.append(len(features))
        return encode(features)

    monkeypatch.setattr(model.model, "encode", counted)
    return found


def test_independent_windows_are_decoded_together_with_the_same_result(model, monkeypatch) -> None:
    together = sizes(model, monkeypatch)
    segments, _ = model.transcribe(sound(17), "en", **AHEAD)
    segments = plain(segments)
    assert len(segments) > 4 and max(together) > 4
    scheduler = SpeechScheduler(model.model, max_windows=1)
    request = model.request(sound(17), "en", **AHEAD)
    scheduler.submit([request])
    together.clear()
    while not request.is_done:
        scheduler.step()
    assert {*together} == {1} and plain(request.take()) == segments


def test_recordings_together_are_those_alone(model, monkeypatch) -> None:
    recordings = [sound(3 + 2.3 * seed, seed) for seed in range(8)]
    options = {**QUICK, "word_timestamps": True, "temperature": (0.0, 0.5), "log_prob_threshold": -0.5}
    alone = []
    for recording in recordings:
        segments, info = model.transcribe(recording, **options)
        alone.append((plain(segments), info))
    together = sizes(model, monkeypatch)
    done: list[float] = []
    found = [
        (plain(segments), info)
        for segments, info in model.transcribe_all(recordings, on_progress=done.append, **options)
    ]
    assert found == alone
    assert max(together) > 4
    assert sum(done) <= sum(len(recording) / 16_000 for recording in recordings) + 1
    assert any(segment["temperature"] for segments, _ in found for segment in segments)


def test_segments_come_as_they_are_decoded_and_closing_ends_the_work(model, monkeypatch) -> None:
    encoded = sizes(model, monkeypatch)
    made, requests = model.request, list[weakref.ref[Any]]()

    def request(*args: Any, **options: Any) -> Any:
        result = made(*args, **options)
        requests.append(weakref.ref(result))
        return result

    monkeypatch.setattr(model, "request", request)
    segments, _ = model.transcribe(sound(60), "en", **QUICK)
    next(segments)
    few = len(encoded)
    assert few < 4
    segments.close()
    del segments
    assert requests[0]() is None and len(encoded) == few


def test_a_cancelled_request_leaves_the_batch(model) -> None:
    scheduler = SpeechScheduler(model.model)
    requests = [model.request(sound(9, seed), "en", **QUICK) for seed in range(3)]
    scheduler.submit(requests)
    scheduler.step()
    requests[1].cancel()
    ended = scheduler.step()
    assert requests[1] in ended and requests[1] not in scheduler.running
    while not scheduler.is_idle:
        scheduler.step()
    expected = plain(model.transcribe(sound(9, 2), "en", **QUICK)[0])
    assert plain(requests[2].take()) == expected


def test_an_error_of_a_window_ends_its_recording_alone(model) -> None:
    scheduler = SpeechScheduler(model.model)
    good, bad = model.request(sound(3), "en", **QUICK), model.request(sound(3), "en", **QUICK, max_new_tokens=99)
    scheduler.submit([good, bad])
    while not scheduler.is_idle:
        scheduler.step()
    assert good.error is None and good.take()
    assert isinstance(bad.error, ValueError) and "max_new_tokens" in str(bad.error)
    with pytest.raises(ValueError, match="max_new_tokens"):
        list(model.transcribe(sound(3), "en", max_new_tokens=99)[0])


# Options with a value that changes the result, beside those in tests/foreign/speech_texts.py.
CHANGES: dict[str, Any] = {
    "beam_size": 3, "length_penalty": (-2.0, {"beam_size": 6}), "patience": (3.0, {"beam_size": 3}),
    "repetition_penalty": 3.0, "no_repeat_ngram_size": 1, "temperature": 1.0, "no_speech_threshold": 1e-9,
    "condition_on_previous_text": False, "initial_prompt": "abc", "prefix": "dog", "suppress_tokens": [-1, 280, 281],
    "without_timestamps": True, "max_initial_timestamp": 0.1, "word_timestamps": True, "multilingual": True,
    "vad_filter": True, "max_new_tokens": 5, "chunk_length": 1, "clip_timestamps": "1,2,4", "hotwords": "cat",
    "compression_ratio_threshold": (0.1, {"temperature": (0.0, 1.0)}),
    "log_prob_threshold": (-99.0, {"temperature": (0.0, 1.0)}), "best_of": (9, {"temperature": 1.0}),
    "prompt_reset_on_temperature": (0.9, {"temperature": 0.8}),
    "hallucination_silence_threshold": (0.01, {"word_timestamps": True}),
    "prepend_punctuations": (" a", {"word_timestamps": True}), "append_punctuations": ("", {"word_timestamps": True}),
    "vad_parameters": ({"min_silence_duration_ms": 100}, {"vad_filter": True}),
    "suppress_blank": (False, {"max_initial_timestamp": 0.0, "without_timestamps": True}),
    "language_detection_threshold": (1.0, {"language_detection_segments": 3, "language": None}),
    "language_detection_segments": (3, {"language_detection_threshold": 1.0, "language": None}),
}  # fmt: skip


def test_every_option_is_in_the_table() -> None:
    assert {*CHANGES} == {field.name for field in dataclasses.fields(TranscriptionOptions)}


UNSEEN = {"append_punctuations", "prepend_punctuations", "patience", "language_detection_threshold",
          "language_detection_segments", "suppress_blank", "hallucination_silence_threshold"}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in CHANGES if name not in UNSEEN])
def test_every_option_changes_the_result(name, model) -> None:
    value, others = (
        CHANGES[name] if isinstance(CHANGES[name], tuple) and len(CHANGES[name]) == 2 else (CHANGES[name], {})
    )
    audio = np.concatenate([sound(5, 7), np.zeros(24_000, np.float32), sound(4, 9)])
    options = {"language": "de", **QUICK, **others}
    before, after = (model.transcribe(audio, **given) for given in (options, {**options, name: value}))
    assert plain(before[0]) != plain(after[0])


@each("name, value", [
    ("beam_size", 0), ("temperature", -1), ("temperature", ()), ("suppress_tokens", "abc"), ("chunk_length", 31),
    ("clip_timestamps", "3,1"), ("clip_timestamps", "x"), ("vad_parameters", {"loudness": 1}), ("language", "xx"),
    ("task", "summarize"), ("batch_size", 0), ("beam_sise", 3), ("initial_prompt", 3), ("max_new_tokens", 0),
])  # fmt: skip
def test_wrong_options_are_refused(name, value, model) -> None:
    with pytest.raises(ValueError, match=name.replace("beam_sise", "beam_size") if name != "language" else "xx"):
        model.transcribe(sound(1), **{name: value})


@pytest.mark.parametrize("batch_size", [None, 2])
def test_what_is_no_speech_ends(batch_size, model) -> None:
    noise = np.random.default_rng(0).standard_normal(64_000).astype(np.float32)
    for audio in (np.zeros(0, np.float32), np.zeros(1, np.float32), np.zeros(80_000, np.float32), noise, noise * 9):
        segments, info = model.transcribe(audio, batch_size=batch_size, word_timestamps=True, vad_filter=True)
        assert info.language in model.supported_languages
        for segment in itertools.islice(segments, 500):
            assert 0 <= segment.start <= segment.end
        assert next(segments, None) is None


def test_a_window_whose_text_ends_at_its_begin_is_not_decoded_again(model, monkeypatch) -> None:
    first = model.tokens.first_timestamp
    result = SimpleNamespace(sequences_ids=[[first, first, 256]], scores=[-0.1], no_speech_prob=0.0)
    monkeypatch.setattr(model.model, "generate", lambda states, prompts, **options: [result] * len(prompts))
    assert len(list(model.transcribe(sound(9), "en")[0])) <= 5


def test_a_model_of_english_alone(english, caplog) -> None:
    assert not english.is_multilingual and english.supported_languages == ["en"]
    segments, info = english.transcribe(sound(2), language="de", **QUICK)
    assert info.language == "en" and list(segments) and "English alone" in caplog.text
    with pytest.raises(ValueError, match="translate"):
        english.transcribe(sound(2), task="translate")
    assert list(english.transcribe(sound(2), multilingual=True, **QUICK)[0])


def test_the_language_is_that_of_the_model(model) -> None:
    audio = sound(5)
    language, probability, languages = model.detect_language(audio)
    assert [name for name, _ in languages] == sorted(model.supported_languages, key=lambda name: -dict(languages)[name])
    assert (language, probability) == languages[0] and sum(dict(languages).values()) == pytest.approx(1, abs=1e-4)
    info = model.transcribe(audio)[1]
    assert info.language == language and info.language_probability == pytest.approx(probability, abs=1e-3)
    assert model.transcribe(audio, "fr")[1].all_language_probs is None
    with pytest.raises(ValueError, match="audio or features"):
        model.detect_language()


def test_the_options_of_detect_language_are_those_of_a_transcription(model) -> None:
    audio = np.concatenate([sound(5, 1), sound(5, 2)])
    for options in (
        {}, {"language_detection_segments": 2, "language_detection_threshold": 0.0},
        {"language_detection_segments": 2, "language_detection_threshold": 1.0},
        {"vad_filter": True, "vad_parameters": {"min_silence_duration_ms": 50, "speech_pad_ms": 0}},
        {"vad_filter": True, "vad_parameters": {"speech_pad_ms": 400}},
    ):  # fmt: skip
        info = model.transcribe(audio, **options)[1]
        assert model.detect_language(audio, **options) == (
            info.language, info.language_probability, info.all_language_probs
        )  # fmt: skip


def test_equal_windows_are_sampled_differently(model) -> None:
    window = model.model.config.max_frames / 100
    cuts = [window * i for i in (0, 1, 1, 2, 2, 3)]
    options = QUICK | {"temperature": 1.0, "condition_on_previous_text": False, "without_timestamps": True}
    segments, _ = model.transcribe(np.zeros(round(window * 48_000), np.float32), "en", clip_timestamps=cuts, **options)
    texts: list[list[int]] = [[], [], []]
    for segment in segments:
        texts[int(segment.start / window)] += segment.tokens
    assert texts[0] != texts[1] != texts[2]


def test_a_batch_cuts_at_pauses(model, monkeypatch) -> None:
    audio = np.concatenate([sound(1.5, 1), np.zeros(30_000, np.float32), sound(1.5, 2), np.zeros(30_000, np.float32)])
    together = sizes(model, monkeypatch)
    segments, info = BatchedInferencePipeline(model).transcribe(audio, "en", batch_size=4)
    found = list(segments)
    assert found and len(together) == 1 and together[0] > 1
    assert info.duration_after_vad < info.duration and info.vad_options.max_speech_duration_s == 2


@pytest.mark.parametrize(
    "clips", ["1,99", "2,8", "8,12", "3", "50,60", "4,4", [{"start": 0.5, "end": 1}, {"start": 8, "end": 70}]]
)
def test_a_batch_decodes_the_whole_of_clips_and_nothing_behind_the_recording(clips, model) -> None:
    options = TranscriptionOptions(clip_timestamps=clips)
    parts = options.clips(1000, 9000)
    segments, info = model.transcribe(sound(9), "en", batch_size=3, clip_timestamps=clips, **QUICK)
    segments = list(segments)
    assert info.duration_after_vad == pytest.approx(sum(stop - start for start, stop in parts if start < stop) / 1000)
    begins = [start / 1000 for first, stop in parts for start in range(first, stop, 2000)]  # of windows of 2 s
    assert sorted({segment.seek / 100 for segment in segments}) == begins
    assert all(segment.start < 9 for segment in segments)


def test_another_kind_of_folder_is_refused(tmp_path, path) -> None:
    for name in (tmp_path / "none", tmp_path, "tiny-of-nobody"):
        with pytest.raises(ValueError, match="expected"):
            WhisperModel(name)
    wrong: list[dict[str, Any]] = [{"device": "cuda"}, {"compute_type": "int3"}, {"files": {}}]
    for options in wrong:
        with pytest.raises(ValueError, match="expected"):
            WhisperModel(path, **options)


def test_a_missing_library_is_named(path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"tokenizer\.json.*fastformer\[train\]"):
        WhisperModel(path)


def test_a_name_is_looked_up_in_the_cache(path, tmp_path) -> None:
    snapshot = tmp_path / "models--Systran--faster-whisper-small" / "snapshots"
    snapshot.mkdir(parents=True)
    (snapshot / "0123").symlink_to(path)
    assert WhisperModel("small", download_root=str(tmp_path)).supported_languages == ["en", "de", "fr"]


def test_times_split_a_text(model) -> None:
    tokens, time = model.tokens, model.tokens.first_timestamp
    drafts, seek, ends = split(tokens, [time, 256, time + 25, time + 25, 257, time + 50, time + 50], 10.0, 2.0, 200)
    assert [(draft.start, draft.end) for draft in drafts] == [(10.0, 10.5), (10.5, 11.0)] and (seek, ends) == (
        100,
        False,
    )
    drafts, seek, ends = split(tokens, [time, 256, time + 25, time + 25, 257, time + 50], 10.0, 2.0, 200)
    assert len(drafts) == 2 and (seek, ends) == (200, True)
    drafts, seek, ends = split(tokens, [time, 256, 257], 10.0, 2.0, 200)
    assert [(draft.start, draft.end) for draft in drafts] == [(10.0, 12.0)] and (seek, ends) == (200, False)


def segment(start: float, end: float, text: str) -> Segment:
    return Segment(1, 0, start, end, text, [1], -0.5, 1.0, 0.1, None, 0.0)


def test_subtitles() -> None:
    segments = [segment(0, 1.5, " One <b> --> two\n\nlines"), segment(3661.0005, 7322.9996, " ä")]
    srt = "".join(FORMATS["srt"](segments, SimpleNamespace()))
    assert srt == ("1\n00:00:00,000 --> 00:00:01,500\nOne <b> -> two lines\n\n2\n01:01:01,000 --> 02:02:03,000\nä\n\n")
    vtt = "".join(FORMATS["vtt"](segments, SimpleNamespace()))
    assert vtt.startswith("WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nOne &lt;b&gt; -&gt; two lines\n\n")
    info = SimpleNamespace(language="en", language_probability=1, duration=9.0)
    value = json.loads("".join(FORMATS["json"](segments, info)))
    assert value["text"] == "One <b> --> two\n\nlines ä" and len(value["segments"]) == 2
    assert json.loads("".join(FORMATS["json"]([], info)))["segments"] == []


def test_long_audio_takes_flat_memory(model) -> None:
    import tracemalloc

    from fastformer.audio.reading import _stored

    def peak(seconds: float) -> int:
        block = bytes(2 * 16_000)
        recording = _stored((block for _ in range(int(seconds))), None)
        tracemalloc.start()
        segments, _ = model.transcribe(recording, "en", **{**QUICK, "max_new_tokens": 3})
        for _ in itertools.islice(segments, 20):
            pass
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    peak(30)
    assert peak(1200) < peak(100) + (4 << 20)


def test_windows_ahead_are_decoded_again_if_one_ends_early(model, monkeypatch) -> None:
    first = model.tokens.first_timestamp
    early = [first, 256, first + 50, first + 50]  # a second of the two of a window
    result = SimpleNamespace(sequences_ids=[early], scores=[-0.1], no_speech_prob=0.0)
    monkeypatch.setattr(model.model, "generate", lambda states, prompts, **options: [result] * len(prompts))
    segments, _ = model.transcribe(sound(7), "en", **AHEAD)
    assert [(segment.start, segment.end) for segment in segments] == [(start, start + 1.0) for start in range(7)]
