"""Attention, layers and stacks take nested tensors as packed sequences, and return nested tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastformer.nn as fnn
from fastformer import accelerate
from fastformer.nn.errors import InputError
from tests.nn.comparing import assert_same, randomised

pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor", "ignore:.*nested tensors is in prototype")

E, H = 12, 3
DOUBLE: dict[str, Any] = {"dtype": torch.float64}
LENGTHS = (3, 1, 0, 6)
both_layouts = pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=["jagged", "strided"])
causal_or_not = pytest.mark.parametrize("is_causal", [False, True], ids=["open", "causal"])


def sequences(requires_grad: bool = False) -> list[Tensor]:
    return [torch.randn(n, E, **DOUBLE, requires_grad=requires_grad) for n in LENGTHS]


def modules() -> dict[str, nn.Module]:
    options: dict[str, Any] = {"dropout": 0.0, "batch_first": True, **DOUBLE}
    layer = fnn.TransformerEncoderLayer(E, H, 16, **options)
    pre_norm = fnn.TransformerEncoderLayer(E, H, 16, norm_first=True, **options)
    found = {
        "attention": fnn.MultiheadAttention(E, H, **options),
        "seqlen first": fnn.MultiheadAttention(E, H, **options | {"batch_first": False}),
        "layer": layer,
        "pre-norm layer": pre_norm,
        "stack": fnn.TransformerEncoder(pre_norm, 2, nn.LayerNorm(E, **DOUBLE)),
    }
    return {name: randomised(module) for name, module in found.items()}


def call(module: nn.Module, x: Tensor, is_causal: bool, mask: Tensor | None = None) -> Tensor:
    if isinstance(module, fnn.MultiheadAttention):
        return module(x, x, x, need_weights=False, is_causal=is_causal, attn_mask=mask)[0]
    return module(x, mask, is_causal=is_causal)


@both_layouts
@causal_or_not
@pytest.mark.parametrize("name", modules())
def test_each_sequence_is_as_alone(name, layout, is_causal):
    module, rows = modules()[name], sequences()
    nested = torch.nested.as_nested_tensor(rows, layout=layout)
    with torch.no_grad():
        out = call(module, nested, is_causal)
    assert out.is_nested and out.layout == layout
    found = out.unbind()
    assert [len(row) for row in found] == list(LENGTHS)
    for row, alone in zip(found, rows, strict=True):
        if len(alone):
            expected = call(module, alone[:, None] if name == "seqlen first" else alone[None], is_causal)
            assert_same(row, expected.squeeze(1 if name == "seqlen first" else 0), "a sequence")


@pytest.mark.parametrize("name", modules())
def test_jagged_tensors_have_gradients(name):
    module, rows = modules()[name].train(), sequences(requires_grad=True)
    dy = [torch.randn_like(row) for row in rows]
    nested = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    out = nested + call(module, nested, False)
    (out.values() * torch.cat(dy)).sum().backward()
    found = [each.grad for each in (*rows, *module.parameters())]
    for each in (*rows, *module.parameters()):
        each.grad = None
    for row, grad in zip(rows, dy, strict=True):
        batch = row[:, None] if name == "seqlen first" else row[None]
        if len(row):
            ((batch + call(module, batch, False)) * grad.view_as(batch)).sum().backward()
    for each, got in zip((*rows, *module.parameters()), found, strict=True):
        if each.numel():
            assert got is not None and each.grad is not None
            assert_same(got, each.grad, "a gradient")


@both_layouts
@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_attention_returns_the_weights_of_torch(layout, average, batch_first):
    theirs = randomised(nn.MultiheadAttention(E, 2, batch_first=True, **DOUBLE)).eval()
    ours = fnn.MultiheadAttention(E, 2, batch_first=batch_first, **DOUBLE).eval()
    ours.load_state_dict(theirs.state_dict())
    rows = sequences()
    nested, expected = (torch.nested.as_nested_tensor(rows, layout=each) for each in (layout, torch.strided))
    with torch.no_grad():
        out, weights = ours(nested, nested, nested, average_attn_weights=average)
        their_out, their_weights = theirs(expected, expected, expected, average_attn_weights=average)
    assert out.layout == layout
    assert_same(torch.cat(out.unbind()), torch.cat(their_out.unbind()), "output")
    assert_same(weights, their_weights, "weights")
    with torch.no_grad():
        causal_out, causal_weights = ours(nested, nested, nested, is_causal=True)
        without = ours(nested, nested, nested, is_causal=True, need_weights=False)[0]
    assert not causal_weights.triu(1).any() and causal_weights[3, 5, 4] > 0
    assert_same(torch.cat(causal_out.unbind()), torch.cat(without.unbind()), "causal")


def test_the_causal_mask_is_the_only_one():
    x = torch.nested.as_nested_tensor(sequences(), layout=torch.jagged)
    triangle = torch.ones(6, 6, dtype=torch.bool).triu(1)
    for module in modules().values():
        # Like torch.nn's, a layer applies the mask that it is given, whether it is told what it is or not.
        for is_causal in (False, True):
            assert_same(call(module, x, is_causal, triangle).values(), call(module, x, True).values(), "causal")
        for mask in (triangle.T, triangle[:3, :3], triangle.double()):
            with pytest.raises(InputError, match="nested"):
                call(module, x, False, mask)
    padding = torch.zeros(len(LENGTHS), 6, dtype=torch.bool)
    for name, module in modules().items():
        args = (x, x, x) if name in ("attention", "seqlen first") else (x,)
        with pytest.raises(InputError, match="nested"):
            module(*args, **{"src_key_padding_mask" if len(args) == 1 else "key_padding_mask": padding})


def test_inputs_that_attention_refuses():
    attention = modules()["attention"]
    nested = [torch.nested.as_nested_tensor(sequences(), layout=torch.jagged) for _ in range(2)]
    padded = torch.randn(len(LENGTHS), 6, E, **DOUBLE)
    for args in ((nested[0], nested[1], nested[1]), (nested[0], nested[0], nested[1]), (padded, nested[0], nested[0])):
        with pytest.raises(InputError, match=r"\bnested\b"):
            attention(*args)
    strided = torch.nested.as_nested_tensor(sequences())
    with pytest.raises(InputError):
        attention(strided, strided, strided)
    attention.requires_grad_(False)
    attention(strided, strided, strided)
    strided.requires_grad_()
    with pytest.raises(InputError):
        attention(strided, strided, strided)


def test_an_accelerated_attention_takes_them():
    attention = nn.MultiheadAttention(E, H, batch_first=True, **DOUBLE).eval()
    x = sequences()[0]
    expected = attention(x, x, x)[0]
    accelerate(attention)
    nested = torch.nested.as_nested_tensor([x], layout=torch.jagged)
    assert_same(attention(nested, nested, nested)[0].values(), expected, "output")
