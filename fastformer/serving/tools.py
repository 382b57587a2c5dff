"""The tools of a request, the constraints of calls, and what finds calls and reasoning in an answer.

`AnswerParser` divides an answer, as it grows, into reasoning, content and calls.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Sequence
from typing import Any, Literal, NamedTuple

from fastformer.generation.constraints import Constraint, Triggers
from fastformer.serving.generate_service import GenerateService
from fastformer.serving.openai_bodies import ApiError, ChatBody
from fastformer.serving.structured import Constrained, ConstraintTooLarge, compiled
from fastformer.serving.tool_formats import PYTHON_TAG, Reasoning, ToolFormat, format_of

_ARGUMENTS = ("arguments", "parameters")
_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


class RequestTools(NamedTuple):
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
    return RequestTools(form, described, schemas, forced)


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
    special = service.session.special_marks(tools.format.marks)
    is_parallel = body.parallel_tool_calls is not False
    try:
        grammar = tools.format.grammar(tools.schemas, special, is_parallel=is_parallel, is_begun=True)
        return await compiled(Constrained("tools", {"grammar": grammar}), service, deadline)
    except ConstraintTooLarge:
        return None
    except (ValueError, RecursionError) as error:
        raise ApiError(str(error), param="tools") from error


class Part(NamedTuple):
    """A part of an answer.

    Attributes:
        kind: what the text is; "name" begins a call.
        text: the text.
        call: the index of the call.
    """

    kind: Literal["reasoning", "content", "name", "arguments"]
    text: str
    call: int = 0


class AnswerStyle(NamedTuple):
    """What may be in an answer besides content.

    Attributes:
        format: the format of calls; None: there are no tools.
        names: the names of the tools.
        reasoning: the marks of reasoning; None: there is none.
        is_open: whether the prompt ends with the first of these marks.
        is_forced: whether the answer is only calls, of which the prompt has the prefix.
        prefix: what the prompt ends with, if the answer continues a call.
        is_parallel: whether several calls count; if not, those behind the first one are omitted.
    """

    format: ToolFormat | None = None
    names: Collection[str] = ()
    reasoning: Reasoning | None = None
    is_open: bool = False
    is_forced: bool = False
    prefix: str = ""
    is_parallel: bool = True

    @property
    def marks(self) -> tuple[str, ...]:
        """The marks that the text of an answer has to show."""
        tag = () if self.format is None or self.format.begin else (PYTHON_TAG,)
        return (*(() if self.format is None else self.format.marks), *tag, *(self.reasoning or ()))

    def triggers(self, constrained: Constrained, service: GenerateService) -> Triggers:
        """Returns where in the answer the constraint of calls begins."""
        assert self.format is not None
        constraint = Constraint("grammar", constrained.options["grammar"])
        shown = {i: mark for mark, i in service.session.special_marks(self.marks).items()}
        texts = self.format.begins(self.names)
        around = None if self.reasoning is None else self.reasoning[:2]
        return Triggers(constraint, texts, shown, not self.format.begin, around, self.is_open)

    def new_id(self) -> str:
        """Returns the id of a new call."""
        length = 0 if self.format is None else self.format.id_length
        return uuid.uuid4().hex[:length] if length else f"call_{uuid.uuid4().hex[:24]}"


class AnswerParser:
    """Divides the text of an answer, which comes in pieces, into its parts.

    Attributes:
        num_calls: the number of calls so far.
        unfinished: the text of a call whose end has not come; "": there is none.
    """

    def __init__(self, style: AnswerStyle) -> None:
        self._style, self._text = style, ""
        self._state: Literal["start", "reasoning", "content", "calls", "call"] = "start"
        self._call = _Call()
        self._skipped: list[str] = []  # the pieces of the text since the last call, which may turn out to be content
        self._has_reasoned = False
        self._is_stripped = False  # whether the white space at the beginning doesn't count
        self.num_calls = 0
        if style.is_open:
            self._state = "reasoning"
        elif style.prefix or style.is_forced:
            self._state, self._text = "calls", style.prefix
        self._call_mark = "" if style.format is None else style.format.begin  # begins a call behind content

    @property
    def unfinished(self) -> str:
        return "".join(self._skipped) if self._state == "call" else ""

    def add(self, text: str, *, is_end: bool = False) -> list[Part]:
        """Returns the parts that have become certain with a piece of the text."""
        self._text += text
        parts: list[Part] = []
        while self._step(parts, is_end):
            pass
        if is_end and self._state == "calls":
            self._to_content(parts)
        kept = [part for part in parts if part.text or part.kind == "name"]
        return [part for part in kept if self._style.is_parallel or not part.call]

    def _step(self, parts: list[Part], is_end: bool) -> bool:
        """Takes some of the text; returns whether more of it can be taken."""
        if self._state == "call":
            return self._read_call(parts, is_end)
        if not self._text:
            return False
        steps = {"start": self._begin, "reasoning": self._reason, "content": self._read_content}
        return steps.get(self._state, self._between_calls)(parts, is_end)

    def _begin(self, parts: list[Part], is_end: bool) -> bool:
        style, text = self._style, self._text.lstrip()
        if self._is_stripped:
            self._text = text
            if not text:
                return False
        if style.reasoning is not None:
            mark, _, direct = style.reasoning
            if text.startswith(mark):
                self._text, self._state = text[len(mark) :], "reasoning"
                return True
            if mark.startswith(text) or direct.startswith(text):
                if not is_end:
                    return False
                if direct and ">" in text:  # the answer ends within a mark of several tokens
                    self._text = ""
                    return False
            if direct:
                self._text = text = text.removeprefix(direct)
        if style.format is not None and not style.format.begin:
            behind = text.removeprefix(PYTHON_TAG).lstrip()
            if behind.startswith("{"):
                self._text, self._state = behind, "calls"
                return True
            if not is_end and (not behind or PYTHON_TAG.startswith(text)):
                return False
        self._state = "content"
        return True

    def _reason(self, parts: list[Part], is_end: bool) -> bool:
        assert self._style.reasoning is not None
        _, mark, direct = self._style.reasoning
        text = self._text if self._has_reasoned else self._text.lstrip("\n")
        before, found, behind = text.partition(mark)
        if found:
            before = before.removesuffix("\n")
            self._state, self._style, self._is_stripped = "start", self._style._replace(reasoning=None), True
        else:
            before, behind = _without_beginning(before, (mark, f"\n{mark}"))
            if is_end:
                is_cut = direct and ">" in behind  # within a mark of several tokens
                before, behind = before if is_cut else before + behind, ""
        parts.append(Part("reasoning", before))
        self._text, self._has_reasoned = behind, self._has_reasoned or bool(before)
        return bool(found)

    def _read_content(self, parts: list[Part], is_end: bool) -> bool:
        if self._call_mark and (place := self._text.find(self._call_mark)) >= 0:
            parts.append(Part("content", self._text[:place]))
            self._text, self._state = self._text[place:], "calls"
            return True
        before, self._text = (self._text, "") if is_end else _without_beginning(self._text, (self._call_mark,))
        parts.append(Part("content", before))
        return False

    def _between_calls(self, parts: list[Part], is_end: bool) -> bool:
        form, text = self._style.format, self._text
        assert form is not None
        for mark in (form.begin, form.end):
            if mark and text.startswith(mark):
                return self._skip(len(mark))
            if mark and not is_end and mark.startswith(text):
                return False
        if text[0].isspace() or text[0] in "[],;":
            return self._skip(1)
        if form.behind_name:
            name, found, behind = text.partition(form.behind_name)
            if not found and not is_end:
                return False
            if found:
                self._skipped.append(f"{name}{form.behind_name}")
                self._text, self._call, self._state = behind, _Call(name.strip()), "call"
                return True
        elif text[0] == "{":
            self._call, self._state = _Call(), "call"
            return True
        self._to_content(parts)
        return True

    def _skip(self, count: int) -> bool:
        self._skipped.append(self._text[:count])
        self._text = self._text[count:]
        return True

    def _to_content(self, parts: list[Part]) -> None:
        """Continues with content. A mark that no call follows is content, too."""
        skipped = "".join(self._skipped)
        parts.append(Part("content", skipped if self._call_mark in skipped else ""))
        self._state, self._skipped = "content", []

    def _read_call(self, parts: list[Part], is_end: bool) -> bool:
        call, is_told = self._call, self._call.is_told
        self._skip(call.add(self._text))
        is_no_call = call.name is None and (call.is_done or call.is_broken or is_end)
        if not is_told and (is_no_call or (call.name is not None and call.name not in self._style.names)):
            self._to_content(parts)  # a text that only looks like a call
            return bool(self._text)
        if call.name is not None:
            if not is_told:
                call.is_told = True
                parts.append(Part("name", call.name, self.num_calls))
                self.num_calls += 1
            parts.append(Part("arguments", call.take(), self.num_calls - 1))
        if call.is_done or call.is_broken:
            self._state, self._skipped = "calls" if call.is_done else "content", []
            return bool(self._text)
        return False


def call_deltas(parts: Sequence[Part], style: AnswerStyle) -> list[dict[str, Any]]:
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


def calls_of(parts: Sequence[Part], style: AnswerStyle) -> list[dict[str, Any]]:
    """Returns the calls of a whole answer."""
    return [{name: value for name, value in one.items() if name != "index"} for one in call_deltas(parts, style)]


def _without_beginning(text: str, marks: Collection[str]) -> tuple[str, str]:
    """Divides a text before an end that may be the beginning of a mark."""
    most = max(map(len, marks)) - 1
    for size in range(most, 0, -1):
        if any(mark.startswith(text[-size:]) for mark in marks):
            return text[:-size], text[-size:]
    return text, ""


class _Call:
    """Reads a call character by character: an object, or the arguments alone if the name is given.

    Attributes:
        name: the name of the tool; None: it has not come yet.
        is_done: whether the call is complete.
        is_broken: whether the text is no call.
        is_told: for the caller: whether it has told the name.
    """

    def __init__(self, name: str | None = None) -> None:
        self.name, self.is_done, self.is_broken, self.is_told = name, False, False, False
        self._is_bare = name is not None
        self._reads = self._open if name is None else self._value
        self._key = "arguments"
        self._text: list[str] = []  # the characters of a name or a value
        self._depth, self._in_string, self._is_escaped = 0, False, False
        self._arguments: list[str] = []
        self._has_arguments = False

    def take(self) -> str:
        """Returns the text of the arguments since the last call; at the end of a call without any, an empty object."""
        if self.is_done and not self._has_arguments:
            self._has_arguments = True
            return "{}"
        text, self._arguments = "".join(self._arguments), []
        return text

    def add(self, text: str) -> int:
        """Reads characters up to the end of the call, and returns their number."""
        for place, character in enumerate(text):
            if self.is_done:
                return place
            self._reads(character)
            if self.is_broken:
                return place
        return len(text)

    def _open(self, character: str) -> None:
        self._reads, self.is_broken = self._between, character != "{"

    def _between(self, character: str) -> None:
        if character == "}":
            self.is_done = True
        elif character == '"':
            self._reads, self._text, self._in_string, self._is_escaped = self._name, ['"'], True, False
        elif character not in " \t\r\n,":
            self.is_broken = True

    def _name(self, character: str) -> None:
        self._text.append(character)
        if self._ends_string(character):
            self._key, self._reads = str(self._parsed()), self._colon

    def _colon(self, character: str) -> None:
        if character == ":":
            self._reads, self._text, self._depth = self._value, [], 0
        elif not character.isspace():
            self.is_broken = True

    def _value(self, character: str) -> None:
        if not self._text and character.isspace():
            return
        if self._in_string:
            self._keep(character)
            if self._ends_string(character) and not self._depth:
                self._close()
        elif character in "}]," and not self._depth:  # behind a number, or a word such as null
            self._close()
            self.is_done = self.is_done or character == "}"
            self.is_broken = self.is_broken or character == "]" or self._is_bare
        else:
            self._keep(character)
            self._in_string = character == '"'
            self._depth += (character in "{[") - (character in "}]")
            if character in "}]" and not self._depth:
                self._close()

    def _ends_string(self, character: str) -> bool:
        if self._is_escaped:
            self._is_escaped = False
        elif character == "\\":
            self._is_escaped = True
        elif character == '"':
            self._in_string = False
        return not self._in_string

    def _keep(self, character: str) -> None:
        self._text.append(character)
        if self._key in _ARGUMENTS and self._text[0] != '"':
            self._arguments.append(character)
            self._has_arguments = True

    def _close(self) -> None:
        """Ends a value."""
        if self._key == "name" and not self._is_bare:
            name = self._parsed()
            self.name, self.is_broken = str(name), self.is_broken or not isinstance(name, str)
        elif self._key in _ARGUMENTS and self._text[:1] == ['"']:  # some models write their JSON as a string
            self._arguments, self._has_arguments = [str(self._parsed())], True
        self._reads = self._between
        self.is_done = self._is_bare

    def _parsed(self) -> Any:
        try:
            return json.loads("".join(self._text))
        except ValueError:
            self.is_broken = True
            return ""
