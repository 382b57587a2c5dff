"""The pieces of a stream, joined, are the whole answer: texts, tokens, reasons and counts of each choice."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from fastformer.generation.jobs import NotRunning, Stream, TooLate
from fastformer.serving import Limits, answers, make_app, open_service, openai, tgi, translate
from fastformer.serving.answers import FAILED, EventStream, as_json, event
from tests.serving import models
from tests.serving.asking import events, serving
from tests.serving.servers import running

httpx = pytest.importorskip("httpx", reason="the httpx library is not installed")
pytest.importorskip("tokenizers", reason="the tokenizers library is not installed")

LONG = "a woman reads a book and two men walk the dog in the park and the dog sees two birds"
D = models.tokenizer().encode("d")[0]
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "logit_bias": {str(D): 100}, "stop": "ddd"},
    {"temperature": 1, "seed": 3},
    {"temperature": 1, "seed": 3, "stop": ["e", "a"]},
    {"temperature": 0, "logit_bias": {"1": 100}},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return models.generator(tmp_path_factory.mktemp("models") / "tiny")


def joined(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Returns the choices of a stream as those of a whole answer, by index."""
    found: dict[int, dict[str, Any]] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        one = found.setdefault(choice["index"], {"text": "", "logprobs": {}, "finish_reason": None})
        assert one["finish_reason"] is None, "nothing follows a choice's end"
        one["text"] += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        one["finish_reason"] = choice["finish_reason"]
        for name, value in (choice["logprobs"] or {}).items():
            one["logprobs"].setdefault(name, []).extend(value or ())
    return found


def whole(choice: Mapping[str, Any]) -> dict[str, Any]:
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    logprobs = {name: value or [] for name, value in choice["logprobs"].items()}
    return {"text": text, "logprobs": logprobs, "finish_reason": choice["finish_reason"]}


def test_an_event_is_a_line_wherever_a_client_ends_lines() -> None:
    value = {"text": "a\u2028b\u2029c\x85d\x1ee\r\nf é"}
    line, last = event(value).decode().splitlines()
    assert json.loads(line.removeprefix("data: ")) == value and last == ""


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
async def test_a_stream_is_the_whole_answer(route, folder) -> None:
    is_chat = "chat" in route
    asked = {"messages": [{"role": "user", "content": LONG}], "logprobs": True, "top_logprobs": 2}
    texts = [LONG, "two birds"]
    async with serving(open_service(folder)) as client:
        for n in (1, 2):
            for options in OPTIONS:
                body = {**(asked if is_chat else {"prompt": texts, "logprobs": 2}), "max_tokens": 12, "n": n, **options}
                await client.post(route, json=body)  # from here on, the cache holds the prompts
                plain = (await client.post(route, json=body)).json()
                with_usage = {"stream": True, "stream_options": {"include_usage": True}}
                answer = await client.post(route, json=body | with_usage)
                *chunks, last = events(answer.text)
                assert answer.text.endswith("data: [DONE]\n\n")
                kind = "chat.completion" if is_chat else "text_completion"
                assert plain["object"] == kind and {chunk["object"] for chunk in chunks} == {
                    "chat.completion.chunk" if is_chat else kind
                }
                for one in (plain, *chunks):
                    assert one["id"].startswith("chatcmpl-" if is_chat else "cmpl-") and one["model"] == "tiny"
                    assert abs(one["created"] - time.time()) < 60
                assert joined(chunks) == {choice["index"]: whole(choice) for choice in plain["choices"]}
                count = n if is_chat else 2 * n
                assert [choice["index"] for choice in plain["choices"]] == [*range(count)]
                assert last["usage"] == plain["usage"] and last["choices"] == []
                # What the counts are: each choice's tokens, and each prompt once.
                entries = [choice["logprobs"] for choice in plain["choices"]]
                tokens = sum(len(one["content"] if is_chat else one["tokens"]) for one in entries)
                usage = plain["usage"]
                assert usage["completion_tokens"] == tokens == usage["total_tokens"] - usage["prompt_tokens"]
                alone = (await client.post(route, json=body | {"n": 1})).json()["usage"]
                assert alone["prompt_tokens"] == usage["prompt_tokens"]
                assert 0 < usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]
                assert usage["prompt_tokens_details"] == alone["prompt_tokens_details"]
                if not is_chat:  # each choice is an answer to its own prompt
                    for place, text in enumerate(texts):
                        own = (await client.post(route, json=body | {"prompt": text})).json()["choices"]
                        assert [whole(one) for one in own] == [
                            whole(one) for one in plain["choices"][place * n : place * n + n]
                        ]


