"""A new op, `squared_relu(x) = max(x, 0)^2`, with a reference, a schema, a fake and a gradient.

    python examples/new_op.py

The op has no kernels, so it runs on its reference. If there were modules with kernels, `define_op` would find them by
the op's stem. docs/project/ops.md adds such a kernel, and says where the files of an op go.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastformer.ops import record_backends
from fastformer.ops._autograd import register_autograd
from fastformer.ops._library import define_op

NO_KERNEL = "this example has no kernel"


def squared_relu_reference(x: Tensor) -> Tensor:
    """Plain PyTorch, right in every dtype up to fp64."""
    return x.clamp(min=0).square()


def squared_relu_backward_reference(dy: Tensor, x: Tensor) -> Tensor:
    """The gradient: 2 max(x, 0) dy."""
    return 2 * x.clamp(min=0) * dy


_fwd = define_op(
    "squared_relu_fwd(Tensor x) -> Tensor",
    squared_relu_reference,
    stem="squared_relu",
    fake=lambda x: torch.empty_like(x),
    reference_only={"triton": NO_KERNEL, "cpp": NO_KERNEL},
)
_bwd = define_op(
    "squared_relu_bwd(Tensor dy, Tensor x) -> Tensor",
    squared_relu_backward_reference,
    stem="squared_relu",
    fake=lambda dy, x: torch.empty_like(x),
    reference_only={"triton": NO_KERNEL, "cpp": NO_KERNEL},
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, dy: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    return _bwd(dy, x)


register_autograd("squared_relu_fwd", _backward, setup_context=_setup_context)


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0)^2, elementwise.

    Args:
        x: any shape, floating point.

    Raises:
        ValueError: x is not a floating-point tensor.
    """
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise ValueError(f"expected a floating-point tensor x, got {type(x).__name__}")
    return _fwd(x)


def main() -> int:
    x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    with record_backends() as used:
        y = squared_relu(x)
    assert torch.equal(y, torch.relu(x) ** 2)
    assert torch.autograd.gradcheck(squared_relu, (x,))
    compiled = torch.compile(squared_relu, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), y)
    print(f"squared_relu and its gradient are right; it ran on {used}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
