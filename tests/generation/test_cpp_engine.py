"""The C++ engine computes the model's results, for all options, batches and numbers of threads."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from fastformer.generation import generate
from fastformer.generation.engines import Batch, Prompt, Selection
from fastformer.generation.engines.cpp import CppEngine
from fastformer.models import GPT, Transformer
from tests.covering import by_turns, covering
from tests.generation.small import needs_cpp
from tests.generation.weights import CONFIGS, drawn

pytestmark = needs_cpp

PRECISIONS = ("fp32", "bf16", "int8", "int4")


@cache
def configured(name: str) -> Any:
    kind, options = CONFIGS[name]
    return drawn(kind, **options)


def ids(dice: random.Random, count: int, size: int) -> list[int]:
    return [dice.randrange(3, size) for _ in range(count)]


def prompt_of(model: Any, dice: random.Random, length: int, before: int = 0) -> Prompt:
    """Returns a source of this length and forced tokens, or, for a GPT, a prompt as long as both."""
    if isinstance(model, GPT):
        return Prompt(None, ids(dice, length + before, model.config.vocab_size))
    source_size = model.config.source_vocab_size or model.config.vocab_size
    return Prompt(ids(dice, length, source_size), [0, *ids(dice, before, model.config.vocab_size)])


@torch.inference_mode()
def exact(model: Any, prompt: Prompt, tokens: Sequence[int]) -> Tensor:
    """Returns the fp64 model's log-probabilities after each token, (len(tokens), vocab_size)."""
    target = torch.tensor([[*prompt.tokens[:-1], *tokens]])
    wide = doubled(model)
    logits = wide(target) if prompt.source is None else wide(torch.tensor([prompt.source]), target)
    return logits[0, len(prompt.tokens) - 1 :].log_softmax(-1)


@cache
def doubled(model: Any) -> Any:
    return copy.deepcopy(model).double()


def said(engine: CppEngine, prompts: Sequence[Prompt], new: Sequence[Sequence[int]]) -> list[Tensor]:
    """Returns the log-probabilities after the prompt's last token, and after the new ones, (steps, vocab_size) each."""
    total = sum(engine.tokens_needed(prompt, 1, len(new[0]) + 1) for prompt in prompts)
    batch = engine.open(len(prompts), total)
    batch.prefill(prompts)
    found = []
    for step in range(len(new[0]) + 1):
        tokens = [row[step - 1] if step else prompt.tokens[-1] for prompt, row in zip(prompts, new, strict=True)]
        one = batch.step(tokens, Selection(10**6))  # all that there are
        values = torch.empty(len(prompts), len(one.ids[0]))
        values.scatter_(1, torch.tensor(one.ids), torch.tensor(one.values))
        found.append(values)
    return list(torch.stack(found, 1))


def distance(found: Tensor, due: Tensor) -> float:
    """Returns the error of log-probabilities relative to their spread."""
    return ((found - due).square().mean().sqrt() / due.std()).item()


def assert_near(
    model: Any,
    lengths: Sequence[tuple[int, int]],
    bounds: dict[Any, float],
    steps: int = 4,
    cache_dtype: str | None = None,
) -> None:
    """Checks, in each precision, the log-probabilities after prompts of these lengths against the model in fp64."""
    dice = random.Random(0)
    prompts = [prompt_of(model, dice, *length) for length in lengths]
    new = [ids(dice, steps, model.config.vocab_size) for _ in prompts]
    due = [exact(model, prompt, [prompt.tokens[-1], *row]) for prompt, row in zip(prompts, new, strict=True)]
    for precision, bound in bounds.items():
        for one, expected in zip(said(CppEngine(model, precision, cache_dtype), prompts, new), due, strict=True):
            assert distance(one, expected) < bound, precision


@pytest.mark.parametrize("name", CONFIGS)
def test_each_option_of_a_model_is_honoured(name) -> None:
    lengths = ((1, 0), (9, 3), (17, 0), (33, 18))
    assert_near(configured(name), lengths, {"fp32": 2e-6, "bf16": 0.03, "int8": 0.1})
    assert_near(configured(name).quantize("int4"), lengths, {None: 0.1})  # computes with the rounded weights
    assert_near(configured(name), lengths, {"fp32": 0.03, "bf16": 0.05}, cache_dtype="int8")


def test_relative_distances_count_from_the_whole_prompt_if_it_is_split() -> None:
    """Of 512 tokens that go through the decoder together, the last prompt gets the rest."""
    kind, options = CONFIGS["t5"]
    model = drawn(kind, **options | {"max_len": 700, "max_distance": 650})
    assert_near(model, ((3, 250), (660, 420)), {"fp32": 2e-6}, steps=2)


