"""Options of transformers' generate give the same tokens, alone and combined, for random models."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
import transformers

from fastformer.generation import generate
from fastformer.generation.generating import GenerateOutput
from fastformer.integrations import from_huggingface
from tests.covering import by_turns, covering
from tests.integrations.conversions import until_end
from tests.integrations.test_transformers_beams import family, sources

pytestmark = pytest.mark.filterwarnings(
    "ignore:Unfeasible length constraints", "ignore:Using the model-agnostic default"
)

ROWS = 4
FAMILIES = ("Marian", "BART", "T5")
ENGINES = ("cpp", "kv_cache", "recompute", "graph")
PAIRS = [pair for pair in itertools.product(FAMILIES, ENGINES) if pair != ("T5", "graph")]


def drawn(numbers: random.Random, ends: int) -> dict[str, Any]:
    """Draws options that both have, some of them together."""
    few = [numbers.randrange(3, 58) for _ in range(4)]
    every: dict[str, Any] = {
        "repetition_penalty": numbers.choice([0.7, 1.3, 1.5, 2.5]),
        "no_repeat_ngram_size": numbers.choice([1, 2, 3]),
        "bad_words_ids": [few[:1], few[1:3], [ends]],
        "suppress_tokens": [numbers.randrange(3, 58) for _ in range(12)],
        "min_new_tokens": numbers.choice([2, 5, 30]),
        "min_length": numbers.choice([3, 7]),
        "forced_eos_token_id": ends,
        "eos_token_id": numbers.choice([[ends, 13], [ends, ends], [13, 37, ends]]),
        "decoder_input_ids": few[:2],
        "logits_processor": [lambda ids, scores: scores.masked_fill(scores < scores.mean(-1, keepdim=True), -30.0)],
    }
    options = {name: every[name] for name in numbers.sample(sorted(every), numbers.choice([1, 1, 2, 3]))}
    if "suppress_tokens" not in options and numbers.random() < 0.2:
        options["forced_bos_token_id"] = few[3]
    options["max_length" if numbers.random() < 0.3 else "max_new_tokens"] = numbers.choice([6, 11])
    if numbers.random() < 0.7:
        options["num_beams"] = numbers.choice([2, 3, 4])
        options["length_penalty"] = numbers.choice([0.6, 1.0, 2.0, -1.0])
        options["early_stopping"] = numbers.choice([False, True, "never"])
        options["renormalize_logits"] = numbers.random() < 0.5
    return options


def filled_no_more(row: list[int], *fill: int) -> list[int]:
    """Returns a row without its padding."""
    while row and row[-1] in fill:
        row = row[:-1]
    return row


def compare(name: str, engine: str, options: dict[str, Any]) -> tuple[int, int]:
    """Returns the number of rows, and of those that differ at a near tie. Other differences are failures."""
    model, pad, eos = family(name)
    ids = sources(pad, eos)[5 : 5 + ROWS]
    given = dict(options)
    start = pad if name != "BART" else model.config.decoder_start_token_id
    prefix = given.pop("decoder_input_ids", [])
    theirs, ours = dict(given), dict(given)
    if prefix:
        theirs["decoder_input_ids"] = torch.tensor([[start, *prefix]] * ROWS)
        ours["decoder_input_ids"] = [prefix] * ROWS
    found = generate(
        from_huggingface(model), ids, beam_rules="transformers", engine=engine, return_dict_in_generate=True, **ours
    )
    assert isinstance(found, GenerateOutput)
    with torch.inference_mode():
        due = model.generate(
            input_ids=ids, attention_mask=(ids != pad).long(), do_sample=False, return_dict_in_generate=True,
            output_scores=True, pad_token_id=pad, **theirs,
        )  # fmt: skip
    ends = given.get("eos_token_id", [eos])
    near = 0
    behind = len(prefix)
    scores = due.sequences_scores if "num_beams" in given else [None] * ROWS
    for mine, other, score, due_score in zip(found.sequences, due.sequences, found.scores, scores, strict=True):
        said = [*prefix, *until_end(mine[behind:].tolist(), *ends)]
        expected = [*prefix, *until_end(other[1 + behind :].tolist(), *ends)]
        if "stopping_criteria" in given:  # behind another end they fill with EOS where PAD is 0
            said, expected = (filled_no_more(one, pad, eos) for one in (said, expected))
        is_near = due_score is not None and abs(score - due_score) < 1e-4
        assert said == expected or is_near, (name, engine, options, said, expected, score, due_score)
        near += said != expected
    return ROWS, near


# slow: 60 calls of each engine, what few might miss
@pytest.mark.parametrize("count", [3, pytest.param(60, marks=pytest.mark.slow)], ids=["few", "many"])
@pytest.mark.parametrize("name, engine", PAIRS)
def test_random_calls_equal_transformers(name, engine, count):
    numbers = random.Random(f"{name} {engine}" if count == 3 else f"many {name} {engine}")
    _, _, eos = family(name)
    total = near = 0
    for _ in range(1 if count == 3 and engine not in ("cpp", "kv_cache") else count):
        rows, ties = compare(name, engine, drawn(numbers, eos))
        total, near = total + rows, near + ties
    assert total and near <= max(1, total // 50)


PLACES = [("BART", "cpp"), ("BART", "kv_cache"), ("T5", "cpp"), ("Marian", "recompute")]


@pytest.mark.parametrize("renormalize, name, engine", by_turns([False, True], PLACES))
def test_repeating_beams_are_penalised_as_in_transformers(name, engine, renormalize):
    for penalty, beams in ((1.5, 3), (2.5, 4)):
        options = {"num_beams": beams, "repetition_penalty": penalty, "max_new_tokens": 8}
        assert compare(name, engine, {**options, "renormalize_logits": renormalize})[1] <= 1


def above(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Lifts some tokens, more so later ones, so that final scores are above 0, and unfinished hypotheses may win."""
    lifted = scores.clone()
    lifted[:, 5:40:3] += 1.5 * ids.shape[1]
    return lifted


