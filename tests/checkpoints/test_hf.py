"""Reads folders that transformers saved, with one suite for all families; errors name what is wrong."""

from __future__ import annotations

import json
import logging
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from transformers import BartModel

from fastformer.checkpoints import load_model
from fastformer.cli import main
from fastformer.data import load_tokenizer
from fastformer.data.huggingface import byte_level_bpe
from fastformer.generation import Ensemble, Translator, generate
from fastformer.integrations import to_huggingface
from tests.checkpoints import decoders, families
from tests.checkpoints.families import FOLDERS, GERMAN, Saved
from tests.covering import by_turns
from tests.models.test_weights import shard

FEW = ["--max_new_tokens", "16", "--no_repeat_ngram_size", "2", "--device", "cpu"]
plain = pytest.mark.parametrize("kind", ["bart", "marian", "t5"])


def loaded(folder: Path, **options: Any) -> Any:
    return load_model(folder, ("Transformer", "GPT"), **options)


def translated(saved: Saved, tmp_path: Path, capsys, *flags: str) -> list[str]:
    """Returns the command's output for the texts."""
    file = tmp_path / "in.txt"
    file.write_text("\n".join(saved.texts) + "\n", encoding="utf-8")
    assert main(["translate", str(saved.folder), "--file", str(file), *FEW, *flags]) == 0
    return capsys.readouterr().out.split("\n")[:-1]


@pytest.mark.parametrize("kind", FOLDERS)
def test_outputs_equal_transformers(kind, made, tmp_path, capsys) -> None:
    saved = made(kind)
    expected = saved.said(no_repeat_ngram_size=2)
    assert translated(saved, tmp_path, capsys) == [text.replace("\n", " ") for text in expected]
    assert len(set(expected)) > 2
    tokenizer = loaded(saved.folder)[1]
    eos = tokenizer.special_ids.first_eos
    for text in saved.texts:
        assert [*tokenizer.encode(text), eos] == saved.tokenizer(text)["input_ids"]
        if kind.startswith("marian"):
            assert [*tokenizer.encode_target(text), eos] == saved.tokenizer(text_target=text)["input_ids"]
        else:
            assert tokenizer.decode([*tokenizer.encode(text), eos]) == text
    assert tokenizer.encode_batch(saved.texts) == [*map(tokenizer.encode, saved.texts)]


@pytest.mark.parametrize("kind", ["bart", "marian", "t5", "t5-spiece"])
def test_a_folder_converts_to_fastformers_format(kind, made, tmp_path) -> None:
    saved = made(kind)
    translator = Translator.from_pretrained(saved.folder)
    expected = translator.translate(saved.texts, max_new_tokens=16)
    translator.model.save_pretrained(tmp_path / "run", translator.tokenizer)
    names = sorted(file.name for file in (tmp_path / "run").iterdir())
    assert names == ["config.json", "model.safetensors", "tokenizer.json"]
    again = Translator.from_pretrained(tmp_path / "run")
    assert again.translate(saved.texts, max_new_tokens=16) == expected
    assert again.tokenizer.encode(saved.texts[0]) == translator.tokenizer.encode(saved.texts[0])
    assert "".join(again.stream(saved.texts[0], max_new_tokens=16)) == expected[0]
    prefix = "der Hund" if kind == "marian" else "the dog"  # in the target's vocabulary
    found = again.translate(["two birds", "men"], target_prefix=[prefix, None], max_new_tokens=4)
    assert found[0].startswith(prefix) and found[1] == again.translate("men", max_new_tokens=4)
    assert main(["quantize", str(saved.folder), str(tmp_path / "int8")]) == 0
    assert Translator.from_pretrained(tmp_path / "int8").translate("two birds", max_new_tokens=4)


@pytest.mark.parametrize("kind", ["bart", "marian", "t5"])
def test_a_model_that_was_converted_back_translates_with_its_tokenizer(kind, made, copy) -> None:
    saved, folder = made(kind), copy(kind)
    (folder / "generation_config.json").unlink(missing_ok=True)
    translator = Translator.from_pretrained(saved.folder)
    to_huggingface(translator.model).save_pretrained(folder)
    again = Translator.from_pretrained(folder)
    assert again.translate(saved.texts, max_new_tokens=16) == translator.translate(saved.texts, max_new_tokens=16)


