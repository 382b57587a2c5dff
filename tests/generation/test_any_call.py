"""Any call of `generate` and `Translator`, a mistake too, gives a result or an error, the same from both engines."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastformer.data import ByteTokenizer
from fastformer.generation import Translator, generate
from fastformer.generation.config import OPTIONS
from fastformer.generation.translator import Scored
from fastformer.models import Transformer
from tests.generation.small import CPP, HAS_CPP, VOCAB, needs_cpp, tiny
from tests.generation.weights import drawn

FEW = settings(
    max_examples=100, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
MANY = settings(FEW, max_examples=3000, derandomize=False)
ENGINES = ("cpp", "kv_cache")

tokens = st.integers(2, VOCAB - 1)
ragged = st.lists(st.lists(tokens, min_size=1, max_size=7), min_size=1, max_size=4)


@st.composite
def padded(draw: Callable[..., Any]) -> torch.Tensor:
    """Returns ids (rows, width), padded on either side, for each row separately."""
    rows, width = draw(ragged), 7
    side = draw(st.sampled_from(["right", "left"]))
    return torch.tensor([
        [*row, *[0] * (width - len(row))] if side == "right" else [*[0] * (width - len(row)), *row] for row in rows
    ])  # fmt: skip


inputs = st.one_of(ragged, padded(), ragged.map(lambda rows: rows[0]))
# What is in range alone; what contradicts another option is an error that both engines give.
options = st.fixed_dictionaries(
    {"max_new_tokens": st.integers(1, 9)},
    optional={
        "min_new_tokens": st.integers(0, 4),
        "num_beams": st.integers(1, 5),
        "beam_rules": st.sampled_from(["tensor2tensor", "transformers"]),
        "length_penalty": st.sampled_from([0.0, 0.6, 1.0, 2.5, -1.0]),
        "early_stopping": st.sampled_from([True, False, "never"]),
        "num_beam_groups": st.integers(1, 2),
        "diversity_penalty": st.sampled_from([0.0, 0.7]),
        "temperature": st.sampled_from([0.3, 1.0, 2.0]),
        "num_return_sequences": st.integers(1, 3),
        "repetition_penalty": st.sampled_from([0.5, 1.0, 1.7]),
        "no_repeat_ngram_size": st.integers(0, 3),
        "suppress_tokens": st.lists(tokens, max_size=5),
        "bad_words_ids": st.lists(st.lists(tokens, min_size=1, max_size=3), max_size=3),
        "shortlist": st.lists(tokens, min_size=6, max_size=20),
        "forced_bos_token_id": tokens,
        "forced_eos_token_id": st.integers(1, VOCAB - 1),
        "eos_token_id": st.integers(1, VOCAB - 1) | st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=3),
        "max_time": st.just(1000.0),
        "max_length": st.integers(8, 20),
        "min_length": st.integers(0, 12),
        "renormalize_logits": st.booleans(),
    },
)  # fmt: skip
sampled = st.fixed_dictionaries({
    "do_sample": st.just(True), "seed": st.integers(0, 2**63 - 1), "top_k": st.integers(0, VOCAB),
    "top_p": st.sampled_from([0.1, 0.8, 1.0]),
})  # fmt: skip
odd = st.one_of(
    st.integers(-3, 3), st.sampled_from([2**31, -(2**31), 2**63 - 1, 2**63, 10**400, math.nan, math.inf, -0.5, 1.5]),
    st.none(), st.booleans(), st.text(max_size=2), st.binary(max_size=2), st.lists(st.integers(-2, 50), max_size=2),
    st.lists(st.lists(st.integers(-2, 50), max_size=2), max_size=2), st.dictionaries(tokens, tokens, max_size=1),
    st.sampled_from([torch.tensor(2), torch.tensor(2.5), torch.tensor([1, 2]), torch.zeros(0), object()]),
)  # fmt: skip
NAMES = {*OPTIONS, "generation_config"} - {"engine"}
wrong = st.dictionaries(st.sampled_from(sorted(NAMES)), odd, min_size=1, max_size=2)


@pytest.fixture(scope="module")
def named(model: Any, gpt: Any) -> Callable[[str], Any]:
    """Returns the models by name, so that a failing example prints no weights."""
    return lambda which: model if which == "model" else gpt


def outcome(call: Callable[..., Any], *args: Any, **given_: Any) -> tuple[str, Any]:
    """Returns ("answer", ...) or ("error", the message). Exceptions other than ValueError are failures."""
    try:
        return "answer", call(*args, **given_)
    except ValueError as error:
        return "error", str(error)


def assert_alike(one: tuple[str, Any], other: tuple[str, Any]) -> None:
    assert one[0] == other[0], (one, other)
    if one[0] == "error":
        words, others = (text.replace("'kv_cache'", "'cpp'") for _, text in (one, other))  # an engine's name
        assert words == others, (words, others)
        return
    (a, b) = one[1], other[1]
    assert torch.equal(a.sequences, b.sequences)
    torch.testing.assert_close(a.scores, b.scores, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(a.token_log_probs, b.token_log_probs, rtol=1e-4, atol=1e-4)


def both(model: Any, ids: Any, given_: dict[str, Any]) -> None:
    def of(engine: str) -> tuple[str, Any]:
        torch.manual_seed(0)  # which gives the seed where draws are asked for without one
        return outcome(generate, model, ids, engine=engine, return_dict_in_generate=True, **given_)

    assert_alike(*map(of, ENGINES))


def answers_alike(named: Any, which: str, ids: Any, drawn_: dict[str, Any], more: dict[str, Any]) -> None:
    if more:  # draws are of no beam search
        drawn_ = {name: value for name, value in drawn_.items() if "beam" not in name}
    both(named(which), ids, {**drawn_, **more})


good = given(
    which=st.sampled_from(["model", "gpt"]), ids=inputs, drawn_=options,
    more=st.one_of(st.just({}), st.just({}), sampled),
)  # fmt: skip
test_good_calls = needs_cpp(FEW(good(answers_alike)))
test_many_good_calls = pytest.mark.slow(needs_cpp(MANY(good(answers_alike))))


def answers_or_says_why_not(named: Any, which: str, ids: Any, given_: dict[str, Any]) -> None:
    given_ = {"max_new_tokens": 3, **given_}
    if isinstance(given_["max_new_tokens"], int) and given_["max_new_tokens"] > 100:
        ids = [[5, 6]]  # as long as there is room
    both(named(which), ids, given_)


bad = given(which=st.sampled_from(["model", "gpt"]), ids=st.one_of(inputs, odd), given_=wrong)
test_odd_calls = needs_cpp(FEW(bad(answers_or_says_why_not)))
test_many_odd_calls = pytest.mark.slow(needs_cpp(MANY(bad(answers_or_says_why_not))))


@pytest.fixture(scope="module")
def translator() -> Translator:
    return Translator(drawn(Transformer, vocab_size=259, max_len=32), ByteTokenizer())


def flat(answers: Any) -> list[Scored]:
    return [one for answer in answers for one in (answer if isinstance(answer, list) else [answer])]


def translates_alike(translator: Translator, lines: list[tuple[str, str | None]], drawn_: dict[str, Any]) -> None:
    texts, prefixes = map(list, zip(*lines, strict=True))
    # An empty text stops `translate`, while in a stream its translation is empty.
    on_error = "stop" if all(text.strip() for text in texts) else "skip"
    given_ = {**drawn_, "target_prefix": prefixes, "return_scores": True, "on_error": on_error}
    results = [outcome(translator.translate, texts, engine=engine, **given_) for engine in ENGINES]
    results.append(outcome(lambda: list(translator.stream(iter(texts), **given_))))
    kind, expected = results.pop()
    for other, found in results:
        assert other == kind, (found, expected)
        if kind == "error":
            assert found == expected
            continue
        assert len(found) == len(texts)
        for one, due in zip(flat(found), flat(expected), strict=True):
            assert one.text == due.text and one.score == pytest.approx(due.score, rel=1e-4, abs=1e-4)


# Of any characters there are, halves of surrogate pairs too.
words = st.text(st.characters(), max_size=4)
lines = given(
    lines=st.lists(st.tuples(words, st.none() | words), min_size=1, max_size=5), drawn_=options,
)  # fmt: skip
test_any_texts = needs_cpp(settings(FEW, max_examples=60)(lines(translates_alike)))
test_many_texts = pytest.mark.slow(needs_cpp(MANY(lines(translates_alike))))


def sequences_or_error(model: Any, ids: Any, **options: Any) -> Any:
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
    found, due = (sequences_or_error(model, ids, engine=engine, **options) for engine in ("cpp", "kv_cache"))
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
