"""Compares add_layer_norm with dropout's formula, an addition and F.layer_norm (or a plain RMSNorm)."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fastformer.ops import add_layer_norm, draw_seed
from tests.checks import assert_equals_plain, assert_op_accurate, keep_mask, keep_scale
from tests.conftest import CallsOf
from tests.covering import by_turns, each

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OP = torch.ops.fastformer


def plain(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float = 1e-5,
    rms_norm: bool = False,
    keep: Tensor | None = None,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    s = x if keep is None else x * keep * keep_scale(dropout_p)
    if residual is not None:
        s = (s + residual).to(residual.dtype)
    weight, bias = (None if p is None else p.to(s.dtype) for p in (weight, bias))
    if rms_norm:
        y = F.rms_norm(s, s.shape[-1:], weight, eps)
        y = y if bias is None else y + bias
    else:
        y = F.layer_norm(s, s.shape[-1:], weight, bias, eps)
    return y.to(x.dtype), s


def make_inputs(
    shape: tuple[int, ...],
    device: str,
    dtype: torch.dtype = torch.float32,
    *,
    residual: bool = True,
    weight: bool = True,
    bias: bool = True,
    stream: torch.dtype | None = None,
    parameters: torch.dtype | None = None,
) -> dict[str, Tensor | None]:
    random = partial(torch.randn, device=device)
    return {
        "x": (2 * random(*shape) + 0.5).to(dtype),
        "residual": random(*shape).to(stream or dtype) if residual else None,
        "weight": (1 + random(shape[-1])).to(parameters or dtype) if weight else None,
        "bias": random(shape[-1]).to(parameters or dtype) if bias else None,
    }


def compare(inputs: dict[str, Tensor | None], **options: Any) -> None:
    x = inputs["x"]
    assert x is not None
    assert_equals_plain(add_layer_norm, plain, inputs, tuple(x.shape), **options)


@each("rms_norm", [False, True])
@each("parts", [("residual", "weight", "bias"), ("residual", "weight"), ("weight", "bias"), ("residual", "bias"), ()])
@pytest.mark.parametrize("dtype", DTYPES)
def test_accuracy(dtype: torch.dtype, parts: tuple[str, ...], rms_norm: bool, backend: str, device: str) -> None:
    chosen = {part: part in parts for part in ("residual", "weight", "bias")}
    compare(make_inputs((3, 7, 96), device, dtype, **chosen), rms_norm=rms_norm, eps=1e-6)


@each("shape", [(1, 64), (40, 1), (5, 17), (3, 1000), (17,), (2, 3, 2, 33), (131, 24)])
@pytest.mark.parametrize("rms_norm", [False, True])
def test_shapes(shape: tuple[int, ...], rms_norm: bool, backend: str, device: str) -> None:
    compare(make_inputs(shape, device), rms_norm=rms_norm, strided_dy=True)


# Heads of queries or keys inside what a projection gave, and other places that rows may have.
PLACES = {
    "heads": lambda x: x[:, :, 2:5],
    "one-token": lambda x: x[:, 3:4, 2:5],
    "one-head": lambda x: x[:, :, 4:5],
    "packed": lambda x: x[1, 1:, :3],
    "some-tokens": lambda x: x[:, ::2, 1:4],  # three strides
    "transposed": lambda x: x.transpose(1, 2),
    "features": lambda x: x[..., 8:56],
    "expanded": lambda x: x[:, :1].expand(-1, 5, -1, -1),
    "columns": lambda x: x.transpose(-1, -2),
}


@pytest.mark.parametrize(("places", "rms_norm"), by_turns([*PLACES], [False, True]))  # slow: each with both norms
def test_rows_with_any_strides(places: str, rms_norm: bool, backend: str, device: str) -> None:
    """The results, including gradients, are bit-identical to those of contiguous rows."""
    if (backend, places) == ("reference", "columns"):
        pytest.skip("PyTorch sums up columns in another order")
    whole = torch.randn(2, 5, 6, 64, device=device)
    x = PLACES[places](whole)
    weight, residual = torch.randn(x.shape[-1], device=device), torch.randn(x.shape, device=device)
    dy, results = torch.randn(x.shape, device=device), []
    for stream in (None, residual):
        for rows in (x, x.contiguous()):
            leaves = [t.detach().requires_grad_() for t in (rows, weight)]
            y, _ = add_layer_norm(leaves[0], stream, leaves[1], rms_norm=rms_norm)
            results.append((y.detach(), *torch.autograd.grad(y, leaves, dy)))
        for ours, expected in zip(*results[-2:], strict=True):
            assert torch.equal(ours, expected)


@pytest.mark.slow
@pytest.mark.parametrize("dim", [512, 1024, 4096, 5000, 16384])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wide_rows(dim: int, dtype: torch.dtype, backend: str, device: str) -> None:
    if backend == "triton" and dim * dtype.itemsize > 16384:
        pytest.skip("PyTorch differentiates rows so wide")
    compare(make_inputs((19, dim), device, dtype))


@each("rms_norm", [False, True])
@each("stream, parameters", [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float32, None)])
def test_mixed_dtypes(stream, parameters, rms_norm, backend, device) -> None:
    """bf16 sub-layers have an fp32 residual stream or fp32 parameters: y has x's dtype, and the stream its own."""
    compare(make_inputs((4, 5, 40), device, torch.bfloat16, stream=stream, parameters=parameters), rms_norm=rms_norm)


