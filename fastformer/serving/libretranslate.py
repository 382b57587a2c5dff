"""LibreTranslate's routes: /translate, /languages, /detect and /frontend/settings, for LibreTranslate's clients."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from fastformer.generation.pair_encoder import joined_texts, versions
from fastformer.generation.text_io import Item
from fastformer.serving.answers import answer, error_schemas
from fastformer.serving.codes import AUTO, Detected
from fastformer.serving.gate import until_gone
from fastformer.serving.html_text import HtmlPage
from fastformer.serving.limits import Limits
from fastformer.serving.openai_bodies import Int, Texts, with_bounds
from fastformer.serving.translate_service import TranslateService

BODY_KEYS = ("/translate", "/detect", "/languages", "/frontend/settings")  # paths whose bodies may hold the api_key
UNQUEUED = ("/detect",)


class TranslateBody(BaseModel):
    """The body of a POST /translate request."""

    model_config = ConfigDict(extra="ignore", strict=True, json_schema_extra=with_bounds)

    q: str | Texts
    source: str
    target: str
    format: Literal["text", "html"] = "text"
    alternatives: Annotated[Int, Field(ge=0)] = 0
    api_key: str | None = None


class DetectBody(BaseModel):
    """The body of a POST /detect request."""

    model_config = ConfigDict(extra="ignore", strict=True)

    q: str
    api_key: str | None = None


class ErrorBody(BaseModel):
    """The body of an error response."""

    error: str


class DetectedBody(BaseModel):
    """A language by its code, and its probability in percent."""

    language: str
    confidence: float


class TranslatedBody(BaseModel):
    """The body of a POST /translate response: a text, or lists for a list of texts."""

    translatedText: str | list[str]  # noqa: N815
    alternatives: list[str] | list[list[str]] | None = None
    detectedLanguage: DetectedBody | list[DetectedBody] | None = None  # noqa: N815


class LanguageBody(BaseModel):
    """A language in the response to GET /languages."""

    code: str
    name: str
    targets: list[str]


def error_response(status: int, message: str, **detail: Any) -> Response:
    """Makes an error response in LibreTranslate's shape."""
    return answer({"error": message}, status, detail.get("headers"))


def router(service: TranslateService, limits: Limits) -> APIRouter:
    """Makes LibreTranslate's routes for a translator."""
    routes = APIRouter()
    codes, errors = service.codes, error_schemas(ErrorBody)

    @routes.post(
        "/translate", openapi_extra=_body(TranslateBody),
        responses={200: {"model": TranslatedBody}, **errors},
    )  # fmt: skip
    async def translate(http: Request) -> Response:
        """Translates a text or a list of texts, in plain text or HTML."""
        ask = TranslateBody.model_validate(await _values(http, "alternatives"))
        deadline = service.deadline()
        texts = [ask.q] if isinstance(ask.q, str) else ask.q
        if not texts or ask.q == "":
            raise ValueError("expected a text as q, got an empty one")
        service.check_texts(texts)
        config, target = service.settings({}, ask.alternatives), codes.target(ask.target)
        kind = HtmlPage if ask.format == "html" else _Plain
        size = sum(map(len, texts))
        pages = await service.session.aside(lambda: [kind(text) for text in texts], size, deadline=deadline)
        detected: list[Detected | None] = [
            (await service.detect(page.plain(), deadline))[0] if ask.source == AUTO else None for page in pages
        ]
        items = [
            Item(text, None, _source(service, ask.source, one), target)
            for page, one in zip(pages, detected, strict=True)
            for text in page.texts
        ]
        work = service.session.answers(items, config, split=True, deadline=deadline, **service.bounds)
        answers = await until_gone(http, work)
        translations = [joined_texts(sentences) for sentences in answers]
        whole: list[list[str]] = []
        for page in pages:
            count = len(page.texts)
            whole.append(versions(translations[:count], page.filled))
            translations = translations[count:]
        return answer(_told(ask, whole, detected))

    @routes.post(
        "/detect", openapi_extra=_body(DetectBody),
        responses={200: {"model": list[DetectedBody]}, **errors},
    )  # fmt: skip
    async def detect(http: Request) -> Response:
        """Returns the languages that a text may be in, the likeliest first."""
        ask = DetectBody.model_validate(await _values(http))
        if not ask.q:
            raise ValueError("expected a text as q, got an empty one")
        service.check_texts([ask.q])
        return answer([_detected(one) for one in await service.detect(ask.q, service.deadline())])

    known: dict[int | str, dict[str, Any]] = {status: errors[status] for status in (401, 503)}

    @routes.get("/languages", responses={200: {"model": list[LanguageBody]}, **known})
    async def languages() -> Response:
        """Returns the languages, each with the languages that it can be translated into."""
        return answer(codes.entries())

    @routes.get("/frontend/settings", responses=known)
    async def settings(http: Request) -> Response:
        """Returns the settings that a web page needs."""
        source, target = codes.defaults()
        return answer(
            {
                "apiKeys": http.app.state.has_keys,
                "keyRequired": http.app.state.has_keys,
                "charLimit": limits.max_text_chars,
                "frontendTimeout": 500,
                "suggestions": False,
                "filesTranslation": False,
                "supportedFilesFormat": [],
                "language": {
                    "source": {"code": source, "name": source},
                    "target": {"code": target, "name": target},
                },
            }
        )

    return routes


