"""Each limit at its bound: a request of just so much is answered, one of a bit more is refused."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastformer.serving import Limits, open_service
from tests.encoding.folders import D_MODEL
from tests.serving import models
from tests.serving.asking import serving
from tests.serving.test_fields import CASES, ENDED, TOOLS

pytest.importorskip("httpx", reason="the httpx library is not installed")
pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")
pytest.importorskip("tokenizers", reason="the tokenizers library is not installed")

PAIR = {"source_lang": "en", "target_lang": "de"}
LIBRE = {"q": "a", "source": "en", "target": "de"}
FEW = {"max_tokens": 1, "temperature": 1.0}


def said(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 1}


# A limit, a kind of model, a route, and its body for the number that is limited.
ROWS: list[tuple[str, str, str, Callable[[int], dict[str, Any]]]] = [
    ("max_texts", "encoder", "/v1/embeddings", lambda n: {"input": ["a"] * n}),
    ("max_texts", "encoder", "/embed", lambda n: {"inputs": ["a"] * n}),
    ("max_texts", "ranker", "/rerank", lambda n: {"query": "a", "texts": ["a"] * n}),
    ("max_texts", "generator", "/v1/completions", lambda n: {"prompt": ["a"] * n, **FEW}),
    ("max_texts", "translator", "/v1/translate", lambda n: {"text": ["a"] * n, "max_new_tokens": 1}),
    ("max_texts", "translator", "/translate", lambda n: {**LIBRE, "q": ["a"] * n}),
    ("max_text_chars", "encoder", "/v1/embeddings", lambda n: {"input": "a" * n}),
    ("max_text_chars", "encoder", "/embed", lambda n: {"inputs": "a" * n}),
    ("max_text_chars", "ranker", "/rerank", lambda n: {"query": "a", "texts": ["a" * n]}),
    ("max_text_chars", "ranker", "/rerank", lambda n: {"query": "a" * n, "texts": ["a"]}),
    ("max_texts", "ranker", "/v1/rerank", lambda n: {"query": "a", "documents": ["a"] * n}),
    ("max_text_chars", "ranker", "/v1/rerank", lambda n: {"query": "a", "documents": ["a" * n]}),
    ("max_text_chars", "ranker", "/v1/rerank", lambda n: {"query": "a" * n, "documents": ["a"]}),
    ("max_texts", "ranker", "/predict", lambda n: {"inputs": [["a"]] * n}),
    ("max_text_chars", "ranker", "/predict", lambda n: {"inputs": [["a", "a" * n]]}),
    ("max_texts", "multi-vector", "/v1/multi-vector", lambda n: {"input": ["a"] * n}),
    ("max_text_chars", "multi-vector", "/v1/multi-vector", lambda n: {"input": "a" * n}),
    ("max_texts", "multi-vector", "/rerank", lambda n: {"query": "a", "documents": ["a"] * n}),
    ("max_text_chars", "multi-vector", "/rerank", lambda n: {"query": "a" * n, "documents": ["a"]}),
    ("max_text_chars", "generator", "/v1/completions", lambda n: {"prompt": "a" * n, **FEW}),
    ("max_text_chars", "generator", "/v1/chat/completions", lambda n: said("a" * n)),
    ("max_text_chars", "generator", "/generate", lambda n: {"inputs": "a" * n, "parameters": {"max_new_tokens": 1}}),
    ("max_text_chars", "translator", "/v1/translate", lambda n: {"text": "a" * n, "max_new_tokens": 1}),
    ("max_text_chars", "translator", "/translate", lambda n: {**LIBRE, "q": "a" * n}),
    ("max_text_chars", "translator", "/detect", lambda n: {"q": "a" * n}),
    ("max_chat_chars", "generator", "/v1/chat/completions", lambda n: said("a" * (n - len("user")))),
    ("max_sentences", "translator", "/v1/translate", lambda n: {"text": "A dog. " * n, "max_new_tokens": 1}),
    ("max_new_tokens", "generator", "/v1/completions", lambda n: {"prompt": "a", "max_tokens": n}),
    ("max_new_tokens", "generator", "/v1/chat/completions", lambda n: {**said("a"), "max_tokens": n}),
    ("max_new_tokens", "generator", "/generate", lambda n: {"inputs": "a", "parameters": {"max_new_tokens": n}}),
    ("max_new_tokens", "translator", "/v1/translate", lambda n: {"text": "a", "max_new_tokens": n}),
    ("max_alternatives", "translator", "/v1/translate", lambda n: {"text": "a", "alternatives": n, "num_beams": 8}),
    ("max_alternatives", "translator", "/translate", lambda n: {**LIBRE, "alternatives": n}),
    ("max_beams", "translator", "/v1/translate", lambda n: {"text": "a", "num_beams": n}),
    ("max_beams", "generator", "/v1/completions", lambda n: {"prompt": "a", "n": n, **FEW}),
    ("max_beams", "generator", "/v1/chat/completions", lambda n: {**said("a"), "n": n}),
]


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, Path]:
    return models.services(tmp_path_factory.mktemp("limits"))


# Each limit has a bound of its own, and those of a group refuse none of each other's requests.
GROUPS: list[dict[str, int]] = [
    {"max_texts": 5, "max_text_chars": 7, "max_new_tokens": 6},
    {"max_chat_chars": 9, "max_sentences": 5, "max_alternatives": 3},
    {"max_beams": 6},
]


@pytest.mark.parametrize("kind", ["encoder", "ranker", "multi-vector", "generator", "translator"])
async def test_a_limit_is_the_most_that_is_answered(kind, places) -> None:
    pair = PAIR if kind == "translator" else {}
    wide = Limits(max_alternatives=8)
    for group in ({}, *GROUPS):
        mosts = {name: most for each in GROUPS for name, most in each.items() if not group or name in group}
        rows = [(mosts[limit], route, body) for limit, of, route, body in ROWS if of == kind and limit in mosts]
        if not rows:
            continue
        async with serving(open_service(places[kind], limits=Limits(**group) if group else wide, **pair)) as client:
            for most, route, body in rows:
                more = await client.post(route, json=body(most + 1))
                if not group:
                    assert more.status_code == 200, (route, most, more.text)
                    continue
                taken = await client.post(route, json=body(most))
                assert taken.status_code == 200, (route, most, taken.text)
                assert more.status_code in (400, 413, 422) and more.text != taken.text, (route, most)


ONE, SEEN = {"prompt": "a", **FEW}, {"attention": True, "max_new_tokens": 1}
IDS = models.tokenizer().vocab_size - 1
# Bounds that a model or a format sets: a kind of model, a route, the most, its body, and the field that is named.
FIXED: list[tuple[str, str, int, Callable[[int], dict[str, Any]], str | None]] = [
    ("generator", "/v1/completions", models.MAX_LEN - 1, lambda n: {**ONE, **ENDED, "max_tokens": n}, "max_tokens"),
    ("generator", "/v1/completions", IDS, lambda n: {**ONE, "stop_token_ids": [n]}, "stop_token_ids"),
    ("generator", "/v1/completions", IDS, lambda n: {**ONE, "logit_bias": {str(n): 1}}, "logit_bias"),
    ("generator", "/v1/completions", IDS, lambda n: {"prompt": [n], **FEW}, "prompt"),
    ("encoder", "/v1/embeddings", D_MODEL, lambda n: {"input": "a", "dimensions": n}, "dimensions"),
    ("encoder", "/embed", D_MODEL, lambda n: {"inputs": "a", "dimensions": n}, None),
    ("translator", "/v1/translate", 1000, lambda n: {**SEEN, "text": ("A dog. " * 200)[:n]}, None),
]  # fmt: skip


@pytest.mark.parametrize("kind", ["encoder", "generator", "translator"])
async def test_a_bound_of_a_model_is_the_most_that_is_answered(kind, places) -> None:
    async with serving(open_service(places[kind])) as client:
        for of, route, most, body, param in FIXED:
            if of != kind:
                continue
            taken, more = [await client.post(route, json=body(n)) for n in (most, most + 1)]
            assert taken.status_code == 200, (route, most, taken.text)
            assert more.status_code in (400, 413, 422), (route, most)
            assert param is None or more.json()["error"]["param"] == param, (route, most)


@pytest.mark.parametrize("more", [0, 1])
async def test_a_body_of_just_the_most_bytes_is_read(more, places) -> None:
    data = b'{"input": "a"}'
    async with serving(open_service(places["encoder"], limits=Limits(max_body_bytes=len(data)))) as client:
        headers = {"content-type": "application/json"}
        answer = await client.post("/v1/embeddings", content=data + b" " * more, headers=headers)
    assert answer.status_code == (413 if more else 200)


# Bodies that take further steps.
MORE: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [{"guided_choice": ["a"]}],
    "/v1/chat/completions": [{"guided_choice": ["a"]}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "required"}],
}


@pytest.mark.parametrize("route", CASES)
async def test_each_step_of_a_request_ends_at_its_deadline(route, places, monkeypatch) -> None:
    kind, right, _ = CASES[route]
    service = open_service(places[kind], limits=Limits(timeout_s=0.1), **(PAIR if kind == "translator" else {}))
    aside = service.session.aside
    async with serving(service) as client:
        for body in ({**right, **more} for more in ({}, *MORE.get(route, ()))):
            for late in itertools.count():
                steps, release, ended = list[int](), threading.Event(), list[bool]()

                def step(
                    work: Any, size: int, *, late: int = late, steps: Any = steps, release: Any = release,
                    ended: Any = ended, **options: Any,
                ) -> Any:  # fmt: skip
                    def held() -> Any:
                        release.wait(5)
                        ended.append(True)
                        return work()

                    steps.append(size)
                    is_late = len(steps) - 1 == late
                    return (
                        aside(held, size, **{**options, "is_slow": True}) if is_late else aside(work, size, **options)
                    )

                monkeypatch.setattr(service.session, "aside", step)
                answer = await client.post(route, json=body)
                is_in_time = not ended
                release.set()
                assert is_in_time, (body, late)
                if len(steps) <= late:
                    break
                assert answer.status_code == 504
            assert late or kind == "translator"
