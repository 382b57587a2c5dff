"""Tests what divides an answer into reasoning, content and calls of tools, without any model."""

from __future__ import annotations

import itertools
import json
import random

import pytest

from fastformer.generation.answers import AnswerStyle, Part, parser_of
from fastformer.generation.tool_formats import FORMATS, Reasoning, reasoning_of
from fastformer.serving.tools import calls_of
from tests.covering import each
from tests.generation.tool_calls import EXPECTED, SAID, SCHEMAS

JSON = [name for name in SAID if FORMATS[name].syntax == "json"]
OBJECTS = [
    name for name in JSON if not FORMATS[name].has_channels and not FORMATS[name].inner[0]
]  # with the name and the arguments of a call


@pytest.fixture(params=SAID)
def family(request) -> str:
    return request.param


ARGUMENTS = [
    "{}", "{ }", '{"": 1}', '{"": ""}', '{"a": ""}', '{"\\"": "}"}', '{"a": "\\\\"}', '{"a\\\\": "\\\\\\"}{"}',
    '{"a": [1, {"b": "]"}], "c": "{"}', '{ "a" : [ ] , "b" : { } }', '{"name": "x", "arguments": {"name": 1}}',
    '{"a": -1.5e-3, "b": null, "c": true}', '{"é": "\\u00e9\\n"}', '{"parameters": "[TOOL_CALLS"}',
]  # fmt: skip


@pytest.mark.parametrize("family", JSON, indirect=True)
@each("arguments", ARGUMENTS)
def test_arguments_are_told_as_the_model_writes_them(arguments, family) -> None:
    style = AnswerStyle(FORMATS[family], SCHEMAS)
    parser = parser_of(style)
    parts = [*parser.add(SAID[family].replace(EXPECTED[0][1], arguments)), *parser.add("", is_end=True)]
    calls = [call["function"] for call in calls_of(parts, style)]
    assert calls == [{"name": "clock", "arguments": arguments}, {"name": "weather", "arguments": "{}"}]


@pytest.mark.parametrize("family", [name for name in OBJECTS if not FORMATS[name].behind_name], indirect=True)
@pytest.mark.parametrize("arguments", ['{"zone": "UTC"}', "{}", '{"a": "\\"\\\\"}', "not JSON"])
def test_arguments_that_are_a_text_are_told_as_what_it_says(arguments, family) -> None:
    style = AnswerStyle(FORMATS[family], SCHEMAS)
    parser = parser_of(style)
    parts = [*parser.add(SAID[family].replace(EXPECTED[0][1], json.dumps(arguments))), *parser.add("", is_end=True)]
    [call, _] = [call["function"] for call in calls_of(parts, style)]
    assert call == {"name": "clock", "arguments": arguments}


@each("arguments", ["5", "null", "{}", '"a"', "[1]"])
def test_text_behind_arguments_without_an_object_around_them_stays(arguments) -> None:
    parser = parser_of(AnswerStyle(FORMATS["mistral 11"], SCHEMAS))
    parts = [*parser.add(f"[TOOL_CALLS]clock[ARGS]{arguments}}} x"), *parser.add("", is_end=True)]
    assert "".join(part.text for part in parts if part.kind == "content") == "} x"


@pytest.mark.parametrize("family", OBJECTS, indirect=True)
@pytest.mark.parametrize(("letter", "place"), [*itertools.product("x=]", (0, 1, 2, 3, 5, 6, 7)), ("]", 4)])
def test_what_breaks_a_call_is_told_from_there_on(place, letter, family) -> None:
    pieces = (
        "{",
        '"name"',
        ': "clock"',
        ', "id"',
        ": 3",
        ", ",
        '"arguments"',
        ': {"zone": "U"}',
        "}</tool_call> and more",
    )
    before, behind = "".join(pieces[: place + 1]), "".join(pieces[place + 1 :])
    parser = parser_of(AnswerStyle(FORMATS[family], SCHEMAS))
    mark = SAID[family][: SAID[family].index("{")] if family != "mistral 11" else "[TOOL_CALLS]"
    parts = [*parser.add(f"{mark}{before}{letter}{behind}"), *parser.add("", is_end=True)]
    assert "".join(part.text for part in parts if part.kind == "content").endswith(letter + behind)
    assert [part.text for part in parts if part.kind == "name"] == ["clock"] * (place >= 2 and family != "mistral 11")


@pytest.mark.parametrize("kind", SAID)
def test_a_call_that_has_not_ended_is_the_text_from_its_mark_on(kind) -> None:
    said = SAID[kind]
    first, last = {
        "tags": ("<parameter=zone", "T\n<"),
        "seed": ("<parameter=zone", "T</"),
        "glm 4.5": ("<arg_key>zone", "T</"),
        "glm 4.7": ("<arg_key>zone", "T</"),
        "lfm 2": ("zone=", "T')"),
        "gemma 4": ("{zone", '<|"|>}'),
    }.get(kind, ('{"zone"', 'T"}'))
    for end in range(said.index(first) + 1, said.index(last)):
        parser = parser_of(AnswerStyle(FORMATS[kind], SCHEMAS))
        parts = [*parser.add(said[:end]), *parser.add("", is_end=True)]
        content = "".join(part.text for part in parts if part.kind == "content")
        told = said[:end].removeprefix("<|python_tag|>")
        if kind == "gpt-oss":  # the text in front of the call is a message
            told = told.removeprefix("<|channel|>commentary<|message|>").replace("\n<|end|>", "", 1)
        assert parser.unfinished and content + parser.unfinished == told