@pytest.mark.parametrize("kind", ["bart", "marian", "t5", "llama3"])
def test_transformers_is_not_needed(kind, made, monkeypatch) -> None:
    def generated() -> list[int]:
        model, tokenizer = loaded(getattr(made(kind), "folder", made(kind)))
        return generate(model, [tokenizer.encode("two birds")], max_new_tokens=8)[0].tolist()

    expected = generated()
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert generated() == expected


@pytest.mark.parametrize(
    "kind, name, does_without",
    [
        ("bart", "tokenizer.json", True),
        ("bart-merges", "vocab.json", False),
        ("bart-merges", "merges.txt", False),
        ("bart", "model.safetensors", False),
        ("marian", "source.spm", False),
        ("marian", "target.spm", False),
        ("marian", "vocab.json", False),
        ("marian", "tokenizer_config.json", True),
        ("t5", "tokenizer.json", True),
        ("t5-spiece", "spiece.model", False),
    ],
)
def test_missing_and_damaged_parts_are_named(kind, name, does_without, copy, capsys) -> None:
    folder = copy(kind)
    (folder / name).write_bytes(b"\xff{")
    assert main(["translate", str(folder), "two birds"]) == 1
    assert name in (said := capsys.readouterr().err) and "Traceback" not in said
    (folder / name).unlink()
    if does_without:
        assert main(["translate", str(folder), "two birds", *FEW]) == 0
    else:
        assert main(["translate", str(folder), "two birds"]) == 1
        assert str(folder / name) in capsys.readouterr().err


@pytest.mark.parametrize(
    "kind, name, change, named",
    [
        ("bart", "config.json", {"pad_token_id": 3}, "'<pad>' .*pad_token_id .*3, got 1"),
        ("bart", "config.json", {"bos_token_id": 3}, "'<s>' .*bos_token_id .*3, got 0"),
        ("bart", "config.json", {"encoder_layers": 1}, r"model\.encoder\.layers\.1"),
        ("bart", "config.json", {"max_position_embeddings": 32}, r"source_position\.table: .*\(32, 32\), got \(64, 32"),
        ("bart", "config.json", {"model_type": "led"}, "'led'"),
        ("bart-merges", "vocab.json", {"more": 1000}, r"\b1000\b"),
        ("marian", "config.json", {"pad_token_id": 3}, "'<pad>' .*pad_token_id"),
        ("marian", "config.json", {"d_model": "big"}, "d_model .*'big'"),
        ("marian", "config.json", {"decoder_layers": 3}, r"model\.decoder\.layers\.2"),
        ("marian", "config.json", {"encoder_ffn_dim": 40, "decoder_ffn_dim": 40}, r"\(40, 32\), got \(48, 32\)"),
        ("marian", "vocab.json", {"more": 1000}, r"\b1000\b"),
        ("marian", "vocab.json", {"<unk>": None}, "None for '<unk>'"),
        ("marian", "generation_config.json", {"bad_words_ids": [7]}, r"\bbad_words_ids\b"),
        ("marian", "generation_config.json", {"bad_words_ids": [[-1]]}, r"\bbad_words_ids\b"),
        ("marian", "generation_config.json", {"bad_words_ids": [[100000]]}, "100000"),
        ("marian", "generation_config.json", {"suppress_tokens": [[7]]}, "suppress_tokens"),
        ("marian", "generation_config.json", {"suppress_tokens": [100000]}, "100000"),
        ("marian", "generation_config.json", {"decoder_start_token_id": "7"}, "start"),
        ("t5", "config.json", {"eos_token_id": 3}, "'</s>' .*eos_token_id .*3, got 1"),
        ("t5", "config.json", {"num_layers": 1}, r"encoder\.block\.1"),
        ("t5", "config.json", {"d_kv": 64}, r"in_proj_weight: expected \(576, 32\)"),
        ("llama3", "config.json", {"hidden_act": "relu2"}, "hidden_act .*'relu2'"),
        ("llama3", "config.json", {"rope_parameters": {"rope_type": "spiral"}}, "rope_type .*'spiral'"),
        ("llama3", "config.json", {"quantization_config": {"quant_method": "hqq"}}, "quantization_config.*'hqq'"),
        ("llama3", "config.json", {"num_hidden_layers": 1}, r"model\.layers\.1"),
        ("llama3", "config.json", {"eos_token_id": "x"}, "eos_token_id .*'x'"),
        ("llama3", "config.json", {"model_type": "bart"}, "fastformer translate"),
        ("llama3", "config.json", {"model_type": "nonesuch"}, "Llama, .*'nonesuch'"),
        ("llama3", "config.json", {"intermediate_size": 40}, r"linear1\.weight: .*\(80, 32\), got \(96, 32\)"),
        ("pieces", "tokenizer_config.json", {"chat_template": 3}, "chat_template .*3"),
        ("llama3", "tokenizer_config.json", {"add_bos_token": True, "bos_token": "<x>"}, "'<x>'"),
        ("gpt2", "config.json", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx .*True"),
    ],
)
def test_files_that_do_not_fit_are_refused(kind, name, change, named, copy) -> None:
    folder = copy(kind)
    (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | change))
    if kind == "llama3":  # which has the same id in another file
        (folder / "generation_config.json").unlink()
    with pytest.raises(ValueError, match=named):
        load_model(folder, ("GPT",) if kind in decoders.FOLDERS else ("Transformer",))


