"""The requests of completions and chats, the options of their bodies, and whole or streamed answers."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Collection, Iterator, Sequence
from typing import Any

from fastapi import Response

from fastformer import __version__
from fastformer.generation.async_generator import ChatIds, PromptTooLong
from fastformer.generation.jobs import Stream
from fastformer.generation.processors import CountPenalties, LeastShare, TokenBias
from fastformer.generation.streaming import Completion, Piece, SampleRequest, ScoredToken, behind_ends, pieces_of
from fastformer.generation.token_texts import SpelledToken, TokenTexts
from fastformer.serving.answers import EventStream, answer, event
from fastformer.serving.limits import Limits
from fastformer.serving.openai_bodies import EVENTS, LEAST_LOG_PROB, ApiError, GenerateBody, error_fields
from fastformer.serving.service import GenerateService
from fastformer.serving.structured import Constrained, constraint_of

STREAMED: dict[str, Any] = {
    "description": "JSON, or with stream the same in pieces as server-sent events, of which the last is [DONE].",
    "content": EVENTS,
}
_LEAST_TOP_P = 1e-9  # keeps one token, as OpenAI's 0 does
_DIGITS = 9  # the most digits of a token's id
_DONE = b"data: [DONE]\n\n"


async def check_constraint(body: GenerateBody, service: GenerateService, deadline: float) -> Constrained | None:
    """Returns the constraint of a request, which has been compiled; None: its answers are free.

    Raises:
        ApiError: the constraint is wrong, or can't be enforced.
    """
    if (constrained := constraint_of(body)) is not None:
        try:
            await service.check_constraint(constrained.options, constrained.size, deadline)
        except ValueError as error:
            raise ApiError(str(error), param=constrained.param) from error
    return constrained


def check_count(body: GenerateBody, limits: Limits) -> None:
    """Raises an ApiError if a request asks for more answers to a prompt than the limits allow."""
    if (body.n or 1) > limits.max_beams:
        raise ApiError(f"expected n of at most {limits.max_beams}", param="n")


def new_tokens(body: GenerateBody, ids: list[int], service: GenerateService, requested: int | None, usual: int) -> int:
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
    if (adapter := service.models.get(body.model or "")) is not None:
        options["adapter"] = adapter
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
        constrained: the constraint of the answers; None: they are free.
        marks: special tokens that the texts show.

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
        constrained: Constrained | None = None,
        marks: Collection[str] = (),
    ) -> None:
        self.service, self.body, self.rows, self._deadline = service, body, rows, deadline
        self.alternatives, self.count, self._is_constrained = alternatives, body.n or 1, constrained is not None
        self.is_chat = isinstance(rows[0], ChatIds)
        self._requests: list[SampleRequest] = []
        for row, limit in zip(rows, most, strict=True):
            options = _options(body, service, len(row), is_chat=self.is_chat)
            options |= {} if constrained is None else constrained.options
            self._requests += service.session.requests(
                row, max_new_tokens=limit, log_probs=alternatives is not None, num_alternatives=alternatives or 0,
                marks=marks,
                **options,
            )  # fmt: skip
        # All greedy answers to a prompt are the same, so only one is computed.
        self.copies = len(rows) * self.count // len(self._requests)
        self.head = {
            "id": ("chatcmpl-" if self.is_chat else "cmpl-") + uuid.uuid4().hex,
            "created": int(time.time()),
            "model": body.model if body.model in service.models else service.name,
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
        drafted = sum(request.num_drafted for request in self._requests)
        accepted = sum(request.num_accepted for request in self._requests)
        details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
        return {
            "prompt_tokens": prompts,
            "completion_tokens": new_tokens,
            "total_tokens": prompts + new_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
            **({"completion_tokens_details": details} if drafted else {}),
        }

    def texts_of(self, index: int) -> TokenTexts:
        """Returns what finds the texts of a choice's tokens."""
        session, row = self.service.session, self.rows[index // self.count]
        if self._is_constrained:
            return TokenTexts(session.tokenizer, session.anchor)
        return TokenTexts(session.tokenizer, () if self.is_chat else behind_ends(row, session.ends))


class Form(ABC):
    """The JSON of answers in one of OpenAI's formats.

    Attributes:
        kind, chunk: the kinds of whole answers, and of the pieces of a stream.
    """

    kind: str
    chunk: str

    def __init__(self, job: CompletionJob) -> None:
        self._job = job
        self._texts: dict[int, TokenTexts] = {}  # by choice

    @abstractmethod
    def whole(self, index: int, completion: Completion) -> dict[str, Any]:
        """Returns a complete choice."""

    @abstractmethod
    def first(self, index: int) -> Iterator[dict[str, Any]]:
        """Yields the first chunks of a choice's stream."""

    @abstractmethod
    def piece(self, index: int, piece: Piece) -> dict[str, Any]:
        """Returns a piece of a choice."""

    def spelled(self, index: int, tokens: Sequence[ScoredToken], *, is_end: bool) -> list[SpelledToken] | None:
        """Returns a choice's next tokens whose texts are certain; None if the request asks for no log-probabilities."""
        if self._job.alternatives is None:
            return None
        texts = self._texts.get(index) or self._texts.setdefault(index, self._job.texts_of(index))
        return texts.add(tokens) + (texts.end() if is_end else [])


async def respond_with(job: CompletionJob, form: Form) -> Response:
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


async def _events(job: CompletionJob, form: Form, pieces: Stream[Piece]) -> AsyncGenerator[bytes, None]:
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


def unread(error: ValueError, param: str) -> ApiError:
    """Returns the error of a prompt or a chat that the model can't read."""
    code = "context_length_exceeded" if isinstance(error, PromptTooLong) else None
    return ApiError(str(error), param=param, code=code)


def number(log_prob: float) -> float:
    return max(LEAST_LOG_PROB, log_prob)
