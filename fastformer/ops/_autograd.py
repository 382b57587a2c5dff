"""The gradients of ops, of first and higher order, for calls through PyTorch's dispatcher and for direct calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch._library.autograd
from torch import Tensor

from fastformer.ops import _transforms
from fastformer.ops._dispatch import OPS, Op, use_backend
from fastformer.ops._library import LIBRARY


def register_autograd(
    name: str,
    backward: Callable[..., Any],
    *,
    setup_context: Callable[..., None],
    differentiable_backward: Callable[..., Any] | None = None,
) -> None:
    """Gives `fastformer::<name>` its gradient. `backward` calls the `_bwd` op; to differentiate that op is an error.

    The gradient applies to calls through the dispatcher and, as an `autograd.Function`, to direct calls.

    Args:
        name: the name of the op.
        backward: (ctx, *gradients of the outputs) -> the gradients of the inputs. An output without a gradient has
            None; if all have None, `backward` isn't called.
        setup_context: as in torch.library.register_autograd.
        differentiable_backward: replaces `backward` if its results are to be differentiated again, and under functorch
            and forward mode; None if `backward` itself consists of differentiable operations.
    """

    def run(ctx: Any, *grads: Tensor | None) -> Any:
        if grads[0] is None and all(grad is None for grad in grads):
            return (None,) * len(ctx.needs_input_grad)
        if differentiable_backward is not None and (torch.is_grad_enabled() or _transforms.is_transformed()):
            return differentiable_backward(ctx, *grads)
        if ctx.forced_backend is None:
            return backward(ctx, *grads)
        with use_backend(ctx.forced_backend):
            return backward(ctx, *grads)

    op = OPS[name]
    op.has_autograd, op.setup_context = True, setup_context
    members = {"forward": staticmethod(op.forward), "backward": staticmethod(run)}
    function = type(f"fastformer_{name}", (torch.autograd.Function,), members)
    # The equivalent of `function.apply` if no transform is active, which the call has checked.
    op.apply = cast(Any, super(torch.autograd.Function, function)).apply
    _register_kernel(op, torch._library.autograd.Info(run, op.save))


def forbid_double_backward(name: str) -> None:
    """Makes it an error to differentiate `fastformer::<name>` (a backward op), instead of a silent zero."""

    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(f"fastformer::{name} has no double backward: no gradients of gradients")

    op = OPS[name]
    op.has_autograd = True
    _register_kernel(op, torch._library.autograd.Info(backward, None))


def _register_kernel(op: Op[..., Any], info: torch._library.autograd.Info) -> None:
    """Registers the dispatcher's autograd kernel: torch.library's, or the formula if that kernel would be wrong.

    Inside a functorch transform torch.library's kernel raises an error, and it silently drops tangents.
    """
    kernel = torch._library.autograd.make_autograd_impl(cast(Any, op.default), info)

    def formula_or_kernel(keyset: torch._C.DispatchKeySet, *args: Any) -> Any:
        if op.formula is not None and _transforms.is_transformed():
            return op.formula(*args)
        return kernel(keyset, *args)

    LIBRARY.impl(op.name, formula_or_kernel, "Autograd", with_keyset=True)


def refuse_derivatives(name: str, *tensors: Tensor | None) -> None:
    """Raises an error if functorch or forward mode would differentiate an op without gradients, instead of zeros.

    Raises:
        NotImplementedError: a derivative by one of the tensors is requested.
    """
    if _transforms.is_transformed() and any(t is not None and _transforms.is_differentiated(t) for t in tensors):
        raise NotImplementedError(f"{name} is for inference: it has no gradients, and no forward-mode derivatives")


def differentiate(
    function: Callable[..., Any], inputs: tuple[Tensor | None, ...], needed: Sequence[bool], *grads: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Computes a function's gradients as functions of its inputs and its outputs' gradients, for double backward.

    Args:
        function: (*inputs) -> a tensor or a tuple of them, in differentiable operations.
        inputs: the tensors to differentiate by; an input that is None has no gradient.
        needed: whether each input needs a gradient.
        grads: the gradients of the first outputs, or None.

    Returns:
        One gradient, or None, for each input.
    """
    with torch.enable_grad():
        # Views, so that one tensor in two places has a gradient for each, and the tensors behind the views stay
        # unchanged.
        leaves = [
            x.view_as(x) if learning and x is not None and x.requires_grad else x
            for x, learning in zip(inputs, needed, strict=True)
        ]
        outputs = function(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        pairs = [(y, dy) for y, dy in zip(outputs, grads, strict=False) if dy is not None and y.requires_grad]
        learning = [leaf for leaf, x in zip(leaves, inputs, strict=True) if leaf is not x and leaf is not None]
        if not pairs or not learning:
            return (None,) * len(inputs)
        ys, dys = zip(*pairs, strict=True)
        gradients = iter(torch.autograd.grad(ys, learning, dys, create_graph=True, allow_unused=True))
        return tuple(next(gradients) if leaf is not x else None for leaf, x in zip(leaves, inputs, strict=True))
