"""Tests layers of decoder-only models after surgery, and their options of attention."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

import fastformer.nn as fnn
from fastformer.nn.decoder_only import DecoderOnlyLayer
from tests.covering import each
from tests.nn import test_surgery as surgery
from tests.nn.comparing import assert_same, randomised

E, H = 12, 3
PLACES: dict[str, dict[str, Any]] = {
    "pre": {},
    "post": {"norm_placement": "post", "norm": "rms"},
    "both": {"norm_placement": "both", "norm": "rms"},
    "parallel": {"parallel_residual": True},
}


def stack_of(place: str) -> Any:
    torch.manual_seed(3)
    layer = DecoderOnlyLayer(
        E, H, 16, dropout=0.0, batch_first=True, dtype=torch.float64, **PLACES[place],
        self_attention={"head_dim": 8, "qk_norm": "head", "num_kv_heads": 1, "softmax_scale": 0.4},
    )  # fmt: skip
    return randomised(fnn.TransformerEncoder(layer, 2, fnn.AddLayerNorm(E, dtype=torch.float64)))


NORMS = ("norm1", "norm2", "post_norm1", "post_norm2", "self_attn.q_norm", "self_attn.k_norm")
SURGERIES: dict[str, Callable[[Any], Any]] = {
    **{
        f"a hook on {name}": surgery.hook(name)
        for name in (*NORMS, "self_attn.out_proj", "self_attn", "dropout1", "linear2")
    },
    **{f"a pre-hook on {name}": surgery.pre_hook(name) for name in ("post_norm1", "self_attn.k_norm", "dropout2")},
    **{f"a forward of {name}'s own": surgery.own_forward(name) for name in NORMS},
    **{f"a parameter of a subclass in {name}": surgery.tag(name) for name in ("post_norm2", "self_attn.q_norm")},
    "a forward of the layer's own": surgery.patch_forward,
    "an adapter": surgery.adapt,
    "an adapter of the heads": lambda layer: setattr(
        layer.self_attn, "out_proj", surgery.Adapter(layer.self_attn.out_proj)
    ),
    "a dropout that is none": surgery.replace("dropout1", surgery.Halved),
    "a parametrization": surgery.halve("linear2", "self_attn.q_norm"),
    "unchanged queries": lambda layer: setattr(layer.self_attn, "q_norm", nn.Identity()),
    "another eps": lambda layer: setattr(layer.self_attn.k_norm, "eps", 0.5),
    "another scale": lambda layer: setattr(layer.self_attn, "softmax_scale", 2.0),
    "a window": lambda layer: setattr(layer.self_attn, "window_size", (1, 0)),
}


def cases() -> list[Any]:
    absent = {"pre": "post_norm", "parallel": "post_norm", "post": " norm"}
    return [(name, place) for name in SURGERIES for place in PLACES if absent.get(place, "-") not in name]


@pytest.mark.parametrize(("name", "place"), cases())
def test_surgery_has_the_same_effect_as_in_called_modules(name, place):
    stack, x = stack_of(place), torch.randn(2, 5, E, dtype=torch.float64)
    with torch.no_grad():
        before = stack(x, is_causal=True)
    SURGERIES[name](stack.layers[1])
    results = []
    for watch in (True, False):
        handle = register_module_forward_hook(lambda *_: None) if watch else None
        out = stack(x, is_causal=True)
        with torch.no_grad():
            assert_same(stack(x, is_causal=True), out, "without gradients")
        results.append([out, *torch.autograd.grad(out.square().sum(), [*stack.parameters()], allow_unused=True)])
        if handle is not None:
            handle.remove()
    for i, (called, fused) in enumerate(zip(*results, strict=True)):
        assert (called is None) == (fused is None)
        if called is not None and called.any():
            assert_same(fused, called, str(i))
    assert not torch.allclose(results[0][0], before), "it made no difference"


@pytest.mark.parametrize("name", ["self_attn.q_norm", "self_attn.k_norm", "post_norm1"])
def test_a_norm_that_is_called_sees_padding(name):
    """Layers get packed tokens if no code can tell the difference; a hook can."""
    stack, shapes = stack_of("both"), []
    x, padding = torch.randn(2, 5, E, dtype=torch.float64), torch.tensor([[False] * 5, [False] * 2 + [True] * 3])
    expected = stack(x, src_key_padding_mask=padding)
    stack.layers[1].get_submodule(name).register_forward_hook(lambda module, args, out: shapes.append(args[0].shape))
    assert_same(stack(x, src_key_padding_mask=padding)[~padding], expected[~padding], "output")
    assert [shape[:2] for shape in shapes] == [(2, 5)]


@pytest.mark.parametrize("place", PLACES)
def test_changes_by_a_hook_of_a_head_norm_take_effect(place):
    results = []
    for watch in (True, False):
        stack = stack_of(place)
        layer = stack.layers[0]
        layer.self_attn.q_norm.register_forward_hook(lambda *_, layer=layer: surgery.adapt(layer))
        handle = register_module_forward_hook(lambda *_: None) if watch else None
        results.append(stack(torch.ones(2, 5, E, dtype=torch.float64).cumsum(1), is_causal=True))
        if handle is not None:
            handle.remove()
    assert_same(results[1], results[0], "output")


def plain_attention(attention: Any, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Computes the output and the distribution of each head from the parameters, (batch, seqlen, dim) each."""
    heads, kv_heads, size = attention.num_heads, attention.num_kv_heads, attention.head_dim
    rows = [heads * size, kv_heads * size, kv_heads * size]
    if attention.in_proj_weight is None:
        weights = [attention.q_proj_weight, attention.k_proj_weight, attention.v_proj_weight]
    else:
        weights = attention.in_proj_weight.split(rows)
    biases = [None] * 3 if attention.in_proj_bias is None else attention.in_proj_bias.split(rows)
    made = [F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True)]
    for i, name in enumerate(("q_norm", "k_norm")):
        if attention.qk_norm is not None:
            norm = getattr(attention, name)
            x = made[i].unflatten(-1, (-1, size)) if attention.qk_norm == "head" else made[i]
            made[i] = F.rms_norm(x, norm.normalized_shape, norm.weight, norm.eps).reshape(made[i].shape)
    q, k, v = (x.unflatten(-1, (-1, size)).transpose(1, 2) for x in made)
    k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
    scores = q @ k.mT * (attention.softmax_scale or size**-0.5)
    if attention.softcap:
        scores = attention.softcap * torch.tanh(scores / attention.softcap)
    if causal:
        scores = scores.masked_fill(torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1), -torch.inf)
    distribution = scores.softmax(-1)
    out = (distribution @ v).transpose(1, 2).flatten(2)
    return F.linear(out, attention.out_proj.weight, attention.out_proj.bias), distribution


