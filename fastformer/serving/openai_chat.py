"""OpenAI's route POST /v1/chat/completions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from fastapi import APIRouter, Request, Response

from fastformer.generation.async_generator import ChatIds
from fastformer.generation.streaming import Completion, Marked, Piece, behind_ends
from fastformer.generation.token_texts import Spelled, SpelledToken
from fastformer.serving.answers import until_gone
from fastformer.serving.limits import Limits
from fastformer.serving.openai_bodies import (
    ERRORS,
    ApiError,
    ChatBody,
    ChatCompletion,
    MessageBody,
    ToolCallBody,
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
from fastformer.serving.structured import Constrained, checked
from fastformer.serving.tools import AnswerParser, AnswerStyle, Part, ToolFormat, format_of, reasoning_of

_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_TAIL = 16  # the last tokens of a prompt, among which the mark of reasoning is
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
        check_body(body, service.models)
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
        tools = _tools_of(body, service.session.template.source)
        if tools is not None:
            variables["tools"] = tools.described

        async def respond() -> Response:
            constrained = await check_constraint(body, service, deadline)
            if tools is not None:
                constrained = await _check_calls(tools, constrained, body, service, deadline)
            try:
                ids = await service.chat_ids(messages, deadline, **variables)
            except ValueError as error:
                raise unread(error, "messages") from error
            ids, style = _styled(ids, body, tools, service, is_constrained=constrained is not None)
            lengths = [new_tokens(body, ids, service, most, _CHAT_TOKENS)]
            job = CompletionJob(service, body, [ids], lengths, alternatives, deadline, constrained, marks=style.marks)
            return await respond_with(job, _ChatForm(job, style))

        return await until_gone(http, respond())


class _Tools(NamedTuple):
    """The tools of a request.

    Attributes:
        format: the format of calls.
        described: the tools, as templates read them.
        schemas: the schemas of their arguments, by name.
        forced: the tools of which the answer has to call one; empty: the model decides.
    """

    format: ToolFormat
    described: list[dict[str, Any]]
    schemas: dict[str, dict[str, Any]]
    forced: list[str]


def _tools_of(body: ChatBody, template: str) -> _Tools | None:
    """Returns the tools that an answer may call; None: there are none."""
    choice, functions = body.tool_choice, [tool.function for tool in body.tools or ()]
    known, forced = [function.name for function in functions], list[str]()
    if isinstance(choice, dict):
        named = choice.get("function") if choice.get("type") == "function" else None
        if not isinstance(named, dict) or named.get("name") not in known:
            raise ApiError(f"expected the function of one of {known}, got {choice!r:.80}", param="tool_choice")
        forced = [named["name"]]
    elif choice == "required":
        if not functions:
            raise ApiError("expected tools along with tool_choice 'required'", param="tool_choice")
        forced = known
    if not functions or choice == "none":
        return None
    try:
        form = format_of(template)
    except ValueError as error:
        raise ApiError(str(error), param="tools", code="unsupported_parameter") from error
    described = []
    for function in functions:
        fields = {"name": function.name, "description": function.description, "parameters": function.parameters}
        present = {name: value for name, value in fields.items() if value is not None}
        described.append({"type": "function", "function": present})
    schemas = {function.name: _NO_ARGUMENTS if function.parameters is None else function.parameters
               for function in functions}  # fmt: skip
    if len(schemas) < len(functions):
        raise ApiError("expected functions of different names", param="tools")
    return _Tools(form, described, schemas, forced)


async def _check_calls(
    tools: _Tools, constrained: Constrained | None, body: ChatBody, service: GenerateService, deadline: float
) -> Constrained | None:
    """Returns the constraint of an answer that may call tools, which has been compiled; None: the answer is free.

    Args:
        tools: the tools.
        constrained: the constraint of an answer that calls none.
        body, service, deadline: of the request.

    Raises:
        ApiError: a constraint is wrong, or the grammar can't express both.
    """
    answer = None
    if constrained is not None:
        answer = constrained.options.get("schema")
        if not isinstance(answer, dict):
            raise ApiError(f"expected {constrained.param} or tools, got both", param=constrained.param)
        if not tools.forced and not tools.format.begin:
            reason = "the model's calls begin with no mark, so that an answer may look like one"
            raise ApiError(f"expected {constrained.param} or tools, got both: {reason}", param=constrained.param)
    if not tools.forced and answer is None:
        return None
    special = service.session.special_marks(tools.format.marks)
    schemas = {name: tools.schemas[name] for name in tools.forced or tools.schemas}
    is_parallel = body.parallel_tool_calls is not False
    try:
        # An answer that has to call a tool is nothing else, so that its own format doesn't matter.
        grammar = tools.format.grammar(
            schemas, special, is_parallel=is_parallel, answer=None if tools.forced else answer
        )
        constrained = checked(Constrained("tools", {"grammar": grammar}))
        await service.check_constraint(constrained.options, constrained.size, deadline)
    except (ValueError, RecursionError) as error:
        raise ApiError(str(error), param="tools") from error
    return constrained


def _styled(
    ids: ChatIds, body: ChatBody, tools: _Tools | None, service: GenerateService, *, is_constrained: bool
) -> tuple[ChatIds, AnswerStyle]:
    """Returns the ids of a chat, with what a constrained answer begins with, and the style of the answer."""
    session = service.session
    assert session.template is not None
    reasoning = reasoning_of(session.template.source)
    is_open = False
    if reasoning is not None and body.add_generation_prompt is not False:
        shown = {i: mark for mark, i in session.special_marks(reasoning).items()}
        tail = behind_ends(ids, session.ends)[-_TAIL:]
        is_open = Marked(session.tokenizer, shown).decode(tail).rstrip().endswith(reasoning[0])
    style = AnswerStyle(None, (), reasoning, is_open, is_parallel=body.parallel_tool_calls is not False)
    begin = ""
    if is_constrained:  # reasoning would break the constraint
        begin = f"{reasoning[1]}\n\n" if reasoning is not None and is_open else ""
        style = style._replace(reasoning=None, is_open=False)
    if tools is not None:
        style = style._replace(format=tools.format, names=frozenset(tools.schemas))
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
        if text:
            check_length(str(text), limits, f"{where}.{name}")
    role = "system" if message.role == "developer" else message.role
    fields: dict[str, Any] = {name: text for name, text in given.items() if text is not None}
    if calls:
        fields["tool_calls"] = [_call(call, f"{where}.tool_calls", limits) for call in calls]
    return {"role": role, **fields}


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


class _ChatForm(Form):
    """The JSON of a chat's answers in OpenAI's format."""

    kind, chunk = "chat.completion", "chat.completion.chunk"

    def __init__(self, job: CompletionJob, style: AnswerStyle) -> None:
        super().__init__(job)
        self._style = style
        self._parsers: dict[int, AnswerParser] = {}  # by choice

    def whole(self, index: int, completion: Completion) -> dict[str, Any]:
        """Returns a complete choice; see `Form`, also for the other methods."""
        parser = AnswerParser(self._style)
        parts = parser.add(completion.text, is_end=True)
        texts = {kind: "".join(part.text for part in parts if part.kind == kind) for kind in ("content", "reasoning")}
        calls = _calls(parts, self._style)
        is_cut = completion.finish_reason == "length"
        if parser.unfinished and not is_cut:
            texts["content"] += parser.unfinished
            calls = calls[: parser.num_calls - 1]
        message: dict[str, Any] = {"role": "assistant", "content": texts["content"], "refusal": None}
        if calls:
            message |= {"content": texts["content"].strip() or None, "tool_calls": calls}
        if texts["reasoning"]:
            message["reasoning_content"] = texts["reasoning"]
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(self.spelled(index, completion.tokens, is_end=True)),
            "finish_reason": "tool_calls" if calls and not is_cut else completion.finish_reason,
        }

    def first(self, index: int) -> Iterator[dict[str, Any]]:
        delta = {"role": "assistant", "content": "", "refusal": None}
        yield {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def piece(self, index: int, piece: Piece) -> dict[str, Any]:
        parser = self._parsers.get(index) or self._parsers.setdefault(index, AnswerParser(self._style))
        is_end = piece.finish_reason is not None
        parts = parser.add(piece.text, is_end=is_end)
        delta: dict[str, Any] = {}
        for name, kind in (("content", "content"), ("reasoning_content", "reasoning")):
            if text := "".join(part.text for part in parts if part.kind == kind):
                delta[name] = text
        if calls := _call_deltas(parts, self._style):
            delta["tool_calls"] = calls
        spelled = self.spelled(index, piece.tokens, is_end=is_end)
        logprobs = self._logprobs(spelled) if spelled else None
        is_call = piece.finish_reason == "stop" and parser.num_calls > 0
        reason = "tool_calls" if is_call else piece.finish_reason
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

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


def _call_deltas(parts: Sequence[Part], style: AnswerStyle) -> list[dict[str, Any]]:
    """Returns new parts of calls, one for each call, as OpenAI streams them."""
    deltas: dict[int, dict[str, Any]] = {}
    for part in parts:
        if part.kind == "name":
            function = {"name": part.text, "arguments": ""}
            deltas[part.call] = {"index": part.call, "id": style.new_id(), "type": "function", "function": function}
        elif part.kind == "arguments":
            delta = deltas.setdefault(part.call, {"index": part.call, "function": {"arguments": ""}})
            delta["function"]["arguments"] += part.text
    return list(deltas.values())


def _calls(parts: Sequence[Part], style: AnswerStyle) -> list[dict[str, Any]]:
    """Returns the calls of a whole answer."""
    return [{name: value for name, value in one.items() if name != "index"} for one in _call_deltas(parts, style)]


def _entry(spelled: Spelled, log_prob: float) -> dict[str, Any]:
    data = None if spelled.data is None else list(spelled.data)
    return {"token": spelled.shown, "logprob": number(log_prob), "bytes": data}
