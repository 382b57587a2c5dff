"""/v1/translate returns the library's results."""

from __future__ import annotations

import itertools

import pytest
import torch

from fastformer.generation import Translator
from fastformer.serving import Limits, open_service
from tests.serving.asking import events, serving

# Fields of which each works alone, and the pairs of which no answer could have both.
ALONE = {"prefix": "xy", "split": True, "scores": True, "alternatives": 1, "attention": True, "stream": True}
APART = [
    *({"split", name} for name in ("prefix", "scores", "alternatives")),
    *({"stream", name} for name in ("scores", "alternatives")), *({"list", name} for name in ("attention", "stream")),
]  # fmt: skip
TEXTS = ["one", "twenty-one", "x y z. Next one!\n\n And  two.", " ", ""]


@pytest.fixture(scope="module")
def translator(translator_folder) -> Translator:
    return Translator.from_pretrained(translator_folder)


async def test_fields_work_together_unless_no_answer_has_both(translator_folder) -> None:
    async with serving(open_service(translator_folder)) as client:
        for one, other in itertools.combinations([*ALONE, "list"], 2):
            body = {"text": "one", **{name: ALONE[name] for name in (one, other) if name in ALONE}}
            if other == "list":
                body = {name: [value] if name in ("text", "prefix") else value for name, value in body.items()}
            answer = await client.post("/v1/translate", json=body)
            assert answer.status_code == (400 if {one, other} in APART else 200), (one, other, answer.text)
            assert answer.status_code == 200 or "expected" in answer.json()["error"]["message"]


async def test_more_sentences_than_the_limit_are_refused(translator_folder) -> None:
    async with serving(open_service(translator_folder, limits=Limits(max_sentences=5))) as client:
        for body in ({"text": ["a\n" * 3, "a\n" * 3]}, {"text": "a\n" * 6, "stream": True}):
            answer = await client.post("/v1/translate", json=body)
            assert answer.status_code == 400 and "sentences" in answer.json()["error"]["message"]
        assert (await client.post("/v1/translate", json={"text": "a\n" * 5})).status_code == 200
        page = {"q": "<b>a</b>" * 6, "source": "und", "target": "und", "format": "html"}
        assert (await client.post("/translate", json=page)).status_code == 400


async def test_texts_equal_the_librarys(translator_folder, translator) -> None:
    expected = translator.translate(TEXTS, split=True)
    async with serving(open_service(translator_folder)) as client:
        for text, right in zip(TEXTS, expected, strict=True):
            assert (await client.post("/v1/translate", json={"text": text})).json() == {"text": right}
            streamed = await client.post("/v1/translate", json={"text": text, "stream": True})
            *pieces, last = events(streamed.text)
            assert last == {"done": True, "text": right} and "".join(one["text"] for one in pieces) == right
        found = (await client.post("/v1/translate", json={"text": TEXTS})).json()
        assert [one["text"] for one in found["translations"]] == expected
        beams = {"num_beams": 3, "length_penalty": 0.4, "max_new_tokens": 9}
        found = (await client.post("/v1/translate", json={"text": TEXTS[2], **beams})).json()
        assert found == {"text": translator.translate(TEXTS[2], split=True, **beams)}


async def test_scores_prefixes_and_alternatives_are_those_of_whole_texts(translator_folder, translator) -> None:
    texts, beams = TEXTS[:3], {"num_beams": 3, "num_return_sequences": 3}
    async with serving(open_service(translator_folder)) as client:
        found = (await client.post("/v1/translate", json={"text": texts, "scores": True})).json()["translations"]
        for one, right in zip(found, translator.translate(texts, return_scores=True), strict=True):
            assert (one["text"], one["score"]) == right
        found = (await client.post("/v1/translate", json={"text": "a", "prefix": "xy"})).json()
        assert found == {"text": translator.translate("a", target_prefix="xy")}
        found = (await client.post("/v1/translate", json={"text": TEXTS[2], "alternatives": 2})).json()
        assert [found["text"], *(one["text"] for one in found["alternatives"])] == [
            one.text for one in translator.translate(TEXTS[2], return_scores=True, **beams)
        ]
        ask = {"text": "one", "alternatives": 2, "scores": True}
        found = (await client.post("/v1/translate", json=ask)).json()
        best, *others = translator.translate("one", return_scores=True, **beams)
        assert (found["text"], found["score"]) == best
        assert [(one["text"], one["score"]) for one in found["alternatives"]] == others
        found = (await client.post("/v1/translate", json={"text": "one", "alternatives": 1, "num_beams": 5})).json()
        right = list(dict.fromkeys(translator.translate("one", num_beams=5, num_return_sequences=2)))
        assert [found["text"], *(one["text"] for one in found["alternatives"])] == right
        sampled = {"do_sample": True, "seed": 3, "temperature": 0.7}
        found = (await client.post("/v1/translate", json={"text": "one", **sampled})).json()
        assert found == {"text": translator.translate("one", **sampled)}


async def test_the_beams_of_the_server_hold_unless_a_request_says_otherwise(translator_folder, translator) -> None:
    def best(beams: int) -> list[str]:
        return list(dict.fromkeys(translator.translate("one", num_beams=beams, num_return_sequences=2)))

    async with serving(open_service(translator_folder, options={"num_beams": 4})) as client:
        for ask, beams in (({}, 4), ({"num_beams": 2}, 2)):
            found = (await client.post("/v1/translate", json={"text": "one", "alternatives": 1, **ask})).json()
            assert [found["text"], *(one["text"] for one in found["alternatives"])] == best(beams)
        body = {"q": "one", "source": "und", "target": "und", "alternatives": 1}
        found = (await client.post("/translate", json=body)).json()
        assert [found["translatedText"], *found["alternatives"]] == best(4) != best(2)
        sampled = {"do_sample": True, "seed": 3}
        for count in (1, 2):
            found = (
                await client.post("/v1/translate", json={"text": "one", "alternatives": count - 1, **sampled})
            ).json()
            due = translator.translate(["one"], num_return_sequences=count, **sampled)[0]
            assert found["text"] == (due if count == 1 else due[0])


