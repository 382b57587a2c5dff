"""Reads folders of decoder-only models that transformers saved; errors name what is wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from fastformer.checkpoints import generation_settings, load_model
from fastformer.cli import main
from fastformer.data import load_tokenizer
from tests.checkpoints.decoders import FOLDERS, TEXTS, sentencepiece_of


def loaded(folder: Path, **options: Any) -> Any:
    return load_model(folder, ("GPT",), **options)


def ids_of(folder: Path, kind: str, text: str) -> list[int]:
    """Returns the ids of transformers, or of SentencePiece, for a prompt."""
    if kind == "pieces":
        return [1, *sentencepiece_of((folder / "tokenizer.model").read_bytes()).encode(text)]
    return list(transformers.AutoTokenizer.from_pretrained(folder)(text)["input_ids"])


@pytest.mark.parametrize("kind", FOLDERS)
def test_outputs_equal_transformers(kind, made, capsys) -> None:
    folder = made(kind)
    model, tokenizer = loaded(folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    expected = []
    for text in TEXTS:
        ids = ids_of(folder, kind, text)
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(tokenizer.encode(text)).lstrip() == text.lstrip()
        with torch.inference_mode():
            said = theirs.generate(torch.tensor([ids]), max_new_tokens=12, max_length=None, do_sample=False)[0].tolist()
        expected.append(said)
        found = model.generate([ids], max_new_tokens=12)[0].tolist()
        assert found == said
    assert len({tuple(row[-12:]) for row in expected}) > 2
    assert tokenizer.encode_batch(TEXTS) == [*map(tokenizer.encode, TEXTS)]
    assert main(["generate", str(folder), TEXTS[0], "--greedy", "--max_new_tokens", "12", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith(TEXTS[0])


@pytest.mark.parametrize("kind", ["llama3", "pieces"])
def test_a_folder_converts_to_fastformers_format(kind, made, tmp_path) -> None:
    model, tokenizer = loaded(made(kind))
    model.save_pretrained(tmp_path, tokenizer)
    again, other = loaded(tmp_path)
    assert again.config == model.config and other.chat == tokenizer.chat
    template = "<|im_start|>two birds<|im_end|> the <note>dog"
    for text in (*TEXTS, template):
        assert other.encode(text) == tokenizer.encode(text)
        assert other.encode_template(text) == tokenizer.encode_template(text)
    assert other.decode(other.encode_template("two <note> birds")) == tokenizer.decode(
        tokenizer.encode_template("two <note> birds")
    )
    assert torch.equal(again.generate([[5, 6]], max_new_tokens=4), model.generate([[5, 6]], max_new_tokens=4))


def test_special_tokens_are_known_in_what_a_template_writes(made) -> None:
    folder = made("llama3")
    tokenizer, theirs = loaded(folder)[1], transformers.AutoTokenizer.from_pretrained(folder)
    chat = theirs.apply_chat_template([{"role": "user", "content": "two birds"}], tokenize=False)
    assert tokenizer.encode_template(chat) == theirs(chat, add_special_tokens=False)["input_ids"]
    assert {0, 2, 3} <= {*tokenizer.encode_template(chat)}
    assert not {1, 2, 3} & {*tokenizer.encode(chat)}  # in a prompt they are text
    assert tokenizer.chat["chat_template"] == theirs.chat_template
    assert (tokenizer.chat["bos_token"], tokenizer.chat["eos_token"]) == ("<|begin|>", "<|im_end|>")
    pieces = loaded(made("pieces"))[1]
    last = pieces.vocab_size - 2
    assert pieces.encode_template("<s>two<|im_end|>")[0] == 1 and pieces.encode_template("two<|im_end|>")[-1] == last
    assert last not in pieces.encode("two<|im_end|>") and last + 1 in pieces.encode("two<note>")
    assert pieces.decode(pieces.encode_template("two<note><|im_end|>")) == "two<note>"
    assert pieces.tokens([last, last + 1, 1]) == ["<|im_end|>", "<note>", "<s>"]


def test_the_search_settings_of_the_folder_are_reported(made) -> None:
    folder = made("llama3")
    settings = generation_settings(folder)
    assert (settings["do_sample"], settings["temperature"], settings["max_length"]) == (True, 0.6, 40)
    ids = loaded(folder)[0].config.special_ids
    assert ids.eos == (3, 1) and ids.pad == 3
    assert generation_settings(folder.parent) == {}


def test_transformers_is_not_needed(made, monkeypatch) -> None:
    expected = loaded(made("llama3"))[0].generate([[5, 6]], max_new_tokens=4)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert torch.equal(loaded(made("llama3"))[0].generate([[5, 6]], max_new_tokens=4), expected)


@pytest.mark.parametrize("dtype, becomes", [(torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16)])
def test_the_dtype_of_the_folder_is_kept_except_fp16_on_a_cpu(dtype, becomes, copy) -> None:
    folder = copy("gpt2")
    for file in folder.glob("*.safetensors"):
        state = {name: tensor.to(dtype) for name, tensor in safetensors.torch.load_file(file).items()}
        safetensors.torch.save_file(state, file, {"format": "pt"})
    assert {p.dtype for p in loaded(folder)[0].parameters()} == {becomes}


def test_a_shard_that_is_missing_cut_or_too_many_is_named(copy) -> None:
    folder = copy("gpt2")
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 2
    whole = shards[1].read_bytes()
    shards[1].write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=rf"{shards[1].name}.*damaged or truncated"):
        loaded(folder)
    shards[1].unlink()
    with pytest.raises(ValueError, match=shards[1].name):
        loaded(folder)
    shards[1].write_bytes(whole)
    extra = folder / "model-00009-of-00009.safetensors"
    extra.write_bytes(whole)
    with pytest.raises(ValueError, match=extra.name):
        loaded(folder)
    extra.unlink()
    loaded(folder)


def test_the_error_about_a_missing_tokenizer_lists_the_possible_files(copy) -> None:
    folder = copy("llama3")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"tokenizer\.json.*tokenizer\.model.*vocab\.json"):
        loaded(folder)


@pytest.mark.parametrize(
    "kind, name, change, named",
    [
        ("llama3", "config.json", {"hidden_act": "relu2"}, "hidden_act .*'relu2'"),
        ("llama3", "config.json", {"rope_parameters": {"rope_type": "spiral"}}, "rope_type .*'spiral'"),
        ("llama3", "config.json", {"quantization_config": {"quant_method": "hqq"}}, "quantization_config.*'hqq'"),
        ("llama3", "config.json", {"num_hidden_layers": 1}, r"model\.layers\.1"),
        ("llama3", "config.json", {"eos_token_id": "x"}, "eos_token_id .*'x'"),
        ("llama3", "config.json", {"model_type": "mixtral"}, "Mixtral .*feed-forward"),
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
    if "eos_token_id" in change:
        (folder / "generation_config.json").unlink()
    with pytest.raises(ValueError, match=named):
        loaded(folder)


@pytest.mark.parametrize(
    "kind, change",
    [
        ("llama3", {"backend": {}}),
        ("llama3", {"vocab_size": 3}),
        ("llama3", {"chat": None}),
        ("pieces", {"model": "x"}),
        ("pieces", {"added": {"a": [10**6, True]}}),
    ],
)
def test_a_damaged_tokenizer_is_named(kind, change, made, tmp_path) -> None:
    loaded(made(kind))[1].save(tmp_path)
    file = tmp_path / "tokenizer.json"
    assert load_tokenizer(tmp_path).encode("two birds")
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
