"""`Encoder` gives the embeddings of transformers and sentence-transformers, in any order and any batch."""

from __future__ import annotations

import copy
import json
import logging
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fastformer
from fastformer.encoding import batches
from fastformer.encoding.batches import READ_AHEAD, packed
from tests.checks import assert_accurate
from tests.encoding.folders import D_MODEL, MANY, MAX_LEN, TEXTS, bert, dense, mean, modules, states, write
from tests.engine.plain_encoder import POOLINGS, pooled
from tests.memory import resident

pytest.importorskip("transformers", reason="the folders are written by transformers")

MEAN = {"word_embedding_dimension": D_MODEL, "pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}


def check(embeddings, plain, texts=TEXTS, layers=mean, most=MAX_LEN) -> None:
    """Holds embeddings to the rule: layers makes rows of the states of texts."""
    rows = [layers(states(plain[1], plain[0], texts, dtype, most)) for dtype in (torch.float32, torch.float64)]
    assert_accurate(torch.as_tensor(embeddings), *rows)


def test_a_folder_of_transformers_uses_mean_pooling_with_a_warning(plain, caplog) -> None:
    caplog.set_level(logging.INFO, logger="fastformer")
    encoder = fastformer.Encoder.from_pretrained(plain[0])
    assert "mean" in caplog.text and (encoder.max_seq_length, encoder.get_embedding_dimension()) == (MAX_LEN, D_MODEL)
    check(encoder.encode(MANY), plain, MANY)
    embeddings = encoder.encode(TEXTS)
    assert isinstance(embeddings, np.ndarray) and embeddings.dtype == np.float32
    assert encoder.encode(TEXTS[0]).shape == (D_MODEL,)
    tensor = encoder.encode(TEXTS, convert_to_tensor=True)
    assert isinstance(tensor, torch.Tensor) and torch.equal(tensor, torch.from_numpy(embeddings))
    rows = encoder.encode(TEXTS, convert_to_numpy=False)
    assert isinstance(rows, list) and torch.equal(torch.stack(rows), tensor)


def test_a_text_has_the_same_bits_in_any_batch(plain) -> None:
    encoder = fastformer.Encoder(plain[0])
    whole = encoder.encode(TEXTS)
    for options in ({"batch_tokens": 1}, {"batch_tokens": 20}, {"batch_size": 1}, {"batch_size": 3}):
        assert encoder.encode(TEXTS, **options).tobytes() == whole.tobytes(), options
    assert encoder.encode(TEXTS[::-1]).tobytes() == np.ascontiguousarray(whole[::-1]).tobytes()
    assert encoder.encode(text for text in TEXTS).tobytes() == whole.tobytes()
    assert encoder.encode(TEXTS[3]).tobytes() == whole[3].tobytes()
    assert [*packed([5, 9, 2, 3, 3], 12, 2)] == [[1], [0, 3], [4, 2]]  # within both limits, longest first


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda encoder: pickle.loads(pickle.dumps(encoder))])
def test_a_copy_gives_the_same_embeddings(plain, copied) -> None:
    encoder = fastformer.Encoder(plain[0])
    embeddings = encoder.encode(TEXTS)
    assert copied(encoder).encode(TEXTS).tobytes() == embeddings.tobytes()


@pytest.mark.parametrize("place", ["", "0_Transformer"])
def test_a_folder_of_sentence_transformers(folder, plain, place) -> None:
    if place:
        (folder / place).mkdir()
        for file in list(folder.glob("*.json")) + list(folder.glob("*.safetensors")):
            file.rename(folder / place / file.name)
    modules(folder, ("Pooling", MEAN), ("Normalize", {}), transformer=place)
    write(folder / place / "sentence_bert_config.json", {"max_seq_length": 7, "do_lower_case": False})
    encoder = fastformer.Encoder(folder)
    assert encoder.max_seq_length == 7
    check(encoder.encode(TEXTS), plain, most=7, layers=lambda rows: mean(rows, normalizes=True))
    check(encoder.encode(TEXTS, normalize=False), plain, most=7)


