"""Tests keys for every route, limits on bodies, a full queue, a dead engine, and the pages for operators."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import re
import socket
import threading
from collections.abc import AsyncIterator
from typing import Any
from unittest import mock

import httpx
import pytest

from fastformer import __version__
from fastformer.generation.jobs import QUEUE_BOUNDS, SessionStats
from fastformer.serving import Limits, make_app, open_service
from fastformer.serving.answers import EndedEarly
from fastformer.serving.gate import Traffic, Watch, read_keys
from fastformer.serving.metrics import Metrics
from fastformer.serving.run import Server, bound
from tests.serving import models
from tests.serving.asking import serving
from tests.serving.servers import running

KEYS = ("one-key", "another")
STATES = ("/", "/health", "/ready", "/metrics", "/v1/info")


def routes(app) -> list[tuple[str, str]]:
    """Returns each route with a method, according to the application."""
    found = {(path, "GET") for path in ("/", "/health", "/ready", "/metrics", "/openapi.json")}
    for path, methods in app.openapi()["paths"].items():
        found |= {(path, method.upper()) for method in methods}
    known = {re.sub(r":\w+}", "}", template) for _, template in app.state.paths.templates.patterns}
    assert known <= {path for path, _ in found}, "a route that /openapi.json hides has to be named here"
    return sorted(found)


@pytest.mark.parametrize("kind", ["translator", "generator", "encoder", "multi-vector", "cross-encoder", "speech"])
async def test_every_route_asks_for_a_key(kind, tmp_path, translator_folder) -> None:
    if kind != "translator":
        pytest.importorskip("transformers", reason="the folders are written by transformers")
    folder = models.folder_of(kind, tmp_path / "model", translator_folder)
    async with serving(open_service(folder), keys=KEYS) as client:
        assert client.app.state.service.kind == kind
        assert len(routes(client.app)) >= 10 or kind != "translator"
        for path, methods in client.app.openapi()["paths"].items():
            for told in methods.values() if path not in STATES else ():
                assert {"401", "503"} <= told["responses"].keys(), path
                assert all(
                    each["description"] not in ("", "Additional Response") for each in told["responses"].values()
                )
        for path, method in routes(client.app):
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "one-key"}):
                answer = await client.request(method, path, headers=headers)
                expected = {200} if path in ("/health", "/ready") else {401}
                assert answer.status_code in expected, (path, answer.status_code)
            for key in KEYS:
                answer = await client.request(method, path, headers={"Authorization": f"Bearer {key}"})
                assert answer.status_code != 401, path
        for path in ("/nowhere", "//health", "/health/", "/ready/../metrics", "/%2e/metrics", "/HEALTH"):
            assert (await client.get(path)).status_code == 401, path


async def test_libretranslates_clients_send_the_key_in_the_body(translator_folder) -> None:
    async with serving(open_service(translator_folder), keys=KEYS) as client:
        for kind in ("json", "data"):
            for key, status in (("another", 200), ("wrong", 401)):
                body = {"q": "a", "source": "und", "target": "und", "api_key": key}
                answer = await client.post("/translate", **{kind: body})
                assert answer.status_code == status and answer.json().keys() <= {"error", "translatedText"}
            assert (
                await client.post("/v1/translate", **{kind: {"text": "a", "api_key": "another"}})
            ).status_code == 401


async def test_public_paths_are_documented(translator_folder) -> None:
    public: dict[str, set[str]] = {"metrics_public": {"/metrics"}, "page_public": {"/"}}
    for flags in (["metrics_public"], ["page_public"], [*public]):
        async with serving(open_service(translator_folder), keys=KEYS, **dict.fromkeys(flags, True)) as client:
            found = {path for path in ("/", "/metrics", "/v1/info") if (await client.get(path)).status_code == 200}
            assert found == {path for flag in flags for path in public[flag]}


def test_keys_of_files_and_of_the_environment(tmp_path, monkeypatch) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the team\n first \n\nsecond\n")
    monkeypatch.setenv("FASTFORMER_API_KEYS", "third, first")
    assert set(read_keys(file)) == {"first", "second", "third"} and set(read_keys()) == {"first", "third"}
    for wrong in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(ValueError, match=tmp_path.name):
            read_keys(wrong)
    file.write_bytes(b"\xef\xbb\xbffourth\r\n")  # as Windows' editors save it
    assert "fourth" in read_keys(file)
    file.write_bytes("fourth".encode("utf-16"))
    with pytest.raises(ValueError, match=file.name):
        read_keys(file)
    file.write_text("# none\n")
    with pytest.raises(ValueError, match="key"):
        read_keys(file)


@pytest.mark.parametrize("is_chunked", [False, True], ids=["with a length", "chunked"])
async def test_a_large_body_is_413(translator_folder, is_chunked) -> None:
    async def parts(count):
        for _ in range(count):
            yield b"x" * 100

    async with serving(open_service(translator_folder, limits=Limits(max_body_bytes=1000))) as client:
        for count, status in ((10, 400), (11, 413)):
            body = parts(count) if is_chunked else b"x" * 100 * count
            answer = await client.post("/v1/translate", content=body, headers={"Content-Type": "application/json"})
            assert answer.status_code == status and answer.json()["error"]["code"] == status


async def test_a_client_that_waits_for_permission_is_refused_before_its_body(translator_folder) -> None:
    app = make_app(open_service(translator_folder, limits=Limits(max_body_bytes=1000)))
    for more, message, status in (
        ([(b"expect", b"100-continue")], {"type": "http.request", "body": b"", "more_body": True}, 413),
        ([], {"type": "http.disconnect"}, None),  # nothing is answered
    ):
        send = mock.AsyncMock()
        headers = [(b"content-length", b"1001"), *more]
        scope = {"type": "http", "path": "/v1/translate", "method": "POST", "headers": headers}
        await app(scope, mock.AsyncMock(side_effect=[message]), send)
        starts = [call.args[0] for call in send.call_args_list if call.args[0]["type"] == "http.response.start"]
        assert [start["status"] for start in starts] == ([] if status is None else [status])


async def test_no_other_protocol_reaches_the_routes(translator_folder) -> None:
    send = mock.AsyncMock()
    app = make_app(open_service(translator_folder), keys=KEYS)
    await app({"type": "websocket", "path": "/", "headers": []}, mock.AsyncMock(), send)
    send.assert_not_called()


async def test_the_rest_of_a_large_body_is_read_for_a_while_only(translator_folder) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while sent < 100:
            sent += 1
            yield part

    part = b"x" * (1 << 20)
    async with serving(open_service(translator_folder, limits=Limits(max_body_bytes=1000))) as client:
        assert (await client.post("/v1/translate", content=endless())).status_code == 413 and sent < 80


async def test_a_body_comes_in_time(translator_folder) -> None:
    async def slow() -> AsyncIterator[bytes]:
        yield b'{"text"'
        await asyncio.sleep(0.3)
        yield b': "a"}'

    for name, status in (("body_s", 408), ("write_s", 200)):
        limits = Limits(**{"body_s": 60.0, "write_s": 60.0, name: 0.1})
        async with serving(open_service(translator_folder, limits=limits)) as client:
            headers = {"Content-Type": "application/json"}
            answer = await client.post("/v1/translate", content=slow(), headers=headers)
            assert answer.status_code == status and ("connection" in answer.headers) == (status == 408)


async def test_each_reason_of_a_refusal_is_counted_by_its_name(translator_folder) -> None:
    service: Any = open_service(translator_folder, limits=Limits(max_body_bytes=100, max_waiting=1))
    async with serving(service, keys=KEYS, hosts=["here"]) as client:
        traffic, key = client.app.state.traffic, {"Authorization": f"Bearer {KEYS[0]}"}

        async def refused(text: str, **headers: str) -> int:
            return (await client.post("/v1/translate", json={"text": text}, headers=headers)).status_code

        async def counts() -> dict[str, float]:
            text = (await client.get("/metrics", headers=key)).text
            found = re.findall(r'fastformer_rejected_total{reason="(\w+)"} (\S+)', text)
            return {reason: float(count) for reason, count in found}

        taken, leave = asyncio.Event(), asyncio.Event()

        async def hold() -> None:
            with service.session.place():
                taken.set()
                await leave.wait()

        assert await refused("a") == 401 and await counts() == {"key": 1}
        assert await refused("a", Host="evil.example", **key) == 403 and await counts() == {"key": 1}
        assert await refused("a" * 100, **key) == 413 and await counts() == {"key": 1, "large": 1}
        late = await client.post("/v1/translate", json={"text": "a", "timeout": 1e-9}, headers=key)
        assert late.status_code == 504 and await counts() == {"key": 1, "large": 1, "late": 1}
        held = asyncio.ensure_future(hold())
        await taken.wait()
        assert await refused("a", **key) == 429 and await counts() == {"key": 1, "large": 1, "late": 1, "full": 1}
        leave.set()
        await held
        assert (await client.post("/v1/translate", json={}, headers=key)).status_code == 400
        traffic.is_refusing = True
        assert await refused("a", **key) == 503
        traffic.is_refusing = False
        assert await counts() == {"key": 1, "large": 1, "late": 1, "full": 1, "ending": 1}


async def test_the_time_to_the_first_byte_is_not_that_to_the_last(translator_folder) -> None:
    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        await asyncio.sleep(0.1)
        await send({"type": "http.response.body", "body": b"b"})

    metrics = Metrics(open_service(translator_folder))
    watch = Watch(slow, Traffic(), metrics, lambda path: path, mock.Mock(), logs=False)
    await watch({"type": "http", "path": "/a", "method": "GET"}, mock.AsyncMock(), mock.AsyncMock())
    found = dict(re.findall(r"^fastformer_(\S+_sum){route=\"/a\"} (\S+)$", metrics.text().decode(), re.M))
    first, whole = (float(found[f"{name}_seconds_sum"]) for name in ("time_to_first_byte", "request"))
    assert 0 < first < whole - 0.05


async def test_a_full_queue_is_429_with_a_time_and_reads_no_body(translator_folder) -> None:
    # No more requests are begun than there are places, and the others end before their bodies are made into anything.
    service: Any = open_service(translator_folder, limits=Limits(max_waiting=3), max_batch_size=1)
    begun: list[int] = []
    check = service.check_texts

    def counted(texts):
        begun.append(len(texts))
        check(texts)

    service.check_texts = counted
    async with serving(service, keys=KEYS) as client:
        gate = threading.Event()
        held = asyncio.ensure_future(service.session.call(lambda: gate.wait(5)))
        await asyncio.sleep(0.05)
        key = {"Authorization": f"Bearer {KEYS[0]}"}
        ask, old = {"text": "a"}, {"q": "a", "source": "und", "target": "und", "api_key": KEYS[0]}
        posts = [client.post("/v1/translate", json=ask, headers=key) for _ in range(12)]
        tasks = [asyncio.ensure_future(post) for post in posts]
        while service.session.stats().refused < 9:
            await asyncio.sleep(0.01)
        assert len(begun) == 3
        stream = await client.post("/v1/translate", json=ask | {"stream": True}, headers=key)
        assert stream.status_code == 429 and 1 <= int(stream.headers["retry-after"]) <= 30
        told = await client.post("/translate", json=old, headers=key)
        assert told.status_code == 429 and told.json().keys() == {"error"} and "retry-after" in told.headers
        for path in ("/v1/translate", "/translate"):
            assert (await client.post(path, content=b"{", headers=key)).status_code == 429
            assert (await client.post(path, content=b"{")).status_code == 401
        assert (await client.post("/detect", json=old)).status_code == 200  # needs no place
        assert (await client.get("/languages", headers=key)).status_code == 200
        assert (await client.get("/v1/translate", headers=key)).status_code == 405
        gate.set()
        await held
        assert sorted(answer.status_code for answer in await asyncio.gather(*tasks)) == [200] * 3 + [429] * 9
        stats = service.session.stats()
        assert stats.running == stats.waiting == 0 and stats.free_tokens == stats.capacity_tokens
        for _ in range(5):  # a request that is wrong gives its place back
            assert (await client.post("/v1/translate", content=b"{", headers=key)).status_code == 400
        assert (await client.post("/v1/translate", json=ask, headers=key)).status_code == 200
        text = (await client.get("/metrics", headers=key)).text
        assert 'fastformer_rejected_total{reason="full"} 13.0' in text
        assert 'fastformer_queue_seconds_bucket{le="+Inf"} 4.0' in text and "fastformer_queue_seconds_sum" in text


LONG = "a b " * 1000  # too long to be read on the event loop
WAITING: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "translator": [
        ("/v1/translate", {"text": LONG}), ("/v1/translate", {"text": LONG, "stream": True}),
        ("/v1/translate", {"text": "a", "source_lang": "auto"}), ("/detect", {"q": "a"}),
        ("/translate", {"q": LONG, "source": "und", "target": "und", "format": "html"}),
    ],
    "generator": [
        ("/v1/completions", {"prompt": LONG}), ("/generate", {"inputs": LONG}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ],
    "encoder": [("/v1/embeddings", {"input": LONG}), ("/embed", {"inputs": LONG})],
    "cross-encoder": [("/predict", {"inputs": LONG})],
}  # fmt: skip


@pytest.mark.parametrize("kind", WAITING)
async def test_the_deadline_of_a_request_counts_while_its_text_waits(kind, tmp_path, translator_folder) -> None:
    if kind != "translator":
        pytest.importorskip("transformers", reason="the folders are written by transformers")
    folder = models.folder_of(kind, tmp_path / "model", translator_folder)
    async with serving(open_service(folder, limits=Limits(timeout_s=0.1))) as client:
        begun, gate, service = threading.Event(), threading.Event(), client.app.state.service

        def wait() -> bool:
            begun.set()
            return gate.wait(10)

        held = asyncio.ensure_future(service.session.aside(wait, 10**6))
        assert await asyncio.to_thread(begun.wait, 10)  # until then shorter texts would be read before it
        answers = await asyncio.gather(*(client.post(path, json=body) for path, body in WAITING[kind]))
        assert {answer.status_code for answer in answers} == {504}
        assert service.session.stats().late == len(answers) and not gate.is_set()
        gate.set()
        assert await held


async def test_the_deadline_of_a_request_counts_while_it_waits_for_its_attention(translator_folder) -> None:
    service: Any = open_service(translator_folder, limits=Limits(timeout_s=0.3))
    async with serving(service) as client:
        gate, attend = threading.Event(), service.session.call

        async def held(*arguments: Any, **options: Any) -> Any:
            blocking = asyncio.ensure_future(attend(lambda: gate.wait(10)))
            await asyncio.sleep(0)
            try:
                return await attend(*arguments, **options)
            finally:
                gate.set()
                await blocking

        service.session.call = held
        answer = await client.post("/v1/translate", json={"text": "a", "attention": True, "max_new_tokens": 2})
        assert answer.status_code == 504


async def test_if_the_thread_has_died_every_request_is_503(translator_folder) -> None:
    service: Any = open_service(translator_folder)
    async with serving(service) as client:
        assert (await client.get("/health")).status_code == (await client.get("/ready")).status_code == 200
        await service.session.call(lambda: setattr(service.session, "_run", None))
        for _ in range(2):
            assert (await client.post("/v1/translate", json={"text": "a"})).status_code == 503
        assert (await client.get("/health")).status_code == (await client.get("/ready")).status_code == 503
        assert (await client.get("/metrics")).status_code == 200


async def test_an_error_of_the_model_is_500_and_contains_no_text(translator_folder, caplog) -> None:
    service: Any = open_service(translator_folder)

    def fails(*_):
        raise MemoryError("no room at all")

    caplog.set_level(logging.INFO, "fastformer")
    async with serving(service) as client:
        opened, service.session._engine.open = service.session._engine.open, fails
        answer = await client.post("/v1/translate", json={"text": "a secret text"})
        assert answer.status_code == 500 and answer.json()["error"]["code"] == 500
        service.session._engine.open = opened
        assert (await client.post("/v1/translate", json={"text": "a"})).status_code == 200

    assert "no room at all" in caplog.text and "secret" not in caplog.text


async def test_unexpected_errors_are_500_in_the_routes_format(translator_folder, caplog) -> None:
    service: Any = open_service(translator_folder)

    def fails(texts):
        raise KeyError(texts[0])

    async with serving(service) as client:
        service.check_texts = fails
        for path, body in (
            ("/v1/translate", {"text": "secret"}),
            ("/translate", {"q": "secret", "source": "", "target": ""}),
        ):
            answer = await client.post(path, json=body)
            assert answer.status_code == 500 and answer.json().keys() == {"error"}
            text = (await client.get("/metrics")).text
            assert f'fastformer_requests_total{{code="500",route="{path}"}} 1.0' in text
    assert "KeyError" in caplog.text and "fails" in caplog.text and "secret" not in caplog.text


def test_a_head_request_gets_the_head_of_the_response(translator_folder) -> None:
    """As `curl -I` and `wget --spider` ask for it."""
    with running(translator_folder) as found, httpx.Client(base_url=found.url) as client:
        for path in ("/health", "/ready", "/metrics", "/languages", "/"):
            head, whole = client.head(path), client.get(path)
            assert head.status_code == whole.status_code == 200 and not head.content and whole.content
            assert head.headers["content-type"] == whole.headers["content-type"]
        assert client.head("/v1/translate").status_code == 405
        assert client.get("/v1/translate").headers["allow"] == "POST"


async def test_a_path_with_a_trailing_slash_is_another(translator_folder) -> None:
    async with serving(open_service(translator_folder)) as client:
        for path in ("/v1/translate/", "/translate/", "/health/"):
            answer = await client.post(path, json={"text": "a"}, headers={"Host": "elsewhere"})
            assert answer.status_code == 404 and answer.json().keys() == {"error"}


async def test_the_access_log_has_no_text(translator_folder, caplog) -> None:
    caplog.set_level(logging.INFO, "fastformer")
    async with serving(open_service(translator_folder), access_log=True) as client:
        await client.post("/v1/translate", json={"text": "a secret text"})
        await client.post("/v1/translate?text=secret", json={"text": "a secret text", "secret": 1})
        await client.get("/secret/path")
        await client.get("/health")
    lines = [json.loads(record.message) for record in caplog.records if record.name == "fastformer.access"]
    assert [(one["route"], one["status"]) for one in lines] == [
        ("/v1/translate", 200), ("/v1/translate", 400), ("unmatched", 404),
    ]  # fmt: skip
    assert "secret" not in caplog.text


async def test_the_access_log_waits_for_no_long_answer(caplog) -> None:
    """Lines are written when no request runs, or in a moment, but not beside each answer."""
    caplog.set_level(logging.INFO, "fastformer.access")
    begun, end = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/long":
            begun.set()
            await end.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})

    watch = Watch(app, Traffic(), mock.Mock(), lambda path: path, mock.Mock(), logs=True)

    async def ask(path: str) -> None:
        scope = {"type": "http", "path": path, "method": "GET", "client": ("192.0.2.1", 5)}
        await watch(scope, mock.AsyncMock(), mock.AsyncMock())

    def logged() -> list[str]:
        return [json.loads(record.message)["route"] for record in caplog.records]

    long = asyncio.ensure_future(ask("/long"))
    await begun.wait()
    await ask("/a")
    await ask("/b")
    assert watch.traffic.in_flight == 1 and logged() == []
    await asyncio.sleep(0.2)
    assert logged() == ["/a", "/b"]
    await ask("/c")
    end.set()
    await long
    assert logged() == ["/a", "/b", "/c", "/long"] and watch.traffic.in_flight == 0
    assert {json.loads(record.message)["client"] for record in caplog.records} == {"192.0.2.1"}
    await asyncio.sleep(0.1)
    assert len(logged()) == 4  # once each


async def test_a_server_describes_its_model_and_its_answers(translator_folder, caplog) -> None:
    caplog.set_level(logging.INFO, "fastformer")
    limits = Limits(max_texts=7)
    async with serving(open_service(translator_folder, limits=limits), access_log=True) as client:
        info = (await client.get("/v1/info")).json()
        assert (info["model"], info["kind"], info["version"]) == ("tiny-translator", "translator", __version__)
        assert info["limits"] == dataclasses.asdict(limits)
        answer = await client.post("/v1/translate", json={"text": "a"})

        async def gone(scope: Any, receive: Any, send: Any) -> None:
            raise EndedEarly

        metrics = mock.Mock()
        watch = Watch(gone, Traffic(), metrics, lambda path: path, mock.Mock(), logs=True)  # the client has left
        await watch({"type": "http", "path": "/a", "method": "POST"}, mock.AsyncMock(), mock.AsyncMock())
    *_, line, last = [json.loads(record.message) for record in caplog.records if record.name == "fastformer.access"]
    assert (line["method"], line["bytes"]) == ("POST", len(answer.content)) and line["ms"] > 0
    assert last["status"] == metrics.answered.call_args.args[1] == 499 and last["client"] == ""


def test_each_number_of_a_session_has_its_metric() -> None:
    service: Any = mock.Mock()
    stats: dict[str, Any] = {field.name: 1.0 + i for i, field in enumerate(dataclasses.fields(SessionStats))}
    counts = (1,) * (len(QUEUE_BOUNDS) + 1)
    service.session.stats.return_value = SessionStats(**{**stats, "queue_counts": counts})
    found = dict(re.findall(r"^fastformer_(\w+) (\S+)$", Metrics(service).text().decode(), re.MULTILINE))
    of_metric = {
        "requests_running": "running", "requests_waiting": "waiting", "waiting_tokens": "waiting_tokens",
        "batch_rows": "rows", "cache_free_tokens": "free_tokens", "cache_tokens": "capacity_tokens",
        "prompt_tokens_total": "read_tokens", "cached_tokens_total": "cached_tokens", "new_tokens_total": "new_tokens",
        "drafted_tokens_total": "drafted_tokens", "accepted_draft_tokens_total": "accepted_tokens",
        "cancelled_total": "cancelled", "steps_total": "steps", "step_seconds_total": "step_seconds",
        "queue_seconds_sum": "queue_seconds",
    }  # fmt: skip
    assert {metric: float(found[metric]) for metric in of_metric} == {m: stats[name] for m, name in of_metric.items()}


async def test_metrics_have_no_labels_from_clients(translator_folder) -> None:
    async with serving(open_service(translator_folder)) as client:
        for path in ("/a", "/b", "/v1/translate/x", "/%00", "/" + "y" * 3000):
            await client.get(path)
        (await client.post("/v1/translate", json={"text": "a"})).raise_for_status()
        text = (await client.get("/metrics")).text
        assert 'fastformer_requests_total{code="404",route="unmatched"} 5.0' in text
        assert 'fastformer_requests_total{code="200",route="/v1/translate"} 1.0' in text
        assert "fastformer_new_tokens_total" in text and "yyy" not in text


async def test_scripts_of_named_origins_may_read_answers(translator_folder) -> None:
    async with serving(open_service(translator_folder), origins=["https://a.example"], keys=KEYS) as client:
        for origin, is_let in (("https://a.example", True), ("https://b.example", False)):
            answer = await client.get("/v1/info", headers={"Origin": origin})
            assert answer.status_code == 401  # the script may read the error too
            assert answer.headers.get("access-control-allow-origin") == (origin if is_let else None)


OWN = ["localhost", "LOCALHOST:8000", "a.localhost", "127.0.0.1:8000", "[::1]:8000", "192.168.1.2", "localhost.:80"]


@pytest.mark.parametrize("hosts", [[], ["Model.example:8000"], None], ids=str)
async def test_a_web_page_cannot_call_the_server_by_its_own_name(hosts, translator_folder) -> None:
    async with serving(open_service(translator_folder), hosts=hosts) as client:
        names = {name: 200 for name in OWN} | {"model.example": 200 if hosts != [] else 403}
        names |= {
            name: 200 if hosts is None else 403 for name in ("evil.example", "evil.example:80", "127.0.0.1.evil", "")
        }
        for name, status in names.items():
            for path in ("/", "/v1/info", "/v1/translate"):
                answer = await client.request(
                    "POST" if "tr" in path else "GET", path, json={"text": "a"}, headers={"Host": name}
                )
                assert answer.status_code == status, (name, path)
            assert (await client.get("/health", headers={"Host": name})).status_code == 200  # an orchestrator's


def test_a_host_that_is_no_name_is_refused(translator_folder) -> None:
    for wrong in ("*.example", "http://a.example", "a b", ""):
        with pytest.raises(ValueError, match="hosts"):
            make_app(open_service(translator_folder), hosts=[wrong])


NO_ORIGINS = ["a.example", "https://a.example/", "https://a.example/page", "", "https://*.example", "https://A.example"]


@pytest.mark.parametrize("origin", [*NO_ORIGINS, "https://a.example:443", "http://a.example:80", "https://b@a.example"])
def test_an_origin_that_no_browser_sends_is_refused(origin, translator_folder) -> None:
    with pytest.raises(ValueError, match="origin"):
        make_app(open_service(translator_folder), origins=[origin])


async def test_a_body_of_many_lists_is_not_read(translator_folder) -> None:
    async with serving(open_service(translator_folder, limits=Limits(max_text_chars=10**6))) as client:
        for count in (100_000, 100_001):  # no text; and too many lists
            for text, inner in (("a", list[str]()), ("[", dict[str, str]())):
                answer = await client.post("/v1/translate", json={"text": text, "prefix": [inner] * (count - 2)})
                told = answer.json()["error"]["message"]
                assert answer.status_code == 400 and ("lists" in told) == (count > 100_000), told


async def test_brackets_in_texts_are_no_lists(translator_folder) -> None:
    async with serving(open_service(translator_folder, limits=Limits(max_text_chars=10**6))) as client:
        for text in ("[" * 110_000, '{"\\' * 110_000, '\\"[' * 110_000):
            answer = await client.post("/v1/translate", json={"text": ["a"] * 3000, "prefix": text})
            told = answer.json()["error"]["message"]
            assert answer.status_code == 413 and "texts" in told, told


async def test_of_a_key_that_a_body_has_twice_the_last_counts(translator_folder) -> None:
    """As JSON's readers in Python and JavaScript have it; the check of keys reads bodies in the same way."""
    async with serving(open_service(translator_folder), keys=KEYS) as client:
        for first, last, status in (
            (*KEYS, 200), (KEYS[0], "wrong", 401), ("wrong", KEYS[0], 200), (KEYS[0], "\\ud800", 401),
        ):  # fmt: skip
            body = f'{{"api_key": "{first}", "q": "", "source": "und", "target": "und", "api_key": "{last}", "q": "a"}}'
            answer = await client.post("/translate", content=body, headers={"Content-Type": "application/json"})
            assert answer.status_code == status


async def test_an_application_that_ends_refuses(translator_folder) -> None:
    async with serving(open_service(translator_folder)) as client:
        traffic = client.app.state.traffic
        traffic.is_ready = False
        assert (await client.get("/ready")).status_code == 503
        assert (await client.post("/v1/translate", json={"text": "a"})).status_code == 200
        traffic.is_refusing = True
        answer = await client.post("/v1/translate", json={"text": "a"})
        assert answer.status_code == 503 and answer.headers["connection"] == "close"
        assert (await client.get("/health")).status_code == 200 and traffic.in_flight == 0


async def test_a_port_that_is_taken_while_the_model_loads_is_an_error(translator_folder) -> None:
    places = bound("127.0.0.1", 0)
    service = open_service(translator_folder)
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(places[0].getsockname())
        other.listen()
        with pytest.raises(ValueError, match="port"):
            await Server(make_app(service)).serve(places)
    places[0].close()
    assert not service.session.is_alive


def test_an_idle_connection_outlives_those_of_proxies(translator_folder) -> None:
    """If the server closed it first, a proxy could send a request into a connection that is being closed."""
    service = open_service(translator_folder)
    assert Server(make_app(service)).config.timeout_keep_alive > 60  # the default of nginx and of load balancers
