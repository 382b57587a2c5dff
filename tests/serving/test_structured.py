"""Answers match the constraint that a request names in the format of any server, to OpenAI's client and by HTTP."""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict

from fastformer.serving import open_service
from tests.covering import each
from tests.serving import models
from tests.serving.asking import serving

httpx = pytest.importorskip("httpx", reason="the httpx library is not installed")
openai = pytest.importorskip("openai", reason="the openai library is not installed")
jsonschema = pytest.importorskip("jsonschema", reason="the jsonschema library is not installed")
pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")
pytest.importorskip("tokenizers", reason="the tokenizers library is not installed")
pytest.importorskip("llguidance", reason="the llguidance library is not installed")

ASKED: list[Any] = [{"role": "user", "content": "two birds"}]
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["dog", "bird"]}, "count": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["kind", "count"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
NAMED = {"type": "json_schema", "json_schema": {"name": "seen", "strict": True, "schema": SCHEMA}}


class Bird(BaseModel):
    model_config = ConfigDict(extra="forbid")

    kind: Literal["dog", "bird"]
    alone: bool


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return models.generator(tmp_path_factory.mktemp("models") / "tiny")


def is_seen(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


def is_one(text: str) -> bool:
    return text in ("the dog", "two birds")


def is_time(text: str) -> bool:
    return re.fullmatch("[0-2][0-9]:[0-5][0-9]", text) is not None


TIME, ONE, GRAMMAR = "[0-2][0-9]:[0-5][0-9]", ["the dog", "two birds"], 'start: "the dog" | "two birds"'
FIELDS: list[tuple[dict[str, Any], Any]] = [
    ({"response_format": NAMED}, is_seen), ({"response_format": {"type": "json_object", "schema": SCHEMA}}, is_seen),
    ({"guided_json": SCHEMA}, is_seen), ({"guided_json": json.dumps(SCHEMA)}, is_seen),
    ({"json_schema": SCHEMA}, is_seen), ({"guided_regex": TIME}, is_time), ({"regex": TIME}, is_time),
    ({"guided_choice": ONE}, is_one), ({"guided_grammar": GRAMMAR}, is_one),
    ({"grammar": 'root ::= "the dog" | "two birds"'}, is_one), ({"ebnf": 'root ::= "the " "dog"'}, is_one),
    ({"structured_outputs": {"json": SCHEMA, "regex": None}}, is_seen),
    ({"structured_outputs": {"choice": ONE}}, is_one), ({"structured_outputs": {"regex": TIME}}, is_time),
    ({"structured_outputs": {"grammar": GRAMMAR}}, is_one),
    ({"structured_outputs": {"json_object": False, "choice": ONE}}, is_one),
]  # fmt: skip


@pytest.mark.parametrize("fields, matches", FIELDS, ids=[next(iter(fields)) for fields, _ in FIELDS])
def test_answers_match_in_chats_and_completions(fields, matches, client) -> None:
    options: dict[str, Any] = {"model": "tiny", "max_tokens": 300, "n": 2, "seed": 4, "extra_body": fields}
    chat = client.chat.completions.create(messages=ASKED, **options)
    whole = client.completions.create(prompt="a dog", **options)
    for text, reason in [
        *((choice.message.content, choice.finish_reason) for choice in chat.choices),
        *((choice.text, choice.finish_reason) for choice in whole.choices),
    ]:
        assert reason == "stop" and matches(text), text


def test_openais_client_parses_answers_whole_and_streamed(client) -> None:
    options: dict[str, Any] = {"model": "tiny", "messages": ASKED, "max_tokens": 300, "temperature": 0}
    parsed = client.chat.completions.parse(**options, response_format=Bird).choices[0]
    assert isinstance(parsed.message.parsed, Bird) and parsed.finish_reason == "stop"
    with client.chat.completions.stream(**options, response_format=Bird) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion().choices[0]
    assert "".join(pieces) == parsed.message.content == final.message.content
    assert final.message.parsed == parsed.message.parsed
    plain = client.chat.completions.create(**options, response_format={"type": "json_object"}, logprobs=True)
    content = plain.choices[0].message.content
    assert content.startswith("{") and "".join(one.token for one in plain.choices[0].logprobs.content) == content
    same = client.chat.completions.create(**options, extra_body={"structured_outputs": {"json_object": True}})
    assert same.choices[0].message.content == content
    named = {"response_format": {"type": "json_schema", "json_schema": {"name": "any"}}}  # of any object
    assert client.chat.completions.create(**options, extra_body=named).choices[0].message.content == content


def test_a_cut_answer_says_so(client) -> None:
    found = client.chat.completions.create(model="tiny", messages=ASKED, max_tokens=3, response_format=NAMED)
    assert found.choices[0].finish_reason == "length" and found.usage.completion_tokens == 3


BAD: list[dict[str, Any]] = [
    {"response_format": {"type": "xml"}}, {"response_format": {"type": "json_schema"}}, {"response_format": {}},
    *({"response_format": {"type": "json_schema", "json_schema": each}} for each in (["a"], "{}", {"schema": "{}"})),
    *({"response_format": {"type": "json_schema", "json_schema": {"schema": each}}} for each in (None, ["a"], 5)),
    {"response_format": {"type": "json_object", "schema": "{"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"contains": {}}}}},
    {"guided_json": {"type": "string", "format": "unheard-of"}}, {"guided_json": "{"}, {"guided_regex": "(?=a)b"},
    {"guided_choice": []}, {"guided_choice": ["a", ""]}, {"guided_grammar": "start: start"}, {"grammar": "root ::= no"},
    {"structured_outputs": {}}, {"structured_outputs": {"json": SCHEMA, "choice": ONE}},
    {"structured_outputs": {"structural_tag": {}}}, {"structured_outputs": {"regex": 5}},
    {"response_format": NAMED, "guided_choice": ONE}, {"regex": "a" * 100_001}, {"structural_tag": {"a": 1}},
]  # fmt: skip


