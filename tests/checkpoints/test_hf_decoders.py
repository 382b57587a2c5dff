"""Reads folders of decoder-only models that transformers saved; errors name what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from fastformer.checkpoints import generation_settings, load_model
from fastformer.cli import main
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


_LISTED = {"added_tokens_decoder": {"3": {"content": "<|im_end|>", "special": True}}}
_NAMES = {"bos_token": "<|begin|>", "eos_token": "<|im_end|>"}


@pytest.mark.parametrize(
    "named, mapped",
    [
        ({}, _NAMES), ({}, {name: {"content": token, "lstrip": False} for name, token in _NAMES.items()}),
        (_NAMES, {"eos_token": "<|end|>"}), (_NAMES | _LISTED, {"eos_token": "<|end|>"}),
        (_NAMES, {"pad_token": "<|im_start|>"}),
    ],
)  # fmt: skip
def test_names_of_special_tokens_are_found_where_transformers_finds_them(named, mapped, copy) -> None:
    folder = copy("llama3")
    file = folder / "tokenizer_config.json"
    settings = {name: value for name, value in json.loads(file.read_text()).items() if not name.endswith("_token")}
    file.write_text(json.dumps(settings | named))
    (folder / "special_tokens_map.json").write_text(json.dumps(mapped))
    theirs, tokenizer = transformers.AutoTokenizer.from_pretrained(folder), loaded(folder)[1]
    for name in ("bos_token", "eos_token", "pad_token"):
        assert tokenizer.chat.get(name) == getattr(theirs, name), name
    assert tokenizer.encode("two birds") == theirs("two birds")["input_ids"]


def test_tokens_that_an_older_folder_adds_are_those_of_transformers(copy) -> None:
    folder = copy("merges")
    size = len(json.loads((folder / "vocab.json").read_text()))
    (folder / "added_tokens.json").write_text(json.dumps({"<note>": size}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    expected = transformers.AutoTokenizer.from_pretrained(folder)("two<note> birds")["input_ids"]
    assert loaded(folder)[1].encode_template("two<note> birds") == expected and size in expected
    (folder / "added_tokens.json").unlink()
    for is_special in (None, False, True):
        token = {"content": "<note>"} | ({} if is_special is None else {"special": is_special})
        settings = {"tokenizer_class": "GPT2Tokenizer", "added_tokens_decoder": {str(size): token}}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        assert loaded(folder)[1].added_tokens["<note>"] is bool(is_special)


def test_the_search_settings_of_the_folder_are_reported(made) -> None:
    folder = made("llama3")
    settings = generation_settings(folder)
    assert (settings["do_sample"], settings["temperature"], settings["max_length"]) == (True, 0.6, 40)
    ids = loaded(folder)[0].config.special_ids
    assert ids.eos == (3, 1) and ids.pad == 3
    assert generation_settings(folder.parent) == {}


@pytest.mark.parametrize("dtype, becomes", [(torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16)])
def test_the_dtype_of_the_folder_is_kept_except_fp16_on_a_cpu(dtype, becomes, copy) -> None:
    folder = copy("gpt2")
    for file in folder.glob("*.safetensors"):
        state = {name: tensor.to(dtype) for name, tensor in safetensors.torch.load_file(file).items()}
        safetensors.torch.save_file(state, file, {"format": "pt"})
    assert {p.dtype for p in loaded(folder)[0].parameters()} == {becomes}


def test_the_error_about_a_missing_tokenizer_lists_the_possible_files(copy) -> None:
    folder = copy("llama3")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"tokenizer\.json.*tokenizer\.model.*vocab\.json"):
        loaded(folder)
