"""What an answer of a chat consists of: reasoning, content, and calls of tools.

`parser_of` returns what divides an answer, as it grows, by the marks that its model writes; see `AnswerStyle`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from fastformer.generation.bare_calls import CALL, BareCall
from fastformer.generation.call_reader import CallReader
from fastformer.generation.python_calls import PythonCall
from fastformer.generation.streaming import Marked
from fastformer.generation.tagged_calls import TaggedCall
from fastformer.generation.tool_formats import CHANNEL_MARKS, PYTHON_TAG, Reasoning, ToolFormat

_ARGUMENTS = ("arguments", "parameters")
_ENDS = ("<|end|>", "<|call|>", "<|start|>", "<|channel|>")
_TAIL = 16  # the last tokens of a prompt, among which the mark of reasoning is
_END = re.compile("|".join(map(re.escape, _ENDS)))
_CHANNEL, _RECIPIENT = re.compile(r"<\|channel\|>\s*(\w+)"), re.compile(r"\bto=functions\.([^\s<]+)")


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
        schemas: the schemas of the tools' arguments, by the names of the tools.
        reasoning: the marks of reasoning; None: there is none.
        is_open: whether the prompt ends with the first of these marks.
        is_forced: whether the answer is only calls, of which the prompt has the prefix.
        prefix: what the prompt ends with, if the answer continues a call.
        is_parallel: whether several calls count; if not, those behind the first one are omitted.
    """

    format: ToolFormat | None = None
    schemas: Mapping[str, Any] = {}  # noqa: RUF012  # never changed
    reasoning: Reasoning | None = None
    is_open: bool = False
    is_forced: bool = False
    prefix: str = ""
    is_parallel: bool = True

    @property
    def marks(self) -> tuple[str, ...]:
        """The marks that the text of an answer has to show."""
        if self.has_channels:
            return CHANNEL_MARKS
        tag = () if self.format is None or self.format.begin else (PYTHON_TAG,)
        return (*(() if self.format is None else self.format.marks), *tag, *(self.reasoning or ()))

    @property
    def has_channels(self) -> bool:
        """Whether an answer is a sequence of messages to channels."""
        return bool(self.reasoning and self.reasoning.direct) or bool(self.format and self.format.has_channels)