@pytest.mark.parametrize("kind", [kind for kind in SAID if FORMATS[kind].begin and not FORMATS[kind].has_channels])
def test_a_mark_that_the_end_has_cut_behind_a_call_is_no_content(kind) -> None:
    form = FORMATS[kind]
    for mark in filter(None, (form.begin, form.end)):
        for size in range(len(mark)):
            parser = parser_of(AnswerStyle(form, SCHEMAS))
            parts = [*parser.add(f"{SAID[kind]}\n{mark[:size]}"), *parser.add("", is_end=True)]
            content = [part.text for part in parts if part.kind == "content"]
            assert "".join(content).strip() == SAID[kind][: SAID[kind].index(form.begin)].strip()
            assert len(calls_of(parts, AnswerStyle(form, SCHEMAS))) == 2 and not parser.unfinished


@pytest.mark.parametrize("kind", ["glm 4.5", "glm 4.7", "lfm 2"])
def test_only_behind_a_mark_a_name_begins_a_call(kind) -> None:
    style, more = AnswerStyle(FORMATS[kind], SCHEMAS), "clock\n<arg_key> clock()"
    parser = parser_of(style)
    parts = [*parser.add(f"{SAID[kind]}{more}"), *parser.add("", is_end=True)]
    assert "".join(part.text for part in parts if part.kind == "content").endswith(more)
    assert len(calls_of(parts, style)) == 2


PIECES = {
    **SAID,
    "no call": "plain <tool text < [TOOL </think> and {",
    "another tool": '<tool_call>\n{"name": "nope", "arguments": {}}\n</tool_call> bye',
    "no json": "<tool_call>\nnot json [TOOL_CALLS] no",
    "cut": '<tool_call>\n{"name": "clock", "arguments": {"zone": "U',
    "a person": '{"name": "Bob", "age": 3} is an object',
    "an object": '{"zone": {"a": [1, "}"]}}',
    "a string": '{"name": "clock", "arguments": "{\\"zone\\": 1}"}',
    "arguments first": '{"arguments": {"a": null}, "id": 3, "name": "clock"}',
    "no arguments": '{"name": "clock"} and more',
    "broken": '{"name": "clock", "arguments": {"a": 1}, oops',
    "no colon": '{"name" = "clock", "arguments": {}}',
    "no string": '{"name": "cl\\ock", "arguments": {}}',
    "a number as name": '{"name": 3, "arguments": {}}',
    "thoughts": "<think>one\n\n</think>\n\n\n two</think>",
    "only thoughts": "<think>\none </thin",
    "marks alone": "[TOOL_CALLS]",
    "arguments of no tool": "[TOOL_CALLS]nope[ARGS][TOOL_CALLS]clock[ARGS]{}",
    "line ends of messages": "<|channel|>final<|message|>one\n<|channel|>analysis<|message|>two\n\n<|start|>",
    "text behind arguments": "<|channel|>commentary to=functions.clock<|message|>{}\n one\n<|call|>",
}


@each("text", PIECES.values())
def test_an_answer_in_pieces_is_the_answer_as_a_whole(text, family) -> None:
    style = AnswerStyle(FORMATS[family], SCHEMAS, Reasoning("<think>", "</think>"))

    def parsed(pieces: list[str]) -> tuple[list[Part], str]:
        parser, parts = parser_of(style), list[Part]()
        for part in [*(part for piece in pieces for part in parser.add(piece)), *parser.add("", is_end=True)]:
            if parts and part.kind != "name" and (part.kind, part.call) == (parts[-1].kind, parts[-1].call):
                parts[-1] = part._replace(text=parts[-1].text + part.text)
            else:
                parts.append(part)
        return parts, parser.unfinished

    whole, draw = parsed([text]), random.Random(0)
    assert parsed([*text]) == whole
    for _ in range(10):
        cuts = sorted(draw.sample(range(len(text) + 1), 5))
        assert parsed([text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]) == whole
    if not [part for part in whole[0] if part.kind in ("name", "reasoning")]:
        assert "".join(part.text for part in whole[0]) == text  # what is no call is content, and nothing is lost


def test_reasoning_marks_come_from_the_template() -> None:
    assert reasoning_of("{% if x %}</think>{% endif %}") == ("<think>", "</think>", "")
    assert reasoning_of("{% set end = '</seed:think>' %}") == ("<seed:think>", "</seed:think>", "")
    assert reasoning_of("[THINK]{{ m }}[/THINK]") == ("[THINK]", "[/THINK]", "") and reasoning_of("think") is None
    assert reasoning_of("{{ '<|channel>thought\n<channel|>' }}") == ("<|channel>thought\n", "<channel|>", "")