@pytest.mark.parametrize(
    "kind, change",
    [
        ("bart", {"backend": {}}),
        ("bart", {"vocab_size": 3}),
        ("bart", {"special_ids": {"pad": -1}}),
        ("bart", {"bos": "x"}),
        ("marian", {"source": "!"}),
        ("marian", {"target": "QUJD"}),
        ("marian", {"source_vocab": {"a": -1}}),
        ("marian", {"special_ids": {"unk": None, "pad": 0, "eos": [1]}}),
        ("marian", {"vocab_size": 3}),
        ("t5-spiece", {"vocab_size": 3}),
        ("t5-spiece", {"model": "x"}),
        ("llama3", {"backend": {}}),
        ("llama3", {"vocab_size": 3}),
        ("llama3", {"chat": None}),
        ("pieces", {"model": "x"}),
        ("pieces", {"added": {"a": [10**6, True]}}),
    ],
)
def test_a_damaged_tokenizer_is_named(kind, change, made, tmp_path) -> None:
    loaded(getattr(made(kind), "folder", made(kind)))[1].save(tmp_path)
    file = tmp_path / "tokenizer.json"
    assert load_tokenizer(tmp_path).encode("two birds")
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("kind", FOLDERS)
def test_the_tokenizer_stays_within_its_vocabulary(kind, made) -> None:
    tokenizer = loaded(made(kind).folder)[1]
    ids, text = tokenizer.special_ids, GERMAN[2] if kind.startswith("marian") else "two birds"
    encoded = getattr(tokenizer, "encode_target", tokenizer.encode)(text)
    assert tokenizer.decode([ids.pad, *encoded, ids.unk, ids.pad, ids.first_eos, encoded[-1]]) == text
    assert tokenizer.tokens([ids.first_eos]) == ["</s>"] and tokenizer.pieces(text) == [text]
    for call in (tokenizer.decode, tokenizer.tokens):
        with pytest.raises(ValueError, match=str(tokenizer.vocab_size)):
            call([tokenizer.vocab_size])
    with pytest.raises(ValueError, match="surrogate"):
        tokenizer.encode("\udcff")
    with pytest.raises(ValueError, match="texts"):
        tokenizer.encode_batch("two birds")


def test_special_tokens_in_a_text_are_text(made) -> None:
    tokenizer = loaded(made("bart").folder)[1]
    text = "it's the dog's <mask> book"
    assert tokenizer.decode(tokenizer.encode(text)) == text and 4 not in tokenizer.encode(text)
    marian = loaded(made("marian").folder)[1]
    assert marian.special_ids.unk in marian.encode("漢")
    assert marian.tokens([2]) == marian.source_tokens([2]) == [">>deu<<"]
    t5 = loaded(made("t5-spiece").folder)[1]  # ids without a piece are left out
    assert t5.decode([*t5.encode("two birds"), t5.vocab_size - 1, t5.vocab_size - 7]) == "two birds"