def test_poolings_equal_those_of_sentence_transformers(folder, plain) -> None:
    exact = states(plain[1], plain[0], TEXTS, torch.float64)
    rows = {kind: [pooled(kind, values) for values in exact] for kind in POOLINGS}
    for kind, expected in rows.items():
        modules(folder, ("Pooling", {"embedding_dimension": D_MODEL, "pooling_mode": kind}))
        torch.testing.assert_close(
            torch.from_numpy(fastformer.Encoder(folder).encode(TEXTS)), torch.stack(expected).float(), atol=2e-5, rtol=0
        )
    modules(folder, ("Pooling", {"embedding_dimension": D_MODEL, "pooling_mode": list(rows)}))
    joined = torch.cat([torch.stack(values) for values in rows.values()], 1).float()
    torch.testing.assert_close(torch.from_numpy(fastformer.Encoder(folder).encode(TEXTS)), joined, atol=2e-5, rtol=0)
    several = {**MEAN, "pooling_mode_cls_token": True, "pooling_mode_lasttoken": True}
    modules(folder, ("Pooling", several))
    encoder = fastformer.Encoder(folder)
    joined = torch.cat([torch.stack(rows[kind]) for kind in ("cls", "mean", "lasttoken")], 1).float()
    torch.testing.assert_close(torch.from_numpy(encoder.encode(TEXTS)), joined, atol=2e-5, rtol=0)
    assert encoder.get_embedding_dimension() == 3 * D_MODEL


def test_layers_after_the_pooling(folder, plain) -> None:
    place = modules(folder, ("Pooling", MEAN), ("Dense", {}), ("Normalize", {}))[1]
    weights = dense(place, D_MODEL, 12)
    encoder = fastformer.Encoder(folder)
    embeddings = encoder.encode(TEXTS)

    def layers(embeddings):
        rows = mean(embeddings)
        parts = (weights[f"linear.{name}"].to(rows.dtype) for name in ("weight", "bias"))
        return F.normalize(torch.tanh(F.linear(rows, *parts)))

    check(embeddings, plain, layers=layers)
    assert encoder.get_embedding_dimension() == 12 and encoder.encode(TEXTS[1]).tobytes() == embeddings[1].tobytes()
    short = encoder.encode(TEXTS, truncate_dim=5, normalize_embeddings=True)
    check(short, plain, layers=lambda embeddings: F.normalize(layers(embeddings)[:, :5]))


def test_a_prompt_precedes_each_text(folder, plain) -> None:
    modules(folder, ("Pooling", MEAN))
    settings = {"prompts": {"query": "query : ", "passage": "answer : "}, "default_prompt_name": None}
    write(folder / "config_sentence_transformers.json", {**settings, "similarity_fn_name": "dot"})
    encoder = fastformer.Encoder(folder)
    bare, query = encoder.encode(TEXTS), encoder.encode(["query : " + text for text in TEXTS])
    assert np.array_equal(encoder.encode(TEXTS, prompt_name="query"), query) and not np.array_equal(query, bare)
    assert np.array_equal(encoder.encode(TEXTS, prompt="query : "), query)
    assert np.array_equal(encoder.encode_query(TEXTS), query)
    answer = encoder.encode(TEXTS, "passage")
    assert np.array_equal(encoder.encode_document(TEXTS), answer) and not np.array_equal(answer, query)
    with pytest.raises(ValueError, match=r"\bprompt_name\b.*'qery'.*'query'"):
        encoder.encode(TEXTS, prompt_name="qery")
    assert np.array_equal(fastformer.Encoder(folder, default_prompt_name="query").encode(TEXTS), query)
    torch.testing.assert_close(encoder.similarity(bare, query), torch.from_numpy(bare @ query.T))
    pairwise = encoder.similarity_pairwise(bare, query)
    torch.testing.assert_close(pairwise, torch.from_numpy((bare * query).sum(1)))


