"""Tests calls as LFM2 writes them: what they mean as JSON, texts that a grammar allows, and those of earlier turns."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fastformer.generation.answers import AnswerStyle, Part, parser_of
from fastformer.generation.chat_template import ChatTemplate
from fastformer.generation.constraints import Constraint, Vocabulary
from fastformer.generation.tool_formats import FORMATS
from tests.covering import each
from tests.serving import models

FORM = FORMATS["lfm 2"]


def parts_of(text: str, pieces: int) -> list[Part]:
    parser = parser_of(AnswerStyle(FORM, {"f": {}}))
    cuts = [text[place : place + pieces] for place in range(0, len(text), pieces)]
    return [*(part for piece in cuts for part in parser.add(piece)), *parser.add("", is_end=True)]


@each("said, expected", [
    ("", {}), (" ", {}), ('a="x"', {"a": "x"}), ("a='x', b = 2 ,", {"a": "x", "b": 2}), ("a='\"),]'", {"a": '"),]'}),
    ("a=True, b=None, c=-1.5e3", {"a": True, "b": None, "c": -1500.0}), ("from=1", {"from": 1}),
    ("a=[1, 'x', {'k': (True, None)}]", {"a": [1, "x", {"k": [True, None]}]}), ("a={'k': [true, null, 'x']}", {
        "a": {"k": [True, None, "x"]}}),
    (r"a='it\'s \x41\n'", {"a": "it's A\n"}), ("a='x\ny'", {"a": "x\ny"}), ('a="\\ud83d\\ude00"', {"a": "\U0001f600"}),
    (r"a='\d+'", {"a": r"\d+"}), (r"a=['\ud83d\ude00']", {"a": ["\U0001f600"]}),
    ("a=word", {"a": "word"}), ("a=open('x')", {"a": "open('x')"}), ("a=(1e999, 2)", {"a": "(1e999, 2)"}), ("a=b'x'", {
        "a": "b'x'"}),
])  # fmt: skip
def test_arguments_are_told_as_json(said, expected) -> None:
    for pieces in (1, 3, 1000):
        parts = parts_of(f"<|tool_call_start|>[f({said})]<|tool_call_end|>", pieces)
        assert [part.text for part in parts if part.kind == "name"] == ["f"]
        assert json.loads("".join(part.text for part in parts if part.kind == "arguments")) == expected
        assert not [part for part in parts if part.kind == "content" and part.text.strip()]


@each(
    "text", ["<|tool_call_start|>[g()]<|tool_call_end|>", "<|tool_call_start|>f x", "f()", "<|tool_call_start|>[('f')"]
)
def test_what_is_no_call_of_a_tool_stays_text(text) -> None:
    for pieces in (1, 1000):
        parts = parts_of(text, pieces)
        assert {part.kind for part in parts} == {"content"} and "".join(part.text for part in parts) == text


def test_text_behind_calls_stays_text_and_a_call_may_be_json() -> None:
    for call in ('f(a="x")', '{"name": "f", "arguments": {"a": "x"}}'):
        for pieces in (1, 1000):
            parts = parts_of(f"<|tool_call_start|>[{call}]<|tool_call_end|>f(1) is called.", pieces)
            assert "".join(part.text for part in parts if part.kind == "content") == "f(1) is called."
            assert json.loads("".join(part.text for part in parts if part.kind == "arguments")) == {"a": "x"}


def test_a_broken_argument_ends_the_call() -> None:
    parts = parts_of('<|tool_call_start|>[f("x")]<|tool_call_end|>', 1000)
    assert parts[0].kind == "name" and parts[-1] == Part("content", '"x")]<|tool_call_end|>')
    assert not [part for part in parts if part.kind == "arguments"]


def test_a_grammar_follows_the_schema(tmp_path) -> None:
    pytest.importorskip("llguidance", reason="the llguidance library is not installed")
    tokenizer = models.tokenizer("")
    vocabulary = Vocabulary.of(tokenizer, tokenizer.vocab_size)
    some = {"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "null"}]}
    schema: dict[str, Any] = {
        "type": "object", "required": ["b"],
        "properties": {"a": {"type": "string", "maxLength": 3}, "b": {"type": "boolean"}, "c": some,
                       "d": {"enum": ["x", True, 2]}},
    }  # fmt: skip
    grammar = Constraint("grammar", FORM.grammar({"f": schema}, {}, is_parallel=False))
    for said, is_allowed in (
        ("b=True", True), ('a="x)", b=False, c=[1, 2], d="x"', True), ("b=True, c=None, d=True", True), ("", False),
        ("b=true", False), ("b=True, a=2", False), ('a="xxxx", b=True', False), ("a='x', b=True", False),
        ("b=True, ", False), ("b=True, d=3", False),
    ):  # fmt: skip
        call = f"[f({said})]"
        assert vocabulary.matcher(grammar, ()).allows(vocabulary.split(call.encode())) == is_allowed, said
    with pytest.raises(ValueError, match="names"):
        FORM.grammar({"f": {"properties": {"a b=": {}}}}, {}, is_parallel=False)


def test_a_template_that_reads_no_calls_shows_them() -> None:
    source = "List of tools: {{ tools }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    function = {"name": "f", "arguments": {"a": "it's", "b": [True, None, {"k": 1.5}]}}
    turn = {"role": "assistant", "content": "Yes.", "tool_calls": [{"function": function}, {"function": {
        "name": "g", "arguments": {}}}]}  # fmt: skip
    told = "<|tool_call_start|>[f(a=\"it's\", b=[True, None, {'k': 1.5}]), g()]<|tool_call_end|>"
    assert ChatTemplate(source).render([turn], []) == f"List of tools: []<assistant>{told}Yes."
    reads = source.replace("{{ m.content }}", "{{ m.tool_calls | length }}")
    assert ChatTemplate(reads).render([turn], []) == "List of tools: []<assistant>2"
    with pytest.raises(ValueError, match="calls"):
        ChatTemplate(source).render([{**turn, "tool_calls": ["x"]}], [])
