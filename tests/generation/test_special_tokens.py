"""Texts lose only what their tokenizer marks as special, in each way of decoding."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers

from fastformer.checkpoints import load_model
from fastformer.generation import AsyncGenerator, Chat, generate
from tests.checkpoints.decoders import SIZES, save
from tests.checkpoints.families import ENGLISH

pytest.importorskip("jinja2", reason="the jinja2 library is not installed")
tokenizers = pytest.importorskip("tokenizers", reason="the tokenizers library is not installed")

CHAT = "{% for m in messages %}{{ m.content }}<end>{% endfor %}"


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a folder whose token 0 is "!", as in GPT-2's vocabulary, and whose only special token is "<end>"."""
    folder = tmp_path_factory.mktemp("words") / "model"
    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train_from_iterator(ENGLISH, vocab_size=300, show_progress=False)
    trained.add_special_tokens(["<end>"])
    assert trained.id_to_token(0) == "!"
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer)
    tokenizer.chat_template = CHAT
    config = transformers.LlamaConfig(**SIZES, vocab_size=len(tokenizer), num_key_value_heads=2)
    folder.mkdir()
    save(folder, transformers.LlamaForCausalLM(config), tokenizer)
    return folder


def with_ids(folder: Path, copy: Path, **ids: Any) -> Path:
    """Copies a folder, with other special ids in its config."""
    shutil.copytree(folder, copy)
    for file in ("config.json", "generation_config.json"):
        values = json.loads((copy / file).read_text())
        kept = {name: value for name, value in values.items() if name not in ("pad_token_id", "eos_token_id")}
        (copy / file).write_text(json.dumps(kept | {"bos_token_id": None, **ids}))
    return copy


async def everywhere(folder: Path, prompt: str, **options: Any) -> tuple[list[int], set[str]]:
    """Returns the tokens that continue a prompt, and the texts that all ways of decoding make of them."""
    model, tokenizer = load_model(folder, ("GPT",))
    ids = tokenizer.encode(prompt)
    row = generate(model, [ids], tokenizer=tokenizer, **options)[0, len(ids) :].tolist()
    async with AsyncGenerator(model, tokenizer) as front:
        [whole] = await front.complete(prompt, **options)
        pieces = [piece.text async for piece in front.stream(prompt, **options)]
    # A template that writes nothing but the message.
    chat = Chat(model, tokenizer)
    chat.template = type(chat.template)("{{ messages[0].content }}")
    return row, {whole.text, "".join(pieces), "".join(chat.stream(prompt, **options))}


@pytest.mark.parametrize("case", [{"pad_token_id": 0, "eos_token_id": 300}, {}, {"pad_token_id": 1}], ids=str)
async def test_a_word_that_is_pad_is_not_lost(words, tmp_path, case) -> None:
    folder = with_ids(words, tmp_path / "model", **case)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    model, tokenizer = load_model(folder, ("GPT",))
    for text in ("a! b!", '"!"', "!!"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    spoken = {*theirs('! the dog" reads.')["input_ids"], theirs.convert_tokens_to_ids("<end>")}
    unsaid = [i for i in range(model.config.vocab_size) if i not in spoken or i in model.config.special_ids.eos]
    options = {"max_new_tokens": 24, "suppress_tokens": unsaid, "do_sample": True, "seed": 4, "temperature": 3.0}
    row, texts = await everywhere(folder, "two birds!", **options)
    expected = theirs.decode(row, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert texts == {expected} and "!" in expected
    assert row.count(model.config.special_ids.pad) or not case  # a Llama's usual ids are no words


async def test_a_stop_text_may_spell_special_tokens(words, tmp_path) -> None:
    folder = with_ids(words, tmp_path / "model")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    model, tokenizer = load_model(folder, ("GPT",))
    spoken = {*theirs("! the dog reads")["input_ids"], theirs.convert_tokens_to_ids("<end>")}
    unsaid = [i for i in range(model.config.vocab_size) if i not in spoken]
    options = {"max_new_tokens": 56, "suppress_tokens": unsaid, "do_sample": True, "seed": 2, "temperature": 3.0}
    row, [plain] = await everywhere(folder, "two birds", **options)
    spelled = theirs.decode(row, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    places = [place for place in range(len(spelled)) if spelled.startswith("<end>", place)]
    assert len(places) > 2 and "<end>" not in plain
    for stop in (
        "<end>", spelled[places[1] - 2 : places[1] + 5], spelled[places[1] : places[1] + 8],
        spelled[places[0] - 1 : places[1] + 6], "never<end>", "<end>never",
    ):  # fmt: skip
        needed = [n for n in range(1, 57) if stop in theirs.decode(row[:n], clean_up_tokenization_spaces=False)]
        found, texts = await everywhere(folder, "two birds", stop_strings=["never", stop], **options)
        assert found == row[: min(needed, default=56)]
        assert texts == {spelled.partition(stop)[0].replace("<end>", "")}
