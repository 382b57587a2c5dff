"""Tests calls whose arguments are tags: what they mean as JSON, and texts that a grammar allows."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fastformer.checkpoints import load_model
from fastformer.generation import generate
from fastformer.generation.answers import AnswerStyle, Part, parser_of
from fastformer.generation.constraints import Constraint, Vocabulary
from fastformer.generation.tool_formats import FORMATS
from tests.covering import each
from tests.serving import models

jsonschema = pytest.importorskip("jsonschema", reason="the jsonschema library is not installed")
pytest.importorskip("tokenizers", reason="the tokenizers library is not installed")

TEXT: dict[str, Any] = {"type": "string"}
PROPERTIES: dict[str, Any] = {
    "text": TEXT, "count": {"type": "integer"}, "share": {"type": "number"}, "on": {"type": "boolean"},
    "maybe": {"anyOf": [TEXT, {"type": "null"}]}, "either": {"type": ["string", "integer"]}, "any": {},
    "day": {"enum": ["Monday", "7"]}, "level": {"enum": [1, "two"]}, "list": {"type": "array", "items": TEXT},
    "object": {"$ref": "#/$defs/pair"}, "name": {"$ref": "#/$defs/name"}, "one": {"const": 1},
    "odd": {"anyOf": [TEXT, {"type": "array", "items": 3}, {"type": "integer", "minimum": "a"}]},
    "digit": {"anyOf": [TEXT, {"type": "integer", "minimum": 0, "maximum": 9}]},
    "pair": {"anyOf": [{"type": "array", "items": {"type": "number"}, "maxItems": 2}, TEXT,
                       {"type": "object", "properties": {"a": {"$ref": "#/$defs/name"}}, "required": ["a"],
                        "additionalProperties": False}]},
}  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": PROPERTIES,
    "$defs": {"pair": {"type": "object", "properties": {"a": {"$ref": "#/$defs/name"}}}, "name": TEXT},
}


# What stands on both sides of a value.
AROUND = {"tags": "\n", "seed": ""}
both = pytest.mark.parametrize("form", AROUND)


def parts_of(text: str, schema: Any, pieces: int, form: str) -> list[Part]:
    parser = parser_of(AnswerStyle(FORMATS[form], {"f": schema}))
    cuts = [text[place : place + pieces] for place in range(0, len(text), pieces)]
    return [*(part for piece in cuts for part in parser.add(piece)), *parser.add("", is_end=True)]


def arguments_of(text: str, schema: Any = SCHEMA, pieces: int = 1000, form: str = "tags") -> Any:
    parts = parts_of(text, schema, pieces, form)
    assert [part.text for part in parts if part.kind == "name"] == ["f"]
    return json.loads("".join(part.text for part in parts if part.kind == "arguments"))


@each("key, said, value", [
    ("text", "7", "7"), ("text", "true", "true"), ("text", '"a"', '"a"'), ("text", "a\nb\n\n c ", "a\nb\n\n c "),
    ("text", "", ""), ("text", "</param> <parameter=x> </function>", "</param> <parameter=x> </function>"),
    ("count", "7", 7), ("count", "seven", "seven"), ("share", "-1.50e3", -1500.0), ("share", "NaN", "NaN"),
    ("on", "true", True), ("on", "False", False), ("maybe", "null", None), ("maybe", "None", None), ("maybe", "a", "a"),
    ("maybe", '"a"', '"a"'), ("either", "7", 7), ("either", "7a", "7a"), ("any", "[1, {}]", [1, {}]), ("any", "x", "x"),
    ("day", "7", "7"), ("level", "1", 1), ("level", "two", "two"), ("list", '["a"]', ["a"]), ("list", "a, b", "a, b"),
    ("object", '{"a": "b"}', {"a": "b"}), ("name", "7", "7"), ("one", "1", 1), ("unknown", "7", 7),
    ("list", '["a</parameter>", "\\"</parameter>\\n"]', ["a</parameter>", '"</parameter>\n']),
    ("object", '{"</parameter>": "\\\\"}', {"</parameter>": "\\"}), ("list", '["a', '["a'),
    ("any", '[{"a": "</parameter>"}]', [{"a": "</parameter>"}]), ("text", '["a"', '["a"'), ("maybe", '"', '"'),
    ("maybe", "7", "7"), ("maybe", "true", "true"), ("either", "7.5", "7.5"), ("either", "7.0", 7.0),
    ("either", "[7]", "[7]"), ("either", "null", "null"), ("level", "2", "2"), ("level", "1.0", 1.0),
    ("digit", "7", 7), ("digit", "17", "17"), ("digit", "-1", "-1"), ("pair", "[1, 2]", [1, 2]),
    ("pair", "[1, 2, 3]", "[1, 2, 3]"), ("pair", "[1, true]", "[1, true]"), ("pair", '{"a": "b"}', {"a": "b"}),
    ("pair", '{"a": 1}', '{"a": 1}'), ("pair", '{"b": "c"}', '{"b": "c"}'), ("pair", "{}", "{}"),
    ("odd", "[7]", [7]), ("odd", "7", 7),
    ("unknown", "a", "a"), ("text", "漢 \\ \" \t", "漢 \\ \" \t"),
])  # fmt: skip
@both
def test_the_schema_decides_what_a_value_is(key, said, value, form) -> None:
    tag = f"<parameter={key}>{AROUND[form]}{said}{AROUND[form]}</parameter>"
    text = f"{FORMATS[form].begin}\n<function=f>\n{tag}\n</function>\n{FORMATS[form].end}"
    for pieces in (1, 3, 1000):
        found = arguments_of(text, pieces=pieces, form=form)[key]
        assert found == value and type(found) is type(value)


@each("text", [
    "<tool_call><function=f></function></tool_call>", "<tool_call>\n\n<function= f >\n\n</function>",
    "so: <tool_call>\n<function=f>\n</function>\n</tool_call>\n",
])  # fmt: skip
def test_a_call_without_arguments_has_an_empty_object(text) -> None:
    assert arguments_of(text) == {}


def test_line_ends_of_a_text_belong_to_it() -> None:
    inner = "<parameter=text>\n a\n\n</parameter>\n<parameter=count>7</parameter>"
    for form, text in (("tags", " a\n"), ("seed", "\n a\n\n")):
        said = f"{FORMATS[form].begin}\n<function=f>\n{inner}\n</function>\n{FORMATS[form].end}"
        assert arguments_of(said, pieces=1, form=form) == {"text": text, "count": 7}


def test_several_arguments_are_one_object() -> None:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in (("text", "a"), ("count", 3)))
    assert arguments_of(f"<tool_call>\n<function=f>\n{inner}</function>\n</tool_call>") == {"text": "a", "count": 3}


@each("text", ["<tool_call>\n<function=g>\n</function>", "<tool_call>\n<funktion=f>", "<tool_call>\n<function=f\n>",
               '<tool_call>\n{"name": "f", "arguments": {}}'])  # fmt: skip
def test_what_is_no_call_of_a_tool_stays_text(text) -> None:
    for pieces in (1, 1000):
        parts = parts_of(text, SCHEMA, pieces, "tags")
        assert {part.kind for part in parts} == {"content"} and "".join(part.text for part in parts) == text


@pytest.fixture(scope="module")
def loaded(tmp_path_factory) -> tuple[Any, Any]:
    own = models.tokenizer(None, (), ["<tool_call>", "</tool_call>"])
    return load_model(models.generator(tmp_path_factory.mktemp("tags") / "tiny", own=own, max_len=1000), ("GPT",))


REQUIRED: list[tuple[str, Any]] = [
    ("text", {"type": "string", "maxLength": 5}), ("text", {"type": "string", "minLength": 3, "maxLength": 3}),
    ("text", {"type": "string", "pattern": "^[a-c]{2}$"}), ("text", {"type": "string", "format": "date"}),
    ("text", {"type": "string", "format": "date-time"}), ("text", {"type": "string", "format": "uuid"}),
    ("text", {"type": "string", "pattern": "^[0-9]+/[ab]$", "description": "of parts"}),
    ("day", PROPERTIES["day"]), ("level", PROPERTIES["level"]), ("one", PROPERTIES["one"]), ("on", PROPERTIES["on"]),
    ("maybe", {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}], "default": None}),
    ("either", {"type": ["string", "boolean"], "maxLength": 2}), ("object", {"$ref": "#/$defs/p"}),
    ("list", {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}), ("a b", {"type": "boolean"}),
    ("short", {"$ref": "#/$defs/t", "maxLength": 3}), ("short", {"allOf": [{"type": "string", "maxLength": 3}]}),
    ("short", {"type": "string", "maxLength": 3, "readOnly": True, "$id": "a"}),
]  # fmt: skip


@pytest.mark.parametrize("place", range(len(REQUIRED)))
def test_what_the_grammar_allows_matches_the_schema(place, loaded) -> None:
    pytest.importorskip("llguidance", reason="the llguidance library is not installed")
    key, described = REQUIRED[place]
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {key: described, "more": {"type": "null"}},
        "required": [key],
        "additionalProperties": False,
        "$defs": {"p": {"type": "object", "additionalProperties": False}, "t": TEXT},
    }
    model, tokenizer = loaded
    form = FORMATS["tags"]
    grammar = form.grammar({"f": schema}, {}, is_parallel=False)
    prompt = tokenizer.encode("the dog")
    sampled = generate(
        model, [prompt] * 8, tokenizer=tokenizer, grammar=grammar, do_sample=True, seed=1, max_new_tokens=300,
        temperature=1.5,
    )  # fmt: skip
    checker = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    seen = set()
    for ids in sampled:
        text = tokenizer.decode(ids[len(prompt) :].tolist())
        found = arguments_of(f"{form.begin}{text}", schema)
        checker.validate(found)
        seen.add("more" in found)
    assert seen == {True, False}


REFUSED: list[Any] = [
    {"type": "object", "not": {}}, {"type": "array"}, {"type": "object", "properties": {}, "required": ["a"]},
    {"properties": {"a": {"type": "string", "format": "hostname"}}}, {"properties": {"a": 3}},
    {"properties": {"a": {"type": "string", "pattern": "a", "maxLength": 3}}},
    {"properties": {"a": {"anyOf": [TEXT], "maxLength": 3}}}, {"properties": {"a": {"$ref": "#/$defs/a"}},
                                                               "$defs": {"a": {"$ref": "#/$defs/a"}}},
    {"properties": {"a": {"type": "string", "format": []}}}, {"properties": {"a": {"type": []}}},
    {"properties": {"a": {"$ref": "#/$defs/a", "maxLength": 3}}, "$defs": {"a": {"type": "string", "maxLength": 2}}},
    {"properties": {"a": {"$ref": "#/$defs/0"}}, "$defs": {str(i): {"anyOf": [{"$ref": f"#/$defs/{i + 1}"}] * 3}
                                                           for i in range(19)} | {"19": TEXT}},
]  # fmt: skip


@each("schema", [
    *REFUSED, {"properties": {"a>": TEXT}}, {"properties": {"a ": TEXT}},
    {"properties": {"a": {"enum": ["<parameter=b>\n</parameter>"]}}},
])  # fmt: skip
def test_a_schema_that_tags_cannot_follow_is_refused(schema) -> None:
    with pytest.raises(ValueError):
        FORMATS["tags"].grammar({"f": schema}, {}, is_parallel=False)


@both
def test_a_text_has_no_end_of_its_tag(form, loaded) -> None:
    pytest.importorskip("llguidance", reason="the llguidance library is not installed")
    model, tokenizer = loaded
    vocabulary = Vocabulary.of(tokenizer, model.config.vocab_size)
    schema = {"type": "object", "properties": {"text": TEXT}, "required": ["text"]}
    grammar = Constraint("grammar", FORMATS[form].grammar({"f": schema}, {}, is_parallel=False))
    around = AROUND[form]
    for text, is_allowed in (("a\n\n</param> b", True), ("", True), ("a</parameter>b", False)):
        tag = f"<parameter=text>{around}{text}{around}</parameter>"
        said = f"\n<function=f>\n{tag}\n</function>\n{FORMATS[form].end}"
        assert vocabulary.matcher(grammar, ()).allows(vocabulary.split(said.encode())) == is_allowed, text


@each("described, value", [
    ({"type": "array", "items": TEXT}, ["</parameter>"]), ({"type": ["array", "null"]}, ["a</parameter>\n"]),
    ({"type": "object", "additionalProperties": TEXT}, {"</parameter>": "\\</parameter>\""}),
])  # fmt: skip
@both
def test_json_may_hold_the_end_of_its_tag(described, value, form, loaded) -> None:
    pytest.importorskip("llguidance", reason="the llguidance library is not installed")
    model, tokenizer = loaded
    vocabulary = Vocabulary.of(tokenizer, model.config.vocab_size)
    schema = {"type": "object", "properties": {"a": described, "b": {"type": "null"}}, "required": ["a", "b"]}
    grammar = Constraint("grammar", FORMATS[form].grammar({"f": schema}, {}, is_parallel=False))
    tags = (f"<parameter={key}>{AROUND[form]}{json.dumps(one)}{AROUND[form]}</parameter>\n"
            for key, one in (("a", value), ("b", None)))  # fmt: skip
    said = f"\n<function=f>\n{''.join(tags)}</function>\n{FORMATS[form].end}"
    assert vocabulary.matcher(grammar, ()).allows(vocabulary.split(said.encode()))
    for pieces in (1, 7, 1000):
        assert arguments_of(f"{FORMATS[form].begin}{said}", schema, pieces, form) == {"a": value, "b": None}
