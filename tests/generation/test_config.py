"""Tests types, bounds and combinations of `GenerationConfig`, and all ways to pass the options."""

from __future__ import annotations

import asyncio
import inspect
import math
import re
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import torch

import fastformer
from fastformer.data import ByteTokenizer
from fastformer.generation import AsyncTranslator, GenerationConfig, GenerationSettings, Translator, generate
from fastformer.generation.config import OPTIONS, GenerationOptions
from fastformer.models import Transformer
from tests.generation.weights import drawn

# Of each numeric option values at its bounds, and values beyond them.
BOUNDS: dict[str, tuple[list[Any], list[Any]]] = {
    "max_new_tokens": ([1, None], [0, -1]),
    "min_new_tokens": ([0], [-1]),
    "max_length": ([1, None], [0, -1]),
    "min_length": ([0], [-1]),
    "num_beams": ([1, np.int64(3), torch.tensor(2)], [0, -2]),
    "length_penalty": ([-2.5, 0, np.int64(1), torch.tensor(2), 2**70, None], []),
    "temperature": ([1e-9, 3], [0, 0.0, -1]),
    "top_k": ([0, 40], [-1]),
    "top_p": ([1, 1e-9], [0.0, 1.000001, -0.5]),
    "repetition_penalty": ([1e-9, 5], [0.0, -1]),
    "no_repeat_ngram_size": ([0, 3], [-1]),
    "num_return_sequences": ([1, 5], [0]),
    "num_beam_groups": ([1], [0, -1]),
    "diversity_penalty": ([0], [-0.5]),
    "forced_bos_token_id": ([0, None], []),
    "forced_eos_token_id": ([0, None], []),
    "prompt_lookup_num_tokens": ([1, np.int64(10), None], [0, -1, 2.5]),
    "max_time": ([1e-9, 2, np.int32(5), None], [0, np.int64(0), -1.0]),
    "pad_token_id": ([0, None], []),
    "decoder_start_token_id": ([0, None], []),
    "seed": ([-(2**63), 2**64 - 1, 0, None], [2**64, -(2**63) - 1]),
}
# Of each other option values that fit, with what they become, and values that don't.
keep = lambda input_ids, scores: scores  # noqa: E731
LISTS: list[Any] = [3, None, {3: 4}]
OTHERS: dict[str, tuple[list[tuple[Any, Any]], list[Any]]] = {
    "suppress_tokens": ([([7, 3], (7, 3)), (np.array([6]), (6,)), ([], ())], [*LISTS, [None], [1.5], [True], "ab"]),
    "shortlist": ([([9, 3, 9], (3, 9)), (range(2), (0, 1))], [*LISTS, ["a"], torch.tensor(3)]),
    "bad_words_ids": ([([range(2), [9]], ((0, 1), (9,)))], [*LISTS, [3], [[3], []], [["a"]]]),
    "eos_token_id": (
        [
            (3, (3,)),
            (np.int32(3), (3,)),
            ([np.int64(3), torch.tensor(4), 3], (3, 4)),
            (torch.tensor([3, 4]), (3, 4)),
            (None, None),
        ],
        [[], "1", 1.0, [1, 2.0], [1, True], True],
    ),
    "stop_strings": ([("end", ("end",)), (["a", "b"], ("a", "b"))], [*LISTS, "", ["a", ""], [3]]),
    "choices": ([("end", ("end",)), (["a", "b"], ("a", "b"))], [*LISTS, "", ["a", ""], [3]]),
    "schema": (
        [({"type": "null"}, '{"type": "null"}'), ('{"a": 1}', '{"a": 1}'), (True, "true"), (None, None)],
        [3, [{}], "{", "7", "", {"a": keep}, 1.5],
    ),
    "regex": ([("a+", "a+"), (None, None)], ["", 3, ["a"], True]),
    "grammar": ([("start: A", "start: A"), (None, None)], ["", 3, ["a"]]),
    "logits_processor": ([(keep, (keep,)), ([keep], (keep,))], [*LISTS, [keep, 3], "x", ["x"]]),
    "stopping_criteria": ([(keep, (keep,)), ((keep,), (keep,))], [*LISTS, [3]]),
    "adapter": ([("any", "any"), (None, None)], [3, True, ["a"]]),
    "engine": ([("kv_cache", "kv_cache"), (None, None)], [3, True, ["cpp"]]),
}
NEITHER = {  # of each kind
    "int": ["3", 1.5, 3.0, True, math.nan, [3], np.array([2, 3]), torch.tensor(2.5), 2**70, 10**400],
    "float": ["hot", True, math.nan, math.inf, -math.inf, 10**400, [1.0]],
    "bool": [1, 0, "no", 1.0],
    "word": ["zzz", 3, True, [], np.array(["fp32"] * 2)],
}


class Chain(list):  # Hugging Face's list of processors is one
    def __call__(self, input_ids, scores):
        raise AssertionError("its members are called")


@pytest.fixture(scope="module")
def translator() -> Translator:
    return Translator(drawn(Transformer, vocab_size=259, max_len=32), ByteTokenizer())


