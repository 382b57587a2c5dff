"""`generate` of accelerated models on the C++ engine equals transformers' own on the original models."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process, stopping_criteria

from fastformer.checkpoints.hf import DECODER_FORMS, FAMILIES
from fastformer.generation.drafts import Certainty, Drafter, Odds
from fastformer.integrations import accelerate, report
from tests.checkpoints.present import VERSION
from tests.checks import assert_accurate
from tests.covering import by_turns
from tests.integrations import conversions, decoders
from tests.integrations.engine_calls import counted, outcome_of, pair_of

EVERY = (*conversions.CASES, *decoders.CASES)
# A variant of each family.
FIRST = {name.split()[0]: name for name in reversed(EVERY)} | {"T5": "T5 1.1"}


def test_every_family_has_a_case():
    names = {name.split()[0].lower().replace("_", "") for name in EVERY}
    assert {kind.replace("_", "") for kind, family in FAMILIES.items() if family.kind != "encoder"} <= names


MANY = {"max_new_tokens": 7, "num_beams": 3, "num_return_sequences": 2, "early_stopping": True, "length_penalty": 0.6}


def searches(name: str) -> list[dict[str, Any]]:
    length = 64 if name in decoders.CASES or "T5" in name else 24
    return [
        {"max_new_tokens": length, "do_sample": False},
        {"max_new_tokens": 12, "num_beams": 4, "do_sample": False},
        MANY,
    ]


@pytest.mark.parametrize("name", FIRST.values())
def test_tokens_are_those_of_transformers(name):
    is_left = name in decoders.CASES
    pair = pair_of(name, left=is_left)
    for options in ({"max_new_tokens": 20, "do_sample": False}, MANY):
        pair.check(**options)
    assert pair.near_ties <= pair.rows // 10


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_tokens_of_every_variant_on_either_side_of_padding(name):
    """Proves the conversion of each variant under generate.

    Outputs are longer than in the test of families, and padding is on both sides if the engine supports it.
    """
    for is_left in (False, True):
        is_served = is_left == (name in decoders.CASES) or name.startswith(("T5", "MT5", "M2M100"))
        pair = pair_of(name, left=is_left)
        for options in searches(name):
            pair.check(is_served=is_served, **options)
        assert pair.near_ties <= pair.rows // 10


# By the model_type or the family's name.
DRAWN: dict[str, Callable[[str, int], Any]] = {
    **dict.fromkeys(("Marian", "Bart", "MBart", "Pegasus", "M2M100", "T5", "MT5"), conversions.drawn),
    **dict.fromkeys(DECODER_FORMS, decoders.drawn),
}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", DRAWN)
def test_tokens_of_random_configs_on_either_side_of_padding(kind, seed):
    """Proves that 64 greedy tokens and two beam searches equal transformers' for randomly drawn options."""
    ties = rows = 0
    for is_left in (False, True):
        pair = pair_of(DRAWN[kind](kind, seed), left=is_left)
        for options in ({"max_new_tokens": 64, "do_sample": False}, *searches(kind)[1:]):
            if (
                kind == "M2M100"
            ):  # a PAD among new tokens, or behind the end, has no position there: see the differences
                config = pair.ours.config
                ends = [] if "num_beams" in options else [config.eos_token_id]
                options = options | {"suppress_tokens": [config.pad_token_id, *ends]}
            pair.check(is_served=is_left == (kind in DECODER_FORMS) or kind in ("T5", "MT5", "M2M100"), **options)
        ties, rows = ties + pair.near_ties, rows + pair.rows
    print(f"{kind} {seed}: {ties} near ties in {rows} rows")
    assert ties <= rows // 10


