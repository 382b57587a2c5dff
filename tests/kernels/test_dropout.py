"""The Triton dropout mask equals the reference's, bit for bit, with any tile."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from fastformer.kernels._dropout import keep_mask_tile, load_dropout  # noqa: E402
from fastformer.kernels._launch import dropout_arguments  # noqa: E402
from fastformer.ops._dropout import keep_mask, keep_scale, threshold  # noqa: E402
from tests.covering import by_turns  # noqa: E402


@triton.jit
def _mask_kernel(
    out_ptr, dropout, rows, columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr
):
    drawn = load_dropout(dropout)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    first_column = tl.program_id(1) * BLOCK_N
    plane = tl.program_id(2)
    column = first_column + tl.arange(0, BLOCK_N)
    keep = keep_mask_tile(row, first_column, plane, drawn, BLOCK_M, BLOCK_N, TRANSPOSED)
    if TRANSPOSED:
        keep = tl.trans(keep.to(tl.int32)) != 0
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(out_ptr + (plane * rows + row[:, None]) * columns + column[None, :], keep.to(tl.int8), mask=inside)


PROBABILITIES = [1e-4, 0.1, 0.5, 0.999, 1.0]
TILES = [(16, 32, False), (32, 8, True), (1, 64, False), (8, 16, True), (2, 256, False), (4, 128, True)]
TILES += [(m, n, not transposed) for m, n, transposed in TILES]


@pytest.mark.parametrize(
    "dropout_p, block_m, block_n, transposed",
    by_turns(PROBABILITIES, TILES),  # the threshold is compared after the tile has been drawn
)
def test_a_tile_equals_the_reference(block_m, block_n, dropout_p, transposed, device) -> None:
    rows, columns, planes = block_m + 3, 149, 2  # two groups of 64 and a part of one
    # Both halves of the seed and an offset beyond 32 bits: each word of key and counter matters.
    seed = torch.tensor([0x1234567_89ABCDEF, 0x0FEDCBA9_F7654321], device=device)
    out = torch.full((planes, rows, columns), -1, dtype=torch.int8, device=device)
    grid = (triton.cdiv(rows, block_m), triton.cdiv(columns, block_n), planes)
    _mask_kernel[grid](out, dropout_arguments(dropout_p, seed), rows, columns, block_m, block_n, transposed)
    assert torch.equal(out, keep_mask(seed, dropout_p, rows, columns, planes).to(torch.int8))


@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 2**-18, 3 / 512, 5 / 512, 0.997, 1 - 2**-18, 1.0, 1])
def test_arguments_equal_the_references(dropout_p: float, device: str) -> None:
    """All backends round p in the same way, to 0 and 1 only for p = 0 and 1; a seed may be strided."""
    seed = torch.tensor([[3, 0], [4, 0]], device=device)[:, 0]
    contiguous_seed, dropped, scale = dropout_arguments(dropout_p, seed)
    assert (dropped, scale) == (threshold(dropout_p), keep_scale(dropout_p))
    assert contiguous_seed is not None and contiguous_seed.is_contiguous() and contiguous_seed.tolist() == [3, 4]
    assert dropout_arguments(0.0, seed) == (None, 0, 1.0)
