"""What accelerated models do otherwise on purpose, where no other file holds it: see fastformer/nn/DIFFERENCES.md."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fastformer
from tests.integrations import test_bart as bart
from tests.integrations import test_bert as bert
from tests.integrations import test_causal as causal
from tests.integrations import test_t5 as t5
from tests.integrations.test_causal import IDS, RIGHT


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_norms_in_fp64_are_not_rounded_to_fp32(family):
    model = causal.make("llama") if family == "llama" else t5.make()
    norm = model.model.norm if family == "llama" else model.encoder.final_layer_norm
    x = torch.randn(5, 24, dtype=torch.float64)
    exact = norm.weight * x * (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
    rounded = (norm(x) - exact).abs().max()
    fastformer.accelerate(model)
    assert (norm(x) - exact).abs().max() < 1e-13 and rounded > 1e-9


@pytest.mark.parametrize("family", ["bart", "marian"])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_an_encoder_gives_zeros_at_padding(mode, family):
    model = bart.make(family)
    getattr(model, mode)()
    encoder = model.get_encoder()
    encoded = lambda: encoder(IDS, attention_mask=RIGHT.long()).last_hidden_state  # noqa: E731
    assert encoded()[~RIGHT].any()
    fastformer.accelerate(encoder)
    assert not encoded()[~RIGHT].any() and encoded()[RIGHT].all()


@pytest.mark.parametrize("family", ["bert", "gpt2", "marian"])
def test_a_seed_repeats_itself_and_not_transformers(family):
    if family == "bert":
        model: Any = bert.make(hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.5)
    elif family == "gpt2":
        model = causal.make("gpt2", resid_pdrop=0.5, attn_pdrop=0.5).base_model
    else:
        model = bart.make(family, dropout=0.5, attention_dropout=0.5).get_encoder()
    model.train()

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
