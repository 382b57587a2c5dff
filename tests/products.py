"""Which products went to a kernel of ours or to oneDNN, and not to F.linear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from fastformer.nn import linear as linear_module
from fastformer.ops import _extension


def notice_products(monkeypatch: pytest.MonkeyPatch, note: Callable[[Tensor, Tensor, bool], None]) -> None:
    """Has `note(x, weight, is_kernel)` called at each product x W^T of oneDNN's and of our kernel's, of a gradient.

    They take products on Intel's CPUs, too, from here on.
    """
    monkeypatch.setattr(linear_module, "_suits_mkl", lambda: False)
    by_onednn, find = linear_module._by_onednn, _extension.function
    kernel = find("linear_weight_grad")

    def noted(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        note(x, weight, False)
        return by_onednn(x, weight, bias)

    def noted_kernel(a: Tensor, b: Tensor) -> Tensor:
        assert kernel is not None
        note(a.t(), b.t(), True)
        out: Tensor = kernel(a, b)
        return out

    def function(name: str) -> Any:
        return noted_kernel if name == "linear_weight_grad" and kernel is not None else find(name)

    monkeypatch.setattr(linear_module, "_by_onednn", noted)
    monkeypatch.setattr(_extension, "function", function)
