"""OpenAI's and TEI's routes for encoders give the library's results to the official clients."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fastformer
from fastformer import CrossEncoder, Encoder, MultiVectorEncoder
from fastformer.data import ByteTokenizer
from fastformer.models import GPT
from fastformer.serving import Limits, open_service
from tests.covering import each
from tests.encoding.folders import D_MODEL, MANY, bert, masked, modules, write
from tests.encoding.test_decoders import decoder
from tests.generation.small import tiny
from tests.serving import models
from tests.serving.asking import serving
from tests.serving.servers import Running, running

httpx = pytest.importorskip("httpx", reason="the httpx library is not installed")
openai = pytest.importorskip("openai", reason="the openai library is not installed")
pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")
transformers = pytest.importorskip("transformers", reason="the folders are written by transformers")

JSON = {"content-type": "application/json"}
LABELS = ("good", "bad", "odd")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return models.encoder(tmp_path_factory.mktemp("models") / "mini")


@pytest.fixture(scope="module")
def encoder(folder) -> Encoder:
    return Encoder(folder)


@pytest.fixture(scope="module")
def ranker(tmp_path_factory) -> Iterator[Running]:
    with running(models.classifier(tmp_path_factory.mktemp("models") / "ranker", 1)) as found:
        yield found


@pytest.fixture(scope="module")
def classifier(tmp_path_factory) -> Iterator[Running]:
    with running(models.classifier(tmp_path_factory.mktemp("models") / "classifier")) as found:
        yield found


def counted(folder: Path, *texts: Any) -> int:
    """Returns the number of tokens by transformers."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return sum(map(len, tokenizer(*texts, truncation=True, max_length=24).input_ids))


def test_embeddings_are_the_librarys_bit_for_bit(client, encoder, folder) -> None:
    texts = [text for text in MANY[:30] if text]
    expected = encoder.encode(texts)
    found = client.embeddings.create(model="mini", input=texts)  # as base64, unless told otherwise
    np.testing.assert_array_equal(np.array([row.embedding for row in found.data], np.float32), expected)
    assert [row.index for row in found.data] == list(range(len(texts))) and found.model == "mini"
    as_numbers = client.embeddings.create(model="mini", input=texts, encoding_format="float")
    np.testing.assert_array_equal(np.array([row.embedding for row in as_numbers.data], np.float32), expected)
    short = client.embeddings.create(model="mini", input=texts[0], dimensions=7, extra_body={"prompt_name": "query"})
    own = encoder.encode(texts[0], prompt_name="query", truncate_dim=7, normalize=True)
    assert np.linalg.norm(own) == pytest.approx(1)
    np.testing.assert_array_equal(np.array(short.data[0].embedding, np.float32), own)
    none = client.embeddings.create(model="mini", input=texts[0], extra_body={"prompt_name": "document"})
    np.testing.assert_array_equal(np.array(none.data[0].embedding, np.float32), encoder.encode(texts[0], prompt=""))
    assert found.usage.prompt_tokens == found.usage.total_tokens == counted(folder, texts)
    cut = client.embeddings.create(model="mini", input="a bird " * 30, extra_body={"truncate": True})
    np.testing.assert_array_equal(np.array(cut.data[0].embedding, np.float32), encoder.encode("a bird " * 30))


def test_embeddings_of_few_bits(server: Any, folder: Path) -> None:
    texts, encoder = [text for text in MANY[:12] if text], Encoder(folder)

    def ask(**fields: Any) -> list[Any]:
        answer = httpx.post(f"{server.url}/v1/embeddings", json={"input": texts, **fields}).json()
        return [row["embedding"] for row in answer["data"]]

    assert ask(output_dtype="float") == ask(embedding_type="float") == ask()
    for kind in ("binary", "ubinary"):
        due = encoder.encode(texts, precision=kind)
        assert ask(output_dtype=kind) == ask(embedding_type=kind) == due.tolist()
        rows = [base64.b64decode(row) for row in ask(output_dtype=kind, embedding_type="base64")]
        assert rows == [row.tobytes() for row in due]
    for kind in ("int8", "uint8"):
        refused = httpx.post(f"{server.url}/v1/embeddings", json={"input": texts, "output_dtype": kind})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "output_dtype"
    both = httpx.post(
        f"{server.url}/v1/embeddings", json={"input": texts, "output_dtype": "binary", "embedding_type": "ubinary"}
    )
    assert both.status_code == 400
    server.service.encoder.calibrate(MANY)
    try:
        due = encoder.encode(texts, precision="int8", calibration_embeddings=encoder.encode(MANY))
        assert ask(output_dtype="int8") == ask(output_dtype="int8", dimensions=D_MODEL) == due.tolist()
        cut = httpx.post(
            f"{server.url}/v1/embeddings", json={"input": texts, "output_dtype": "int8", "dimensions": D_MODEL - 1}
        )
        assert cut.status_code == 400 and cut.json()["error"]["param"] == "dimensions"
    finally:
        server.service.encoder.ranges = None


