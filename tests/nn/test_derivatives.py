"""Compares derivatives of every kind through whole modules with torch.nn's; tests modules on "meta"."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

import fastformer.nn as fast
from tests.covering import each

X = torch.randn(2, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
CAUSAL = torch.ones(3, 3, dtype=torch.bool).triu(1)


class Attention(nn.Module):
    """Causal attention that also returns its weights."""

    def __init__(self, library: Any) -> None:
        super().__init__()
        self.attention = library.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out, weights = self.attention(x, x, x, attn_mask=CAUSAL)
        return out + weights.sum(-1, keepdim=True) * x + weights @ x


class Whole(nn.Module):
    """An encoder and a decoder."""

    def __init__(self, library: Any) -> None:
        super().__init__()
        options: dict[str, Any] = {"batch_first": True, "activation": "gelu", "norm_first": True}
        self.transformer = library.Transformer(8, 2, 1, 1, 12, 0.0, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.transformer(x, x.flip(1), tgt_mask=CAUSAL)


def _layer(library: Any, **options: Any) -> nn.Module:
    return library.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True, **options)


MODULES: dict[str, Callable[[Any], nn.Module]] = {
    "attention": Attention,
    "post-norm layer": _layer,
    "pre-norm layer": lambda library: _layer(library, norm_first=True, activation="gelu"),
    "transformer": Whole,
}


def loss(x: Tensor, module: Callable[[Tensor], Tensor]) -> Tensor:
    return module(x).pow(3).sum()


def double_backward(module: nn.Module) -> tuple[Tensor, ...]:
    """Differentiates the norm of a gradient by the input and by every parameter."""
    x = X.clone().requires_grad_()
    (first,) = torch.autograd.grad(loss(x, module), x, create_graph=True)
    wanted = [x, *module.parameters()]
    return first, *torch.autograd.grad(first.square().sum(), wanted, allow_unused=True, materialize_grads=True)


def _one(module: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: loss(x[None], module)


DERIVATIVES: dict[str, Callable[[nn.Module], Any]] = {
    "jvp": lambda module: jvp(module, (X,), (X.flip(0),)),
    "vmap(grad)": lambda module: vmap(grad(_one(module)))(X),
    "grad(vmap)": lambda module: grad(lambda x: vmap(_one(module))(x).sum())(X),
    "jacrev": lambda module: jacrev(module)(X),
    "jacfwd": lambda module: jacfwd(module)(X),
    "hessian": lambda module: hessian(lambda x: loss(x, module))(X[:1]),
    "grad of parameters": lambda module: tuple(
        grad(lambda p: functional_call(module, p, (X,)).pow(3).sum())(dict(module.named_parameters())).values()
    ),
    "double backward": double_backward,
}


@pytest.mark.parametrize("derivative", DERIVATIVES.values(), ids=DERIVATIVES)
@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_derivatives_equal_torchs(make: Callable[[Any], nn.Module], derivative: Callable[[nn.Module], Any]) -> None:
    theirs, ours = make(nn).double(), make(fast).double()
    ours.load_state_dict(theirs.state_dict())
    with sdpa_kernel(SDPBackend.MATH):  # the only one that has them all
        expected = derivative(theirs)
    results = derivative(ours)
    if isinstance(expected, Tensor):
        expected, results = (expected,), (results,)
    for a, b in zip(results, expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-7, atol=1e-7 * float(b.abs().max())), (a - b).abs().max()
        assert float(b.abs().max()) > 1e-12 or float(a.abs().max()) < 1e-9


@pytest.mark.parametrize("norm_first", [False, True])
def test_dropout_is_the_same_in_every_derivative(norm_first: bool) -> None:
    """With one seed, forward mode, functorch and backward drop the same elements."""
    module = fast.TransformerEncoderLayer(8, 2, 12, 0.4, batch_first=True, norm_first=norm_first).double()
    tangent = X.flip(0)

    def seeded(x: Tensor) -> Tensor:
        torch.manual_seed(5)
        return module(x)

    x = X.clone().requires_grad_()
    out = seeded(x)
    (dx,) = torch.autograd.grad(out, x, torch.ones_like(out))
    value, pushed, *_ = jvp(seeded, (X,), (tangent,))
    assert torch.allclose(value, out) and not torch.allclose(value, module(X))
    assert torch.allclose(pushed.sum(), (dx * tangent).sum())
    assert torch.allclose(grad(lambda x: seeded(x).sum())(X), dx)
    assert torch.autograd.gradgradcheck(seeded, X[:1].clone().requires_grad_(), fast_mode=True)


def test_every_sample_may_have_its_own_dropout() -> None:
    """vmap's `randomness` works as in torch.nn."""
    module = fast.TransformerEncoderLayer(8, 2, 12, 0.4, batch_first=True).double()
    same = torch.stack((X, X))
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(module)(same)
    once = vmap(module, randomness="same")(same)
    assert torch.equal(once[0], once[1])
    each = vmap(module, randomness="different")(same)
    assert not torch.allclose(each[0], each[1])


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", ["MultiheadAttention", "TransformerEncoderLayer", "TransformerDecoderLayer"])
def test_modules_on_meta(name: str, training: bool) -> None:
    options: dict[str, Any] = {} if name == "MultiheadAttention" else {"dim_feedforward": 12}
    module = getattr(fast, name)(8, 2, dropout=0.1, batch_first=True, device="meta", **options).train(training)
    x = torch.empty(2, 3, 8, device="meta", requires_grad=True)
    count = {"MultiheadAttention": 3, "TransformerEncoderLayer": 1, "TransformerDecoderLayer": 2}[name]
    out = module(*[x] * count)
    out = out[0] if isinstance(out, tuple) else out
    out.sum().backward()
    assert out.is_meta and out.shape == x.shape and x.grad is not None and x.grad.is_meta


@each(
    "name, norm_first",
    itertools.product(["linear1.weight", "linear2.bias", "norm1.weight", "norm2.bias"], [False, True]),
)
def test_one_parameter_on_meta_is_an_error(name: str, norm_first: bool) -> None:
    """Otherwise, the result would be uninitialised memory."""
    module = fast.TransformerEncoderLayer(8, 2, 12, norm_first=norm_first)
    owner, _, last = name.rpartition(".")
    part = module.get_submodule(owner)
    setattr(part, last, nn.Parameter(getattr(part, last).to("meta")))
    with pytest.raises((ValueError, RuntimeError), match="device"):
        module(torch.randn(3, 2, 8))


@pytest.mark.parametrize("norm_first", [False, True])
def test_weights_that_come_with_the_call(norm_first: bool) -> None:
    """Offloading does this: a submodule's parameters are on "meta" except during its replaced forward."""
    module = fast.TransformerEncoderLayer(8, 2, 12, norm_first=norm_first).eval()
    x = torch.randn(3, 2, 8)
    expected = module(x)

    def offload(part: nn.Module) -> None:
        forward, real = part.forward, dict(part._parameters)
        away = {name: None if p is None else nn.Parameter(p.detach().to("meta")) for name, p in real.items()}

        def with_weights(*args: Any, **options: Any) -> Any:
            part._parameters.update(real)
            try:
                return forward(*args, **options)
            finally:
                part._parameters.update(away)

        part._parameters.update(away)
        part.forward = with_weights

    for part in module.modules():
        if any(p is not None for p in part._parameters.values()):
            offload(part)
    assert torch.allclose(module(x), expected, atol=1e-6)
