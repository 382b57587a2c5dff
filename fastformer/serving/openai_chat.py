"""OpenAI's route POST /v1/chat/completions, and the requests and answers that it shares with completions."""

from __future__ import annotations

import functools
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from fastformer import __version__
from fastformer.generation.answers import AnswerParser, AnswerStyle, ChannelParser, parser_of, style_behind
from fastformer.generation.async_generator import ChatIds, PromptTooLong
from fastformer.generation.constraints import Triggers
from fastformer.generation.jobs import Stream
from fastformer.generation.processors import CountPenalties, LeastShare, TokenBias
from fastformer.generation.streaming import (
    Completion,
    Piece,
    SampleRequest,
    ScoredToken,
    behind_ends,
)
from fastformer.generation.token_texts import Spelled, SpelledToken, TokenTexts
from fastformer.generation.tool_formats import Reasoning, reasoning_of
from fastformer.serving.answers import EventStream, TooLarge, answer, event
from fastformer.serving.gate import until_gone
from fastformer.serving.generate_service import GenerateService
from fastformer.serving.limits import Limits
from fastformer.serving.openai_bodies import (
    ERRORS,
    EVENTS,
    LEAST_LOG_PROB,
    ApiError,
    ChatBody,
    ChatCompletion,
    GenerateBody,
    MessageBody,
    ToolCallBody,
    check_body,
    check_length,
    error_fields,
)
from fastformer.serving.structured import Constrained, check_constraint
from fastformer.serving.tools import (
    RequestTools,
    begun_calls,
    call_deltas,
    calls_of,
    check_calls,
    tools_of,
    triggers_of,
)

STREAMED: dict[str, Any] = {
    "description": "JSON, or with stream the same in pieces as server-sent events, of which the last is [DONE].",
    "content": EVENTS,
}
_LEAST_TOP_P = 1e-9  # keeps one token, as OpenAI's 0 does
_DIGITS = 9  # the most digits of a token's id
_DONE = b"data: [DONE]\n\n"
_MARKS = 16  # about the characters that a chat template writes around a message
_PLAIN = AnswerStyle()  # of an answer that is content alone
_CHAT_TOKENS = 1_024  # the most new tokens of a chat's answer if the request sets no number
# Names of the server's own, or of arguments of the functions that pass the variables on.
_NO_VARIABLES = frozenset((
    "add_generation_prompt", "continue_final_message", "deadline", "messages", "self", "tokenizer", "tools",
))  # fmt: skip


def add_chat(routes: APIRouter, service: GenerateService, limits: Limits) -> None:
    responses: dict[int | str, Any] = {200: {"model": ChatCompletion, **STREAMED}, **ERRORS}
    template = service.session.template
    reasoning = None if template is None else reasoning_of(template.source)

    @routes.post("/v1/chat/completions", responses=responses)
    async def chat(body: ChatBody, http: Request) -> Response:
        """Answers in a chat."""
        check_body(body, service.models)
        if template is None:
            raise ApiError(
                f"expected a model that was trained to chat; the folder of {service.name!r} has no chat template: see "
                "/v1/completions",
                param="messages",
            )
        check_count(body, limits)
        if body.top_logprobs and not body.logprobs:
            raise ApiError("expected logprobs to be true along with top_logprobs", param="top_logprobs")
        messages = [_message(message, place, limits) for place, message in enumerate(body.messages)]
        if reasoning is not None and reasoning.direct:
            messages = [_with_thinking(message) for message in messages]
        deadline = service.deadline(body.timeout)
        variables = _variables(body)
        most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        alternatives = (body.top_logprobs or 0) if body.logprobs else None
        tools = tools_of(body, template.source) if body.tools or body.tool_choice else None
        if tools is not None:
            variables["tools"] = tools.described

        async def respond() -> Response:
            given, begun = body.constraints, None
            constrained = await check_constraint(given, service, deadline) if given else None
            if tools is not None:
                constrained = await check_calls(tools, constrained, body, service, deadline)
                if constrained is None:
                    begun = await begun_calls(tools, body, service, deadline)
            try:
                ids = await _chat_ids(service, messages, deadline, variables)
            except ValueError as error:
                raise unread(error, "messages") from error
            style = _PLAIN
            if tools is not None or reasoning is not None:
                ids, style = _styled(ids, body, tools, reasoning, service, is_constrained=constrained is not None)
            lengths = [new_tokens(body, ids, service, most, _CHAT_TOKENS)]
            triggers = None if begun is None else triggers_of(style, begun, service)
            job = CompletionJob(service, body, [ids], lengths, alternatives, deadline, constrained, style, triggers)
            return await respond_with(job, _ChatForm(job, style))

        return await until_gone(http, respond())


