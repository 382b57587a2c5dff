"""Every option of `GenerationConfig` does something: another value gives another result, and the table is whole."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from fastformer.data import ByteTokenizer
from fastformer.generation import generate
from fastformer.generation.config import OPTIONS
from tests.generation.small import watch_steps

SOURCE, PROMPT = [[5, 6, 7, 8]], [[9, 6, 7]]
LONG = {"max_new_tokens": 12, "min_new_tokens": 12}
BEAMS = {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 8}
SAMPLES = {"do_sample": True, "seed": 3, **LONG}
RULES = {**BEAMS, "beam_rules": "transformers", "eos_token_id": [9, 12, 15, 20, 24, 31]}


def worst(input_ids: Tensor, scores: Tensor) -> Tensor:
    return scores.where(scores.isinf(), -scores)


def louder(input_ids: Tensor, scores: Tensor) -> Tensor:
    return 3 * scores


def third(input_ids: Tensor, scores: Tensor, **options: Any) -> bool:
    return input_ids.shape[1] > 3


FOR_PROMPTS = ("window", "schema", "regex", "choices", "grammar")
# By option: two values, and the other options of both searches.
CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "max_new_tokens": (4, 5, {"min_new_tokens": 5}),
    "min_new_tokens": (0, 9, {"max_new_tokens": 12, "eos_token_id": [*range(3, 40)]}),
    "max_length": (5, 6, {"min_new_tokens": 9}),
    "min_length": (0, 9, {"max_new_tokens": 12, "eos_token_id": [*range(3, 40)]}),
    "num_beams": (1, 4, LONG),
    "beam_rules": ("tensor2tensor", "transformers", {**BEAMS, "eos_token_id": [9, 12, 15, 20, 24, 31]}),
    "length_penalty": (-3.0, 3.0, RULES),
    "early_stopping": (True, False, {"num_beams": 4, "max_new_tokens": 16, "eos_token_id": [*range(3, 40)]}),
    "do_sample": (False, True, {"seed": 3, **LONG}),
    "temperature": (0.1, 5.0, SAMPLES),
    "top_k": (1, 0, SAMPLES),
    "top_p": (1e-6, 1.0, SAMPLES),
    "repetition_penalty": (1.0, 9.0, LONG),
    "no_repeat_ngram_size": (0, 1, LONG),
    "num_return_sequences": (1, 2, {"num_beams": 2, "max_new_tokens": 3}),
    "num_beam_groups": (2, 4, {**BEAMS, "diversity_penalty": 5.0}),
    "diversity_penalty": (1e-3, 50.0, {**BEAMS, "num_beam_groups": 4}),
    "suppress_tokens": ([], [*range(3, 20)], LONG),
    "bad_words_ids": ([], [[token] for token in range(3, 20)], LONG),
    "shortlist": ([], [*range(3, 10)], LONG),
    "forced_bos_token_id": (None, 20, LONG),
    "forced_eos_token_id": (None, 20, LONG),
    "logits_processor": ([], worst, LONG),
    "renormalize_logits": (False, True, {**RULES, "logits_processor": louder}),
    "stopping_criteria": ([], third, LONG),
    "stop_strings": ([], [chr(byte) for byte in range(37)], LONG),
    "schema": (None, {"const": "!"}, LONG),
    "regex": (None, "[!-$]{2}", LONG),
    "choices": ([], ["!!", "##"], LONG),
    "grammar": (None, 'start: "!" | "$"', LONG),
    "window": ("slide", "stop", {"max_new_tokens": 130}),  # with "stop" it doesn't fit
    "max_time": (None, 1e-9, LONG),
    "eos_token_id": (None, [*range(3, 40)], {"max_new_tokens": 12}),
    "pad_token_id": (None, 30, {"max_new_tokens": 12, "num_return_sequences": 2, **BEAMS}),
    "decoder_start_token_id": (None, 20, LONG),
    "use_cache": (True, False, LONG),
    "engine": ("kv_cache", "recompute", LONG),
    "precision": (None, "bf16", LONG),
    "cache_dtype": (None, "int8", {**LONG, "engine": "cpp"}),
    "seed": (1, 2, {"do_sample": True, **LONG}),
}


@pytest.mark.parametrize("name", CASES)
def test_another_value_of_an_option_gives_another_result(name, model, gpt, monkeypatch) -> None:
    first, second, more = CASES[name]
    used, ids = (gpt, PROMPT) if name in FOR_PROMPTS else (model, SOURCE)
    steps = watch_steps(monkeypatch)
    results: list[Any] = []
    for value in (first, second):
        options = {**more, name: value, "return_dict_in_generate": True, "tokenizer": ByteTokenizer()}
        try:
            out = generate(used, ids, **options)
            # The result of an engine differs in how it is computed alone.
            done = [*steps] if name in ("use_cache", "engine") else None
            results.append((out.sequences.tolist(), out.scores.tolist(), done))
        except ValueError as error:
            results.append(str(error))
        steps.clear()
    assert results[0] != results[1]
    assert not [each for each in results if isinstance(each, str)] or name == "window"


def test_the_table_is_whole() -> None:
    # The first changes no result: test_drafts.py. The second has no value without a Generator: test_adapters.py.
    assert {*CASES} == {*OPTIONS} - {"prompt_lookup_num_tokens", "adapter"}
