"""Tests the C++ gradient of a linear layer's weight, a^T b, at every size and layout that autograd uses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.checks import assert_accurate
from tests.conftest import skip_without


@pytest.fixture(autouse=True)
def _needs_the_extension() -> None:
    skip_without("cpp", "linear_weight_grad")


def _product(a: Tensor, b: Tensor) -> Tensor:
    out: Tensor = torch.ops.fastformer_cpp.linear_weight_grad(a, b)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=["fp32", "bf16", "fp64"])
@pytest.mark.parametrize(
    ("rows", "m", "n"),
    # The wider one is cut into slices of 128 columns at most, which panels of 32 and groups of 14 rows make up.
    [
        (1, 1, 1),
        (5, 33, 7),
        (7, 3, 130),
        (40, 129, 128),
        (40, 128, 129),
        (90, 300, 31),
        (513, 70, 257),
        (1100, 40, 16),
        (41, 150, 140),
        (41, 140, 150),
    ],  # fmt: skip
)
def test_the_op_equals_the_product(rows: int, m: int, n: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    a, b = torch.randn(rows, m).to(dtype), torch.randn(rows, n).to(dtype)
    exact = a.double().t() @ b.double()
    found = _product(a, b)
    assert found.shape == (m, n) and found.is_contiguous()
    if dtype is torch.float64:
        torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-12)
    else:
        assert_accurate(found, a.t() @ b, exact)


@pytest.mark.parametrize(("m", "n"), [(150, 40), (40, 150)])
def test_rows_may_have_any_strides(m: int, n: int) -> None:
    torch.manual_seed(m)
    for a, b in [
        (torch.randn(50, m + 3)[:, 2:-1], torch.randn(50, n + 9)[:, :-9]),
        (torch.randn(m, 50).t(), torch.randn(50, 2 * n)[:, ::2]),
        (torch.randn(m).expand(50, m), torch.randn(1, n).expand(50, n)),
        (torch.randn(50, 1).expand(50, m), torch.randn(100, n)[::2]),
        (torch.randn(2, m)[1:], torch.randn(m + n)[m:].as_strided((1, n), (3, 1))),
    ]:
        torch.testing.assert_close(_product(a, b), a.contiguous().t() @ b.contiguous(), rtol=1e-4, atol=1e-4)


def test_parts_that_do_not_fit_are_refused() -> None:
    a = torch.randn(6, 5)
    for b in (torch.randn(7, 5), torch.randn(6, 5, 1), torch.randn(6), torch.randn(6, 5).double()):
        with pytest.raises(RuntimeError, match=r"\bout_features\b"):
            _product(a, b)


def test_no_rows_give_zeros_and_nan_stays_in_its_column() -> None:
    assert torch.equal(_product(torch.empty(0, 20), torch.empty(0, 150)), torch.zeros(20, 150))
    assert _product(torch.empty(9, 0), torch.empty(9, 150)).shape == (0, 150)
    a, b = torch.randn(30, 50), torch.randn(30, 200)
    a[4, 7] = torch.nan
    found = _product(a, b)
    assert found[7].isnan().all() and found.isnan().sum() == 200
    b[29, 199] = torch.inf
    assert _product(torch.ones(30, 50), b)[:, 199].isinf().all()