@pytest.mark.parametrize("name", ["query", "document", "other"])
def test_texts_of_a_task_without_a_prompt_have_none(folder, name) -> None:
    modules(folder, ("Pooling", MEAN))
    settings = {"prompts": {name: "query : "}, "default_prompt_name": name}
    write(folder / "config_sentence_transformers.json", settings)
    encoder = fastformer.Encoder(folder)
    bare, prompted = encoder.encode(TEXTS, prompt=""), encoder.encode(TEXTS)
    assert not np.array_equal(bare, prompted)
    for task, encode in (("query", encoder.encode_query), ("document", encoder.encode_document)):
        assert np.array_equal(encode(TEXTS), prompted if task == name else bare)
        assert np.array_equal(encode(TEXTS, prompt_name=name), prompted)


def test_the_prompts_of_tasks_are_empty_if_there_are_none(folder) -> None:
    modules(folder, ("Pooling", MEAN))
    settings = {"prompts": {"web": "query : ", "document": None}, "default_prompt_name": "query"}
    write(folder / "config_sentence_transformers.json", settings)
    encoder, other = fastformer.Encoder(folder), fastformer.Encoder(folder, prompts={"query": "the hills "})
    bare, prompted = encoder.encode(TEXTS, prompt=""), encoder.encode(TEXTS, prompt="query : ")
    for name in ("query", "document", None):
        assert np.array_equal(encoder.encode(TEXTS, prompt_name=name), bare)
    for each in (encoder, other):
        assert np.array_equal(each.encode(TEXTS, prompt_name="web"), prompted)
    assert np.array_equal(other.encode(TEXTS), encoder.encode(TEXTS, prompt="the hills "))
    with pytest.raises(ValueError, match=r"\bprompt_name\b.*'passage'"):
        encoder.encode(TEXTS, prompt_name="passage")
    library = pytest.importorskip("sentence_transformers")
    theirs = library.SentenceTransformer(str(folder), device="cpu", prompts={"query": "the hills "})
    assert theirs.prompts == {name: other.prompts.get(name, "") for name in other.prompt_names}


@pytest.mark.parametrize("ends", ["[CLS] $A [SEP]", "[CLS] $A", "$A"])
def test_a_prompt_is_left_out_of_each_pooling(folder, plain, ends) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokens = [
        {"Sequence": {"id": "A", "type_id": 0}} if name == "$A" else {"SpecialToken": {"id": name, "type_id": 0}}
        for name in ends.split()
    ]
    tokenizer["post_processor"]["single"] = tokens
    (folder / "tokenizer.json").unlink()
    write(folder / "tokenizer.json", tokenizer)
    texts = [text for text in TEXTS if text]
    skipped = 2 + ends.startswith("[CLS]")
    exact = states(plain[1], folder, ["query : " + text for text in texts], torch.float64)

    def expected(kind: str, hidden: torch.Tensor) -> torch.Tensor:
        if kind != "weightedmean":
            return pooled(kind, hidden[skipped:])
        weights = torch.arange(1, len(hidden) + 1)[skipped:, None]  # of the positions in the whole text
        return (hidden[skipped:] * weights).sum(0) / weights.sum()

    modules(folder, ("Pooling", {"embedding_dimension": D_MODEL, "pooling_mode": [*POOLINGS], "include_prompt": False}))
    embeddings = fastformer.Encoder(folder).encode(texts, prompt="query : ")
    rows = [torch.cat([expected(kind, hidden) for kind in POOLINGS]) for hidden in exact]
    torch.testing.assert_close(torch.from_numpy(embeddings), torch.stack(rows).float(), atol=2e-5, rtol=0)


def test_a_prompt_that_is_lower_cased_is_left_out_whole(folder) -> None:
    modules(folder, ("Pooling", {**MEAN, "include_prompt": False}))
    write(folder / "sentence_bert_config.json", {"do_lower_case": True})
    encoder = fastformer.Encoder(folder)
    expected = encoder.encode(TEXTS, prompt="birdly hills ")
    assert np.array_equal(encoder.encode(TEXTS, prompt="BIRDLY Hills "), expected)


