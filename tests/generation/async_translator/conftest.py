"""A small translator, whose AsyncTranslators leave no thread behind."""

from __future__ import annotations

import threading

import pytest

from fastformer.data import ByteTokenizer
from fastformer.generation import Translator
from fastformer.models import Transformer
from tests.generation.small import tiny

SIZES = {"d_model": 16, "d_ff": 32, "num_heads": 2, "num_encoder_layers": 1, "num_decoder_layers": 1}


@pytest.fixture(scope="module")
def model() -> Transformer:
    model = tiny(**SIZES)
    model.embedding.weight.data *= 3  # a fresh model is nearly uniform
    return model


@pytest.fixture(scope="module")
def translator(model) -> Translator:
    return Translator(model, ByteTokenizer(), max_batch_size=16, max_batch_bytes=2**20)


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == "AsyncTranslator"]
