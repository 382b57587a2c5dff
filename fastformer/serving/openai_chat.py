"""OpenAI's route POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from fastformer.generation.async_generator import Completion, Piece
from fastformer.generation.token_texts import Spelled, SpelledToken
from fastformer.serving.answers import until_gone
from fastformer.serving.limits import Limits
from fastformer.serving.openai_bodies import (
    ERRORS,
    ApiError,
    ChatBody,
    ChatCompletion,
    MessageBody,
    check_body,
    check_length,
)
from fastformer.serving.openai_jobs import (
    STREAMED,
    CompletionJob,
    Form,
    check_constraint,
    check_count,
    new_tokens,
    number,
    respond_with,
    unread,
)
from fastformer.serving.service import GenerateService

_CHAT_TOKENS = 1_024  # the most new tokens of a chat's answer if the request sets no number
# Names of the server's own, or of arguments of the functions that pass the variables on.
_NO_VARIABLES = frozenset((
    "add_generation_prompt", "continue_final_message", "deadline", "messages", "self", "tokenizer", "tools",
))  # fmt: skip


def add_chat(routes: APIRouter, service: GenerateService, limits: Limits) -> None:
    responses: dict[int | str, Any] = {200: {"model": ChatCompletion, **STREAMED}, **ERRORS}

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
        check_count(body, limits)
        if body.top_logprobs and not body.logprobs:
            raise ApiError("expected logprobs to be true along with top_logprobs", param="top_logprobs")
        messages = [_message(message, place, limits) for place, message in enumerate(body.messages)]
        deadline = service.deadline(body.timeout)
        variables = _variables(body)
        most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        alternatives = (body.top_logprobs or 0) if body.logprobs else None

        async def respond() -> Response:
            constrained = await check_constraint(body, service, deadline)
            try:
                ids = await service.chat_ids(messages, deadline, **variables)
            except ValueError as error:
                raise unread(error, "messages") from error
            lengths = [new_tokens(body, ids, service, most, _CHAT_TOKENS)]
            job = CompletionJob(service, body, [ids], lengths, alternatives, deadline, constrained)
            return await respond_with(job, _ChatForm(job))

        return await until_gone(http, respond())


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


class _ChatForm(Form):
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
    return {"token": spelled.shown, "logprob": number(log_prob), "bytes": data}
