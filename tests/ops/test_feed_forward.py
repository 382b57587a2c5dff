"""Compares feed_forward with F.linear, the activation, dropout's formula and F.linear."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fastformer.ops import draw_seed, feed_forward, use_backend
from tests.checks import assert_equals_plain, keep_scale, saved_for_backward
from tests.conftest import skip_without
from tests.covering import covering, each

ACTIVATIONS = ["relu", "gelu", "gelu_tanh", "silu", "swiglu", "geglu_tanh"]
GATED = ("swiglu", "geglu_tanh")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OP = torch.ops.fastformer


def activate(pre: Tensor, activation: str) -> Tensor:
    if activation in GATED:
        gate, up = pre.chunk(2, dim=-1)
        return activate(gate, {"swiglu": "silu", "geglu_tanh": "gelu_tanh"}[activation]) * up
    if activation in ("relu", "silu"):
        return F.relu(pre) if activation == "relu" else F.silu(pre)
    return F.gelu(pre, approximate="tanh" if activation == "gelu_tanh" else "none")


def plain(
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    *,
    activation: str = "relu",
    keep: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    hidden = activate(F.linear(x, weight1, bias1), activation)
    if keep is not None:
        hidden = hidden * keep * keep_scale(dropout_p)
    return F.linear(hidden, weight2, bias2)


def make_inputs(
    shape: tuple[int, ...],
    hidden_dim: int,
    activation: str,
    device: str,
    dtype: torch.dtype = torch.float32,
    *,
    out_dim: int | None = None,
    bias1: bool = True,
    bias2: bool = True,
) -> dict[str, Tensor | None]:
    dim, columns = shape[-1], 2 * hidden_dim if activation in GATED else hidden_dim
    out_dim = out_dim or dim
    random = partial(torch.randn, device=device)
    return {
        "x": random(*shape).to(dtype),
        "weight1": (random(columns, dim) * dim**-0.5).to(dtype),
        "bias1": random(columns).to(dtype) if bias1 else None,
        "weight2": (random(out_dim, hidden_dim) * hidden_dim**-0.5).to(dtype),
        "bias2": random(out_dim).to(dtype) if bias2 else None,
    }


def compare(inputs: dict[str, Tensor | None], **options: Any) -> None:
    x, weight2 = inputs["x"], inputs["weight2"]
    assert x is not None and weight2 is not None
    assert_equals_plain(feed_forward, plain, inputs, (*x.shape[:-1], weight2.shape[1]), **options)


@each("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_accuracy(dtype: torch.dtype, activation: str, backend: str, device: str) -> None:
    compare(make_inputs((3, 11, 48), 80, activation, device, dtype), activation=activation)


@each("activation", ACTIVATIONS)
@each("bias1, bias2", [(False, False), (True, False), (False, True)])
def test_biases_are_optional(bias1: bool, bias2: bool, activation: str, backend: str, device: str) -> None:
    compare(make_inputs((9, 24), 40, activation, device, bias1=bias1, bias2=bias2), activation=activation)


def test_results_share_no_memory_without_biases(backend: str, device: str) -> None:
    x, weight1, weight2 = (torch.randn(shape, device=device) for shape in ((3, 8), (16, 8), (8, 16)))
    _, saved = OP.feed_forward_fwd(x, weight1, None, weight2, None, "gelu", 0.0, None, True)
    args = (x, x, weight1, None, weight2, saved, "gelu", 0.0, None, False)
    torch.library.opcheck(OP.feed_forward_bwd.default, args, test_utils="test_schema")


@pytest.mark.parametrize("activation", ["relu", "swiglu"])
@each(
    "shape, hidden_dim, out_dim",
    [
        ((1, 32), 64, 32),
        ((5, 1), 1, 16),
        ((7, 17), 33, 17),
        ((2, 3, 2, 40), 8, 24),
        ((20,), 12, 20),
        ((70, 100), 130, 3),
    ],
)
def test_shapes(shape, hidden_dim, out_dim, activation, backend, device) -> None:
    compare(make_inputs(shape, hidden_dim, activation, device, out_dim=out_dim), activation=activation, strided_dy=True)


@each("activation", ACTIVATIONS)
def test_without_hidden_features_the_result_is_the_bias(activation: str, backend: str, device: str) -> None:
    for rows in (5, 1000):
        shapes = {"x": (rows, 24), "weight1": (0, 24), "bias1": (0,), "weight2": (16, 0), "bias2": (16,)}
        leaves = {name: torch.randn(shape, device=device, requires_grad=True) for name, shape in shapes.items()}
        out = feed_forward(**leaves, activation=activation)
        assert out.equal(leaves["bias2"].expand(rows, 16))
        dx, dbias = torch.autograd.grad(out.sum(), (leaves["x"], leaves["bias2"]))
        assert not dx.any() and dbias.equal(torch.full_like(dbias, rows))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_whole_kilobytes(dtype: torch.dtype, activation: str, device: str) -> None:
    """On a CPU, the rows of the hidden layer then have a larger stride than their length."""
    skip_without("cpp", "feed_forward")
    with use_backend("cpp"):
        compare(make_inputs((90, 20), 2048, activation, device, dtype), activation=activation)


@pytest.mark.parametrize("dtype, rows, activation", covering(DTYPES, [3, 70], ACTIVATIONS))
def test_weights_that_are_views_of_their_transpose(dtype, rows, activation, backend, device) -> None:
    inputs = make_inputs((rows, 16), 40, activation, device, dtype, out_dim=24)
    for name in ("weight1", "weight2"):
        inputs[name] = inputs[name].T.contiguous().T
    compare(inputs, activation=activation)
    leaves = [inputs["weight1"].requires_grad_(), inputs["weight2"].requires_grad_()]
    gradients = torch.autograd.grad(feed_forward(**inputs, activation=activation).float().sum(), leaves)
    assert [x.stride() for x in gradients] == [x.stride() for x in leaves], "they lie as the weights do"


@pytest.mark.parametrize("dtype, activation, dropout_p", covering(DTYPES, ACTIVATIONS, [0.1, 1.0]))
def test_dropout_equals_the_formula(dtype, activation, dropout_p, backend, device) -> None:
    compare(make_inputs((3, 5, 20), 43, activation, device, dtype), activation=activation, dropout_p=dropout_p)


def test_relu_keeps_only_the_hidden_layer(device: str) -> None:
    """Backward saves one tensor of the hidden width; for relu, it is the activation, and there is no pre-activation."""
    for activation, columns in (("relu", 40), ("gelu", 40), ("swiglu", 80)):
        inputs = make_inputs((6, 24), 40, activation, device)
        weights = {name: value for name, value in inputs.items() if name != "x"}
        x = inputs["x"].requires_grad_()
        with saved_for_backward() as saved:
            feed_forward(x, **weights, activation=activation)
        new = [t for t in saved if t.numel() and all(t.data_ptr() != other.data_ptr() for other in inputs.values())]
        assert [tuple(t.shape) for t in new] == [(6, columns)]


@each("dropout_p", [0.0, 0.3])
@each("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backwards_inputs_are_written_only_on_request(dtype, activation, dropout_p, backend, device) -> None:
    inputs = make_inputs((37, 48), 40, activation, device, dtype)
    options = (activation, dropout_p, draw_seed(device) if dropout_p else None)
    out, saved = OP.feed_forward_fwd(*inputs.values(), *options, True)
    out_alone, nothing = OP.feed_forward_fwd(*inputs.values(), *options, False)
    assert torch.equal(out_alone, out)
    assert saved.shape == (37, 80 if activation in GATED else 40) and nothing.shape == (0,)


@pytest.mark.parametrize("learns", [None, "x", "weight1", "bias1", "weight2", "bias2"])
def test_backward_is_requested_if_an_input_is_trainable(learns, device, calls_of) -> None:
    calls = calls_of(sys.modules["fastformer.ops.feed_forward"]._fwd, "run")
    inputs = make_inputs((4, 16), 24, "gelu", device)
    if learns is not None:
        inputs[learns].requires_grad_()
    out = feed_forward(**inputs, activation="gelu")
    assert out.requires_grad == (learns is not None)
    with torch.no_grad():
        feed_forward(**inputs, activation="gelu")
    with torch.inference_mode():
        feed_forward(**inputs, activation="gelu")
    assert [call.args[1][-1] for call in calls] == [learns is not None, False, False]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_trace_checks_out() -> None:
    """torch.jit.trace makes another trace without gradients, and compares the two."""
    generator = torch.Generator().manual_seed(6)
    x, other, weight1, weight2 = (
        torch.randn(*sizes, generator=generator) for sizes in ((5, 8), (3, 8), (12, 8), (8, 12))
    )
    weights = weight1.requires_grad_(), weight2.requires_grad_()

    def call(x: Tensor, weight1: Tensor, weight2: Tensor) -> Tensor:
        return feed_forward(x, weight1, None, weight2, None, activation="gelu")

    traced = torch.jit.trace(call, (x, *weights))
    output, expected = traced(other, *weights), call(other, *weights)
    torch.testing.assert_close(output, expected)
    gradients = torch.autograd.grad(output.sum(), weights)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected.sum(), weights))


# Rows that lie a multiple of 4 KB apart are copied before they are read again and again; others aren't.
@pytest.mark.parametrize(("dim", "hidden_dim"), [(601, 530), (1024, 2048)], ids=["odd", "powers of two"])
@pytest.mark.parametrize("activation", ["relu", "swiglu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=["fp32", "bf16", "fp64"])
def test_a_row_does_not_depend_on_the_others(dtype: torch.dtype, activation: str, dim: int, hidden_dim: int) -> None:
    """For any number of rows, the bits are the same: weights are read differently, but the sums are equal."""
    skip_without("cpp", "feed_forward")
    if dtype == torch.float64:  # plain loops
        if dim > 1000:
            pytest.skip("plain loops: too slow at this size")
        dim, hidden_dim = 121, 106
    inputs = make_inputs((300, dim), hidden_dim, activation, "cpu", dtype, out_dim=70)
    dout = torch.randn(300, 70).to(dtype)
    results = []
    for rows in (1, 2, 4, 5, 8, 9, 16, 17, 31, 33, 64, 65, 130, 256, 257, 300):
        with use_backend("cpp"):
            x = inputs["x"][-rows:].clone().requires_grad_()
            out = feed_forward(**inputs | {"x": x}, activation=activation)
            (dx,) = torch.autograd.grad(out, x, dout[-rows:])
        results.append((out[-1].detach(), dx[-1]))
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))
