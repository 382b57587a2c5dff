"""Keys and values in int8: chosen by one option, wherever a model decodes, for a part of the memory."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from fastformer.data import ByteTokenizer
from fastformer.generation import AsyncGenerator, AsyncTranslator, Ensemble, Generator, Translator, generate
from fastformer.models import GPT, Transformer
from tests.generation.small import VOCAB, needs_cpp
from tests.generation.weights import drawn

pytestmark = needs_cpp

INT8: dict[str, Any] = {"cache_dtype": "int8"}
ROWS = [[5, 6, 7] * 9, [8], [9, 10] * 20]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_beams": 4, "num_return_sequences": 3},
        {"num_beams": 3, "beam_rules": "transformers"},
        {"do_sample": True, "seed": 3},
        {"prompt_lookup_num_tokens": 5},
        {"precision": "bf16", "logits_processor": lambda ids, scores: scores},  # a search in Python
    ],
)
@pytest.mark.parametrize("which", ["model", "gpt"])
def test_a_row_has_the_same_result_alone_and_in_a_batch(which, options, request) -> None:
    model = request.getfixturevalue(which)
    options = {"max_new_tokens": 20, "return_dict_in_generate": True, **INT8, **options}
    if options.get("do_sample"):  # the draws depend on the place of a row
        rows = [ROWS[0]] * 3
        expected = generate(model, rows, **options).scores
        assert torch.equal(Generator(model, **INT8).generate(rows, **options).scores, expected)
        return
    together = generate(model, ROWS, **options)
    each = len(together.scores) // len(ROWS)
    for place, row in enumerate(ROWS):
        alone = generate(model, [row], **options)
        assert torch.equal(alone.scores, together.scores[place * each : (place + 1) * each])
    assert not torch.equal(together.scores, generate(model, ROWS, **{**options, "cache_dtype": None}).scores)


@pytest.mark.parametrize(("precision", "of_int8"), [("fp32", 4), ("bf16", 2), ("int8", 2)])
def test_as_much_memory_has_room_for_more_tokens(precision, of_int8) -> None:
    model = drawn(GPT, vocab_size=VOCAB, d_model=128, num_heads=2, max_len=40)
    room = []
    for cache_dtype in (None, "int8"):
        generator = Generator(model, precision=precision, cache_dtype=cache_dtype, max_bytes=2**20)
        generator.generate([[5, 6]], max_new_tokens=2)
        room.append(generator.stats().capacity_tokens)
    assert 0.93 * of_int8 < room[1] / room[0] <= of_int8  # a scale for each 64 numbers


def _generated(model: Any, **options: Any) -> Any:
    return Generator(model, **options).generate(ROWS, max_new_tokens=9, return_dict_in_generate=True).scores.tolist()


def _completed(model: Any, **options: Any) -> Any:
    async def complete() -> Any:
        async with AsyncGenerator(model, ByteTokenizer(), **options) as session:
            (completion,) = await session.complete("abcdef", log_probs=True, max_new_tokens=9)
            return completion.tokens

    return asyncio.run(complete())


def _translated(model: Any, **options: Any) -> Any:
    translator = Translator(model, ByteTokenizer(), **options)
    by_call = translator.translate("abc def", return_scores=True, max_new_tokens=9)

    async def translate() -> Any:
        async with AsyncTranslator(translator) as session:
            return await session.translate("abc def", return_scores=True, max_new_tokens=9)

    assert asyncio.run(translate()) == by_call
    return by_call


@pytest.mark.parametrize(
    ("kind", "answer"), [(GPT, _generated), (GPT, _completed), (Transformer, _translated)], ids=lambda one: one.__name__
)
def test_each_object_has_the_option(kind, answer) -> None:
    model = drawn(kind, vocab_size=259)
    assert answer(model) != answer(model, **INT8) == answer(model, **INT8)
    with pytest.raises(ValueError, match=r"\bcache_dtype\b"):
        answer(model, cache_dtype="int3")


def test_what_no_engine_does_is_refused(model, gpt) -> None:
    for options in ({"engine": "kv_cache"}, {"use_cache": False}, {"cache_dtype": "int4"}):
        with pytest.raises(ValueError, match=r"\b(int8|cache_dtype)\b"):
            generate(gpt, ROWS, **{**INT8, **options})
    with pytest.raises(ValueError, match=r"\bcache_dtype\b"):  # its cache has another one
        Generator(gpt).generate(ROWS, max_new_tokens=2, **INT8)
    ensemble = Ensemble([model, model])
    scores = [
        generate(ensemble, [[5, 6, 7]], max_new_tokens=4, return_dict_in_generate=True, **options).scores
        for options in ({}, INT8)
    ]
    assert not torch.equal(*scores)
