"""Decoding ends when a stop string is complete, whichever tokens spell it, and outputs don't contain it."""

from __future__ import annotations

import asyncio
import itertools

import pytest
import torch

from fastformer.data import ByteTokenizer
from fastformer.generation import AsyncTranslator, Translator, generate
from fastformer.generation.streaming import TextStreamer
from fastformer.models import GPT
from tests.generation.small import always, needs_cpp, tiny

TOKENIZER = ByteTokenizer()
ENGINES = [pytest.param("cpp", marks=needs_cpp), "kv_cache"]
LETTERS = [i for i in range(259) if i not in [ord(c) + 3 for c in "abcde \n"]]
MANY = {"max_new_tokens": 30, "min_new_tokens": 30, "suppress_tokens": LETTERS}
PROMPTS = [TOKENIZER.encode(text) for text in ("ab", "a longer one, aaa", "c")]
WAYS = [
    {},
    {"do_sample": True, "seed": 5, "temperature": 1.5},
    {"do_sample": True, "seed": 5, "temperature": 1.5, "num_return_sequences": 3},
    {"repetition_penalty": 1.2},
]


@pytest.fixture(scope="module")
def gpt() -> GPT:
    model = tiny(GPT, num_layers=1)
    model.embedding.weight.data *= 3
    return model


@pytest.fixture(scope="module")
def translator() -> Translator:
    model = tiny(d_ff=32, num_heads=2, num_encoder_layers=1, num_decoder_layers=1)
    model.embedding.weight.data *= 3
    return Translator(model, TOKENIZER)


def stops_of(text: str) -> list[str]:
    """Returns some texts that occur in it: of several tokens, of one, and of one that begins in the token before."""
    return [text[9:13], text[:6] + "a", text[20]]


@pytest.mark.parametrize(
    ("way", "engine"), [*(pytest.param(way, "cpp", marks=needs_cpp) for way in WAYS), (WAYS[2], "kv_cache")], ids=str
)
def test_each_row_ends_with_the_token_that_completes_one(gpt, way, engine) -> None:
    options = {**MANY, **way, "engine": engine}
    count = way.get("num_return_sequences", 1)
    width = max(map(len, PROMPTS))
    full = [row[width:] for row in generate(gpt, PROMPTS, **options).tolist()]
    for stop in stops_of(TOKENIZER.decode(full[-1])):
        found = generate(gpt, PROMPTS, stop_strings=[stop, "never"], tokenizer=TOKENIZER, **options)
        assert found.shape[0] == len(PROMPTS) * count
        for row, whole in zip(found.tolist(), full, strict=True):
            new = [i for i in row[width:] if i]
            needed = [n for n in range(1, 31) if stop in TOKENIZER.decode(whole[:n])]
            assert new == whole[: min(needed, default=30)]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_translation_ends_before_the_stop_string(translator, way) -> None:
    texts = ["ab", "c", "a longer one"]
    options = {**MANY, **way}
    full = translator.translate(texts, target_prefix=["", "xe", "de"], **options)
    some = list(itertools.chain(*full)) if "num_return_sequences" in way else full
    for stop in stops_of(some[-1]):
        found = translator.translate(texts, target_prefix=["", "xe", "de"], stop_strings=stop, **options)
        ends = list(itertools.chain(*found)) if "num_return_sequences" in way else found
        for end, whole, prefix in zip(ends, some, [0, 2, 2] if some is full else [0] * 3 + [2] * 6, strict=True):
            place = whole.find(stop, prefix)  # what was given isn't looked at
            assert end == (whole if place < 0 else whole[:place])
        if some is full:
            for text, begin, expected in zip(texts, ["", "xe", "de"], found, strict=True):
                if not way.get("do_sample") or text == "ab":  # what is drawn depends on the place
                    pieces = list(translator.stream(text, target_prefix=begin, stop_strings=stop, **options))
                    assert "".join(pieces) == expected
            scored = translator.translate(texts, stop_strings=stop, return_token_scores=True, **options)
            assert all(len(answer.tokens) >= len(answer.text) and stop not in answer.text for answer in scored)


