"""OpenAI's routes of speech: POST /v1/audio/transcriptions and /v1/audio/translations."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator
from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Form, Request, Response, UploadFile
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel, ConfigDict, Field

from fastformer.audio.plans import SpeechRequest
from fastformer.audio.results import FORMATS, Segment, TranscriptionInfo
from fastformer.audio.scheduler import MAX_WINDOWS
from fastformer.audio.tokens import LANGUAGE_NAMES
from fastformer.generation.jobs import Job
from fastformer.serving.answers import EventStream, answer, event
from fastformer.serving.gate import until_gone
from fastformer.serving.limits import Limits
from fastformer.serving.openai_bodies import ERRORS, EVENTS, ApiError, Body, check_body, check_length, error_fields
from fastformer.serving.openai_bodies import error_response as error_response
from fastformer.serving.service import Service
from fastformer.serving.speech_service import SpeechService, segments_of

UPLOADS = ("/v1/audio/transcriptions", "/v1/audio/translations")  # paths whose bodies are files
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "include": (), "include[]": (), "known_speaker_names[]": (), "known_speaker_references[]": (),
}  # fmt: skip


class TranslationBody(Body):
    """The form of a request for the text in English.

    Attributes:
        file: the audio.
        model: the model's name, if any.
        prompt: a text before the audio's, in its style.
        response_format: json, text, srt, vtt or verbose_json.
        temperature: the temperature of sampling; 0: as high as a good text needs.
    """

    model_config = ConfigDict(strict=False)
    unsupported = _UNSUPPORTED

    file: UploadFile
    model: str | None = None
    prompt: str | None = None
    response_format: Literal["json", "text", "srt", "vtt", "verbose_json"] = "json"
    temperature: Annotated[float, Field(ge=0, le=1)] = 0.0


class TranscriptionBody(TranslationBody):
    """The form of a request for the text in the audio's language.

    Attributes:
        language: the code of the language; None: it is detected.
        timestamp_granularities: times of words, of segments or both, in verbose_json.
        chunking_strategy: auto: cut the audio at pauses, and decode its parts together.
        stream: return the text in pieces.
    """

    language: str | None = None
    timestamp_granularities: Annotated[list[Literal["word", "segment"]], Field(alias="timestamp_granularities[]")] = []  # noqa: RUF012
    chunking_strategy: Literal["auto"] | None = None
    stream: bool = False


class Transcription(BaseModel):
    """The answer in JSON; in verbose_json it has the language, the duration, segments and words too."""

    text: str
    usage: dict[str, Any]


def router(service: Service, limits: Limits) -> APIRouter:
    """Makes the routes of a speech model."""
    assert isinstance(service, SpeechService)
    routes = APIRouter()
    known: dict[int | str, Any] = {200: {"model": Transcription, "content": {"text/plain": {}, **EVENTS}}, **ERRORS}

    @routes.post("/v1/audio/transcriptions", responses=known)
    async def transcriptions(
        body: Annotated[TranscriptionBody, Form(media_type="multipart/form-data")], http: Request
    ) -> Response:
        """Returns the text of an audio file."""
        words = "word" in body.timestamp_granularities
        if words and body.response_format != "verbose_json":
            raise ApiError("expected response_format verbose_json along with words", param="timestamp_granularities")
        batch_size = MAX_WINDOWS if body.chunking_strategy else None
        options = {"language": body.language, "batch_size": batch_size, "word_timestamps": words}
        return await _answered(body, http, service, limits, options, body.stream)

    @routes.post("/v1/audio/translations", responses=known)
    async def translations(
        body: Annotated[TranslationBody, Form(media_type="multipart/form-data")], http: Request
    ) -> Response:
        """Returns the text of an audio file in English."""
        return await _answered(body, http, service, limits, {"task": "translate"}, False)

    return routes


async def _answered(
    body: TranslationBody, http: Request, service: SpeechService, limits: Limits, options: dict[str, Any], streams: bool
) -> Response:
    check_body(body, service.models)
    check_length(body.prompt or "", limits, "prompt")
    options |= {"initial_prompt": body.prompt or None}
    if body.temperature:
        options["temperature"] = body.temperature
    audio = await body.file.read()
    try:
        if streams:
            job = await service.submit(audio, streams=True, **options)
            return EventStream(_events(job), error_fields)
        segments, info = await until_gone(http, service.transcribe(audio, **options))
    except ValueError as error:
        raise ApiError(str(error)) from error
    text = "".join(segment.text for segment in segments).strip()
    if body.response_format in ("srt", "vtt"):
        return PlainTextResponse("".join(FORMATS[body.response_format](segments, info)))
    if body.response_format == "text":
        return PlainTextResponse(text + "\n")
    value = {"text": text, "usage": {"type": "duration", "seconds": math.ceil(info.duration)}}
    if body.response_format == "verbose_json":
        value |= _verbose(segments, info, options)
    return answer(value)


def _verbose(segments: list[Segment], info: TranscriptionInfo, options: dict[str, Any]) -> dict[str, Any]:
    language = LANGUAGE_NAMES.get(info.language, info.language)
    fields = {"task": options.get("task", "transcribe"), "language": language, "duration": info.duration}
    values = [asdict(segment) for segment in segments]
    words = [word for value in values for word in value.pop("words") or ()]
    if options.get("word_timestamps"):
        fields["words"] = [{"word": one["word"].strip(), "start": one["start"], "end": one["end"]} for one in words]
    return {**fields, "segments": values}


async def _events(job: Job[SpeechRequest]) -> AsyncGenerator[bytes, None]:
    texts: list[str] = []
    segments = segments_of(job)
    try:
        async for segment in segments:
            texts.append(segment.text if texts else segment.text.lstrip())
            yield event({"type": "transcript.text.delta", "delta": texts[-1]})
    finally:
        await segments.aclose()
    yield event({"type": "transcript.text.done", "text": "".join(texts)})