@pytest.mark.parametrize("has_space", [False, True])
def test_merges_come_in_their_order(has_space) -> None:
    vocab = {name: i for i, name in enumerate(["<s>", "<pad>", "</s>", "<unk>", "a", "b", "c", "ab", "bc", "Ġ", "Ġa"])}
    merges = b"#version: 0.2\nb c\na b\n"
    backend = byte_level_bpe(Path("merges.txt"), vocab, merges, add_prefix_space=has_space)
    assert backend.encode("abc").tokens == [*(["Ġ"] if has_space else []), "a", "bc"]
    assert backend.encode("abc abc").tokens[-3:] == ["Ġ", "a", "bc"]
    assert backend.decode([0, 4, 8, 2], skip_special_tokens=True) == "abc"


def test_forced_tokens_come_first_and_last(made) -> None:
    saved = made("bart")
    options = {"forced_bos_token_id": 0, "forced_eos_token_id": 2}
    found = Translator.from_pretrained(saved.folder).translate(saved.texts, max_new_tokens=16, **options)
    assert found == saved.said(**options) != saved.said()


def test_scores_are_the_log_probabilities_of_transformers(made) -> None:
    saved = made("marian")  # which forbids PAD: that keeps its probability
    translations = ["eine Frau", "der Hund liest 漢", "zwei Vögel im Park", ""]
    scored = Translator.from_pretrained(saved.folder).score(saved.texts, translations)
    for text, translation, found in zip(saved.texts, translations, scored, strict=True):
        labels = saved.tokenizer(text_target=translation, return_tensors="pt").input_ids
        with torch.inference_mode():
            logits = saved.model(**saved.tokenizer(text, return_tensors="pt"), labels=labels).logits[0]
        expected = logits.log_softmax(-1)[range(labels.shape[1]), labels[0]]
        assert [value for _, value in found.tokens] == pytest.approx(expected.tolist(), abs=1e-3)
        assert found.score == pytest.approx(expected.sum().item(), rel=1e-5)


@pytest.mark.parametrize("kind, stopping", by_turns(["marian", "bart", "pegasus"], [False, True, "never"]))
def test_beams_by_transformers_rules_equal_its_own(kind, stopping, made, tmp_path, capsys) -> None:
    saved = made(kind)
    options = {"num_beams": 4, "length_penalty": 2.0, "early_stopping": stopping}
    expected = saved.said(no_repeat_ngram_size=2, **options)
    flags = [part for name, value in options.items() for part in (f"--{name}", str(value).lower())]
    assert translated(saved, tmp_path, capsys, "--beam_rules", "transformers", *flags) == expected
    assert len(set(expected)) > 2


@pytest.mark.parametrize("kind, forbidden", by_turns(["marian", "bart", "t5"], [[7, 9], []]))
def test_scores_of_beams_are_those_of_transformers(kind, forbidden, made, tmp_path) -> None:
    """With the folder's own generation config, and more of what it forbids: that keeps its probability."""
    saved = made(kind)
    folder = shutil.copytree(saved.folder, tmp_path / "folder")
    file = folder / "generation_config.json"
    values = json.loads(file.read_text())
    words = [*(values.get("bad_words_ids") or []), *([i] for i in forbidden)]
    file.write_text(json.dumps(values | {"bad_words_ids": words or None}))
    theirs = type(saved.model).from_pretrained(folder).eval()
    ids = torch.tensor([saved.tokenizer(saved.texts[1])["input_ids"]])
    options = {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 9, "return_dict_in_generate": True}
    expected = theirs.generate(ids, output_scores=True, **options)
    exact = theirs.double().generate(ids, output_scores=True, **options).sequences_scores
    error = float((expected.sequences_scores - exact).abs().max())
    # The searches in C++, in Python and on the device, which has no position biases.
    for engine in ("cpp", "kv_cache") if kind == "t5" else ("cpp", "kv_cache", "graph"):
        found = generate(loaded(folder)[0], ids, beam_rules="transformers", engine=engine, **options)
        assert found.scores.tolist() == pytest.approx(exact.tolist(), abs=2 * error + 1e-5)
        longest = min(found.sequences.shape[1], expected.sequences.shape[1] - 1)  # ours lack the start token
        assert torch.equal(found.sequences[:, :longest], expected.sequences[:, 1 : longest + 1])


