"""Lengths, limits and edges of the requests to a language model, on the routes of both formats."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from fastformer.generation import AsyncGenerator
from fastformer.serving import Limits, open_service
from tests.serving import models
from tests.serving.asking import serving

pytest.importorskip("httpx", reason="the httpx library is not installed")
pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")
pytest.importorskip("tokenizers", reason="the tokenizers library is not installed")

MESSAGES: list[Any] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "two birds"}]
PROMPTS = ["the dog reads", "two birds", "a woman in the park walks 漢"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return models.generator(tmp_path_factory.mktemp("models") / "tiny")


async def test_values_at_an_edge_mean_what_other_servers_mean(folder) -> None:
    async with serving(open_service(folder)) as http:

        async def said(**options: Any) -> Any:
            body = {"prompt": PROMPTS[0], "max_tokens": 12, "seed": 5, "logprobs": 0, **options}
            [choice] = (await http.post("/v1/completions", json=body)).json()["choices"]
            return choice["text"], choice["logprobs"]["token_logprobs"]

        best = (await said(temperature=0))[0]
        for options in ({"top_p": 0}, {"top_k": 1}, {"min_p": 1, "temperature": 2}, {"temperature": 0, "top_k": 9}):
            assert (await said(**options))[0] == best, options
        assert await said(top_k=-1) == await said(top_k=0) != await said(top_k=2)
        drawn = await said(temperature=2)
        assert drawn == await said(temperature=2, min_p=0, presence_penalty=0, stop=[], stop_token_ids=[], min_tokens=0)
        # A penalty doesn't count the tokens of a prompt.
        ids = {"prompt": [68, 68, 69], "max_tokens": 1, "temperature": 0, "logit_bias": {"68": 100}}
        assert await said(**ids) == await said(**ids, frequency_penalty=2, presence_penalty=2)
        # An id that ends an answer doesn't replace those of the model.
        assert (await said(logit_bias={"1": 100}, stop_token_ids=[68]))[0] == ""


async def test_a_request_without_a_length_gets_the_usual_one(tmp_path) -> None:
    async with serving(open_service(models.generator(tmp_path / "tiny", max_len=2048, num_layers=1))) as http:
        least = {"temperature": 0, "min_tokens": 2000}  # no end comes before the last token
        for path, body, count in (
            ("completions", {"prompt": "a"}, 16),
            ("chat/completions", {"messages": MESSAGES}, 1024),
        ):
            answer = (await http.post(f"/v1/{path}", json=body | least)).json()
            assert answer["usage"]["completion_tokens"] == count and answer["choices"][0]["finish_reason"] == "length"
        answer = (await http.post("/generate", json={"inputs": "a", "parameters": {"details": True}})).json()
        assert answer["details"]["generated_tokens"] == 100 and answer["details"]["finish_reason"] == "length"
        assert not [token for token in answer["details"]["tokens"] if token["special"]]


async def test_a_request_without_a_length_stays_within_the_servers_limit(folder) -> None:
    async with serving(open_service(folder, limits=Limits(max_new_tokens=5))) as http:
        least = {"temperature": 0, "min_tokens": 5}
        for path, body in (("completions", {"prompt": "a"}), ("chat/completions", {"messages": MESSAGES})):
            answer = await http.post(f"/v1/{path}", json=body | least)
            assert answer.json()["usage"]["completion_tokens"] == 5, answer.text
        for count, tokens in ((None, 5), (5, 5), (6, None)):
            parameters = {"details": True, "max_new_tokens": count}
            answer = (await http.post("/generate", json={"inputs": PROMPTS[0], "parameters": parameters})).json()
            assert answer.get("details", {}).get("generated_tokens") == tokens, answer


async def test_errors_of_generate_have_the_type_of_their_status(folder) -> None:
    kinds = {
        401: "unauthorized", 405: "validation", 413: "validation", 422: "validation", 500: "generation",
        503: "unhealthy", 504: "generation",
    }  # fmt: skip
    async with serving(open_service(folder, limits=Limits(max_body_bytes=1000)), keys=["key"]) as http:
        for status, kind in kinds.items():
            http.app.state.traffic.is_refusing = status == 503
            method, head = "GET" if status == 405 else "POST", {"Authorization": "Bearer key"} if status != 401 else {}
            body = {"inputs": "a" * 2000 * (status == 413) or "a", "timeout": 1e-6 if status == 504 else None}
            parameters = {"top_p": 2} if status == 422 else {}
            with contextlib.ExitStack() as stack:
                if status == 500:
                    failing = mock.AsyncMock(side_effect=RuntimeError)
                    stack.enter_context(mock.patch.object(http.app.state.service, "prompt_ids", failing))
                answer = await http.request(method, "/generate", headers=head, json={**body, "parameters": parameters})
            assert (answer.status_code, answer.json()["error_type"]) == (status, kind), answer.text


@pytest.mark.parametrize("limits", [Limits(max_texts=2), Limits(max_waiting=2)], ids=["texts", "queue"])
async def test_a_request_has_no_more_answers_than_may_wait(limits, folder) -> None:
    async with serving(open_service(folder, limits=limits)) as http:
        for prompt, n, status in ((["a"] * 2, 1, 200), ("a", 2, 200), (["a"] * 3, 1, 400), (["a"] * 2, 2, 400)):
            answer = await http.post("/v1/completions", json={"prompt": prompt, "n": n, "max_tokens": 1})
            assert answer.status_code == status, (prompt, n)


async def test_a_token_that_cannot_follow_has_a_number_in_json(folder) -> None:
    async with serving(open_service(folder)) as http:
        body = {"prompt": PROMPTS[0], "max_tokens": 2, "min_p": 1, "logprobs": 3, "temperature": 1}
        likely = (await http.post("/v1/completions", json=body)).json()["choices"][0]["logprobs"]["top_logprobs"]
        assert all(sorted(each.values())[:2] == [-9999, -9999] and max(each.values()) == 0 for each in likely)
        # A share is one of the probabilities at the request's temperature.
        can_follow = []
        for options in ({"temperature": 1, "min_p": 0.49}, {"temperature": 2, "min_p": 0.7}):
            body |= {"logprobs": 20, "max_tokens": 1, **options}
            [likely] = (await http.post("/v1/completions", json=body)).json()["choices"][0]["logprobs"]["top_logprobs"]
            can_follow.append({token for token, value in likely.items() if value > -9999})
        assert can_follow[0] == can_follow[1] and 1 < len(can_follow[0]) < 20


async def test_the_operators_options_apply_to_a_language_model(folder) -> None:
    found: dict[int | None, int] = {}
    for most in (None, 1 << 20):
        service: Any = open_service(folder, max_batch_bytes=most, options={"repetition_penalty": 1.5})
        async with service.session:
            own = await service.session.complete("the dog", max_new_tokens=8)
            found[most] = service.session.stats().capacity_tokens
        async with AsyncGenerator.from_pretrained(folder) as plain:
            assert own == await plain.complete("the dog", max_new_tokens=8, repetition_penalty=1.5)
            assert own != await plain.complete("the dog", max_new_tokens=8)
    assert found[1 << 20] < found[None]


def test_the_operators_options_are_within_the_limits(translator_folder) -> None:
    open_service(translator_folder, options={"num_beams": 3}, limits=Limits(max_beams=3))
    for option, limits in (({"num_beams": 4}, {"max_beams": 3}), ({"max_new_tokens": 9}, {"max_new_tokens": 8})):
        with pytest.raises(ValueError, match="at most"):
            open_service(translator_folder, options=option, limits=Limits(**limits))


@pytest.mark.parametrize(
    ("kind", "owner", "name", "route", "body"),
    [
        ("generator", "session", "chat_ids", "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1}),
        ("generator", "session", "check_constraint", "/v1/completions", {"prompt": "a", "guided_choice": ["a"]}),
        ("translator", "codes", "detect", "/detect", {"q": "a"}),
    ],
)
async def test_what_may_take_long_for_a_short_text_stops_no_other_request(
    kind, owner, name, route, body, tmp_path, monkeypatch
) -> None:
    service = open_service(getattr(models, kind)(tmp_path / "tiny"))
    place, threads = getattr(service, owner), list[int]()
    work = getattr(place, name)

    def noted(*given: Any, **options: Any) -> Any:
        threads.append(threading.get_ident())
        return work(*given, **options)

    monkeypatch.setattr(place, name, noted)
    async with serving(service) as http:
        assert (await http.post(route, json=body)).status_code == 200
    assert threads and threading.get_ident() not in threads