def test_a_prompt_that_fills_a_row_leaves_the_last_token(folder, plain) -> None:
    modules(folder, ("Pooling", {**MEAN, "include_prompt": False}))
    encoder = fastformer.Encoder(folder)
    encoder.max_seq_length = 4
    embedding = encoder.encode("a bird", prompt="the hills and the river ")
    exact = states(plain[1], plain[0], ["the hills"], torch.float64)[0][-1]
    torch.testing.assert_close(torch.from_numpy(embedding), exact.float(), atol=2e-5, rtol=0)


def test_arguments_of_sentence_transformers(plain) -> None:
    encoder = fastformer.Encoder(plain[0], prompts={"query": "query : "})
    expected = encoder.encode(MANY)
    for embeddings in (
        encoder.encode(MANY, None, None, 32, False, "sentence_embedding", "float32", True, False, "cpu", False, None),
        encoder.encode(inputs=MANY, device=["cpu"], pool=None, chunk_size=7),
        encoder.encode(MANY, batch_size=np.int64(2)),
        encoder.eval().to("cpu").encode(MANY, precision=None), encoder.encode_query(MANY, None, ""),
    ):  # fmt: skip
        assert np.array_equal(embeddings, expected)
    assert np.array_equal(encoder.encode_query(MANY[:3], "query"), encoder.encode(MANY[:3], prompt="query : "))
    with encoder.truncate_sentence_embeddings(5):
        assert np.array_equal(encoder.encode(MANY), expected[:, :5])
    assert encoder.truncate_dim is None
    cut = plain[1].config.pad_token_id
    features = encoder.tokenize(TEXTS)
    for place, ids in enumerate(encoder.tokenizer.encode_batch(TEXTS)):
        assert features["input_ids"][place].tolist() == ids + [cut] * (features["input_ids"].shape[1] - len(ids))
        assert features["attention_mask"][place].sum() == len(ids)
    with torch.inference_mode():
        assert plain[1](**features).last_hidden_state.shape[:2] == features["input_ids"].shape
    for name, options in (
        ("device", {"device": "meta"}), ("device", {"device": ["cpu", "cpu"]}), ("pool", {"pool": {}}),
        ("chunk_size", {"chunk_size": 0}), ("precision", {"precision": "int4"}), ("inputs", {"inputs": ["a"]}),
        ("precision", {"precision": "int8", "output_value": "token_embeddings"}),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=name):
            encoder.encode(TEXTS, **options)
    for name, call in (
        ("inputs", encoder.encode), ("half", encoder.half), ("device", lambda: encoder.to("meta")),
        ("start_multi_process_pool", encoder.start_multi_process_pool),
        ("precision", lambda: encoder.encode(["a"], precision="int8")),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=name):
            call()
    with pytest.raises(TypeError, match="prompt_name"):
        encoder.encode_query(MANY, "query", prompt_name="query")


def test_embeddings_of_few_bits(plain) -> None:
    encoder = fastformer.Encoder(plain[0])
    rows = encoder.encode(MANY).astype(np.float64)
    signs = encoder.encode(MANY, precision="ubinary")
    assert signs.dtype == np.uint8 and np.array_equal(np.unpackbits(signs, axis=1), rows > 0)
    signed = encoder.encode(MANY, precision="binary")
    assert signed.dtype == np.int8 and np.array_equal(signed.astype(int) + 128, signs)
    counts = encoder.encode(MANY, precision="uint8")
    steps = (rows - rows.min(0)) / (rows.max(0) - rows.min(0)) * 255
    assert counts.dtype == np.uint8 and np.all(counts.min(0) == 0) and np.all(counts.max(0) >= 254)
    assert np.all(counts <= steps + 1e-3) and np.all(counts > steps - 1 - 1e-3)
    signed = encoder.encode(MANY, precision="int8", convert_to_tensor=True)
    assert signed.dtype == torch.int8 and np.array_equal(signed.numpy().astype(int) + 128, counts)
    assert encoder.encode([], precision="int8").shape == (0, D_MODEL)


