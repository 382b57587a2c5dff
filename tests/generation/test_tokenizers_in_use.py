"""Tests tokenizers in translators: refused input, spaces, and user-defined tokens."""

from __future__ import annotations

import asyncio

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from fastformer.data import ByteTokenizer, load_tokenizer, train_bpe
from fastformer.generation import AsyncTranslator, Translator
from fastformer.models import Transformer

LINES = ["a man walks two dogs", "rot <2de> Auto mann"] * 20


def translator_of(tokenizer) -> Translator:
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_ff": 16, "num_heads": 2, "num_encoder_layers": 1, "num_decoder_layers": 1, "max_len": 64}
    model = Transformer.from_preset("tiny", vocab_size=tokenizer.vocab_size, **sizes)
    return Translator(model.eval(), tokenizer)


async def test_a_regular_expression_that_gives_up_is_an_error_for_its_text(tmp_path) -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2, "</s>": 3}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("(a+)+$"), "isolated")
    backend.decoder = decoders.WordPiece()
    backend.save(str(tmp_path / "tokenizer.json"))
    translator, bad = translator_of(load_tokenizer(tmp_path)), f"{'a' * 40}!"
    with pytest.raises(ValueError, match=r"text 2: .*tokenizer\.json"):
        translator.translate(["b", bad], max_new_tokens=2)
    due = translator.translate("b", max_new_tokens=2)
    assert translator.translate(["b", bad], max_new_tokens=2, on_error="skip") == [due, ""]
    async with AsyncTranslator(translator) as front:
        asked = [front.translate(text, max_new_tokens=2) for text in ("b", bad)]
        found = await asyncio.gather(*asked, return_exceptions=True)
    assert found[0] == due and isinstance(found[1], ValueError) and "tokenizer.json can't encode" in str(found[1])


def test_a_prefix_that_ends_with_a_space_gets_no_second_space() -> None:
    for spaces in ("keep", "collapse"):
        translator = translator_of(train_bpe(LINES, 60, spaces=spaces))
        for options in ({}, {"num_beams": 2}):
            due = translator.translate("a man", target_prefix="rot", max_new_tokens=5, **options)
            for prefix in ("rot ", "rot  "):
                assert translator.translate("a man", target_prefix=prefix, max_new_tokens=5, **options) == due
        assert "".join(translator.stream("a man", target_prefix="rot ", max_new_tokens=5)) == translator.translate(
            "a man", target_prefix="rot", max_new_tokens=5
        )
        assert translator.encode_prefix("rot ") == translator.tokenizer.encode("rot")
    assert translator_of(ByteTokenizer()).encode_prefix("rot ") == ByteTokenizer().encode("rot ")  # where it is a token


def test_spaces_around_a_text_change_nothing() -> None:
    translator = translator_of(train_bpe(LINES, 60, spaces="collapse"))
    due = translator.translate("a man walks", max_new_tokens=6)
    for text in (" a man walks", "a man walks \n", "a  man\twalks"):
        assert translator.translate(text, max_new_tokens=6) == due


@pytest.mark.parametrize("drop", [False, True])
def test_user_tokens_in_sources_and_prefixes(drop) -> None:
    for tokenizer in (
        train_bpe(LINES, 60, spaces="collapse", user_tokens=["<2de>"], drop_user_tokens=drop),
        ByteTokenizer(["<2de>"], drop_user_tokens=drop),
    ):
        translator = translator_of(tokenizer)
        tag = tokenizer.encode("<2de>")
        assert len(tag) == 1 and translator.encode("<2de> a man")[:1] == tag
        found = translator.translate("<2de> a man", target_prefix="<2de>", max_new_tokens=3)
        assert found.startswith("<2de>") != drop and ("<2de>" in found) != drop
        pieces = "".join(translator.stream("<2de> a man", target_prefix="<2de>", max_new_tokens=3))
        assert pieces == found