class AnswerParser:
    """Divides the text of an answer, which comes in pieces, into its parts.

    Attributes:
        num_calls: the number of calls so far.
        unfinished: the text of a call whose end has not come; "": there is none.
    """

    def __init__(self, style: AnswerStyle) -> None:
        self._style, self._text = style, ""
        self._state: Literal["start", "reasoning", "content", "calls", "call"] = "start"
        self._call: CallReader = JsonCall()
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
            mark = style.reasoning.begin
            if text.startswith(mark):
                self._text, self._state = text[len(mark) :], "reasoning"
                return True
            if mark.startswith(text) and not is_end:
                return False
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
        mark = self._style.reasoning.end
        text = self._text if self._has_reasoned else self._text.lstrip("\n")
        before, found, behind = text.partition(mark)
        if found:
            before = before.removesuffix("\n")
            self._state, self._style, self._is_stripped = "start", self._style._replace(reasoning=None), True
        else:
            before, behind = _without_beginning(before, (mark, f"\n{mark}"))
            if is_end:
                before, behind = before + behind, ""
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
        for mark in (form.begin, form.end, form.inner[0], form.inner[1].lstrip()):
            if mark and text.startswith(mark):
                return self._skip(len(mark))
            if mark and mark.startswith(text):
                if is_end and self.num_calls:  # the answer ends within a mark behind a call
                    return self._skip(len(text))
                if not is_end:
                    return False
        if text[0].isspace() or text[0] in "[],;":
            return self._skip(1)
        if form.behind_name:
            name, found, behind = text.partition(form.behind_name)
            if not found and not is_end:
                return False
            if found:
                self._skipped.append(f"{name}{form.behind_name}")
                self._text, self._call, self._state = behind, JsonCall(name.strip()), "call"
                return True
        elif (call := self._call_in(form, is_end)) is not None:
            if call is not _LATER:
                self._call, self._state = call, "call"
            return call is not _LATER
        self._to_content(parts)
        return True

    def _call_in(self, form: ToolFormat, is_end: bool) -> CallReader | None:
        """Returns what reads the call that the text begins with: None if it's none, `_LATER` if that isn't certain."""
        begin, text = {"json": "{", "tags": form.tags.name, "bare": CALL, "python": ""}[form.syntax], self._text
        if not begin:  # a name; only a mark or a comma says that it belongs to a call
            before = "".join(self._skipped).rstrip()
            is_begun = before.endswith((form.begin, ",", "[") if form.syntax == "python" else form.begin)
        else:
            is_begun = text.startswith(begin)
        if is_begun:
            if form.syntax == "tags":
                return TaggedCall(self._style.schemas, form.tags)
            is_json = form.syntax == "json" or text.startswith("{")
            return JsonCall() if is_json else BareCall() if form.syntax == "bare" else PythonCall()
        return _LATER if begin.startswith(text) and not is_end else None

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
        call = self._call
        if call.name is None:
            self._skip(call.add(self._text[:1]))  # not more: behind the name of no tool is content
        is_no_call = call.name is None and (call.is_done or call.is_broken or (is_end and not self._text))
        if not call.is_told and (is_no_call or (call.name is not None and call.name not in self._style.schemas)):
            self._to_content(parts)  # a text that only looks like a call
            return bool(self._text)
        if call.name is None:
            return bool(self._text)
        if not call.is_told:
            call.is_told = True
            parts.append(Part("name", call.name, self.num_calls))
            self.num_calls += 1
        self._skip(call.add(self._text))
        parts.append(Part("arguments", call.take(), self.num_calls - 1))
        if call.is_done or call.is_broken:
            self._state, self._skipped = "calls" if call.is_done else "content", []
            return bool(self._text)
        return False


class ChannelParser:
    """Divides an answer of gpt-oss, which has the attributes and methods of `AnswerParser`.

    The answer is a sequence of messages, each with a header: `<|channel|>analysis<|message|>` begins reasoning,
    `<|channel|>final<|message|>` content, and a header with `to=functions.NAME` a call, whose arguments follow. In the
    channel commentary, the model tells the user what it is about to call. Messages of a kind are a blank line apart.
    """

    def __init__(self, style: AnswerStyle) -> None:
        self._style, self._text, self._is_header = style, style.prefix, True
        self._kind: Literal["reasoning", "content", "call"] = "content"
        self._told = set[str]()  # the kinds of the texts so far
        self._gap = ""  # what is told before the next text
        self._call, self._message = JsonCall(""), ""
        self.num_calls = 0

    @property
    def unfinished(self) -> str:
        is_open = not self._is_header and self._kind == "call" and not self._call.is_done
        return self._message if is_open else ""

    def add(self, text: str, *, is_end: bool = False) -> list[Part]:
        """Returns the parts that have become certain with a piece of the text."""
        self._text += text
        parts: list[Part] = []
        while self._read_header(parts, is_end) if self._is_header else self._read_body(parts, is_end):
            pass
        kept = [part for part in parts if part.text or part.kind == "name"]
        return [part for part in kept if self._style.is_parallel or not part.call]

    def _read_header(self, parts: list[Part], is_end: bool) -> bool:
        text = self._text
        begins = ("<|start|>", "<|channel|>", "<|message|>", " to=")
        is_none = text and not any(one.startswith(text[: len(one)]) for one in begins)
        if is_none or (is_end and text and "<|" not in text and begins[-1] not in text):
            self._is_header = False  # a text without any
            return True
        header, found, behind = text.partition("<|message|>")
        if not found:
            if is_end:  # the answer ends within a header
                self._text = ""
            return False
        self._is_header, self._text, self._message = False, behind, header + found
        channel, function = _CHANNEL.search(header), _RECIPIENT.search(header)
        self._kind = "reasoning" if channel is not None and channel[1] == "analysis" else "content"
        self._gap = "\n\n" if self._kind in self._told else ""
        if function is not None and function[1] in self._style.schemas:
            self._kind, self._call = "call", JsonCall(function[1])
            parts.append(Part("name", function[1], self.num_calls))
            self.num_calls += 1
        elif function is not None:  # no tool of this request: a text, as it is for other formats
            self._tell(parts, f"{function[0]} ")
        return True

    def _read_body(self, parts: list[Part], is_end: bool) -> bool:
        if end := _END.search(self._text):
            body, self._text = self._text[: end.start()], self._text[end.start() :].removeprefix("<|call|>")
            self._text = self._text.removeprefix("<|end|>")
        elif is_end:
            body, self._text = self._text, ""
        else:
            body, self._text = _without_beginning(self._text, (*_ENDS, *(f"\n{end}" for end in _ENDS)))
        if self._kind == "call":
            body = self._read_call(parts, body, is_end=end is not None)
        self._tell(parts, body.removesuffix("\n") if end else body)
        self._is_header = end is not None
        return end is not None

    def _read_call(self, parts: list[Part], body: str, *, is_end: bool) -> str:
        """Reads arguments, and returns the content behind them."""
        call, place = self._call, self.num_calls - 1
        count = call.add(body)
        self._message += body[:count]
        if is_end and not call.is_broken:
            call.end()
        parts.append(Part("arguments", call.take(), place))
        if rest := body[count:].lstrip():
            self._kind = "content"
        return rest

    def _tell(self, parts: list[Part], text: str) -> None:
        if text:
            assert self._kind != "call"
            parts += [Part(self._kind, self._gap), Part(self._kind, text)]
            self._told.add(self._kind)
            self._gap = ""