@each("fields", BAD)
@pytest.mark.parametrize("stream", [False, True])
def test_a_constraint_that_cannot_be_honoured_is_refused_before_any_token(fields, stream, server, http) -> None:
    for route, body in (("chat/completions", {"messages": ASKED}), ("completions", {"prompt": "a"})):
        answer = http.post(f"{server.url}/v1/{route}", json={**body, **fields, "stream": stream})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] in fields and answer.json()["error"]["message"]


async def test_the_longest_constraint_is_honoured(folder, monkeypatch) -> None:
    monkeypatch.setattr("fastformer.serving.structured.MOST_CHARS", 1000)
    async with serving(open_service(folder)) as here:
        for size, status in ((1000, 200), (1001, 400)):
            body = {"messages": ASKED, "regex": "a" * size, "max_tokens": 1}
            assert (await here.post("/v1/chat/completions", json=body)).status_code == status


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/generate"])
async def test_a_constraint_is_compiled_once_whatever_comes_between(route, folder, monkeypatch) -> None:
    """Many others are compiled before its request is made, in the event loop, which would stand still meanwhile."""
    import llguidance

    threads, make = list[threading.Thread](), llguidance.LLMatcher
    service: Any = open_service(folder)

    def after_others(method: Any) -> Any:
        def called(*given: Any, **more: Any) -> Any:
            for count in range(1, 40):
                service.session.check_constraint({"regex": f"b{{{count}}}"})
            threads.clear()
            return method(*given, **more)

        return called

    class Watched:
        grammar_from_regex = staticmethod(make.grammar_from_regex)

        def __new__(cls, tokens: Any, grammar: str, **options: Any) -> Any:
            threads.append(threading.current_thread())
            return make(tokens, grammar, **options)

    for name in ("chat_ids", "encode"):  # a request's prompt is encoded behind the check of its constraint
        monkeypatch.setattr(service.session, name, after_others(getattr(service.session, name)))
    monkeypatch.setattr(llguidance, "LLMatcher", Watched)
    body = {"messages": ASKED, "regex": TIME, "max_tokens": 30}
    if route == "/generate":
        grammar = {"type": "regex", "value": TIME}
        body = {"inputs": "a dog", "parameters": {"grammar": grammar, "max_new_tokens": 30}}
    async with serving(service) as here:
        assert (await here.post(route, json=body)).status_code == 200
    assert not threads


@pytest.mark.parametrize("damage", ["raise ImportError('libmissing.so')", "raise OSError('libmissing.so')", "__file__"])
async def test_a_library_that_cannot_be_imported_is_the_servers_fault(
    damage, folder, tmp_path, monkeypatch, caplog
) -> None:
    (tmp_path / "llguidance.py").write_text(f"{damage}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "llguidance", raising=False)
    async with serving(open_service(folder)) as here:
        with caplog.at_level(logging.ERROR, "fastformer"):
            answer = await here.post("/v1/chat/completions", json={"messages": ASKED, "regex": TIME})
        assert answer.status_code == 500, answer.text
        logged = caplog.text
        assert "llguidance" in logged and ("libmissing.so" if "raise" in damage else "LLMatcher") in logged
        caplog.clear()
        for _ in range(2):  # the model decides whether it calls the tool, and so needs no library
            body = {"messages": ASKED, "tools": [TOOL], "max_tokens": 2, "seed": 1}
            answer = await here.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
        assert caplog.text.count("llguidance") == 1, "told once"
        monkeypatch.setitem(sys.modules, "llguidance", None)  # not installed
        answer = await here.post("/v1/chat/completions", json={"messages": ASKED, "regex": TIME})
    assert answer.status_code == 400 and "structured" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "grammar, matches",
    [
        ({"type": "json", "value": SCHEMA}, is_seen), ({"type": "json", "value": json.dumps(SCHEMA)}, is_seen),
        ({"type": "json_schema", "value": {"name": "seen", "schema": SCHEMA}}, is_seen),
        ({"type": "regex", "value": TIME}, is_time),
    ],
    ids=["json", "text", "json_schema", "regex"],
)  # fmt: skip
def test_tgis_grammar(grammar, matches, server) -> None:
    body: dict[str, Any] = {
        "inputs": "a dog",
        "parameters": {"grammar": grammar, "max_new_tokens": 300, "details": True},
    }
    answer = httpx.post(f"{server.url}/generate", json=body).json()
    assert matches(answer["generated_text"]) and answer["details"]["finish_reason"] != "length"
    body["stream"] = True
    with httpx.stream("POST", f"{server.url}/generate", json=body) as response:
        lines = [json.loads(line[5:]) for line in response.iter_lines() if line.startswith("data:")]
    assert lines[-1]["generated_text"] == answer["generated_text"]
    for bad in ({"type": "json"}, {"type": "yaml", "value": ""}, {"type": "json", "value": {"not": {}}}):
        refused = httpx.post(f"{server.url}/generate", json={"inputs": "a", "parameters": {"grammar": bad}})
        assert refused.status_code in (400, 422) and refused.json()["error"]
