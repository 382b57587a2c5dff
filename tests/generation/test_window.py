"""With window="slide", a language model continues after its last position, from the last half of its context."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastformer.baseline import LSTMSeq2Seq
from fastformer.data import ByteTokenizer
from fastformer.generation import Translator, generate
from fastformer.generation.config import GenerationConfig
from fastformer.generation.request_builder import RequestBuilder
from fastformer.generation.scheduler import new_scheduler, run
from fastformer.models import GPT, Transformer
from tests.generation.small import needs_cpp, tiny

WINDOW = 12
ENGINES = [pytest.param("cpp", marks=needs_cpp), "kv_cache", "recompute"]
SLIDE = {"window": "slide", "max_new_tokens": 24}
PROMPTS = [[5], list(range(2, 13)), list(range(3, 30)), [7, 8, 9, 3, 4]]


def make(positions: str) -> GPT:
    model = tiny(GPT, vocab_size=40, positions=positions, max_len=WINDOW, tie_embeddings=False)
    model.output.weight.data *= 20  # a fresh model is nearly uniform
    return model


@pytest.fixture(scope="module")
def model() -> GPT:
    return make("learned")


def slid(model: GPT, prompt: list[int], count: int, **options) -> list[int]:
    """Implements the definition of a sliding window token by token."""
    text, view = list(prompt), list(prompt)
    for _ in range(count):
        if len(view) >= WINDOW:
            view = text[-(WINDOW // 2) :]
        token = int(generate(model, [view], max_new_tokens=1, **options)[0, -1])
        text.append(token)
        view.append(token)
        if token == 1:
            break
    return text[len(prompt) :]


def options_of(engine: str) -> dict[str, object]:
    return {"use_cache": False} if engine == "recompute" else {"engine": engine}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_a_sliding_window_continues_as_on_the_end_of_the_text(positions, engine) -> None:
    model, options = make(positions), options_of(engine)
    for prompt in PROMPTS:
        out = generate(model, [prompt], suppress_tokens=[1], **SLIDE, **options)[0].tolist()
        assert out[: len(prompt)] == prompt and len(out) == len(prompt) + 24
        assert out[len(prompt) :] == slid(model, prompt, 24, suppress_tokens=[1])


@pytest.mark.parametrize("engine", [ENGINES[0]])
def test_neighbours_do_not_change_results(model, engine) -> None:
    for way in ({}, {"do_sample": True, "seed": 3}, {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2}):
        options: dict[str, Any] = {**way, **SLIDE, **options_of(engine), "return_dict_in_generate": True}
        together = generate(model, PROMPTS, **options)
        width = max(map(len, PROMPTS))
        for place, prompt in enumerate(PROMPTS):
            if "seed" in options and place:
                continue  # what it draws depends on its place
            alone = generate(model, [prompt], **options)
            new = alone.sequences[0, len(prompt) :].tolist()
            assert together.sequences[place, width : width + len(new)].tolist() == new
            torch.testing.assert_close(together.scores[place], alone.scores[0], rtol=1e-4, atol=1e-4)


def test_a_sliding_window_changes_nothing_if_there_is_room(model) -> None:
    prompt = [[7, 8, 9]]
    for options in ({}, {"do_sample": True, "seed": 3, "num_return_sequences": 3}):
        usual = generate(model, prompt, max_new_tokens=9, **options)
        assert torch.equal(generate(model, prompt, max_new_tokens=9, window="slide", **options), usual)
        longer = generate(model, prompt, **SLIDE, **options)
        assert torch.equal(longer[:, : usual.shape[1]], usual) and longer.shape[0] == usual.shape[0]
        assert longer.shape[1] > 2 * WINDOW


def test_options_look_at_the_whole_text(model) -> None:
    out = generate(model, PROMPTS[2:3], window="slide", max_new_tokens=60, no_repeat_ngram_size=2, suppress_tokens=[1])
    new = out[0, len(PROMPTS[2]) :].tolist()
    pairs = list(zip(new, new[1:], strict=False))
    assert len(new) == 60 and len(set(pairs)) == len(pairs)
    told: list[torch.Tensor] = []
    streamer = type("S", (), {"put": lambda self, value: told.append(value.flatten()), "end": lambda self: None})()
    out = generate(model, PROMPTS[2:3], streamer=streamer, forced_eos_token_id=1, suppress_tokens=[1], **SLIDE)
    assert torch.equal(torch.cat(told), out[0]) and out[0, -1] == 1


def test_little_memory_delays_it_and_changes_nothing(model) -> None:
    settings = GenerationConfig(**SLIDE, suppress_tokens=[1], engine="kv_cache")
    builder = RequestBuilder(model, settings)
    requests = [builder.build(builder.check(prompt)) for prompt in PROMPTS]
    with torch.inference_mode():
        run(new_scheduler(builder.engine, 3, 30 * builder.engine.token_bytes), requests)
    for prompt, request in zip(PROMPTS, requests, strict=True):
        expected = generate(model, [prompt], suppress_tokens=[1], engine="kv_cache", **SLIDE)[0, len(prompt) :]
        assert request.results[0].tokens == expected.tolist()


def test_the_error_at_the_last_position_names_the_option(model) -> None:
    for prompt, more in (([[5] * WINDOW], {}), ([[5]], {"max_new_tokens": WINDOW}), ([[5]], {"min_new_tokens": 99})):
        with pytest.raises(ValueError, match="max_len.*window='slide'"):
            generate(model, prompt, **more)
    assert generate(model, [[5]], suppress_tokens=[1]).shape[1] == WINDOW


@pytest.mark.parametrize("kind", [Transformer, LSTMSeq2Seq])
def test_a_model_that_reads_sources_does_not_slide(kind) -> None:
    with pytest.raises(ValueError, match=r"\bwindow\b"):
        Translator(tiny(kind), ByteTokenizer()).translate("a", **SLIDE)