ATTENTIONS: list[dict[str, Any]] = [
    {"head_dim": 5},
    {"head_dim": 7, "num_kv_heads": 1, "qk_norm": "all", "bias": False, "out_bias": True},
    {"qk_norm": "head", "softmax_scale": 0.9, "out_bias": False, "qk_norm_eps": 0.3},
    {"head_dim": 6, "kdim": 8, "vdim": 10, "qk_norm": "head", "softcap": 0.8},
    {"softcap": 0.5, "softmax_scale": 1.5, "num_kv_heads": 1},
]


@each("batch_first, options", itertools.product([True, False], ATTENTIONS))
def test_attention_with_its_own_options(options, batch_first):
    attention = randomised(fnn.MultiheadAttention(E, H, batch_first=batch_first, dtype=torch.float64, **options))
    query, size = torch.randn(2, 5, E, dtype=torch.float64), {"key": attention.kdim, "value": attention.vdim}
    key, value = (torch.randn(2, 4, each, dtype=torch.float64) for each in size.values())
    calls = [(query, key, value, False)]
    if attention.in_proj_weight is not None:
        calls += [(query, query, query, True), (query, key, key, False)]
    for q, k, v, causal in calls:
        expected, distribution = plain_attention(attention, q, k, v, causal)
        given = [x if batch_first else x.transpose(0, 1) for x in (q, k, v)]
        given = [given[0], given[0] if k is q else given[1], given[0] if v is q else given[1] if v is k else given[2]]
        for need_weights in (False, True):
            out, weights = attention(*given, need_weights=need_weights, is_causal=causal)
            assert_same(out if batch_first else out.transpose(0, 1), expected, "output")
        assert_same(weights, distribution.mean(1), "distribution")
        alone, _ = attention(*(q[0] if x is q else x[0] for x in (q, k, v)), need_weights=False, is_causal=causal)
        assert_same(alone, expected[0], "unbatched")
        if k is q:
            layout = fnn.SequenceLayout.packed(torch.tensor([5, 5]), 5)
            rows = q.flatten(0, 1)
            packed, _ = attention(rows, rows, rows, need_weights=False, is_causal=causal, layout=layout)
            assert_same(packed.view(2, 5, E), expected, "packed")


@pytest.mark.parametrize("options", [{"norm_placement": "post", "parallel_residual": True}, {"norm_placement": "no"}])
def test_impossible_layers(options):
    with pytest.raises(ValueError, match=r"\bnorm_placement\b"):
        DecoderOnlyLayer(E, H, 16, **options)
