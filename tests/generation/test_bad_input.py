"""Mistakes of users give an error or the obvious result, the same from the C++ engine and the modules."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from fastformer.data import ByteTokenizer
from fastformer.generation import Translator, generate
from tests.generation.small import CPP, HAS_CPP, VOCAB, tiny


def outcome(model: Any, ids: Any, **options: Any) -> Any:
    """Returns the sequences, or the error."""
    try:
        return generate(model, ids, **options).tolist()
    except ValueError as error:
        return f"ValueError: {error}"


CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "only padding": ("model", [[0, 0, 0]], {}),
    "only padding beside others": ("model", [[5, 6, 7], [0, 0, 0]], {"num_beams": 3}),
    "an empty prompt": ("gpt", [[]], {}),
    "a source of max_len": ("model", [[5] * 128], {}),
    "a prompt above max_len": ("gpt", [[5] * 129], {}),
    "a prompt of max_len": ("gpt", [[5] * 128], {}),
    "a prompt that leaves room for two": ("gpt", [[5] * 126], {"max_new_tokens": 2}),
    "beginnings that leave room for two": ("model", [[5]], {"decoder_input_ids": [[6] * 125], "max_new_tokens": 3}),
    "as many beams as tokens": ("model", [[5, 6], [7]], {"num_beams": VOCAB, "num_return_sequences": VOCAB}),
    "as many beams as tokens of a prompt": ("gpt", [[5, 6]], {"num_beams": VOCAB}),
    "beams above the vocabulary": ("gpt", [[5, 6]], {"num_beams": VOCAB + 1}),
}


@pytest.mark.skipif(not HAS_CPP, reason="there is no decoding engine in C++ here")
@pytest.mark.parametrize("name", CASES)
def test_both_engines_give_the_same_answer(name, request) -> None:
    which, ids, options = CASES[name]
    model = request.getfixturevalue(which)
    options = {"max_new_tokens": 5, **options}
    found, due = (outcome(model, ids, engine=engine, **options) for engine in ("cpp", "kv_cache"))
    assert found == due
    words = ("empty", "padding beside", "above", "prompt of max_len")
    is_wrong = any(word in name for word in words)
    assert isinstance(due, str) == is_wrong, due


@pytest.mark.parametrize("engine", [CPP, "kv_cache"])
def test_a_caller_that_stops_listening_stops_the_decoding_and_may_call_again(engine) -> None:
    translator = Translator(tiny(), ByteTokenizer(), max_batch_size=4)
    options = {"max_new_tokens": 8, "engine": engine}
    texts = ["x" * (1 + i % 9) for i in range(40)]
    due = translator.translate(texts, **options)

    stream = translator.stream(iter(texts), **options)
    assert [next(stream) for _ in range(3)] == due[:3]
    assert isinstance(stream, Generator)
    stream.close()
    pieces = translator.stream("abc", **options)
    next(pieces)
    assert isinstance(pieces, Generator)
    pieces.close()
    assert translator.translate(texts, **options) == due
