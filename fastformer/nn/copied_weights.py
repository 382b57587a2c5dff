"""Copies of a model's weights in autocast's dtype, all made by one operation, and their gradients by another.

Autocast casts each weight by itself, and each gradient back. On a GPU these would be a quarter of the launches of a
training step.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fastformer.nn.attention_parameters import AttentionParameters
from fastformer.nn.linear import LINEARS
from fastformer.ops._dispatch import weight_copies


class _Copies(torch.autograd.Function):
    """Casts tensors to a dtype. The gradients of all copies are cast back when the last of them is known."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(_cast(weights, dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        cast = iter(_cast([grad for grad in grads if grad is not None], torch.float32))
        return None, *(None if grad is None else next(cast) for grad in grads)


def _cast(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    if copies:
        torch._foreach_copy_(copies, list(tensors))
    return copies


@contextlib.contextmanager
def copied_weights(model: nn.Module) -> Iterator[None]:
    """Casts the weights of all linear maps and attentions of a model at once, for the forward pass in the block.

    The block is inside of autocast, and each backward pass follows one block. It changes nothing without autocast,
    where no gradients are needed, for weights that aren't in fp32, and for a model that recomputes layers in its
    backward pass: they have to be computed from the same tensors again. The copies aren't for DistributedDataParallel,
    which sends the first gradients while others are computed: here all come at the end, and take memory until then.
    """
    weights = _weights_of(model)
    if not weights:
        yield
        return
    dtype = torch.get_autocast_dtype(weights[0].device.type)
    copies = _Copies.apply(dtype, *weights)  # type: ignore[no-untyped-call]
    token = weight_copies.set({id(weight): copy for weight, copy in zip(weights, copies, strict=True)})
    try:
        yield
    finally:
        weight_copies.reset(token)


def _weights_of(model: nn.Module) -> list[Tensor]:
    """Returns the weights that have to be cast.

    Not those that several layers share: their gradients are cast one by one and added in fp32.
    """
    if not (torch.is_grad_enabled() and torch._C._is_any_autocast_enabled()):
        return []
    uses: Counter[nn.Parameter | None] = Counter()
    for _, module in model.named_modules(remove_duplicate=False):
        if module.__dict__.get("gradient_checkpointing"):  # getattr takes long where it finds nothing
            return []
        if type(module) in LINEARS or isinstance(module, AttentionParameters):
            uses.update(module._parameters.values())
    output = getattr(model, "output_weight", None)
    weights: list[Tensor] = [weight for weight, count in {output: 1, **uses}.items() if count == 1 and _is_cast(weight)]
    on = {weight.device.type for weight in weights}
    return weights if len(on) == 1 and torch.is_autocast_enabled(*on) else []


def _is_cast(weight: Any) -> TypeGuard[nn.Parameter]:
    return type(weight) is nn.Parameter and weight.requires_grad and weight.dtype == torch.float32
