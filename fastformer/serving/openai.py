"""OpenAI's routes: GET /v1/models, POST /v1/completions, /v1/chat/completions and /v1/embeddings."""

from __future__ import annotations

import base64
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response

from fastformer import __version__
from fastformer.encoding.modules import Array
from fastformer.generation.async_generator import (
    ChatIds,
    Completion,
    Piece,
    PromptTooLong,
    SampleRequest,
    ScoredToken,
    pieces_of,
)
from fastformer.generation.jobs import Stream
from fastformer.generation.processors import CountPenalties, LeastShare, TokenBias
from fastformer.generation.streaming import behind_ends
from fastformer.generation.token_texts import Spelled, SpelledToken, TokenTexts
from fastformer.serving.answers import EventStream, answer, event, until_gone
from fastformer.serving.encoder_service import EmbedService
from fastformer.serving.limits import Limits
from fastformer.serving.openai_bodies import (
    ERRORS,
    EVENTS,
    LEAST_LOG_PROB,
    ApiError,
    ChatBody,
    ChatCompletion,
    CompletionBody,
    Embeddings,
    EmbeddingsBody,
    GenerateBody,
    MessageBody,
    ModelBody,
    ModelsBody,
    TextCompletion,
    check_body,
    check_length,
    check_model,
    error_fields,
)
from fastformer.serving.openai_bodies import error_response as error_response
from fastformer.serving.service import GenerateService, Service

_STREAMED: dict[str, Any] = {
    "description": "JSON, or with stream the same in pieces as server-sent events, of which the last is [DONE].",
    "content": EVENTS,
}
_LEAST_TOP_P = 1e-9  # keeps one token, as OpenAI's 0 does
_DIGITS = 9  # the most digits of a token's id
_CHAT_TOKENS = 1_024  # the most new tokens of a chat's answer if the request sets no number
# Names of the server's own, or of arguments of the functions that pass the variables on.
_NO_VARIABLES = frozenset((
    "add_generation_prompt", "continue_final_message", "deadline", "messages", "self", "tokenizer", "tools",
))  # fmt: skip
_DONE = b"data: [DONE]\n\n"


def router(service: Service, limits: Limits) -> APIRouter:
    """Makes OpenAI's routes for a model."""
    routes = APIRouter()
    _add_models(routes, service)
    if isinstance(service, GenerateService):
        _add_completions(routes, service, limits)
        _add_chat(routes, service, limits)
    if isinstance(service, EmbedService):
        _add_embeddings(routes, service, limits)
    return routes


def _add_models(routes: APIRouter, service: Service) -> None:
    began = int(time.time())
    model = {"id": service.name, "object": "model", "created": began, "owned_by": "fastformer"}
    known: dict[int | str, Any] = {status: ERRORS[status] for status in (401, 404, 503)}

    @routes.get("/v1/models", response_model=None, responses={200: {"model": ModelsBody}, **known})
    async def models() -> Response:
        """Lists the model that is served."""
        return answer({"object": "list", "data": [model]})

    @routes.get("/v1/models/{name:path}", response_model=None, responses={200: {"model": ModelBody}, **known})
    async def one_model(name: str) -> Response:
        """Describes the model of a name."""
        check_model(name, service.name)
        return answer(model)


def _add_completions(routes: APIRouter, service: GenerateService, limits: Limits) -> None:
    responses: dict[int | str, Any] = {200: {"model": TextCompletion, **_STREAMED}, **ERRORS}

    @routes.post("/v1/completions", response_model=None, responses=responses)
    async def completions(body: CompletionBody, http: Request) -> Response:
        """Continues prompts."""
        check_body(body, service.name)
        if body.best_of not in (None, body.n or 1):
            raise ApiError(f"expected best_of to be n, {body.n or 1}, got {body.best_of}", param="best_of")
        _check_count(body, limits)
        prompts = _prompts(body.prompt)
        most = min(limits.max_texts, limits.max_waiting)  # each completion takes a place in the queue
        if len(prompts) * (body.n or 1) > most:
            raise ApiError(f"expected at most {most:,} completions in a request", param="prompt")
        for prompt in prompts:
            check_length(prompt, limits, "prompt")
        deadline = service.deadline(body.timeout)

        async def respond() -> Response:
            rows = await _encoded(service, prompts, deadline, body.parse_special)
            lengths = [_new_tokens(body, row, service, body.max_tokens, 16) for row in rows]
            job = CompletionJob(service, body, rows, lengths, body.logprobs, deadline)
            return await _respond(job, _TextForm(job))

        return await until_gone(http, respond())