def test_the_offset_of_a_pegasus_is_its_tokenizers(made, tmp_path) -> None:
    folder = shutil.copytree(made("pegasus-spiece").folder, tmp_path / "folder")
    usual = loaded(folder)[1].encode("the dog")
    values = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(values | {"offset": 100}))
    assert loaded(folder)[1].encode("the dog") == [i - 3 if i > 103 else i for i in usual] != usual
    for wrong in (-1, True, "100"):
        (folder / "tokenizer_config.json").write_text(json.dumps(values | {"offset": wrong}))
        with pytest.raises(ValueError, match="offset"):
            loaded(folder)


@pytest.mark.parametrize("spaced", [None, False, True])
def test_a_space_in_front_is_added_if_the_folder_says_so(spaced, made, tmp_path) -> None:
    folder = shutil.copytree(made("bart-merges").folder, tmp_path / "folder")
    values = json.loads((folder / "tokenizer_config.json").read_text())
    values.pop("add_prefix_space", None)
    values |= {} if spaced is None else {"add_prefix_space": spaced}
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    tokenizer = loaded(folder)[1]
    assert (tokenizer.encode("the dog") == tokenizer.encode(" the dog")) is bool(spaced)


def test_forbidden_ids_are_kept_by_every_way_out_of_a_folder(made, tmp_path) -> None:
    saved = made("marian")
    model, tokenizer = loaded(saved.folder)
    pad = model.config.special_ids.pad
    model.save_pretrained(tmp_path, tokenizer)
    for one in (model, loaded(tmp_path)[0], Ensemble([model, model])):
        assert one.config.suppress_tokens == (pad,)
        assert pad not in [*generate(one, [[5, 6, 0]], max_new_tokens=12)[0, :3].tolist()]
    assert to_huggingface(model).generation_config.bad_words_ids == [[pad]]


def test_sequences_that_a_folder_forbids_are_named(copy, caplog) -> None:
    folder = copy("marian")
    setting("generation_config.json", bad_words_ids=[[5], [6, 7]])(folder)
    assert 5 in loaded(folder)[0].config.suppress_tokens and "bad_words_ids" in caplog.text


def test_pad_may_be_generated_if_nothing_forbids_it(tmp_path) -> None:
    saved = families.marian(tmp_path / "model", bad_words=False)
    assert loaded(saved.folder)[0].config.suppress_tokens == ()


OLDER: dict[str, dict[str, Any]] = {
    "marian": {"bad_words_ids": [[39], [7]]},
    "bart": {"bad_words_ids": [[1], [9]], "no_repeat_ngram_size": 3, "forced_bos_token_id": 0},
    "t5": {"bad_words_ids": [[5]]},
    "mbart50": {"forced_bos_token_id": "de_DE", "bad_words_ids": [[1]]},
    "nllb": {"forced_bos_token_id": "fra_Latn"},
    "llama3": {"eos_token_id": [3, 1], "pad_token_id": 5},
}


@pytest.mark.parametrize("kind", OLDER)
def test_the_options_of_a_search_may_be_among_the_settings(kind, made, tmp_path, caplog) -> None:
    """As folders had them before there was a generation_config.json."""
    saved = getattr(made(kind), "saved", made(kind))
    folder, values, results = getattr(saved, "folder", saved), dict(OLDER[kind]), []
    if isinstance(name := values.get("forced_bos_token_id"), str):
        values["forced_bos_token_id"] = loaded(folder)[1].languages.ids[name]
    for place in ("generation_config.json", "config.json", None):
        caplog.clear()
        changed = shutil.copytree(folder, tmp_path / "model")
        search = {"generation_config.json": values, None: {}}.get(place)
        (changed / "generation_config.json").unlink(missing_ok=True)
        if search is not None:
            (changed / "generation_config.json").write_text(json.dumps(search))
        else:
            setting("config.json", **values)(changed)
        model, tokenizer = loaded(changed)
        results.append((model.config, tokenizer.languages, caplog.messages[:]))
        shutil.rmtree(changed)
    newer, older, without = results
    assert newer == older != without


def test_search_options_are_named(tmp_path, caplog) -> None:
    saved = families.bart(tmp_path / "model", forced_bos_token_id=0, no_repeat_ngram_size=3)
    with caplog.at_level(logging.WARNING, "fastformer"):
        loaded(saved.folder)
    assert "forced_bos_token_id=0, no_repeat_ngram_size=3" in caplog.text


