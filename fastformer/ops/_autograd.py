"""The gradients of ops: through PyTorch's dispatcher and past it, once and any number of times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch._library.autograd
from torch import Tensor

from fastformer.ops import _eager
from fastformer.ops._library import LIBRARY, OPS, PREFERRED, Op, forced_backend, use_backend


def unviewed(value: Tensor) -> Tensor:
    """A new tensor as no view of what it was made of: autograd lets no view that a function gives be changed."""
    return torch.ops.aten._unsafe_view.default(value, value.shape) if value._is_view() else value


def register_autograd(
    name: str,
    backward: Callable[..., Any],
    *,
    setup_context: Callable[..., None],
    differentiable_backward: Callable[..., Any] | None = None,
) -> None:
    """Gives `fastformer::<name>` its gradient. `backward` calls the `_bwd` op, whose own gradient is an error.

    It serves calls through the dispatcher and, as an `autograd.Function`, those past it alike.

    Args:
        name: of the op.
        backward: (ctx, *gradients of the outputs) -> those of the inputs. An output without a gradient has None;
            where all have, this isn't called.
        setup_context: as torch.library.register_autograd takes it.
        differentiable_backward: runs in place of `backward` if its results are to be differentiated again, and under
            functorch and forward mode; None if `backward` itself is of differentiable operations.
    """

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        # A context variable does not reach the thread in which autograd runs a GPU's backward pass.
        ctx.forced_backend = forced_backend()
        # Zeros in place of no gradient would be one for parameters that have none, which an optimizer then moves.
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
    # What `function.apply` comes to where nothing transforms the call, which `call` has seen.
    op.apply = cast(Any, super(torch.autograd.Function, function)).apply
    _register_kernel(op, torch._library.autograd.Info(run, setup))


def forbid_double_backward(name: str) -> None:
    """Makes differentiating `fastformer::<name>` (a backward op) an error that says so, instead of a silent zero."""

    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(f"fastformer::{name} has no double backward: no gradients of gradients")

    op = OPS[name]
    op.has_autograd = True
    _register_kernel(op, torch._library.autograd.Info(backward, None))


def _register_kernel(op: Op, info: torch._library.autograd.Info) -> None:
    """What the dispatcher calls for autograd: torch.library's kernel, and the formula where that one would be wrong.

    Below a transform of functorch's torch.library's kernel raises, and tangents it drops without a word.
    """
    kernel = torch._library.autograd.make_autograd_impl(getattr(torch.ops.fastformer, op.name).default, info)

    def formula_or_kernel(keyset: torch._C.DispatchKeySet, *args: Any) -> Any:
        if op.formula is not None and _eager.is_transformed():
            return op.formula(*args)
        return kernel(keyset, *args)

    LIBRARY.impl(op.name, formula_or_kernel, "Autograd", with_keyset=True)


def refuse_derivatives(name: str, *tensors: Tensor | None) -> None:
    """For an op that has no gradients: an error where functorch or forward mode asks for them, instead of zeros.

    Raises:
        NotImplementedError: one of the tensors is being differentiated by.
    """
    if _eager.is_transformed() and any(t is not None and _eager.is_differentiated(t) for t in tensors):
        raise NotImplementedError(f"{name} is for inference: it has no gradients, and no forward-mode derivatives")


def differentiate(
    function: Callable[..., Any], inputs: tuple[Tensor | None, ...], needed: Sequence[bool], *grads: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The gradients of a function, as functions of its inputs and of its outputs' gradients: for double backward.

    Args:
        function: (*inputs) -> a tensor or a tuple of them, in differentiable operations.
        inputs: what to differentiate by; one that is None has no gradient.
        needed: which of them.
        grads: the gradients of the first outputs, or None.

    Returns:
        One gradient, or None, for each input.
    """
    with torch.enable_grad():
        # Views, so that one tensor in two places has a gradient for each, and what it is made from is left alone.
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