async def _chat_ids(
    service: GenerateService, messages: Sequence[Mapping[str, Any]], deadline: float, variables: Mapping[str, Any]
) -> ChatIds:
    """Returns the ids of a chat, whose template reads the variables too.

    Raises:
        TooLarge: the messages have more characters together than the limits allow.
        ValueError: see `AsyncGenerator.chat_ids`.
        QueueFull, TooLate: see `Session.aside`.
    """
    most = service.limits.max_chat_chars
    size = sum([len(text if isinstance(text, str) else str(text)) for each in messages for text in each.values()])
    size += sum([len(str(value)) for value in variables.values() if not isinstance(value, bool)])
    if size > most:
        raise TooLarge(f"expected messages of at most {most:,} characters together, got {size:,}")
    work = functools.partial(service.session.chat_ids, messages, **variables)
    # A template is a program: even for a short chat it may take seconds, until its bounds end it.
    return await service.session.aside(work, size + _MARKS * len(messages), deadline=deadline, is_slow=True)


def _styled(
    ids: ChatIds,
    body: ChatBody,
    tools: RequestTools | None,
    reasoning: Reasoning | None,
    service: GenerateService,
    *,
    is_constrained: bool,
) -> tuple[ChatIds, AnswerStyle]:
    """Returns the ids of a chat, with what a constrained answer begins with, and the style of the answer."""
    session = service.session
    prompt = behind_ends(ids, session.ends) if body.add_generation_prompt is not False else ()
    style, begin = style_behind(prompt, session.tokenizer, reasoning, is_constrained=is_constrained)
    style = style._replace(is_parallel=body.parallel_tool_calls is not False)
    if tools is not None:
        style = style._replace(format=tools.format, schemas=tools.schemas)
        begin = "" if style.has_channels else begin
        if tools.forced:
            prefix = tools.format.prefix(tools.forced)
            style, begin = style._replace(is_forced=True, prefix=prefix), begin + prefix
    more = session.tokenizer.encode_template(begin) if begin else []
    return ChatIds([*ids, *more]), style


def _message(message: MessageBody, place: int, limits: Limits) -> dict[str, Any]:
    """Converts a message into the form that chat templates read."""
    where = f"messages.{place}"
    parts = message.content if isinstance(message.content, list) else []
    for part in parts:
        if part.type != "text" or part.text is None:
            raise ApiError(f"expected content of text alone, got {part.type!r:.40}", param=f"{where}.content")
    calls = message.tool_calls or []
    if calls and message.role != "assistant":
        raise ApiError(f"expected tool_calls of the assistant, got {message.role}'s", param=f"{where}.tool_calls")
    content = "\n".join(part.text or "" for part in parts) if parts else message.content
    if content is None and not calls:
        raise ApiError("expected a message with content", param=f"{where}.content")
    given = {
        "content": content or "", "name": message.name, "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning_content,
    }  # fmt: skip
    for name, text in given.items():
        if isinstance(text, str) and len(text) > limits.max_text_chars:
            check_length(text, limits, f"{where}.{name}")
    role = "system" if message.role == "developer" else message.role
    fields: dict[str, Any] = {name: text for name, text in given.items() if text is not None}
    if calls:
        fields["tool_calls"] = [_call(call, f"{where}.tool_calls", limits) for call in calls]
    return {"role": role, **fields}


def _with_thinking(message: dict[str, Any]) -> dict[str, Any]:
    """Names a message's reasoning as the template of gpt-oss does, which refuses calls with both it and content."""
    if "reasoning_content" not in message or ("tool_calls" in message and message["content"]):
        return message
    return {**message, "thinking": message["reasoning_content"]}


def _call(call: ToolCallBody, where: str, limits: Limits) -> dict[str, Any]:
    """Converts a call into the form that chat templates read, with arguments as an object."""
    check_length(call.function.arguments, limits, where)
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise ApiError("expected arguments as the JSON of an object", param=where)
    function = {"name": call.function.name, "arguments": arguments}
    return {**({} if call.id is None else {"id": call.id}), "type": "function", "function": function}


