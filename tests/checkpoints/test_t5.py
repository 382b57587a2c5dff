"""The folder of a T5, made here as transformers saves it: text in, text out, and what is missing is named."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration, T5Tokenizer

from fastformer.checkpoints import load_model
from fastformer.cli import main
from fastformer.data import load_tokenizer
from fastformer.generation import Translator

sentencepiece = pytest.importorskip("sentencepiece", reason="the sentencepiece library is not installed")
pytest.importorskip("tokenizers", reason="the tokenizers library is not installed")

TRAINING = [
    "two men walk the dog in the park",
    "a woman reads a book",
    "the dog sees two birds",
    "men read in the park",
]
TEXTS = ["translate: the dog reads a book", "two birds", "a woman in the park", "men walk the dog"]
FEW = ["--max_new_tokens", "16", "--device", "cpu"]


def make(folder: Path) -> Any:
    """A folder with both kinds of tokenizer, and transformers' model and tokenizer of it."""
    folder.mkdir()
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TRAINING), model_writer=written, vocab_size=48, minloglevel=2, hard_vocab_limit=False,
        pad_id=0, eos_id=1, unk_id=2, bos_id=-1, pad_piece="<pad>",
    )  # fmt: skip
    (folder / "spiece.model").write_bytes(written.getvalue())
    processor = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
    pieces = [(processor.id_to_piece(i), processor.get_score(i)) for i in range(processor.get_piece_size())]
    pieces += [(f"<extra_id_{i}>", 0.0) for i in range(3, -1, -1)]
    tokenizer = T5Tokenizer(vocab=pieces, extra_ids=4)
    torch.manual_seed(4)
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=len(pieces) + 5, d_model=32, d_kv=8, num_heads=3, d_ff=48, num_layers=2,
            feed_forward_proj="gated-gelu", relative_attention_max_distance=20, decoder_start_token_id=0,
        )
    ).eval()  # fmt: skip
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.3 if parameter.dim() == 1 or "shared" in name else 0.5
            parameter.copy_(torch.randn_like(parameter) * scale + (1 if "norm" in name else 0))
        model.decoder.final_layer_norm.weight.mul_(9)
        # Ids that no token has, and the sentinels, would be said otherwise.
        model.shared.weight[-9:] = 0
        model.shared.weight[0] = 0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


def said_by_transformers(model: Any, tokenizer: Any, texts: list[str]) -> list[str]:
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    with torch.inference_mode():
        ids = model.generate(**inputs, max_new_tokens=16, no_repeat_ngram_size=2)
    return tokenizer.batch_decode(ids, skip_special_tokens=True)


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> tuple[Path, Any, Any]:
    folder = tmp_path_factory.mktemp("t5") / "model"
    return folder, *make(folder)


@pytest.mark.parametrize("file", ["tokenizer.json", "spiece.model"])
def test_says_what_transformers_says(file, shared, tmp_path, capsys):
    folder, model, tokenizer = shared
    if file == "spiece.model":
        folder = shutil.copytree(folder, tmp_path / "model")
        (folder / "tokenizer.json").unlink()
    expected = said_by_transformers(model, tokenizer, TEXTS)
    assert len(set(expected)) > 2
    lines = tmp_path / "in.txt"
    lines.write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
    assert main(["translate", str(folder), "--file", str(lines), "--no_repeat_ngram_size", "2", *FEW]) == 0
    assert capsys.readouterr().out.split("\n")[:-1] == expected
    ours = load_model(folder, ("Transformer",))[1]
    for text in TEXTS[1:]:
        assert [*ours.encode(text), 1] == tokenizer(text)["input_ids"]
        assert ours.decode([*ours.encode(text), 1]) == text
    assert ours.encode_batch(TEXTS) == [*map(ours.encode, TEXTS)]
    assert ours.decode([*ours.encode("two birds"), 2, ours.vocab_size - 1, ours.vocab_size - 7]) == "two birds"
    assert ours.tokens([1])[0] == "</s>" and ours.pieces("two birds") == ["two birds"]
    with pytest.raises(ValueError, match="expected ids below .*: was another tokenizer used"):
        ours.decode([ours.vocab_size])


@pytest.mark.parametrize("file", ["tokenizer.json", "spiece.model"])
def test_a_folder_of_ours_is_made_of_it(file, shared, tmp_path):
    folder = shared[0]
    if file == "spiece.model":
        folder = shutil.copytree(folder, tmp_path / "model")
        (folder / "tokenizer.json").unlink()
    translator = Translator.from_pretrained(folder)
    expected = translator.translate(TEXTS, max_new_tokens=16)
    translator.model.save_pretrained(tmp_path / "run", translator.tokenizer)
    again = Translator.from_pretrained(tmp_path / "run")
    assert again.translate(TEXTS, max_new_tokens=16) == expected
    assert again.tokenizer.encode(TEXTS[0]) == translator.tokenizer.encode(TEXTS[0])
    assert main(["quantize", str(folder), str(tmp_path / "int8")]) == 0
    assert Translator.from_pretrained(tmp_path / "int8").translate("two birds", max_new_tokens=4)


def test_transformers_is_not_needed(shared, monkeypatch):
    expected = Translator.from_pretrained(shared[0]).translate("two birds", max_new_tokens=8)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert Translator.from_pretrained(shared[0]).translate("two birds", max_new_tokens=8) == expected


@pytest.mark.parametrize("name", ["tokenizer.json", "spiece.model", "model.safetensors"])
def test_what_is_missing_or_damaged_is_named(name, shared, tmp_path, capsys):
    folder = shutil.copytree(shared[0], tmp_path / "model")
    if name == "spiece.model":
        (folder / "tokenizer.json").unlink()
    (folder / name).write_bytes(b"\xff{")
    assert main(["translate", str(folder), "two birds"]) == 1
    assert name in (said := capsys.readouterr().err) and "Traceback" not in said
    (folder / name).unlink()
    if name != "tokenizer.json":
        assert main(["translate", str(folder), "two birds"]) == 1
        assert f"expected the file {folder / name}, which isn't there" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change, message",
    [
        ({"eos_token_id": 3}, "to have '</s>' with the eos_token_id of config.json, 3, got 1"),
        ({"num_layers": 1}, "got others as well: encoder.block.1"),
        ({"d_kv": 64}, "heads fit into d_model"),
    ],
)
def test_files_that_do_not_fit_are_refused(change, message, shared, tmp_path):
    folder = shutil.copytree(shared[0], tmp_path / "model")
    values = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=message):
        load_model(folder, ("Transformer",))


def test_a_damaged_tokenizer_is_named(shared, tmp_path):
    folder = shutil.copytree(shared[0], tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    load_model(folder, ("Transformer",))[1].save(tmp_path)
    file = tmp_path / "tokenizer.json"
    values = json.loads(file.read_text())
    for change, message in (({"vocab_size": 3}, "expected ids below 3"), ({"model": "x"}, "damaged or no tokenizer")):
        file.write_text(json.dumps(values | change))
        with pytest.raises(ValueError, match=message):
            load_tokenizer(tmp_path)
