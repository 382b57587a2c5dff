"""Beam search by transformers' rules equals its own, for random models of three families."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from fastformer.generation import generate
from fastformer.generation.generating import GenerateOutput
from fastformer.integrations import from_huggingface
from tests.covering import by_turns
from tests.integrations.conversions import CASES, bart, opinionated, until_end

ROWS, WIDTH = 24, 9
# Limits that most hypotheses end before, and that cut many.
LIMITS = (16, 4)
PENALTIES = (0.6, 1.0, 2.0, -1.0)
STOPPING: tuple[Any, ...] = (False, True, "never")


@cache
def family(name: str) -> tuple[Any, int, int]:
    """Returns a model whose hypotheses end at many lengths, its PAD and its EOS."""
    if name == "T5":
        model = CASES["T5 1.1"].make(torch.float32, seed=10, scale=0.6)
        with torch.no_grad():
            model.lm_head.weight[1] *= 3
        return model, 0, 1
    if name == "Marian":
        model, pad, eos, lift = opinionated(bart("Marian", torch.float32, bias=True), seed=2), 59, 0, 2.0
    else:
        model, pad, eos, lift = bart("Bart", torch.float32, seed=1, scale=0.9, scale_embedding=True, bias=True), 1, 2, 3
    with torch.no_grad():
        model.model.decoder.layers[-1].final_layer_norm.weight.mul_(0.5)
        model.final_logits_bias[0, eos] += lift
    return model, pad, eos


def sources(pad: int, eos: int) -> Tensor:
    lengths = 1 + torch.arange(ROWS) % WIDTH
    ids = torch.randint(3, 58, (ROWS, WIDTH), generator=torch.Generator().manual_seed(11))
    ids = ids.masked_fill(torch.arange(WIDTH) >= lengths[:, None], pad)
    ids[torch.arange(ROWS), lengths - 1] = eos
    return ids


@cache
def theirs(name: str, limit: int, **options: Any) -> tuple[list[list[int]], list[float]]:
    """Returns transformers' two best results of each row, and their scores."""
    model, pad, eos = family(name)
    ids = sources(pad, eos)
    with torch.inference_mode():
        found = model.generate(
            input_ids=ids, attention_mask=(ids != pad).long(), max_new_tokens=limit, do_sample=False,
            num_return_sequences=2, return_dict_in_generate=True, output_scores=True, **options,
        )  # fmt: skip
    return [until_end(row[1:], eos) for row in found.sequences.tolist()], found.sequences_scores.tolist()


def ours(name: str, limit: int, **options: Any) -> tuple[list[list[int]], list[float]]:
    model, pad, eos = family(name)
    found = generate(
        from_huggingface(model), sources(pad, eos), max_new_tokens=limit, beam_rules="transformers",
        num_return_sequences=2, return_dict_in_generate=True, **options,
    )  # fmt: skip
    assert isinstance(found, GenerateOutput)
    return [until_end(row, eos) for row in found.sequences.tolist()], found.scores.tolist()


ENGINES = ["cpp", "kv_cache", "graph"]  # the searches in C++, in Python and on the device
PAIRS = [(name, engine) for name in ("Marian", "BART", "T5") for engine in ENGINES if (name, engine) != ("T5", "graph")]


CALLS = [*itertools.product(LIMITS, PENALTIES, STOPPING)]
# Each search with both numbers of beams and two families, which it treats alike, and of each every fifth call.
QUICK = [("Marian", "cpp", 2), ("BART", "cpp", 4), ("T5", "kv_cache", 2), ("Marian", "kv_cache", 4)]
QUICK += [("BART", "graph", 2), ("Marian", "graph", 4)]


@pytest.mark.parametrize(
    "name, engine, beams, first, step",
    [
        *((*each, place % 5, 5) for place, each in enumerate(QUICK)),
        *(pytest.param(*pair, beams, 0, 1, marks=pytest.mark.slow) for pair in PAIRS for beams in (2, 4)),
    ],
)
def test_the_hypotheses_are_those_of_transformers(name, engine, beams, first, step):
    near_ties = total = 0
    for limit, penalty, stopping in CALLS[first::step]:
        options = {"num_beams": beams, "length_penalty": penalty, "early_stopping": stopping}
        found, scores = ours(name, limit, engine=engine, **options)
        expected, due = theirs(name, limit, **options)
        # The two models themselves are this close.
        torch.testing.assert_close(torch.tensor(scores), torch.tensor(due), rtol=5e-4, atol=1e-4)
        for one, other, score, other_score in zip(found, expected, scores, due, strict=True):
            # A score is a sum of log-probabilities, right to this much, times a power of the length.
            scale = max(len(one), len(other)) ** -penalty
            assert one == other or abs(score - other_score) < 1e-4 * scale, (options, one, other)
            near_ties += one != other
        total += len(expected)
    assert total == 2 * ROWS * len(CALLS[first::step])
    assert near_ties <= total // 50


@pytest.mark.parametrize("name", ["Marian", "BART", "T5"])
def test_the_models_distinguish_the_rules(name):
    by_stopping = [theirs(name, 16, num_beams=4, length_penalty=2.0, early_stopping=one)[0] for one in STOPPING]
    by_penalty = [theirs(name, 16, num_beams=4, length_penalty=one, early_stopping=False)[0] for one in PENALTIES]
    assert len({len(row) for found in by_stopping + by_penalty for row in found}) >= 6
    assert len({*map(str, by_stopping)}) == 3 and len({*map(str, by_penalty)}) >= 3
    model, pad, eos = family(name)
    plain = generate(from_huggingface(model), sources(pad, eos), max_new_tokens=16, num_beams=4, length_penalty=1.0)
    assert isinstance(plain, Tensor)
    assert sum(until_end(row, eos) != other for row, other in zip(plain.tolist(), by_penalty[1][::2], strict=True)) >= 2


@pytest.mark.parametrize("engine", ["cpp", "kv_cache"])
def test_defaults_equal_transformers(engine):
    assert ours("T5", 16, engine=engine, num_beams=4)[0] == theirs("T5", 16, num_beams=4)[0]


@pytest.mark.parametrize("engine, stopping", by_turns(["cpp", "kv_cache"], [*STOPPING]))
def test_several_ends_and_a_prefix(stopping, engine):
    model, pad, eos = family("T5")
    ids, ends, prefix = sources(pad, eos), [eos, 13, 37], torch.tensor([[pad, 4, 7]] * ROWS)
    options: dict[str, Any] = {
        "max_new_tokens": 12, "num_beams": 3, "length_penalty": 1.5, "early_stopping": stopping, "eos_token_id": ends,
        "decoder_input_ids": prefix,
    }  # fmt: skip
    with torch.inference_mode():
        expected = model.generate(input_ids=ids, attention_mask=(ids != pad).long(), do_sample=False, **options)
    found = generate(from_huggingface(model), ids, beam_rules="transformers", engine=engine, **options)
    assert isinstance(found, Tensor)
    rows = [until_end(row[1:], *ends) for row in expected.tolist()]
    assert len({len(row) for row in rows}) > 3 and len({*ends} & {row[-1] for row in rows}) >= 2
    assert sum(until_end(mine, *ends) != row for mine, row in zip(found.tolist(), rows, strict=True)) <= 1  # a near-tie