def _source(service: TranslateService, code: str, detected: Detected | None) -> str | None:
    if detected is None:
        return service.codes.source(code)
    return None if service.codes.known is None else service.codes.source(detected.code)


async def _values(http: Request, *numbers: str) -> dict[str, Any]:
    """Reads the fields of a JSON or form body.

    Args:
        http: the request.
        numbers: the names of integer fields, which a form sends as text.

    Raises:
        ValueError: invalid JSON, JSON that is not an object, or text that is not an integer in one of `numbers`.
    """
    if "json" in http.headers.get("content-type", ""):
        try:
            values = json.loads(await http.body())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"expected JSON in UTF-8, got something else: {error}"[:200]) from None
        if not isinstance(values, dict):
            raise ValueError(f"expected a JSON object, got {type(values).__name__}")
        return values
    async with http.form() as form:
        values = {name: value for name, value in form.items() if isinstance(value, str)}
    if isinstance(values.get("q"), str):  # a form has CRLF at the end of each line
        values["q"] = values["q"].replace("\r\n", "\n")
    for name in numbers:
        text = values.pop(name, "")
        if text:
            if not (text.isascii() and text.isdigit() and len(text) < 10):
                raise ValueError(f"expected {name} to be an integer of at least 0, got {text!r:.40}")
            values[name] = int(text)
    return values


def _told(ask: TranslateBody, whole: Sequence[list[str]], detected: Sequence[Detected | None]) -> dict[str, Any]:
    """Makes the body of the response, with lists if the request had a list of texts."""
    fields: dict[str, list[Any]] = {"translatedText": [texts[0] for texts in whole]}
    if ask.alternatives:
        fields["alternatives"] = [texts[1 : ask.alternatives + 1] for texts in whole]
    if ask.source == AUTO:
        fields["detectedLanguage"] = [_detected(one) for one in detected if one is not None]
    return {name: values[0] for name, values in fields.items()} if isinstance(ask.q, str) else dict(fields)


def _detected(one: Detected) -> dict[str, Any]:
    return {"language": one.code, "confidence": round(100 * one.confidence, 1)}


class _Plain:
    """A plain text, with the interface of `HtmlPage`.

    Attributes:
        texts: the text to translate, as a list.
    """

    def __init__(self, text: str) -> None:
        self.texts = [text]

    def plain(self) -> str:
        """Returns the text without markup."""
        return self.texts[0]

    def filled(self, texts: Sequence[str]) -> str:
        """Returns the text with the one in `texts` in its place."""
        return texts[0]


def _body(model: type[BaseModel]) -> dict[str, Any]:
    """Returns the schema of the request body of a route that reads JSON and forms, for /openapi.json."""
    schema = model.model_json_schema()
    kinds = ("application/json", "application/x-www-form-urlencoded", "multipart/form-data")
    return {"requestBody": {"required": True, "content": {kind: {"schema": schema} for kind in kinds}}}
