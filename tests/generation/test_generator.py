"""Calls of a Generator get the results of separate calls, and compute common beginnings once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

from fastformer.generation import Ensemble, Generator, generate
from fastformer.generation.engines import Prompt, choose_engine
from fastformer.generation.native_search import NativeSearch
from fastformer.generation.requests import Request
from fastformer.generation.scheduler import Scheduler, new_scheduler, run
from fastformer.models import GPT, Transformer
from tests.generation.small import CPP, EOS, needs_cpp
from tests.generation.weights import drawn

MEGABYTE = 2**20
SIZES: dict[str, Any] = {"vocab_size": 40, "d_model": 16, "num_heads": 2, "d_ff": 20, "max_len": 400}
LONG: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6}


@pytest.fixture
def chatty() -> Any:
    return drawn(GPT, positions="rotary", norm="rms", **SIZES)


def ids(dice: random.Random, count: int) -> list[int]:
    return [dice.randrange(3, 40) for _ in range(count)]


def same(one: Any, other: Any) -> bool:
    return torch.equal(one.sequences, other.sequences) and torch.equal(one.token_log_probs, other.token_log_probs)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True, "seed": 5, "num_return_sequences": 2}])
@needs_cpp
def test_each_turn_of_a_chat_reads_only_new_tokens(chatty, options, precision) -> None:
    dice, generator = random.Random(0), Generator(chatty, precision=precision, max_bytes=MEGABYTE)
    text, before, read = ids(dice, 200), 0, 0
    for _ in range(5):
        text += ids(dice, 11)
        asked = {**LONG, **options, "return_dict_in_generate": True}
        found = generator.generate(text, **asked)
        assert same(found, generate(chatty, text, precision=precision, **asked))
        stats = generator.stats()
        # All of the last prompt but its last token and what fills no block.
        assert stats.read_tokens - read == len(text) - before // 16 * 16
        read, before = stats.read_tokens, len(text) - 1
        text = found.sequences[0].tolist()
    assert stats.cached_tokens > 4 * 190 and stats.running == stats.waiting == 0


@pytest.mark.parametrize("engine", ["kv_cache", "graph"])
def test_a_model_may_change_its_dtype_and_its_layers(chatty, engine: str) -> None:
    """The memory of the last call has the old form."""
    generator, prompt = Generator(chatty, engine=engine), ids(random.Random(2), 20)
    layers = chatty.decoder.layers
    changes = (chatty.bfloat16, chatty.double, lambda: layers.pop(len(layers) - 1), chatty.float)
    for change in (lambda: None, *changes):
        change()
        found = generator.generate(prompt, **LONG)
        assert torch.equal(found, generate(chatty, prompt, engine="recompute", **LONG))


def test_the_models_of_an_ensemble_may_change_their_dtype(chatty) -> None:
    both = Ensemble([chatty, drawn(GPT, positions="rotary", norm="rms", **SIZES)])
    generator, prompt = Generator(both, engine="kv_cache"), ids(random.Random(2), 20)
    for change in (lambda: None, *(part for model in both.members for part in (model.bfloat16, model.double))):
        change()
        found = generator.generate(prompt, **LONG)
        assert torch.equal(found, generate(both, prompt, engine="recompute", **LONG))


def test_autocast_may_be_on_in_some_calls(chatty) -> None:
    generator, prompt = Generator(chatty, engine="kv_cache"), ids(random.Random(2), 20)
    for is_on in (False, True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_on):
            found = generator.generate(prompt, **LONG)
            assert torch.equal(found, generate(chatty, prompt, engine="recompute", **LONG))


@needs_cpp
def test_changed_weights_are_read_again(chatty) -> None:
    generator, prompt = Generator(chatty, max_bytes=MEGABYTE), ids(random.Random(2), 60)
    asked = {**LONG, "return_dict_in_generate": True}
    other = drawn(GPT, 7, positions="rotary", norm="rms", **SIZES).state_dict()
    for change in (lambda: None, lambda: chatty.embedding.weight.data.mul_(0.5), lambda: chatty.load_state_dict(other)):
        change()
        before = generator.stats()
        found = generator.generate(prompt, **asked)
        assert same(found, generate(chatty, prompt, **asked))
        assert generator.stats().cached_tokens == before.cached_tokens
        generator.generate(prompt, **asked)
        assert generator.stats().cached_tokens == before.cached_tokens + 48


@needs_cpp
def test_an_abandoned_stream_keeps_its_prompt_and_a_failure_caches_nothing(chatty) -> None:
    generator, prompt = Generator(chatty, max_bytes=MEGABYTE), ids(random.Random(3), 60)
    whole = generate(chatty, prompt, max_new_tokens=40, min_new_tokens=40)[0, 60:].tolist()
    assert list(generator.stream(prompt, max_new_tokens=40, min_new_tokens=40)) == whole
    stream = generator.stream([*prompt, 5], max_new_tokens=40, min_new_tokens=40)
    first = next(stream)
    with pytest.raises(RuntimeError, match=r"\bstream\b"):
        generator.generate(prompt, **LONG)
    stream.close()
    assert first == int(generate(chatty, [*prompt, 5], max_new_tokens=1)[0, -1])
    stats = generator.stats()
    assert (stats.cached_tokens, stats.running, stats.waiting) == (48, 0, 0)

    def fail(input_ids: Any, scores: Any) -> Any:
        raise KeyError("mine")

    for stop in (KeyError, KeyboardInterrupt):
        with pytest.raises(stop):
            if stop is KeyError:
                generator.generate(prompt, **LONG, logits_processor=[fail])
            else:
                for _ in generator.stream(prompt, **LONG):
                    raise KeyboardInterrupt
        found = generator.generate(prompt, **LONG)
        assert found.tolist() == generate(chatty, prompt, **LONG).tolist()
    assert generator.stats().cached_tokens == 5 * 48
    generator.clear()
    generator.generate(prompt, **LONG)
    assert generator.stats().cached_tokens == 5 * 48

    def interrupt(input_ids: Any, scores: Any) -> Any:
        raise KeyboardInterrupt  # in the middle of a step

    with pytest.raises(KeyboardInterrupt):
        next(generator.stream(prompt, **LONG, logits_processor=[interrupt]))
    assert generator.stats().running == 0
    assert generator.generate(prompt, **LONG).tolist() == generate(chatty, prompt, **LONG).tolist()


@pytest.mark.parametrize("engine", [CPP, "kv_cache"])
def test_threads_share_a_generator(chatty, engine) -> None:
    generator, dice = Generator(chatty, engine=engine, max_bytes=MEGABYTE), random.Random(4)
    stem = ids(dice, 40)
    prompts = [stem + ids(dice, i) for i in range(6)]
    expected = [generate(chatty, p, engine=engine, **LONG)[0].tolist() for p in prompts]

    def ask(worker: int) -> list[list[int]]:
        found = []
        for prompt in prompts if worker % 2 else prompts[::-1]:
            said = (
                generator.stream(prompt, **LONG) if worker > 1 else generator.generate(prompt, **LONG)[0, len(prompt) :]
            )
            found.append([*prompt, *map(int, said)])
        return found

    with ThreadPoolExecutor(4) as threads:
        assert [*threads.map(ask, range(4))] == [expected[::-1], expected] * 2


def test_models_that_read_a_source_decode_as_in_generate() -> None:
    sizes = {**SIZES, "max_len": 60}
    model = drawn(Transformer, **sizes)
    generator, sources = Generator(model, max_bytes=MEGABYTE), [[5, 6, 7, EOS], [8, EOS]]
    assert not choose_engine(model).reuses_prefixes()
    for begin in (None, [[4, 5], [6]]):
        for _ in range(2):
            found = generator.generate(sources, decoder_input_ids=begin, **LONG)
            assert torch.equal(found, generate(model, sources, decoder_input_ids=begin, **LONG))
    assert generator.stats().cached_tokens == 0


def test_calls_that_make_no_sense_are_errors(chatty) -> None:
    options: dict[str, Any]
    for options in ({"precision": "fp8"}, {"engine": "fast"}, {"max_bytes": 0}, {"max_rows": -1}):
        with pytest.raises(ValueError, match=rf"\b{next(iter(options))}\b"):
            Generator(chatty, **options)
    generator = Generator(chatty, max_bytes=MEGABYTE)
    for options in ({"precision": "bf16"}, {"engine": "recompute"}, {"use_cache": False}):
        with pytest.raises(ValueError, match=r"\bGenerator\b"):
            generator.generate([5, 6], **options)
        with pytest.raises(ValueError, match=r"\bGenerator\b"):
            generator.stream([5, 6], **options)
    for prompt, more in (
        ([[5], [6]], {}),
        ([5], {"num_beams": 2}),
        ([5], {"do_sample": True, "num_return_sequences": 2}),
    ):
        with pytest.raises(ValueError, match="stream"):
            generator.stream(prompt, **more)
    for prompt in ([], [99], [5] * 400):
        with pytest.raises(ValueError):
            generator.stream(prompt)
        with pytest.raises(ValueError):
            generator.generate(prompt)


def requests_of(prompts: Sequence[Sequence[int]], limit: int, beams: int = 1) -> list[Request]:
    search = partial(NativeSearch.greedy, limit, frozenset([EOS]))
    if beams > 1:
        search = partial(NativeSearch.beams, limit, frozenset([EOS]), beams)
    return [Request(Prompt(None, list(prompt)), search) for prompt in prompts]


@needs_cpp
def test_memory_that_is_shared_is_counted_once(chatty) -> None:
    engine, dice = choose_engine(chatty), random.Random(5)
    stem = ids(dice, 160)
    prompts = [stem + ids(dice, 5) for _ in range(6)]
    # Room for the stem once, and for what six have of their own; apart, each would take 13 blocks.
    blocks = 10 + 6 * 4
    scheduler = Scheduler(engine, max_rows=8, max_bytes=blocks * 16 * engine.token_bytes, is_endless=True)
    requests, running = requests_of(prompts, 8), set()
    requests[0].on_token = lambda token: running.add(scheduler.load().running)
    run(scheduler, requests)
    assert running == {6} and scheduler.load().cached_tokens == 5 * 160
    assert scheduler.load().read_tokens == 165 + 5 * 5
    for request, other in zip(requests, requests_of(prompts, 8), strict=True):
        run(new_scheduler(engine), [other])
        assert request.results == other.results


@needs_cpp
def test_a_prompt_beyond_the_budget_stays_until_the_budget_is_enough(chatty) -> None:
    dice, cached = random.Random(6), 0
    budget = 64 * choose_engine(chatty).token_bytes
    generator, long = Generator(chatty, max_bytes=budget), ids(dice, 100)
    for prompt, more in ((long, 0), (long, 96), ([*long, 5, 6], 96), (ids(dice, 20), 0), (long, 0)):
        found = generator.generate(prompt, **LONG)
        assert found.tolist() == generate(chatty, prompt, **LONG).tolist()
        assert generator.stats().cached_tokens - cached == more
        cached += more


# Slow: more draws of the same.
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 30))])
@needs_cpp
def test_requests_in_too_little_memory_get_the_results_of_each_alone(chatty, seed) -> None:
    dice, engine = random.Random(seed), choose_engine(chatty, None, ("fp32", "int8")[seed % 2])
    blocks = dice.choice([12, 16, 24])
    scheduler = Scheduler(engine, max_rows=8, max_bytes=blocks * 16 * engine.token_bytes, is_endless=True)
    known: list[list[int]] = [[5]]
    asked: list[tuple[list[int], int, int]] = []
    requests: list[Request] = []
    while len(asked) < 40 or not scheduler.is_idle:
        if len(asked) < 40 and (dice.random() < 0.5 or scheduler.is_idle):
            begin = dice.choice(known)
            prompt = [*begin, *(dice.choice((4, 5)) for _ in range(dice.choice([0, 1, 16, 30])))][:90]
            asked.append((prompt, dice.randint(1, 40), dice.choice([1, 1, 3])))
            known = [*known[-7:], prompt]
            requests += requests_of([prompt], *asked[-1][1:])
            scheduler.submit(requests[-1:])
        if dice.random() < 0.1:
            dice.choice(requests).cancel()
        scheduler.step()
    assert scheduler.load().cached_tokens > 0
    for request, (prompt, limit, beams) in zip(requests, asked, strict=True):
        assert request.is_done and request.error is None
        if not request.is_cancelled or request.results:
            (other,) = requests_of([prompt], limit, beams)
            run(new_scheduler(engine), [other])
            assert request.results == other.results
