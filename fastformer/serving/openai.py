"""OpenAI's routes of texts: POST /v1/completions and /v1/chat/completions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from fastformer.generation.streaming import Completion, Piece
from fastformer.generation.token_texts import SpelledToken
from fastformer.serving.gate import until_gone
from fastformer.serving.generate_service import GenerateService
from fastformer.serving.limits import Limits
from fastformer.serving.openai_bodies import (
    ERRORS,
    ApiError,
    CompletionBody,
    TextCompletion,
    check_body,
    check_length,
)
from fastformer.serving.openai_bodies import error_response as error_response
from fastformer.serving.openai_chat import (
    STREAMED,
    CompletionJob,
    Form,
    add_chat,
    check_count,
    new_tokens,
    number,
    respond_with,
    unread,
)
from fastformer.serving.service import Service
from fastformer.serving.structured import check_constraint


def router(service: Service, limits: Limits) -> APIRouter:
    """Makes OpenAI's routes for a language model."""
    assert isinstance(service, GenerateService)
    routes = APIRouter()
    _add_completions(routes, service, limits)
    add_chat(routes, service, limits)
    return routes


def _add_completions(routes: APIRouter, service: GenerateService, limits: Limits) -> None:
    responses: dict[int | str, Any] = {200: {"model": TextCompletion, **STREAMED}, **ERRORS}

    @routes.post("/v1/completions", responses=responses)
    async def completions(body: CompletionBody, http: Request) -> Response:
        """Continues prompts."""
        check_body(body, service.models)
        if body.best_of not in (None, body.n or 1):
            raise ApiError(f"expected best_of to be n, {body.n or 1}, got {body.best_of}", param="best_of")
        check_count(body, limits)
        prompts = _prompts(body.prompt)
        most = min(limits.max_texts, limits.max_waiting)  # each completion takes a place in the queue
        if len(prompts) * (body.n or 1) > most:
            raise ApiError(f"expected at most {most:,} completions in a request", param="prompt")
        for prompt in prompts:
            check_length(prompt, limits, "prompt")
        deadline = service.deadline(body.timeout)

        async def respond() -> Response:
            given = body.constraints
            constrained = await check_constraint(given, service, deadline) if given else None
            rows = await _encoded(service, prompts, deadline, body.parse_special)
            lengths = [new_tokens(body, row, service, body.max_tokens, 16) for row in rows]
            job = CompletionJob(service, body, rows, lengths, body.logprobs, deadline, constrained)
            return await respond_with(job, _TextForm(job))

        return await until_gone(http, respond())


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
        raise unread(error, "prompt") from error


class _TextForm(Form):
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
            "token_logprobs": [number(one.scored.log_prob) for one in tokens],
            "top_logprobs": [self._top(index, one) for one in tokens] if self._job.alternatives else None,
            "text_offset": offsets,
        }

    def _top(self, index: int, one: SpelledToken) -> dict[str, float]:
        """Returns the log-probabilities of the likeliest tokens by their texts; if texts are equal, by names."""
        log_probs = {one.spelled.shown: number(one.scored.log_prob)}
        for (token, log_prob), other in zip(one.scored.alternatives, one.alternatives, strict=True):
            if token != one.scored.token:
                names = (other.shown, self._texts[index].name(token))
                name = next((name for name in names if name and name not in log_probs), f"token_id:{token}")
                log_probs[name] = number(log_prob)
        return log_probs