def style_behind(
    prompt: Sequence[int], tokenizer: Any, reasoning: Reasoning | None, *, is_constrained: bool = False
) -> tuple[AnswerStyle, str]:
    """Returns the style of an answer without tools, and the text that it has to begin with: what ends reasoning.

    Args:
        prompt: the ids of the prompt, behind the last id that ends a turn.
        tokenizer: the model's.
        reasoning: the marks of its reasoning; None: it has none.
        is_constrained: whether the answer is under a constraint, which reasoning would break.
    """
    if reasoning is None:
        return AnswerStyle(), ""
    tail = Marked.of(tokenizer, reasoning).decode(prompt[-_TAIL:])
    # The mark may end with a line end, like the text behind another one.
    is_open = str(tail).rstrip().endswith(reasoning.begin.rstrip())
    if not is_constrained:
        return AnswerStyle(reasoning=reasoning, is_open=is_open), ""
    return AnswerStyle(), f"{reasoning.end}\n\n" if is_open else reasoning.direct


def parser_of(style: AnswerStyle) -> AnswerParser | ChannelParser:
    """Returns what divides an answer of a style."""
    return ChannelParser(style) if style.has_channels else AnswerParser(style)


def _without_beginning(text: str, marks: Collection[str]) -> tuple[str, str]:
    """Divides a text before an end that may be the beginning of a mark."""
    most = max(map(len, marks)) - 1
    for size in range(most, 0, -1):
        if any(mark.startswith(text[-size:]) for mark in marks):
            return text[:-size], text[-size:]
    return text, ""


class JsonCall(CallReader):
    """Reads a call: an object, or the arguments alone if the name is given."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self._is_bare = name is not None
        self._reads = self._open if name is None else self._value
        self._key = "arguments"
        self._text: list[str] = []  # the characters of a name or a value
        self._depth, self._in_string, self._is_escaped = 0, False, False
        self._has_arguments = False

    def take(self) -> str:
        """Returns the text of the arguments since the last call; at the end of a call without any, an empty object."""
        if self.is_done and not self._has_arguments:
            self._has_arguments = True
            return "{}"
        return super().take()

    def end(self) -> None:
        """Ends arguments that stand alone, where the model has ended its message."""
        self.is_done = self.is_done or not (self._depth or self._in_string)

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


_LATER = JsonCall()
