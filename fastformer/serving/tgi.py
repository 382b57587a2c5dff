"""The route of Hugging Face's text-generation-inference: POST /generate, with a whole answer or a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, BeforeValidator, Field

from fastformer.generation.jobs import Stream
from fastformer.generation.streaming import FinishReason, Piece, ScoredToken, behind_ends
from fastformer.generation.token_texts import TokenTexts
from fastformer.serving import tei
from fastformer.serving.answers import EventStream, answer, event
from fastformer.serving.gate import until_gone
from fastformer.serving.generate_service import GenerateService
from fastformer.serving.limits import Limits
from fastformer.serving.openai_bodies import EVENTS, UNSUPPORTED, Body, Int, Stop, unsupported_field
from fastformer.serving.service import Service
from fastformer.serving.structured import Constrained, compiled, of_tgi
from fastformer.serving.tei import ERRORS, TeiError

_USUAL = 100  # new tokens if the request sets no number


class Parameters(Body):
    """The options of a text's continuation."""

    unsupported = UNSUPPORTED

    max_new_tokens: Annotated[Int, Field(ge=1)] | None = None
    do_sample: bool | None = None
    temperature: Annotated[float, Field(gt=0, le=100)] | None = None
    top_k: Annotated[Int, Field(ge=1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    seed: Annotated[Int, Field(ge=0, lt=2**63)] | None = None
    stop: Annotated[list[Stop], Field(max_length=16, fail_fast=True)] | None = None
    grammar: dict[str, Any] | None = None
    return_full_text: bool | None = None
    details: bool | None = None
    parse_special: bool | None = None
    adapter_id: str | None = None


class GenerateBody(Body):
    """The body of a POST /generate request."""

    # Options belong into parameters.
    unsupported = {**UNSUPPORTED, **dict.fromkeys(Parameters.model_fields, ())}

    inputs: Annotated[str, Field(min_length=1)]
    parameters: Annotated[Parameters, BeforeValidator(lambda value: {} if value is None else value)] = Parameters()
    stream: bool | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None


class Token(BaseModel):
    """A token of the answer."""

    id: int
    text: str
    logprob: float
    special: bool


class Details(BaseModel):
    """The details of an answer: its tokens, and the reason why it ended."""

    finish_reason: Literal["length", "eos_token", "stop_sequence"]
    generated_tokens: int
    seed: int | None
    prefill: list[Any]
    tokens: list[Token]


class Generated(BaseModel):
    """The body of a POST /generate response."""

    generated_text: str
    details: Details | None = None


_STREAMED: dict[str, Any] = {
    "description": "JSON, or with stream a server-sent event for each token, of which the last holds the whole text.",
    "content": EVENTS,
}


def error_response(status: int, message: str, **detail: Any) -> Response:
    """Makes an error response in TGI's shape; see `tei.error_response`."""
    return tei.error_response(status, message, **{**_kind(status), **detail})


def error_fields(status: int, message: str) -> dict[str, Any]:
    """Returns the JSON value of an error in a stream, in TGI's shape."""
    return tei.error_fields(status, message, **_kind(status))


def _kind(status: int) -> dict[str, str]:
    return {"error_type": "generation"} if status >= 500 and status != 503 else {}


def router(service: Service, limits: Limits) -> APIRouter:
    """Makes TGI's route for a language model."""
    routes = APIRouter()
    assert isinstance(service, GenerateService)
    responses: dict[int | str, Any] = {200: {"model": Generated, **_STREAMED}, **ERRORS}

    @routes.post("/generate", responses=responses)
    async def generate(body: GenerateBody, http: Request) -> Response:
        """Continues a text."""
        options = _options(body, service, limits)
        deadline = service.deadline(body.timeout)
        if body.parameters.grammar is not None:
            constrained = Constrained("grammar", of_tgi(body.parameters.grammar))
            constrained = await until_gone(http, compiled(constrained, service, deadline))
            options |= constrained.options
        ids = await until_gone(
            http, service.prompt_ids(body.inputs, deadline, parse_special=body.parameters.parse_special)
        )
        room = service.session.max_len - len(ids)
        usual = min(room, _USUAL, limits.max_new_tokens)
        options["max_new_tokens"] = min(room, body.parameters.max_new_tokens or usual)
        arguments: dict[str, Any] = {"log_probs": bool(body.parameters.details), "deadline": deadline}
        details = _Details(body, service)
        if body.stream:
            # An error before the first piece becomes an HTTP error.
            pieces = await until_gone(http, service.session.stream(ids, **options, **arguments).begin())
            return EventStream(_events(details, len(ids), pieces), error_fields)
        [whole] = await until_gone(http, service.session.complete(ids, **options, **arguments))
        text = (body.inputs if body.parameters.return_full_text else "") + whole.text
        if not body.parameters.details:
            return answer({"generated_text": text})
        fields = details.details(whole.tokens, whole.finish_reason)
        fields |= {"prefill": [], "tokens": details.tokens(ids, whole.tokens)}
        return answer({"generated_text": text, "details": fields})

    return routes


def _options(body: GenerateBody, service: GenerateService, limits: Limits) -> dict[str, Any]:
    """Returns the decoding options for a request: greedy decoding unless an option asks for sampling."""
    parameters = body.parameters
    if (name := unsupported_field(body)) is not None:
        raise TeiError("validation", f"expected no {name}, which this server doesn't support: leave it out")
    if (reason := limits.why_not([body.inputs])) is not None:
        raise TeiError("validation", reason)
    if parameters.max_new_tokens is not None and parameters.max_new_tokens > limits.max_new_tokens:
        raise TeiError("validation", f"expected max_new_tokens of at most {limits.max_new_tokens:,}")
    shape = {name: getattr(parameters, name) for name in ("temperature", "top_k", "top_p")}
    given = {name: value for name, value in shape.items() if value is not None}
    options: dict[str, Any] = {"do_sample": bool(given) or bool(parameters.do_sample), "seed": parameters.seed}
    # Sampling options that the request omits are neutral: those of the folder don't apply.
    options |= {"temperature": 1.0, "top_k": 0, "top_p": 1.0, **given}
    if parameters.repetition_penalty is not None:
        options["repetition_penalty"] = parameters.repetition_penalty
    if parameters.stop:
        options["stop_strings"] = parameters.stop
    if parameters.adapter_id is not None:
        options["adapter"] = parameters.adapter_id
    return options


class _Details:
    """Builds the parts of an answer that describe its tokens."""

    def __init__(self, body: GenerateBody, service: GenerateService) -> None:
        self._seed, self._full = body.parameters.seed, bool(body.parameters.return_full_text)
        self.prompt = body.inputs if self._full else ""
        self.has_details = bool(body.parameters.details)
        self._generator = service.session
        self._names = TokenTexts(service.session.tokenizer)

    def tokens(self, ids: Sequence[int], tokens: Sequence[ScoredToken]) -> list[dict[str, Any]]:
        """Returns the JSON values of an answer's tokens, behind the ids of its prompt."""
        texts = TokenTexts(self._generator.tokenizer, behind_ends(ids, self._generator.ends))
        return [self.token(one.scored, one.spelled.shown) for one in texts.add(tokens) + texts.end()]

    def token(self, one: ScoredToken, text: str) -> dict[str, Any]:
        """Returns the JSON value of a token."""
        is_special = self._names.is_special(one.token)
        return {"id": one.token, "text": text, "logprob": one.log_prob, "special": is_special}

    def details(self, tokens: Sequence[ScoredToken], reason: FinishReason) -> dict[str, Any]:
        """Returns the JSON value of an answer's details: the reason of its end, and the number of tokens."""
        ends = self._generator.ends
        kind = "eos_token" if tokens and tokens[-1].token in ends else "stop_sequence"
        return {
            "finish_reason": "length" if reason == "length" else kind,
            "generated_tokens": len(tokens),
            "seed": self._seed,
        }


async def _events(details: _Details, prompt_length: int, pieces: Stream[Piece]) -> AsyncGenerator[bytes, None]:
    """Yields an event for each token. Their texts joined are the whole text; a part may come with a later token."""
    text = details.prompt
    tokens: list[ScoredToken] = []
    held: dict[str, Any] | None = None  # the latest event, held back until another token or the end follows

    try:
        async for piece in pieces:
            text += piece.text
            for place, one in enumerate(piece.tokens):
                if held is not None:
                    yield event(held)
                tokens.append(one)
                shown = details.token(one, piece.text if place == len(piece.tokens) - 1 else "")
                held = {"index": len(tokens), "token": shown, "generated_text": None, "details": None}
            if piece.finish_reason is not None and held is not None:
                held["token"]["text"] += piece.text
                held["generated_text"] = text
                if details.has_details:
                    held["details"] = details.details(tokens, piece.finish_reason) | {"input_length": prompt_length}
                yield event(held)
    finally:
        await pieces.aclose()
