"""The folder of a Marian, made here as transformers saves it: text in, text out, and what is missing is named."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MarianConfig, MarianMTModel, MarianTokenizer

from fastformer.checkpoints import load_model
from fastformer.cli import main
from fastformer.data import load_tokenizer
from fastformer.generation import Translator

sentencepiece = pytest.importorskip("sentencepiece", reason="the sentencepiece library is not installed")

ENGLISH = ["two men walk the dog in the park", "a woman reads a book", "the dog sees two birds", "men read in the park"]
GERMAN = ["zwei Männer führen den Hund im Park aus", "eine Frau liest ein Buch", "der Hund sieht zwei Vögel"]
TEXTS = ["the dog reads a book", "two birds", ">>deu<< a woman in the park", "men walk 漢 the dog"]
FEW = ["--max_new_tokens", "20", "--device", "cpu"]
MORE = {"no_repeat_ngram_size": 2}


def trained(texts: list[str]) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=model, vocab_size=40, minloglevel=2, hard_vocab_limit=False
    )
    return model.getvalue()


def make(folder: Path, *, separate: bool = False, bad_words: bool = True) -> Any:
    """A folder, and transformers' model and tokenizer of it."""
    folder.mkdir()
    sides = {"source": trained(ENGLISH), "target": trained(GERMAN)}
    pieces = {}
    for side, model in sides.items():
        (folder / f"{side}.spm").write_bytes(model)
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        pieces[side] = [processor.id_to_piece(i) for i in range(3, processor.get_piece_size())]
    special = ["</s>", "<unk>", ">>deu<<"]
    names = {side: [*special, *found, "<pad>"] for side, found in pieces.items()}
    if not separate:
        names["source"] = [*special, *sorted({*pieces["source"], *pieces["target"]}), "<pad>"]
    else:  # <pad> is one id for both
        size = max(map(len, names.values()))
        names = {
            side: [*found[:-1], *(f"unused{i}" for i in range(size - len(found))), "<pad>"]
            for side, found in names.items()
        }
    vocab = {name: i for i, name in enumerate(names["source"])}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    options: dict[str, Any] = {}
    if separate:
        (folder / "target_vocab.json").write_text(json.dumps({name: i for i, name in enumerate(names["target"])}))
        options = {"separate_vocabs": True, "target_vocab_file": str(folder / "target_vocab.json")}
    tokenizer = MarianTokenizer(
        str(folder / "source.spm"), str(folder / "target.spm"), str(folder / "vocab.json"), **options
    )
    pad = vocab["<pad>"]
    torch.manual_seed(1)
    model = MarianMTModel(
        MarianConfig(
            vocab_size=len(vocab), d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64,
            pad_token_id=pad, eos_token_id=0, decoder_start_token_id=pad, forced_eos_token_id=None,
            activation_function="swish", scale_embedding=True, share_encoder_decoder_embeddings=not separate,
        )
    ).eval()  # fmt: skip
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_positions" not in name:
                scale = 0.2 if parameter.dim() == 1 or "shared" in name or "embed" in name else 0.8
                parameter.copy_(torch.randn_like(parameter) * scale + (1 if "norm.weight" in name else 0))
        model.model.decoder.layers[-1].final_layer_norm.weight.mul_(3)
        model.final_logits_bias.normal_().mul_(0.3)
        model.final_logits_bias[0, pad] = 9.0 if bad_words else 0.0  # what would be said otherwise
    if bad_words:
        model.generation_config.bad_words_ids = [[pad]]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


def said_by_transformers(model: Any, tokenizer: Any, texts: list[str], **options: Any) -> list[str]:
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    with torch.inference_mode():
        ids = model.generate(**inputs, max_new_tokens=20, **MORE, **options)
    return tokenizer.batch_decode(ids, skip_special_tokens=True)


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> tuple[Path, Any, Any]:
    folder = tmp_path_factory.mktemp("marian") / "model"
    return folder, *make(folder)


@pytest.mark.parametrize("separate", [False, True], ids=["shared", "separate"])
def test_translates_as_transformers_does(separate, shared, tmp_path, capsys):
    folder, model, tokenizer = shared
    if separate:
        folder = tmp_path / "model"
        model, tokenizer = make(folder, separate=True)
    expected = said_by_transformers(model, tokenizer, TEXTS)
    assert len(set(expected)) > 2
    file = tmp_path / "in.txt"
    file.write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
    assert main(["translate", str(folder), "--file", str(file), "--no_repeat_ngram_size", "2", *FEW]) == 0
    assert capsys.readouterr().out.splitlines() == expected
    ours = load_model(folder, ("Transformer",))[1]
    for text in TEXTS:
        assert [*ours.encode(text), 0] == tokenizer(text)["input_ids"]
        assert [*ours.encode_target(text), 0] == tokenizer(text_target=text)["input_ids"]


