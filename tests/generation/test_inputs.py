"""Token ids are accepted in every form, padding is recognised, and wrong ids are refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fastformer.generation.inputs import input_rows, rows_of
from tests.covering import each


@each(
    "ids, expected",
    [
        ([5, 6], [[5, 6]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
        (((5, 6), (7,)), [[5, 6], [7]]),
        ([np.array([5, 6]), np.array([7])], [[5, 6], [7]]),
        ([torch.tensor([5, 6]), torch.tensor([7])], [[5, 6], [7]]),
        ([np.int32(5), np.int64(6)], [[5, 6]]),
        (np.array([[5, 6]], dtype=np.int32), [[5, 6]]),
        (np.array([5, 6], dtype=np.uint8), [[5, 6]]),
        (torch.tensor([5, 6], dtype=torch.int32), [[5, 6]]),
        (range(5, 7), [[5, 6]]),
    ],
)
def test_all_forms_of_ids(ids, expected) -> None:
    rows, _ = rows_of(ids)
    assert rows == expected and all(type(token) is int for row in rows for token in row)


@each(
    "ids, message",
    [
        ("text", "got str: turn text into ids with a tokenizer first"),
        (["some", "texts"], r"input_ids\[0\] holds something else"),
        (None, "got NoneType"),
        (7, "got int"),
        ([5.0], r"input_ids\[0\] holds something else: .*float"),
        ([[5], [True]], r"input_ids\[1\] holds something else: True and False are not ids"),
        ([[5], 6], r"input_ids\[1\] is 6, where others are lists"),
        ([torch.tensor(5.5)], r"input_ids\[0\] holds something else"),
        (np.array([0.5]), "got torch.float64"),
        (np.array(["a"]), "got ndarray"),
        (torch.zeros(2, 2, 2, dtype=torch.long), r"got torch.int64 \(2, 2, 2\)"),
        (torch.zeros(0, 2, dtype=torch.long), r"got torch.int64 \(0, 2\)"),
        (torch.ones(1, 2, dtype=torch.bool), "got torch.bool"),
    ],
)
def test_other_values_are_refused(ids, message) -> None:
    with pytest.raises(ValueError, match=message):
        rows_of(ids)
    with pytest.raises(ValueError, match=r"\binput_ids\b"):
        input_rows(ids, None, 0)


def test_empty_inputs_are_noticed() -> None:
    empty: tuple[object, ...] = ([], [[]], [[5], []], [[0, 0], [5, 6]], torch.zeros(1, 2, dtype=torch.long))
    for ids in empty:
        with pytest.raises(ValueError, match="empty"):
            input_rows(ids, None, 0)


@each(
    "ids, expected",
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
)
def test_padding_without_a_mask(ids, expected) -> None:
    assert input_rows(ids, None, 0) == expected
    # Where no id marks padding, what a list or a tensor holds is all there is; a mask has the last word.
    given = ids if isinstance(ids, list) and isinstance(ids[0], list) else np.atleast_2d(np.asarray(ids)).tolist()
    assert input_rows(ids, None, 0, marks_padding=False) == given
    mask = torch.tensor([[1] * (len(row) - 1) + [0] * (max(map(len, given)) - len(row) + 1) for row in given])
    mask[:, 0] = 1
    for marks in (True, False):
        assert input_rows(ids, mask, 0, marks_padding=marks) == [row[: max(1, len(row) - 1)] for row in given]
    holes = torch.ones_like(mask)
    holes[:, 0] = 0
    if mask.shape[1] > 1 and min(map(len, given)) == mask.shape[1]:
        assert input_rows(ids, holes, 0) == [row[1:] for row in given]
