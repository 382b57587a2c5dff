"""Engines that recompute give the tokens of the cached engine, and each caches only what its name says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.cases.models.recompute_engines import RECOMPUTING
from fastformer.generation import generate
from fastformer.models import GPT, Transformer

NAMES = [engine.name for engine in RECOMPUTING]
SOURCES = [[5, 9, 7, 4, 8], [6, 3], [4, 4, 9, 10]]


def small() -> Transformer:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"d_model": 32, "d_ff": 64, "num_heads": 4, "num_encoder_layers": 2}
    return Transformer.from_preset("tiny", vocab_size=40, num_decoder_layers=2, **sizes).eval()


@pytest.mark.parametrize("num_beams", [1, 3])
def test_the_same_tokens_as_with_a_cache(num_beams: int) -> None:
    model = small()
    want = generate(model, SOURCES, engine="kv_cache", max_new_tokens=9, num_beams=num_beams)
    assert len(set(map(tuple, want.tolist()))) > 1
    for engine in NAMES:
        assert torch.equal(generate(model, SOURCES, engine=engine, max_new_tokens=9, num_beams=num_beams), want)


@pytest.mark.parametrize("engine", [*NAMES, "recompute"])
def test_recomputed_layers(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The encoder runs for each token or once; cross_cache doesn't recompute the keys and values of the source."""
    model = small()
    encode, plain = model.encode, model.decode
    encoded: list[Any] = []
    memories: list[Any] = []

    def note_encode(*args: Any, **rest: Any) -> Any:
        encoded.append(args)
        return encode(*args, **rest)

    def note_decode(ids: Any, memory: Any, **rest: Any) -> Any:
        memories.append(memory)
        return plain(ids, memory, **rest)

    monkeypatch.setattr(model, "encode", note_encode)
    monkeypatch.setattr(model, "decode", note_decode)
    tokens = generate(model, SOURCES[:1], engine=engine, max_new_tokens=6, min_new_tokens=6)
    assert tokens.shape == (1, 6) and len(memories) == 6
    assert len(encoded) == (6 if engine == "recompute" else 1)
    assert (memories[0] is None) == (engine == "cross_cache")


def test_a_model_without_an_encoder_is_refused() -> None:
    gpt = GPT.from_preset("tiny", vocab_size=40)
    for engine in NAMES:
        with pytest.raises(ValueError, match=engine):
            generate(gpt, [[5, 6]], engine=engine, max_new_tokens=2)