def test_a_calibration(folder: Path, tmp_path: Path) -> None:
    encoder = Encoder(folder)
    rows = encoder.encode(MANY)
    expected = np.stack([rows.min(0), rows.max(0)])
    for calibration in (MANY, iter(MANY), np.array(MANY), rows, rows.astype(np.float64), expected):
        service: Any = open_service(folder, calibration=calibration)
        np.testing.assert_array_equal(service.encoder.ranges, expected)
    for wrong in ([], rows[:, 1:], rows[0], rows * np.nan, [3]):
        with pytest.raises(ValueError):
            open_service(folder, calibration=wrong)
    for kind in ("cross-encoder", "generator"):
        other = tmp_path / kind
        other.mkdir()
        bert(other, num_labels=1) if kind == "cross-encoder" else tiny(GPT).save_pretrained(other, ByteTokenizer())
        assert open_service(other).kind == kind
        with pytest.raises(ValueError, match="calibration"):
            open_service(other, calibration=MANY)


def test_sparse_embeddings(tmp_path: Path, client: Any) -> None:
    masked(tmp_path, "Bert", {"pooling_strategy": "max"})
    texts, encoder = ["a bird sings", "", "the hills"], Encoder(tmp_path)
    with running(tmp_path) as server:
        answers = httpx.post(f"{server.url}/embed_sparse", json={"inputs": texts}).json()
        alone = httpx.post(f"{server.url}/embed_sparse", json={"inputs": texts[0]}).json()
    for found, expected in zip(answers, encoder.encode_sparse(texts), strict=True):
        assert [each["index"] for each in found] == expected.indices.tolist()
        np.testing.assert_array_equal(np.array([each["value"] for each in found], np.float32), expected.values)
    assert alone == answers[:1]
    refused = httpx.post(f"{str(client.base_url).split('/v1')[0]}/embed_sparse", json={"inputs": "a"})
    assert refused.status_code == 404


def test_vectors_of_tokens_and_their_scores(tmp_path: Path) -> None:
    models.multi_vector(tmp_path)
    texts, library = ["a bird sings", "the hills .", "two birds"], MultiVectorEncoder(tmp_path)
    due = {"query": library.encode_query(texts), None: library.encode_document(texts)}
    with running(tmp_path) as server:
        for kind, expected in due.items():
            body = {"input": texts, "input_type": kind}
            found = httpx.post(f"{server.url}/v1/multi-vector", json=body).json()
            packed = httpx.post(f"{server.url}/v1/multi-vector", json=body | {"embedding_type": "base64"}).json()
            for one, other, vectors in zip(found["data"], packed["data"], expected, strict=True):
                np.testing.assert_array_equal(np.array(one["embeddings"], np.float32), vectors)
                rows = [np.frombuffer(base64.b64decode(row), "<f4") for row in other["embeddings"]]
                np.testing.assert_array_equal(np.stack(rows), vectors)
        alone = httpx.post(f"{server.url}/v1/multi-vector", json={"input": texts[1], "dimensions": 16}).json()
        assert alone["data"] == [found["data"][1] | {"index": 0}] and alone["usage"]["total_tokens"] == 6
        count = found["usage"]["total_tokens"]
        query = httpx.post(f"{server.url}/v1/multi-vector", json={"input": texts[0], "input_type": "query"}).json()
        for route in ("/v1/rerank", "/v2/rerank", "/rerank"):
            ranked = httpx.post(f"{server.url}{route}", json={"query": texts[0], "documents": texts}).json()
            assert ranked["usage"]["total_tokens"] == count + query["usage"]["total_tokens"]
            expected = library.rank(texts[0], texts)
            assert [(one["index"], one["relevance_score"]) for one in ranked["results"]] == [
                (one["corpus_id"], one["score"]) for one in expected
            ]
        for wrong, named in (({"dimensions": 3}, "dimensions"), ({"input_type": "passage"}, "input_type"),
                             ({"input": [5, 7]}, "input"), ({"input": "a bird " * 30}, "input")):  # fmt: skip
            answer = httpx.post(f"{server.url}/v1/multi-vector", json={"input": texts} | wrong)
            assert answer.status_code == 400 and named in answer.json()["error"]["param"], answer.text
        assert httpx.post(f"{server.url}/v1/embeddings", json={"input": texts}).status_code == 404


