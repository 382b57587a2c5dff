"""`CrossEncoder` has the logits of transformers, and the activations and results of sentence-transformers."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fastformer
from tests.checks import assert_accurate
from tests.encoding.folders import MANY, MAX_LEN, SPECIAL, TEXTS, WORDS, bert, ids_of, modules, write

pytest.importorskip("transformers", reason="the folders are written by transformers")

PAIRS = [("a bird", text) for text in MANY] + [("the slow river sings over the hills", "birds " * 30)]
LABELS = {"id2label": {"0": "good", "1": "bad", "2": "odd"}, "label2id": {"good": 0, "bad": 1, "odd": 2}}


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> tuple[Path, Any]:
    """Returns a folder with a head of one label."""
    folder = tmp_path_factory.mktemp("one")
    return folder, bert(folder, num_labels=1)


@pytest.fixture(scope="module")
def three(tmp_path_factory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("three")
    return folder, bert(folder, num_labels=3, **LABELS)


def logits(saved, inputs, dtype=torch.float32) -> torch.Tensor:
    model = saved[1].to(dtype)
    with torch.inference_mode():
        rows = torch.cat([model(**batch).logits for batch in ids_of(saved[0], inputs)])
    model.float()
    return rows


def check(scores, saved, inputs, activation=lambda x: x) -> None:
    rows = [activation(logits(saved, inputs, dtype)) for dtype in (torch.float32, torch.float64)]
    assert_accurate(torch.as_tensor(scores).reshape(rows[0].shape), *rows)


def test_scores_of_pairs(one) -> None:
    ranker = fastformer.CrossEncoder.from_pretrained(one[0])
    assert (ranker.num_labels, ranker.max_seq_length) == (1, MAX_LEN)
    scores = ranker.predict(PAIRS)
    assert isinstance(scores, np.ndarray) and scores.shape == (len(PAIRS),) and scores.dtype == np.float32
    check(scores, one, PAIRS, torch.sigmoid)
    assert ranker.num_cut == 1
    alone = ranker.predict(PAIRS[3])
    assert np.shape(alone) == () and alone == pytest.approx(scores[3], abs=1e-6)
    assert ranker.predict([]).shape == (0,)
    tensor = ranker.predict([list(pair) for pair in PAIRS], convert_to_tensor=True, batch_size=2)
    assert torch.allclose(tensor, torch.from_numpy(scores), atol=1e-6)
    raw = ranker.predict(PAIRS, activation_fn=torch.nn.Identity())
    check(raw, one, PAIRS)


def test_ranking_equals_sentence_transformers(one) -> None:
    ranker = fastformer.CrossEncoder(one[0])
    scores = torch.sigmoid(logits(one, [("a bird", text) for text in TEXTS])).flatten()
    order = sorted(range(len(TEXTS)), key=lambda place: -scores[place])
    ranking = ranker.rank("a bird", TEXTS)
    assert [entry["corpus_id"] for entry in ranking] == order
    assert [entry["score"] for entry in ranking] == pytest.approx(scores[order].tolist(), abs=1e-5)
    assert all(type(entry["score"]) is float and set(entry) == {"corpus_id", "score"} for entry in ranking)
    best = ranker.rank("a bird", iter(TEXTS), top_k=2, return_documents=True)
    assert [entry["text"] for entry in best] == [TEXTS[place] for place in order[:2]]
    assert ranker.rank("a bird", []) == []


def test_labels_of_single_texts_and_pairs(three) -> None:
    classifier = fastformer.CrossEncoder(three[0])
    assert classifier.labels == ("good", "bad", "odd") and classifier.num_labels == 3
    singles = [[text] for text in MANY]
    scores = classifier.predict(singles)
    assert scores.shape == (len(MANY), 3)
    check(scores, three, MANY)
    soft = classifier.predict(singles, apply_softmax=True)
    check(soft, three, MANY, lambda rows: rows.softmax(1))
    mixed = [["a bird"], ("a", "bird"), ["birds"]]
    assert np.allclose(classifier.predict(mixed), logits(three, mixed), atol=1e-5)
    assert classifier.predict("a bird").shape == (3,) and classifier.predict([]).shape == (0, 3)
    with pytest.raises(ValueError, match="one label"):
        classifier.rank("a", ["b"])


@pytest.mark.parametrize("pooling", ["late", "bos", "mean"])
def test_a_eurobert_reads_the_tokens_that_its_config_says(pooling, tmp_path) -> None:
    transformers = pytest.importorskip("transformers")
    bert(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    config = transformers.EuroBertConfig(
        vocab_size=len(SPECIAL + WORDS), hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=48, max_position_embeddings=MAX_LEN, classifier_pooling=pooling,
        num_labels=3, initializer_range=0.3, **dict.fromkeys(("pad_token_id", "eos_token_id"), 3), bos_token_id=2,
        mask_token_id=4,
    )  # fmt: skip
    torch.manual_seed(1)
    model = transformers.EuroBertForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path)
    rows = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        own = copy.deepcopy(model).to(dtype)
        with torch.inference_mode():
            rows[dtype] = torch.cat([own(batch["input_ids"]).logits for batch in ids_of(tmp_path, PAIRS)])
    exact = rows[torch.float64]
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        found = torch.from_numpy(fastformer.CrossEncoder(tmp_path, precision=precision).predict(PAIRS))
        assert_accurate(found, rows[dtype].float(), exact)
    rounded = torch.from_numpy(fastformer.CrossEncoder(tmp_path, precision="int8").predict(PAIRS))
    assert (rounded - exact).square().mean().sqrt() < 0.1 * exact.square().mean().sqrt()


def test_a_prompt_precedes_the_first_text_of_a_pair(one, tmp_path) -> None:
    shutil.copytree(one[0], tmp_path, dirs_exist_ok=True)
    write(
        tmp_path / "config_sentence_transformers.json",
        {"prompts": {"query": "query : "}, "default_prompt_name": "query"},
    )
    ranker, usual = fastformer.CrossEncoder(one[0]), fastformer.CrossEncoder(tmp_path)
    expected = ranker.predict([("query : " + first, second) for first, second in PAIRS])
    plain = ranker.predict(PAIRS)
    assert not np.array_equal(expected, plain)
    options = {"device": "cpu", "pool": None, "chunk_size": 3, "batch_size": np.int64(2)}
    assert np.array_equal(ranker.predict(inputs=PAIRS, prompt="query : ", **options), expected)
    for scores in (usual.predict(PAIRS), usual.predict(PAIRS, prompt_name="query")):
        assert np.array_equal(scores, expected)
    assert np.array_equal(usual.predict(PAIRS, prompt=""), plain)
    ranks = [ranker.rank("a bird", TEXTS, prompt="query : ", top_k=np.int64(2)), usual.rank("a bird", TEXTS, top_k=2)]
    assert ranks[0] == ranks[1] != ranker.rank("a bird", TEXTS, top_k=2)
    assert ranker.tokenize(PAIRS[:2])["token_type_ids"].max() == 1
    with pytest.raises(ValueError, match="prompt_name"):
        ranker.predict(PAIRS, prompt_name="query")
    with pytest.raises(ValueError, match="device"):
        ranker.rank("a", TEXTS, device="meta")


def test_labels_are_named_by_their_numbers(three, tmp_path) -> None:
    shutil.copytree(three[0], tmp_path, dirs_exist_ok=True)
    config = json.loads((three[0] / "config.json").read_text())
    usual = ("LABEL_0", "LABEL_1", "LABEL_2")
    for named, labels in (
        ({"2": "odd", "0": "good", "1": "bad"}, ("good", "bad", "odd")), ({"1": "good", "2": "bad", "3": "odd"}, usual),
        ({"0": "good"}, usual),
    ):  # fmt: skip
        write(tmp_path / "config.json", {**config, "id2label": named, "num_labels": 3})
        assert fastformer.CrossEncoder(tmp_path).labels == labels


def test_the_activation_is_the_folders(one, tmp_path) -> None:
    shutil.copytree(one[0], tmp_path, dirs_exist_ok=True)
    config = json.loads((one[0] / "config.json").read_text())
    tanh, identity = "torch.nn.modules.activation.Tanh", "torch.nn.modules.linear.Identity"
    for key, value, activation in (
        ("sentence_transformers", {"activation_fn": identity}, lambda x: x),
        ("sbert_ce_default_activation_function", tanh, torch.tanh),
    ):
        write(tmp_path / "config.json", {**config, key: value})
        check(fastformer.CrossEncoder(tmp_path).predict(PAIRS), one, PAIRS, activation)
    write(tmp_path / "config_sentence_transformers.json", {"activation_fn": identity})
    check(fastformer.CrossEncoder(tmp_path).predict(PAIRS), one, PAIRS)
    for wrong in ("mine.Tanh", "torch.nn.modules.loss.L1Loss", "os.system"):
        write(tmp_path / "config_sentence_transformers.json", {"activation_fn": wrong})
        with pytest.raises(ValueError, match="activation"):
            fastformer.CrossEncoder(tmp_path)


def test_scores_are_fp32_on_the_cpu(one) -> None:
    encoder = fastformer.CrossEncoder(one[0])
    for activation in (lambda logits: logits.bfloat16(), lambda logits: logits.double()):
        assert encoder.predict(PAIRS, activation_fn=activation).dtype == np.float32
    with torch.device("meta"):  # a default device holds for factories such as torch.zeros
        assert encoder.predict([]).shape == (0,)


def test_wrong_inputs_are_named(one, tmp_path) -> None:
    ranker = fastformer.CrossEncoder(one[0])
    wrong: Any
    for wrong, named in (
        ([("a", "b"), "c"], r"sentences\[1\]"),
        ([("a", "b"), ("a", 5)], r"sentences\[1\].*int"),
        ([("a", "b", "c")], r"sentences\[0\]"),
        (["a", "b", "c"], "pair"),
        ({"a": "b"}, "dict"),
        (7, "int"),
    ):
        with pytest.raises(ValueError, match=named):
            ranker.predict(wrong)
    for wrong, named in ((["a", None], r"documents\[1\]"), ("text", "documents")):
        with pytest.raises(ValueError, match=named):
            ranker.rank("query", wrong)
    with pytest.raises(ValueError, match=r"\btop_k\b"):
        ranker.rank("query", ["a"], top_k=0)
    with pytest.raises(ValueError, match=r"\bactivation_fn\b"):
        ranker.predict(PAIRS, activation_fn=torch.sum)
    bert(tmp_path)
    with pytest.raises(ValueError, match="head"):
        fastformer.CrossEncoder(tmp_path)
    bert(tmp_path, num_labels=1)
    modules(tmp_path)
    assert fastformer.CrossEncoder(tmp_path).predict(PAIRS[0]) > 0
    modules(tmp_path, ("Pooling", {"pooling_mode": "mean"}))
    with pytest.raises(ValueError, match="Pooling"):
        fastformer.CrossEncoder(tmp_path)
