"""The check for races, which the GPU tests use, finds a race."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.kernels.repeats import assert_repeats


def test_a_run_that_differs_is_named() -> None:
    counter = itertools.count()

    def call(late: int) -> list[torch.Tensor]:
        x = torch.ones(8)
        x[3] += 1e-7 * (next(counter) == late)
        return [torch.zeros(2), x + 0.0]

    assert_repeats(lambda: call(-1))
    counter = itertools.count()
    with pytest.raises(AssertionError, match=r"\b1\b.*\b41\b"):
        assert_repeats(lambda: call(42))
