"""The rule of correctness: at most twice the error of plain PyTorch in the same dtype, both measured against fp64."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fastformer.ops import _dispatch
from fastformer.ops._dropout import keep_mask as keep_mask  # the definition of which elements dropout keeps
from fastformer.ops._dropout import keep_scale as keep_scale

# Gradients with an allowed error of 3x instead of 2x, each with its reason. All others are held to 2x.
_RECOMPUTED = (
    "P is recomputed from lse: in fp32 the rounding of lse and of a second QK^T shifts whole rows, which eager's don't"
)
RELAXED: dict[str, str] = dict.fromkeys(("dq", "dk", "dv", "dmask"), _RECOMPUTED)


def error(value: Tensor, exact: Tensor) -> float:
    """Returns the largest absolute difference from the fp64 result; infinity if only one of them is NaN or infinite."""
    value, exact = value.detach().double(), exact.detach().double()
    assert value.shape == exact.shape, f"expected shape {tuple(exact.shape)}, got {tuple(value.shape)}"
    if value.numel() == 0:
        return 0.0
    same = (value == exact) | (value.isnan() & exact.isnan())
    difference = torch.where(same, torch.zeros_like(value), (value - exact).abs())
    return float(difference.nan_to_num(nan=float("inf")).max())


def assert_accurate(ours: Tensor, plain: Tensor, exact: Tensor, name: str = "output") -> None:
    """Asserts that err(ours) <= 2 * err(plain) + 1 ulp * max|exact|.

    In fp32 on a GPU, where kernels take three TF32 products for one of fp32, 2**-20 * max|exact| stands for the ulp.

    Args:
        ours: the result of the op.
        plain: the result of eager PyTorch in the same dtype.
        exact: the fp64 result.
        name: the name of the tensor, for the message and for RELAXED.
    """
    assert ours.dtype == plain.dtype, f"{name}: expected {plain.dtype}, got {ours.dtype}"
    finite = exact.detach().double()
    finite = finite[finite.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    eps = 2.0**-20 if ours.is_cuda and ours.dtype == torch.float32 else torch.finfo(ours.dtype).eps
    ulp = eps * largest
    factor = 3.0 if name in RELAXED else 2.0
    err_ours, err_plain = error(ours, exact), error(plain, exact)
    assert err_plain < float("inf"), f"{name}: plain PyTorch itself overflows, so the rule says nothing: other inputs"
    allowed = factor * err_plain + ulp
    assert err_ours <= allowed, (
        f"{name}: error {err_ours:.3e} > {factor:g} x plain's {err_plain:.3e} + 1 ulp {ulp:.3e} "
        f"(max |exact| {largest:.3e})"
    )


def small_draws() -> int:
    """Returns how often small inputs are drawn: plain PyTorch may be lucky once, so the worst of a few draws counts.

    Triton's interpreter takes seconds a call. It tests only the algorithm, so fewer draws are enough.
    """
    return 2 if is_interpreted() else 8


def is_interpreted() -> bool:
    """Returns whether the ops are forced onto Triton without a GPU, and so run in its interpreter."""
    return _dispatch.forced_backend.get() == "triton" and not torch.cuda.is_available()


def assert_op_accurate(
    ours: Callable[..., Tensor | tuple[Tensor, ...]],
    plain: Callable[..., Tensor | tuple[Tensor, ...]],
    inputs: dict[str, Tensor | None],
    *,
    strided_dy: bool = False,
) -> None:
    """Checks every output and every gradient of an op by the rule, with random output gradients.

    If the forced backend refuses the call, the test is skipped with the backend's reason.

    Args:
        ours: the op, called with the inputs by name.
        plain: eager PyTorch, called in the same way; its fp64 result is also the exact result.
        inputs: floating-point tensors are differentiated; other values are passed unchanged.
        strided_dy: whether the output gradients are not contiguous.
    """
    wide = {name: _map_floating(value, Tensor.double) for name, value in inputs.items()}
    names = [name for name, value in inputs.items() if value is not None and value.is_floating_point()]
    # The largest error of a few numbers depends on luck, so they are drawn several times.
    draws = small_draws() if min(inputs[name].numel() for name in names) < 32 else 1
    drawn: dict[str, tuple[list[Tensor], ...]] = {name: ([], [], []) for name in names}
    for _ in range(draws):
        try:
            called = [_call(ours, inputs)]
        except NotImplementedError as refusal:
            if "can't run on" in str(refusal):
                pytest.skip(str(refusal))
            raise
        called += [_call(plain, inputs), _call(plain, wide)]
        # Output gradients have the dtype of plain PyTorch's outputs: a loss is fp32, even if plain PyTorch's is bf16.
        dys = []
        for i, (output, plain_output, exact_output) in enumerate(zip(*(outputs for outputs, _ in called), strict=True)):
            assert_accurate(output.to(plain_output.dtype), plain_output, exact_output, f"output {i}")
            dy = torch.randn(*output.shape, 2, device=output.device).to(plain_output.dtype)[..., 0]
            dys.append(dy if strided_dy else dy.contiguous())
        for which, (outputs, leaves) in enumerate(called):
            cotangents = [dy.to(output.dtype) for dy, output in zip(dys, outputs, strict=True)]
            for name, gradient in zip(names, torch.autograd.grad(outputs, leaves, cotangents), strict=True):
                drawn[name][which].append(gradient)
    for name, gradients in drawn.items():
        of_ours, of_plain, exact = (torch.stack(values) for values in gradients)
        assert_accurate(of_ours, of_plain, exact, f"d{name}")


def assert_equals_plain(
    op: Callable[..., Tensor | tuple[Tensor, ...]],
    plain: Callable[..., Tensor | tuple[Tensor, ...]],
    inputs: dict[str, Tensor | None],
    dropped: tuple[int, ...],
    *,
    dropout_p: float = 0.0,
    strided_dy: bool = False,
    **options: Any,
) -> None:
    """Does the same with options for both. Under dropout, of a tensor of the shape `dropped`, `plain` gets `keep`."""
    ours, plain_options = dict(options), dict(options)
    if dropout_p:
        device = next(tensor.device for tensor in inputs.values() if tensor is not None)
        seed = torch.tensor([2**61 + 12345, 2**33 + 77], device=device)
        keep = keep_mask(seed, dropout_p, math.prod(dropped[:-1]), dropped[-1])[0].view(dropped)
        ours |= {"dropout_p": dropout_p, "dropout_seed": seed}
        plain_options |= {"dropout_p": dropout_p, "keep": keep}
    assert_op_accurate(partial(op, **ours), partial(plain, **plain_options), inputs, strided_dy=strided_dy)


@contextlib.contextmanager
def saved_for_backward() -> Iterator[list[Tensor]]:
    """Yields the tensors that the calls of the block save for their backward passes."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


def _map_floating(value: Tensor | None, function: Callable[[Tensor], Tensor]) -> Tensor | None:
    return function(value) if value is not None and value.is_floating_point() else value


def _call(function: Callable, inputs: dict[str, Tensor | None]) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """Returns the outputs as a tuple, and the leaves (with the same memory, because strides are part of an input)."""
    arguments = {name: _map_floating(value, lambda t: t.detach().requires_grad_()) for name, value in inputs.items()}
    outputs = function(**arguments)
    leaves = [value for value in arguments.values() if value is not None and value.requires_grad]
    return outputs if isinstance(outputs, tuple) else (outputs,), leaves