async def test_a_stream_of_tgi_is_the_whole_answer(folder) -> None:
    async with serving(open_service(folder)) as client:
        said = await client.post("/generate", json={"inputs": LONG, "parameters": {"max_new_tokens": 12}})
        stop = {"stop": ["no such text", said.json()["generated_text"][3:5]]}
        for options in ({}, {"do_sample": True, "seed": 2}, stop, {"return_full_text": True}):
            parameters = {"max_new_tokens": 12, "details": True, **options}
            plain = (await client.post("/generate", json={"inputs": LONG, "parameters": parameters})).json()
            answer = await client.post("/generate", json={"inputs": LONG, "parameters": parameters, "stream": True})
            pieces = events(answer.text)
            last, details = pieces[-1], plain["details"]
            assert last["generated_text"] == plain["generated_text"]
            before = LONG if "return_full_text" in options else ""
            assert before + "".join(one["token"]["text"] for one in pieces) == plain["generated_text"]
            assert [one["index"] for one in pieces] == [*range(1, len(pieces) + 1)]
            shown = ("id", "logprob", "special")
            tokens = [{name: one["token"][name] for name in shown} for one in pieces]
            assert tokens == [{name: one[name] for name in shown} for one in details["tokens"]]
            told = {name: last["details"][name] for name in ("finish_reason", "generated_tokens", "seed")}
            assert told == {name: details[name] for name in told}
            assert told["finish_reason"] == ("stop_sequence" if "stop" in options else "length")
            texts = "".join(one["text"] for one in details["tokens"] if not one["special"])
            assert (before + texts).startswith(plain["generated_text"])