BEAMS = [
    {"num_beams": 4, "num_return_sequences": 4},
    {"num_beams": 4, "num_return_sequences": 2, "num_beam_groups": 2, "diversity_penalty": 0.3},
    {"num_beams": 3, "num_return_sequences": 3, "beam_rules": "transformers"},
]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("way", BEAMS, ids=str)
def test_a_beam_that_ends_with_one_is_finished(translator, way, engine) -> None:
    # One token as the stop text, or as the end, is the same search.
    options = {"max_new_tokens": 14, "suppress_tokens": LETTERS, "engine": engine, "return_token_scores": True, **way}
    texts = ["ab", "c"]
    space = TOKENIZER.encode(" ")[0]
    expected = translator.translate(texts, eos_token_id=[1, space], **options)
    found = translator.translate(texts, stop_strings=" ", eos_token_id=[1, 258], **options)
    assert [[round(one.score, 4) for one in beams] for beams in found] == [
        [round(one.score, 4) for one in beams] for beams in expected
    ]
    assert [[one.tokens[-1][0] for one in beams] for beams in found] == [
        [one.tokens[-1][0] for one in beams] for beams in expected
    ]
    assert all(" " not in one.text for beams in found for one in beams)
    # Of several tokens: no hypothesis goes on behind it, whichever beam it forked from.
    stop = next(one.text[3:5] for one in found[0] if len(one.text) > 5)
    for beams in translator.translate(texts, stop_strings=stop, **options):
        for one in beams:
            said = "".join(token for token, _ in one.tokens)
            assert stop not in said[:-1] and stop not in one.text


async def test_many_tasks_have_stop_texts_of_their_own(translator) -> None:
    stops = [[], ["a"], ["b", "e "], [" "]]
    async with AsyncTranslator(translator) as front:
        whole = [front.translate("ab", stop_strings=stop, **MANY) for stop in stops]
        found = await asyncio.gather(*whole)
        assert found == [translator.translate("ab", stop_strings=stop, **MANY) for stop in stops]
        assert len(set(map(len, found))) > 1
        for stop, text in zip(stops, found, strict=True):
            assert "".join([piece async for piece in front.stream("ab", stop_strings=stop, **MANY)]) == text


def test_a_streamer_holds_back_text_that_may_become_a_stop_string(gpt, capsys) -> None:
    whole = TOKENIZER.decode(generate(gpt, PROMPTS[:1], **MANY)[0].tolist())
    for stop in stops_of(whole[2:]):
        streamer = TextStreamer(TOKENIZER, stop=[stop])
        generate(gpt, PROMPTS[:1], stop_strings=[stop], tokenizer=TOKENIZER, streamer=streamer, **MANY)
        place = whole.find(stop, 2)
        assert capsys.readouterr().out == whole[: place if place >= 0 else None] + "\n"


def test_stop_strings_work_with_a_sliding_window(gpt) -> None:
    options = {"window": "slide", "max_new_tokens": 150, "suppress_tokens": [1, *LETTERS], "do_sample": True, "seed": 1}
    whole = TOKENIZER.decode(generate(gpt, PROMPTS[:1], **options)[0].tolist())[2:]
    stop = whole[98:104]
    found = generate(gpt, PROMPTS[:1], stop_strings=[stop], tokenizer=TOKENIZER, **options)
    assert TOKENIZER.decode(found[0].tolist())[2:] == whole[: whole.index(stop) + len(stop)]


def test_a_recurrent_model_also_ends() -> None:
    translator = Translator(always("q"), TOKENIZER)
    assert translator.translate("a", max_new_tokens=9, stop_strings="qqqq") == ""
    assert translator.translate("a", max_new_tokens=3, stop_strings="qqqq") == "qqq"


def test_stop_texts_need_a_tokenizer(gpt) -> None:
    for tokenizer in (None, "bytes", torch):
        with pytest.raises(ValueError, match=r"\btokenizer\b.*\bstop_strings\b"):
            generate(gpt, PROMPTS, stop_strings="a", tokenizer=tokenizer)
