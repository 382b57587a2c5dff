"""What can't be meant is said, with the value that came; ids may come as people hold them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fastformer.generation.inputs import as_batch, right_padded
from fastformer.generation.settings import GenerationSettings


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
        ({"min_new_tokens": 5, "max_new_tokens": 4}, "min_new_tokens of at most max_new_tokens 4, got 5"),
        ({"min_new_tokens": -1}, "min_new_tokens of at least 0, got -1"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size >= 0"),
        ({"eos_token_id": 0, "pad_token_id": 0}, "expected two ids for eos_token_id and pad_token_id, got 0 for both"),
        ({"seed": 2**64}, r"expected a seed from -2\*\*63 to 2\*\*64 - 1, got 18446744073709551616"),
        ({"seed": 1.5}, "expected seed to be an integer"),
        ({"engine": 3}, "expected engine to be a name, got 3"),
        ({"num_beam": 2}, "no option 'num_beam' here; did you mean 'num_beams'?"),
        ({"zzz": 2}, "no option 'zzz' here; there are max_new_tokens, min_new_tokens"),
    ],
)
def test_errors(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        GenerationSettings.from_options(options)


def test_what_is_harmless_is_taken() -> None:
    for seed in (0, -(2**63), 2**64 - 1):
        torch.Generator().manual_seed(GenerationSettings(seed=seed, do_sample=True).seed)
    settings = GenerationSettings(num_beams=np.int64(3), top_k=0, length_penalty=1, min_new_tokens=4, max_new_tokens=4)
    assert settings.num_beams == 3 and settings.samples == 1
    assert GenerationSettings(do_sample=True, num_return_sequences=5).samples == 5


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
    empty: tuple[list, ...] = ([], [[]], [[5], []], [[0, 0]])
    for ids in empty:
        with pytest.raises(ValueError, match="at least one token in each input, got an empty one"):
            right_padded(as_batch(ids, 0, torch.device("cpu")), None, 0)
