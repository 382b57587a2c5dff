"""Tests calls as Gemma 4 writes them: what they mean as JSON, and texts that a grammar allows."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fastformer.checkpoints import load_model
from fastformer.generation import generate
from fastformer.generation.answers import AnswerStyle, Part, parser_of
from fastformer.generation.streaming import Marked, special_marks
from fastformer.generation.tool_formats import FORMATS
from tests.covering import each
from tests.generation.test_tagged_calls import REFUSED, REQUIRED
from tests.serving import models

jsonschema = pytest.importorskip("jsonschema", reason="the jsonschema library is not installed")
pytest.importorskip("tokenizers", reason="the tokenizers library is not installed")

FORM = FORMATS["gemma 4"]


def parts_of(text: str, pieces: int) -> list[Part]:
    parser = parser_of(AnswerStyle(FORM, {"f": {}}))
    cuts = [text[place : place + pieces] for place in range(0, len(text), pieces)]
    return [*(part for piece in cuts for part in parser.add(piece)), *parser.add("", is_end=True)]


def arguments_of(text: str, pieces: int = 1000) -> Any:
    parts = parts_of(text, pieces)
    assert [part.text for part in parts if part.kind == "name"] == ["f"]
    return json.loads("".join(part.text for part in parts if part.kind == "arguments"))


@each("said, expected", [
    ("", {}), (" ", {}), ("a:1", {"a": 1}), ("a:-1.5e3,b:true,c:null", {"a": -1500.0, "b": True, "c": None}),
    ('a:<|"|>x<|"|>', {"a": "x"}), ('a:<|"|><|"|>', {"a": ""}), ('a:<|"|>}],{"\\\n<|"|>', {"a": '}],{"\\\n'}),
    ('a:[<|"|>x<|"|>,2,[]],b:{c:{},<|"|>d e<|"|>:<|"|>f<|"|>}', {"a": ["x", 2, []], "b": {"c": {}, "d e": "f"}}),
    (' a : 1 , b : [ 1 , 2 ] ', {"a": 1, "b": [1, 2]}), ("a:True,b:word,c:two words", {"a": True, "b": "word",
                                                                                  "c": "two words"}),
    ('"a":"x \\" y"', {"a": 'x " y'}), ('a:<|"|>漢<|"|>', {"a": "漢"}),
])  # fmt: skip
def test_arguments_are_told_as_json(said, expected) -> None:
    for pieces in (1, 3, 1000):
        assert arguments_of(f"<|tool_call>call:f{{{said}}}<tool_call|>", pieces) == expected


@each("text", ["<|tool_call>call:g{}<tool_call|>", "<|tool_call>f{}", "<|tool_call>call f{}", "<|tool_call>"])
def test_what_is_no_call_of_a_tool_stays_text(text) -> None:
    for pieces in (1, 1000):
        parts = parts_of(text, pieces)
        assert {part.kind for part in parts} == {"content"} and "".join(part.text for part in parts) == text


@pytest.mark.parametrize("said", ["{a}", "{a:[1}}", "{a:1,}", "{a:{b}}", '{a:"}', '{a:{b:"}"}'])
def test_a_call_that_is_broken_ends(said) -> None:
    parts = parts_of(f"<|tool_call>call:f{said}<tool_call|> and", 1000)
    assert not [part for part in parts if part.kind == "arguments"]
    assert "".join(part.text for part in parts if part.kind == "content").endswith("and")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory) -> tuple[Any, Any]:
    own = models.tokenizer(None, ["<|tool_call>", "<tool_call|>", '<|"|>'])
    return load_model(models.generator(tmp_path_factory.mktemp("bare") / "tiny", own=own, max_len=1000), ("GPT",))


NESTED: list[tuple[str, Any]] = [
    ("list", {"type": "array", "items": {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "null"}]}}),
    ("list", {"type": "array", "items": {"type": "boolean"}, "minItems": 2}),
    ("object", {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", 1]}},
                "required": ["b"], "additionalProperties": False}),
    ("list", {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2}),
    ("list", {"type": "array", "maxItems": 0}), ('a:}" ', {"type": "boolean"}),
    ("number", {"type": ["integer", "null"], "minimum": 3, "maximum": 12}), ("size", {"type": "number", "maximum": 9}),
    ("list", {"type": "array", "maxItems": 1}), ("object", {"type": "object"}), ("any", {"title": "Any"}),
    ("object", {"type": "object", "additionalProperties": {"type": "boolean"}}), ("node", {"$ref": "#/$defs/node"}),
]  # fmt: skip
NODE = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
        "required": ["next"], "additionalProperties": False}  # fmt: skip
ALLOWED = [one for one in REQUIRED if one[1].get("$ref") != "#/$defs/p"] + NESTED
UNBOUNDED = len(ALLOWED) - 5  # a random model may not end the values of these


@pytest.mark.parametrize("is_marked", [True, False])
@pytest.mark.parametrize("place", range(len(ALLOWED)))
def test_what_the_grammar_allows_matches_the_schema(place, is_marked, loaded) -> None:
    pytest.importorskip("llguidance", reason="the llguidance library is not installed")
    key, described = ALLOWED[place]
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"less": {"type": "null"}, key: described, "more": {"type": "null"}},
        "required": [key],
        "additionalProperties": False,
        "$defs": {"node": NODE, "t": {"type": "string"}},
    }
    model, tokenizer = loaded
    special = special_marks(tokenizer, FORM.marks) if is_marked else {}
    grammar = FORM.grammar({"f": schema}, special, is_parallel=False)
    prompt = tokenizer.encode("the dog")
    sampled = generate(
        model, [prompt] * 8, tokenizer=tokenizer, grammar=grammar, do_sample=True, seed=1, max_new_tokens=400,
        temperature=1.5,
    )  # fmt: skip
    checker = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    seen = set()
    for ids in sampled:
        text = Marked.of(tokenizer, FORM.marks).decode(ids[len(prompt) :].tolist())
        if place >= UNBOUNDED and not text.endswith("}<tool_call|>"):
            continue  # the limit of tokens ended it
        found = arguments_of(f"{FORM.begin}{text}")
        checker.validate(found)
        seen |= {("less" in found, "more" in found)}
    assert len(seen) > (place < UNBOUNDED)


MANY = {str(i): {"type": "array", "items": {"anyOf": [{"$ref": f"#/$defs/{i + 1}"}] * 3}} for i in range(15)}


@each("schema", [
    *REFUSED, *({"properties": {"a": {"type": "array", **one}}} for one in (
        {"uniqueItems": True}, {"minItems": "1"}, {"minItems": -1}, {"minItems": 2, "maxItems": 1})),
    {"properties": {"a": {"enum": [[1]]}}}, {"properties": {"a": {"enum": ['<|"|>']}}}, {"properties": {'<|"|>': {}}},
    {"properties": {"a": {"type": "object", "required": ["b"]}}}, {"properties": {"a": {"$ref": "http://a"}}},
    {"properties": {"a": {"$ref": "#/$defs/0"}}, "$defs": MANY | {"15": {"type": "null"}}},
])  # fmt: skip
def test_a_schema_that_the_rules_cannot_express_is_refused(schema) -> None:
    with pytest.raises(ValueError):
        FORM.grammar({"f": schema}, {}, is_parallel=False)
