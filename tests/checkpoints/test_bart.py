"""The folder of a BART, made here as transformers saves it: text in, text out, and what is missing is named."""

from __future__ import annotations

import json
import logging
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BartConfig, BartForConditionalGeneration, BartModel, BartTokenizerFast

from fastformer.checkpoints import load_model
from fastformer.cli import main
from fastformer.data import load_tokenizer
from fastformer.data.model_tokenizers import byte_level_bpe
from fastformer.generation import Translator

tokenizers = pytest.importorskip("tokenizers", reason="the tokenizers library is not installed")

TRAINING = ["two men walk the dog in the park", "a woman reads a book", "the dog sees two birds"]
TEXTS = [
    "the dog reads a book",
    "two birds",
    " a woman in  the park",
    "men walk 漢 the dog",
    "it's the dog's <mask> book",
]
FEW = ["--max_new_tokens", "16", "--device", "cpu"]
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]


def make(folder: Path, *, asked: dict[str, Any] | None = None) -> Any:
    """A folder, and transformers' model and tokenizer of it."""
    folder.mkdir()
    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train_from_iterator(TRAINING, vocab_size=300, special_tokens=SPECIAL, show_progress=False)
    trained.save_model(str(folder))
    tokenizer = BartTokenizerFast.from_pretrained(folder)
    torch.manual_seed(4)
    model = BartForConditionalGeneration(
        BartConfig(
            vocab_size=len(tokenizer) + 3, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64,
            forced_eos_token_id=None,
        )
    ).eval()  # fmt: skip
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.3 if parameter.dim() == 1 or "shared" in name else 0.8
            parameter.copy_(torch.randn_like(parameter) * scale + (1 if "norm" in name and "weight" in name else 0))
        model.final_logits_bias.normal_()
        model.final_logits_bias[0, -3:] = -100  # ids that no token has
        model.final_logits_bias[0, 1] = 9.0  # PAD, which would be said otherwise
    model.generation_config.bad_words_ids = [[1]]
    for name, value in (asked or {}).items():
        setattr(model.generation_config, name, value)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