def test_the_forced_language_alone_is_not_named(made, tmp_path, caplog) -> None:
    """The tokenizer takes it."""
    folder = shutil.copytree(made("nllb").saved.folder, tmp_path / "model")
    language = loaded(folder)[1].languages.ids["fra_Latn"]
    setting("generation_config.json", forced_bos_token_id=language, no_repeat_ngram_size=3)(folder)
    loaded(folder)
    [message] = caplog.messages
    assert "no_repeat_ngram_size=3" in message and "forced_bos_token_id" not in message


@pytest.mark.parametrize("kind", ["marian", "bart", "t5"])
def test_a_search_starts_and_ends_and_is_forbidden_what_the_folder_says(kind, made, copy) -> None:
    """Where generation_config.json differs from config.json, as after a change to model.generation_config."""
    saved, folder = made(kind), copy(kind)
    ids = torch.tensor([saved.tokenizer(saved.texts[1])["input_ids"]])
    end = saved.model.config.eos_token_id
    said = generate(loaded(folder)[0], ids, max_new_tokens=8)[0].tolist()
    values = {"decoder_start_token_id": 7, "suppress_tokens": [said[0], end], "eos_token_id": [end]}
    for _ in range(2):
        setting("generation_config.json", **values)(folder)
        theirs = type(saved.model).from_pretrained(folder).eval().generate(ids, max_new_tokens=8)
        model = loaded(folder)[0]
        found = generate(model, ids, max_new_tokens=8)
        assert found.tolist() == theirs[:, 1:].tolist() != [said]
        assert model.config.special_ids.first_eos == end  # which sources end with
        values["eos_token_id"] = [found.max().item(), end]


@pytest.mark.parametrize("name, value", [("eos_token_id", [9]), ("eos_token_id", 9), ("decoder_start_token_id", [9])])
def test_ids_of_a_search_that_the_model_cannot_have_are_named(name, value, copy, caplog) -> None:
    folder = copy("marian")
    before = loaded(folder)[0].config.special_ids
    assert not caplog.records
    setting("generation_config.json", **{name: value})(folder)
    assert loaded(folder)[0].config.special_ids == before and f"{name}={value}" in caplog.text


def test_other_commands_say_that_it_is_a_translator(made, tmp_path, capsys) -> None:
    folder = made("marian").folder
    assert main(["generate", str(folder), "two"]) == 1
    assert "Traceback" not in capsys.readouterr().err
    translator = Translator.from_pretrained(folder)
    translator.model.save_pretrained(tmp_path / "run", translator.tokenizer)
    assert main(["train", str(tmp_path / "more"), "--init_from", str(tmp_path / "run"), "--task", "numbers"]) == 1
    assert "tokenizer of both sides" in capsys.readouterr().err


def test_older_weights_are_read(made, copy) -> None:
    saved, folder = made("marian"), copy("marian")
    (folder / "model.safetensors").unlink()
    torch.save(saved.model.state_dict(), folder / "pytorch_model.bin")
    found = loaded(folder)[0].state_dict()
    for name, weight in loaded(saved.folder)[0].state_dict().items():
        assert torch.equal(found[name], weight)
    torch.save({name: value.half() for name, value in saved.model.state_dict().items()}, folder / "pytorch_model.bin")
    half = loaded(folder)[0].state_dict()
    for name, weight in found.items():
        assert half[name].dtype == torch.float32 and torch.equal(half[name], weight.half().float()), name
    assert loaded(folder, dtype=torch.bfloat16)[0].embedding.weight.dtype == torch.bfloat16
    mixed = {name: value.half() if value.dim() == 2 else value for name, value in saved.model.state_dict().items()}
    torch.save(mixed, folder / "pytorch_model.bin")
    assert {value.dtype for value in loaded(folder)[0].state_dict().values()} == {torch.float32}