def test_the_query_and_the_documents_of_a_ranking_have_one_deadline(tmp_path: Path, monkeypatch: Any) -> None:
    models.multi_vector(tmp_path)
    with running(tmp_path) as server:
        service, deadlines = server.service, set[float]()
        ask, aside = service.session.ask, service.session.aside

        async def asked(request: Any, *, deadline: float) -> Any:
            deadlines.add(deadline)
            return await ask(request, deadline=deadline)

        async def beside(work: Any, size: int, *, deadline: float) -> Any:
            deadlines.add(deadline)
            return await aside(work, size, deadline=deadline)

        monkeypatch.setattr(service.session, "ask", asked)
        monkeypatch.setattr(service.session, "aside", beside)
        body = {"query": "a bird", "documents": ["two birds", "the hills"], "timeout": 5}
        assert httpx.post(f"{server.url}/v1/rerank", json=body).status_code == 200
        assert len(deadlines) == 1


async def test_texts_of_many_clients_are_computed_together(folder, encoder) -> None:
    texts = [text for text in MANY if text]
    with running(folder) as found:
        async with openai.AsyncOpenAI(base_url=f"{found.url}/v1", api_key="none", max_retries=0) as many:
            answers = await asyncio.gather(*(many.embeddings.create(model="mini", input=text) for text in texts))
        rows = np.array([answer.data[0].embedding for answer in answers], np.float32)
        np.testing.assert_array_equal(rows, encoder.encode(texts))
        assert found.service.session.stats().ended == len(texts) > found.service.session.stats().steps


def test_inference_client_embeds(server, encoder) -> None:
    hub = pytest.importorskip("huggingface_hub", reason="the huggingface_hub library is not installed")
    client = hub.InferenceClient(f"{server.url}/embed")
    texts = MANY[:3]
    np.testing.assert_array_equal(client.feature_extraction(texts), encoder.encode(texts, normalize=True))
    plain = client.feature_extraction(texts[0], normalize=False, prompt_name="query")
    np.testing.assert_array_equal(plain, encoder.encode(texts[:1], prompt_name="query", normalize=False))
    null = httpx.post(f"{server.url}/embed", json={"inputs": texts, "normalize": None}).json()
    np.testing.assert_array_equal(np.array(null, np.float32), encoder.encode(texts, normalize=True))
    short = httpx.post(f"{server.url}/embed", json={"inputs": texts, "dimensions": 5.0}).json()
    np.testing.assert_array_equal(np.array(short, np.float32), encoder.encode(texts, normalize=True, truncate_dim=5))
    width = encoder.get_embedding_dimension()
    full = httpx.post(f"{server.url}/embed", json={"inputs": texts, "dimensions": width}).json()
    assert len(full[0]) == width
    info = httpx.get(f"{server.url}/info").json()
    assert info["model_type"] == {"embedding": {"pooling": "mean"}} and info["max_input_length"] == 24