async def test_the_room_behind_a_prompt_may_be_filled_and_not_exceeded(folder) -> None:
    async with serving(open_service(folder)) as client:
        ended = {"temperature": 0, "logit_bias": {"1": 100}}
        for route, body in (
            ("/v1/completions", {"prompt": LONG}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
        ):
            first = (await client.post(route, json={**body, **ended})).json()
            room = models.MAX_LEN - first["usage"]["prompt_tokens"]
            fits = await client.post(route, json={**body, **ended, "max_tokens": room})
            assert fits.status_code == 200
            long = json.loads(json.dumps(body).replace(LONG, LONG * 50))
            for more in ({**body, "max_tokens": room + 1}, long):
                beyond = await client.post(route, json={**ended, **more})
                assert beyond.status_code == 400 and beyond.json()["error"]["code"] == "context_length_exceeded"


async def test_ids_end_an_answer_and_least_shares_are_of_the_likeliest_token(folder) -> None:
    async with serving(open_service(folder)) as client:
        for route, body in (
            ("/v1/completions", {"prompt": LONG}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
        ):
            forced = {**body, "temperature": 0, "max_tokens": 6, "logit_bias": {str(D): 50}}
            ended = (await client.post(route, json={**forced, "stop_token_ids": [D]})).json()
            assert ended["choices"][0]["finish_reason"] == "stop" and ended["usage"]["completion_tokens"] == 1
            # The model's own ends still count.
            own = (await client.post(route, json={**forced, "logit_bias": {"1": 50}, "stop_token_ids": [D]})).json()
            assert own["choices"][0]["finish_reason"] == "stop" and own["usage"]["completion_tokens"] == 1
            greedy = (await client.post(route, json={**body, "temperature": 0, "max_tokens": 6})).json()
            sampled = {**body, "max_tokens": 6, "temperature": 1.7, "seed": 1}
            least = (await client.post(route, json={**sampled, "min_p": 1.0})).json()
            drawn = (await client.post(route, json={**sampled, "min_p": 0})).json()
            text = "text" if "prompt" in body else "message"
            assert least["choices"][0][text] == greedy["choices"][0][text] != drawn["choices"][0][text]


async def test_metrics_count_the_tokens_of_answers(folder) -> None:
    async with serving(open_service(folder)) as client:
        usage = (await client.post("/v1/completions", json={"prompt": LONG, "max_tokens": 3, "seed": 1})).json()[
            "usage"
        ]
        metrics = (await client.get("/metrics")).text
        assert f"fastformer_new_tokens_total {float(usage['completion_tokens'])}\n" in metrics
        assert f"fastformer_prompt_tokens_total {float(usage['prompt_tokens'])}\n" in metrics


async def test_a_closed_service_tells_when_to_ask_again(folder) -> None:
    httpx = pytest.importorskip("httpx", reason="the httpx library is not installed")
    transport = httpx.ASGITransport(make_app(open_service(folder)), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        answer = await client.post("/v1/completions", json={"prompt": "a"})
        assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1


async def test_a_failing_request_of_a_stream_is_an_error_of_its_format(folder) -> None:
    service: Any = open_service(folder, limits=Limits(timeout_s=1e-6))
    async with serving(service) as client:
        for route, body in (
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
            ("/generate", {"inputs": "a"}),
        ):
            for stream in (False, True):
                # A client's time above the server's doesn't count.
                answer = await client.post(route, json={**body, "stream": stream, "timeout": 100})
                assert answer.status_code == 504 and json.loads(answer.text)["error"]


async def test_a_silent_stream_has_comments_and_is_not_buffered(monkeypatch) -> None:
    assert 1 <= answers._PING_SECONDS <= 30  # proxies wait for 60 s, and some for less
    monkeypatch.setattr(answers, "_PING_SECONDS", 0.01)

    async def slow() -> AsyncGenerator[bytes, None]:
        yield event({"a": 1})
        await asyncio.sleep(0.1)
        yield event({"a": "é"})

    stream = EventStream(slow())
    parts = [bytes(part) async for part in stream.body_iterator]
    assert parts[0] == b'data: {"a":1}\n\n' and parts[-1] == 'data: {"a":"é"}\n\n'.encode() and len(parts) > 2
    assert all(part.startswith(b":") and part.endswith(b"\n\n") for part in parts[1:-1])
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert (stream.headers["cache-control"], stream.headers["x-accel-buffering"]) == ("no-cache", "no")


def test_what_json_cannot_hold() -> None:
    assert json.loads(as_json("\ud800")) == "\ud800"
    for number in (float("nan"), float("inf")):
        with pytest.raises(RuntimeError):  # no fault of the request
            as_json([number])


# A request of each route that streams, the kind of its service, and the format of its errors.
STREAMS: dict[str, tuple[str, dict[str, Any], Any]] = {
    "/v1/completions": ("generator", {"prompt": LONG, "max_tokens": 9, "min_tokens": 9}, openai),
    "/v1/chat/completions": ("generator", {"messages": [{"role": "user", "content": "a"}], "min_tokens": 9}, openai),
    "/generate": ("generator", {"inputs": LONG}, tgi),
    "/v1/translate": ("translator", {"text": "one. two. three."}, translate),
}


@pytest.fixture(scope="module")
def urls(folder, translator_folder) -> Iterator[dict[str, str]]:
    """Returns the URL of a real server for each kind of service."""
    with running(folder) as generator, running(translator_folder) as translator:
        yield {"generator": generator.url, "translator": translator.url}


@pytest.mark.parametrize("route", STREAMS)
def test_a_stream_that_fails_has_an_error_as_its_last_event_and_no_end(route, urls, monkeypatch) -> None:
    kind, body, form = STREAMS[route]
    for error, status, message in (
        (RuntimeError("a secret"), 500, FAILED),
        (TooLate("no time is left"), 504, "no time is left"),
        (NotRunning("closed"), 503, "closed"),
    ):

        async def fails(pieces: Any, error: Exception = error) -> Any:
            raise error

        monkeypatch.setattr(Stream, "__anext__", fails)
        received = b""
        request = httpx.stream("POST", urls[kind] + route, json={**body, "stream": True}, timeout=20)
        with pytest.raises(httpx.RemoteProtocolError), request as stream:
            assert stream.status_code == 200
            for part in stream.iter_raw():
                received += part
        name, data = received.decode().removesuffix("\n\n").split("\n\n")[-1].split("\n")
        assert name == "event: error" and b"[DONE]" not in received
        due = json.loads(form.error_response(status, message).body)
        assert json.loads(data.removeprefix("data: ")) == due