def test_weights_without_a_head_are_read(made, copy) -> None:
    """Pretrained weights are saved in this way, without a prefix and without a bias."""
    folder = copy("bart")
    model = BartModel.from_pretrained(folder)
    model.save_pretrained(folder)
    found, expected = (loaded(where)[0].state_dict() for where in (folder, made("bart").folder))
    for name, weight in expected.items():
        assert name == "output_bias" or torch.equal(found[name], weight), name
    state = {f"model.{name}": weight for name, weight in model.state_dict().items()}
    (folder / "model.safetensors").unlink()
    torch.save(state | {"model.encoder.version": torch.tensor([3.0])}, folder / "pytorch_model.bin")
    for name, weight in loaded(folder)[0].state_dict().items():
        assert torch.equal(found[name], weight), name


@pytest.mark.parametrize("form", ["safetensors", "bin"])
@plain
def test_weights_in_several_files(kind, form, copy) -> None:
    folder = copy(kind)
    expected = loaded(folder)[0].state_dict()
    index = shard(folder, form)
    found = loaded(folder)[0].state_dict()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    for path in (sorted(folder.glob("*-00002-of-*"))[0], index):
        whole = path.read_bytes()
        for data in (whole[: len(whole) * 2 // 3], b"", None):
            path.unlink()
            if data is not None:
                path.write_bytes(data)
            with pytest.raises(ValueError, match=path.name if path != index or data is not None else "model"):
                loaded(folder)
        path.write_bytes(whole)
    extra = folder / f"{index.name.partition('.')[0]}-00009-of-00009.{form}"
    extra.write_bytes(whole)
    with pytest.raises(ValueError, match=extra.name):
        loaded(folder)


@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_weights_in_several_files_are_quantised(form, copy, tmp_path, capsys) -> None:
    folder = copy("bart")
    shard(folder, form)
    assert main(["quantize", str(folder), str(tmp_path / "small")]) == 0
    assert ("instead of" in capsys.readouterr().out) == (form == "safetensors")
    assert loaded(tmp_path / "small")[0].precision == "int8"


def unsafe(folder: Path, change: Callable[[dict], object]) -> str:
    """Writes the weights to an old kind of file, with a change."""
    state = safetensors.torch.load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(change(state), folder / "pytorch_model.bin")
    return "pytorch_model.bin"


def deflated(folder: Path) -> str:
    name = unsafe(folder, lambda state: state)
    with zipfile.ZipFile(folder / name) as archive:
        entries = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile(folder / name, "w", zipfile.ZIP_DEFLATED) as archive:
        for entry, data in entries.items():
            archive.writestr(entry, data)
    return name


def setting(file: str, **values: object) -> Callable[[Path], str]:
    def put(folder: Path) -> str:
        path = folder / file
        path.write_text(json.dumps(json.loads(path.read_text()) | values))
        return next(iter(values))

    return put


NORM = "model.encoder.layernorm_embedding.weight"


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: unsafe(folder, lambda state: state | {NORM: state[NORM].to_sparse()}),
        lambda folder: unsafe(folder, lambda state: state | {NORM: 3}),
        lambda folder: unsafe(folder, lambda state: state | {3: state[NORM]}),
        lambda folder: unsafe(folder, lambda state: state | {NORM: state[NORM] / 0}),
        lambda folder: unsafe(folder, lambda state: state | {NORM: torch.zeros(1).expand(10**12)}),
        lambda folder: unsafe(folder, lambda state: [*state.values()]),
        deflated,
        setting("generation_config.json", bad_words_ids=[[10**9]]),
        setting("generation_config.json", bad_words_ids=[["a"]]),
        setting("config.json", scale_embedding="yes"),
        setting("config.json", tie_word_embeddings="no"),
        setting("config.json", encoder_layers=1_000_000),
        setting("config.json", max_position_embeddings=10**9),
        setting("config.json", pad_token_id="x"),
        setting("generation_config.json", decoder_start_token_id=10**9),
        setting("config.json", encoder_ffn_dim=10**11, decoder_ffn_dim=10**11),
    ],
)
def test_invalid_models_are_named(damage, copy, capsys) -> None:
    folder = copy("bart")
    said = damage(folder)
    assert main(["translate", str(folder), "two birds"]) == 1
    error = capsys.readouterr().err
    shown = {"max_position_embeddings": "source_position.table"}
    shown |= {"decoder_start_token_id": "start"}
    assert shown.get(said, said) in error and "a bug" not in error and "out of memory" not in error
