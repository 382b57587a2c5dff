"""Small models of each kind whose outputs vary."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastformer import requests as base_requests
from fastformer.baseline import LSTMSeq2Seq
from fastformer.generation import Ensemble, requests, scheduler
from fastformer.models import GPT, Transformer
from tests.generation.small import VOCAB, louder


@pytest.fixture(scope="session")
@torch.inference_mode(False)  # whichever test comes first
def model() -> Any:
    torch.manual_seed(1)
    settings = {"d_model": 32, "d_ff": 64, "num_heads": 4, "max_len": 128, "tie_embeddings": False}
    return louder(Transformer.from_preset("tiny", vocab_size=VOCAB, **settings))


@pytest.fixture(scope="session")
@torch.inference_mode(False)  # whichever test comes first
def gpt() -> Any:
    torch.manual_seed(1)
    settings = {"d_model": 32, "num_layers": 2, "num_heads": 4, "max_len": 128, "tie_embeddings": False}
    return louder(GPT.from_preset("tiny", vocab_size=VOCAB, **settings), 8)  # looks at something in particular


@pytest.fixture(scope="session")
@torch.inference_mode(False)  # whichever test comes first
def hybrid() -> Any:
    """A model with layers of linear attention."""
    torch.manual_seed(1)
    linear = {"linear_key_heads": 2, "linear_value_heads": 4, "linear_key_dim": 6, "linear_value_dim": 9}
    settings = {"d_model": 32, "num_layers": 3, "num_heads": 4, "max_len": 128, "attention_gate": True, **linear}
    config = {"linear_layers": (True, False, True), "tie_embeddings": False, "d_ff": 64, **settings}
    return louder(GPT.from_preset("qwen3-small", vocab_size=VOCAB, **config), 8)


@pytest.fixture(scope="session")
@torch.inference_mode(False)  # whichever test comes first
def lstm() -> LSTMSeq2Seq:
    torch.manual_seed(1)
    model = LSTMSeq2Seq(vocab_size=VOCAB, d_model=32, num_layers=2).eval()
    for parameter in model.parameters():
        parameter.data *= 3
    return model


@pytest.fixture(scope="session")
@torch.inference_mode(False)  # whichever test comes first
def ensemble(model) -> Ensemble:
    torch.manual_seed(2)
    settings = {"d_model": 16, "d_ff": 32, "num_heads": 2, "num_decoder_layers": 1, "max_len": 200}
    other = Transformer.from_preset("tiny", vocab_size=VOCAB, tie_embeddings=False, **settings)
    return Ensemble([model, louder(other)], [3, 1])


@pytest.fixture(params=["model", "gpt", "lstm"])
def any_model(request) -> Any:
    return request.getfixturevalue(request.param)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that only moves when a test moves it."""
    found = SimpleNamespace(now=100.0)
    for module in (base_requests, requests, scheduler):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: found.now))
    return found