@pytest.mark.parametrize("place, name", list(enumerate(CONFIGS)))
def test_tokens_are_those_of_the_cached_modules(place, name) -> None:
    """A model is searched in two of four ways: what a search asks for depends on no option of a model."""
    model, dice = configured(name), random.Random(1)
    prompts = [prompt_of(model, dice, length, length % 3) for length in (1, 12, 30)]
    inputs: Any = [prompt.source or prompt.tokens for prompt in prompts]
    kinds: list[dict[str, Any]] = [
        {},
        {"num_beams": 4, "num_return_sequences": 2},
        {"do_sample": True, "seed": 3, "top_k": 30, "top_p": 0.95, "num_return_sequences": 2},
        {"num_beams": 2, "no_repeat_ngram_size": 1, "repetition_penalty": 1.2},
    ]
    for options in kinds[place % 2 :: 2]:
        if isinstance(model, Transformer):
            options["decoder_input_ids"] = [list(prompt.tokens[1:]) for prompt in prompts]
        options |= {"max_new_tokens": 7, "return_dict_in_generate": True}
        found = generate(model, inputs, engine="cpp", **options)
        due = generate(model, inputs, engine="kv_cache", **options)
        assert torch.equal(found.sequences, due.sequences), options
        assert (found.scores - due.scores).abs().max() < 1e-4
        assert (found.token_log_probs - due.token_log_probs).abs().max() < 1e-4


LONG: dict[str, Any] = {"max_len": 1300, "num_heads": 2, "d_model": 24, "d_ff": 32}


@cache
def long_model(kind: type[Transformer] | type[GPT], window: int | None) -> Any:
    # Two layers: what the first of them makes of a prompt is what the second remembers.
    layers = {"num_encoder_layers": 2, "num_decoder_layers": 2} if kind is Transformer else {"num_layers": 2}
    positions = {} if kind is Transformer else {"positions": "rotary"}
    return drawn(kind, **LONG, **layers, **positions, window_size=window)


@pytest.mark.parametrize("window", [None, 5, 600])
@pytest.mark.parametrize("kind", [Transformer, GPT])
def test_long_sources_and_prompts_are_read_whole(kind, window) -> None:
    model, dice = long_model(kind, window), random.Random(2)
    # Beside each other in pieces of 512: cut before the last token, in the middle, and not at all.
    lengths = ((1, 513), (300, 0), (700, 520), (1, 530), (211, 0), (16, 15))
    prompts = [prompt_of(model, dice, *length) for length in lengths]
    new = [ids(dice, 2, 70) for _ in prompts]
    found = said(CppEngine(model), prompts, new)
    for one, prompt, row in zip(found, prompts, new, strict=True):
        assert distance(one, exact(model, prompt, [prompt.tokens[-1], *row])) < 3e-6
    if kind is Transformer or window != 5:
        return
    # What two windows of five don't reach may be anything.
    far = Prompt(None, [*(69 - t for t in prompts[2].tokens[:-12]), *prompts[2].tokens[-12:]])
    (other,) = said(CppEngine(model), [far], new[2:3])
    assert torch.equal(other, found[2])


DIVIDED: list[tuple[type, dict[str, Any]]] = [
    (Transformer, {}),
    (GPT, {"positions": "rotary"}),
    (Transformer, {"positions": "relative"}),
    (GPT, {"positions": "rotary", "qk_norm": "all", "norm_placement": "both", "head_dim": 40, "window_size": 9}),
    (
        GPT,
        {
            "attention_gate": True,
            "linear_layers": (True, False),
            "linear_key_heads": 3,
            "linear_value_heads": 6,
            "linear_key_dim": 40,
            "linear_value_dim": 72,
        },
    ),
]


# Slow: each model in each precision. Products are divided by precision, and attention by model.
@pytest.mark.usefixtures("torch_as_before")
@pytest.mark.parametrize(("precision", "kind", "positions"), by_turns(PRECISIONS, DIVIDED))
def test_bits_depend_neither_on_the_batch_nor_on_the_number_of_threads(kind, positions, precision) -> None:
    # Large enough for a second thread to take part in each step, which begins in the middle of a row's heads.
    sizes: dict[str, Any] = {"d_model": 264, "num_heads": 6, "num_kv_heads": 2, "d_ff": 700, "vocab_size": 1100}
    model, dice = drawn(kind, **sizes, **positions), random.Random(3)
    prompts = [prompt_of(model, dice, length, length % 4) for length in (1, 5, 16, 17, 31, 40)]
    new = [ids(dice, 3, 1100) for _ in prompts]
    engine = CppEngine(model, precision)
    assert 6 * engine.prepacked().step_bytes > 4 << 20  # type: ignore[attr-defined]  # see threads_for
    torch.set_num_threads(1)
    alone = [said(engine, [prompt], [row])[0] for prompt, row in zip(prompts, new, strict=True)]
    found = [said(engine, prompts, new), said(engine, prompts[::-1], new[::-1])[::-1]]
    for threads in (2, 3):
        torch.set_num_threads(threads)
        found.append(said(engine, prompts, new))
    for others in found:
        assert all(torch.equal(one, other) for one, other in zip(alone, others, strict=True))


