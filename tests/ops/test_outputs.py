"""Outputs of ops behave like PyTorch's: they may be changed in place, and may have no gradient."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import BaseTorchDispatchMode

from fastformer import ops

SHAPES = [(12, 64), (3, 4, 64)]


learning: list[Tensor] = []


def drawn(*shape: int) -> Tensor:
    learning.append(torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).requires_grad_())
    return learning[-1]


def heads(shape: tuple[int, ...]) -> Tensor:
    return drawn(*shape).view(2, 6, 4, 16)


CALLS: dict[str, Callable[[tuple[int, ...]], Any]] = {
    "feed_forward": lambda shape: ops.feed_forward(drawn(*shape), drawn(32, 64), None, drawn(8, 32), None),
    "feed_forward swiglu": lambda shape: ops.feed_forward(
        drawn(*shape), drawn(32, 64), drawn(32), drawn(8, 16), drawn(8), activation="swiglu"
    ),
    "add_layer_norm": lambda shape: ops.add_layer_norm(drawn(*shape), drawn(*shape), drawn(64), drawn(64))[0],
    "its sum": lambda shape: ops.add_layer_norm(drawn(*shape), drawn(*shape), drawn(64), drawn(64))[1],
    "linear": lambda shape: ops.linear(drawn(*shape), drawn(9, 64), drawn(9)),
    "embedding": lambda shape: ops.embedding(torch.ones(shape, dtype=torch.long), drawn(9, 16)),
    "attention": lambda shape: ops.attention(*(heads(shape),) * 3),
    "rotary": lambda shape: ops.rotary(heads(shape), *ops.rotary_tables(6, 16)),
    "linear_cross_entropy": lambda shape: ops.linear_cross_entropy(
        drawn(*shape).view(-1, 64), drawn(9, 64), torch.ones(12, dtype=torch.long), reduction="none"
    ),
}


@pytest.fixture(params=["past", "through"])
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Makes calls bypass the dispatcher, as usual, or go through it."""
    with BaseTorchDispatchMode() if request.param == "through" else contextlib.nullcontext():
        yield


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_it_may_be_changed(name: str, shape: tuple[int, ...], backend: str | None, way: None) -> None:
    with ops.use_backend(backend):
        out = CALLS[name](shape)
    before = out.detach().clone()
    out.mul_(2).add_(1)
    out[:1] = 0
    assert torch.equal(out[1:], 2 * before[1:] + 1) and out.requires_grad
    if name not in ("attention", "its sum"):  # which their gradients read
        out.sum().backward()


class Stop(torch.autograd.Function):
    """Passes no gradient on, which differs from a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor) -> Tensor:
        return x + other

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[None, Tensor]:
        return None, dout


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_an_input_without_gradient_gets_none(name: str, create_graph: bool, way: None) -> None:
    learning.clear()
    out = CALLS[name](SHAPES[1])
    other = torch.zeros_like(out, requires_grad=True)
    Stop.apply(out, other).sum().backward(retain_graph=True, create_graph=create_graph)
    assert other.grad is not None and learning and all(leaf.grad is None for leaf in learning)
    out.sum().backward()
    assert any(leaf.grad is not None for leaf in learning)


@pytest.mark.parametrize("backend", [None, "reference"])
def test_a_norm_whose_output_is_unused_gets_no_gradient(backend: str | None, way: None) -> None:
    x, weight, bias = drawn(3, 64), drawn(64), drawn(64)
    with ops.use_backend(backend):
        ops.add_layer_norm(x, drawn(3, 64), weight, bias)[1].sum().backward()
    assert weight.grad is None and bias.grad is None
    assert x.grad is not None and torch.equal(x.grad, torch.ones(3, 64))
