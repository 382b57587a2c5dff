"""Tests the Triton add_layer_norm: tiles, programs that share rows, two-stage sums, strides."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fastformer.kernels import add_layer_norm as kernels  # noqa: E402
from fastformer.ops import add_layer_norm, draw_seed  # noqa: E402
from tests.checks import saved_for_backward  # noqa: E402
from tests.ops.test_add_layer_norm import compare, make_inputs  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_triton")


def among_nans(x: Tensor) -> Tensor:
    """Returns the same values with NaN before, after and between the rows."""
    rows, dim = x.shape
    buffer = torch.full((rows + 2, dim + 24), float("nan"), dtype=x.dtype, device=x.device)
    view = buffer[1:-1, 8 : 8 + dim]
    return view.copy_(x)


@pytest.mark.parametrize("rows", [1, 33, 70])
def test_programs_share_the_rows(rows: int, device: str) -> None:
    """There are fewer tiles than programs, a last tile with one row, or several rounds of tiles."""
    compare(make_inputs((rows, 384), device))


def test_more_programs_than_sums_are_added_at_once(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "num_sms", lambda device: 132)  # an H200's; the interpreter's is 2
    compare(make_inputs((67, 2048), device))


@pytest.mark.parametrize("dim", [40, 17])
def test_nothing_beyond_the_rows(dim, device, guarded) -> None:
    """NaN between the rows is not read, and memory around the outputs is not written."""
    x, residual, dy, ds = (torch.randn(11, dim, device=device) for _ in range(4))
    weight, bias = torch.randn(2, dim, device=device)
    options = (0.3, draw_seed(device))
    expected = kernels.add_layer_norm_fwd(x, residual, weight, bias, 1e-5, *options, False)
    actual = kernels.add_layer_norm_fwd(among_nans(x), among_nans(residual), weight, bias, 1e-5, *options, False)
    assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))
    s, mean, rstd = expected[1:]
    rest = (weight, mean, rstd, *options, False, True, torch.float32)
    expected = kernels.add_layer_norm_bwd(dy, ds, s, *rest)
    actual = kernels.add_layer_norm_bwd(among_nans(dy), among_nans(ds), among_nans(s), *rest)
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(expected, actual, strict=True))


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_saved_for_backward(dropout_p: float, device: str) -> None:
    """These are the stream, which the caller holds anyway, the weight, and two numbers per row."""
    leaves = {name: t.requires_grad_() for name, t in make_inputs((6, 40), device, torch.bfloat16).items()}
    with saved_for_backward() as saved:
        _, residual_out = add_layer_norm(**leaves, dropout_p=dropout_p)
    wide = [t for t in saved if t.numel() == 240]
    assert [t.data_ptr() for t in wide] == [residual_out.data_ptr()]
    vectors = sorted(t.numel() for t in saved if t.numel() != 240)
    assert vectors == ([2] if dropout_p else []) + [6, 6, 40]


def test_rows_whose_sums_fit_no_registers_are_refused() -> None:
    """It depends on the bytes that backward reads; the forward pass supports wider rows."""

    def why(dim: int, dtype: torch.dtype, *, stream: bool) -> str | None:
        dy = torch.empty(1, dim, dtype=dtype)
        arguments = {"s": dy, "dresidual_out": dy if stream else None, "weight": None}
        return kernels.why_unsupported("add_layer_norm_bwd", dy=dy, **arguments)

    assert why(8192, torch.bfloat16, stream=True) is None and why(4096, torch.float32, stream=True) is None
    assert why(8192, torch.float32, stream=False) is None
    assert "98304 bytes" in (why(8192, torch.float32, stream=True) or "")
    assert "98304 bytes" in (why(4104, torch.float32, stream=True) or "")
    assert "98304 bytes" in (why(16384, torch.bfloat16, stream=True) or "")
    assert "16384 columns" in (why(16384, torch.bfloat16, stream=False) or "")
    wide = torch.empty(1, 16384)
    assert kernels.why_unsupported("add_layer_norm_fwd", x=wide, residual=None, weight=None, bias=None) is None
