"""Tests intended differences from torch.nn that no other file tests: see fastformer/nn/DIFFERENCES.md."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.parametrize as parametrize
from torch import Tensor, nn

import fastformer
import fastformer.functional as FF
import fastformer.nn as fast


def attentions(dropout: float) -> tuple[nn.Module, nn.Module]:
    options: dict[str, Any] = {"dropout": dropout, "batch_first": True}
    ours, theirs = fast.MultiheadAttention(8, 2, **options), nn.MultiheadAttention(8, 2, **options)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def seeded(module: nn.Module, *inputs: Tensor) -> Any:
    torch.manual_seed(7)
    return module(*inputs)


def test_returned_weights_are_from_before_dropout() -> None:
    ours, theirs = attentions(0.5)
    x = torch.randn(2, 5, 8)
    out, weights = ours(x, x, x)
    theirs_dropped = theirs(x, x, x)[1]
    assert torch.allclose(weights, theirs.eval()(x, x, x)[1], atol=1e-6)
    assert not torch.allclose(theirs_dropped, weights, atol=1e-3)
    assert not torch.allclose(out, ours.eval()(x, x, x)[0], atol=1e-3), "dropout acts"


def test_gradients_of_large_scores_err_as_pytorchs_fused_ones() -> None:
    def gradients(attend: Any, dtype: torch.dtype) -> list[Tensor]:
        leaves = [each.to(dtype).requires_grad_() for each in inputs]
        return [each.double() for each in torch.autograd.grad(attend(*leaves), leaves, dout.to(dtype))]

    def plainly(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT * 32**-0.5).softmax(-1) @ v

    ours: list[list[float]] = []
    theirs: list[list[float]] = []
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        inputs = [scale * torch.randn(1, 2, 64, 32, generator=generator) for scale in (100, 17, 1)]
        dout = torch.randn(1, 2, 64, 32, generator=generator)
        scores = inputs[0] @ inputs[1].mT * 32**-0.5
        assert 2000 < scores.abs().max() < 20000
        exact = gradients(plainly, torch.float64)
        for errors, attend in ((ours, FF.scaled_dot_product_attention), (theirs, F.scaled_dot_product_attention)):
            found = gradients(attend, torch.float32)
            errors.append([float((a - b).abs().max()) for a, b in zip(found, exact, strict=True)])
    for mine, other in zip(torch.tensor(ours).amax(0), torch.tensor(theirs).amax(0), strict=True):
        assert mine <= 2 * other


def test_gradients_that_are_zero_are_so_up_to_rounding() -> None:
    q, k, v = torch.randn(2, 4, 5, 16, requires_grad=True), *torch.randn(2, 2, 4, 1, 16, requires_grad=True)
    dout = torch.randn(2, 4, 5, 16)
    dq, dk = torch.autograd.grad(FF.scaled_dot_product_attention(q, k, v), (q, k), dout)
    # Of each score's gradient, a difference of two equal sums of 16 products, a few roundings are left.
    noise = 2**-23 * float((dout.abs() @ v.abs().mT).max())
    assert dq.abs().max() <= 16 * noise * k.abs().max() and dk.abs().max() <= 16 * noise * q.abs().max()
    x, norm = torch.randn(64, 1, requires_grad=True), fast.AddLayerNorm(1)
    (dx,) = torch.autograd.grad(norm(x), x, torch.randn(64, 1))
    assert dx.abs().max() <= 2**-20 * norm.eps**-0.5


def test_a_seed_is_reproducible_but_differs_from_torch() -> None:
    ours, theirs = attentions(0.5)
    x = torch.randn(2, 5, 8)
    first, again, other = (seeded(module, x, x, x)[0] for module in (ours, ours, theirs))
    assert torch.equal(first, again) and not torch.allclose(first, other, atol=1e-3)


def test_a_mask_may_have_another_dtype() -> None:
    ours, theirs = attentions(0.0)
    x, mask = torch.randn(2, 3, 8), torch.randn(3, 3)
    with pytest.raises(RuntimeError, match="dtype"):
        theirs(x, x, x, attn_mask=mask.double())
    expected = theirs(x, x, x, attn_mask=mask)[0]
    assert torch.allclose(ours(x, x, x, attn_mask=mask.double())[0], expected, atol=1e-6)


def test_switches_of_torchs_fast_path_change_nothing() -> None:
    layer = fast.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    x, padding = torch.randn(2, 4, 8), torch.tensor([[False] * 4, [False, True, False, False]])
    outputs = []
    for switch in (False, True):
        torch.manual_seed(0)
        encoder = fast.TransformerEncoder(layer, 2, enable_nested_tensor=switch, mask_check=switch).eval()
        outputs.append(encoder(x, src_key_padding_mask=padding))
    assert torch.equal(*outputs) and outputs[0].shape == x.shape


@pytest.mark.parametrize("name", ["MultiheadAttention", "TransformerEncoderLayer", "TransformerDecoderLayer"])
@pytest.mark.filterwarnings("ignore")
def test_script_is_refused(name: str) -> None:
    with pytest.raises(Exception, match=r".") as refused:
        torch.jit.script(getattr(fast, name)(8, 2))
    assert "torch" in str(refused.traceback[-1].path), "by the compiler itself"


def test_torchs_private_fast_path_is_not_called() -> None:
    x = torch.randn(2, 3, 8)
    with (
        torch.no_grad(),
        mock.patch("torch._transformer_encoder_layer_fwd") as of_layers,
        mock.patch("torch._native_multi_head_attention") as of_attentions,
    ):
        for library, called in ((fast, False), (nn, True)):
            library.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()(x)
            library.MultiheadAttention(8, 2, batch_first=True).eval()(x, x, x)
            assert of_layers.called is of_attentions.called is called


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (nn.TransformerEncoderLayer, "_sa_block"),
        (nn.MultiheadAttention, "forward"),
        (F, "multi_head_attention_forward"),
        (F, "scaled_dot_product_attention"),
    ],
    ids=lambda each: getattr(each, "__name__", each),
)
def test_a_replaced_function_is_called_as_before(owner: Any, name: str) -> None:
    theirs = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    swapped, ours = copy.deepcopy(theirs), fast.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    fastformer.accelerate(swapped)
    x = torch.randn(2, 3, 8)
    with mock.patch.object(owner, name, autospec=owner is not F, side_effect=getattr(owner, name)) as replaced:
        for is_training, called in ((True, [True, True, False]), (False, [False, name == "forward", False])):
            found = []
            with torch.set_grad_enabled(is_training):
                for layer in (theirs, swapped, ours):
                    replaced.reset_mock()
                    layer.train(is_training)(x)
                    found.append(replaced.called)
            assert found == called


class Counted(nn.Module):
    """A parametrization that counts its calls."""

    count = 0

    def forward(self, weight: Tensor) -> Tensor:
        self.count += 1
        return weight.clone()


def test_a_parametrised_weight_is_made_once() -> None:
    x, y = torch.randn(2, 3, 8), torch.randn(2, 4, 8)
    for query, key, value, theirs_count in ((x, x, x, 3), (x, y, y, 1), (x, y, y.clone(), 1)):
        counts = []
        for attention in attentions(0.0):
            weight, bias = Counted(), Counted()
            parametrize.register_parametrization(attention, "in_proj_weight", weight)
            parametrize.register_parametrization(attention, "in_proj_bias", bias)
            weight.count = bias.count = 0
            attention(query, key, value)
            counts.append((weight.count, bias.count))
        assert counts[0] == (1, 1) and counts[1][0] == theirs_count


@pytest.mark.parametrize("option", ["add_bias_kv", "add_zero_attn"])
def test_extra_keys_are_not_causally_masked(option: str) -> None:
    ours, theirs = (each.MultiheadAttention(8, 2, batch_first=True, **{option: True}) for each in (fast, nn))
    ours.load_state_dict(theirs.state_dict())
    x, triangle = torch.randn(2, 3, 8), torch.ones(3, 3, dtype=torch.bool).triu(1)
    call: dict[str, Any] = {"attn_mask": triangle, "is_causal": True}
    expected = theirs(x, x, x, **call)[0]  # where weights are asked for, torch.nn adds the mask
    for need_weights in (True, False):
        assert torch.allclose(ours(x, x, x, **call, need_weights=need_weights)[0], expected, atol=1e-6)
    hidden = theirs(x, x, x, **call, need_weights=False)[0]
    assert not torch.allclose(hidden[:, :-1], expected[:, :-1], atol=1e-3)


def test_causal_needs_no_mask() -> None:
    ours, theirs = attentions(0.0)
    x, triangle = torch.randn(2, 3, 8), torch.ones(3, 3, dtype=torch.bool).triu(1)
    with pytest.raises(RuntimeError, match="attn_mask"):
        theirs(x, x, x, is_causal=True, need_weights=False)
    expected = theirs(x, x, x, attn_mask=triangle)[0]
    assert torch.allclose(ours(x, x, x, is_causal=True, need_weights=False)[0], expected, atol=1e-6)


def test_causal_means_the_same_in_every_mode() -> None:
    """torch.nn's layers ignore is_causal in evaluation without gradients."""
    theirs = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 2)
    ours = fastformer.accelerate(copy.deepcopy(theirs))
    x, wrong = torch.randn(2, 3, 8), torch.zeros(3, 3)
    causal = nn.Transformer.generate_square_subsequent_mask(3)
    expected = theirs(x, causal)
    for training, grad in ((True, True), (False, True), (False, False)):
        ours.train(training)
        with torch.set_grad_enabled(grad):
            for mask in (None, causal, wrong):
                torch.testing.assert_close(ours(x, mask, is_causal=True), expected)
            torch.testing.assert_close(ours.layers[1](ours.layers[0](x, is_causal=True), is_causal=True), expected)
    with torch.no_grad():
        torch.testing.assert_close(theirs.eval()(x, is_causal=True), theirs(x))


