"""The formats in which the models of several families write calls of tools, and the grammars of these calls.

A format is recognised by what the chat template writes.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from fastformer.generation import bare_calls, python_calls, tagged_calls
from fastformer.generation.constraints import WHITE_SPACE
from fastformer.generation.tagged_calls import Tags


class ToolFormat(NamedTuple):
    """The way in which a family of models writes calls of tools.

    Attributes:
        signs: texts that a chat template of the family has, all of them.
        begin, end: the marks around a call, or around a list of calls; "": none.
        arguments: the name of a call's arguments.
        is_list: whether calls are a JSON list.
        behind_name: the mark between the name of a tool and its arguments, if a call is no object; "": it is one.
        id_length: the number of characters in the id of a call, if the template requires one; 0: any number.
        syntax: "json", or that of calls whose arguments are tags (`tagged_calls`), have bare keys (`bare_calls`) or are
            Python's (`python_calls`).
        tags: the tags of the syntax "tags".
        inner: the marks around each call, where `begin` and `end` are around all of them.
        has_channels: whether calls are messages to a channel; see `answers.ChannelParser`.
    """

    signs: tuple[str, ...]
    begin: str = ""
    end: str = ""
    arguments: str = "arguments"
    is_list: bool = False
    behind_name: str = ""
    id_length: int = 0
    syntax: Literal["json", "tags", "bare", "python"] = "json"
    tags: Tags = Tags()
    inner: tuple[str, str] = ("", "")
    has_channels: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """The marks of the format, which may be special tokens."""
        if self.has_channels:
            return CHANNEL_MARKS
        quote = bare_calls.QUOTE if self.syntax == "bare" else ""
        return tuple(mark for mark in (self.begin, self.end, self.behind_name, quote, *self.inner) if mark)

    def prefix(self, names: Sequence[str]) -> str:
        """Returns the text that an answer begins with if it has to call one of some tools."""
        one = f"{self.inner[0]}{names[0]}{self.behind_name}" if self.behind_name and len(names) == 1 else ""
        return f"{self.begin}{one}"

    def grammar(
        self,
        schemas: Mapping[str, Any],
        special: Mapping[str, int],
        *,
        is_parallel: bool,
        answer: Mapping[str, Any] | None = None,
        is_begun: bool = False,
    ) -> str:
        """Returns the grammar, in Lark's syntax, of an answer behind `prefix`; or of a whole one, if it may be no call.

        Args:
            schemas: the schema of each tool's arguments, by its name.
            special: the ids of marks that are special tokens.
            is_parallel: whether there may be several calls.
            answer: the schema of an answer that calls no tool; None: every answer is a call.
            is_begun: whether the grammar is of one call, or of one list of calls, which the model has begun by itself;
                see `begins`. Line ends are optional then.
        """
        rules = []
        has_name = is_begun or answer is not None or len(schemas) > 1
        behind_name = _marked(self.behind_name, special)
        if is_begun and self.has_channels:  # a model writes one of these
            told = _marked("<|channel|>commentary json<|message|>", special)
            behind_name = f"({behind_name} | {_marked('<|message|>', special)} | {told})"
        for place, (name, schema) in enumerate(schemas.items()):
            if self.syntax == "tags":
                rules += tagged_calls.argument_rules(schema, place, self.tags)
            elif self.syntax == "bare":
                rules += bare_calls.argument_rules(schema, place, functools.partial(_marked, special=special))
            elif self.syntax == "python":
                rules += python_calls.argument_rules(schema, place)
            else:
                rules.append(f"args_{place}: {_json({'type': 'object', **schema})}")
            if self.behind_name:
                before = [_quoted(f"{self.inner[0]}{name}"), behind_name] if has_name else []
                rules.append(f"call_{place}: {' '.join([*before, f'args_{place}'])}")
            elif self.syntax == "bare":
                rules.append(f"call_{place}: {_quoted(f'{bare_calls.CALL}{name}')} args_{place}")
            elif self.syntax == "tags":
                rules.append(f"call_{place}: {_quoted(self.tags.head(name))} args_{place} {_quoted(self.tags.end)}")
            elif self.syntax == "python":
                rules.append(f'call_{place}: {_quoted(f"{name}(")} args_{place} ")"')
            else:
                rules.append(f'call_{place}: {_quoted(self._head(name))} args_{place} "}}"')
        call = f"call: {' | '.join(f'call_{place}' for place in range(len(schemas)))}"
        if self.is_list:
            start = 'start: " "? "[" call (", " call)* "]"' if is_parallel else 'start: " "? "[" call "]"'
        elif self.syntax == "bare":
            around = f"call {_marked(self.end, special)}"
            is_one = is_begun or not is_parallel
            start = f"start: {around}" + ("" if is_one else f" ({_marked(self.begin, special)} {around})*")
        elif self.inner[0]:
            # The name of the only tool belongs to the prefix, so that its first call has none.
            end, inner_end = _marked(self.end, special), _quoted(self.inner[1])
            line = '"\\n"' + ("?" if is_begun else "")
            again = self._again(schemas, behind_name, has_name, line, inner_end) if is_parallel else ""
            start = f"start: {line if is_begun else ''} call {inner_end} {again} {line if is_begun else ''} {end}"
        elif self.syntax == "tags" and self.tags.end == self.end:
            line = '"\\n"' + ("?" if is_begun else "")
            again = f"({line} {_marked(self.begin, special)} call)*" if is_parallel and not is_begun else ""
            start = f"start: call {again}"
        elif self.begin and not self.behind_name:
            around = f'"\\n" call {_quoted(chr(10) + self.end)}'
            if is_begun:
                around = f'"\\n"? call "\\n"? {_marked(self.end, special)}'
            again = f"({_quoted(chr(10) + self.begin)} {around})*" if is_parallel and not is_begun else ""
            start = f"start: {around} {again}"
        else:
            start = "start: call"
        if answer is not None:
            calls = start.replace("start", "calls", 1)
            start = f"start: answer | {_marked(self.begin, special)} calls\nanswer: {_json(answer)}\n{calls}"
        return "\n".join(["%llguidance {}", start, call, *rules])

    def begins(self, names: Collection[str]) -> dict[str, str]:
        """Returns the texts by which a model begins a call, and the part of each that belongs to the grammar.

        A format without a mark has the beginning of each tool's call, up to its arguments.
        """
        if self.has_channels:
            return {self.begin: "", "<|start|>assistant to=functions.": ""}
        if self.begin:
            return {self.begin: ""}
        return {f"{tag}{self._head(name)}": self._head(name) for name in names for tag in ("", PYTHON_TAG)}

    def _again(self, schemas: Mapping[str, Any], behind_name: str, has_name: bool, line: str, inner_end: str) -> str:
        """Returns the rule of further calls between inner marks, each with the name of its tool."""
        if has_name:
            return f"({line} call {inner_end})*"
        begin = _quoted(f"{self.inner[0]}{next(iter(schemas))}")
        return f"({line} {begin} {behind_name} call {inner_end})*"

    def _head(self, name: str) -> str:
        """Returns the text of a call that is an object, up to its arguments."""
        return f'{{"name": {json.dumps(name)}, {json.dumps(self.arguments)}: '


CHANNEL_MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>")
_GLM = Tags("", "", "<arg_key>", ("</arg_key>", "<arg_value>"), "</arg_value>", "</tool_call>", around="")
# The first format whose signs a template has.
FORMATS = {
    "gpt-oss": ToolFormat(
        ("<|channel|>commentary",), "<|channel|>commentary to=functions.",
        behind_name=" <|constrain|>json<|message|>", has_channels=True,
    ),
    "tags": ToolFormat(("<tool_call>", "<function=", "<parameter="), "<tool_call>", "</tool_call>", syntax="tags"),
    "seed": ToolFormat(
        ("<seed:tool_call>", "<function=", "<parameter="), "<seed:tool_call>", "</seed:tool_call>", syntax="tags",
        tags=Tags(around=""),
    ),
    "glm 4.7": ToolFormat(
        ("<tool_call>", "<arg_key>", "</arg_key><arg_value>"), "<tool_call>", "</tool_call>", syntax="tags",
        tags=_GLM._replace(line=""),
    ),
    "glm 4.5": ToolFormat(
        ("<tool_call>", "<arg_key>", "<arg_value>"), "<tool_call>", "</tool_call>", syntax="tags", tags=_GLM,
    ),
    "hunyuan": ToolFormat(
        ("<tool_calls>", "<tool_call>", "```json"), "<tool_calls>", "</tool_calls>", behind_name="\n```json\n",
        inner=("<tool_call>", "\n```</tool_call>"),
    ),
    "hunyuan list": ToolFormat(("<tool_calls>[{",), "<tool_calls>", "</tool_calls>", is_list=True),
    "gemma 4": ToolFormat(("<|tool_call>call:",), "<|tool_call>", "<tool_call|>", syntax="bare"),
    "mistral 11": ToolFormat(("[TOOL_CALLS]", "[ARGS]"), "[TOOL_CALLS]", behind_name="[ARGS]", id_length=9),
    "mistral": ToolFormat(("[TOOL_CALLS]",), "[TOOL_CALLS]", is_list=True, id_length=9),
    "hermes": ToolFormat(("<tool_call>",), "<tool_call>", "</tool_call>"),  # Qwen 2.5 and 3, too
    "phi 4": ToolFormat(("<|tool_call|>",), "<|tool_call|>", "<|/tool_call|>", is_list=True),
    "llama 3": ToolFormat(("<|start_header_id|>",), arguments="parameters"),
    "lfm 2": ToolFormat(
        ("List of tools: ",), "<|tool_call_start|>", "<|tool_call_end|>", is_list=True, syntax="python",
    ),
    "json": ToolFormat(()),  # of a template that tells the model its tools in words, such as those for Gemma 3
}  # fmt: skip
# Marks of formats that aren't in the table. Text around them would be taken for content.
_UNKNOWN = (
    "<start_function_call>", "<function=", "<function name=", "<|START_ACTION|>", "<｜tool▁calls▁begin｜>", "｜DSML｜",
    "functools[", "<|channel|>", "<|tool_call:", "<|tool_calls_section_begin|>",
    "<|tool_call_start|>", "<|tools_prefix|>", "<tool_calls", ":tool_call>", "<TOOLCALL>",
    "<arg_key>", "invoke name=", ">>>", "<|role_sep|>", "<|open|>", '"tool_name": ',
)  # fmt: skip
PYTHON_TAG = "<|python_tag|>"  # Llama 3 may write it in front of a call


class Reasoning(NamedTuple):
    """The marks of a model's reasoning.

    Attributes:
        begin, end: the marks around it.
        direct: of a model whose answers are messages to channels (`answers.ChannelParser`): the beginning of the one
            that has the content; "": of other models.
    """

    begin: str
    end: str
    direct: str = ""


_FINAL = "<|channel|>final<|message|>"
REASONING = (
    Reasoning("<think>", "</think>"),
    Reasoning("<seed:think>", "</seed:think>"),
    Reasoning("[THINK]", "[/THINK]"),
    Reasoning("<|START_THINKING|>", "<|END_THINKING|>"),
    Reasoning("<|channel>thought\n", "<channel|>"),  # Gemma 4
    Reasoning("<|channel|>analysis<|message|>", "<|end|>", _FINAL),  # gpt-oss
)


def format_of(template: str) -> ToolFormat:
    """Returns the format in which a chat template writes calls.

    Raises:
        ValueError: the template doesn't read tools, or writes calls in a format that isn't known.
    """
    if not re.search(r"\btools\b", template):
        raise ValueError("expected no tools: the model's chat template doesn't read them")
    found = _found(template)
    own = "\0".join((*found.signs, *found.marks))
    if (mark := next((mark for mark in _UNKNOWN if mark in template and mark not in own), None)) is not None:
        raise ValueError(f"expected no tools: the model writes calls in a format that isn't supported, with {mark}")
    return found


def _found(template: str) -> ToolFormat:
    return next(one for one in FORMATS.values() if all(sign in template for sign in one.signs))


def unread_calls(template: str, calls: Sequence[Any]) -> tuple[str, str, str] | None:
    """Returns a message's calls as the model writes them, between their marks; None: the template reads them itself.

    The published templates of LFM2 don't: without this, the model would see results of calls that it never made.
    """
    if "tool_calls" in template or (form := _found(template)).syntax != "python":
        return None
    texts = []
    for function in (call["function"] for call in calls):
        arguments = (f"{key}={python_calls.written(value)}" for key, value in function["arguments"].items())
        texts.append(f"{function['name']}({', '.join(arguments)})")
    return form.begin, f"[{', '.join(texts)}]", form.end


def reasoning_of(template: str) -> Reasoning | None:
    """Returns the marks of the reasoning of a chat template's model, or None."""
    return next((marks for marks in REASONING if (marks.direct or marks.end) in template), None)


def _json(schema: Mapping[str, Any]) -> str:
    limited = {**schema, "x-guidance": {"whitespace_pattern": WHITE_SPACE}}
    return f"%json {json.dumps(limited, ensure_ascii=False)}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _marked(text: str, special: Mapping[str, int]) -> str:
    """Returns the rule of a text with marks, some of which are special tokens."""
    names = "|".join(map(re.escape, special))
    parts = re.split(f"({names})", text) if special else [text]
    return " ".join(f"<[{special[part]}]>" if part in special else _quoted(part) for part in parts if part)
