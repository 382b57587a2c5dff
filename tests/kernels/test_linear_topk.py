"""Tests the kernels of linear_topk: whole numbers in place of a weight, what they write, chunks of rows, their grid."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("triton")

from fastformer.kernels import _launch  # noqa: E402
from fastformer.kernels import linear_topk as kernels  # noqa: E402
from fastformer.ops import linear_topk, record_backends  # noqa: E402
from fastformer.ops.quantized_linear import QuantizedWeights, dequantized  # noqa: E402
from tests.checks import assert_accurate  # noqa: E402
from tests.covering import each  # noqa: E402
from tests.kernels.test_quantized_linear import DTYPES, FORMATS, matrix_of  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_triton")


@each("rows, columns, depth, k", [(1, 33, 64, 1), (5, 70, 200, 8), (17, 32, 128, 32), (64, 150, 520, 3)])
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_best_of_whole_numbers(dtype, kind, rows, columns, depth, k, device, guarded) -> None:
    """Their logits follow the rule; beyond the rows of a wider matrix nothing is read."""
    matrix = matrix_of(kind, columns, depth, device, dtype)
    wide = torch.full((rows, depth + 8), float("nan"), dtype=dtype, device=device)
    x = wide[:, :depth].normal_()
    weight = dequantized(*matrix, depth, dtype)
    exact = F.linear(x.double(), dequantized(*matrix, depth, torch.float32).double()).log_softmax(-1)
    with QuantizedWeights([(weight, matrix)]).acting(), record_backends() as ran:
        values, indices = linear_topk(x, weight, k)
    assert ran == {("quantized_topk", "triton")}
    plain = F.linear(x, weight).float().log_softmax(-1)
    assert_accurate(values, plain.gather(1, indices), exact.gather(1, indices), "values")
    assert_accurate(values, plain.topk(k).values, exact.topk(k).values, "the best values")


def test_rows_are_computed_in_chunks(device, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(11, 24, device=device), torch.randn(40, 24, device=device)
    whole = linear_topk(x, weight, 3)
    monkeypatch.setattr(kernels, "CHUNK_ROWS", 4)
    parts = linear_topk(x, weight, 3)
    assert torch.equal(parts.indices, whole.indices)
    torch.testing.assert_close(parts.values, whole.values)  # NumPy sums rows by their number, on some CPUs
    assert linear_topk(x[:0], weight, 3).values.shape == (0, 3)


@pytest.mark.parametrize("k, kept", [(1, 2), (8, 8), (50, 64)])
def test_a_program_keeps_the_best_of_its_block(k: int, kept: int, device, monkeypatch: pytest.MonkeyPatch) -> None:
    """One program for each block of the vocabulary, whatever the number of rows, and one for each row to merge them."""
    launches: list[tuple[Any, ...]] = []

    def record(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        keys = next(x for x in args if x is not None and getattr(x, "dtype", None) == torch.int64 and x.dim() == 3)
        launches.append((kernel.fn.__name__, grid, keys.shape, options["K"]))

    monkeypatch.setattr(_launch, "interceptor", record)
    linear_topk(torch.zeros(60, 64, device=device), torch.zeros(1000, 64, device=device), k)
    blocks = -(-1000 // max(32, kept))
    assert launches == [
        ("_linear_topk_kernel", (blocks, 1), (60, blocks, kept), kept),
        ("_merge_topk_kernel", (60,), (60, blocks, kept), kept),
    ]


def test_more_than_the_kernel_keeps_are_left_to_pytorch() -> None:
    x = torch.zeros(1, 8)
    assert kernels.why_unsupported("linear_topk", x=x, k=64) is None
    assert "65" in (kernels.why_unsupported("linear_topk", x=x, k=65) or "")
    assert "float64" in (kernels.why_unsupported("linear_topk", x=x.double(), k=1) or "")