SERVED: dict[str, dict[str, Any]] = {
    "several ends": {"eos_token_id": [2, 13, 37, 9]},
    "no end": {"eos_token_id": None, "pad_token_id": 1},
    "least and most": {"min_new_tokens": 4, "max_length": 21},
    "min_length": {"min_length": 15, "max_new_tokens": 6},
    "forbidden": {"suppress_tokens": [7, 9], "bad_words_ids": [[5], [2], [11]], "min_new_tokens": 2},
    "forbidden at first": {"begin_suppress_tokens": [7, 8, 9, 10]},
    "none forbidden at first": {"begin_suppress_tokens": []},
    "forced": {"forced_bos_token_id": 6, "forced_eos_token_id": 2},
    "forced ends": {"forced_eos_token_id": [2, 6]},
    "normalised": {"renormalize_logits": True, "suppress_tokens": [7], "min_new_tokens": 3, "forced_eos_token_id": 2},
    "repetition": {"repetition_penalty": 1.4},
    "n-grams": {"no_repeat_ngram_size": 2, "bad_words_ids": [[5, 6], [9]]},
    "encoder": {"encoder_repetition_penalty": 1.3, "encoder_no_repeat_ngram_size": 2},
    "bias": {"sequence_bias": [[[9], -4.0], [[7, 8], 3.0]]},
    "no embeddings": {"inputs_embeds": None},
    "no cache": {"use_cache": False},
    "decay": {"exponential_decay_length_penalty": (3, 1.2)},
    "a processor": {"logits_processor": LogitsProcessorList([lambda ids, scores: scores.roll(ids.shape[1], 1)])},
    "a criterion": {"stopping_criteria": StoppingCriteriaList([lambda ids, scores, **_: ids[:, -1] % 7 == 3])},
    "allowed": {"prefix_allowed_tokens_fn": lambda row, ids: [2, 4 + row, 10 + len(ids), 30, 31]},
    "sampled": {"do_sample": True, "top_k": 9, "top_p": 0.9, "temperature": 0.8, "num_return_sequences": 3},
}  # fmt: skip


# Slow: the other number of beams. What an option does to scores knows nothing of the model.
@pytest.mark.parametrize("name, beams", by_turns(["Marian real", "gpt2 plain"], [3, 1]))
def test_options_have_transformers_meaning(name, beams):
    pair = pair_of(name, left=name == "gpt2 plain")
    for key, options in SERVED.items():
        is_sampled = "do_sample" in options
        options = {"max_new_tokens": 8, "num_beams": beams, "do_sample": False} | options
        if "max_length" in options:
            del options["max_new_tokens"]
        if is_sampled and beams > 1:
            options["num_return_sequences"] = 2
        if is_sampled:
            found, expected = pair.both(**options)  # the same generator draws from nearly the same numbers
            assert torch.equal(found, expected), key
        else:
            pair.check(**options)
    assert pair.near_ties <= pair.rows // 10


@pytest.mark.parametrize("kind", ["Marian real", "gpt2 plain"])
def test_a_search_that_finds_fewer_hypotheses_than_asked(kind):
    """One token is forced, so no second hypothesis has a score; transformers returns rows of -inf."""
    pair = pair_of(kind, left=kind == "gpt2 plain")
    found, expected = pair.both(
        max_new_tokens=1, num_beams=3, num_return_sequences=2, forced_eos_token_id=2, do_sample=False
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("beams", [1, 3])
def test_a_pad_of_zero_behind_the_end(beams):
    """transformers' beams ignore it, and fill with EOS."""
    pair = pair_of("gpt2 plain", left=True)
    found, expected = pair.both(
        max_new_tokens=10, num_beams=beams, eos_token_id=[32, 41], pad_token_id=0, do_sample=False
    )
    assert torch.equal(found, expected)
    fills = found[:, -1] == (0 if beams == 1 else 32)
    assert fills.any() and not fills.all()


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("order", [1, -1])
def test_the_larger_of_two_minimums_counts(order, beams):
    pair = pair_of("gpt2 plain", left=True)
    ends = [32, 41, 45]  # that come early
    for shorter, longer in ((2, 6), (6, 2)):
        own = [
            logits_process.MinLengthLogitsProcessor(12 + shorter, ends),
            logits_process.MinNewTokensLengthLogitsProcessor(12, longer, ends),
        ][::order]
        found, expected = pair.both(
            logits_processor=LogitsProcessorList(own), eos_token_id=ends, renormalize_logits=True,
            max_new_tokens=10, num_beams=beams, do_sample=False,
        )  # fmt: skip
        assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["llama grouped heads", "gpt2 plain"])
