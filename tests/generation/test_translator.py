"""Texts keep their order and are checked; pictures are drawn."""

from __future__ import annotations

import pytest
import torch

from fastformer.data import ByteTokenizer
from fastformer.generation import Translator, draw_attention
from fastformer.models import Transformer


@pytest.fixture(scope="module")
def translator() -> Translator:
    torch.manual_seed(0)
    model = Transformer.from_preset("tiny", vocab_size=259, d_model=32, d_ff=64, num_heads=4, max_len=64)
    return Translator(model, ByteTokenizer(), max_tokens=64)


def test_order_is_kept_whatever_the_batches(translator) -> None:
    texts = ["a", "a longer text", "mid size", "b" * 40, "x"]
    together = translator.translate(texts, max_new_tokens=8)
    assert together == [translator.translate([text], max_new_tokens=8)[0] for text in texts]
    assert list(translator.stream(iter(texts), max_new_tokens=8)) == together
    assert len(set(together)) > 1
    assert translator.model.training  # as it was before


def test_errors_name_the_text(translator) -> None:
    with pytest.raises(ValueError, match="text 2: expected something to translate"):
        translator.translate(["a", " "])
    with pytest.raises(ValueError, match="text 1: expected at most 64 tokens, got 101"):
        translator.translate(["x" * 100])


def test_attention_and_its_picture(translator, tmp_path) -> None:
    source, target, weights = translator.attention("zwölf")
    assert weights.shape == (2, 4, len(target), len(source)) and source[-1] == "</s>"
    assert (weights.sum(-1) - 1).abs().max() < 1e-5
    pytest.importorskip("matplotlib", reason="drawing needs matplotlib")
    draw_attention(source, target, weights, tmp_path / "a.png", title="zwölf")
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
