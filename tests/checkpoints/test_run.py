"""A run folder is loaded completely, or an error says what is wrong with it."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch

from fastformer.baseline import LSTMSeq2Seq
from fastformer.checkpoints import load_model, load_models
from fastformer.data import ByteTokenizer, Tokenizer, train_bpe
from fastformer.models import GPT, Transformer
from fastformer.models.pretrained import save_model
from fastformer.special_ids import SpecialIds

SIZES = {"vocab_size": 259, "d_model": 16}
MODELS = {
    "Transformer": lambda: Transformer.from_preset("tiny", **SIZES, num_heads=2, d_ff=24),
    "GPT": lambda: GPT.from_preset("tiny", **SIZES, num_heads=2, num_layers=1),
    "LSTMSeq2Seq": lambda: LSTMSeq2Seq(**SIZES, score="concat"),
}


@pytest.fixture(params=MODELS)
def architecture(request) -> str:
    return request.param


@pytest.mark.filterwarnings("ignore:.*to a meta parameter")
def test_saved_states_are_restored(tmp_path, architecture) -> None:
    model = MODELS[architecture]()
    save_model(model, tmp_path, ByteTokenizer())
    loaded, tokenizer = load_model(tmp_path)
    assert type(loaded) is type(model) and loaded.config == model.config and not loaded.training
    assert tokenizer.encode("a") == ByteTokenizer().encode("a")
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(loaded.state_dict()[name], weight) for name, weight in model.state_dict().items())
    # "meta" is a device that every machine has; it holds no numbers.
    half, _ = load_model(tmp_path, (architecture,), device="meta", dtype=torch.bfloat16)
    assert {(weight.dtype, weight.device.type) for weight in half.parameters()} == {(torch.bfloat16, "meta")}


def test_files_that_are_cut_short(tmp_path, architecture) -> None:
    save_model(MODELS[architecture](), tmp_path, ByteTokenizer())
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        file = tmp_path / name
        data = file.read_bytes()
        for cut in (0, len(data) // 2, len(data) - 5):
            file.write_bytes(data[:cut])
            with pytest.raises(ValueError, match=name):
                load_model(tmp_path)
        file.unlink()
        with pytest.raises(ValueError, match=name):
            load_model(tmp_path)
        file.write_bytes(data)


def test_another_architecture(tmp_path) -> None:
    save_model(MODELS["Transformer"](), tmp_path, ByteTokenizer())
    with pytest.raises(ValueError, match=r"\bGPT\b.*\bTransformer\b"):
        load_model(tmp_path, ("GPT",))
    (tmp_path / "config.json").write_text('{"architecture": "Mamba"}')
    with pytest.raises(ValueError, match=r"\bMamba\b"):
        load_model(tmp_path)


@pytest.mark.parametrize("vocab_size", [258, 260])
def test_a_tokenizer_of_another_run(tmp_path, vocab_size) -> None:
    save_model(GPT.from_preset("tiny", vocab_size=vocab_size, d_model=16, num_heads=2), tmp_path, ByteTokenizer())
    with pytest.raises(ValueError, match=rf"\b{vocab_size}\b.*\b259\b"):
        load_model(tmp_path)


def special(architecture: str, ids: SpecialIds) -> dict[str, object]:
    """Returns special ids as settings of a model; the LSTM has separate fields for them."""
    return dataclasses.asdict(ids) if architecture == "LSTMSeq2Seq" else {"special_ids": ids}


@pytest.mark.parametrize("changes", [{"pad": 3}, {"eos": (1, 4)}, {"unk": None}, {"start": 3}])
def test_a_model_and_a_tokenizer_of_other_special_ids(tmp_path, monkeypatch, architecture, changes) -> None:
    ids = dataclasses.replace(SpecialIds(), **changes)
    kind: Any = type(MODELS[architecture]())
    make = kind if architecture == "LSTMSeq2Seq" else lambda **settings: kind.from_preset("tiny", **settings)
    model = make(vocab_size=259, d_model=16, **special(architecture, ids))
    save_model(model, tmp_path, ByteTokenizer())
    with pytest.raises(ValueError, match=r"\bSpecialIds\b"):
        load_model(tmp_path)
    tokenizer = ByteTokenizer()
    tokenizer.special_ids = ids
    monkeypatch.setattr("fastformer.checkpoints.run.load_tokenizer", lambda folder: tokenizer)
    loaded, _ = load_model(tmp_path)
    assert SpecialIds.of(loaded.config) == ids and loaded.config == model.config


def test_a_config_from_before_special_ids_has_the_defaults(tmp_path, architecture) -> None:
    save_model(MODELS[architecture](), tmp_path, ByteTokenizer())
    values = json.loads((tmp_path / "config.json").read_text())
    for name in special(architecture, SpecialIds()):
        del values[name]
    (tmp_path / "config.json").write_text(json.dumps(values))
    loaded, _ = load_model(tmp_path)
    assert SpecialIds.of(loaded.config) == SpecialIds() and loaded.config == MODELS[architecture]().config


def test_settings_that_an_lstm_does_not_have(tmp_path) -> None:
    save_model(MODELS["LSTMSeq2Seq"](), tmp_path, ByteTokenizer())
    config = (tmp_path / "config.json").read_text()
    for old, new in (
        ('"d_model": 16', '"d_mode": 16'),
        ('"concat"', '"con"'),
        ('"num_layers": 1', '"num_layers": "1"'),
    ):
        (tmp_path / "config.json").write_text(config.replace(old, new))
        with pytest.raises(ValueError, match=r"\b(d_model|score|num_layers)\b"):
            load_model(tmp_path)
    (tmp_path / "config.json").write_text(config.replace('"d_model": 16', '"d_model": 18'))
    with pytest.raises(ValueError, match=r"\bmodel\.safetensors\b.*\bmisshapen\b"):
        load_model(tmp_path)


def test_the_old_module_is_importable() -> None:
    from fastformer import checkpoints, run_folder

    assert run_folder.load_model is load_model and run_folder.choose_device("cpu").type == "cpu"
    with pytest.raises(AttributeError, match="nonesuch"):
        checkpoints.nonesuch  # noqa: B018


# Runs that decode together must have the same tokenizer, by its contents.


def test_tokenizers_are_compared_by_their_contents(tmp_path) -> None:
    texts = ["the old man", "an old hat", "the cat"]
    tokenizers: dict[str, Tokenizer] = {
        "a": train_bpe(texts, 24),
        "same": train_bpe(texts[::-1], 24),
        "other": train_bpe(["der alte Hut", "ein altes Tor", "die Katze"], 24),
        "bytes": ByteTokenizer(),
    }
    assert tokenizers["other"].vocab_size == tokenizers["a"].vocab_size
    for name, tokenizer in tokenizers.items():
        sizes = {"vocab_size": tokenizer.vocab_size, "d_model": 16, "num_heads": 2, "d_ff": 16}
        Transformer.from_preset("tiny", **sizes).save_pretrained(tmp_path / name, tokenizer)
    models, tokenizer = load_models([tmp_path / "a", str(tmp_path / "same"), tmp_path / "a"])
    assert len(models) == 3 and tokenizer.encode("the cat") == tokenizers["a"].encode("the cat")
    for name, found in (("other", "another one"), ("bytes", "one of 259 ids")):
        with pytest.raises(ValueError, match=rf"\b{name}\b.*\b{found}\b"):
            load_models([tmp_path / "a", tmp_path / name])
    with pytest.raises(ValueError, match=r"\bfolder\b"):
        load_models([])