def test_tokens_up_to_the_last_position_and_beyond(name):
    """The last new token is never read, so it needs no position. Llama's angles have no end; GPT-2's table has one."""
    pair = pair_of(name, left=True, max_position_embeddings=16)
    longest = pair.inputs["input_ids"].shape[1]
    for more, is_served in ((1, True), (2, False)):
        options = {"max_new_tokens": 16 - longest + more, "min_new_tokens": 16 - longest + more, "do_sample": False}
        assert (outcome_of(pair, **pair.inputs, **options) > 0) == is_served


def test_what_the_caller_makes_has_its_own_ends(monkeypatch):
    """The call's ends are those of its config, whatever those of a processor or a criterion are."""
    pair = pair_of("gpt2 plain", left=True)
    ends = [2, 5, 13, 37, 9, 20, 33]
    early = {"eos_token_id": 41, "renormalize_logits": True}
    made: list[Callable[[], dict[str, Any]]] = [
        lambda: {"logits_processor": [logits_process.MinLengthLogitsProcessor(30, 5)]},
        lambda: {"logits_processor": [logits_process.MinLengthLogitsProcessor(20, 45)], **early},
        lambda: {"logits_processor": [logits_process.MinNewTokensLengthLogitsProcessor(12, 8, 5)]},
        lambda: {"logits_processor": [logits_process.MinNewTokensLengthLogitsProcessor(12, 8, 45)], **early},
        lambda: {"logits_processor": [logits_process.NoBadWordsLogitsProcessor([[2], [7]], None)]},
        lambda: {
            "logits_processor": [logits_process.NoBadWordsLogitsProcessor([[2], [37]], [2])],
            "eos_token_id": ends,
        },
        lambda: {"stopping_criteria": [stopping_criteria.EosTokenCriteria(ends[1:])], "min_new_tokens": 6},
    ]
    for beams in (1, 3):
        for make in made:
            outcomes = []
            with counted() as opened:
                for model in (pair.plain, pair.ours):
                    options = {"max_new_tokens": 10, "num_beams": beams, "do_sample": False} | make()
                    lists = {"logits_processor": LogitsProcessorList, "stopping_criteria": StoppingCriteriaList}
                    options |= {name: kind(options[name]) for name, kind in lists.items() if name in options}
                    try:
                        outcomes.append(model.generate(**pair.inputs, **options).tolist())
                    except IndexError as error:  # transformers' beams miss ends that only a criterion has
                        outcomes.append(type(error))
            assert outcomes[0] == outcomes[1] and opened == [1], options
    # A rule that was replaced is no longer the engine's.
    monkeypatch.setattr(
        logits_process.MinLengthLogitsProcessor, "__call__", lambda self, ids, scores: scores.roll(1, 1)
    )
    found, expected = pair.both(max_new_tokens=8, min_length=14, do_sample=False)
    assert torch.equal(found, expected)


def test_a_beginning_of_the_output_and_a_config():
    pair = pair_of("T5 1.1")
    beginning = torch.tensor([[0, 7, 9], [0, 5, 5], [0, 8, 30], [0, 9, 9]])
    pair.check(decoder_input_ids=beginning, max_new_tokens=9, num_beams=2)
    pair.check(decoder_input_ids=beginning[:, 1:], max_length=9)
    found, expected = pair.both(generation_config=GenerationConfig(max_new_tokens=7, num_beams=2, pad_token_id=0))
    assert torch.equal(found, expected)
    for model in (pair.plain, pair.ours):
        model.generation_config.num_beams = 3
        model.generation_config.forced_bos_token_id = 5
    found, expected = pair.both(max_new_tokens=6)
    assert torch.equal(found, expected) and (found[:, 1] == 5).all()
    found, expected = pair.both(max_new_tokens=6.0, num_beams=1)
    assert torch.equal(found, expected)