@pytest.mark.parametrize("precision", ["int8", "uint8", "binary", "ubinary"])
def test_embeddings_are_quantized_as_by_sentence_transformers(plain, precision: Any) -> None:
    library = pytest.importorskip("sentence_transformers.util.quantization", reason="not installed")
    encoder = fastformer.Encoder(plain[0])
    rows, sample = encoder.encode(MANY), encoder.encode(MANY[:9])
    ranges = np.stack([sample.min(0), sample.max(0)])

    def check(options: dict[str, Any], **ours: Any) -> None:
        due = library.quantize_embeddings(rows, precision, **options)
        numbers = encoder.encode(MANY, precision=precision, **ours)
        assert numbers.dtype == due.dtype
        np.testing.assert_array_equal(numbers, due)

    check({})
    check({"ranges": ranges}, ranges=ranges)
    check({"calibration_embeddings": sample}, calibration_embeddings=sample)
    np.testing.assert_array_equal(encoder.calibrate(MANY[:9]), ranges)
    with pytest.raises(ValueError, match="truncate_dim"):
        encoder.calibrate(rows, truncate_dim=2)  # of options, which are those of texts
    check({"ranges": ranges})
    np.testing.assert_array_equal(
        encoder.encode(MANY[3], precision=precision), library.quantize_embeddings(rows, precision, ranges=ranges)[3]
    )
    check({"ranges": ranges * 2}, ranges=ranges * 2)
    if precision.endswith("int8"):
        with pytest.raises(ValueError, match="ranges"):
            encoder.encode(MANY, precision=precision, ranges=ranges[:, 1:])
        with pytest.raises(ValueError, match="calibrate"):
            encoder.encode(MANY, precision=precision, calibration_embeddings=sample[:0])


def test_a_long_text_is_cut_counted_and_reported_once(plain, caplog) -> None:
    encoder = fastformer.Encoder(plain[0])
    long = "bird " * 50
    embeddings = encoder.encode([long, "a", long])
    check(embeddings, plain, [long, "a", long])
    encoder.encode(long)
    assert encoder.num_cut == 3
    assert len([record for record in caplog.records if "max_seq_length" in record.getMessage()]) == 1
    encoder.max_seq_length = 5
    for longer in (long, "bird bird bird bird"):  # the second by a single token
        assert np.array_equal(encoder.encode(longer), encoder.encode("bird bird bird"))
    assert encoder.num_cut == 5
    wrong: Any
    for wrong in (0, MAX_LEN + 1, "5"):
        with pytest.raises(ValueError, match=r"\bmax_seq_length\b"):
            encoder.max_seq_length = wrong


def test_nothing_and_no_text(plain) -> None:
    encoder = fastformer.Encoder(plain[0])
    nothing: Any
    for nothing in ([], iter(())):
        assert encoder.encode(nothing).shape == (0, D_MODEL)
    assert (
        encoder.encode([], convert_to_tensor=True).shape == (0, D_MODEL)
        and encoder.encode([], output_value="token_embeddings") == []
    )
    check(encoder.encode([""]), plain, [""])
    for wrong, named in (
        (["a", 5], r"sentences\[1\].*int"),
        (b"a", "bytes"),
        ({"a": 1}, "dict"),
        (7, "int"),
        ([None], "None"),
    ):
        with pytest.raises(ValueError, match=named):
            encoder.encode(wrong)
    with pytest.raises(ValueError, match="surrogate"):
        encoder.encode(["a", "\ud800"])
    for name, value in (("batch_tokens", 0), ("batch_size", 0), ("truncate_dim", 0), ("output_value", "rows")):
        with pytest.raises(ValueError, match=rf"\b{name}\b"):
            encoder.encode(["a"], **{name: value})


