"""The tiles of cached attention, and into how many programs a call is divided: static tables, as for attention."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastformer.kernels._launch import architecture, cdiv, num_sms


class Config(NamedTuple):
    largest_m: int  # rows of a tile at most; SMALLEST_TILE is what tl.dot takes at least
    block_n: int
    num_warps: int
    num_stages: int


# Three TF32 products an operand pair spill in every tile of a larger head.
LARGEST_FP32_HEAD_DIM = 128
# (fp32, head_dim up to) -> config; small enough for 99 KB of shared memory, which every architecture since 8.0 has. Not
# yet measured: chosen by what they compile to, with some 40 KB of loads under way on each SM.
CONFIGS = {
    (False, 64): Config(32, 64, 4, 3),
    (False, 128): Config(32, 32, 4, 3),
    (False, 256): Config(16, 32, 4, 3),
    (True, 64): Config(16, 32, 4, 3),
    (True, LARGEST_FP32_HEAD_DIM): Config(16, 16, 4, 3),
}
INTERPRETED_TILE = Config(32, 16, 4, 1)
# (fp32, head_dim up to, a tile of more than SMALLEST_TILE rows) -> programs that share an SM, by the registers and the
# shared memory that most of its launches compile to: of sm_80, of sm_90 and 100, and where an SM has 100 KB.
PROGRAMS = {
    (False, 64, False): (4, 4, 2),
    (False, 64, True): (3, 3, 2),
    (False, 128, False): (4, 4, 2),
    (False, 128, True): (2, 2, 2),
    (False, 256, False): (2, 2, 1),
    (True, 64, False): (3, 3, 2),
    (True, LARGEST_FP32_HEAD_DIM, False): (2, 2, 1),
}
SMALLEST_TILE = 16
# Rows of the batch that one tile may span.
MOST_ROWS, LEAST_ROWS = 16, 4
MOST_SPLITS = 128
# A row of so few blocks is walked by one program: a merge costs about as much as it would save.
FEW_BLOCKS = 4


def _kind(q: Tensor) -> tuple[bool, int]:
    """The key of CONFIGS."""
    is_fp32 = q.dtype == torch.float32
    return next(key for key in CONFIGS if key[0] == is_fp32 and q.shape[-1] <= key[1])


def config_of(q: Tensor) -> Config:
    """The tile of a call."""
    return CONFIGS[_kind(q)] if q.is_cuda else INTERPRETED_TILE


def programs_at_once(q: Tensor, block_m: int) -> int:
    """How many programs a device runs at a time, about."""
    if not q.is_cuda:
        return num_sms(q.device)
    kind = (*_kind(q), block_m > SMALLEST_TILE)
    of_80, of_90, of_others = PROGRAMS[kind]
    return {80: of_80, 90: of_90, 100: of_90}.get(architecture(q), of_others) * num_sms(q.device)


def rows_together(batch: int, rows_of_one: int, num_kv_heads: int, largest_m: int, wanted: int) -> int:
    """How many rows of the batch a tile spans where they read the cache through cache_batch_idx.

    As many as fit, as long as there are `wanted` programs; the beams of one source are seldom fewer than LEAST_ROWS.
    """
    rows = min(MOST_ROWS, max(1, largest_m // rows_of_one), batch)
    rows = 2 ** (rows.bit_length() - 1)
    while rows > LEAST_ROWS and cdiv(batch, rows) * num_kv_heads < wanted:
        rows //= 2
    return rows


def splits_of(tiles: int, num_blocks: int, wanted: int) -> int:
    """Into how many programs each walk is divided: the fewest that come near the fullest waves of `wanted` programs.

    Args:
        tiles: walks, of all K/V heads.
        num_blocks: the blocks of a row as long as the cache; each program should have two of them.
        wanted: programs that run at once.
    """
    if num_blocks <= FEW_BLOCKS or tiles >= wanted:
        return 1
    most = max(1, min(MOST_SPLITS, num_blocks // 2))
    fullness = [tiles * n / wanted / -(-tiles * n // wanted) for n in range(1, most + 1)]
    return next(n for n, full in enumerate(fullness, 1) if full >= 0.85 * max(fullness))


def most_registers(q: Tensor, block_m: int, block_d: int, turns: bool, capped: bool) -> int | None:
    """Registers a thread at most: more than ptxas keeps to by itself, and then spills, or None where it does not."""
    if q.dtype == torch.float32 and block_d <= 64:
        if architecture(q) in (86, 89):  # whose shared memory is for two programs an SM at most
            return 240
        return 168 if turns else None
    if capped and block_d == 64 and architecture(q) in (86, 89):  # Triton 3.6 spills at the 80 that ptxas takes
        return 96
    return 240 if turns and block_m > SMALLEST_TILE and block_d == 64 else None