def test_a_single_prompt_and_plain_ids():
    pair = pair_of("llama grouped heads", left=True)
    ids = pair.inputs["input_ids"]
    for model in (pair.plain, pair.ours):
        model.generation_config.pad_token_id = 1
    with counted() as opened:
        for given in (ids[:1], ids):  # PAD in ids says what is padding
            torch.testing.assert_close(
                pair.ours.generate(given, max_new_tokens=9), pair.plain.generate(given, max_new_tokens=9)
            )
    assert opened == [2]


DRAFTED: dict[str, dict[str, Any]] = {
    "whole": {},
    "least": {"min_new_tokens": 12},
    "ends": {"eos_token_id": [5, 9]},
    "repetition": {"repetition_penalty": 1.1},
    "n-grams": {"no_repeat_ngram_size": 3, "bad_words_ids": [[5, 6], [9]]},
    "a processor": {"logits_processor": LogitsProcessorList([lambda ids, scores: scores.roll(int(ids[0, -1]) % 3, 1)])},
    "a criterion": {"stopping_criteria": StoppingCriteriaList([lambda ids, scores, **_: ids[:, -1] % 7 == 3])},
    "scores": {"output_scores": True, "output_logits": True, "return_dict_in_generate": True},
    "sampled": {"do_sample": True, "top_k": 9, "temperature": 0.3},
    "options of drafts": {"num_assistant_tokens": 3, "num_assistant_tokens_schedule": "constant"},
}


def smaller(pair: Any) -> tuple[Any, Any]:
    """Returns a model that drafts for a pair, unchanged and accelerated: the pair's model with other weights."""
    small = copy.deepcopy(pair.plain)
    torch.manual_seed(3)
    with torch.no_grad():
        for part, parameter in small.named_parameters():
            if "positions" not in part:
                parameter.mul_(1 + 0.02 * torch.randn_like(parameter))
    return small, accelerate(copy.deepcopy(small))


# Slow: the other drafts of each family.
@pytest.mark.parametrize(
    "name, drafts",
    by_turns(
        [
            "llama grouped heads",
            "gpt2 plain",
            "qwen3 wide heads",
            "gemma2 capped",
            "T5 1.1",
            "Marian real",
            "Bart real",
        ],
        ["lookup", "assistant", "accelerated assistant"],
    ),
)
def test_assisted_decoding_is_plain_decoding(name, drafts, calls_of, monkeypatch):
    """Tokens, scores and draws are those without drafts, on the engine and in transformers."""
    monkeypatch.setattr(Odds, "count", lambda self, costs: min(3, len([*costs])))  # drafts of this model don't pay
    monkeypatch.setattr(Certainty, "chances", lambda self: [math.inf])
    pair = pair_of(name, left=name in decoders.CASES)
    reports = calls_of(Drafter, "learn")
    pair.inputs = {name: value[:1] for name, value in pair.inputs.items()}
    small = smaller(pair)
    drafting = {
        "lookup": {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 1},
        "assistant": {"assistant_model": small[0]},
        "accelerated assistant": {"assistant_model": small[1]},
    }[drafts]
    for key, options in DRAFTED.items():
        options = {"max_new_tokens": 16, "do_sample": False} | options
        torch.manual_seed(0)
        expected = pair.ours.generate(**pair.inputs, **options)
        torch.manual_seed(0)
        with counted() as opened:
            found = pair.ours.generate(**pair.inputs, **options, **drafting)
        assert opened[0] == (1 if drafts == "lookup" else 2), key  # a batch for each model
        if key == "scores":
            for one in ("sequences", "scores", "logits"):
                torch.testing.assert_close(found[one], expected[one], rtol=0, atol=0)
            continue
        assert torch.equal(found, expected), key
        if key != "sampled":
            assert torch.equal(found, pair.plain.generate(**pair.inputs, **options)), key
    drafted, accepted = (sum(sum(report.args[place]) for report in reports) for place in (2, 3))
    assert drafted > 10 and (accepted or drafts == "lookup")