def said_by_transformers(model: Any, tokenizer: Any, texts: list[str], **options: Any) -> list[str]:
    rows = [tokenizer(text)["input_ids"] for text in texts]
    width = max(map(len, rows))
    ids = torch.tensor([row + [1] * (width - len(row)) for row in rows])
    with torch.inference_mode():
        found = model.generate(ids, attention_mask=(ids != 1).long(), max_new_tokens=16, **options)
    return tokenizer.batch_decode(found, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> tuple[Path, Any, Any]:
    folder = tmp_path_factory.mktemp("bart") / "model"
    return folder, *make(folder)


@pytest.mark.parametrize("files", ["tokenizer.json", "vocab.json and merges.txt"])
def test_says_what_transformers_says(files, shared, tmp_path, capsys):
    folder, model, tokenizer = shared
    if files == "tokenizer.json":
        assert (folder / files).is_file()
    else:
        folder = shutil.copytree(folder, tmp_path / "model")
        (folder / "tokenizer.json").unlink()
    texts = TEXTS[:-1]  # a special token in a text is text here
    expected = said_by_transformers(model, tokenizer, texts, no_repeat_ngram_size=2)
    assert len(set(expected)) > 2
    file = tmp_path / "in.txt"
    file.write_text("\n".join(texts) + "\n", encoding="utf-8")
    assert main(["translate", str(folder), "--file", str(file), "--no_repeat_ngram_size", "2", *FEW]) == 0
    assert capsys.readouterr().out.split("\n")[:-1] == [text.replace("\n", " ") for text in expected]
    ours = load_model(folder, ("Transformer",))[1]
    for text in texts:
        assert [*ours.encode(text), 2] == tokenizer(text)["input_ids"]
        assert ours.decode([*ours.encode(text), 2]) == text
    assert ours.encode_batch(TEXTS) == [*map(ours.encode, TEXTS)]
    assert ours.decode(ours.encode(TEXTS[-1])) == TEXTS[-1] and 4 not in ours.encode(TEXTS[-1])


@pytest.mark.parametrize("has_space", [False, True])
def test_merges_come_in_their_order(has_space):
    vocab = {name: i for i, name in enumerate(["<s>", "<pad>", "</s>", "<unk>", "a", "b", "c", "ab", "bc", "Ġ", "Ġa"])}
    merges = b"#version: 0.2\nb c\na b\n"
    backend = byte_level_bpe(Path("merges.txt"), vocab, merges, add_prefix_space=has_space)
    assert backend.encode("abc").tokens == [*(["Ġ"] if has_space else []), "a", "bc"]
    assert backend.encode("abc abc").tokens[-3:] == ["Ġ", "a", "bc"]
    assert backend.decode([0, 4, 8, 2], skip_special_tokens=True) == "abc"


def test_what_is_forced_is_said_first_and_last(shared):
    folder, model, tokenizer = shared
    options = {"forced_bos_token_id": 0, "forced_eos_token_id": 2}
    expected = said_by_transformers(model, tokenizer, TEXTS[:3], **options)
    found = Translator.from_pretrained(folder).translate(TEXTS[:3], max_new_tokens=16, **options)
    assert found == expected != said_by_transformers(model, tokenizer, TEXTS[:3])


def test_a_folder_of_ours_is_made_of_it(shared, tmp_path):
    folder, *_ = shared
    translator = Translator.from_pretrained(folder)
    expected = translator.translate(TEXTS, max_new_tokens=16)
    translator.model.save_pretrained(tmp_path / "run", translator.tokenizer)
    names = sorted(file.name for file in (tmp_path / "run").iterdir())
    assert names == ["config.json", "model.safetensors", "tokenizer.json"]
    again = Translator.from_pretrained(tmp_path / "run")
    assert again.translate(TEXTS, max_new_tokens=16) == expected
    assert again.tokenizer.encode(TEXTS[0]) == translator.tokenizer.encode(TEXTS[0])
    prefixed = again.translate("two birds", target_prefix="the dog", max_new_tokens=4)
    assert prefixed.startswith("the dog")
    assert again.tokenizer.tokens([0, 2])[:2] == ["<s>", "</s>"]
    assert "".join(again.stream(TEXTS[0], max_new_tokens=16)) == expected[0]
    assert main(["quantize", str(folder), str(tmp_path / "int8")]) == 0
    assert Translator.from_pretrained(tmp_path / "int8").translate("two birds", max_new_tokens=4)


def test_weights_without_a_head_are_read(shared, tmp_path):
    """As the pretrained ones are saved: no prefix, no bias."""
    folder = shutil.copytree(shared[0], tmp_path / "model")
    model = BartModel.from_pretrained(folder)
    model.save_pretrained(folder)
    found, expected = (load_model(where, ("Transformer",))[0] for where in (folder, shared[0]))
    for name, weight in expected.state_dict().items():
        if name != "output_bias":
            assert torch.equal(found.state_dict()[name], weight), name
    state = {f"model.{name}": weight for name, weight in model.state_dict().items()}
    (folder / "model.safetensors").unlink()
    torch.save(state | {"model.encoder.version": torch.tensor([3.0])}, folder / "pytorch_model.bin")
    for name, weight in load_model(folder, ("Transformer",))[0].state_dict().items():
        assert torch.equal(found.state_dict()[name], weight), name


def test_what_a_search_is_asked_for_is_named(tmp_path, caplog):
    make(tmp_path / "model", asked={"forced_bos_token_id": 0, "no_repeat_ngram_size": 3})
    with caplog.at_level(logging.WARNING, "fastformer"):
        load_model(tmp_path / "model", ("Transformer",))
    assert "forced_bos_token_id=0, no_repeat_ngram_size=3" in caplog.text


def test_transformers_is_not_needed(shared, monkeypatch):
    expected = Translator.from_pretrained(shared[0]).translate("two birds", max_new_tokens=8)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert Translator.from_pretrained(shared[0]).translate("two birds", max_new_tokens=8) == expected


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.json", "merges.txt", "model.safetensors"])
def test_what_is_missing_or_damaged_is_named(name, shared, tmp_path, capsys):
    folder = shutil.copytree(shared[0], tmp_path / "model")
    if name in ("vocab.json", "merges.txt"):
        (folder / "tokenizer.json").unlink()
    (folder / name).write_bytes(b"\xff{")
    assert main(["translate", str(folder), "two birds"]) == 1
    assert name in (said := capsys.readouterr().err) and "Traceback" not in said
    (folder / name).unlink()
    if name == "tokenizer.json":
        assert main(["translate", str(folder), "two birds", *FEW]) == 0
    else:
        assert main(["translate", str(folder), "two birds"]) == 1
        assert f"expected the file {folder / name}, which isn't there" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("config.json", {"pad_token_id": 3}, "to have '<pad>' with the pad_token_id of config.json, 3, got 1"),
        ("config.json", {"bos_token_id": 3}, "to have '<s>' with the bos_token_id of config.json, 3, got 0"),
        ("config.json", {"encoder_layers": 1}, "got others as well: model.encoder.layers.1"),
        ("config.json", {"max_position_embeddings": 32}, r"source_position.table: expected \(32, 32\), got \(64, 32\)"),
        ("config.json", {"model_type": "led"}, "BART, Marian, T5.* got one of 'led'"),
        ("vocab.json", {"more": 1000}, "expected ids below .*, got 1000"),
    ],
)
def test_files_that_do_not_fit_are_refused(name, change, message, shared, tmp_path):
    folder = shutil.copytree(shared[0], tmp_path / "model")
    if name == "vocab.json":
        (folder / "tokenizer.json").unlink()
    values = json.loads((folder / name).read_text()) | change
    (folder / name).write_text(json.dumps(values))
    with pytest.raises(ValueError, match=message):
        load_model(folder, ("Transformer",))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"backend": {}}, "can't read"),
        ({"vocab_size": 3}, "expected ids below 3"),
        ({"special_ids": {"pad": -1}}, "damaged or no tokenizer"),
        ({"bos": "x"}, "damaged or no tokenizer"),
    ],
)
def test_a_damaged_tokenizer_is_named(change, message, shared, tmp_path):
    load_model(shared[0], ("Transformer",))[1].save(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match=message):
        load_tokenizer(tmp_path)


def test_the_tokenizer_keeps_to_its_vocabulary(shared):
    tokenizer = load_model(shared[0], ("Transformer",))[1]
    assert tokenizer.decode([0, *tokenizer.encode("the dog"), 1, 2, 17]) == "the dog"
    with pytest.raises(ValueError, match="expected ids below .*: was another tokenizer used"):
        tokenizer.decode([tokenizer.vocab_size])
    with pytest.raises(ValueError, match="lone surrogate"):
        tokenizer.encode("\udcff")
    with pytest.raises(ValueError, match="expected a list of texts"):
        tokenizer.encode_batch("two birds")
