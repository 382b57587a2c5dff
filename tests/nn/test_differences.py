"""The page of differences from torch.nn: that its tests exist, and the differences that no other file holds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import fastformer.nn as fast

TESTS = Path(__file__).parent.parent
PAGE = TESTS.parent / "fastformer" / "nn" / "DIFFERENCES.md"


def attentions(dropout: float) -> tuple[nn.Module, nn.Module]:
    options: dict[str, Any] = {"dropout": dropout, "batch_first": True}
    ours, theirs = fast.MultiheadAttention(8, 2, **options), nn.MultiheadAttention(8, 2, **options)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def seeded(module: nn.Module, *inputs: Tensor) -> Any:
    torch.manual_seed(7)
    return module(*inputs)


def test_every_line_names_tests_that_there_are() -> None:
    lines = re.split(r"^- ", PAGE.read_text(), flags=re.MULTILINE)[1:]
    assert len(lines) > 10
    for line in lines:
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", line)
        assert named, line
        for path, name in named:
            assert re.search(rf"^def {name}\(", (TESTS / path).read_text(), re.MULTILINE), f"{path}::{name}"


def test_weights_are_those_before_dropout() -> None:
    ours, theirs = attentions(0.5)
    x = torch.randn(2, 5, 8)
    out, weights = ours(x, x, x)
    theirs_dropped = theirs(x, x, x)[1]
    assert torch.allclose(weights, theirs.eval()(x, x, x)[1], atol=1e-6)
    assert not torch.allclose(theirs_dropped, weights, atol=1e-3)
    assert not torch.allclose(out, ours.eval()(x, x, x)[0], atol=1e-3), "dropout acts"


def test_a_seed_repeats_itself_and_not_torch() -> None:
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


def test_causal_needs_no_mask() -> None:
    ours, theirs = attentions(0.0)
    x, triangle = torch.randn(2, 3, 8), torch.ones(3, 3, dtype=torch.bool).triu(1)
    with pytest.raises(RuntimeError, match="attn_mask"):
        theirs(x, x, x, is_causal=True, need_weights=False)
    expected = theirs(x, x, x, attn_mask=triangle)[0]
    assert torch.allclose(ours(x, x, x, is_causal=True, need_weights=False)[0], expected, atol=1e-6)


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
