"""Tests the benchmark of Python threads that share an encoder."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import many_callers
from fastformer.encoding.engine import Array

SIZES = {"vocab_size": 60, "d_model": 32, "num_heads": 4, "num_layers": 1, "d_ff": 48, "max_len": 128}
GIVEN = [text for name, size in SIZES.items() for text in (f"--{name}", str(size))]


COMMON = ["--rounds", "1", "--batch", "2", "--texts", "4", *GIVEN]


def test_a_line_for_each_precision(capsys: pytest.CaptureFixture[str]) -> None:
    threads = str(torch.get_num_threads())
    assert many_callers.main(["--callers", "3", "--threads", threads, "--precision", "fp32", "int8", *COMMON]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split(",")[0] for line in lines] == ["fp32", "int8"]


def test_other_bits_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    encode, numbers = many_callers.encode, itertools.count(1)

    def once_otherwise(*args: Any) -> Array:
        number, values = next(numbers), encode(*args)
        return np.nextafter(values, np.float32(1)) if number == 4 else values  # by one of the two callers

    monkeypatch.setattr(many_callers, "encode", once_otherwise)
    threads = str(torch.get_num_threads())
    assert many_callers.main(["--callers", "2", "--threads", threads, "--precision", "fp32", *COMMON]) == 1
