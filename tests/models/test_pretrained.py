"""Tests saving and loading, and the errors about folders that can't be loaded."""

from __future__ import annotations

import math
import os
from unittest.mock import Mock

import pytest
import safetensors.torch
import torch

from fastformer.models import GPT, Transformer, read_architecture
from fastformer.models.pretrained import save_model
from fastformer.models.weights import read_notes
from tests.covering import by_turns

CONFIG = {"vocab_size": 20, "d_model": 16, "num_heads": 2, "d_ff": 24, "max_len": 9}


@pytest.fixture
def model():
    return Transformer.from_preset("tiny", **CONFIG)


@pytest.fixture
def folder(model, tmp_path):
    model.save_pretrained(tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("dtype", "kind", "options"),
    by_turns(
        [torch.float32, torch.float64, torch.bfloat16],
        [
            *((Transformer, {"positions": positions}) for positions in ("concatenated", "learned", "relative")),
            (Transformer, {"positions": "interleaved", "tie_embeddings": False}),
            (GPT, {"positions": "rotary", "norm": "rms"}),
        ],
    ),
)
def test_round_trip(tmp_path, kind, options, dtype):
    """Loading draws no random numbers."""
    model = kind.from_preset("tiny", **CONFIG, **options, dtype=dtype)
    model.save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    before = torch.get_rng_state()
    loaded = kind.from_pretrained(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
    assert loaded.config == model.config and not loaded.training and read_architecture(tmp_path) == kind.__name__
    assert loaded.state_dict().keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value) and loaded.state_dict()[name].dtype == dtype
    ids = [torch.randint(1, 20, (2, 5))] * (1 if kind is GPT else 2)
    assert torch.equal(loaded(*ids), model.eval()(*ids))
    assert kind.from_pretrained(tmp_path, dtype=torch.float64)(*ids).dtype == torch.float64


def test_a_failed_save_keeps_the_old_model(model, folder, monkeypatch):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    monkeypatch.setattr(os, "replace", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(OSError, match=r"\bmodel\.safetensors\b"):
        model.save_pretrained(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_flipped_bit_is_noticed_anywhere(folder):
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    key = whole.index(b'"sha256":"')  # the name of the checksum is the one place where nothing depends on it
    places = {*range(0, key, 29), *range(key + 10, len(whole), 397), len(whole) - 1} - set(range(key, key + 10))
    for place in sorted(places):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        weights.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"\bmodel\.safetensors\b"):
            Transformer.from_pretrained(folder)


def test_a_file_without_a_checksum_loads(model, folder):
    safetensors.torch.save_file(model.state_dict(), folder / "model.safetensors")
    loaded = Transformer.from_pretrained(folder)
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in model.state_dict().items())
    assert read_notes(folder) == {}


def test_notes_come_back(model, folder):
    save_model(model, folder, notes={"model": 'update 3: "best"'})
    assert read_notes(folder) == {"model": 'update 3: "best"'}
    Transformer.from_pretrained(folder)
    assert read_notes(folder / "nowhere") == {}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_numbers(model, folder, bad):
    with torch.no_grad():
        model.encoder.norm.weight[3] = bad
    model.save_pretrained(folder)
    with pytest.raises(ValueError, match=r"\bencoder\.norm\.weight\b"):
        Transformer.from_pretrained(folder)


def test_another_architecture(folder):
    assert read_architecture(folder) == "Transformer"
    with pytest.raises(ValueError):
        GPT.from_pretrained(folder)
    (folder / "config.json").write_text('{"hidden_size": 3}')
    with pytest.raises(ValueError, match=r"\barchitecture\b"):
        Transformer.from_pretrained(folder)
    with pytest.raises(ValueError, match=r"\barchitecture\b"):
        read_architecture(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match=r"\bfrom_huggingface\b"):  # the way to load it
        GPT.from_pretrained(folder)


def test_tensors_that_dont_fit(folder):
    weights = folder / "model.safetensors"
    state = safetensors.torch.load_file(weights)
    changed = dict(state)
    del changed["encoder.norm.weight"]
    changed["encoder.norm.extra"] = torch.zeros(1)
    changed["embedding.weight"] = torch.zeros(21, 16)
    safetensors.torch.save_file(changed, weights)
    with pytest.raises(ValueError) as caught:
        Transformer.from_pretrained(folder)
    message = str(caught.value)
    assert "missing tensors: encoder.norm.weight" in message
    assert "unexpected tensors: encoder.norm.extra" in message
    assert "embedding.weight: expected (20, 16), got (21, 16)" in message
    safetensors.torch.save_file({"embedding.weight": state["embedding.weight"]}, weights)
    with pytest.raises(ValueError):
        Transformer.from_pretrained(folder)
