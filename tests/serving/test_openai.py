"""OpenAI's routes of a language model give the library's results to OpenAI's client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import socket
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fastformer import Chat
from fastformer.checkpoints import load_model
from fastformer.generation import generate
from fastformer.serving import Limits, open_service
from tests.covering import each
from tests.serving import models
from tests.serving.asking import events, serving
from tests.serving.servers import post_head, running, until

httpx = pytest.importorskip("httpx", reason="the httpx library is not installed")
openai = pytest.importorskip("openai", reason="the openai library is not installed")
pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")
pytest.importorskip("tokenizers", reason="the tokenizers library is not installed")

PROMPTS = ["the dog reads", "two birds", "a woman in the park walks 漢"]
MESSAGES: list[Any] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "two birds"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return models.generator(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def library(folder) -> tuple[Any, Any]:
    return load_model(folder, ("GPT",))


def said(library, prompt, **options) -> list[tuple[str, int]]:
    """Returns the output of `generate` after a prompt, and its number of tokens."""
    model, tokenizer = library
    ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    out = generate(model, [ids], tokenizer=tokenizer, return_dict_in_generate=True, **options)
    begun = tokenizer.decode(ids)
    counts = (out.token_log_probs != 0).sum(1).tolist()
    rows = [row[: len(ids) + count] for row, count in zip(out.sequences.tolist(), counts, strict=True)]
    return [(tokenizer.decode(row)[len(begun) :], count) for row, count in zip(rows, counts, strict=True)]


def test_models(client) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").object == "model"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert caught.value.code == "model_not_found"


def test_completions_equal_the_librarys(client, library) -> None:
    found = client.completions.create(model="tiny", prompt=PROMPTS, temperature=0, max_tokens=9)
    expected = [said(library, prompt, max_new_tokens=9)[0] for prompt in PROMPTS]
    assert [choice.text for choice in found.choices] == [text for text, _ in expected]
    assert [choice.index for choice in found.choices] == [0, 1, 2]
    ids = [library[1].encode(prompt) for prompt in PROMPTS]
    assert found.usage.prompt_tokens == sum(map(len, ids))
    assert found.usage.completion_tokens == sum(count for _, count in expected)
    by_ids = client.completions.create(model="tiny", prompt=ids, temperature=0, max_tokens=9)
    assert [choice.text for choice in by_ids.choices] == [choice.text for choice in found.choices]
    assert client.completions.create(model="tiny", prompt=PROMPTS[0], temperature=0).usage.completion_tokens <= 16


@pytest.mark.parametrize("kind", ["server", "pieces"])
def test_special_tokens_in_a_prompt_are_parsed_unless_the_request_says_otherwise(kind, request) -> None:
    server = request.getfixturevalue(kind)
    own = server.service.session.tokenizer
    text = "".join(token for token, is_special in own.added_tokens.items() if is_special) + "the dog reads"
    parsed, plain = own.encode_prompt(text), own.encode(text)
    assert parsed[-len(own.encode_template("the dog reads")) :] == own.encode_template("the dog reads")
    assert len(parsed) < len(plain)
    for given, ids in (({}, parsed), ({"parse_special": True}, parsed), ({"parse_special": False}, plain)):
        body = {"prompt": [text, text], "max_tokens": 1, "temperature": 0, **given}
        assert httpx.post(f"{server.url}/v1/completions", json=body).json()["usage"]["prompt_tokens"] == 2 * len(ids)
        body = {"inputs": text, "stream": True, "parameters": {"max_new_tokens": 1, "details": True, **given}}
        [event] = events(httpx.post(f"{server.url}/generate", json=body).text)
        assert event["details"]["input_length"] == len(ids)


async def test_samples_equal_the_librarys_beside_other_requests(client, server, library) -> None:
    options = {"temperature": 0.7, "top_p": 0.9, "seed": 11}
    expected = said(library, PROMPTS[0], do_sample=True, max_new_tokens=9, num_return_sequences=3, **options)

    body: dict[str, Any] = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": 9, "n": 3, **options}
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as many:
        answers = await asyncio.gather(
            *(many.completions.create(**body | {"seed": seed}) for seed in (11, 5, 11, 6, 7))
        )
    for answer in (answers[0], answers[2]):
        assert [choice.text for choice in answer.choices] == [text for text, _ in expected]
    assert len({tuple(choice.text for choice in answer.choices) for answer in answers}) == 4
    stream = client.completions.create(**body, stream=True, stream_options={"include_usage": True})
    texts, usage, reasons = ["", "", ""], None, {}
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
    assert texts == [text for text, _ in expected] and set(reasons.values()) <= {"stop", "length"}
    assert usage is not None and usage.completion_tokens == sum(count for _, count in expected)


def test_log_probabilities_are_those_of_the_model(client, library) -> None:
    model, tokenizer = library
    found = client.completions.create(model="tiny", prompt=PROMPTS[0], seed=1, max_tokens=6, logprobs=3)
    ids = tokenizer.encode(PROMPTS[0])
    logits = model(torch.tensor([ids])).float()[0, -1].log_softmax(-1)
    first = found.choices[0].logprobs
    best = logits.topk(3)
    assert sorted(first.top_logprobs[0].values(), reverse=True)[:3] == pytest.approx(best.values.tolist(), abs=1e-4)
    assert len(first.tokens) == len(first.token_logprobs) == len(first.text_offset) == found.usage.completion_tokens
    chat = client.chat.completions.create(
        model="tiny", messages=MESSAGES, temperature=0, max_tokens=5, logprobs=True, top_logprobs=2
    )
    content = chat.choices[0].logprobs.content
    assert all(each.logprob == each.top_logprobs[0].logprob and len(each.top_logprobs) == 2 for each in content)
    streamed = client.chat.completions.create(
        model="tiny", messages=MESSAGES, temperature=0, max_tokens=5, logprobs=True, top_logprobs=2, stream=True
    )
    entries = [
        each for chunk in streamed for choice in chunk.choices if choice.logprobs for each in choice.logprobs.content
    ]
    assert entries == content


@pytest.fixture(scope="module")
def pieces(tmp_path_factory) -> Iterator[Any]:
    pytest.importorskip("sentencepiece", reason="the sentencepiece library is not installed")
    folder = models.generator(tmp_path_factory.mktemp("models") / "pieces", own=models.piece_tokenizer())
    with running(folder) as found:
        yield found


@pytest.mark.parametrize("kind", ["server", "pieces"])
def test_tokens_with_log_probabilities_line_up_with_the_text(kind, request) -> None:
    server = request.getfixturevalue(kind)
    tokenizer = server.service.session.tokenizer
    for seed in range(6):
        body = {"prompt": PROMPTS[0], "max_tokens": 24, "logprobs": 5, "seed": seed, "stream": seed % 2 == 0}
        answer = httpx.post(f"{server.url}/v1/completions", json=body).text
        chunks = events(answer) if body["stream"] else [json.loads(answer)]
        text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
        parts = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"]]
        names = ("tokens", "text_offset", "top_logprobs")
        tokens, offsets, likely = ([one for part in parts for one in part[name]] for name in names)
        special = [token for token, is_special in tokenizer.added_tokens.items() if is_special]
        said = ["" if token in special else token for token in tokens]
        assert "".join(said) == text
        assert offsets == [len("".join(said[:place])) for place in range(len(said))]
        # The drawn token and the five likeliest, which may be the same: no two of them have one name.
        assert all(len(each) in (5, 6) and token in each for token, each in zip(tokens, likely, strict=True))


def test_the_bytes_of_a_chats_tokens_are_the_text(server) -> None:
    body = {**CHAT, "max_tokens": 24, "logprobs": True, "top_logprobs": 4, "temperature": 1}
    seen = 0
    for seed in range(4):
        choice = httpx.post(f"{server.url}/v1/chat/completions", json=body | {"seed": seed}).json()["choices"][0]
        content = choice["logprobs"]["content"]
        data = b"".join(bytes(one["bytes"] or ()) for one in content)
        assert data.decode("utf-8", "replace") == choice["message"]["content"]
        for one in content:
            seen += one["bytes"] not in (None, list(one["token"].encode()))  # a part of a character
            assert [other for other in one["top_logprobs"] if other["bytes"] == one["bytes"]] or one["logprob"] < -0.1
    assert seen


def test_chats_equal_the_librarys(client, folder) -> None:
    talk = Chat.from_pretrained(folder, system="be brief", do_sample=False, max_new_tokens=12)
    expected = talk.ask("two birds")
    options: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 12}
    found = client.chat.completions.create(**options)
    assert found.choices[0].message.content == expected and found.choices[0].message.role == "assistant"
    parts = [{"role": "user", "content": [{"type": "text", "text": "two birds"}]}]
    again = client.chat.completions.create(**options | {"messages": [MESSAGES[0], *parts]})
    assert again.choices[0].message.content == expected
    chunks = [*client.chat.completions.create(**options, n=2, stream=True)]
    for index in (0, 1):
        own = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert "".join(choice.delta.content or "" for choice in own) == expected
        assert own[0].delta.role == "assistant" and own[-1].finish_reason == found.choices[0].finish_reason
    # What a conversation repeats is read once.
    third = client.chat.completions.create(**options)
    assert third.usage.prompt_tokens_details.cached_tokens > 0


def test_inference_client_chats(client, server) -> None:
    hub = pytest.importorskip("huggingface_hub", reason="the huggingface_hub library is not installed")
    expected = client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0, max_tokens=9)
    ask: dict[str, Any] = {"messages": MESSAGES, "temperature": 0, "max_tokens": 9}
    inference = hub.InferenceClient(server.url)  # which names a model that is none
    assert inference.chat_completion(**ask).choices[0].message.content == expected.choices[0].message.content
    chunks = [chunk.choices[0].delta.content or "" for chunk in inference.chat_completion(**ask, stream=True)]
    assert "".join(chunks) == expected.choices[0].message.content


def test_inference_client_generates(server, library) -> None:
    hub = pytest.importorskip("huggingface_hub", reason="the huggingface_hub library is not installed")
    inference = hub.InferenceClient(f"{server.url}/generate")
    [(expected, count)] = said(library, PROMPTS[0], max_new_tokens=9)
    assert inference.text_generation(PROMPTS[0], max_new_tokens=9) == expected
    drawn: dict[str, Any] = {"temperature": 0.7, "top_k": 20, "seed": 4}
    [(text, count)] = said(library, PROMPTS[0], max_new_tokens=9, do_sample=True, **drawn)
    found = inference.text_generation(PROMPTS[0], max_new_tokens=9, details=True, **drawn)
    assert found.generated_text == text and found.details.generated_tokens == len(found.details.tokens) == count
    assert found.details.seed == 4
    assert "".join(inference.text_generation(PROMPTS[0], max_new_tokens=9, stream=True, **drawn)) == text
    whole = inference.text_generation(PROMPTS[0], max_new_tokens=9, return_full_text=True)
    assert whole == PROMPTS[0] + expected
    *_, last = pieces = [*inference.text_generation(PROMPTS[0], max_new_tokens=9, stream=True, details=True)]
    assert last.generated_text == expected and last.details.finish_reason in ("length", "eos_token")
    assert last.details.seed is None and last.details.generated_tokens == len(pieces)
    for wrong in ({"best_of": 2}, {"watermark": True}, {"max_new_tokens": 10**9}, {"top_p": 2}, {"seed": -1}):
        answer = httpx.post(f"{server.url}/generate", json={"inputs": "a", "parameters": wrong})
        assert answer.status_code == 422 and answer.json()["error_type"] == "validation", answer.text


def test_a_stop_text_ends_an_answer_and_its_work(client, server, library) -> None:
    whole = client.completions.create(model="tiny", prompt=PROMPTS[0], temperature=0, max_tokens=60).choices[0].text
    stop = whole[10:12]
    found = client.completions.create(model="tiny", prompt=PROMPTS[0], temperature=0, max_tokens=60, stop=["no", stop])
    assert found.choices[0].text == whole[: whole.index(stop)] and found.choices[0].finish_reason == "stop"
    assert found.usage.completion_tokens < 60
    # Behind the turns of a chat, which end with the token that ends answers too.
    chat = client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0, max_tokens=60)
    said = chat.choices[0].message.content
    cut = client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0, max_tokens=60, stop=said[5:7])
    assert cut.choices[0].message.content == said[: said.index(said[5:7])]
    assert cut.usage.completion_tokens < chat.usage.completion_tokens


def test_a_frequency_counts_each_time_and_a_presence_once(client, library) -> None:
    token = str(library[1].encode("d")[0])
    body: dict[str, Any] = {"model": "tiny", "prompt": PROMPTS[1], "temperature": 0, "max_tokens": 3, "logprobs": 0}
    found = {}
    for name in ("presence_penalty", "frequency_penalty"):
        answer = client.completions.create(**body, logit_bias={token: 20}, **{name: 2})
        assert answer.choices[0].text == "ddd"
        found[name] = answer.choices[0].logprobs.token_logprobs
    (first, second, third), (of_first, of_second, of_third) = found.values()
    assert (first, second) == pytest.approx((of_first, of_second), abs=1e-6) and third > of_third


def test_messages_of_developers_and_of_parts_are_those_of_the_template(client) -> None:
    def said(role: str, content: Any) -> Any:
        messages: Any = [{"role": role, "content": content}]
        body: Any = {"messages": messages, "temperature": 0, "max_tokens": 8, "logprobs": True}
        found = client.chat.completions.create(model="tgi", **body)  # a name that clients send without a model
        return found.choices, found.usage.prompt_tokens

    assert said("developer", "be brief") == said("system", "be brief") != said("user", "be brief")
    parts = [{"type": "text", "text": "two"}, {"type": "text", "text": "birds"}]
    assert said("user", parts) == said("user", "two\nbirds")


COMPLETION: dict[str, Any] = {"model": "tiny", "prompt": "a", "max_tokens": 2}
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("completions", COMPLETION | {"n": 10**9}, "n"),
    ("completions", COMPLETION | {"n": 10**300}, "n"),
    ("completions", COMPLETION | {"n": 0}, "n"),
    ("completions", COMPLETION | {"n": True}, "n"),
    ("completions", COMPLETION | {"n": "2"}, "n"),
    ("completions", COMPLETION | {"max_tokens": 10**9}, "max_tokens"),
    ("completions", COMPLETION | {"temperature": -1}, "temperature"),
    ("completions", COMPLETION | {"temperature": float("nan")}, "temperature"),
    ("completions", COMPLETION | {"top_p": float("inf")}, "top_p"),
    ("completions", COMPLETION | {"seed": 2**70}, "seed"),
    ("completions", COMPLETION | {"logprobs": 21}, "logprobs"),
    ("completions", COMPLETION | {"echo": True}, "echo"),
    ("completions", COMPLETION | {"suffix": "end"}, "suffix"),
    ("completions", COMPLETION | {"best_of": 3}, "best_of"),
    ("completions", COMPLETION | {"logit_bias": {"99999": 1}}, "logit_bias"),
    ("completions", COMPLETION | {"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ("completions", COMPLETION | {"stop": [""]}, "stop.0"),
    ("completions", COMPLETION | {"stop": "a" * 1001}, "stop"),
    ("completions", COMPLETION | {"stop": ["a"] * 17}, "stop"),
    ("completions", COMPLETION | {"prompt": ""}, "prompt"),
    ("completions", COMPLETION | {"prompt": []}, "prompt"),
    ("completions", COMPLETION | {"prompt": [10**6]}, "prompt"),
    ("completions", COMPLETION | {"prompt": ["a"] * 2_049}, "prompt"),
    ("completions", COMPLETION | {"prompt": "a " * 600}, "prompt"),
    ("completions", COMPLETION | {"prompt": "a" * 200_001}, "prompt"),
    ("completions", COMPLETION | {"prompt": "\ud800"}, "prompt"),
    ("completions", COMPLETION | {"prompt": {"text": "a"}}, "prompt"),
    ("completions", {"model": "tiny"}, "prompt"),
    ("completions", COMPLETION | {"model": "other"}, "model"),
    ("chat/completions", CHAT | {"messages": []}, "messages"),
    ("chat/completions", CHAT | {"messages": [{"role": "wizard", "content": "a"}]}, "messages.0.role"),
    ("chat/completions", CHAT | {"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
    (
        "chat/completions",
        CHAT | {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages.0.content",
    ),
    ("chat/completions", CHAT | {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content"),
    ("chat/completions", CHAT | {"messages": [{"role": "assistant", "content": "loop"}]}, "messages"),
    (
        "chat/completions",
        CHAT | {"messages": [{"role": "user", "content": "a", "name": "b" * 200_001}]},
        "messages.0.name",
    ),
    ("chat/completions", CHAT | {"top_logprobs": 2}, "top_logprobs"),
    ("completions", COMPLETION | {"stop_token_ids": [10**6]}, "stop_token_ids"),
    ("completions", COMPLETION | {"min_p": 1.5}, "min_p"),
    ("completions", COMPLETION | {"max_tokens": 2.5}, "max_tokens"),
    ("chat/completions", CHAT | {"continue_final_message": True}, "continue_final_message"),
    ("chat/completions", CHAT | {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ("chat/completions", CHAT | {"chat_template_kwargs": {"deadline": 1}}, "chat_template_kwargs"),
    ("chat/completions", CHAT | {"chat_template_kwargs": {"tokenizer": ""}}, "chat_template_kwargs"),
    ("chat/completions", CHAT | {"chat_template_kwargs": {"self": ""}}, "chat_template_kwargs"),
    ("chat/completions", CHAT | {"stream": "yes"}, "stream"),
]


# By the parameter, or by the beginning of the prompt.
CODES = {
    "model": "model_not_found", "a a ": "context_length_exceeded",
    **dict.fromkeys(("aaaa", "messages.0.name"), "string_above_max_length"),
    **dict.fromkeys(
        ("echo", "suffix", "continue_final_message"), "unsupported_parameter"
    ),
}  # fmt: skip


@each("path, body, param", WRONG)
def test_errors_name_the_cause(path, body, param, server, http) -> None:
    text = json.dumps(body)  # NaN and lone surrogates too
    answer = http.post(f"{server.url}/v1/{path}", content=text, headers={"content-type": "application/json"})
    assert answer.status_code == (404 if param == "model" else 400), answer.text
    error = answer.json()["error"]
    assert error["param"] == param and error["message"] and error["type"].endswith("_error")
    assert error["code"] == CODES.get(str(body.get("prompt"))[:4] if param == "prompt" else param)


async def test_chats_of_many_messages_delay_no_other_chat(server) -> None:
    many = json.dumps({"messages": [{"role": "user", "content": "a"}] * 40_000})
    kind = {"content-type": "application/json"}
    clients = httpx.Limits(max_connections=7)
    async with httpx.AsyncClient(base_url=f"{server.url}/v1", timeout=60, limits=clients) as http:
        long = [asyncio.create_task(http.post("/chat/completions", content=many, headers=kind)) for _ in range(6)]
        await asyncio.wait(long, timeout=0.5, return_when=asyncio.FIRST_COMPLETED)
        began = time.monotonic()
        answer = await http.post("/chat/completions", json=CHAT)
        assert answer.status_code == 200 and time.monotonic() - began < 2
        assert [each.status_code for each in await asyncio.gather(*long)] == [400] * 6


LETTERS = [{"type": "text", "text": "a"}]


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "a"}] * 2049,
        [{"role": "user", "content": LETTERS * 1025}] * 2,
        [{"role": "user", "content": "a" * 31}, {"role": "user", "content": "a" * 30}],
        [{"role": "user", "content": "a" * 31, "name": "a" * 30}],
        [{"role": "user", "content": "a", "name": "a" * 41}],
    ],
    ids=["messages", "parts", "characters", "with a name", "a name"],
)
async def test_a_chat_is_bounded_before_it_is_read(messages, folder, calls_of) -> None:
    service: Any = open_service(folder, limits=Limits(max_chat_chars=60, max_text_chars=40))
    read = calls_of(service.session, "chat_ids")
    async with serving(service) as client:
        answer = await client.post("/v1/chat/completions", json={"messages": messages})
        assert answer.status_code == 400 and answer.json()["error"]["param"].startswith("messages") and not read
        fitting = [{"role": "user", "content": "a" * 23, "name": "a" * 10}, {"role": "user", "content": LETTERS * 10}]
        answer = await client.post("/v1/chat/completions", json={"messages": fitting, "max_tokens": 1})
        assert answer.status_code == 200 and len(read) == 1


CHAT_A: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}


def called(text: str) -> dict[str, Any]:
    call = {"id": "b", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": text})}}
    return {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]}


# By part of a chat: the body for a text there. A template may read any of them.
PARTS: dict[str, Callable[[str], dict[str, Any]]] = {
    "content": lambda text: {"messages": [{"role": "user", "content": text}]},
    "parts": lambda text: {"messages": [{"role": "user", "content": [{"type": "text", "text": text}]}]},
    "name": lambda text: {"messages": [{"role": "user", "content": "a", "name": text}]},
    "calls": called,
    "answer of a call": lambda text: {"messages": [{"role": "tool", "content": "a", "tool_call_id": text}]},
    "reasoning": lambda text: {"messages": [{"role": "assistant", "content": "a", "reasoning_content": text}]},
    "tools": lambda text: {**CHAT_A, "tools": [{"type": "function", "function": {"name": "f", "description": text}}]},
    "variables": lambda text: {**CHAT_A, "chat_template_kwargs": {"note": text}},
    "variables in a list": lambda text: {**CHAT_A, "chat_template_kwargs": {"note": [text]}},
}


async def test_all_text_of_a_chat_counts(folder) -> None:
    async with serving(open_service(folder, limits=Limits(max_chat_chars=200))) as client:
        for part, body in PARTS.items():
            for text, status in (("a", 200), ("a" * 200, 400)):
                answer = await client.post("/v1/chat/completions", json={**body(text), "max_tokens": 1})
                assert answer.status_code == status, (part, answer.text)
                assert status == 200 or "200" in answer.json()["error"]["message"], part


def test_unknown_fields_and_neutral_values_are_accepted(client) -> None:
    neutral = {"tools": [], "response_format": {"type": "text"}, "store": False, "user": "me", "tool_choice": "auto"}
    found = client.chat.completions.create(**CHAT, extra_body=neutral | {"newest_field": {"a": 1}})
    assert found.choices


@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff\xfe{}", b"[" * 100_000, b'{"prompt": 1e999}', b'{"n": ' + b"9" * 5000 + b"}", b"null"]
)
def test_an_invalid_body_is_an_error_in_the_routes_format(body, server) -> None:
    headers = {"content-type": "application/json"}
    answer = httpx.post(f"{server.url}/v1/completions", content=body, headers=headers, timeout=20)
    assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error", answer.text
    assert answer.json()["error"]["param"] in (None, "prompt")


@pytest.mark.parametrize("headers", [{"content-type": "application/json"}, {}])
def test_a_request_without_a_body_is_told_that_it_needs_json(headers, server) -> None:
    answer = httpx.post(f"{server.url}/v1/completions", headers=headers)
    assert answer.status_code == 400 and "JSON" in answer.json()["error"]["message"]


def test_a_model_without_a_template_has_no_chat(tmp_path) -> None:
    with running(models.generator(tmp_path / "plain", template=None)) as found:
        answer = httpx.post(f"{found.url}/v1/chat/completions", json=CHAT | {"model": "plain"})
        assert answer.status_code == 400 and "/v1/completions" in answer.json()["error"]["message"]
        answer = httpx.post(f"{found.url}/v1/completions", json={"prompt": "a", "temperature": 0, "max_tokens": 3})
        assert answer.status_code == 200


def open_request(url: str, path: str, body: dict[str, Any]) -> socket.socket:
    """Sends a request and returns its connection, from which nothing has been read."""
    found = urllib.parse.urlsplit(url)
    content = json.dumps(body).encode()
    connection = socket.create_connection((found.hostname, found.port))
    connection.sendall(post_head(path, len(content)).encode() + content)
    return connection


@pytest.mark.parametrize(
    "stream, times", [(False, 2), (True, 2), pytest.param(True, 50, marks=pytest.mark.slow)]
)  # the slow one: each of 50 times, not in the mean
def test_the_request_of_a_client_that_disconnects_is_cancelled(stream, times, tmp_path) -> None:
    # So many layers and positions that an answer takes seconds.
    folder = models.generator(tmp_path / "slow", num_layers=16, max_len=2048)
    limits = Limits(max_new_tokens=2000)
    with running(folder, limits) as found:
        body = {"prompt": "the dog", "max_tokens": 1900, "stream": stream, "min_tokens": 1900, "n": 2, "logprobs": 2}
        for _ in range(times):
            connection = open_request(found.url, "/v1/completions", body)
            until(lambda: found.service.session.stats().running == 2)
            connection.close()
            until(lambda: found.service.session.stats().running == 0)
        until(lambda: found.service.session.stats().free_tokens >= found.service.session.stats().capacity_tokens)
        assert found.service.session.stats().cancelled == times
        code = 200 if stream else 499  # the head of a stream was sent
        line = f'fastformer_requests_total{{code="{code}",route="/v1/completions"}} {float(times)}'
        until(lambda: line in httpx.get(f"{found.url}/metrics").text)


async def test_a_full_queue_and_a_deadline_are_errors_in_openais_format(folder) -> None:
    with running(folder, Limits(max_waiting=2)) as found, httpx.Client(base_url=found.url, timeout=60) as http:
        body = {"prompt": "the dog", "max_tokens": 400, "min_tokens": 400}
        async with httpx.AsyncClient(base_url=found.url, timeout=60, limits=httpx.Limits(max_connections=40)) as many:
            answers = await asyncio.gather(*(many.post("/v1/completions", json=body) for _ in range(40)))
        assert {answer.status_code for answer in answers} == {200, 429}
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert 1 <= int(refused.headers["retry-after"]) <= 30
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        late = http.post("/v1/completions", json=body | {"timeout": 0.001})
        assert late.status_code == 504 and late.json()["error"]["code"] == "timeout"
        said = b""
        late = http.stream("POST", "/v1/completions", json=body | {"timeout": 0.1, "stream": True})
        # It ends where the time does, and isn't whole.
        with contextlib.suppress(httpx.RemoteProtocolError), late as stream:
            for part in stream.iter_raw():
                said += part
        assert b'"timeout_error"' in said and b"[DONE]" not in said
        assert said.count(b"event: error") == said.count(b'"error":{') == 1
        until(lambda: found.service.session.stats().running == 0 == found.service.session.stats().waiting)


async def test_what_a_folder_samples_with_is_a_default_of_openais_routes_alone(folder, tmp_path) -> None:
    """Each option of generation_config.json, for requests that have it and requests that omit it."""
    own = {"temperature": 0.3, "top_k": 2, "top_p": 0.4, "repetition_penalty": 3.0}
    copy = shutil.copytree(folder, tmp_path / "tiny")
    (copy / "generation_config.json").write_text(json.dumps({"do_sample": True, **own}))
    neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
    async with serving(open_service(copy)) as http, serving(open_service(folder)) as plain:

        async def texts(client: Any, **options: Any) -> tuple[Any, Any]:
            body = {"prompt": PROMPTS[0], "max_tokens": 12, "seed": 5, **options}
            completion = await client.post("/v1/completions", json=body)
            options = {name: value for name, value in options.items() if (name, value) != ("top_k", 0)}
            body = {"inputs": PROMPTS[0], "parameters": {"max_new_tokens": 12, "do_sample": True, "seed": 5, **options}}
            generated = await client.post("/generate", json=body)
            return completion.json()["choices"][0]["text"], generated.json()["generated_text"]

        assert await texts(http, **neutral) == await texts(plain, **neutral)
        for name, value in own.items():
            given = {each: default for each, default in neutral.items() if each != name}
            of_folder, of_tgi = await texts(http, **given)
            explicit = await texts(plain, **{**given, name: value})
            assert of_folder == explicit[0] != (await texts(plain, **neutral))[0], name
            # TGI's routes take an option that shapes the distribution from the request alone.
            assert of_tgi == (explicit if name == "repetition_penalty" else await texts(plain, **given))[1], name


def test_drafted_tokens_are_counted_and_change_nothing(folder, server) -> None:
    body = {"prompt": "the dog", "max_tokens": 24, "temperature": 0, "logit_bias": {"20": 100}}  # it repeats itself
    service = open_service(folder, options={"prompt_lookup_num_tokens": 6})
    with running(service, metrics_public=True) as drafting:
        found, due = (httpx.post(f"{one.url}/v1/completions", json=body).json() for one in (drafting, server))
        assert found["choices"] == due["choices"] and "completion_tokens_details" not in due["usage"]
        counts = found["usage"]["completion_tokens_details"]
        assert 0 < counts["accepted_prediction_tokens"] < found["usage"]["completion_tokens"]
        total = re.search(r"^fastformer_drafted_tokens_total (\d+)", httpx.get(f"{drafting.url}/metrics").text, re.M)
        assert total is not None and int(total[1]) == sum(counts.values())