def test_assisted_decoding_that_the_engine_leaves_to_transformers():
    """The result is that of transformers, or its error is."""
    pair = pair_of("T5 1.1")
    pair.inputs = {name: value[:1] for name, value in pair.inputs.items()}
    small, _ = smaller(pair)
    decoder_only = pair_of("llama grouped heads", left=True).plain
    for is_served, options in (
        *([(True, {"assistant_model": small})] if VERSION >= (5, 22) else []),  # before, a TypeError
        (True, {"prompt_lookup_num_tokens": 3, "repetition_penalty": 1.1}),
        (False, {"assistant_model": small, "use_mtp": None, "assistant_ensemble_weight": 0.5}),
        (True, {"assistant_model": small, "num_beams": 2}),
        (False, {"assistant_model": decoder_only}),
        (False, {"assistant_model": "no model"}),
        (False, {"assistant_model": small, "use_cache": False}),
    ):
        opened = outcome_of(pair, **pair.inputs, max_new_tokens=12, do_sample=False, **options)
        assert (opened > 0) == is_served, options
    pair = pair_of("llama grouped heads", left=True)
    rows = torch.tensor([[5, 6, 7], [8, 9, 7]])
    for drafting in ({"prompt_lookup_num_tokens": 2}, {"assistant_model": pair.plain}):
        for model in (pair.plain, pair.ours):  # transformers' own error
            with pytest.raises(ValueError, match="batch"):
                model.generate(rows, max_new_tokens=3, **drafting)


class Listener:
    """A streamer that stores what it receives."""

    def __init__(self) -> None:
        self.told: list[list[int]] = []
        self.is_over = False

    def put(self, value: Any) -> None:
        self.told.append(value.flatten().tolist())

    def end(self) -> None:
        self.is_over = True


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.2}], ids=["whole", "by steps"])
def test_a_streamer_gets_the_same_tokens(options):
    pair = pair_of("gpt2 plain", left=True)
    inputs = {name: value[1:2] for name, value in pair.inputs.items()}
    told = []
    for model in (pair.plain, pair.ours):
        listener = Listener()
        model.generate(**inputs, max_new_tokens=9, streamer=listener, **options)
        assert listener.is_over
        told.append(listener.told)
    assert told[0] == told[1]


UNSERVED: dict[str, dict[str, Any]] = {
    "use_cache=None": {"use_cache": None},
    "output_attentions": {"output_attentions": True, "return_dict_in_generate": True},
    "cache_implementation": {"cache_implementation": "static", "return_dict_in_generate": True},
    "use_cache=True": {"use_cache": True, "return_dict_in_generate": True},
    "offloaded": {"cache_implementation": "offloaded"},
    "position_ids": {"position_ids": None},
    "assistant_early_exit": {"assistant_early_exit": 1},
    "mask": {"attention_mask": torch.tensor([[1, 1, 0, 1, 1, 0, 1, 1, 1, 1, 1, 1]])},
    "right": {"attention_mask": torch.tensor([[1] * 9 + [0] * 3])},
    "positions": {"max_new_tokens": 90},
}


@pytest.mark.parametrize("reason, options", UNSERVED.items())
def test_unsupported_options_use_transformers_code(reason, options, caplog):
    pair = pair_of("llama grouped heads", left=True)
    pair.inputs = {name: value[:1] for name, value in pair.inputs.items()}
    if "position_ids" in options:
        options = {"position_ids": torch.arange(12)[None]}
    options = {"max_new_tokens": 6} | options
    with caplog.at_level(logging.DEBUG, "fastformer"):
        if reason == "offloaded" and not torch.cuda.is_available():  # it needs a GPU for its streams
            # The error is PyTorch's, and differs between its builds.
            with pytest.raises((AssertionError, RuntimeError)) as expected:
                pair.plain.generate(**pair.inputs, **options)
            with pytest.raises(expected.type):
                pair.ours.generate(**pair.inputs, **options)
            return
        found, expected = pair.both(is_served=False, **options)
    if not isinstance(found, torch.Tensor):
        found, expected = found.sequences, expected.sequences
    assert torch.equal(found, expected)
    assert reason in caplog.text