def test_rerank_equals_the_librarys(ranker) -> None:
    library = CrossEncoder(ranker.service.encoder._folder.path)
    ask: dict[str, Any] = {"query": "a bird", "texts": MANY[:12]}
    found = httpx.post(f"{ranker.url}/rerank", json=ask | {"return_text": True}).json()
    expected = library.rank("a bird", MANY[:12], return_documents=True, activation_fn=torch.nn.Sigmoid())
    assert found == [{"index": one["corpus_id"], "score": one["score"], "text": one["text"]} for one in expected]
    raw = httpx.post(f"{ranker.url}/rerank", json=ask | {"raw_scores": True}).json()
    expected = library.rank("a bird", MANY[:12], activation_fn=torch.nn.Identity())
    assert raw == [{"index": one["corpus_id"], "score": one["score"]} for one in expected]
    assert httpx.get(f"{ranker.url}/info").json()["model_type"].keys() == {"reranker"}


def test_a_generative_reranker_ranks_by_its_template(tmp_path: Path) -> None:
    decoder(tmp_path, ends=())
    modules(tmp_path, ("LogitScore", {"true_token_id": 8, "false_token_id": 9}))
    write(tmp_path / "sentence_bert_config.json", {"modality_config": {"message": {"format": "flat"}}})
    (tmp_path / "chat_template.jinja").write_text("{% for each in messages %}{{ each.content }} [SEP]{% endfor %}")
    texts = MANY[:9]
    expected = CrossEncoder(tmp_path).rank("a bird", texts)
    with running(tmp_path) as server:
        found = httpx.post(f"{server.url}/rerank", json={"query": "a bird", "texts": texts}).json()
        ranked = httpx.post(f"{server.url}/v1/rerank", json={"query": "a bird", "documents": texts}).json()["results"]
    assert found == [{"index": one["corpus_id"], "score": one["score"]} for one in expected]
    assert [(one["index"], one["relevance_score"]) for one in ranked] == [(e["index"], e["score"]) for e in found]


