"""Random calls of `generate`, inputs and changes of the model: what transformers gives, or an error where it raises."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process, stopping_criteria

from fastformer.checkpoints.hf import DECODER_FORMS
from fastformer.integrations.known import CACHE
from tests.checkpoints.present import VERSION
from tests.integrations.engine_calls import counted, pair_of
from tests.integrations.test_engine_generate import DRAWN

Options = dict[str, Any]


class Made:
    """An option of which each call gets a new one."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make


def _processors(*made: Callable[[], Any]) -> Made:
    return Made(lambda: LogitsProcessorList([make() for make in made]))


def choices(eos: int, pad: int) -> dict[str, list[Any]]:
    """The values of each option, None among them where it means something."""
    least = logits_process.MinLengthLogitsProcessor
    return {
        "min_new_tokens": [1, 3, 20], "min_length": [4, 14], "num_beams": [1, 2, 3, 4], "do_sample": [True],
        "num_return_sequences": [1, 2, 3], "length_penalty": [0, -1.0, 0.5, 1e4], "early_stopping": [True, "never"],
        "eos_token_id": [None, [eos, 13, 37, 9], 5, [eos, eos], [], -1], "pad_token_id": [None, 0, pad, eos, -1],
        "repetition_penalty": [1.4, 0.7], "encoder_repetition_penalty": [1.3], "no_repeat_ngram_size": [1, 2],
        "bad_words_ids": [[[5]], [[9, 12], [30]], [[eos], [4, 5, 6]], [[i] for i in range(60)]],
        "suppress_tokens": [[7, 9], [], [eos], [200]], "begin_suppress_tokens": [[7, 8, eos], []],
        "forced_bos_token_id": [6, eos], "forced_eos_token_id": [eos, [eos, 6]], "renormalize_logits": [True],
        "sequence_bias": [[[[9], -4.0], [[7, 8], 3.0]], {(eos,): 6.0}], "exponential_decay_length_penalty": [(1, 1.2)],
        "temperature": [0.7, 1.5, 0.0], "top_k": [0, 5, 100], "top_p": [0.9, 0.3], "min_p": [0.1], "typical_p": [0.5],
        "max_time": [0.0, 100.0], "use_cache": [True, False, None], "cache_implementation": ["dynamic", "static"],
        "return_dict_in_generate": [True], "output_scores": [True], "output_logits": [True],
        "guidance_scale": [1.0, 1.5], "prompt_lookup_num_tokens": [2], "output_attentions": [True], "nonsense": [1],
        "generation_config": [Made(lambda: GenerationConfig(max_new_tokens=4, num_beams=2, pad_token_id=pad))],
        "logits_processor": [
            _processors(lambda: lambda ids, scores: scores.roll(ids.shape[1] % 5, 1)),
            _processors(lambda: lambda ids, scores: torch.full_like(scores, -float("inf"))),
            _processors(lambda: least(15, [5]), lambda: logits_process.NoBadWordsLogitsProcessor([[eos], [7]])),
            _processors(lambda: logits_process.LogitNormalization(), lambda: least(9, [eos])),
        ],
        "stopping_criteria": [
            Made(lambda: StoppingCriteriaList([lambda ids, scores, **_: ids[:, -1] % 7 == 3])),
            Made(lambda: StoppingCriteriaList([stopping_criteria.EosTokenCriteria([5, 30])])),
        ],
        "prefix_allowed_tokens_fn": [lambda row, ids: [eos, 4 + row, 10 + len(ids) % 9, 30], lambda row, ids: []],
    }  # fmt: skip


def drawn_inputs(dice: random.Random, pad: int, *, is_decoder: bool) -> Options:
    """Ids with padding, holes or none, with a mask or without."""
    rows, length = dice.choice([1, 2, 3]), dice.choice([1, 2, 5, 9])
    generator = torch.Generator().manual_seed(dice.randrange(2**30))
    ids = torch.randint(3, 58, (rows, length), generator=generator)
    lengths = torch.randint(1, length + 1, (rows, 1), generator=generator)
    mask = (torch.arange(length) < lengths).long()
    mask = mask.flip(1) if is_decoder else mask
    style = dice.choice(["padded", "padded", "padded", "none", "ones", "absent", "flipped", "random", "short", "int"])
    if style in ("padded", "absent"):
        ids = ids.masked_fill(mask == 0, pad)
    masks = {
        "padded": mask, "ones": torch.ones_like(ids), "flipped": mask.flip(1), "short": torch.ones_like(ids)[:, 1:],
        "random": torch.randint(0, 2, ids.shape, generator=generator),
    }  # fmt: skip
    found: Options = {"inputs": ids.int() if style == "int" else ids}
    if style in masks:
        found["attention_mask"] = masks[style]
    if not is_decoder and dice.random() < 0.2:
        found["decoder_input_ids"] = torch.randint(3, 58, (rows, 2), generator=generator)
    if is_decoder and dice.random() < 0.05:
        found["position_ids"] = torch.arange(length)[None].expand(rows, -1) + 1
    return found