def test_scores_are_the_log_probabilities_of_transformers(shared):
    folder, model, tokenizer = shared
    translations = ["eine Frau", "der Hund liest 漢", "zwei Vögel im Park", ""]
    for text, translation, found in zip(
        TEXTS, translations, Translator.from_pretrained(folder).score(TEXTS, translations), strict=True
    ):
        labels = tokenizer(text_target=translation, return_tensors="pt").input_ids
        with torch.inference_mode():
            logits = model(**tokenizer(text, return_tensors="pt"), labels=labels).logits[0]
        allowed = logits.clone()
        allowed[:, tokenizer.pad_token_id] = -1e9
        expected = allowed.log_softmax(-1)[range(labels.shape[1]), labels[0]]
        assert [value for _, value in found.tokens] == pytest.approx(expected.tolist(), abs=1e-3)
        assert found.score == pytest.approx(expected.sum().item(), rel=1e-5)


@pytest.mark.parametrize("stopping", [False, True, "never"])
def test_beams_are_those_of_transformers_by_its_rules(stopping, shared, tmp_path, capsys):
    folder, model, tokenizer = shared
    options = {"num_beams": 4, "length_penalty": 2.0, "early_stopping": stopping}
    # What may not be said has no part in our softmax.
    expected = said_by_transformers(model, tokenizer, TEXTS, renormalize_logits=True, **options)
    file = tmp_path / "in.txt"
    file.write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
    flags = [part for name, value in options.items() for part in (f"--{name}", str(value).lower())]
    more = ["--beam_rules", "transformers", "--no_repeat_ngram_size", "2", *FEW]
    assert main(["translate", str(folder), "--file", str(file), *flags, *more]) == 0
    assert capsys.readouterr().out.splitlines() == expected and len(set(expected)) > 2


def test_pad_may_be_said_where_nothing_forbids_it(tmp_path, shared):
    model, _ = load_model(shared[0], ("Transformer",))
    assert model.output_bias[model.config.special_ids.pad] == -30_000
    make(tmp_path / "model", bad_words=False)
    model, _ = load_model(tmp_path / "model", ("Transformer",))
    assert model.output_bias[model.config.special_ids.pad] == 0