def test_a_published_gemma_names_a_kind_of_cache():
    """Gemma 2's generation_config has a cache_implementation, which changes no token."""
    pair = pair_of(FIRST["gemma2"], left=True)
    for model in (pair.plain, pair.ours):
        model.generation_config.cache_implementation = "hybrid"
    found, expected = pair.both(max_new_tokens=5, do_sample=False)
    assert torch.equal(found, expected) and "engine" in report(pair.ours).generate[""]
    for model in (pair.plain, pair.ours):
        model.generation_config.guidance_scale = 1.5  # the report says so as well
        model.generation_config.cache_implementation = None
    pair.inputs = {name: value[:1] for name, value in pair.inputs.items()}
    found, expected = pair.both(is_served=False, max_new_tokens=5, do_sample=False)
    assert torch.equal(found, expected) and "guidance_scale" in report(pair.ours).generate[""]


@pytest.mark.parametrize("name", ["phi3 longrope", "llama grouped heads"])
def test_longrope_beyond_the_original_length(name):
    """The longest prompt decides how all tokens rotate. If a search crosses the length, transformers' loop runs it."""
    rope, old = decoders.LONGROPE | {"original_max_position_embeddings": 8, "long_factor": [1.5, 4.0, 9.0]}, {}
    if name.startswith("phi3"):
        old = {"original_max_position_embeddings": 8}
    else:  # heads of 4 features, all of which turn
        rope |= {"short_factor": [1.0, 1.2], "long_factor": [1.5, 4.0], "partial_rotary_factor": 1.0, "factor": 12.0}
    pair = pair_of(name, left=True, rope_parameters=rope, max_position_embeddings=96, **old)
    every = dict(pair.inputs)

    def check(first: int, end: int, new: int, *, is_served: bool = True, **options: Any) -> None:
        pair.inputs = {key: value[first:end] for key, value in every.items()}
        pair.check(is_served=is_served, max_new_tokens=new, do_sample=False, **options)

    check(0, 4, 20)  # prompts of 12, 5, 2 and 7 tokens
    check(1, 3, 3)
    check(1, 3, 9, is_served=False)  # which leaves the modules with the other angles
    check(0, 1, 9)
    check(2, 3, 4)
    check(0, 4, 6, num_beams=3)
    assert pair.near_ties <= pair.rows // 10
    # A prompt without padding, whose rows are NaN in transformers' fp64.
    given = {key: value[:1] for key, value in every.items()} | {"max_new_tokens": 8, "do_sample": False}
    given |= {"return_dict_in_generate": True, "output_logits": True}
    exact = copy.deepcopy(pair.plain).double()
    expected, plain, found = (torch.stack(model.generate(**given).logits) for model in (exact, pair.plain, pair.ours))
    assert_accurate(found, plain, expected)


@pytest.mark.slow
def test_a_left_padded_source_errs_within_the_rounding_of_its_weights():
    """Proves that the error of a BART with padding on the left is within the effect of rounding its weights.

    It is compared with the same model whose weights were rounded to fp32 in another way, computed in fp64. Scores are
    that sensitive: they change by up to 1e-3.
    """
    pair = pair_of("Bart zero pad", left=True)
    exact = copy.deepcopy(pair.plain).double()
    options = {"max_new_tokens": 24, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}

    def scores(model: Any) -> torch.Tensor:
        found = torch.stack(model.generate(**pair.inputs | options).scores).double()
        return found.masked_fill(found.isinf(), 0)

    expected = scores(exact)
    ours = (scores(pair.ours) - expected).abs().max()
    rounded = []
    for seed in range(8):
        torch.manual_seed(seed)
        moved = copy.deepcopy(exact)
        with torch.no_grad():
            for parameter in moved.parameters():
                parameter.mul_(1 + (torch.rand_like(parameter) - 0.5) * 2**-23)
        rounded.append((scores(moved) - expected).abs().max())
    assert ours <= 2 * max(rounded)


@pytest.mark.parametrize("length", [1, 11])
def test_a_mask_of_ones_for_other_ids_uses_transformers_code(length):
    pair = pair_of("llama grouped heads", left=True)
    ids, mask = pair.inputs["input_ids"][:1], torch.ones(1, length, dtype=torch.long)
    assert outcome_of(pair, ids, attention_mask=mask, max_new_tokens=6) == 0


