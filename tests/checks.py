"""The rule of correctness: at most twice the error of plain PyTorch in the same dtype, both measured against fp64."""

from __future__ import annotations

import torch
from torch import Tensor

# Gradients that may err by 3x instead of 2x, each with its reason. Anything not listed is held to 2x.
RELAXED: dict[str, str] = {}


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
    allowed = factor * err_plain + ulp
    assert err_ours <= allowed, (
        f"{name}: error {err_ours:.3e} > {factor:g} x plain's {err_plain:.3e} + 1 ulp {ulp:.3e} (max |exact| {largest:.3e})"
    )