def kind_of(name: str) -> str:
    hint = get_type_hints(GenerationConfig)[name]
    options = {*get_args(hint)} or {hint}
    return "word" if "Literal" in str(hint) else next(one.__name__ for one in (bool, int, float) if one in options)


def values_of(name: str) -> tuple[list[tuple[Any, Any]], list[Any]]:
    """Returns values that an option accepts, with their results, and values that it refuses."""
    if name in OTHERS:
        return OTHERS[name]
    kind = kind_of(name)
    if name in BOUNDS:
        good, bad = BOUNDS[name]
        become = {"int": int, "float": float}[kind]
        return [(one, None if one is None else become(one)) for one in good], [*bad, *NEITHER[kind]]
    assert kind in ("bool", "word"), f"{name} is in no table of this test"
    return [], [one for one in NEITHER[kind] if one is not True or name != "early_stopping"]


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_is_checked_and_the_error_names_it(name, model, translator) -> None:
    good, bad = values_of(name)
    optional = type(None) in get_args(get_type_hints(GenerationConfig)[name])
    bad = bad if optional or name in OTHERS else [*bad, None]
    # With what the option needs, so that it is the value that is refused.
    more = {"do_sample": True} if name in ("temperature", "top_k", "top_p", "num_return_sequences") else {}
    for value in bad:
        with pytest.raises(ValueError, match=rf"\b{name}\b"):
            GenerationConfig(**{name: value}, **more)
    # They share the check: one value shows that they ask it.
    for door in (
        lambda **options: GenerationConfig.from_options(options),
        partial(generate, model, [[5, 6]]),
        partial(model.generate, [[5, 6]]),
        partial(translator.translate, "text"),
        partial(translator.stream, ["text"]),
    ):
        with pytest.raises(ValueError, match=rf"\b{name}\b"):
            door(**{name: bad[0]})
    for value, kept in good:
        found = getattr(GenerationConfig(**{name: value}, **more), name)
        assert found == kept and type(found) is type(kept)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"num_beams": 2, "do_sample": True}, ("do_sample", "num_beams")),
        ({"num_beams": 2, "num_return_sequences": 3}, ("num_return_sequences", "num_beams")),
        ({"num_return_sequences": 2}, ("num_return_sequences", "num_beams")),
        ({"temperature": 0.5}, ("do_sample", "temperature")),
        ({"top_k": 5, "num_beams": 2}, ("do_sample", "top_k")),
        ({"top_p": 0.5}, ("do_sample", "top_p")),
        ({"renormalize_logits": False}, ("beam_rules", "renormalize_logits")),
        ({"early_stopping": "never"}, ("beam_rules", "early_stopping")),
        ({"engine": "kv_cache", "use_cache": False}, ("engine", "use_cache")),
        ({"num_beams": 4, "num_beam_groups": 3, "diversity_penalty": 1.0}, ("num_beams", "num_beam_groups")),
        ({"num_beams": 4, "num_beam_groups": 2}, ("num_beam_groups", "diversity_penalty")),
        ({"num_beams": 4, "diversity_penalty": 0.5}, ("num_beam_groups", "diversity_penalty")),
        (
            {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0, "beam_rules": "transformers"},
            ("beam_rules", "num_beam_groups"),
        ),
        ({"window": "slide"}, ("max_new_tokens", "window")),
        ({"window": "slide", "max_new_tokens": 5, "num_beams": 2}, ("num_beams", "window")),
    ],
)
def test_options_that_contradict_each_other(options, names, model) -> None:
    for door in (GenerationConfig, partial(generate, model, [[5, 6]])):
        with pytest.raises(ValueError) as refused:
            door(**options)
        assert all(re.search(rf"\b{name}\b", str(refused.value)) for name in names), refused.value


def test_combined_options() -> None:
    GenerationConfig(num_beams=6, num_beam_groups=3, diversity_penalty=1, num_return_sequences=6)
    GenerationConfig(beam_rules="transformers", early_stopping="never", renormalize_logits=False, num_beams=2)
    GenerationConfig(do_sample=True, temperature=2, top_k=3, top_p=0.5, num_return_sequences=9)
    GenerationConfig(window="slide", max_new_tokens=5, do_sample=True)
    assert GenerationConfig(do_sample=True, num_return_sequences=5).samples == 5
    assert GenerationConfig(num_beams=5, num_return_sequences=5).samples == 1
    assert GenerationConfig().alpha == 0.6 and GenerationConfig(beam_rules="transformers").alpha == 1.0
    for rules in ("tensor2tensor", "transformers"):
        assert GenerationConfig(beam_rules=rules, length_penalty=0).alpha == 0
    for seed in (-(2**63), 2**64 - 1):
        torch.Generator().manual_seed(GenerationConfig(seed=seed, do_sample=True).seed)


