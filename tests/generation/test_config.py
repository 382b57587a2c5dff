"""What can't be meant is said, with the value that came; ids may come as people hold them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fastformer.generation.config import GenerationConfig
from fastformer.generation.inputs import as_batch, as_inputs


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2, "do_sample": True}, "expected do_sample or num_beams > 1, got both"),
        ({"num_beams": 2, "num_return_sequences": 3}, "at most num_beams 2, got 3"),
        ({"num_return_sequences": 2}, "expected num_return_sequences 1 for greedy"),
        ({"temperature": 0.0}, "expected temperature > 0"),
        ({"temperature": math.nan}, "expected temperature to be a finite number, got nan"),
        ({"repetition_penalty": math.nan}, "expected repetition_penalty to be a finite number, got nan"),
        ({"repetition_penalty": math.inf}, "expected repetition_penalty to be a finite number, got inf"),
        ({"length_penalty": -math.inf}, "expected length_penalty to be a finite number, got -inf"),
        ({"top_p": math.nan}, "expected top_p to be a finite number"),
        ({"top_p": 0.0}, r"top_p in \(0, 1\]"),
        ({"top_p": 1.1}, r"top_p in \(0, 1\]"),
        ({"top_k": -1}, "top_k >= 0"),
        ({"temperature": "hot"}, "expected temperature to be a number, got 'hot'"),
        ({"temperature": 0.5}, "expected do_sample=True with temperature 0.5"),
        ({"top_k": 5, "num_beams": 2}, "expected do_sample=True with top_k 5"),
        ({"top_p": 0.5}, "expected do_sample=True with top_p 0.5"),
        ({"max_new_tokens": 0}, "max_new_tokens of at least 1, got 0"),
        ({"max_new_tokens": 3.0}, "expected max_new_tokens to be an integer, got 3.0"),
        ({"num_beams": 2.0}, "expected num_beams to be an integer, got 2.0"),
        ({"num_beams": True}, "expected num_beams to be an integer, got True"),
        ({"num_beams": None}, "expected num_beams to be an integer, got None"),
        ({"num_beams": 0}, "at least 1, got 0 and 1"),
        ({"do_sample": 1}, "expected do_sample to be True or False, got 1"),
        ({"min_new_tokens": -1}, "min_new_tokens of at least 0, got -1"),
        ({"min_length": -1}, "min_length of at least 0, got -1"),
        ({"min_length": None}, "expected min_length to be an integer, got None"),
        ({"max_length": 0}, "max_length of at least 1, got 0"),
        ({"max_length": 2.0}, "expected max_length to be an integer, got 2.0"),
        ({"renormalize_logits": 0}, "expected renormalize_logits to be True or False, got 0"),
        ({"renormalize_logits": False}, "expected beam_rules='transformers' with renormalize_logits=False"),
        ({"stopping_criteria": 3}, "expected stopping_criteria to be a list, got 3"),
        ({"stopping_criteria": [3]}, r"expected stopping_criteria to hold functions of \(input_ids, scores\), got 3"),
        ({"generation_config": 3}, "transformers' GenerationConfig or a mapping, got int"),
        ({"generation_config": {"min_p": 0.5}}, "generation_config .*no option 'min_p'"),
        ({"generation_config": {"num_beam": 2}}, "generation_config .*did you mean 'num_beams'"),
        ({"generation_config": {"num_beams": 2.5}}, "expected num_beams to be an integer, got 2.5"),
        ({"max_lenght": 3}, "did you mean 'max_length'"),
        ({"beam_size": 3}, "did you mean 'num_beams'"),
        ({"max_tokens": 3}, "did you mean 'max_new_tokens'"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size >= 0"),
        ({"seed": 2**64}, r"expected a seed from -2\*\*63 to 2\*\*64 - 1, got 18446744073709551616"),
        ({"seed": 1.5}, "expected seed to be an integer"),
        ({"engine": 3}, "expected engine to be a name, got 3"),
        ({"engine": "kv_cache", "use_cache": False}, "expected engine or use_cache=False, got both: engine='kv_cache'"),
        ({"use_cache": None}, "expected use_cache to be True or False, got None"),
        ({"max_time": 0}, "expected max_time in seconds, more than 0, got 0"),
        ({"max_time": math.inf}, "expected max_time to be a finite number, got inf"),
        ({"max_time": "1s"}, "expected max_time to be a number, got '1s'"),
        ({"max_time": True}, "expected max_time to be a number, got True"),
        ({"repetition_penalty": 0.0}, "expected repetition_penalty > 0"),
        ({"num_return_sequences": 0}, "of at least 1, got 1 and 0"),
        (
            {"num_beams": 4, "num_beam_groups": 3, "diversity_penalty": 1.0},
            "a multiple of num_beam_groups, got 4 and 3",
        ),
        (
            {"num_beams": 4, "num_beam_groups": 2},
            "num_beam_groups > 1 together with a diversity_penalty > 0, got 2 and",
        ),
        ({"num_beams": 4, "diversity_penalty": 0.5}, "together with a diversity_penalty > 0, got 1 and 0.5"),
        ({"num_beams": 4, "num_beam_groups": 0}, "num_beam_groups of at least 1 and diversity_penalty of at least 0"),
        ({"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": -1}, "of at least 0, got 2 and -1"),
        ({"num_beam_groups": 2.0}, "expected num_beam_groups to be an integer, got 2.0"),
        ({"diversity_penalty": math.nan}, "expected diversity_penalty to be a finite number, got nan"),
        ({"beam_rules": "hf"}, "expected beam_rules to be 'tensor2tensor' or 'transformers', got 'hf'"),
        ({"beam_rules": None}, "expected beam_rules to be 'tensor2tensor' or 'transformers', got None"),
        ({"early_stopping": 1}, "expected early_stopping to be True, False or 'never', got 1"),
        ({"early_stopping": "always"}, "expected early_stopping to be True, False or 'never', got 'always'"),
        ({"early_stopping": "never"}, "expected beam_rules='transformers' with early_stopping='never': by tensor2"),
        (
            {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0, "beam_rules": "transformers"},
            "expected beam_rules='tensor2tensor' with num_beam_groups 2: transformers' rules have no groups",
        ),
        ({"eos_token_id": []}, "expected eos_token_id to be an id or some, got none"),
        ({"eos_token_id": "1"}, "expected eos_token_id to be a list, got '1'"),
        ({"eos_token_id": [1, 2.0]}, "expected eos_token_id to hold integers, got 2.0"),
        ({"eos_token_id": [1, True]}, "expected eos_token_id to hold integers, got True"),
        ({"eos_token_id": 1.0}, "expected eos_token_id to be a list, got 1.0"),
        ({"pad_token_id": 1.5}, "expected pad_token_id to be an integer, got 1.5"),
        ({"decoder_start_token_id": "0"}, "expected decoder_start_token_id to be an integer, got '0'"),
        ({"forced_bos_token_id": 2.0}, "expected forced_bos_token_id to be an integer, got 2.0"),
        ({"forced_eos_token_id": True}, "expected forced_eos_token_id to be an integer, got True"),
        ({"suppress_tokens": 3}, "expected suppress_tokens to be a list, got 3"),
        ({"suppress_tokens": [None]}, "expected suppress_tokens to hold integers, got None"),
        ({"suppress_tokens": None}, "expected suppress_tokens to be a list, got None"),
        ({"bad_words_ids": [3]}, "expected bad_words_ids to be a list, got 3"),
        ({"bad_words_ids": [[3], []]}, "expected each of bad_words_ids to hold ids, got an empty one"),
        ({"bad_words_ids": [["a"]]}, "expected bad_words_ids to hold integers, got 'a'"),
        ({"bad_words_ids": {3: 4}}, "expected bad_words_ids to be a list, got {3: 4}"),
        ({"logits_processor": 3}, "expected logits_processor to be a list, got 3"),
        ({"logits_processor": None}, "expected logits_processor to be a list, got None"),
        (
            {"logits_processor": [len, 3]},
            r"expected logits_processor to hold functions of \(input_ids, scores\), got 3",
        ),
        ({"num_beam": 2}, "no option 'num_beam' here; did you mean 'num_beams'?"),
        ({"zzz": 2}, "no option 'zzz' here; there are max_new_tokens, min_new_tokens"),
    ],
)
def test_errors(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        GenerationConfig.from_options(options)


def test_what_is_harmless_is_taken() -> None:
    for seed in (0, -(2**63), 2**64 - 1):
        torch.Generator().manual_seed(GenerationConfig(seed=seed, do_sample=True).seed)
    settings = GenerationConfig(num_beams=np.int64(3), top_k=0, length_penalty=1, min_new_tokens=4, max_new_tokens=4)
    assert settings.num_beams == 3 and settings.samples == 1
    assert type(settings.num_beams) is int
    assert GenerationConfig(do_sample=True, num_return_sequences=5).samples == 5
    assert GenerationConfig(num_beams=5, num_return_sequences=5).samples == 1
    assert GenerationConfig(max_time=2, use_cache=False).max_time == 2
    groups = GenerationConfig(num_beams=6, num_beam_groups=3, diversity_penalty=1, num_return_sequences=6)
    assert groups.num_beam_groups == 3
    assert GenerationConfig(engine="kv_cache").engine == "kv_cache"


def test_the_rules_have_penalties_of_their_own() -> None:
    assert GenerationConfig().alpha == 0.6 and GenerationConfig(beam_rules="transformers").alpha == 1.0
    for rules in ("tensor2tensor", "transformers"):
        assert GenerationConfig(beam_rules=rules, length_penalty=0).alpha == 0
    for stopping in (True, False, "never"):
        settings = GenerationConfig(beam_rules="transformers", early_stopping=stopping)
        assert settings.early_stopping == stopping


def test_lists_are_taken_as_people_hold_them_and_kept() -> None:
    ends = [np.int64(3), torch.tensor(4), 5]
    settings = GenerationConfig(eos_token_id=ends, suppress_tokens=np.array([6, 7]), bad_words_ids=[range(2), [9]])
    ends.append(6)
    assert settings.eos_token_id == (3, 4, 5) and settings.suppress_tokens == (6, 7)
    assert settings.bad_words_ids == ((0, 1), (9,))
    ids = (*settings.eos_token_id, *settings.suppress_tokens, *settings.bad_words_ids[0])
    assert all(type(token) is int for token in ids)
    assert GenerationConfig(eos_token_id=np.int32(3)).eos_token_id == (3,)
    assert GenerationConfig(eos_token_id=torch.tensor([3, 4])).eos_token_id == (3, 4)
    assert GenerationConfig(eos_token_id=0, pad_token_id=1).pad_token_id == 1
    hash(settings)


def test_processors_are_one_or_several() -> None:
    class Chain(list):  # Hugging Face's list of processors is one
        def __call__(self, input_ids, scores):
            raise AssertionError("its members are called")

    def keep(input_ids, scores):
        return scores

    for given in (keep, [keep], (keep,), Chain([keep])):
        assert GenerationConfig(logits_processor=given).logits_processor == (keep,)
    assert GenerationConfig().logits_processor == GenerationConfig(logits_processor=[]).logits_processor == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eos_token_id": 10}, "expected eos_token_id from 0 to 9, .* got 10"),
        ({"eos_token_id": [9, 10]}, "expected eos_token_id from 0 to 9, .* got 10"),
        ({"pad_token_id": -1}, "expected pad_token_id from 0 to 9, .* got -1"),
        ({"decoder_start_token_id": 10}, "expected decoder_start_token_id from 0 to 9"),
        ({"forced_bos_token_id": 10}, "expected forced_bos_token_id from 0 to 9"),
        ({"forced_eos_token_id": -2}, "expected forced_eos_token_id from 0 to 9, .* got -2"),
        ({"suppress_tokens": [3, -1]}, "expected suppress_tokens from 0 to 9, .* got -1"),
        ({"bad_words_ids": [[3], [4, 11]]}, "expected bad_words_ids from 0 to 9, .* got 11"),
        ({"num_beams": 11}, "expected num_beams of at most the vocabulary's 10, got 11"),
    ],
)
def test_ids_and_beams_lie_within_the_vocabulary(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        GenerationConfig(**options).check_model(10)
    GenerationConfig(eos_token_id=9, pad_token_id=0, suppress_tokens=[9], num_beams=10).check_model(10)


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([5, 6], [[5, 6]]),
        ([[5, 6], [7]], [[5, 6], [7, 9]]),
        (((5, 6), (7,)), [[5, 6], [7, 9]]),
        ([np.array([5, 6]), np.array([7])], [[5, 6], [7, 9]]),
        ([torch.tensor([5, 6]), torch.tensor([7])], [[5, 6], [7, 9]]),
        ([np.int32(5), np.int64(6)], [[5, 6]]),
        (np.array([[5, 6]], dtype=np.int32), [[5, 6]]),
        (np.array([5, 6], dtype=np.uint8), [[5, 6]]),
        (torch.tensor([5, 6], dtype=torch.int32), [[5, 6]]),
        (range(5, 7), [[5, 6]]),
    ],
    ids=str,
)
def test_ids_as_people_hold_them(ids, expected) -> None:
    batch = as_batch(ids, 9, torch.device("cpu"))
    assert batch.dtype == torch.long and batch.tolist() == expected


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ("text", "got str: turn text into ids with a tokenizer first"),
        (["some", "texts"], r"input_ids\[0\] holds something else"),
        (None, "got NoneType"),
        (7, "got int"),
        ([5.0], r"input_ids\[0\] holds something else: .*float"),
        ([[5], [True]], r"input_ids\[1\] holds something else: True and False are no ids"),
        ([[5], 6], r"input_ids\[1\] is 6, where others are lists"),
        ([torch.tensor(5.5)], r"input_ids\[0\] holds something else"),
        (np.array([0.5]), "got torch.float64"),
        (np.array(["a"]), "got ndarray"),
        (torch.zeros(2, 2, 2, dtype=torch.long), r"got torch.int64 \(2, 2, 2\)"),
        (torch.zeros(0, 2, dtype=torch.long), r"got torch.int64 \(0, 2\)"),
        (torch.ones(1, 2, dtype=torch.bool), "got torch.bool"),
    ],
    ids=str,
)
def test_what_is_no_batch_of_ids(ids, message) -> None:
    with pytest.raises(ValueError, match=message):
        as_batch(ids, 0, torch.device("cpu"))


def test_empty_inputs_are_found() -> None:
    empty: tuple[object, ...] = ([], [[]], [[5], []], [[0, 0], [5, 6]], torch.zeros(1, 2, dtype=torch.long))
    for ids in empty:
        with pytest.raises(ValueError, match="at least one token in each input, got an empty one"):
            as_inputs(ids, None, 0, torch.device("cpu"))


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([5, 0, 6], [[5, 0, 6]]),
        ([[5, 0, 6]], [[5, 0, 6]]),
        ([[0, 5, 0]], [[0, 5, 0]]),
        ([[5, 0, 0], [6], [0, 7]], [[5, 0, 0], [6], [0, 7]]),
        ([[5, 0, 6], [7, 8]], [[5, 0, 6], [7, 8]]),
        ([[5, 0, 6], [7, 8, 0], [0, 0, 9]], [[5, 0, 6], [7, 8], [9]]),  # padded by hand
        (torch.tensor([[5, 0, 6], [7, 8, 0], [0, 0, 9]]), [[5, 6], [7, 8], [9]]),
        (np.array([[5, 6, 0]]), [[5, 6]]),
    ],
    ids=str,
)
def test_what_is_padding_without_a_mask(ids, expected) -> None:
    batch, layout = as_inputs(ids, None, 0, torch.device("cpu"))
    rows = [row[:length] for row, length in zip(batch.tolist(), layout.seqlens.tolist(), strict=True)]
    assert rows == expected
    # Where no id marks padding, what a list or a tensor holds is all there is; a mask has the last word.
    batch, layout = as_inputs(ids, None, 0, torch.device("cpu"), marks_padding=False)
    given = ids if isinstance(ids, list) and isinstance(ids[0], list) else np.atleast_2d(np.asarray(ids)).tolist()
    assert [row[:n] for row, n in zip(batch.tolist(), layout.seqlens.tolist(), strict=True)] == given
    mask = torch.tensor([[1] * (len(row) - 1) + [0] * (max(map(len, given)) - len(row) + 1) for row in given])
    mask[:, 0] = 1
    for marks in (True, False):
        batch, layout = as_inputs(ids, mask, 0, torch.device("cpu"), marks_padding=marks)
        assert layout.seqlens.tolist() == [max(1, len(row) - 1) for row in given]
