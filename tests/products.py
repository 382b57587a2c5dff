"""Finds out which products run on the C++ kernels instead of F.linear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fastformer.ops import _extension


def notice_products(monkeypatch: pytest.MonkeyPatch, note: Callable[[Tensor, Tensor, bool], None]) -> None:
    """Calls `note(x, weight, is_gradient)` for each product x W^T of the C++ kernels.

    `is_gradient` is whether the kernel of weight gradients computed it. From this call on, the kernels also compute
    products on Intel's CPUs, and bf16 products on CPUs for which oneDNN has them.
    """
    kernel = _extension.function

    def noted_kernel(name: str) -> Callable[..., Any] | None:
        function = kernel(name)
        if function is None or name not in ("linear", "linear_weight_grad"):
            return function

        def noted(first: Tensor, second: Tensor, *bias: Tensor | None) -> Any:
            is_gradient = name == "linear_weight_grad"
            note(first.t() if is_gradient else first, second.t() if is_gradient else second, is_gradient)
            return function(first, second, *bias)

        return noted

    monkeypatch.setattr(_extension, "function", noted_kernel)
    for library in (torch.backends.mkl, torch.backends.mkldnn):
        monkeypatch.setattr(library, "is_available", lambda: False)
