"""Which products went to kernels of ours or to oneDNN, and not to F.linear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from fastformer.nn import linear as linear_module
from fastformer.ops import _extension


def notice_products(monkeypatch: pytest.MonkeyPatch, note: Callable[[Tensor, Tensor, bool], None]) -> None:
    """Has `note(x, weight, is_gradient)` called at each product x W^T of oneDNN's and of our kernels.

    `is_gradient`: the kernel of weights' gradients took it. They take products on Intel's CPUs, too, from here on.
    """
    monkeypatch.setattr(linear_module, "_suits_mkl", lambda: False)
    find = _extension.function
    kernel = find("linear_weight_grad")

    def noting(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def noted(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            note(x, weight, False)
            return product(x, weight, bias)

        return noted

    def noted_kernel(a: Tensor, b: Tensor) -> Tensor:
        assert kernel is not None
        note(a.t(), b.t(), True)
        out: Tensor = kernel(a, b)
        return out

    def function(name: str) -> Any:
        return noted_kernel if name == "linear_weight_grad" and kernel is not None else find(name)

    for name in ("_by_onednn", "_by_kernel"):
        monkeypatch.setattr(linear_module, name, noting(getattr(linear_module, name)))
    monkeypatch.setattr(_extension, "function", function)
