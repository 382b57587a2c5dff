"""Compares rotary with a rotation by complex numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastformer.ops import rotary, rotary_tables
from tests.checks import assert_op_accurate
from tests.covering import each

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def plain(x: Tensor, cos: Tensor, sin: Tensor, *, positions: Tensor | None = None, interleaved: bool = False) -> Tensor:
    """Rotates pairs as complex numbers, times exp(i * angle) (Su et al. 2021); half dtypes use fp32, as models do."""
    if positions is None:
        positions = torch.arange(x.shape[-3], device=x.device)
    wide = x.double() if x.dtype == torch.float64 else x.float()
    turn = torch.complex(cos, sin)[positions].unsqueeze(-2)
    rotated, rest = wide[..., : 2 * cos.shape[1]], x[..., 2 * cos.shape[1] :]
    if interleaved:
        pairs = rotated.unflatten(-1, (-1, 2))
        turned = torch.complex(pairs[..., 0], pairs[..., 1]) * turn
        rotated = torch.stack((turned.real, turned.imag), dim=-1).flatten(-2)
    else:
        first, second = rotated.chunk(2, dim=-1)
        turned = torch.complex(first, second) * turn
        rotated = torch.cat((turned.real, turned.imag), dim=-1)
    return torch.cat((rotated.to(x.dtype), rest), dim=-1)


def compare(x: Tensor, tables: tuple[Tensor, Tensor], *, strided_dy: bool = False, **options) -> None:
    cos, sin = tables
    assert_op_accurate(
        lambda x: rotary(x, cos, sin, **options),
        lambda x: plain(x, cos, sin, **options),
        {"x": x},
        strided_dy=strided_dy,
    )


@each("interleaved", [False, True])
@each("rotary_dim", [32, 20])
@pytest.mark.parametrize("dtype", DTYPES)
def test_accuracy(dtype: torch.dtype, rotary_dim: int, interleaved: bool, backend: str, device: str) -> None:
    x = torch.randn(2, 13, 3, 32, device=device).to(dtype)
    compare(x, rotary_tables(50, rotary_dim, device=device), interleaved=interleaved)


def test_expanded_tables_are_read_in_place(backend: str, device: str) -> None:
    """If these expanded tables were copied, each would take 32 MiB."""
    x, row = torch.randn(1, 3, 2, 64, device=device), torch.rand(2, 1, 32, device=device)
    cos, sin = row.expand(2, 2**18, 32)
    positions = torch.tensor([[7, 2**17, 3]], device=device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiled:
        out = rotary(x, cos, sin, positions=positions)
    torch.testing.assert_close(out, rotary(x, *(table.expand(3, 32).contiguous() for table in row)), rtol=0, atol=0)
    if backend == "cpp":
        assert sum(max(table.self_cpu_memory_usage, 0) for table in profiled.key_averages()) < 2**20


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_dtypes_are_rounded_once(dtype: torch.dtype, backend: str, device: str) -> None:
    """Angles in bf16 would change about half of all elements by an ulp; a fused multiply-add changes a few."""
    if backend == "triton" and device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter truncates to bfloat16 where a GPU rounds to the nearest")
    x = torch.randn(2, 13, 3, 32, device=device).to(dtype)
    cos, sin = rotary_tables(13, 32, device=device)
    once = plain(x.double(), cos, sin).to(dtype)
    try:
        out = rotary(x, cos, sin)
    except NotImplementedError as refusal:
        pytest.skip(str(refusal))
    assert float((out != once).double().mean()) < 0.01


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape", [(2, 13, 3, 16), (29, 3, 16)])
def test_positions(shape: tuple[int, ...], interleaved: bool, backend: str, device: str) -> None:
    """Positions of a padded batch, and of packed tokens."""
    positions = torch.randint(50, shape[:-2], device=device)
    x = torch.randn(*shape, device=device)
    compare(x, rotary_tables(50, 16, device=device), positions=positions, interleaved=interleaved)


@pytest.mark.parametrize("interleaved", [False, True])
@each(
    "shape, rotary_dim",
    [((1, 1, 1, 2), 2), ((7, 2, 17), 16), ((2, 2, 5, 3, 6), 6), ((3, 4, 1, 128), 128), ((2, 0, 3, 8), 8)],
)
def test_shapes(shape: tuple[int, ...], rotary_dim: int, interleaved: bool, backend: str, device: str) -> None:
    x = torch.randn(*shape, device=device)
    compare(x, rotary_tables(9, rotary_dim, device=device), interleaved=interleaved, strided_dy=True)


# Out of (2, 3, 9, 40), heads before tokens: which strides a backend has to follow, and which it may copy away.
VIEWS = {
    "features apart": lambda x: x.transpose(1, 2)[..., ::2],
    "heads apart": lambda x: x.transpose(1, 2)[..., :20],
    "part of a projection": lambda x: x.reshape(2, 9, 3, 40)[..., 20:],
    "one batch for all": lambda x: x[:1, ..., :20].transpose(1, 2).expand(2, -1, -1, -1),
}


@pytest.mark.parametrize("interleaved", [False, True])
@each("view", VIEWS)
def test_not_contiguous(view: str, interleaved: bool, backend: str, device: str) -> None:
    x = VIEWS[view](torch.randn(2, 3, 9, 40, device=device))
    cos, sin = (t.T.contiguous().T for t in rotary_tables(9, 20, device=device))
    assert rotary(x, cos, sin, interleaved=interleaved).is_contiguous()
    compare(x, (cos, sin), interleaved=interleaved)
    positions = torch.randint(9, (9, 2), device=device).T
    compare(x, (cos, sin), interleaved=interleaved, positions=positions)


def test_tables() -> None:
    cos, sin = rotary_tables(30, 6, base=500.0, dtype=torch.float64)
    assert cos.shape == sin.shape == (30, 3)
    for position in (0, 1, 29):
        for i in range(3):
            angle = torch.tensor(position * 500.0 ** (-2 * i / 6), dtype=torch.float64)
            torch.testing.assert_close(cos[position, i], angle.cos(), atol=1e-14, rtol=0)
            torch.testing.assert_close(sin[position, i], angle.sin(), atol=1e-14, rtol=0)
    assert rotary_tables(3, 4)[0].dtype == torch.float32