def _add_chat(routes: APIRouter, service: GenerateService, limits: Limits) -> None:
    responses: dict[int | str, Any] = {200: {"model": ChatCompletion, **_STREAMED}, **ERRORS}

    @routes.post("/v1/chat/completions", response_model=None, responses=responses)
    async def chat(body: ChatBody, http: Request) -> Response:
        """Answers in a chat."""
        check_body(body, service.name)
        if service.session.template is None:
            raise ApiError(
                f"expected a model that was trained to chat; the folder of {service.name!r} has no chat template: see "
                "/v1/completions",
                param="messages",
            )
        _check_count(body, limits)
        if body.top_logprobs and not body.logprobs:
            raise ApiError("expected logprobs to be true along with top_logprobs", param="top_logprobs")
        messages = [_message(message, place, limits) for place, message in enumerate(body.messages)]
        deadline = service.deadline(body.timeout)
        variables = _variables(body)
        most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        alternatives = (body.top_logprobs or 0) if body.logprobs else None

        async def respond() -> Response:
            try:
                ids = await service.chat_ids(messages, deadline, **variables)
            except ValueError as error:
                raise _unread(error, "messages") from error
            lengths = [_new_tokens(body, ids, service, most, _CHAT_TOKENS)]
            job = CompletionJob(service, body, [ids], lengths, alternatives, deadline)
            return await _respond(job, _ChatForm(job))

        return await until_gone(http, respond())


def _add_embeddings(routes: APIRouter, service: EmbedService, limits: Limits) -> None:
    @routes.post("/v1/embeddings", response_model=None, responses={200: {"model": Embeddings}, **ERRORS})
    async def embeddings(body: EmbeddingsBody, http: Request) -> Response:
        """Returns the embeddings of texts."""
        check_body(body, service.name)
        texts = _embedded_texts(body.input)
        if (reason := limits.why_not(texts)) is not None:
            code = "string_above_max_length" if len(texts) <= limits.max_texts else None
            raise ApiError(reason, param="input", code=code)
        width = service.encoder.get_embedding_dimension()
        if body.dimensions is not None and body.dimensions > width:
            raise ApiError(f"expected dimensions of at most {width}, got {body.dimensions:,}", param="dimensions")
        if body.prompt_name is not None and body.prompt_name not in service.encoder.prompts:
            names = [*service.encoder.prompts]
            raise ApiError(f"expected a prompt_name in {names}, got {body.prompt_name!r:.40}", param="prompt_name")
        try:
            work = service.embed(
                texts,
                prompt_name=body.prompt_name,
                # An embedding that is cut is no longer of length 1.
                normalize=(body.dimensions is not None and service.encoder.normalizes) or None,
                truncate_dim=body.dimensions,
                cuts=bool(body.truncation if body.truncate is None else body.truncate),
                timeout=body.timeout,
            )
            encoded = await until_gone(http, work)
        except ValueError as error:
            raise ApiError(str(error), param="input") from error
        is_packed = body.encoding_format == "base64"
        rows = [
            {"object": "embedding", "index": index, "embedding": _packed(row) if is_packed else row.tolist()}
            for index, row in enumerate(encoded.rows)
        ]
        usage = {"prompt_tokens": encoded.num_tokens, "total_tokens": encoded.num_tokens}
        return answer({"object": "list", "data": rows, "model": service.name, "usage": usage})


