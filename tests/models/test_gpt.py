"""Tests GPT: loss, initial weights, presets, room in its cache, and wrong calls; see test_gpt_options.py."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from fastformer.models import GPT, GPTConfig
from fastformer.nn import SequenceLayout
from tests.models.test_gpt_options import SMALL, V, batch, model_of
from tests.nn.comparing import assert_same


def test_each_option_of_the_loss_takes_effect():
    model = model_of()
    tokens, following = batch()
    logits, target = model(tokens).flatten(0, 1), following.flatten()
    for options, smoothing in (
        ({}, 0.0),
        ({"label_smoothing": 0.2}, 0.2),
        ({"label_smoothing": 0.2, "smooth_others": True}, 0.2 * V / (V - 1)),
    ):
        expected = F.cross_entropy(logits, target, label_smoothing=smoothing, reduction="none").view_as(following)
        assert_same(model.loss(tokens, following, **options), expected.sum(), "sum, the default")
        mean = model.loss(tokens, following, reduction="mean", **options)
        assert_same(mean, expected.sum() / (following != -100).sum(), "mean")
        assert_same(model.loss(tokens, following, reduction="none", **options), expected, "none")


def test_initialisation_and_presets():
    model = GPT.from_preset("tiny", vocab_size=200)
    # The projections into the residual stream are narrower.
    layer = model.decoder.layers[0]
    for parameter, std in (
        (layer.self_attn.in_proj_weight, 0.02),
        (layer.linear1.weight, 0.02),
        (layer.linear2.weight, 0.02 / math.sqrt(8)),
        (layer.self_attn.out_proj.weight, 0.02 / math.sqrt(8)),
        (model.embedding.weight, 0.02),
        (model.embedding.position.table, 0.02),
    ):
        assert abs(parameter.std() - std) < 0.1 * std
    untied = GPT.from_preset("tiny", vocab_size=200, tie_embeddings=False)
    assert abs(untied.output.weight.std() - 0.02) < 0.002 and untied.output.bias is None
    gpt2 = GPT.from_preset("gpt2", vocab_size=50257, device="meta")
    assert sum(p.numel() for p in gpt2.parameters()) == 124_439_808  # as published
    llama = GPT.from_preset("llama-small", vocab_size=100)
    assert llama.config.d_ff == 1024 and llama.decoder.layers[0].linear1.weight.shape == (2048, 384)
    assert not any(name.endswith("bias") for name, _ in llama.named_parameters())
    assert GPT.from_preset("small", vocab_size=65).config.max_len == 256
    names = [name for name, _ in GPT.from_preset("tiny", vocab_size=9).named_parameters()]
    assert len(names) == len(set(names)) and "output.weight" not in names


@pytest.mark.parametrize("d_model, d_ff", [(384, 1024), (96, 256), (100, 320), (512, 1408), (24, 64)])
def test_swiglus_width_is_rounded_up(d_model, d_ff):
    """The width is two thirds of 4 * d_model, rounded up to a multiple of 64."""
    assert GPTConfig(9, d_model=d_model, num_heads=2, activation="swiglu").d_ff == d_ff
    assert GPTConfig(9, d_model=d_model, num_heads=2).d_ff == 4 * d_model
    assert GPTConfig(9, d_model=d_model, num_heads=2, activation="swiglu", d_ff=7).d_ff == 7


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_a_cache_may_have_room_beyond_max_len_and_the_model_has_not(positions):
    model = model_of(positions=positions).eval()
    with torch.inference_mode():
        cache = model.new_cache(2, 20)
        model.decode(torch.ones(2, 9, dtype=torch.int64), cache=cache)
        model.decode(torch.ones(2, 3, dtype=torch.int64), cache=cache)
        with pytest.raises(ValueError, match=r"\bmax_len\b"):
            model.decode(torch.ones(2, 1, dtype=torch.int64), cache=cache)


def test_dropouts_of_the_config_arrive():
    model = GPT(GPTConfig(**SMALL, dropout=0.1, attention_dropout=0.2, activation_dropout=0.3))
    assert model.embedding.dropout == 0.1
    for layer in model.decoder.layers:
        assert (layer.dropout1.p, layer.dropout2.p, layer.self_attn.dropout, layer.dropout.p) == (0.1, 0.1, 0.2, 0.3)


def test_bad_input():
    model = model_of()
    with pytest.raises(ValueError):
        model(torch.tensor([[1, 30]]))
    with pytest.raises(ValueError, match=r"\bmax_len\b"):
        model(torch.zeros(1, 13, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"\bpositions\b"):
        GPTConfig(5, positions="alibi")
    with pytest.raises(ValueError, match=r"\bvocab_size\b"):
        GPTConfig(0)


@pytest.mark.parametrize("positions", ["rotary", "learned"])
@torch.inference_mode()
def test_a_batch_of_other_rows_than_the_cache_has_is_refused(positions):
    model = model_of(positions=positions).eval()
    cache = model.new_cache(3, 5)
    for rows in (1, 2, 4):
        with pytest.raises(ValueError, match=rf"\b3\b.*\b{rows}\b"):
            model.decode(torch.ones(rows, 1).long(), cache=cache)
    assert cache.lengths == [0, 0, 0] and cache.blocks_needed(1) == 3


@torch.inference_mode()
def test_packed_prompts_under_autocast():
    model = model_of(gain=10.0, positions="rotary", num_kv_heads=2).float().eval()
    with torch.autocast("cpu", torch.bfloat16):
        cache = model.empty_cache(3, 12)
        assert cache.k.dtype == torch.bfloat16
        cache.k[:, 1:] = cache.v[:, 1:] = torch.nan
        cache.add(2)
        ids, further = torch.randint(3, V, (7,)), torch.randint(3, V, (3, 1))
        prompts = model.decode(ids, layout=SequenceLayout.packed(torch.tensor([4, 3]), 4), cache=cache)
        cache.fork([[0, 0], [0]])
        step = model.decode(further, cache=cache)
        whole = model.decode(torch.cat((ids[:4], further[1]))[None])[0]
    assert (prompts[:4] - whole[:4]).abs().max() < 0.05 * whole.abs().max()
    assert (step[1, 0] - whole[4]).abs().max() < 0.05 * whole.abs().max()
