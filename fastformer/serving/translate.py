"""Our own routes of a translator: POST /v1/translate, as JSON or as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict

from fastformer.serving.answers import EventStream, answer, event, until_gone
from fastformer.serving.answers import error_response as error_response
from fastformer.serving.limits import Limits
from fastformer.serving.service import TranslateService


class Ask(BaseModel):
    """The body of POST /v1/translate."""

    model_config = ConfigDict(extra="forbid", strict=True)

    text: str | list[str]
    source_lang: str | None = None
    target_lang: str | None = None
    stream: bool = False
    attention: bool = False


def router(service: TranslateService, limits: Limits) -> APIRouter:
    """The routes of a translator."""
    found = APIRouter()

    @found.post("/v1/translate", response_model=None)
    async def translate(ask: Ask, http: Request) -> Response:
        languages: dict[str, Any] = {"source_lang": ask.source_lang, "target_lang": ask.target_lang}
        if not ask.stream:
            is_one = isinstance(ask.text, str)
            texts = [ask.text] if isinstance(ask.text, str) else ask.text
            said = await until_gone(http, service.translate(texts, **languages))
            return answer({"text": said[0] if is_one else said})
        if not isinstance(ask.text, str):
            return error_response(400, "expected text to be one text along with stream, got a list")
        pieces = await service.stream(ask.text, **languages)
        return EventStream(_events(pieces))

    return found


async def _events(pieces: AsyncIterator[str]) -> AsyncIterator[bytes]:
    said = ""
    async for piece in pieces:
        said += piece
        yield event({"text": piece})
    yield event({"done": True, "text": said})
