"""Compares modules with their torch.nn counterparts in fp64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import fastformer.nn as fnn
from fastformer.nn import KVCache

TOLERANCE = 1e-10
E, H, FF = 12, 3, 16
SIZES: dict[str, Any] = {"dropout": 0.0, "dtype": torch.float64}
Module = TypeVar("Module", bound=nn.Module)


def assert_same(ours: Tensor, theirs: Tensor, name: str, tolerance: float = TOLERANCE) -> None:
    """Checks |ours - theirs| <= tolerance * max|theirs|, and that theirs isn't zero, which would compare nothing."""
    assert ours.shape == theirs.shape, f"{name}: {tuple(ours.shape)} instead of {tuple(theirs.shape)}"
    largest = theirs.abs().max()
    assert largest > 0, f"{name}: the reference is all zero, so nothing was compared"
    worst = (ours - theirs).abs().max()
    assert worst <= tolerance * largest, f"{name}: differs by {worst:.3e} where the largest value is {largest:.3e}"


def randomised(module: Module) -> Module:
    """Makes every parameter random, because biases of 0 and norms of 1 would hide their effects."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (0.5 if parameter.dim() == 1 else 0.0))
    return module


def pair(kind: str, depth: int = 0, final: Any = None, norm_options: Any = None, **options: Any) -> tuple[Any, Any]:
    """Makes fastformer's layer (or a stack of `depth` layers) and torch.nn's, with the same random weights.

    Args:
        kind: "encoder" or "decoder".
        final: the class of the last norm of fastformer's stack; torch.nn's has a LayerNorm instead of an AddLayerNorm.
        norm_options: options of the last norm.
        options: options of the layers.
    """
    made: list[Any] = []
    for library in (fnn, nn):
        layer = getattr(library, f"Transformer{kind.title()}Layer")
        module = layer(E, H, FF, **{"batch_first": True, **SIZES, **options})
        if depth:
            norm = nn.LayerNorm if library is nn and final is fnn.AddLayerNorm else final
            args = (module, depth, norm and norm(E, **norm_options or {}, dtype=torch.float64))
            stack = getattr(library, f"Transformer{kind.title()}")
            module = stack(*args, enable_nested_tensor=False) if kind == "encoder" else stack(*args)
        made.append(module)
    made[0].load_state_dict(randomised(made[1]).state_dict())
    return made[0], made[1]


def compare(
    ours: nn.Module,
    theirs: nn.Module,
    run_ours: Callable[..., Tensor],
    run_theirs: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    real: Tensor | None = None,
) -> None:
    """With the same weights and inputs, checks that outputs and all gradients are the same at real positions.

    Args:
        ours, theirs: modules; ours gets the state_dict of theirs.
        run_ours, run_theirs: (*inputs) -> output.
        inputs: tensors that get a gradient.
        real: bool, broadcastable to the output: the positions that count.
    """
    ours.load_state_dict(theirs.state_dict())
    a = [x.detach().clone().requires_grad_() for x in inputs]
    b = [x.detach().clone().requires_grad_() for x in inputs]
    out_a, out_b = run_ours(*a), run_theirs(*b)
    dy = torch.randn_like(out_b)
    if real is not None:
        dy = dy * real
        assert_same(out_a * real, out_b * real, "output")
    else:
        assert_same(out_a, out_b, "output")
    out_a.backward(dy)
    out_b.backward(dy)
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        assert_same(x.grad, y.grad, f"gradient of input {i}")
    expected = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        assert_same(parameter.grad, expected[name].grad, f"gradient of {name}")


def assert_same_gradients(ours: Tensor, theirs: Tensor, model: nn.Module) -> None:
    """Checks the loss and the gradients of all parameters; those of key biases are pure rounding."""
    assert_same(ours, theirs, "loss")
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = (torch.autograd.grad(loss, parameters) for loss in (ours, theirs))
    for name, found, expected in zip(names, *gradients, strict=True):
        if name.endswith(("in_proj_bias", "k_norm.weight")) and expected.abs().max() < 1e-12:
            continue
        assert_same(found, expected, f"gradient of {name}")


def taken(cache: KVCache) -> int:
    """Returns the blocks that rows hold; block 0 belongs to no row."""
    return cache.num_blocks - 1 - cache.free_blocks


def padding_mask(lengths: Sequence[int], width: int) -> Tensor:
    """Returns a mask (batch, width), True = padding, as in torch.nn."""
    return torch.arange(width)[None] >= torch.tensor(lengths)[:, None]


def banded(seqlen: int, left: int | None, right: int | None) -> Tensor:
    """Returns a mask (seqlen, seqlen), True = ignore, for the keys outside of a window."""
    distance = torch.arange(seqlen)[None] - torch.arange(seqlen)[:, None]
    ignored = torch.zeros(seqlen, seqlen, dtype=torch.bool)
    if left is not None:
        ignored |= distance < -left
    if right is not None:
        ignored |= distance > right
    return ignored