def test_states_of_tokens(plain) -> None:
    embeddings = fastformer.Encoder(plain[0]).encode(TEXTS, output_value="token_embeddings", batch_tokens=16)
    assert [x.shape for x in embeddings] == [x.shape for x in states(plain[1], plain[0], TEXTS, torch.float32)]
    check(torch.cat(embeddings), plain, layers=torch.cat)


def test_a_stream_reads_ahead_a_little(plain) -> None:
    encoder, read = fastformer.Encoder(plain[0]), 0

    def texts():
        nonlocal read
        for number in range(3 * READ_AHEAD):
            read = number + 1
            yield "a"

    parts = encoder.stream(texts())
    assert len(next(parts)) <= READ_AHEAD and read <= 2 * READ_AHEAD + 1


def test_threads_share_an_encoder(plain) -> None:
    encoder = fastformer.Encoder(plain[0])
    expected = [encoder.encode(TEXTS[place:] + TEXTS[:place]).tobytes() for place in (0, 1)]

    def work(place: int) -> bytes:
        return encoder.encode(TEXTS[place % 2 :] + TEXTS[: place % 2], batch_size=1 + place).tobytes()

    with ThreadPoolExecutor(8) as threads:
        assert [*threads.map(work, range(8))] == expected * 4


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_other_precisions_are_close(plain, precision) -> None:
    exact = torch.from_numpy(fastformer.Encoder(plain[0]).encode(TEXTS))
    embeddings = torch.from_numpy(fastformer.Encoder(plain[0], precision=precision).encode(TEXTS))
    assert not torch.equal(embeddings, exact) and F.cosine_similarity(embeddings, exact).min() > 0.98


@pytest.mark.slow  # 100,000 texts: memory stays where it is, and all come out in their order
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_memory_is_flat_over_a_stream(plain, precision) -> None:
    encoder, count, seen = fastformer.Encoder(plain[0], precision=precision), 100_000, []
    due, rows = encoder.encode(MANY), 0
    for place, part in enumerate(encoder.stream(MANY[number % len(MANY)] for number in range(count))):
        assert np.array_equal(part, due[np.arange(rows, rows + len(part)) % len(MANY)])
        rows += len(part)
        if place % 3 == 2:
            seen.append(resident())
    assert rows == count and len(seen) >= 8
    assert max(seen[2:]) - seen[1] < 10, seen


@pytest.mark.slow  # a folder of 4 MiB read a hundred times: nothing of a model, nor of its packed copy, may stay
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_hundred_encoders_leave_no_memory_behind(tmp_path, precision) -> None:
    bert(tmp_path, **{"vocab_size": 4000, "hidden_size": 128, "intermediate_size": 512})
    seen = []
    for number in range(100):
        encoder = fastformer.Encoder(tmp_path, precision=precision)
        assert encoder.encode(TEXTS).shape == (len(TEXTS), 128)
        del encoder
        if number % 5 == 4:
            seen.append(resident())
    assert max(seen[4:]) - seen[3] < 10, seen


def test_texts_are_read_in_the_callers_thread_and_made_ahead_in_another(monkeypatch) -> None:
    """Tests the order, errors, and that a single item starts no thread."""
    monkeypatch.setattr(batches, "READ_AHEAD", 2)
    caller, readers, makers = threading.get_ident(), set[int](), list[int]()

    def texts(count: int) -> Iterator[int]:
        for number in range(count):
            readers.add(threading.get_ident())
            yield number

    def make(chunk: list[int]) -> list[int]:
        makers.append(threading.get_ident())
        if 8 in chunk:
            raise ValueError("the fifth chunk")
        return [2 * number for number in chunk]

    for count in (0, 1, 2, 3, 4, 7):
        makers.clear()
        made = list(batches.made_ahead(make, batches.chunks(texts(count))))
        assert sum(made, []) == [2 * number for number in range(count)] and readers <= {caller}
        assert all((maker == caller) == (count <= 2) for maker in makers)
    found = []
    with pytest.raises(ValueError, match="fifth"):
        for chunk in batches.made_ahead(make, batches.chunks(texts(20))):
            found.append(chunk)
    assert len(found) == 4
