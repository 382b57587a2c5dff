"""Tests intended differences of accelerated models that no other file tests: see fastformer/nn/DIFFERENCES.md."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fastformer
from tests.integrations.families import DROPOUTS, IDS, RIGHT, make


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_norms_in_fp64_are_not_rounded_to_fp32(family):
    model = make(family)
    norm = model.model.norm if family == "llama" else model.encoder.final_layer_norm
    x = torch.randn(5, 24, dtype=torch.float64)
    exact = norm.weight * x * (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
    rounded = (norm(x) - exact).abs().max()
    fastformer.accelerate(model)
    assert (norm(x) - exact).abs().max() < 1e-13 and rounded > 1e-9


@pytest.mark.parametrize("family", ["bart", "marian"])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_an_encoder_gives_zeros_at_padding(mode, family):
    model = make(family)
    getattr(model, mode)()
    encoder = model.get_encoder()
    encoded = lambda: encoder(IDS, attention_mask=RIGHT.long()).last_hidden_state  # noqa: E731
    assert encoded()[~RIGHT].any()
    fastformer.accelerate(encoder)
    assert not encoded()[~RIGHT].any() and encoded()[RIGHT].all()


@pytest.mark.parametrize("family", ["bert", "gpt2", "marian"])
def test_a_seed_is_reproducible_but_differs_from_transformers(family):
    model = make(family, **dict.fromkeys(DROPOUTS[family], 0.5)).base_model
    model = (model.encoder if family == "marian" else model).train()

    def seeded() -> Tensor:
        torch.manual_seed(7)
        return model(IDS).last_hidden_state

    theirs = seeded()
    fastformer.accelerate(model)
    assert torch.equal(seeded(), seeded()) and not torch.allclose(seeded(), theirs, atol=1e-3)
    model.eval()
    ours = seeded()
    fastformer.restore(model)
    assert torch.allclose(seeded(), ours), "it is dropout that differs"
