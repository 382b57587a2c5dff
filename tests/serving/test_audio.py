"""OpenAI's routes of speech: formats, streams, limits and mistakes, by the official client too."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from fastformer import WhisperModel
from fastformer.generation import AsyncGenerator, Translator
from fastformer.serving import open_service
from fastformer.serving.limits import Limits
from fastformer.serving.speech_service import SpeechService
from tests.audio.speech import ctranslate2_folder, folder, sound
from tests.audio.test_reading import wav
from tests.serving import models
from tests.serving.asking import serving
from tests.serving.test_process import served

ROOT = Path(__file__).parents[2]

AUDIO = wav(sound(5, 2))
SPACED = wav(sound(5, 3))  # of its segments, one begins with a space and others don't
TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return folder(tmp_path_factory.mktemp("speech"))


@pytest.fixture(scope="module")
def text(path) -> str:
    segments, _ = WhisperModel(path).transcribe(AUDIO, "en")
    return "".join(segment.text for segment in segments).strip()


def asked(path: Path, fields: Any, *, route: str = TRANSCRIPTIONS, audio: bytes = AUDIO, **options: Any) -> Any:
    """Returns the response to a form."""

    async def ask() -> Any:
        async with serving(open_service(path, limits=options.pop("limits", None)), **options) as client:
            return await client.post(route, data=fields, files={"file": ("a.wav", audio)})

    return asyncio.run(ask())


@pytest.mark.parametrize("form", ["json", "text", "srt", "vtt", "verbose_json"])
def test_each_format(form, path, text) -> None:
    response = asked(path, {"model": "whisper-1", "language": "en", "response_format": form})
    assert response.status_code == 200, response.text
    if form.endswith("json"):
        value = response.json()
        assert value["text"] == text and value["usage"] == {"type": "duration", "seconds": 5}
        assert form == "json" or (value["language"], value["duration"]) == ("english", 5.0) and value["segments"]
    elif form == "text":
        assert response.text == text + "\n"
    else:
        assert len(re.findall(r"\d --> \d", response.text)) > 1 and response.text.startswith("WEBVTT") == (
            form == "vtt"
        )


def test_a_part_of_a_second_counts_as_one(path) -> None:
    value = asked(path, {"language": "en"}, audio=wav(sound(0.6, 2))).json()
    assert value["usage"] == {"type": "duration", "seconds": 1}


def test_words_and_segments(path) -> None:
    fields = {"language": "en", "response_format": "verbose_json", "timestamp_granularities[]": ["word", "segment"]}
    value = asked(path, fields).json()
    assert value["words"] and all(
        {*one} == {"word", "start", "end"} and one["word"] == one["word"].strip() for one in value["words"]
    )
    assert "words" not in value["segments"][0]
    assert asked(path, {"timestamp_granularities[]": ["word"]}).status_code == 400


def test_segments_are_streamed(path) -> None:
    segments, _ = WhisperModel(path).transcribe(SPACED, "en")
    text = "".join(segment.text for segment in segments).strip()
    response = asked(path, {"language": "en", "stream": "true"}, audio=SPACED)
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]
    *deltas, done = events
    assert {event["delta"][0].isspace() for event in deltas[1:]} == {False, True}
    assert {event["type"] for event in deltas} == {"transcript.text.delta"}
    assert done["type"] == "transcript.text.done"
    assert done["text"] == "".join(event["delta"] for event in deltas) == text


def test_a_translation_is_another_text(path, text) -> None:
    response = asked(path, {"response_format": "verbose_json"}, route=TRANSLATIONS)
    assert response.json()["task"] == "translate" and response.json()["text"] != text


@pytest.mark.parametrize("route", [TRANSCRIPTIONS, TRANSLATIONS])
def test_a_prompt_is_read(path, route) -> None:
    texts = [asked(path, {"prompt": prompt}, route=route).json()["text"] for prompt in ("", "a b c d")]
    assert texts[0] != texts[1]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "doc"}, "response_format"), ({"temperature": "2"}, "temperature"),
        ({"model": "x"}, "model"), ({"language": "xx"}, None), ({"include[]": "logprobs"}, "include[]"),
        ({"stream": "perhaps"}, "stream"),
    ],
)  # fmt: skip
def test_wrong_fields_are_refused(fields, param, path) -> None:
    response = asked(path, fields)
    assert response.status_code == (404 if param == "model" else 400), response.text
    assert response.json()["error"]["param"] == param


def test_wrong_audio_is_refused(path) -> None:
    for audio in (b"", b"no audio", AUDIO[:20]):
        response = asked(path, {}, audio=audio)
        assert response.status_code == 400 and "expected" in response.json()["error"]["message"]


def test_limits_of_bytes_and_seconds(path) -> None:
    assert asked(path, {}, limits=Limits(max_audio_bytes=10_000)).status_code == 413
    response = asked(path, {}, limits=Limits(max_audio_seconds=3))
    assert response.status_code == 400 and "3 seconds" in response.json()["error"]["message"]
    # A file's bytes are no lists, however many of them are brackets; and its size is no other body's.
    many = wav([0.7133] * 130_000)
    assert many.count(b"[") + many.count(b"{") > 100_000
    fields = {"language": "en", "temperature": "0.5"}
    assert asked(path, fields, audio=many, limits=Limits(max_body_bytes=1_000, max_audio_seconds=60)).status_code == 200


def test_the_arguments_of_a_service_reach_its_model(path, translator_folder, tmp_path, calls_of) -> None:
    for precision in ("bf16", "int8"):
        service = open_service(path, precision=precision)
        assert isinstance(service, SpeechService) and service.model.model.precision == precision
    with pytest.raises(ValueError, match="int4"):
        open_service(path, precision="int4")
    made = [calls_of(kind, "from_pretrained") for kind in (Translator, AsyncGenerator)]
    given: dict[str, Any] = {"device": "cpu", "precision": "bf16", "max_batch_bytes": 1 << 20, "cache_dtype": "int8"}
    open_service(translator_folder, **given, max_batch_size=3)
    open_service(models.generator(tmp_path / "tiny"), **given, max_batch_size=3, engine="cpp", draft=tmp_path / "tiny")
    [first], [second] = made
    assert first.options == {**given, "max_batch_size": 3}
    named = {"device": "cpu", "precision": "bf16", "cache_dtype": "int8", "max_bytes": 1 << 20, "max_rows": 3}
    assert second.options == second.options | named | {
        "engine": "cpp",
        "draft": tmp_path / "tiny",
        "when_full": "refuse",
    }


def test_many_clients_get_what_each_gets_alone(path) -> None:
    recordings = [wav(sound(2 + seed, seed)) for seed in range(4)]

    async def ask(together: bool) -> list[str]:
        async with serving(open_service(path)) as client:
            calls = [
                client.post(TRANSCRIPTIONS, data={"language": "en"}, files={"file": ("a.wav", each)})
                for each in recordings
            ]
            responses = await asyncio.gather(*calls) if together else [await call for call in calls]
            metrics = (await client.get("/metrics")).text
            assert "fastformer_new_tokens_total" in metrics
            return [response.json()["text"] for response in responses]

    assert asyncio.run(ask(True)) == asyncio.run(ask(False))


def test_the_official_client(path, text) -> None:
    openai = pytest.importorskip("openai")

    async def ask() -> None:
        async with serving(open_service(path), keys=("secret",)) as http:
            client = openai.AsyncOpenAI(api_key="secret", base_url="http://here/v1", http_client=http)
            audio = client.audio
            plain = await audio.transcriptions.create(model="whisper-1", file=("a.wav", AUDIO), language="en")
            assert plain.text == text
            verbose = await audio.transcriptions.create(
                model="whisper-1", file=("a.wav", AUDIO), language="en", response_format="verbose_json",
                timestamp_granularities=["word"],
            )  # fmt: skip
            assert verbose.text.startswith(text[:9]) and verbose.words and verbose.duration == 5
            srt = await audio.transcriptions.create(model="whisper-1", file=("a.wav", AUDIO), response_format="srt")
            assert "-->" in srt
            stream = await audio.transcriptions.create(
                model="whisper-1", file=("a.wav", AUDIO), language="en", stream=True
            )
            assert [event async for event in stream][-1].text == text
            english = await audio.translations.create(model="whisper-1", file=("a.wav", AUDIO))
            assert english.text
            cut = await audio.transcriptions.create(
                model="whisper-1", file=("a.wav", AUDIO), language="en", chunking_strategy="auto"
            )
            assert cut.text != ""
            models = await client.models.list()
            assert len(models.data) == 1

    asyncio.run(ask())


def test_a_client_that_leaves_frees_its_work(path) -> None:
    async def ask() -> None:
        service = open_service(path)
        assert isinstance(service, SpeechService)
        async with serving(service):
            job = await service.submit(wav(sound(59)), streams=True, language="en")
            stream: Any = job.stream(0)
            await anext(stream)
            await stream.aclose()
            job.leave()
            for _ in range(200):
                if not service.session.stats().running:
                    break
                await asyncio.sleep(0.05)
            assert service.session.stats().running == 0 and service.session.stats().cancelled == 1

    asyncio.run(ask())


WITHOUT_TORCH = """
from importlib.machinery import PathFinder
find_spec = PathFinder.find_spec
PathFinder.find_spec = lambda name, *rest: None if name == "torch" else find_spec(name, *rest)
"""


def test_speech_is_served_without_torch(tmp_path, monkeypatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_TORCH)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    with served(ctranslate2_folder(tmp_path / "whisper")) as (_, url):
        asked = {"data": {"model": "whisper-1"}, "files": {"file": ("a.wav", wav(sound(5, 2)))}}
        response = httpx.post(f"{url}/v1/audio/transcriptions", **asked, timeout=30)
        assert response.status_code == 200 and response.json()["text"]
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "whisper"
    words = [sys.executable, "-m", "fastformer.cli", "serve", "tests/frozen/run", "--port", "0"]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 1 and "pip install torch" in ended.stderr
