"""Which products went to our kernels, and not to F.linear."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor

from fastformer.nn import linear as linear_module


def notice_products(monkeypatch: pytest.MonkeyPatch, note: Callable[[Tensor, Tensor, bool], None]) -> None:
    """Has `note(x, weight, is_gradient)` called at each product x W^T of our kernels.

    `is_gradient`: the kernel of weights' gradients took it. They take products on Intel's CPUs, too, from here on.
    """
    product, gradient = linear_module._product, linear_module._weight_gradient

    def noted_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        note(x, weight, False)
        return product(x, weight, bias)

    def noted_gradient(dout: Tensor, x: Tensor) -> Tensor:
        note(dout.t(), x.t(), True)
        return gradient(dout, x)

    monkeypatch.setattr(linear_module, "_suits_mkl", lambda: False)
    monkeypatch.setattr(linear_module, "_product", noted_product)
    monkeypatch.setattr(linear_module, "_weight_gradient", noted_gradient)
