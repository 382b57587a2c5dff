"""Tests the Triton rotary: views of a fused projection, heads that don't fill a tile, edge cases."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from fastformer.kernels import rotary as kernels  # noqa: E402
from fastformer.ops import rotary, rotary_tables  # noqa: E402
from tests.checks import saved_for_backward  # noqa: E402
from tests.conftest import CallsOf  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_triton")


@pytest.mark.parametrize("interleaved", [False, True])
def test_nothing_beyond_the_heads(interleaved: bool, device: str, guarded: None) -> None:
    """q is a part of a fused projection whose other parts are NaN; memory around the output doesn't change."""
    cos, sin = rotary_tables(9, 16, device=device)
    fused = torch.full((2, 9, 3, 4, 20), float("nan"), device=device)
    x = fused[:, :, 1]
    x.normal_()
    tables = torch.full((9, 24), float("nan"), device=device)
    narrow_cos = tables[:, 8:16].copy_(cos)
    for inverse in (False, True):
        expected = kernels.rotary_fwd(x.contiguous(), cos, sin, None, interleaved, inverse)
        assert torch.equal(kernels.rotary_fwd(x, narrow_cos, sin, None, interleaved, inverse), expected)
        assert expected.isfinite().all()


@pytest.mark.parametrize("interleaved", [False, True])
def test_head_major_memory(interleaved: bool, device: str, calls_of: CallsOf) -> None:
    """(batch, heads, seqlen, dim) in memory is read in place, without a copy."""
    x = torch.randn(2, 3, 9, 16, device=device).transpose(1, 2)
    cos, sin = rotary_tables(9, 16, device=device)
    copies = calls_of(torch.Tensor, "contiguous")
    out = kernels.rotary_fwd(x, cos, sin, None, interleaved, False)
    assert not copies
    assert torch.equal(out, kernels.rotary_fwd(x.contiguous(), cos, sin, None, interleaved, False))


def test_x_is_not_saved(device: str) -> None:
    x = torch.randn(2, 5, 3, 16, device=device, requires_grad=True)
    cos, sin = rotary_tables(9, 16, device=device)
    with saved_for_backward() as saved:
        rotary(x, cos, sin)
    assert {t.data_ptr() for t in saved} == {cos.data_ptr(), sin.data_ptr()}
