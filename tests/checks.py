"""The rule of correctness: at most twice the error of plain PyTorch in the same dtype, both measured against fp64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fastformer.ops import _library
from fastformer.ops._dropout import keep_mask as keep_mask  # which elements dropout keeps, by definition
from fastformer.ops._dropout import keep_scale as keep_scale

# Gradients that may err by 3x instead of 2x, each with its reason. Anything not listed is held to 2x.
_RECOMPUTED = (
    "P is recomputed from lse: in fp32 the rounding of lse and of a second QK^T shifts whole rows, which eager's don't"
)
RELAXED: dict[str, str] = dict.fromkeys(("dq", "dk", "dv", "dmask"), _RECOMPUTED)


def error(value: Tensor, exact: Tensor) -> float:
    """The largest absolute difference from the fp64 result; infinite where one is NaN or inf and the other is not."""
    value, exact = value.detach().double(), exact.detach().double()
    assert value.shape == exact.shape, f"expected shape {tuple(exact.shape)}, got {tuple(value.shape)}"
    if value.numel() == 0:
        return 0.0
    same = (value == exact) | (value.isnan() & exact.isnan())
    difference = torch.where(same, torch.zeros_like(value), (value - exact).abs())
    return float(difference.nan_to_num(nan=float("inf")).max())


def assert_accurate(ours: Tensor, plain: Tensor, exact: Tensor, name: str = "output") -> None:
    """err(ours) <= 2 * err(plain) + 1 ulp * max|exact|.

    Args:
        ours: the op's result.
        plain: eager PyTorch's result in the same dtype.
        exact: the fp64 result.
        name: what the tensor is, for the message and for RELAXED.
    """
    assert ours.dtype == plain.dtype, f"{name}: expected {plain.dtype}, got {ours.dtype}"
    finite = exact.detach().double()
    finite = finite[finite.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    ulp = torch.finfo(ours.dtype).eps * largest
    factor = 3.0 if name in RELAXED else 2.0
    err_ours, err_plain = error(ours, exact), error(plain, exact)
    assert err_plain < float("inf"), f"{name}: plain PyTorch itself overflows, so the rule says nothing: other inputs"
    allowed = factor * err_plain + ulp
    assert err_ours <= allowed, (
        f"{name}: error {err_ours:.3e} > {factor:g} x plain's {err_plain:.3e} + 1 ulp {ulp:.3e} "
        f"(max |exact| {largest:.3e})"
    )


def small_draws() -> int:
    """How often inputs of a small shape are drawn: plain PyTorch may be lucky once, so the worst of a few counts.

    Triton's interpreter takes seconds a call; there it is the algorithm that is tested, and fewer draws do.
    """
    return 2 if is_interpreted() else 8


def is_interpreted() -> bool:
    """Whether the ops are forced onto Triton where there is no GPU: through its interpreter."""
    return _library.forced_backend() == "triton" and not torch.cuda.is_available()


def assert_op_accurate(
    ours: Callable[..., Tensor | tuple[Tensor, ...]],
    plain: Callable[..., Tensor | tuple[Tensor, ...]],
    inputs: dict[str, Tensor | None],
    *,
    strided_dy: bool = False,
) -> None:
    """Holds every output and every gradient of an op to the rule, with random output gradients.

    A call that the forced backend refuses, with its reason, is a skipped test.

    Args:
        ours: the op, called with the inputs by name.
        plain: eager PyTorch, called likewise; in fp64 it is also the exact result.
        inputs: floating-point ones are differentiated; the others and None are passed as they are.
        strided_dy: the output gradients are not contiguous.
    """
    wide = {name: _map_floating(value, Tensor.double) for name, value in inputs.items()}
    names = [name for name, value in inputs.items() if value is not None and value.is_floating_point()]
    # The largest error of a handful of numbers is a matter of luck: few of them are drawn several times.
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
        # Both are drawn in plain PyTorch's dtype: a loss is fp32 where plain PyTorch gives bf16.
        dys = []
        for i, (output, plain_output, exact_output) in enumerate(zip(*(outputs for outputs, _ in called), strict=True)):
            assert_accurate(output.to(plain_output.dtype), plain_output, exact_output, f"output {i}")
            dy = torch.randn(*output.shape, 2, device=output.device).to(plain_output.dtype)[..., 0]
            dys.append(dy if strided_dy else dy.contiguous())
        for which, (outputs, leaves) in enumerate(called):
            given = [dy.to(output.dtype) for dy, output in zip(dys, outputs, strict=True)]
            for name, gradient in zip(names, torch.autograd.grad(outputs, leaves, given), strict=True):
                drawn[name][which].append(gradient)
    for name, gradients in drawn.items():
        of_ours, of_plain, exact = (torch.stack(each) for each in gradients)
        assert_accurate(of_ours, of_plain, exact, f"d{name}")


def _map_floating(value: Tensor | None, function: Callable[[Tensor], Tensor]) -> Tensor | None:
    return function(value) if value is not None and value.is_floating_point() else value


def _call(function: Callable, inputs: dict[str, Tensor | None]) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """The outputs as a tuple, and the leaves (of the same memory: a stride is part of an input)."""
    arguments = {name: _map_floating(value, lambda t: t.detach().requires_grad_()) for name, value in inputs.items()}
    outputs = function(**arguments)
    leaves = [value for value in arguments.values() if value is not None and value.requires_grad]
    return outputs if isinstance(outputs, tuple) else (outputs,), leaves