def below(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Recognises log-probabilities by their values."""
    return torch.where(scores < -3.0, scores - 4.0, scores)


@pytest.mark.parametrize(
    "processor, engine, name, beams, penalty",
    covering([above, below], ["cpp", "kv_cache", "recompute"], [("T5", 3, 2.0), ("BART", 2, 1.0), ("Marian", 1, 1.0)]),
)
def test_user_processors_get_transformers_scores(processor, engine, name, beams, penalty):
    options = {"max_new_tokens": 9, "logits_processor": [processor], "renormalize_logits": False}
    if beams > 1:
        options |= {"num_beams": beams, "length_penalty": penalty, "early_stopping": False}
    assert compare(name, engine, options)[1] == 0


def ends_at(*tokens: int) -> Any:
    def criterion(input_ids, scores, **options):
        return torch.isin(input_ids[:, -1], torch.tensor(tokens))

    return criterion


@pytest.mark.parametrize("name, engine, beams", covering(["T5", "BART"], ["cpp", "kv_cache"], [1, 3]))
def test_criteria_stop_as_in_transformers(name, engine, beams):
    listed = transformers.StoppingCriteriaList
    _, _, eos = family(name)
    for criteria in (
        listed([ends_at(13, 37, 20, 41, 9)]),
        listed([ends_at(*range(3, 50, 2)), transformers.MaxLengthCriteria(5)]),
    ):
        options: dict[str, Any] = {"max_new_tokens": 10, "stopping_criteria": criteria}
        if beams > 1:
            options |= {"num_beams": beams, "length_penalty": 2.0}
        assert compare(name, engine, {**options, "eos_token_id": [eos]})[1] <= 1


@pytest.mark.parametrize("stated", [
    {"num_beams": 3, "length_penalty": 2.0, "repetition_penalty": 1.7},
    {"num_beams": 2, "no_repeat_ngram_size": 2, "early_stopping": True, "bad_words_ids": [[9], [7, 8]]},
    {"temperature": 0.3, "top_k": 4, "no_repeat_ngram_size": 1},
    {"max_length": 9, "num_beams": 4, "early_stopping": "never", "length_penalty": 2.0, "suppress_tokens": [5, 6, 9]},
])  # fmt: skip
def test_a_config_of_transformers_is_accepted(stated):
    model, pad, eos = family("T5")
    ids = sources(pad, eos)[:ROWS]
    config = transformers.GenerationConfig(
        eos_token_id=[eos, 13], pad_token_id=pad, decoder_start_token_id=pad, **{"max_new_tokens": 10, **stated}
        if "max_length" not in stated else stated,
    )  # fmt: skip
    with torch.inference_mode():
        due = model.generate(input_ids=ids, attention_mask=(ids != pad).long(), generation_config=config)
    converted = from_huggingface(model)
    mapping = {name: value for name, value in config.to_dict().items() if value is not None}
    for given in (config, mapping):
        found = generate(converted, ids, generation_config=given)
        rows = zip(found.tolist(), due.tolist(), strict=True)
        assert all(until_end(one, eos, 13) == until_end(other[1:], eos, 13) for one, other in rows)
    # What is given by name comes first, also where it is what it would have been without the config.
    plain = generate(converted, ids, generation_config=config, num_beams=1, max_new_tokens=4, max_length=None)
    words = ("repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "suppress_tokens")
    rest = {name: value for name, value in stated.items() if name in words}
    options: dict[str, Any] = {"max_new_tokens": 4, "beam_rules": "transformers", "eos_token_id": [eos, 13]}
    assert plain.shape[1] <= 4 and torch.equal(plain, generate(converted, ids, **options, **rest))