@pytest.mark.parametrize("rms_norm", [False, True])
def test_far_from_zero(rms_norm: bool, backend: str, device: str) -> None:
    """E[s^2] - E[s]^2 in fp32 would lose everything here; the variance takes two passes."""
    inputs = make_inputs((4, 256), device)
    inputs["x"] = torch.randn(4, 256, device=device) + 3000
    compare(inputs, rms_norm=rms_norm)


@each("dropout_p", [0.0, 0.25])
@each("dim", [19, 256])
def test_statistics_are_of_the_rounded_stream(dim: int, dropout_p: float, backend: str, device: str) -> None:
    """Each sum is 0.9 above the bf16 number to which it is rounded, so a mean of unrounded sums would be off by 0.9."""
    x = torch.full((5, dim), 0.9 * (1 - dropout_p), dtype=torch.bfloat16, device=device)
    even = (256 + 2 * torch.randint(2, x.shape, device=device)).bfloat16()  # neighbours in bf16
    seed = draw_seed(device) if dropout_p else None
    y, residual_out, mean, rstd = OP.add_layer_norm_fwd(x, even, None, None, 1e-5, dropout_p, seed, False)
    stream = residual_out.double()
    assert torch.equal(residual_out, even)
    torch.testing.assert_close(mean.double(), stream.mean(-1), rtol=1e-6, atol=0)
    torch.testing.assert_close(rstd.double(), (stream.var(-1, correction=0) + 1e-5).rsqrt(), rtol=1e-5, atol=0)
    torch.testing.assert_close(y, F.layer_norm(stream, (dim,)).bfloat16(), rtol=0.01, atol=0)


@each("used", [0, 1])
@each("dropout_p", [0.0, 0.25])
def test_one_output_used(used: int, dropout_p: float, backend: str, device: str) -> None:
    """Post-norm reads only y: the other output's gradient is missing, and not uninitialised memory."""
    seed = draw_seed(device)
    keep = keep_mask(seed, dropout_p, 12, 40)[0].view(3, 4, 40)
    inputs = make_inputs((3, 4, 40), device)
    # So that an unused parameter has a gradient in plain PyTorch as well.
    weightless = inputs if used == 0 else {**inputs, "weight": None, "bias": None}
    assert_op_accurate(
        lambda **a: add_layer_norm(**a, dropout_p=dropout_p, dropout_seed=seed)[used],
        lambda **a: plain(**a, keep=keep, dropout_p=dropout_p)[used],
        weightless,
    )


@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dropout_equals_the_formula(dtype: torch.dtype, dropout_p: float, backend: str, device: str) -> None:
    inputs = make_inputs((5, 9, 27), device, dtype)
    compare(inputs, dropout_p=dropout_p)
    if backend == "triton" and device == "cpu" and dtype == torch.bfloat16:
        return  # Triton's interpreter truncates to bfloat16 where a GPU rounds to the nearest
    # Without a residual the sum is the dropped x itself, to the last bit.
    x, seed = inputs["x"], draw_seed(device)
    keep = keep_mask(seed, dropout_p, 45, 27)[0].view(5, 9, 27)
    _, dropped = add_layer_norm(x, dropout_p=dropout_p, dropout_seed=seed)
    accumulated = x.double() if dtype == torch.float64 else x.float()
    assert torch.equal(dropped, torch.where(keep, accumulated * keep_scale(dropout_p), 0.0).to(dtype))


def test_without_residual_and_dropout_the_stream_is_x(backend: str, device: str) -> None:
    x = torch.randn(3, 8, device=device)
    assert add_layer_norm(x)[1] is x


@pytest.mark.parametrize("frozen", [False, True])
def test_a_bias_that_needs_no_gradient_costs_none(frozen: bool, calls_of: CallsOf) -> None:
    # In the package, a function has the module's name.
    calls = calls_of(sys.modules["fastformer.ops.add_layer_norm"], "_bwd")
    x, weight, bias = torch.randn(3, 8), torch.randn(8).requires_grad_(), torch.randn(8).requires_grad_(not frozen)
    add_layer_norm(x, x, weight, bias)[0].sum().backward()
    assert (
        [bool(call.args[9]) for call in calls] == [not frozen]
        and (bias.grad is None) == frozen
        and weight.grad is not None
    )
