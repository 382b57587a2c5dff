"""Outputs of ops behave like PyTorch's: they may be changed in place, and may have no gradient."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import BaseTorchDispatchMode

from fastformer import ops
from tests.covering import each
from tests.ops.calls import CALLS, OF_ONE_DTYPE, OpCall

LEARNING = each("call", [call for call in CALLS if call.learns])


def outputs_of(call: OpCall) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """Returns the outputs of a call that have gradients, and its leaves."""
    tensors = call.tensors(5)
    leaves = [x.requires_grad_() for name, x in tensors.items() if x.is_floating_point() and name not in OF_ONE_DTYPE]
    outputs = call(5, **tensors)
    return tuple(out for out in outputs if out.requires_grad and not out.is_leaf), leaves


@pytest.fixture(params=["past", "through"])
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Makes calls bypass the dispatcher, as usual, or go through it."""
    with BaseTorchDispatchMode() if request.param == "through" else contextlib.nullcontext():
        yield


@pytest.mark.parametrize("backend", [None, "reference"])
@LEARNING
def test_it_may_be_changed(call: OpCall, backend: str | None, way: None) -> None:
    with ops.use_backend(backend):
        outputs, _ = outputs_of(call)
    for place, out in enumerate(outputs):
        before = out.detach().clone()
        out.mul_(2).add_(1)
        assert torch.equal(out, 2 * before + 1) and out.requires_grad
        if call.stem not in ("attention", "attention_weights") and place == 0:  # which their gradients read
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
@LEARNING
def test_an_input_without_gradient_gets_none(call: OpCall, create_graph: bool, way: None) -> None:
    (out, *_), leaves = outputs_of(call)
    other = torch.zeros_like(out, requires_grad=True)
    Stop.apply(out, other).sum().backward(retain_graph=True, create_graph=create_graph)
    assert other.grad is not None and all(leaf.grad is None for leaf in leaves)
    out.sum().backward()
    assert any(leaf.grad is not None for leaf in leaves)


@pytest.mark.parametrize("backend", [None, "reference"])
def test_a_norm_whose_output_is_unused_gets_no_gradient(backend: str | None, way: None) -> None:
    x, residual, weight, bias = (torch.randn(shape, requires_grad=True) for shape in ((3, 64), (3, 64), (64,), (64,)))
    with ops.use_backend(backend):
        ops.add_layer_norm(x, residual, weight, bias)[1].sum().backward()
    assert weight.grad is None and bias.grad is None
    assert x.grad is not None and torch.equal(x.grad, torch.ones(3, 64))
