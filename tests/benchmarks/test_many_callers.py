"""Tests the benchmark of Python threads that share an encoder."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from benchmarks import many_callers
from fastformer.encoding.engine import Array, EncoderEngine
from fastformer.models import BERT, BERTConfig

SIZES = {"vocab_size": 60, "d_model": 32, "num_heads": 4, "num_layers": 1, "d_ff": 48, "max_len": 128}
GIVEN = [text for name, size in SIZES.items() for text in (f"--{name}", str(size))]


def test_a_line_for_each_way(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--callers", "3", "--threads", "1", "--precision", "fp32", "int8", "--batch", "2", "--texts", "4"]
    assert many_callers.main([*given, "--rounds", "1", *GIVEN]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split(",")[0] for line in lines] == ["fp32", "int8"]


def test_other_bits_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    encode, numbers = many_callers.encode, itertools.count(1)

    def once_otherwise(*args: Any) -> Array:
        number, found = next(numbers), encode(*args)
        return np.nextafter(found, np.float32(1)) if number == 4 else found  # by one of the two callers

    monkeypatch.setattr(many_callers, "encode", once_otherwise)
    given = ["--callers", "2", "--threads", "1", "--precision", "fp32", "--batch", "2", "--texts", "4"]
    assert many_callers.main([*given, "--rounds", "1", *GIVEN]) == 1


def test_every_caller_gets_all_its_texts() -> None:
    engine = EncoderEngine(BERT(BERTConfig(**SIZES)).eval())
    texts = many_callers.draw_texts(5, 60)
    _, found = many_callers.seconds_of(engine, texts, 2, 3)
    assert [each.shape for each in found] == [(5, 32)] * 3