def test_unknown_options_are_transformers_errors():
    pair = pair_of("Marian real")
    for options in ({"beam_size": 3}, {"max_length": 1}, {"streamer": Listener(), "num_beams": 2}):
        with pytest.raises(ValueError) as expected:
            pair.plain.generate(**pair.inputs, **options)
        with pytest.raises(ValueError) as found:
            pair.ours.generate(**pair.inputs, **options)
        assert str(found.value) == str(expected.value)
    with pytest.raises(IndexError):
        pair.ours.generate(torch.full((1, 4), 999), max_new_tokens=3)
    with pytest.raises(ZeroDivisionError):
        pair.ours.generate(**pair.inputs, logits_processor=LogitsProcessorList([lambda ids, scores: 1 // 0]))
    pair.check(max_new_tokens=5)  # nothing of it stays


ODD: list[dict[str, Any]] = [
    {"num_beams": 0},
    {"num_beams": True},
    {"num_beams": torch.tensor(2)},
    {"length_penalty": 1e4},
    {"length_penalty": float("nan")},
    {"length_penalty": float("inf")},
    {"length_penalty": -60.0},
    {"length_penalty": "1"},
    {"eos_token_id": [[2]]},
    {"eos_token_id": 10**10},
]


def test_odd_values_are_transformers_matter():
    """Tokens or errors are those of transformers."""
    pair = pair_of("gpt2 plain", left=True)
    for odd in ODD:
        options = {"num_beams": 2 if "length_penalty" in odd else 1, "max_new_tokens": 6, "do_sample": False}
        outcome_of(pair, **pair.inputs, **options | odd)


def test_damaged_weights_are_an_error():
    pair = pair_of("Bart real")
    for value, is_allowed in ((-float("inf"), True), (float("nan"), False), (float("inf"), False)):
        for model in (pair.plain, pair.ours):
            model.final_logits_bias[0, 24] = value  # a token that it would say
        for beams in (1, 3):
            if is_allowed:
                found, expected = pair.both(max_new_tokens=6, num_beams=beams)
                assert torch.equal(found, expected) and not (found == 24).any()
            else:
                with pytest.raises(ValueError, match="NaN"):
                    pair.ours.generate(**pair.inputs, max_new_tokens=6, num_beams=beams)


def test_a_pad_beyond_the_vocabulary():
    """Some published configs have -1. transformers' model fails to read it in a batch, and never reads it otherwise."""
    pair = pair_of("gpt2 plain", left=True)
    options = {"max_new_tokens": 8, "pad_token_id": -1, "eos_token_id": [6, 45, 37], "do_sample": False}
    for model in (pair.plain, pair.ours):
        for more in ({}, {"repetition_penalty": 1.2}):
            with pytest.raises(IndexError):
                model.generate(**pair.inputs, **options, **more)
    found, expected = pair.both(**options, num_beams=2)
    assert torch.equal(found, expected)
    pair.inputs = {name: value[:1] for name, value in pair.inputs.items()}
    found, expected = pair.both(**options)
    assert torch.equal(found, expected)


def test_a_sequence_handed_in_by_its_encoder():
    pair = pair_of("Bart real")
    for model in (pair.plain, pair.ours):
        model.generation_config.max_new_tokens = 6
    memory = pair.plain.get_encoder()(**pair.inputs)
    with counted() as opened:
        found = pair.ours.generate(encoder_outputs=memory, attention_mask=pair.inputs["attention_mask"])
    assert opened == [0] and torch.equal(found, pair.plain.generate(**pair.inputs))
    # What waits until transformers' own loop asks for it: the encoder and the cache.
    pair.inputs["attention_mask"] = pair.inputs["attention_mask"].flip(1)
    sampled = {"do_sample": True, "num_return_sequences": 2}
    for options in ({}, {"num_beams": 3}, sampled, {"cache_implementation": "static"}):
        found, expected = pair.both(is_served=False, **options)
        assert torch.equal(found, expected)
