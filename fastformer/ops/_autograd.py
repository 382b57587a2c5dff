"""The gradients of ops, of first and higher order, for calls through PyTorch's dispatcher and for direct calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch._library.autograd
from torch import Tensor

from fastformer.ops import _eager
from fastformer.ops._library import LIBRARY, OPS, PREFERRED, Op, forced_backend, use_backend


def unviewed(value: Tensor) -> Tensor:
    """Returns a new tensor that isn't marked as a view: autograd forbids changing a view that a function returns."""
    return torch.ops.aten._unsafe_view.default(value, value.shape) if value._is_view() else value


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

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        # A context variable does not reach the thread in which autograd runs a GPU's backward pass.
        ctx.forced_backend = forced_backend()
        # Zeros instead of None would give unused parameters a gradient, and an optimizer would then change them.
        ctx.set_materialize_grads(False)
        setup_context(ctx, inputs, output)

    def run(ctx: Any, *grads: Tensor | None) -> Any:
        if grads[0] is None and all(grad is None for grad in grads):
            return (None,) * len(ctx.needs_input_grad)
        if differentiable_backward is not None and (torch.is_grad_enabled() or _eager.is_transformed()):
            return differentiable_backward(ctx, *grads)
        if ctx.forced_backend is None:
            return backward(ctx, *grads)
        with use_backend(ctx.forced_backend):
            return backward(ctx, *grads)

    def forward(ctx: Any, *args: Any) -> Any:
        output = op.run(PREFERRED[args[0].device.type], args)
        output = tuple([unviewed(each) for each in output]) if isinstance(output, tuple) else unviewed(output)
        setup(ctx, args, output)
        return output

    op = OPS[name]
    op.has_autograd = True
    members = {"forward": staticmethod(forward), "backward": staticmethod(run)}
    function = type(f"fastformer_{name}", (torch.autograd.Function,), members)
    # The equivalent of `function.apply` if no transform is active, which `call` has checked.
    op.apply = cast(Any, super(torch.autograd.Function, function)).apply
    _register_kernel(op, torch._library.autograd.Info(run, setup))


def forbid_double_backward(name: str) -> None:
    """Makes it an error to differentiate `fastformer::<name>` (a backward op), instead of a silent zero."""

    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(f"fastformer::{name} has no double backward: no gradients of gradients")

    op = OPS[name]
    op.has_autograd = True
    _register_kernel(op, torch._library.autograd.Info(backward, None))


def _register_kernel(op: Op, info: torch._library.autograd.Info) -> None:
    """Registers the dispatcher's autograd kernel: torch.library's, or the formula if that kernel would be wrong.

    Inside a functorch transform torch.library's kernel raises an error, and it silently drops tangents.
    """
    kernel = torch._library.autograd.make_autograd_impl(getattr(torch.ops.fastformer, op.name).default, info)

    def formula_or_kernel(keyset: torch._C.DispatchKeySet, *args: Any) -> Any:
        if op.formula is not None and _eager.is_transformed():
            return op.formula(*args)
        return kernel(keyset, *args)

    LIBRARY.impl(op.name, formula_or_kernel, "Autograd", with_keyset=True)


def refuse_derivatives(name: str, *tensors: Tensor | None) -> None:
    """Raises an error if functorch or forward mode would differentiate an op without gradients, instead of zeros.

    Raises:
        NotImplementedError: a derivative by one of the tensors is requested.
    """
    if _eager.is_transformed() and any(t is not None and _eager.is_differentiated(t) for t in tensors):
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
            x.view_as(x) if wanted and x is not None and x.requires_grad else x
            for x, wanted in zip(inputs, needed, strict=True)
        ]
        outputs = function(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        pairs = [(y, dy) for y, dy in zip(outputs, grads, strict=False) if dy is not None and y.requires_grad]
        wanted = [leaf for leaf, x in zip(leaves, inputs, strict=True) if leaf is not x and leaf is not None]
        if not pairs or not wanted:
            return (None,) * len(inputs)
        ys, dys = zip(*pairs, strict=True)
        found = iter(torch.autograd.grad(ys, wanted, dys, create_graph=True, allow_unused=True))
        return tuple(next(found) if leaf is not x else None for leaf, x in zip(leaves, inputs, strict=True))