@torch.no_grad()
def _noise(model: Any) -> None:
    for i, parameter in enumerate(model.parameters()):
        parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i)) * 0.05)


def _new_head(model: Any) -> None:
    head = model.get_output_embeddings()
    head.weight = nn.Parameter(torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(0)) * 0.4)


CHANGES: list[Callable[[Any], Any]] = [
    _noise,
    _new_head,
    copy.deepcopy,
    lambda model: model.requires_grad_(False),
    lambda model: model.set_attn_implementation("eager"),
    lambda model: model.double(),
    lambda model: model.resize_token_embeddings(71),
    lambda model: setattr(model.generation_config, "num_beams", 3),
    lambda model: setattr(model.generation_config, "eos_token_id", [5, 11, 30]),
    lambda model: setattr(model.generation_config, "return_dict_in_generate", True),
    lambda model: setattr(model.config, "tie_word_embeddings", not model.config.tie_word_embeddings),
]


def outcome(model: Any, options: Options, seed: int) -> tuple[Any, Tensor]:
    """The tokens and the kind of the output, or the type of the error; and the state of the generator behind it."""
    given = {name: value.make() if isinstance(value, Made) else copy.copy(value) for name, value in options.items()}
    torch.manual_seed(seed)
    try:
        found = model.generate(**given)
    except Exception:
        return "error", torch.empty(0)
    tokens = found if isinstance(found, Tensor) else found.sequences
    keys = set() if isinstance(found, Tensor) else {*found} - {CACHE}
    return (type(found).__name__, keys, tokens.dtype, tokens.tolist()), torch.get_rng_state()


def is_near_tie(plain: Any, options: Options, seed: int) -> bool:
    """Whether transformers' own outcome changes with weights that are rounded in another way."""
    expected = outcome(plain, options, seed)[0]
    for i in range(4):
        moved, generator = copy.deepcopy(plain), torch.Generator().manual_seed(i)
        with torch.no_grad():
            for parameter in moved.parameters():
                parameter.mul_(1 + (torch.rand(parameter.shape, generator=generator) - 0.5) * 3e-6)
        if outcome(moved, options, seed)[0] != expected:
            return True
    return False


def compare(kind: str, seed: int, calls: int) -> None:
    """Compares so many calls of a model of a family, between which the model changes sometimes."""
    is_decoder, dice = kind in DECODER_FORMS, random.Random(f"{kind} {seed}")
    case = DRAWN[kind](kind, seed)
    pair = pair_of(case, left=is_decoder)
    models = [pair.plain, pair.ours]
    pad, eos = (1, 2) if is_decoder else case.ids
    every, served, ties = choices(eos, pad), 0, 0
    for call in range(calls):
        if dice.random() < 0.1:
            models = [copy.deepcopy(pair.plain), copy.deepcopy(pair.ours)]
            change = dice.choice(CHANGES)
            for i, model in enumerate(models):
                torch.manual_seed(0)  # of new rows of an embedding
                made = change(model)
                models[i] = made if isinstance(made, type(model)) else model  # a resize returns the embedding
        options = drawn_inputs(dice, pad, is_decoder=is_decoder) | {"max_new_tokens": dice.choice([1, 2, 5, 9])}
        options |= {name: dice.choice(every[name]) for name in dice.sample([*every], dice.choice([0, 1, 2, 3, 5]))}
        if kind == "M2M100":  # whose positions don't count a PAD that was generated: see the differences
            options |= {"suppress_tokens": [pad], "num_beams": options.get("num_beams", 2)}
        if not is_decoder and VERSION < (5, 18):  # where a draft ends at the EOS that starts BART's decoder
            options.pop("prompt_lookup_num_tokens", None)
        expected, state = outcome(models[0], options, call)
        with counted() as opened:
            found, ours = outcome(models[1], options, call)
        served += opened[0]
        if opened[0] and options.get("do_sample") and "prompt_lookup_num_tokens" in options and expected != "error":
            # transformers draws after each id of a draft, kept or not: the engine as without drafts.
            options = {**options, "prompt_lookup_num_tokens": None}
            expected, state = outcome(models[0], options, call)
        if found == expected and torch.equal(state, ours):
            continue
        assert expected != "error" and found != "error", (call, options, expected, found)
        assert is_near_tie(models[0], options, call), (call, options, expected, found)
        ties += 1
    assert served and ties <= calls // 10


@pytest.mark.parametrize("kind", ["llama", "Bart"])
def test_random_calls(kind):
    compare(kind, 0, 12)


@pytest.mark.slow
@pytest.mark.parametrize("kind", DRAWN)
def test_many_random_calls(kind):
    """Proves for each family that 150 random calls of changing models give transformers' tokens, or an error where
    transformers raises one, and leave the random generator as transformers does."""
    for seed in range(1, 4):
        compare(kind, seed, 50)