def test_the_output_projection_is_called() -> None:
    x = torch.randn(2, 3, 8)
    for module, factor in zip(attentions(0.0), (2, 1), strict=True):
        before = module(x, x, x)[0]
        module.get_submodule("out_proj").register_forward_hook(lambda _, args, out: 2 * out)
        assert torch.allclose(module(x, x, x)[0], factor * before)


@pytest.mark.parametrize("sizes", [{}, {"kdim": 6, "vdim": 6}], ids=["one weight", "three weights"])
def test_a_bias_may_have_another_dtype(sizes: dict[str, int]) -> None:
    theirs = nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64, **sizes)
    nn.init.normal_(theirs.in_proj_bias)
    theirs.in_proj_bias = nn.Parameter(theirs.in_proj_bias.half())
    ours = fast.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64, **sizes)
    ours.load_state_dict(theirs.state_dict())
    ours.in_proj_bias = nn.Parameter(theirs.in_proj_bias.detach())
    x, y = torch.randn(3, 4, 8).double(), torch.randn(3, 4, 6 if sizes else 8).double()
    calls = [(x, y, y), (x, y, y.clone())] if sizes else [(x, x, x), (x, y, y), (x, y, y.clone())]
    for args in calls:
        # torch.nn's batch dimension second makes its linear take the bias.
        expected = theirs(*args)[0]
        assert torch.allclose(ours(*args)[0], expected, atol=1e-12)
    with pytest.raises(RuntimeError, match="dtype"):
        theirs(*(each[:1] for each in calls[0]))
    assert torch.allclose(ours(*(each[:1] for each in calls[0]))[0], ours(*calls[0])[0][:1], atol=1e-12)