# Slow: what holds no new pair of a model, a window and a precision.
@pytest.mark.parametrize(("kind", "window", "precision"), covering([Transformer, GPT], [None, 40], PRECISIONS))
def test_bits_do_not_depend_on_the_split_of_a_long_prompt(kind, window, precision) -> None:
    model, dice = long_model(kind, window), random.Random(4)
    long = prompt_of(model, dice, 60, 560)
    engine = CppEngine(model, precision)
    new = [ids(dice, 2, 70)]
    (alone,) = said(engine, [long], new)
    for before in (1, 30, 77, 511):
        beside = said(engine, [prompt_of(model, dice, 3, before), long], [*new, *new])
        assert torch.equal(beside[1], alone), before


SHARED: dict[str, Callable[[Any], None]] = {
    "a norm": lambda decoder: setattr(decoder.layers[1], "norm1", decoder.layers[0].norm2),
    "a layer": lambda decoder: decoder.layers.__setitem__(1, decoder.layers[0]),
    "the last norm": lambda decoder: setattr(decoder, "norm", decoder.layers[0].norm1),
}


@pytest.mark.parametrize("share", SHARED)
@pytest.mark.parametrize("name", ["transformer", "llama"])
def test_modules_in_two_places_are_packed_in_both(name, share) -> None:
    model = copy.deepcopy(configured(name))
    SHARED[share](model.decoder)
    inputs = [[5, 6, 7, 8], [9, 4]]
    ours, theirs = (
        generate(model, inputs, engine=engine, max_new_tokens=8, num_beams=2) for engine in ("cpp", "kv_cache")
    )
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_each_batch_uses_the_weights_at_its_beginning(precision) -> None:
    model = configured(next(iter(CONFIGS)))
    prompt, size = prompt_of(model, random.Random(1), 6), model.config.vocab_size
    engine = CppEngine(model, precision)
    kept = engine.open(2, 200)

    def decode(batch: Batch) -> list[list[float]]:
        batch.prefill([prompt])
        found = [batch.step([token], Selection(size)).values[0] for token in (prompt.tokens[-1], 5, 6)]
        batch.free([0])
        return found

    seen = []
    for _ in range(3):  # what runs goes on with what it began with
        seen.append(decode(kept))
        fresh = CppEngine(copy.deepcopy(model), precision)
        assert seen[-1] == decode(fresh.open(2, 200))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
    assert seen[0] != seen[1] != seen[2]


@pytest.mark.parametrize(
    "kind, options",
    by_turns([Transformer, GPT], [{}, {"num_beams": 3}, {"num_beams": 2, "beam_rules": "transformers"}]),
)
def test_suppressed_tokens_may_be_in_many_panels(kind, options) -> None:
    model = drawn(kind, vocab_size=300)
    prompts = [[5, 6, 7], [8, 9], [10]]
    orders = (list(range(10, 290)), list(range(289, 9, -1)), random.Random(2).sample(range(300), 280))
    for suppressed in orders:
        for least in (0, 4):
            given = {"suppress_tokens": suppressed, "min_new_tokens": least, "max_new_tokens": 7, **options}
            one, other = (generate(model, prompts, engine=engine, **given) for engine in ("cpp", "kv_cache"))
            assert torch.equal(one, other)
            new = one[:, 3 * (kind is GPT) :]
            assert not torch.isin(new, torch.tensor(suppressed)).logical_and(new != 0).any()


@pytest.mark.usefixtures("torch_as_before")
def test_default_dtype_and_modes_do_not_change_results() -> None:
    model = configured(next(iter(CONFIGS)))
    with torch.overrides.BaseTorchFunctionMode():
        assert "TorchFunctionMode" in str(CppEngine.why_unsupported(model))
    options: dict[str, Any] = {"engine": "cpp", "do_sample": True, "seed": 1, "max_new_tokens": 5}
    due = generate(model, [[5, 6, 7]], **options)
    for dtype in (torch.bfloat16, torch.float64):
        torch.set_default_dtype(dtype)
        assert torch.equal(generate(model, [[5, 6, 7]], **options), due)