def _variables(body: ChatBody) -> dict[str, Any]:
    """Returns the variables of the chat template that a request sets."""
    variables = dict(body.chat_template_kwargs or {})
    if reserved := _NO_VARIABLES.intersection(variables):
        raise ApiError(f"expected variables of a chat template, got {min(reserved)!r}", param="chat_template_kwargs")
    return variables | {"add_generation_prompt": body.add_generation_prompt is not False}


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
        style: what may be in the answers.
        triggers: where a constraint of the answers begins, if they are not under one from the beginning.

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
        style: AnswerStyle | None = None,
        triggers: Triggers | None = None,
    ) -> None:
        self.service, self.body, self.rows, self._deadline = service, body, rows, deadline
        self.alternatives, self.count, self._is_constrained = alternatives, body.n or 1, constrained is not None
        self.is_chat = isinstance(rows[0], ChatIds)
        self._requests: list[SampleRequest] = []
        marks = () if style is None or style is _PLAIN else style.marks
        for row, limit in zip(rows, most, strict=True):
            options = _options(body, service, len(row), is_chat=self.is_chat)
            options |= {} if constrained is None else constrained.options
            self._requests += service.session.requests(
                row, max_new_tokens=limit, log_probs=alternatives is not None, num_alternatives=alternatives or 0,
                marks=marks, triggers=triggers,
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
        return [*map(SampleRequest.completion, self._requests)]

    def stream(self) -> Stream[list[Piece]]:
        """Returns the pieces of all answers, as they come together; all requests are queued when this returns."""
        job = self.service.session.submit(self._requests, deadline=self._deadline, streams=True)
        return Stream(job, job.arrivals(SampleRequest.piece))

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


async def _events(job: CompletionJob, form: Form, arrivals: Stream[list[Piece]]) -> AsyncGenerator[bytes, None]:
    """Yields the events of a stream; those that are known together are sent together."""
    options = job.body.stream_options
    counts = bool(options and options.include_usage)
    head = {**job.head, "object": form.chunk}
    num_choices = len(job.rows) * job.count
    new_tokens, cached = 0, [0] * (num_choices // job.copies)

    def chunk(choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        return {**head, "choices": choices, **({"usage": usage} if counts else {})}

    try:
        chunks = [chunk([choice]) for index in range(num_choices) for choice in form.first(index)]
        running = len(cached)
        async for pieces in arrivals:
            for piece in pieces:
                new_tokens += len(piece.tokens) * job.copies
                if piece.finish_reason is not None:
                    cached[piece.sample] = piece.cached_tokens
                    running -= 1
                elif not piece.text and job.alternatives is None:
                    continue
                for copy in range(job.copies):
                    chunks.append(chunk([form.piece(piece.sample * job.copies + copy, piece)]))
            if not running and counts:
                chunks.append(chunk([], job.usage(new_tokens, job.cached_tokens(cached))))
            if data := b"".join(map(event, chunks)) + (b"" if running else _DONE):
                yield data
            if not running:
                return
            chunks = []
    finally:
        await arrivals.aclose()


def unread(error: ValueError, param: str) -> ApiError:
    """Returns the error of a prompt or a chat that the model can't read."""
    code = "context_length_exceeded" if isinstance(error, PromptTooLong) else None
    return ApiError(str(error), param=param, code=code)


def number(log_prob: float) -> float:
    return max(LEAST_LOG_PROB, log_prob)


class _ChatForm(Form):
    """The JSON of a chat's answers in OpenAI's format."""

    kind, chunk = "chat.completion", "chat.completion.chunk"

    def __init__(self, job: CompletionJob, style: AnswerStyle) -> None:
        super().__init__(job)
        self._style, self._has_parts = style, style.format is not None or style.reasoning is not None
        self._parsers: dict[int, AnswerParser | ChannelParser] = {}  # by choice

    def whole(self, index: int, completion: Completion) -> dict[str, Any]:
        """Returns a complete choice; see `Form`, also for the other methods."""
        message: dict[str, Any] = {"role": "assistant", "content": completion.text, "refusal": None}
        if self._has_parts:
            message |= self._parts(completion)
        is_call = "tool_calls" in message and completion.finish_reason != "length"
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(self.spelled(index, completion.tokens, is_end=True)),
            "finish_reason": "tool_calls" if is_call else completion.finish_reason,
        }

    def _parts(self, completion: Completion) -> dict[str, Any]:
        """Returns the fields of a message that hold the parts of an answer."""
        parser = parser_of(self._style)
        parts = parser.add(completion.text, is_end=True)
        content, reasoning = (
            "".join(part.text for part in parts if part.kind == kind) for kind in ("content", "reasoning")
        )
        calls = calls_of(parts, self._style)
        if parser.unfinished and completion.finish_reason != "length":
            content += parser.unfinished
            calls = calls[: parser.num_calls - 1]
        fields: dict[str, Any] = {"content": content}
        if calls:
            fields = {"content": content.strip() or None, "tool_calls": calls}
        return fields | ({"reasoning_content": reasoning} if reasoning else {})

    def first(self, index: int) -> Iterator[dict[str, Any]]:
        delta = {"role": "assistant", "content": "", "refusal": None}
        yield {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def piece(self, index: int, piece: Piece) -> dict[str, Any]:
        is_end, reason, delta = piece.finish_reason is not None, piece.finish_reason, dict[str, Any]()
        if self._has_parts:
            parser = self._parsers.get(index) or self._parsers.setdefault(index, parser_of(self._style))
            parts = parser.add(piece.text, is_end=is_end)
            for name, kind in (("content", "content"), ("reasoning_content", "reasoning")):
                if text := "".join(part.text for part in parts if part.kind == kind):
                    delta[name] = text
            if calls := call_deltas(parts, self._style):
                delta["tool_calls"] = calls
            has_calls = parser.num_calls > bool(parser.unfinished)
        else:
            delta, has_calls = {"content": piece.text} if piece.text else delta, False
        spelled = self.spelled(index, piece.tokens, is_end=is_end)
        return {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(spelled) if spelled else None,
            "finish_reason": "tool_calls" if reason == "stop" and has_calls else reason,
        }

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