def _embedded_texts(given: str | list[Any]) -> list[str]:
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts[0], str):
        raise ApiError(
            "expected input to be a text or a list of texts, got ids of tokens, which clients make for other models; "
            "LangChain sends texts with check_embedding_ctx_length=False",
            param="input",
        )
    return texts


def _packed(row: Array) -> str:
    """Packs the numbers of an embedding as OpenAI does: the base64 of fp32 in little endian."""
    return base64.b64encode(np.ascontiguousarray(row, "<f4").tobytes()).decode("ascii")


def _prompts(given: str | list[Any]) -> list[str | list[int]]:
    """Returns the prompts of a request as a list of texts or of lists of ids."""
    if isinstance(given, str) or isinstance(given[0], int):
        return [given]
    return given


async def _encoded(
    service: GenerateService, prompts: Sequence[str | list[int]], deadline: float, parses: bool | None
) -> list[list[int]]:
    try:
        return [await service.prompt_ids(prompt, deadline, parse_special=parses) for prompt in prompts]
    except ValueError as error:
        raise _unread(error, "prompt") from error


def _unread(error: ValueError, param: str) -> ApiError:
    """Returns the error of a prompt or a chat that the model can't read."""
    code = "context_length_exceeded" if isinstance(error, PromptTooLong) else None
    return ApiError(str(error), param=param, code=code)


def _message(message: MessageBody, place: int, limits: Limits) -> dict[str, Any]:
    """Converts a message into the form that chat templates read."""
    where = f"messages.{place}"
    parts = message.content if isinstance(message.content, list) else []
    for part in parts:
        if part.type != "text" or part.text is None:
            raise ApiError(f"expected content of text alone, got {part.type!r:.40}", param=f"{where}.content")
    content = "\n".join(part.text or "" for part in parts) if parts else message.content
    assert isinstance(content, str)
    check_length(content, limits, f"{where}.content")
    if message.name:
        check_length(message.name, limits, f"{where}.name")
    role = "system" if message.role == "developer" else message.role
    return {"role": role, "content": content, **({} if message.name is None else {"name": message.name})}


def _variables(body: ChatBody) -> dict[str, Any]:
    """Returns the variables of the chat template that a request sets."""
    variables = dict(body.chat_template_kwargs or {})
    if reserved := _NO_VARIABLES.intersection(variables):
        raise ApiError(f"expected variables of a chat template, got {min(reserved)!r}", param="chat_template_kwargs")
    return variables | {"add_generation_prompt": body.add_generation_prompt is not False}


def _check_count(body: GenerateBody, limits: Limits) -> None:
    """Raises an ApiError if a request asks for more answers to a prompt than the limits allow."""
    if (body.n or 1) > limits.max_beams:
        raise ApiError(f"expected n of at most {limits.max_beams}", param="n")


def _new_tokens(body: GenerateBody, ids: list[int], service: GenerateService, requested: int | None, usual: int) -> int:
    """Returns the most new tokens of a prompt's answer.

    Args:
        body: the request's body.
        ids: the ids of the prompt.
        service: its model limits the number of positions.
        requested: the number in the request; None: the request has none.
        usual: the number for a request without one, if the model has positions for as many.
    """
    limits = service.limits
    name = "max_completion_tokens" if getattr(body, "max_completion_tokens", None) is not None else "max_tokens"
    if requested is not None and requested > limits.max_new_tokens:
        raise ApiError(f"expected {name} of at most {limits.max_new_tokens:,}, got {requested:,}", param=name)
    room = service.session.max_len - len(ids)
    if requested is not None and requested > room:
        raise ApiError(
            f"expected {name} of at most {room:,} after a prompt of {len(ids):,} tokens, because the model has "
            f"{service.session.max_len:,} positions; got {requested:,}",
            param=name,
            code="context_length_exceeded",
        )
    return requested or min(room, limits.max_new_tokens, usual)


