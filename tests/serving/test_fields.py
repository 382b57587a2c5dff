"""Each field of each route does something: another value of it gives another answer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from fastformer.generation.jobs import NotRunning, QueueFull, TooLate
from fastformer.serving import open_service
from fastformer.serving.answers import FAILED, TooLarge
from tests.serving import models
from tests.serving.asking import serving

pytest.importorskip("httpx", reason="the httpx library is not installed")
pytest.importorskip("tokenizers", reason="the tokenizers library is not installed")
pytest.importorskip("transformers", reason="the folders are written by transformers")

LONG, DOG = "a bird " * 40, "the dog reads"
MARKED = "<|im_start|>the dog<|im_start|>"
D = models.tokenizer().encode("d")[0]
FORCED = {"logit_bias": {str(D): 100}}  # the answer is "dddddddd"
LIKELY = {"logit_bias": {str(D): 20}}
ENDED = {"logit_bias": {"1": 100}}  # the answer is empty
DRAWN = {"temperature": 1.5, "seed": 1}
# By route: a body, and for each of its fields two values with different answers. A third item is further fields.
# The value ... is an absent field. Of a switch or a word, the first value is the default.
Case = tuple[Any, ...]
OF_COMPLETIONS: dict[str, Case] = {
    "model": (None, "other"),
    "max_tokens": (3, 8),
    "temperature": (0.2, 2, DRAWN),
    "top_p": (0.01, 1, DRAWN),
    "n": (1, 2),
    "seed": (1, 2, DRAWN),
    "stop": (["e", "dd"], "ddd", FORCED),
    "stream": (False, True),
    "stream_options.include_usage": (False, True, {"stream": True}),
    "presence_penalty": (0, 2, LIKELY),
    "frequency_penalty": (0, 2, LIKELY),
    "logit_bias": ({}, FORCED["logit_bias"]),
    "top_k": (1, 0, DRAWN),
    "min_p": (1, 0, DRAWN),
    "repetition_penalty": (1, 100, LIKELY),
    "min_tokens": (0, 4, ENDED),
    "stop_token_ids": ([], [D], FORCED),
    "timeout": (1e-9, 20),
    "response_format": ({"type": "text"}, {"type": "json_object"}),
    "structured_outputs": (None, {"choice": ["dog"]}),
    **dict.fromkeys(("guided_json", "json_schema"), (None, {"enum": [1, 2]})),
    **dict.fromkeys(("guided_regex", "regex"), ("[0-4]", "[5-9]")),
    "guided_choice": (["dog"], ["bird"]),
    **dict.fromkeys(("guided_grammar", "grammar", "ebnf"), ('start: "dog"', 'root ::= "bird"')),
}
CALL = {"id": "b", "function": {"name": "f", "arguments": '{"a": 1}'}}
CALLED = [{"role": "assistant", "content": "a", "tool_calls": [CALL]}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]
DESCRIBED = [{"type": "function", "function": {"name": "f", "parameters": {
    "type": "object", "properties": {"a": {"type": "string", "format": "phone"}}}}}]  # fmt: skip
OF_ENCODERS: dict[str, Case] = {
    "truncate": (False, True, {"": LONG}),
    "truncation_direction": ("right", "left", {"truncate": True}),
    "timeout": (1e-9, 20),
}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Case]]] = {
    "/v1/completions": (
        "generator",
        {"prompt": DOG, "max_tokens": 8, "temperature": 0, "logprobs": 1},
        {**OF_COMPLETIONS, "prompt": ("two birds", DOG), "logprobs": (0, 2), "best_of": (1, 3),
         "parse_special": (True, False, {"prompt": MARKED})},
    ),
    "/v1/chat/completions": (
        "generator",
        {"messages": [{"role": "user", "content": DOG}], "max_tokens": 8, "temperature": 0, "logprobs": True},
        {
            **OF_COMPLETIONS,
            "messages": ([{"role": "user", "content": DOG}], [{"role": "user", "content": DOG}] * 2),
            "messages.role": ("user", "assistant"),
            "messages.content": ("two birds", DOG),
            "messages.content.text": ("two birds", DOG),
            "messages.content.type": ("text", "image_url"),
            "messages.name": (None, "ann"),
            "max_completion_tokens": (2, 3),
            "logprobs": (False, True),
            "top_logprobs": (0, 2),
            "messages.tool_calls": ([], [CALL], {"messages": CALLED}),
            "messages.tool_calls.id": (None, "a", {"messages": CALLED}),
            "messages.tool_calls.type": ("function", "code", {"messages": CALLED}),
            "messages.tool_calls.function": ({"name": "f", "arguments": "{}"}, CALL["function"], {"messages": CALLED}),
            "messages.tool_calls.function.name": ("f", "g", {"messages": CALLED}),
            "messages.tool_calls.function.arguments": ("{}", '{"a": 2}', {"messages": CALLED}),
            "messages.tool_call_id": (None, "a"),
            "messages.reasoning_content": (None, "a"),
            "tools": ([], TOOLS),
            "tools.type": ("function", "code", {"tools": TOOLS}),
            "tools.function": ({"name": "f"}, {"name": "g"}, {"tools": TOOLS}),
            "tools.function.name": ("f", "g", {"tools": TOOLS}),
            "tools.function.description": (None, "a", {"tools": TOOLS}),
            "tools.function.parameters": (None, {}, {"tools": TOOLS}),
            "tools.function.strict": (False, True, {"tools": DESCRIBED}),
            "tool_choice": ("auto", "required", {"tools": TOOLS}),
            "parallel_tool_calls": (
                True, False,
                {"tools": TOOLS, "tool_choice": "required", "max_tokens": 150, "logit_bias": {"1": -100}},
            ),
            "add_generation_prompt": (True, False),
            "chat_template_kwargs": ({}, {"note": "two"}),
        },
    ),
    "/generate": (
        "generator",
        {"inputs": MARKED, "parameters": {"max_new_tokens": 8, "details": True}},
        {
            "inputs": ("two birds", DOG),
            "stream": (False, True),
            "timeout": (1e-9, 20),
            "parameters": ({}, {"max_new_tokens": 1}),
            "parameters.max_new_tokens": (3, 8),
            "parameters.do_sample": (False, True, {"seed": 1}),
            "parameters.temperature": (0.2, 2, {"seed": 1}),
            "parameters.top_k": (1, 100, DRAWN),
            "parameters.top_p": (0.01, 1, DRAWN),
            "parameters.repetition_penalty": (1, 100),
            "parameters.seed": (1, 2, DRAWN),
            "parameters.stop": ([], ["e", "a", "t", "d", "s", " "]),
            "parameters.return_full_text": (False, True),
            "parameters.details": (False, True),
            "parameters.parse_special": (True, False),
            "parameters.adapter_id": (None, "other"),
            "parameters.grammar": ({"type": "regex", "value": "[0-4]"}, {"type": "regex", "value": "[5-9]"}),
        },
    ),
    "/v1/embeddings": (
        "encoder",
        {"input": "a bird"},
        {
            "input": ("a bird", "two birds"),
            "model": (None, "other"),
            "encoding_format": ("float", "base64"),
            "output_dtype": ("binary", "ubinary"),
            "embedding_type": ("float", "base64"),
            "dimensions": (3, 4),
            "prompt_name": (None, "query"),
            "truncate": (False, True, {"input": LONG}),
            "truncation": (False, True, {"input": LONG}),
            "timeout": (1e-9, 20),
        },
    ),
    "/v1/multi-vector": (
        "multi-vector",
        {"input": "a bird"},
        {
            "input": ("a bird", "two birds"),
            "model": (None, "other"),
            "input_type": ("document", "query"),
            "embedding_type": ("float", "base64"),
            "dimensions": (16, 17),
            "truncate": (False, True, {"input": LONG}),
            "timeout": (1e-9, 20),
        },
    ),
    "/embed": (
        "encoder",
        {"inputs": "a bird"},
        {
            **OF_ENCODERS,
            "inputs": ("a bird", "two birds"),
            "prompt_name": (None, "query"),
            "normalize": (True, False),
            "dimensions": (3, 4),
        },
    ),
    "/embed_sparse": (
        "sparse",
        {"inputs": "a bird"},
        {**OF_ENCODERS, "inputs": ("a bird", "two birds"), "prompt_name": (None, "query")},
    ),
    "/rerank": (
        "ranker",
        {"query": "a bird", "texts": ["the hills", "a bird sings"]},
        {
            **OF_ENCODERS,
            "query": ("a bird", "two"),
            "texts": (["the hills"], ["a bird"]),
            "raw_scores": (False, True),
            "return_text": (False, True),
            "documents": (["the hills"], ["a bird"], {"texts": ...}),
            "model": (None, "other", {"documents": ["a"], "texts": ...}),
            "top_n": (1, 2, {"documents": ["a", "b"], "texts": ...}),
            "return_documents": (True, False, {"documents": ["a", "b"], "texts": ...}),
            "documents.text": ("a", "two birds", {"documents": [{"text": "a"}], "texts": ...}),
        },
    ),
    "/predict": (
        "ranker",
        {"inputs": "a bird"},
        {**OF_ENCODERS, "inputs": ("a bird", ["a bird", "two"]), "raw_scores": (False, True)},
    ),
    "/v1/translate": (
        "translator",
        {"text": "One two. Three"},
        {
            "text": ("one", "two"),
            "source_lang": ("en", "fr"),
            "target_lang": ("de", "fr"),
            "prefix": (None, "ab"),
            "split": (True, False),
            "scores": (False, True),
            "alternatives": (0, 1),
            "attention": (False, True),
            "stream": (False, True),
            "timeout": (1e-9, 20),
            "num_beams": (1, 4, {"scores": True}),
            "length_penalty": (0, 2, {"num_beams": 4, "scores": True}),
            "max_new_tokens": (2, 9),
            "repetition_penalty": (1, 5),
            "no_repeat_ngram_size": (0, 1),
            "do_sample": (False, True, {"seed": 1}),
            "temperature": (0.1, 5, {"do_sample": True, "seed": 1}),
            "top_k": (1, 0, {"do_sample": True, "seed": 1, "temperature": 5}),
            "top_p": (0.01, 1, {"do_sample": True, "seed": 1, "temperature": 5}),
            "seed": (1, 2, {"do_sample": True, "temperature": 5}),
        },
    ),
    "/translate": (
        "translator",
        {"q": "<b>One</b>", "source": "en", "target": "de"},
        {
            "q": ("one", "two"),
            "source": ("en", "auto"),
            "target": ("de", "fr"),
            "format": ("text", "html"),
            "alternatives": (0, 1),
            "api_key": ("the-key", "other"),
        },
    ),
    "/detect": ("translator", {"q": "Das ist ein Satz."}, {"q": ("Das ist ein Satz.", "This is a line of a text."),
                                                          "api_key": ("the-key", "other")}),
}  # fmt: skip
CASES["/v1/rerank"] = CASES["/v2/rerank"] = (
    "ranker",
    {"query": "a bird", "documents": ["the hills", "a bird sings"]},
    {
        name: case[:2] if name != "documents.text" else (*case[:2], {"documents": [{"text": "a"}]})
        for name, case in CASES["/rerank"][2].items()
        if name not in ("texts", "raw_scores", "return_text", "truncate", "truncation_direction")
    },
)
ROUTES = {kind: [route for route, case in CASES.items() if case[0] == kind] for kind, *_ in CASES.values()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    return models.services(tmp_path_factory.mktemp("models"))


def fields_of(schema: dict[str, Any], known: dict[str, Any], before: str = "") -> Iterator[str]:
    """Yields the fields of a schema by their places, those of objects in lists too."""
    if "$ref" in schema:
        yield from fields_of(known[schema["$ref"].rpartition("/")[2]], known, before)
    for each in [*schema.get("anyOf", ()), *schema.get("oneOf", ()), *filter(None, [schema.get("items")])]:
        yield from fields_of(each, known, before)
    for name, each in schema.get("properties", {}).items():
        yield before + name
        yield from fields_of(each, known, f"{before}{name}.")


def changed(body: Any, place: str, value: Any) -> Any:
    """Returns a body with another value in a place; lists on the way have one element."""
    name, _, rest = place.partition(".")
    if isinstance(body, list):
        return [changed(body[0], place, value)]
    if rest and name == "content":
        return {**body, name: [changed({"type": "text", "text": "a"}, rest, value)]}
    value = changed(body.get(name) or {}, rest, value) if rest else value
    return {key: one for key, one in {**body, name: value}.items() if one is not ...}


def told(answer: str) -> Any:
    """Returns an answer without ids and times; of a stream, its text and usage, since its pieces depend on the time."""
    answer = re.sub(r'"(id|created|cached_tokens)":("[^"]*"|\d+),?', "", answer)
    if not answer.startswith("data:"):
        return answer
    pieces = re.findall(r'"(?:content|text)":"((?:[^"\\]|\\.)*)"', answer)
    return "".join(pieces), re.findall(r'"usage":\{[^}]*\}', answer)


@pytest.mark.parametrize("kind", ROUTES)
async def test_another_value_of_a_field_gives_another_answer(kind, folders) -> None:
    pair = {"source_lang": "en", "target_lang": "de"} if kind == "translator" else {}
    options: dict[str, Any] = {"keys": ["the-key"]} if kind == "translator" else {}
    async with serving(open_service(folders[kind], **pair), **options) as client:
        head = {"Authorization": "bearer the-key"}
        paths = client.app.openapi()
        known, posts = paths.get("components", {}).get("schemas", {}), {}
        for path, methods in paths["paths"].items():
            if "post" in methods:
                body = methods["post"]["requestBody"]["content"]["application/json"]["schema"]
                posts[path] = {*fields_of(body, known)}
        for route in posts:
            found = paths["paths"][route]["post"]["responses"]["200"]
            assert "text/event-stream" not in found["content"] or found["description"] != "Successful Response"
        table = {route: {*CASES[route][2], *(name.partition(".")[0] for name in CASES[route][2])} for route in posts}
        assert {route: posts[route] for route in ROUTES[kind]} == {route: table[route] for route in ROUTES[kind]}
        assert all(posts[route] <= table[route] for route in posts)  # those of other kinds are tried with these
        for route in ROUTES[kind]:
            _, right, cases = CASES[route]
            plain = await client.post(route, json=right, headers=head)
            assert plain.status_code == 200, (route, plain.text)
            for place, (first, second, *rest) in cases.items():
                more: dict[str, Any] = dict(*rest)
                if "" in more:  # the text
                    more[next(name for name in ("inputs", "query") if name in right)] = more.pop("")
                body = {**right, **more}
                if place.startswith("parameters."):
                    body = {**right, "parameters": {**right["parameters"], **more}}
                answers = []
                has_default = isinstance(first, bool) or place in ("encoding_format", "format", "truncation_direction")
                for value in (first, second, *([...] if has_default else [])):
                    asked = changed(body, place, value)
                    found = await client.post(route, json=asked, headers=head if place != "api_key" else {})
                    answers.append((found.status_code, told(found.text)))
                assert answers[0] != answers[1], (route, place, answers[0])
                assert answers[0] == answers[-1] or not has_default, (route, place, answers)
                assert 200 in (answers[0][0], answers[1][0]), (route, place, answers)


# By format: the kinds of its errors, by status.
OF_OPENAI = {
    400: ("invalid_request_error", None), 429: ("rate_limit_error", "rate_limit_exceeded"), 500: ("server_error", None),
    503: ("service_unavailable_error", "service_unavailable"), 504: ("timeout_error", "timeout"),
}  # fmt: skip
OF_TEI = {422: "validation", 429: "overloaded", 500: "backend", 503: "unhealthy", 504: "backend"}
OF_TGI = {**OF_TEI, 500: "generation", 504: "generation"}
FORMATS = {"/embed": OF_TEI, "/embed_sparse": OF_TEI, "/predict": OF_TEI, "/rerank": OF_TEI, "/generate": OF_TGI}
# Each error that a service raises, with its status and Retry-After, which is whole seconds and never too early.
ERRORS = (
    (QueueFull("it is full", 1.2), 429, "2"), (QueueFull("it is full", 3), 429, "3"),
    (NotRunning("it has ended"), 503, "1"), (TooLate("it is late"), 504, None), (TooLarge("it is long"), 413, None),
    (ValueError("it is wrong"), 400, None), (RuntimeError("it is broken: secret"), 500, None),
)  # fmt: skip


def body_of(route: str, status: int, message: str) -> dict[str, Any]:
    """Returns the body of an error in a route's format."""
    if route == "/v1/translate":
        return {"error": {"message": message, "code": status}}
    if route in ("/translate", "/detect"):
        return {"error": message}
    if route in FORMATS:
        return {"error": message, "error_type": FORMATS[route][status]}
    kind, code = OF_OPENAI[status]
    return {"error": {"message": message, "type": kind, "code": code}}


@pytest.mark.parametrize("kind", ROUTES)
async def test_an_error_is_told_as_each_format_tells_it(kind, folders, monkeypatch) -> None:
    async with serving(service := open_service(folders[kind])) as client:
        for error, status, after in ERRORS:
            if status == 413 and kind != "translator":
                continue  # the others tell the limits of texts by errors of their own
            monkeypatch.setattr(service, "deadline", Mock(side_effect=error))
            for route in ROUTES[kind]:
                answer = await client.post(route, json=CASES[route][1])
                told, due = answer.json(), 422 if route in FORMATS and status == 400 else status
                assert (answer.status_code, answer.headers.get("retry-after")) == (due, after), (route, error)
                if isinstance(told["error"], dict):
                    told["error"].pop("param", None)
                assert told == body_of(route, due, FAILED if status == 500 else str(error)), route
