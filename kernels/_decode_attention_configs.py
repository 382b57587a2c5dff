"""The tile sizes of cached attention, and the number of programs for a call: static tables, as for attention."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastformer.kernels._launch import architecture, cdiv, num_sms


class DecodeConfig(NamedTuple):
    largest_m: int  # the most rows of a tile; SMALLEST_TILE is the minimum of tl.dot
    block_n: int
    num_warps: int
    num_stages: int


# With larger heads, three TF32 products per pair of operands spill in every tile.
LARGEST_FP32_HEAD_DIM = 128
# (fp32, largest head_dim) -> config. All fit into 99 KB of shared memory, which every architecture since 8.0 has. They
# have not been measured yet, but were chosen by their machine code, with about 40 KB of loads in flight on each SM.
CONFIGS = {
    (False, 64): DecodeConfig(32, 64, 4, 3),
    (False, 128): DecodeConfig(32, 32, 4, 3),
    (False, 256): DecodeConfig(16, 32, 4, 3),
    (True, 64): DecodeConfig(16, 32, 4, 3),
    (True, LARGEST_FP32_HEAD_DIM): DecodeConfig(16, 16, 4, 3),
}
INTERPRETED_TILE = DecodeConfig(32, 16, 4, 1)
# (fp32, largest head_dim, whether a tile has more than SMALLEST_TILE rows) -> the number of programs that share an SM,
# given the registers and the shared memory of most launches: on sm_80, on sm_90 and 100, and on SMs with 100 KB.
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
# The number of batch rows that one tile may span.
MOST_ROWS, LEAST_ROWS = 16, 4
MOST_SPLITS = 128
# One program processes a row of at most this many blocks: a merge costs about as much as splitting would save.
FEW_BLOCKS = 4


def _kind(q: Tensor) -> tuple[bool, int]:
    """Returns the key of CONFIGS."""
    is_fp32 = q.dtype == torch.float32
    return next(key for key in CONFIGS if key[0] == is_fp32 and q.shape[-1] <= key[1])


def config_of(q: Tensor) -> DecodeConfig:
    """Returns the tile of a call."""
    return CONFIGS[_kind(q)] if q.is_cuda else INTERPRETED_TILE


def programs_at_once(q: Tensor, block_m: int) -> int:
    """Returns roughly how many programs a device runs at a time."""
    if not q.is_cuda:
        return num_sms(q.device)
    kind = (*_kind(q), block_m > SMALLEST_TILE)
    of_80, of_90, of_others = PROGRAMS[kind]
    return {80: of_80, 90: of_90, 100: of_90}.get(architecture(q), of_others) * num_sms(q.device)


def rows_together(batch: int, rows_of_one: int, num_kv_heads: int, largest_m: int, num_programs: int) -> int:
    """Returns how many batch rows a tile spans if they read the cache through cache_batch_idx.

    As many as fit while `num_programs` programs remain, but at least LEAST_ROWS: a source rarely has fewer beams.
    """
    rows = min(MOST_ROWS, max(1, largest_m // rows_of_one), batch)
    rows = 2 ** (rows.bit_length() - 1)
    while rows > LEAST_ROWS and cdiv(batch, rows) * num_kv_heads < num_programs:
        rows //= 2
    return rows


def splits_of(tiles: int, num_blocks: int, num_programs: int) -> int:
    """Returns the number of programs per walk: the fewest that fill waves of `num_programs` programs nearly best.

    Args:
        tiles: the number of walks, over all K/V heads.
        num_blocks: the number of blocks in a row as long as the cache; each program should have two of them.
        num_programs: the number of programs that run at once.
    """
    if num_blocks <= FEW_BLOCKS or tiles >= num_programs:
        return 1
    most = max(1, min(MOST_SPLITS, num_blocks // 2))
    fullness = [tiles * n / num_programs / -(-tiles * n // num_programs) for n in range(1, most + 1)]
    return next(n for n, full in enumerate(fullness, 1) if full >= 0.85 * max(fullness))


def most_registers(q: Tensor, block_m: int, block_d: int, turns: bool, capped: bool) -> int | None:
    """Returns a limit of registers per thread if ptxas would choose a lower one and spill, else None."""
    if q.dtype == torch.float32 and block_d <= 64:
        if architecture(q) in (86, 89):  # where shared memory allows at most two programs per SM
            return 240
        return 168 if turns else None
    if capped and block_d == 64 and architecture(q) in (86, 89):
        return 128  # with Triton 3.6, ptxas chooses 80 and spills; shared memory allows two programs anyway
    return 240 if turns and block_m > SMALLEST_TILE and block_d == 64 else None
