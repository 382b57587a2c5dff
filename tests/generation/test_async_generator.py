"""`AsyncGenerator` gives each task the result of `generate` alone, with log-probabilities and alternatives."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest
import torch

from fastformer.data import ByteTokenizer
from fastformer.generation import AsyncGenerator, GenerationConfig, generate
from fastformer.generation.async_generator import ChatIds
from fastformer.generation.jobs import QueueFull, TooLate
from fastformer.generation.processors import CountPenalties, TokenBias
from fastformer.models import GPT
from tests.generation.small import needs_cpp, next_logits, tiny

TOKENIZER = ByteTokenizer()
ENGINES = [pytest.param("cpp", marks=needs_cpp), "kv_cache"]
GREEDY: dict[str, Any] = {"max_new_tokens": 8}
DRAWN: dict[str, Any] = {"max_new_tokens": 8, "do_sample": True, "temperature": 1.3, "top_k": 40}


@pytest.fixture(scope="module")
@torch.inference_mode(False)  # whichever test comes first
def lm() -> GPT:
    model = tiny(GPT, num_layers=1, max_len=512)
    model.embedding.weight.data *= 3
    return model


@pytest.mark.parametrize("engine", ENGINES)
async def test_each_task_gets_the_result_of_generate(lm, engine) -> None:
    asks: list[tuple[str, dict[str, Any]]] = [
        ("ab", GREEDY), ("a longer one", DRAWN | {"seed": 5}), ("c", DRAWN | {"seed": 5, "num_return_sequences": 3}),
        ("ab", GREEDY | {"repetition_penalty": 1.3}), ("ab", DRAWN | {"seed": 6}),
    ]  # fmt: skip

    async with AsyncGenerator(lm, TOKENIZER, engine=engine) as front:
        found = await asyncio.gather(*(front.complete(text, log_probs=True, **options) for text, options in asks))
        told: list[Any] = []
        for text, options in asks:
            told.append([piece async for piece in front.stream(text, **options)])
    for (text, options), completions, pieces in zip(asks, found, told, strict=True):
        ids = TOKENIZER.encode(text)
        expected = generate(lm, [ids], engine=engine, return_dict_in_generate=True, **options)
        for sample, completion in enumerate(completions):
            row = expected.sequences[sample, len(ids) :].tolist()[: len(completion.tokens)]
            assert [one.token for one in completion.tokens] == row
            scores = expected.token_log_probs[sample, : len(row)].tolist()
            exact = 0.0 if engine == "cpp" else 1e-5  # others' products depend on how many rows there are
            assert [one.log_prob for one in completion.tokens] == pytest.approx(scores, abs=exact, rel=exact)
            assert completion.text == TOKENIZER.decode([*ids, *row])[len(text) :]
            own = [piece for piece in pieces if piece.sample == sample]
            assert "".join(piece.text for piece in own) == completion.text
            assert [one.token for piece in own for one in piece.tokens] == row
            reasons = [piece.finish_reason for piece in own]
            assert reasons == [None] * (len(own) - 1) + [completion.finish_reason]
            assert (completion.finish_reason == "stop") == (row[-1] == 1)


async def test_an_end_that_is_the_last_token_allowed_is_a_stop(lm) -> None:
    options = DRAWN | {"seed": 5}
    async with AsyncGenerator(lm, TOKENIZER) as front:
        (whole,) = await front.complete("ab", **options)
        *_, end = row = [one.token for one in whole.tokens]
        assert len(set(row)) == 8 == options["max_new_tokens"]
        for limit, reason in ((7, "length"), (8, "stop"), (9, "stop")):
            (found,) = await front.complete("ab", **options | {"eos_token_id": end, "max_new_tokens": limit})
            assert [one.token for one in found.tokens] == row[:limit] and found.finish_reason == reason


async def test_ids_in_any_form_are_a_prompt(lm) -> None:
    ids = TOKENIZER.encode("ab")
    async with AsyncGenerator(lm, TOKENIZER) as front:
        [due] = await front.complete("ab", **GREEDY)
        for prompt in (ids, tuple(ids), np.array(ids), torch.tensor(ids), iter(ids)):
            assert await front.complete(prompt, **GREEDY) == [due]
        for wrong in (np.array([], np.int64), torch.tensor([259]), iter([-1])):
            with pytest.raises(ValueError, match="expected"):
                await front.complete(wrong, **GREEDY)


async def test_no_end_by_name_is_the_model_s_end_whatever_the_config_says(lm) -> None:
    ids, options = TOKENIZER.encode("ab"), DRAWN | {"seed": 5}
    async with AsyncGenerator(lm, TOKENIZER) as plain:
        [due] = await plain.complete("ab", **options)
        first = due.tokens[0].token
    config = GenerationConfig(eos_token_id=first, pad_token_id=first)
    async with AsyncGenerator(lm, TOKENIZER, config=config) as front:
        for prompt in (ids, ChatIds(ids)):
            for given in (None, config):
                [ended] = await front.complete(prompt, given, **options)
                assert ended.finish_reason == "stop" and len(ended.tokens) == 1
                [found] = await front.complete(prompt, given, eos_token_id=None, pad_token_id=None, **options)
                assert [one.token for one in found.tokens] == [one.token for one in due.tokens]


@pytest.mark.parametrize(
    "engine, options",
    [
        pytest.param("cpp", GREEDY, marks=needs_cpp), pytest.param("cpp", DRAWN | {"seed": 3}, marks=needs_cpp),
        ("kv_cache", DRAWN | {"seed": 3}),
    ],
)  # fmt: skip
async def test_alternatives_are_the_likeliest_tokens(lm, engine, options) -> None:
    async with AsyncGenerator(lm, TOKENIZER, engine=engine) as front:
        (plain,), (found,), (other, *_) = await asyncio.gather(
            front.complete("ab", log_probs=True, **options),
            front.complete("ab", num_alternatives=4, **options),
            front.complete("cd", num_alternatives=100, **options),
        )
    assert len(other.tokens[0].alternatives) == 100
    tokens = [one.token for one in found.tokens]
    assert tokens == [one.token for one in plain.tokens]
    assert [one.log_prob for one in found.tokens] == pytest.approx([one.log_prob for one in plain.tokens], abs=1e-5)
    log_probs = next_logits(lm, TOKENIZER.encode("ab"), tokens[:-1]).log_softmax(-1)
    best = log_probs.topk(4)
    for one, values, ids in zip(found.tokens, best.values.tolist(), best.indices.tolist(), strict=True):
        assert [token for token, _ in one.alternatives] == ids
        assert [value for _, value in one.alternatives] == pytest.approx(values, abs=1e-4)


async def idle(front: AsyncGenerator) -> None:
    """Waits until no request has a place: the thread removes requests that tasks have left before its next step."""
    while front.stats().running or front.stats().waiting:
        await asyncio.sleep(0.01)


async def test_a_full_queue_a_deadline_and_cancelled_requests(lm) -> None:
    long = {"max_new_tokens": 400, "min_new_tokens": 400}
    async with AsyncGenerator(lm, TOKENIZER, max_rows=1, max_waiting=1, when_full="refuse") as front:
        stream = front.stream("ab", num_alternatives=1, **long)
        await anext(stream)
        waiting = asyncio.ensure_future(front.complete("ab", **long))
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await front.complete("ab", **long)
        with pytest.raises(QueueFull):
            front.stream("ab", **long)
        waiting.cancel()
        await stream.aclose()
        await idle(front)
        with pytest.raises(TooLate):
            await front.complete("ab", deadline=time.monotonic() + 0.01, num_alternatives=1, **long)
        await idle(front)
        with pytest.raises(TooLate):
            late = front.stream("ab", deadline=time.monotonic() + 0.05, num_alternatives=1, **long)
            assert [piece async for piece in late]
        await idle(front)
        [found] = await front.complete("ab", max_new_tokens=3)
        assert len(found.tokens) <= 3


@pytest.mark.parametrize(
    "prompt, options",
    [
        ("", {}), ([], {}), ("a" * 600, {}), ([259], {}), ([-1], {}), ("a", {"num_beams": 2}),
        ("a", {"precision": "int8"}), ("a", {"engine": "recompute"}), ("a", {"num_alternatives": -1}),
        ("a", {"num_return_sequences": 2}), ("a", {"max_new_tokens": 600}),
    ],
)  # fmt: skip
async def test_wrong_calls_are_errors_at_once(prompt, options, lm) -> None:
    async with AsyncGenerator(lm, TOKENIZER) as front:
        with pytest.raises(ValueError, match="expected"):
            await front.complete(prompt, **options)
        with pytest.raises(ValueError, match="expected"):
            front.stream(prompt, **options)
        with pytest.raises(ValueError, match="chat_template"):
            front.chat_ids([{"role": "user", "content": "a"}])


def test_a_sliding_window_is_for_language_models() -> None:
    with pytest.raises(ValueError, match="language model"):
        AsyncGenerator(tiny(), TOKENIZER)


@pytest.mark.parametrize("limit", ["max_rows", "max_bytes", "max_waiting", "max_waiting_tokens"])
def test_limits_that_no_request_fits_are_errors_at_once(limit, lm) -> None:
    for value in (0, -1):
        with pytest.raises(ValueError, match=rf"\b{limit}\b"):
            AsyncGenerator(lm, TOKENIZER, **{limit: value})


def test_count_penalties_and_biases() -> None:
    scores = torch.zeros(2, 6)
    history = torch.tensor([[5, 1, 1, 2], [5, 3, 3, 3]])
    found = CountPenalties(0.5, 0.25, 1)(history, scores)  # what stands in the prompt doesn't count
    assert found.tolist() == [[0, -1.0, -0.75, 0, 0, 0], [0, 0, 0, -1.25, 0, 0]]
    assert TokenBias(((1, 2.0), (4, -3.0)))(history, scores).tolist() == [[0, 2, 0, 0, -3, 0]] * 2