def test_a_folder_of_ours_is_made_of_it(shared, tmp_path, capsys):
    folder, *_ = shared
    translator = Translator.from_pretrained(folder)
    expected = translator.translate(TEXTS, max_new_tokens=20)
    translator.model.save_pretrained(tmp_path / "run", translator.tokenizer)
    assert sorted(file.name for file in (tmp_path / "run").iterdir()) == [
        "config.json", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip
    assert Translator.from_pretrained(tmp_path / "run").translate(TEXTS, max_new_tokens=20) == expected
    assert main(["quantize", str(folder), str(tmp_path / "int8")]) == 0
    assert Translator.from_pretrained(tmp_path / "int8").translate("two birds", max_new_tokens=4)
    more = ["--init_from", str(tmp_path / "run"), "--task", "numbers"]
    assert main(["train", str(tmp_path / "more"), *more]) == 1
    assert "expected a tokenizer of both sides" in capsys.readouterr().err


def test_what_the_translation_begins_with_is_of_the_target(shared):
    translator = Translator.from_pretrained(shared[0])
    found = translator.translate(["two birds", "the dog"], target_prefix=["der Hund", None], max_new_tokens=8)
    assert found[0].startswith("der Hund")
    assert found[1] == translator.translate("the dog", max_new_tokens=8)
    source, target, weights = translator.attention("two birds")
    assert source[:1] == ["▁"] or source[0].startswith("▁")
    assert weights.shape[2:] == (len(target), len(source))
    assert "".join(translator.stream("two birds", max_new_tokens=8)) == translator.translate(
        "two birds", max_new_tokens=8
    )


def test_older_weights_are_read(shared, tmp_path):
    folder = shutil.copytree(shared[0], tmp_path / "model")
    (folder / "model.safetensors").unlink()
    torch.save(shared[1].state_dict(), folder / "pytorch_model.bin")
    found = load_model(folder, ("Transformer",))[0].state_dict()
    for name, weight in load_model(shared[0], ("Transformer",))[0].state_dict().items():
        assert torch.equal(found[name], weight)
    torch.save({name: value.half() for name, value in shared[1].state_dict().items()}, folder / "pytorch_model.bin")
    half = load_model(folder, ("Transformer",))[0].state_dict()
    for name, weight in found.items():
        assert half[name].dtype == torch.float32 and torch.equal(half[name], weight.half().float()), name
    assert load_model(folder, ("Transformer",), dtype=torch.bfloat16)[0].embedding.weight.dtype == torch.bfloat16


def test_transformers_is_not_needed(shared, monkeypatch):
    expected = Translator.from_pretrained(shared[0]).translate("two birds", max_new_tokens=8)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert Translator.from_pretrained(shared[0]).translate("two birds", max_new_tokens=8) == expected


@pytest.mark.parametrize(
    "name", ["source.spm", "target.spm", "vocab.json", "model.safetensors", "tokenizer_config.json"]
)
def test_what_is_missing_or_damaged_is_named(name, shared, tmp_path, capsys):
    folder = shutil.copytree(shared[0], tmp_path / "model")
    (folder / name).write_bytes(b"\xff{")
    assert main(["translate", str(folder), "two birds"]) == 1
    assert name in (said := capsys.readouterr().err) and "Traceback" not in said
    (folder / name).unlink()
    if name != "tokenizer_config.json":
        assert main(["translate", str(folder), "two birds"]) == 1
        assert f"expected the file {folder / name}, which isn't there" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("config.json", {"pad_token_id": 3}, "to have '<pad>' with the pad_token_id of config.json, 3, got"),
        ("config.json", {"d_model": "big"}, "expected d_model to be an integer, got 'big'"),
        ("config.json", {"encoder_layers": 1}, "got others as well: model.encoder.layers.1"),
        ("config.json", {"decoder_layers": 3}, "got none called model.decoder.layers.2"),
        ("config.json", {"encoder_ffn_dim": 40, "decoder_ffn_dim": 40}, r"expected \(40, 32\), got \(48, 32\)"),
        ("vocab.json", {"more": 1000}, "ids up to 1000"),
        ("vocab.json", {"<unk>": None}, "to map pieces to ids, got None for '<unk>'"),
        ("generation_config.json", {"bad_words_ids": [7]}, "expected bad_words_ids to be lists of ids"),
        ("generation_config.json", {"bad_words_ids": [[-1]]}, "expected bad_words_ids to be lists of ids"),
        ("generation_config.json", {"bad_words_ids": [[100000]]}, "100000"),
    ],
)  # fmt: skip
def test_files_that_do_not_fit_are_refused(name, change, message, shared, tmp_path):
    folder = shutil.copytree(shared[0], tmp_path / "model")
    values = json.loads((folder / name).read_text()) | change
    (folder / name).write_text(json.dumps(values))
    with pytest.raises(ValueError, match=message):
        load_model(folder, ("Transformer",))


def test_other_commands_say_that_it_is_a_translator(shared, capsys):
    assert main(["generate", str(shared[0]), "two"]) == 1
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "change, message",
    [
        ({"source": "!"}, "damaged or no tokenizer"),
        ({"target": "QUJD"}, "expected a SentencePiece model"),
        ({"source_vocab": {"a": -1}}, "expected .* to map pieces to ids, got -1 for 'a'"),
        ({"special_ids": {"unk": None, "pad": 0, "eos": [1]}}, "expected an id for pieces that the vocabulary lacks"),
        ({"vocab_size": 3}, "expected ids below 3"),
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
    pad, unk = tokenizer.special_ids.pad, 1
    ids = tokenizer.encode_target("der Hund")
    assert tokenizer.decode([pad, *ids, unk, pad, 0, ids[0]]) == "der Hund"
    assert unk in tokenizer.encode("漢") and tokenizer.encode_batch(["two", "漢"])[1] == tokenizer.encode("漢")
    assert tokenizer.tokens([2]) == tokenizer.source_tokens([2]) == [">>deu<<"]
    with pytest.raises(ValueError, match="expected ids below 48, got 48"):
        tokenizer.decode([48])
    with pytest.raises(ValueError, match="lone surrogate"):
        tokenizer.encode("\udcff")
    with pytest.raises(ValueError, match="expected a list of texts"):
        tokenizer.encode_batch("two birds")
