"""The tools of a request, the constraints of calls, and the JSON of calls in an answer."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

from fastformer.generation.answers import AnswerStyle, Part
from fastformer.generation.argument_schemas import asserted
from fastformer.generation.constraints import Constraint, Triggers
from fastformer.generation.streaming import special_marks
from fastformer.generation.tool_formats import ToolFormat, format_of
from fastformer.serving.generate_service import GenerateService
from fastformer.serving.openai_bodies import ApiError, ChatBody
from fastformer.serving.structured import Constrained, ConstraintTooLarge, compiled

_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


class RequestTools(NamedTuple):
    """The tools of a request.

    Attributes:
        format: the format of calls.
        described: the tools, as templates read them.
        schemas: the schemas of their arguments, by name.
        forced: the tools of which the answer has to call one; empty: the model decides.
        strict: the tools whose schemas are enforced with all that they say.
    """

    format: ToolFormat
    described: list[dict[str, Any]]
    schemas: dict[str, dict[str, Any]]
    forced: list[str]
    strict: frozenset[str]

    def enforced(self) -> dict[str, Any]:
        """Returns the schemas of the tools that may be called, as grammars enforce them.

        As the specification of JSON schemas has it, a format that isn't known is no condition, unless the tool is
        strict.
        """
        is_json = self.format.syntax == "json"
        return {
            name: self.schemas[name] if name in self.strict else asserted(self.schemas[name], is_json=is_json)
            for name in self.forced or self.schemas
        }


def tools_of(body: ChatBody, template: str) -> RequestTools | None:
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
    strict = frozenset(function.name for function in functions if function.strict)
    return RequestTools(form, described, schemas, forced, strict)


async def check_calls(
    tools: RequestTools, constrained: Constrained | None, body: ChatBody, service: GenerateService, deadline: float
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
        if not tools.forced and (tools.format.has_channels or not tools.format.begin):
            reason = "the model's calls begin with no mark, so that an answer may look like one"
            if tools.format.has_channels:
                reason = "the model may write several messages, of which only the last one is the answer"
            raise ApiError(f"expected {constrained.param} or tools, got both: {reason}", param=constrained.param)
    if not tools.forced and answer is None:
        return None
    special = special_marks(service.session.tokenizer, tools.format.marks)
    is_parallel = body.parallel_tool_calls is not False
    try:
        # An answer that has to call a tool is nothing else, so that its own format doesn't matter.
        grammar = tools.format.grammar(
            tools.enforced(), special, is_parallel=is_parallel, answer=None if tools.forced else answer
        )
        return await compiled(Constrained("tools", {"grammar": grammar}), service, deadline)
    except (ValueError, RecursionError) as error:
        raise ApiError(str(error), param="tools") from error


async def begun_calls(
    tools: RequestTools, body: ChatBody, service: GenerateService, deadline: float
) -> Constrained | None:
    """Returns the constraint of a call that the model begins by itself, which has been compiled.

    Without any, if the server can't constrain texts or the schemas are too large, arguments may break their schemas.

    Raises:
        ApiError: a schema can't be enforced.
        QueueFull, TooLate: see `Session.aside`.
    """
    if not await service.can_constrain(deadline):
        return None
    special = special_marks(service.session.tokenizer, tools.format.marks)
    is_parallel = body.parallel_tool_calls is not False
    try:
        grammar = tools.format.grammar(tools.enforced(), special, is_parallel=is_parallel, is_begun=True)
        return await compiled(Constrained("tools", {"grammar": grammar}), service, deadline)
    except ConstraintTooLarge:
        return None
    except (ValueError, RecursionError) as error:
        raise ApiError(str(error), param="tools") from error


def triggers_of(style: AnswerStyle, constrained: Constrained, service: GenerateService) -> Triggers:
    """Returns where in an answer the constraint of calls begins."""
    assert style.format is not None
    constraint = Constraint("grammar", constrained.options["grammar"])
    shown = {i: mark for mark, i in special_marks(service.session.tokenizer, style.marks).items()}
    texts = style.format.begins(style.schemas)
    around = None if style.reasoning is None or style.has_channels else style.reasoning[:2]
    return Triggers(constraint, texts, shown, not style.format.begin, around, style.is_open)


def call_deltas(parts: Sequence[Part], style: AnswerStyle) -> list[dict[str, Any]]:
    """Returns new parts of calls, one for each call, as OpenAI streams them."""
    deltas: dict[int, dict[str, Any]] = {}
    for part in parts:
        if part.kind == "name":
            function = {"name": part.text, "arguments": ""}
            deltas[part.call] = {
                "index": part.call,
                "id": _new_id(style.format),
                "type": "function",
                "function": function,
            }
        elif part.kind == "arguments":
            delta = deltas.setdefault(part.call, {"index": part.call, "function": {"arguments": ""}})
            delta["function"]["arguments"] += part.text
    return list(deltas.values())


def calls_of(parts: Sequence[Part], style: AnswerStyle) -> list[dict[str, Any]]:
    """Returns the calls of a whole answer."""
    return [{name: value for name, value in one.items() if name != "index"} for one in call_deltas(parts, style)]


def _new_id(form: ToolFormat | None) -> str:
    length = 0 if form is None else form.id_length
    return uuid.uuid4().hex[:length] if length else f"call_{uuid.uuid4().hex[:24]}"