async def test_attention_has_a_weight_for_each_pair_of_tokens(translator_folder, translator) -> None:
    async with serving(open_service(translator_folder)) as client:
        for stream in (False, True):
            answer = await client.post("/v1/translate", json={"text": "ab", "attention": True, "stream": stream})
            found = (events(answer.text)[-1] if stream else answer.json())["attention"]
            source, target, weights = translator.attention("ab")
            assert (found["source"], found["target"]) == (source, target)
            torch.testing.assert_close(torch.tensor(found["weights"]), weights[-1].mean(0), atol=1e-4, rtol=0)
        long = {"text": "A b. " * 200 + "c", "attention": True}  # the answer would grow with the text's square
        assert (await client.post("/v1/translate", json=long)).status_code == 413
        two = (await client.post("/v1/translate", json={"text": "ab. Cd.", "attention": True})).json()["attention"]
        assert len(two["weights"]) == len(two["target"]) and {*map(len, two["weights"])} == {len(two["source"])}
        assert all(abs(sum(row) - 1) < 0.01 for row in two["weights"])
        first, before = (len(tokens) for tokens in translator.attention("ab.")[1::-1])  # of the first sentence
        assert not any(any(row[before:]) for row in two["weights"][:first])
        assert not any(any(row[:before]) for row in two["weights"][first:]) and len(two["target"]) > first


WRONG = {
    "no text": {},
    "a number": {"text": 7},
    "texts with a number": {"text": ["a", 7]},
    "an unknown field": {"text": "a", "txt": 1},
    "many beams": {"text": "a", "num_beams": 4},
    "many samples": {"text": "a", "do_sample": True, "alternatives": 3},
    "more samples": {"text": "a", "do_sample": True, "alternatives": 10**9},
    "many tokens": {"text": "a", "max_new_tokens": 10**9},
    "a seed beyond 64 bits": {"text": "a", "seed": 10**30, "do_sample": True},
    "a language": {"text": "a", "target_lang": "tlh"},
    "a source": {"text": "a", "source_lang": "tlh"},
    "no language": {"text": "a", "target_lang": "\x00" * 1000},
    "a long sentence": {"text": "a" * 100},
    "streams": {"text": ["a", "b"], "stream": True},
    "a stream of beams": {"text": "a", "stream": True, "split": False, "num_beams": 2},
    "scores of sentences": {"text": "a", "split": True, "scores": True},
    "prefixes": {"text": "a", "prefix": ["a"]},
    "a score of nothing": {"text": "", "scores": True},
    "few prefixes": {"text": ["a", "b"], "prefix": ["a"]},
    "a stream of scores": {"text": "a", "stream": True, "scores": True},
    "a stream of alternatives": {"text": "a", "stream": True, "alternatives": 1},
    "attention of texts": {"text": ["a", "b"], "attention": True},
    "many alternatives": {"text": "a", "alternatives": 5, "num_beams": 1},
    "no time": {"text": "a", "timeout": 0},
    "a temperature": {"text": "a", "do_sample": True, "temperature": 0.0},
}
RAW = {
    "no JSON": b"{",
    "a NaN": b'{"text": "a", "temperature": NaN}',
    "no UTF-8": b'{"text": "\xff\xfe"}',
    "digits": b'{"text": "a", "seed": ' + b"9" * 5000 + b"}",
    "depth": b'{"text": ' + b"[" * 90_000,
    "nothing": b"",
    "a list": b"[]",
    "a lone surrogate": b'{"text": "\\ud800"}',
}


async def test_bad_input_is_an_error_and_costs_nothing(translator_folder) -> None:
    limits = Limits(max_texts=3, max_text_chars=200, max_beams=3)
    service = open_service(translator_folder, limits=limits)
    headers = {"Content-Type": "application/json"}
    async with serving(service) as client:
        for name, body in WRONG.items():
            answer = await client.post("/v1/translate", json=body)
            assert answer.status_code == 400, (name, answer.text)
            assert {"message", "code"} <= set(answer.json()["error"]) <= {"message", "code", "param"}, name
        for name, raw in RAW.items():
            answer = await client.post("/v1/translate", content=raw, headers=headers)
            assert answer.status_code == 400 and answer.json()["error"]["message"], name
        for large in ({"text": ["a"] * 4}, {"text": "a" * 201}, {"text": ["a" * 201]}):
            assert (await client.post("/v1/translate", json=large)).status_code == 413
        several = {"text": ["Aaa. Bbb. " * 18] * 2, "max_new_tokens": 1}  # the limit is each text's
        answer = await client.post("/v1/translate", json=several)
        assert answer.status_code == 200, answer.text
        stats = service.session.stats()
        assert stats.running == stats.waiting == 0 and service.session.is_alive
        assert (await client.post("/v1/translate", json={"text": "a"})).status_code == 200


async def test_a_timeout_is_504(translator_folder) -> None:
    service = open_service(translator_folder, limits=Limits(timeout_s=1e-6))
    async with serving(service) as client:
        for more in ({}, {"timeout": 100}, {"stream": True}):  # a client's time above the server's doesn't count
            answer = await client.post("/v1/translate", json={"text": "one. two. three.", **more})
            assert answer.status_code == 504 and answer.json()["error"]["code"] == 504