def _options(body: GenerateBody, service: GenerateService, prompt_length: int, *, is_chat: bool) -> dict[str, Any]:
    """Returns the decoding options for a request; the model's folder has those that the request omits.

    If neither sets a temperature, tokens are drawn at temperature 1, as OpenAI does. Temperature 0 is greedy decoding.

    Args:
        body: the request's body.
        service: completes the prompt.
        prompt_length: the number of the prompt's tokens, which penalties don't count.
        is_chat: whether the answer is one in a chat, which ends with its turn.
    """
    options: dict[str, Any] = {"seed": body.seed}
    if body.temperature == 0:
        options |= {"do_sample": False, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    else:
        options |= {"do_sample": True, "num_return_sequences": body.n or 1}
        if body.temperature is not None:
            options["temperature"] = body.temperature
        if body.top_p is not None:
            options["top_p"] = max(body.top_p, _LEAST_TOP_P)
        if body.top_k is not None:
            options["top_k"] = max(body.top_k, 0)
    if body.stop:
        options["stop_strings"] = [body.stop] if isinstance(body.stop, str) else body.stop
    if body.repetition_penalty is not None:
        options["repetition_penalty"] = body.repetition_penalty
    if body.min_tokens is not None:
        options["min_new_tokens"] = body.min_tokens
    if body.stop_token_ids:
        size = service.session.model.config.vocab_size
        if (largest := max(body.stop_token_ids)) >= size:
            raise ApiError(f"expected ids of tokens below {size:,}, got {largest:,}", param="stop_token_ids")
        options["eos_token_id"] = [*service.session.ends_of(is_chat=is_chat), *body.stop_token_ids]
    if processors := _processors(body, service, prompt_length):
        options["logits_processor"] = processors
    return options


def _processors(body: GenerateBody, service: GenerateService, prompt_length: int) -> list[Any]:
    processors: list[Any] = []
    if body.presence_penalty or body.frequency_penalty:
        processors.append(CountPenalties(body.presence_penalty or 0.0, body.frequency_penalty or 0.0, prompt_length))
    if body.logit_bias:
        size = service.session.model.config.vocab_size
        biases = []
        for name, bias in body.logit_bias.items():
            is_number = name.isascii() and name.isdecimal() and len(name) <= _DIGITS
            if not is_number or int(name) >= size:
                raise ApiError(f"expected ids of tokens below {size:,}, got {name!r:.40}", param="logit_bias")
            biases.append((int(name), bias))
        processors.append(TokenBias(tuple(sorted(biases))))
    if body.min_p and body.temperature != 0:  # as in vLLM, of the probabilities at the request's temperature
        temperature = service.session.config.temperature if body.temperature is None else body.temperature
        processors.append(LeastShare(body.min_p, temperature))
    return processors


class CompletionJob:
    """The requests of a body, and the values that its answers share.

    Args:
        service: completes the prompts.
        body: the body.
        rows: the ids of its prompts.
        most: the most new tokens of each prompt.
        alternatives: the number of likely tokens to return at each place, with log-probabilities; None: no
            log-probabilities at all.
        deadline: a time of `time.monotonic`.

    Attributes:
        copies: the number of equal answers that each request stands for.
    """

    def __init__(
        self,
        service: GenerateService,
        body: GenerateBody,
        rows: Sequence[list[int]],
        most: Sequence[int],
        alternatives: int | None,
        deadline: float,
    ) -> None:
        self.service, self.body, self.rows, self._deadline = service, body, rows, deadline
        self.alternatives, self.count = alternatives, body.n or 1
        self.is_chat = isinstance(rows[0], ChatIds)
        self._requests: list[SampleRequest] = []
        for row, limit in zip(rows, most, strict=True):
            options = _options(body, service, len(row), is_chat=self.is_chat)
            self._requests += service.session.requests(
                row, max_new_tokens=limit, log_probs=alternatives is not None, num_alternatives=alternatives or 0,
                **options,
            )  # fmt: skip
        # All greedy answers to a prompt are the same, so only one is computed.
        self.copies = len(rows) * self.count // len(self._requests)
        self.head = {
            "id": ("chatcmpl-" if self.is_chat else "cmpl-") + uuid.uuid4().hex,
            "created": int(time.time()),
            "model": service.name,
            "system_fingerprint": f"fastformer-{__version__}",
        }

    async def complete(self) -> list[Completion]:
        """Returns the answers to all prompts, in order, without the copies."""
        await self.service.session.submit(self._requests, deadline=self._deadline).results()
        return [request.completion() for request in self._requests]

    def stream(self) -> Stream[Piece]:
        """Returns the stream of the pieces of all answers; all requests are queued when this returns."""
        job = self.service.session.submit(self._requests, deadline=self._deadline, streams=True)
        return Stream(job, pieces_of(job))

    def cached_tokens(self, counts: Sequence[int]) -> int:
        """Returns the number of cached tokens of all prompts from those of all requests: the first of each prompt's."""
        return sum(counts[:: len(counts) // len(self.rows)])

    def usage(self, new_tokens: int, cached: int) -> dict[str, Any]:
        """Counts the tokens of the request and its answers."""
        prompts = sum(map(len, self.rows))
        return {
            "prompt_tokens": prompts,
            "completion_tokens": new_tokens,
            "total_tokens": prompts + new_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def texts_of(self, index: int) -> TokenTexts:
        """Returns what finds the texts of a choice's tokens."""
        session, row = self.service.session, self.rows[index // self.count]
        return TokenTexts(session.tokenizer, () if self.is_chat else behind_ends(row, session.ends))


class _Form:
    """The JSON of answers in one of OpenAI's formats."""

    def __init__(self, job: CompletionJob) -> None:
        self._job = job
        self._texts: dict[int, TokenTexts] = {}  # by choice

    def spelled(self, index: int, tokens: Sequence[ScoredToken], *, is_end: bool) -> list[SpelledToken] | None:
        """Returns a choice's next tokens whose texts are certain; None if the request asks for no log-probabilities."""
        if self._job.alternatives is None:
            return None
        texts = self._texts.get(index) or self._texts.setdefault(index, self._job.texts_of(index))
        return texts.add(tokens) + (texts.end() if is_end else [])


class _TextForm(_Form):
    """The JSON of completions in OpenAI's format."""

    kind = chunk = "text_completion"

    def __init__(self, job: CompletionJob) -> None:
        super().__init__(job)
        self._offsets: Counter[int] = Counter()  # the characters of each choice's tokens so far, by choice

    def whole(self, index: int, completion: Completion) -> dict[str, Any]:
        """Returns a complete choice."""
        return {
            "index": index,
            "text": completion.text,
            "logprobs": self._logprobs(index, self.spelled(index, completion.tokens, is_end=True)),
            "finish_reason": completion.finish_reason,
        }

    def first(self, index: int) -> Iterator[dict[str, Any]]:
        """Yields the first chunks of a choice's stream: none."""
        return iter(())

    def piece(self, index: int, piece: Piece) -> dict[str, Any]:
        """Returns a piece of a choice."""
        spelled = self.spelled(index, piece.tokens, is_end=piece.finish_reason is not None)
        logprobs = self._logprobs(index, spelled)
        return {"index": index, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish_reason}

    def _logprobs(self, index: int, tokens: Sequence[SpelledToken] | None) -> dict[str, Any] | None:
        if tokens is None:
            return None
        offsets = []
        for one in tokens:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(one.spelled.text)
        return {
            "tokens": [one.spelled.shown for one in tokens],
            "token_logprobs": [_number(one.scored.log_prob) for one in tokens],
            "top_logprobs": [self._top(index, one) for one in tokens] if self._job.alternatives else None,
            "text_offset": offsets,
        }

    def _top(self, index: int, one: SpelledToken) -> dict[str, float]:
        """Returns the log-probabilities of the likeliest tokens by their texts; if texts are equal, by names."""
        log_probs = {one.spelled.shown: _number(one.scored.log_prob)}
        for (token, log_prob), other in zip(one.scored.alternatives, one.alternatives, strict=True):
            if token != one.scored.token:
                names = (other.shown, self._texts[index].name(token))
                name = next((name for name in names if name and name not in log_probs), f"token_id:{token}")
                log_probs[name] = _number(log_prob)
        return log_probs


class _ChatForm(_Form):
    """The JSON of a chat's answers in OpenAI's format."""

    kind, chunk = "chat.completion", "chat.completion.chunk"

    def whole(self, index: int, completion: Completion) -> dict[str, Any]:
        """Returns a complete choice; see `_TextForm`, also for the other methods."""
        return {
            "index": index,
            "message": {"role": "assistant", "content": completion.text, "refusal": None},
            "logprobs": self._logprobs(self.spelled(index, completion.tokens, is_end=True)),
            "finish_reason": completion.finish_reason,
        }

    def first(self, index: int) -> Iterator[dict[str, Any]]:
        delta = {"role": "assistant", "content": "", "refusal": None}
        yield {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def piece(self, index: int, piece: Piece) -> dict[str, Any]:
        delta = {"content": piece.text} if piece.text or piece.finish_reason is None else {}
        spelled = self.spelled(index, piece.tokens, is_end=piece.finish_reason is not None)
        logprobs = self._logprobs(spelled) if spelled else None
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": piece.finish_reason}

    def _logprobs(self, tokens: Sequence[SpelledToken] | None) -> dict[str, Any] | None:
        if tokens is None:
            return None
        content = []
        for one in tokens:
            likely = zip(one.scored.alternatives, one.alternatives, strict=True)
            top = [
                _entry(one.spelled if token == one.scored.token else other, log_prob)
                for (token, log_prob), other in likely
            ]
            content.append({**_entry(one.spelled, one.scored.log_prob), "top_logprobs": top})
        return {"content": content, "refusal": None}


def _entry(spelled: Spelled, log_prob: float) -> dict[str, Any]:
    data = None if spelled.data is None else list(spelled.data)
    return {"token": spelled.shown, "logprob": _number(log_prob), "bytes": data}


def _number(log_prob: float) -> float:
    return max(LEAST_LOG_PROB, log_prob)


async def _respond(job: CompletionJob, form: _TextForm | _ChatForm) -> Response:
    """Answers a request, at once or as a stream."""
    if job.body.stream:
        pieces = await job.stream().begin()  # an error before the first piece becomes an HTTP error
        return EventStream(_events(job, form, pieces), error_fields)
    completions = await job.complete()
    answers = [completion for completion in completions for _ in range(job.copies)]
    choices = [form.whole(index, completion) for index, completion in enumerate(answers)]
    cached = job.cached_tokens([completion.cached_tokens for completion in completions])
    usage = job.usage(sum([len(completion.tokens) for completion in answers]), cached)
    return answer({**job.head, "object": form.kind, "choices": choices, "usage": usage})


async def _events(
    job: CompletionJob, form: _TextForm | _ChatForm, pieces: Stream[Piece]
) -> AsyncGenerator[bytes, None]:
    """Yields the events of a stream."""
    options = job.body.stream_options
    counts = bool(options and options.include_usage)
    head = {**job.head, "object": form.chunk}
    num_choices = len(job.rows) * job.count
    new_tokens, cached = 0, [0] * (num_choices // job.copies)

    def chunk(choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        return event({**head, "choices": choices, **({"usage": usage} if counts else {})})

    try:
        for index in range(num_choices):
            for choice in form.first(index):
                yield chunk([choice])
        async for piece in pieces:
            new_tokens += len(piece.tokens) * job.copies
            if piece.finish_reason is not None:
                cached[piece.sample] = piece.cached_tokens
            if not piece.text and piece.finish_reason is None and job.alternatives is None:
                continue
            for copy in range(job.copies):
                yield chunk([form.piece(piece.sample * job.copies + copy, piece)])
        if counts:
            yield chunk([], job.usage(new_tokens, job.cached_tokens(cached)))
        yield _DONE
    finally:
        await pieces.aclose()
