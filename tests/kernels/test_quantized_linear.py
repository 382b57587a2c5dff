"""Tests the Triton products of int8 and int4 by the rule, and against the C++ engine's products of the same bytes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("triton")

from fastformer.kernels import quantized_linear as kernels  # noqa: E402
from fastformer.models.quantization import to_grid, to_groups  # noqa: E402
from fastformer.ops import record_backends  # noqa: E402
from fastformer.ops.quantized_linear import QuantizedMatrix, dequantized, quantized_linear  # noqa: E402
from tests.checks import assert_accurate  # noqa: E402
from tests.conftest import HAS_GPU  # noqa: E402
from tests.covering import each  # noqa: E402
from tests.engine.test_packed_gemm import extension  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_triton")

FORMATS = ("int8", "int4", "int4 with zeros")
# The interpreter multiplies bf16 wrongly.
DTYPES = [torch.float16, *([torch.bfloat16] if HAS_GPU else [])]
# Tails of tiles: rows (16 to 64, and beyond), columns (32), the depth (128), a group (32); and none.
SIZES = [(1, 33, 64), (5, 70, 200), (17, 32, 128), (64, 65, 520), (70, 40, 48), (3, 31, 257)]


def matrix_of(kind: str, columns: int, depth: int, device: str, dtype: torch.dtype = torch.float16) -> QuantizedMatrix:
    weight = torch.randn(columns, depth, device=device, dtype=dtype) * depth**-0.5
    if kind == "int8":
        return QuantizedMatrix(*to_grid(weight))
    nibbles, scale, *_ = to_groups(weight)
    zero = torch.randint(0, 17, scale.shape, dtype=torch.uint8) if kind.endswith("zeros") else None
    return QuantizedMatrix(nibbles, scale, zero).to(torch.device(device))


@each("rows, columns, depth", SIZES)
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_follow_the_rule(dtype, kind, rows, columns, depth, device, guarded) -> None:
    matrix = matrix_of(kind, columns, depth, device, dtype)
    bias = torch.randn(2 * columns, device=device).to(dtype)[::2]
    # The rows of a wider matrix, beyond whose end nothing may be read: NaN.
    wide = torch.full((rows, depth + 8), float("nan"), dtype=dtype, device=device)
    x = wide[:, :depth].normal_()
    weight = dequantized(*matrix, depth, dtype)
    exact_weight = dequantized(*matrix, depth, torch.float32)
    for b in (bias, None):
        exact = F.linear(x.double(), exact_weight.double(), None if b is None else b.double())
        plain = F.linear(x, weight, b)
        with record_backends() as ran:
            assert_accurate(quantized_linear(x, matrix, b), plain, exact)
            assert_accurate(quantized_linear(x, matrix, b, is_wide=True), plain.float(), exact, "wide")
        assert ran == {("quantized_linear", "triton")}


@pytest.mark.parametrize("kind", FORMATS)
def test_sums_are_those_of_the_engine(kind, device) -> None:
    """The engine rounds rows to whole numbers; of such rows, both give the same fp32 sums from the same bytes."""
    rows, columns, depth = 9, 70, 200
    matrix = matrix_of(kind, columns, depth, device)
    x = torch.randint(0, 256, (rows, depth), device=device).half()
    x[:, 0], x[:, 1] = 0, 255  # so that a step of the engine's rows is 1
    numbers = x.float().cpu().numpy()
    found = quantized_linear(x, matrix, is_wide=True)
    assert found.dtype == torch.float32
    if kind == "int8":
        weight = dequantized(*matrix, depth, torch.float32).cpu().numpy()
        expected = extension().packed_linear(numbers, weight, None, "int8")
    else:
        nibbles, scale, zero = (None if part is None else part.cpu() for part in matrix)
        parts = (nibbles.numpy(), scale.float().numpy(), None if zero is None else zero.numpy())
        expected = extension().packed_linear_int4(numbers, *parts, None)
    # In int4 a weight is rounded to 16 bits before it is multiplied.
    tolerance = 1e-5 if kind == "int8" else 2**-9
    torch.testing.assert_close(found.cpu(), torch.from_numpy(expected), rtol=tolerance, atol=tolerance * 255)


@pytest.mark.parametrize("kind", FORMATS)
def test_some_rows_of_a_matrix(kind, device) -> None:
    matrix, x = matrix_of(kind, 96, 64, device), torch.randn(4, 64, device=device).half()
    whole = quantized_linear(x, matrix)
    assert torch.equal(quantized_linear(x, matrix.rows(32, 40)), whole[:, 32:72])


def test_a_row_of_zeros_and_one_of_nan(device) -> None:
    """A row that no normal scale can hold is 0, and NaN stays in its row."""
    weight = torch.randn(40, 64, device=device).half()
    weight[7] = 0
    matrix, x = QuantizedMatrix(*to_grid(weight)), torch.randn(3, 64, device=device).half()
    x[1, 5] = float("nan")
    out = quantized_linear(x, matrix)
    assert (out[::2, 7] == 0).all() and out[1].isnan().all() and out[::2].isfinite().all()


def why(x: Tensor) -> str | None:
    matrix = matrix_of("int8", 8, 64, "cpu")
    return kernels.why_unsupported("quantized_linear", x=x, q=matrix.q, scale=matrix.scale)


def test_other_dtypes_are_left_to_pytorch() -> None:
    assert why(torch.zeros(1, 64, dtype=torch.float16)) is None
    for dtype in (torch.float32, torch.float64):
        assert "float16" in (why(torch.zeros(1, 64, dtype=dtype)) or "")