@pytest.mark.parametrize("route", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_documents_are_ranked_as_the_library_ranks_them(route, ranker) -> None:
    library = CrossEncoder(ranker.service.encoder._folder.path)
    documents = [*MANY[:11], "a bird " * 60]  # the last is cut
    body: dict[str, Any] = {"model": "ranker", "query": "a bird", "documents": documents, "truncation": True}
    found = httpx.post(f"{ranker.url}{route}", json=body).json()
    expected = library.rank("a bird", documents, return_documents=True, activation_fn=torch.nn.Sigmoid())
    assert found["results"] == [
        {"index": one["corpus_id"], "relevance_score": one["score"], "document": {"text": one["text"]}}
        for one in expected
    ]
    count = counted(ranker.service.encoder._folder.path, ["a bird"] * len(documents), documents)
    assert found["usage"] == {"prompt_tokens": count, "total_tokens": count}
    objects = [text if i % 2 else {"text": text} for i, text in enumerate(documents)]
    few = httpx.post(
        f"{ranker.url}{route}", json=body | {"documents": objects, "top_n": 3, "return_documents": False}
    ).json()["results"]
    assert few == [{"index": one["corpus_id"], "relevance_score": one["score"]} for one in expected[:3]]
    mistakes: list[dict[str, Any]] = [
        {"documents": []}, {"documents": [{"title": "a"}]}, {"query": ""}, {"top_n": 0}, {"max_tokens_per_doc": 9},
        {"rank_fields": ["title"]}, {"documents": ["a"] * 2_049}, {"query": "\udcff"}, {"query": "a" * 200_001},
        {"documents": ["a" * 200_001]}, {"truncation": False},
    ]  # fmt: skip
    for wrong in mistakes:
        answer = httpx.post(f"{ranker.url}{route}", content=json.dumps(body | wrong), headers=JSON)
        assert answer.status_code == (422 if route == "/rerank" else 400), answer.text


def test_a_model_of_several_labels_ranks_nothing(classifier) -> None:
    answer = httpx.post(f"{classifier.url}/v1/rerank", json={"query": "a", "documents": ["b"]})
    assert answer.status_code == 400 and answer.json()["error"]["message"]


def test_predict_equals_the_librarys(classifier) -> None:
    hub = pytest.importorskip("huggingface_hub", reason="the huggingface_hub library is not installed")
    library = CrossEncoder(classifier.service.encoder._folder.path)
    inputs = [["a bird"], ["the hills", "a bird sings"], ["two birds"]]
    expected = library.predict(inputs, apply_softmax=True)
    found = httpx.post(f"{classifier.url}/predict", json={"inputs": inputs}).json()
    assert [{one["label"]: one["score"] for one in row} for row in found] == [
        dict(zip(LABELS, row, strict=True)) for row in expected.tolist()
    ]
    assert all(row == sorted(row, key=lambda one: -one["score"]) for row in found)
    pair = httpx.post(f"{classifier.url}/predict", json={"inputs": inputs[1]}).json()
    assert pair == found[1]
    raw = httpx.post(f"{classifier.url}/predict", json={"inputs": inputs, "raw_scores": True}).json()
    logits = library.predict(inputs).tolist()
    assert [{one["label"]: one["score"] for one in row} for row in raw] == [
        dict(zip(LABELS, row, strict=True)) for row in logits
    ]
    best = hub.InferenceClient(f"{classifier.url}/predict").text_classification("a bird")  # the first alone, of TEI's
    assert (best.label, best.score) == (found[0][0]["label"], found[0][0]["score"])
    answer = httpx.post(f"{classifier.url}/rerank", json={"query": "a", "texts": ["b"]})
    assert answer.status_code == 424 and answer.json()["error_type"] == "backend"


WRONG: list[tuple[str, dict[str, Any], int, str]] = [
    ("embed", {"inputs": []}, 400, "empty"),
    ("embed", {"inputs": ["a"] * 2_049}, 422, "validation"),
    ("embed", {"inputs": "a" * 200_001}, 422, "validation"),
    ("embed", {"inputs": "a bird " * 30}, 422, "validation"),
    ("embed", {"inputs": [1, 2]}, 422, "validation"),
    ("embed", {"inputs": "a", "dimensions": D_MODEL + 1}, 422, "validation"),
    ("embed", {"inputs": "a", "dimensions": 10**300}, 422, "validation"),
    ("embed", {"inputs": "a", "dimensions": float("nan")}, 422, "validation"),
    ("embed", {"inputs": "a", "prompt_name": "other"}, 422, "validation"),
    ("embed", {"inputs": "a", "normalize": "no"}, 422, "validation"),
    ("embed", {"inputs": "a", "truncate": True, "truncation_direction": "left"}, 422, "validation"),
    ("embed", {"inputs": "a", "truncate": True, "truncation_direction": "Left"}, 422, "validation"),
    ("embed", {"inputs": "\udcff"}, 422, "validation"),
    ("embed", {}, 422, "validation"),
    ("embed", {"inputs": "a", "timeout": -1}, 422, "validation"),
]


NO_INPUTS: list[Any] = [[[]], [["a", "b", "c"]], ["a", "b", "c"], [["a"], "b"], {"a": "b"}, None, [[1]]]
WRONG += [
    ("rerank", {"query": "a", "texts": []}, 400, "empty"),
    ("rerank", {"query": "a", "texts": "b"}, 422, "validation"),
    ("rerank", {"query": "a", "texts": ["b"], "documents": ["b"]}, 422, "validation"),
    ("rerank", {"query": None, "texts": ["b"]}, 422, "validation"),
    ("rerank", {"texts": ["b"]}, 422, "validation"),
    ("rerank", {"query": "a", "texts": ["b"] * 2_049}, 422, "validation"),
    ("rerank", {"query": "a", "texts": ["b"], "raw_scores": "yes"}, 422, "validation"),
    ("rerank", {"query": "a", "texts": ["b"], "top_n": 1}, 422, "validation"),
    ("rerank", {"query": "a bird " * 30, "texts": ["b"]}, 422, "validation"),
    ("embed", {"inputs": "a", "parameters": {"top_k": 1}}, 422, "validation"),
    ("embed", {"inputs": "a", "dimensions": 5.5}, 422, "validation"),
    ("predict", {"inputs": []}, 400, "empty"),
    *(("predict", {"inputs": inputs}, 422, "validation") for inputs in NO_INPUTS),
]


@each("path, body, status, kind", WRONG)
def test_errors_have_teis_format(path, body, status, kind, request, http) -> None:
    url = request.getfixturevalue({"embed": "server", "rerank": "ranker", "predict": "classifier"}[path]).url
    answer = http.post(f"{url}/{path}", content=json.dumps(body), headers={"content-type": "application/json"})
    assert answer.status_code == status and answer.json()["error_type"] == kind and answer.json()["error"], answer.text


@each(
    "change, param",
    [
        ({"input": ""}, "input"), ({"input": []}, "input"), ({"input": ["a", ""]}, "input.1"),
        ({"input": [1, 2]}, "input"), ({"input": [[1]]}, "input"),
        ({"input": "a bird " * 30}, "input"), ({"input": ["a"] * 2_049}, "input"), ({"input": "a" * 200_001}, "input"),
        ({"dimensions": 99}, "dimensions"), ({"dimensions": 0}, "dimensions"), ({"dimensions": 10**400}, "dimensions"),
        ({"encoding_format": "int8"}, "encoding_format"), ({"model": "other"}, "model"),
        ({"prompt_name": "other"}, "prompt_name"), ({"input_type": "query"}, "input_type"),
        ({"task": "retrieval.query"}, "task"), ({"output_dtype": "int8"}, "output_dtype"),
    ],
)  # fmt: skip
def test_wrong_embeddings_are_named(change, param, server, http) -> None:
    answer = http.post(f"{server.url}/v1/embeddings", json={"model": "mini", "input": "a"} | change)
    assert answer.status_code == (404 if param == "model" else 400), answer.text
    assert answer.json()["error"]["param"] == param


async def test_a_full_queue_refuses_and_ends_empty(folder) -> None:
    service, gate = open_service(folder, limits=Limits(max_waiting_tokens=1)), threading.Event()
    ask = {"inputs": ["two birds sing over the slow river and the hills ."] * 64}
    async with serving(service) as client:
        held = asyncio.create_task(service.session.call(lambda: gate.wait(20)))  # the model takes no request meanwhile
        asked = [asyncio.create_task(client.post("/embed", json=ask)) for _ in range(30)]
        while sum(task.done() for task in asked) < 29:
            await asyncio.sleep(0.005)
        gate.set()
        answers = [await task for task in asked]
        assert await held and sorted(answer.status_code for answer in answers) == [200, *[429] * 29]
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert refused.json()["error_type"] == "overloaded" and int(refused.headers["retry-after"]) >= 1
        assert service.session.stats().running == service.session.stats().waiting == 0
        late = await client.post("/embed", json=ask | {"timeout": 1e-6})
        assert late.status_code == 504 and late.json()["error"]


async def test_errors_before_a_route_have_the_type_of_its_format(folder) -> None:
    limits = Limits(max_body_bytes=1000, max_texts=7, max_waiting=9)
    expected = {
        401: ("unauthorized", ("authentication_error", "invalid_api_key")),
        405: ("validation", ("invalid_request_error", None)),
        413: ("validation", ("invalid_request_error", "request_too_large")),
        503: ("unhealthy", ("service_unavailable_error", "service_unavailable")),
    }
    async with serving(open_service(folder, limits=limits), keys=["key"]) as client:
        known = {"Authorization": "Bearer key"}
        for status, (of_tei, of_openai) in expected.items():
            client.app.state.traffic.is_refusing = status == 503
            for path in ("/embed", "/v1/embeddings"):
                method, head = "GET" if status == 405 else "POST", {} if status == 401 else known
                body = {"inputs": "a" * 2000 * (status == 413)}
                answer = await client.request(method, path, headers=head, **({} if method == "GET" else {"json": body}))
                assert answer.status_code == status, (path, answer.text)
                error = answer.json()
                if path == "/embed":
                    assert error["error_type"] == of_tei
                else:
                    assert (error["error"]["type"], error["error"]["code"]) == of_openai
        client.app.state.traffic.is_refusing = False
        info = (await client.get("/info", headers=known)).json()
        assert (info["model_id"], info["served_model_name"], info["model_dtype"]) == ("mini", "mini", "fp32")
        assert (info["max_client_batch_size"], info["max_concurrent_requests"]) == (7, 9)
        assert info["auto_truncate"] is False and info["version"] == fastformer.__version__
