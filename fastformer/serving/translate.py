"""fastformer's own route of a translator: POST /v1/translate, with JSON or server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from fastformer.generation.async_translator import TextStream
from fastformer.generation.pair_encoder import joined_texts
from fastformer.generation.text_io import Answer, Item
from fastformer.serving.answers import ErrorBody, EventStream, answer, error_schemas, event
from fastformer.serving.answers import error_response as error_response
from fastformer.serving.codes import AUTO
from fastformer.serving.gate import until_gone
from fastformer.serving.limits import Limits
from fastformer.serving.openai_bodies import EVENTS, Int, Texts, with_bounds
from fastformer.serving.translate_service import TranslateService

_OPTIONS = (
    "num_beams", "length_penalty", "max_new_tokens", "repetition_penalty", "no_repeat_ngram_size", "do_sample",
    "temperature", "top_k", "top_p", "seed",
)  # fmt: skip


class Ask(BaseModel):
    """The body of a POST /v1/translate request. Missing fields have the server's or the library's defaults."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, json_schema_extra=with_bounds)

    text: str | Texts
    source_lang: str | None = Field(None, description="a code of /languages, or auto")
    target_lang: str | None = None
    prefix: str | Texts | None = Field(None, description="what the translation begins with, of each text")
    split: bool | None = Field(
        None, description="cut texts into sentences; by default so unless prefix, scores or alternatives are asked for"
    )
    scores: bool = Field(False, description="the log-probability of each translation")
    alternatives: Int = Field(0, ge=0, description="further translations, of beams or samples")
    attention: bool = Field(False, description="what each token of the translation looked at, of one text")
    stream: bool = Field(False, description="server-sent events with pieces of the translation, of one text")
    timeout: float | None = Field(None, gt=0, description="seconds")
    num_beams: Int | None = Field(None, ge=1)
    length_penalty: float | None = None
    max_new_tokens: Int | None = Field(None, ge=1)
    repetition_penalty: float | None = None
    no_repeat_ngram_size: Int | None = Field(None, ge=0)
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: Int | None = Field(None, ge=0)
    top_p: float | None = None
    seed: Int | None = Field(None, ge=0)


class Alternative(BaseModel):
    """A further translation, with its scores if the request asks for them."""

    model_config = ConfigDict(extra="allow")

    text: str


class Translated(Alternative):
    """The translation of a text, with its score and other fields if the request asks for them."""

    alternatives: list[Alternative] | None = None
    detected_lang: str | None = None
    attention: dict[str, Any] | None = None


class TranslatedTexts(BaseModel):
    """The translations of a list of texts."""

    translations: list[Translated]


_STREAMED: dict[str, Any] = {
    "description": "JSON, or with stream server-sent events: pieces, and a last one with all of the text.",
    "content": EVENTS,
}


def router(service: TranslateService, limits: Limits) -> APIRouter:
    """Makes fastformer's routes for a translator."""
    routes = APIRouter()

    responses: dict[int | str, Any] = {200: {"model": Translated | TranslatedTexts, **_STREAMED}}

    @routes.post("/v1/translate", responses=responses | error_schemas(ErrorBody))
    async def translate(ask: Ask, http: Request) -> Response:
        """Translates a text, or a list of texts."""
        deadline = service.deadline(ask.timeout)
        given = {name: value for name in _OPTIONS if (value := getattr(ask, name)) is not None}
        config = service.settings(given, ask.alternatives)
        texts = [ask.text] if isinstance(ask.text, str) else ask.text
        service.check_texts(texts)
        items, detected = await _items(service, ask, texts, deadline)
        split = _split(ask)
        if ask.attention:
            _expect_one(ask, "attention")
            service.check_attention(items)
        if ask.stream:
            _expect_one(ask, "stream")
            if ask.scores or ask.alternatives:
                raise ValueError("expected neither scores nor alternatives along with stream: the end tells them")
            pieces = await service.session.begin(items[0], config, split=split, deadline=deadline, **service.bounds)
            return EventStream(_events(service, pieces, ask.attention, detected, deadline))

        async def work() -> list[dict[str, Any]]:
            answers = await service.session.answers(
                items, config, log_probs=ask.scores, split=split, deadline=deadline, **service.bounds
            )
            translations = [_translation(sentences, ask) for sentences in answers]
            for one, code in zip(translations, detected, strict=True):
                one |= {"detected_lang": code} if code is not None else {}
            if ask.attention:
                translations[0]["attention"] = (await service.attention(answers[0], deadline))._asdict()
            return translations

        translations = await until_gone(http, work())
        return answer(translations[0] if isinstance(ask.text, str) else {"translations": translations})

    return routes


def _split(ask: Ask) -> bool:
    alone = [name for name in ("prefix", "scores", "alternatives") if getattr(ask, name)]
    if ask.split and alone:
        raise ValueError(f"expected no {' or '.join(alone)} along with split: they are of a text as a whole")
    return not alone if ask.split is None else ask.split


def _expect_one(ask: Ask, name: str) -> None:
    if not isinstance(ask.text, str):
        raise ValueError(f"expected one text along with {name}, got a list")


async def _items(
    service: TranslateService, ask: Ask, texts: Sequence[str], deadline: float
) -> tuple[list[Item], list[str | None]]:
    """Returns the texts with their prefixes and languages, and the codes of the detected languages."""
    prefixes = ask.prefix if isinstance(ask.prefix, list) else [ask.prefix] * len(texts)
    if isinstance(ask.prefix, list) != isinstance(ask.text, list) and ask.prefix is not None:
        raise ValueError("expected prefix as a list for a list of texts, and as a text for one text")
    if len(prefixes) != len(texts):
        raise ValueError(f"expected a prefix for each of {len(texts)} texts, got {len(prefixes)}")
    target = service.codes.target(ask.target_lang)
    items, detected = [], []
    for text, prefix in zip(texts, prefixes, strict=True):
        source, code = service.codes.source(None if ask.source_lang == AUTO else ask.source_lang), None
        if ask.source_lang == AUTO:
            code = (await service.detect(text, deadline))[0].code
            source = None if service.codes.known is None else service.codes.source(code)
        items.append(Item(text, prefix or None, source, target))
        detected.append(code)
    return items, detected


def _translation(answers: Sequence[Answer], ask: Ask) -> dict[str, Any]:
    """Returns the JSON value of a text's translation."""
    if not ask.scores:
        texts = joined_texts(answers)
        translation: dict[str, Any] = {"text": texts[0]}
        if ask.alternatives:
            translation["alternatives"] = [{"text": text} for text in texts[1 : ask.alternatives + 1]]
        return translation
    best, *others = [one._asdict() for one in answers[0].scored()]
    return {**best, "alternatives": others} if ask.alternatives else best


async def _events(
    service: TranslateService, pieces: TextStream, attention: bool, detected: Sequence[str | None], deadline: float
) -> AsyncGenerator[bytes, None]:
    texts: list[str] = []
    async for piece in pieces:
        texts.append(piece)
        yield event({"text": piece})
    last: dict[str, Any] = {"done": True, "text": "".join(texts)}
    if detected[0] is not None:
        last["detected_lang"] = detected[0]
    if attention:
        last["attention"] = (await service.attention(pieces.answers, deadline))._asdict()
    yield event(last)