def test_a_config_keeps_its_values() -> None:
    ends = [3, 4]
    config = GenerationConfig(eos_token_id=ends, logits_processor=Chain([keep]))
    ends.append(6)
    assert config.eos_token_id == (3, 4) and config.logits_processor == (keep,)
    hash(config)
    with pytest.raises(AttributeError):
        config.num_beams = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("eos_token_id", [9, 40]),
        ("pad_token_id", -1),
        ("decoder_start_token_id", 40),
        ("forced_bos_token_id", 40),
        ("forced_eos_token_id", -2),
        ("suppress_tokens", [3, -1]),
        ("shortlist", [3, 40]),
        ("bad_words_ids", [[3], [4, 40]]),
        ("num_beams", 41),
    ],
)
def test_ids_and_beams_lie_within_the_vocabulary(name, value, model) -> None:
    for door in (lambda **options: GenerationConfig(**options).check_model(40), partial(generate, model, [[5]])):
        with pytest.raises(ValueError, match=rf"\b{name}\b"):
            door(**{name: value})
    GenerationConfig(eos_token_id=39, pad_token_id=0, suppress_tokens=[39], num_beams=40).check_model(40)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("max_lenght", "max_length"),
        ("num_beam", "num_beams"),
        ("beam_size", "num_beams"),
        ("max_tokens", "max_new_tokens"),
        ("stop", "stop_strings"),
        ("inputs", "input_ids"),
    ],
)
def test_an_unknown_option_gets_the_nearest_name(name, nearest, model, translator) -> None:
    calls: list[Callable[..., Any]] = [partial(generate, model, [[5]]), partial(model.generate, [[5]])]
    if nearest in OPTIONS:
        calls += [lambda **options: GenerationConfig.from_options(options), partial(translator.translate, "text")]
    for call in calls:
        with pytest.raises(ValueError, match=rf"'{name}'.*'{nearest}'"):
            call(**{name: 3})


def test_a_shortlist_of_words_is_refused_with_its_reason(translator) -> None:
    with pytest.raises(ValueError, match=r"'use_vmap'.*vmap\.txt"):
        translator.translate("text", use_vmap=True)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (3, ("generation_config", "int")),
        ({"min_p": 0.5}, ("generation_config", "min_p")),
        ({"num_beam": 2}, ("generation_config", "num_beams")),
        ({"num_beams": 2.5}, ("num_beams", "2.5")),
    ],
)
def test_a_foreign_config_that_does_not_fit(given, words, model) -> None:
    for call in (
        lambda: GenerationConfig.from_options({"generation_config": given}),
        lambda: generate(model, [[5]], generation_config=given),
    ):
        with pytest.raises(ValueError) as refused:
            call()
        assert all(word in str(refused.value) for word in words), refused.value
    for options in (None, 3, {3: 3}):
        with pytest.raises(ValueError):
            GenerationConfig.from_options(options)


def test_a_config_is_accepted_everywhere(model, translator) -> None:
    config = GenerationConfig(num_beams=3, max_new_tokens=6, num_return_sequences=2)
    due = generate(model, [[5, 6]], num_beams=3, max_new_tokens=6, num_return_sequences=2)
    assert torch.equal(generate(model, [[5, 6]], config), due)
    assert torch.equal(model.generate([[5, 6]], config=config), due)
    longer = generate(model, [[5, 6]], num_beams=3, max_new_tokens=9, num_return_sequences=2, min_new_tokens=9)
    assert torch.equal(generate(model, [[5, 6]], config, max_new_tokens=9, min_new_tokens=9), longer)
    texts = translator.translate(["ab", "c"], num_beams=3, max_new_tokens=6, num_return_sequences=2)
    assert translator.translate(["ab", "c"], config=config) == texts
    assert list(translator.stream(["ab", "c"], config=config)) == texts
    best = translator.translate("ab", config=config, num_return_sequences=1)
    assert best == texts[0][0]

    async def ask() -> Any:
        async with AsyncTranslator(translator) as front:
            pieces = [piece async for piece in front.stream("ab", config=GenerationConfig(max_new_tokens=6))]
            return await front.translate("ab", config=config), "".join(pieces)

    assert asyncio.run(ask()) == (texts[0], translator.translate("ab", max_new_tokens=6))
    namesake = type("GenerationConfig", (), {"__module__": "transformers"})
    for call in (partial(generate, model, [[5]]), partial(translator.translate, "a")):
        with pytest.raises(ValueError, match=r"\bconfig\b.*\bgeneration_config\b"):
            call(config={"num_beams": 2})
        with pytest.raises(ValueError, match=r"fastformer\..*transformers\.GenerationConfig"):
            call(config=namesake())
        with pytest.raises(ValueError, match=r"\bgeneration_config\b"):
            call(config=config, generation_config={"num_beams": 2})


def test_options_are_stated_once() -> None:
    from docstring_parser import parse

    shown = inspect.signature(fastformer.generate).parameters
    for field in fields(GenerationConfig):
        parameter = shown[field.name]
        assert parameter.kind is parameter.KEYWORD_ONLY and parameter.default == field.default
    assert get_type_hints(GenerationOptions) == get_type_hints(GenerationConfig)
    assert {p.arg_name for p in parse(GenerationConfig.__doc__ or "").params if p.description} == {*OPTIONS}
    assert GenerationSettings is GenerationConfig
