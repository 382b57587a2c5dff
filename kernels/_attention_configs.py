"""Tile sizes of the attention kernels: static tables, so that no first call waits for a tuner.

No row has been compared with other tiles on a device yet. Each was chosen by its machine code
(`benchmarks/machine_code`: no spills, shared memory within the architecture's limit, wgmma or tcgen05 if the tile has
64 rows) and by the tiles that published kernels use.

Masks and dropout need registers, so a row may have a different tile for a mask, for dropout, and for both together, and
one for calls that have none of these and no boolean mask or left window either.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from fastformer.kernels._attention_common import Problem


class Config(NamedTuple):
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    split: bool = False  # backward: a separate kernel computes dq (see attention_backward.py)
    exact: bool = False  # backward: fp32 products use FMA, because three tf32 products would spill
    maxnreg: int | None = None  # most registers per thread: fewer let two programs share an SM, more avoid spills


class ConfigKey(NamedTuple):
    """The properties of a call that determine its config."""

    capability: int  # sm_90 -> 90; 0 under the interpreter
    is_fp32: bool
    block_d: int  # head_dim rounded up to a power of two, 16 or more
    # With a mask or, if block_d is at most 128, a cap. A boolean mask that all rows share needs few registers, so it
    # counts only together with both dropout and a left window.
    masked: bool
    dropout: bool
    is_causal: bool
    bucket: str  # "short": up to 256 rows and keys; "long"
    bare: bool  # without any mask, cap, left window or dropout: needs the fewest registers
    windowed: bool  # with a left window


def call_of(capability: int, problem: Problem, dtype: torch.dtype, mask: str) -> ConfigKey:
    """Returns the key of a call. mask: see `mask_kind`."""
    capped = problem.softcap is not None
    dropout, windowed = problem.dropout[0] is not None, problem.window[0] is not None
    return ConfigKey(
        capability,
        dtype == torch.float32,
        problem.block_d,
        mask not in ("none", "bool_keys")
        or (mask == "bool_keys" and dropout and windowed)
        or (capped and problem.block_d <= 128),
        dropout,
        problem.window[1] is not None,
        "short" if max(problem.seqlen_q, problem.seqlen_k) <= 256 else "long",
        mask == "none" and not capped and not dropout and not windowed,
        windowed,
    )


class Row(NamedTuple):
    """One architecture's configs for a head_dim.

    `masked`, `dropout` and `bare` default to `plain`; `both` and `windowed_dropout` default to `dropout`.
    """

    plain: Config
    masked: Config | None = None
    dropout: Config | None = None
    both: Config | None = None
    bare: Config | None = None
    windowed_dropout: Config | None = None  # dropout with a left window, unless `both` applies

    def config(self, call: ConfigKey) -> Config:
        if call.masked and call.dropout and self.both is not None:
            return self.both
        if call.windowed and call.dropout and self.windowed_dropout is not None:
            return self.windowed_dropout
        special = self.dropout if call.dropout else self.masked if call.masked else self.bare if call.bare else None
        return special or self.plain


# (architecture, largest block_d) -> configs. Architectures: 80 for all that multiply with mma.sync (sm_80 to 89, and
# 120 unless it has its own row; the tiles fit into 99 KB of shared memory), 90 for wgmma, 100 for tcgen05.
Table = dict[tuple[int, int], Row]
FORWARD: Table = {
    (80, 32): Row(
        Config(128, 64, 4, 2),
        Config(64, 64, 4, 2),
        Config(64, 64, 4, 2),
        both=Config(64, 64, 4, 2, maxnreg=255),  # with several options, ptxas would use at most 168 and spill
        windowed_dropout=Config(64, 64, 4, 2, maxnreg=168),  # on sm_120, ptxas would use at most 128 and spill
    ),
    (80, 64): Row(Config(128, 64, 8, 2)),
    (80, 128): Row(Config(128, 32, 8, 3)),
    (80, 256): Row(Config(64, 32, 8, 2), Config(64, 16, 8, 2), Config(64, 16, 8, 2)),
    (90, 32): Row(Config(128, 64, 4, 3), Config(64, 64, 4, 3), Config(64, 64, 4, 3)),
    (90, 64): Row(
        Config(128, 64, 8, 3, maxnreg=128),
        Config(128, 64, 8, 3),
        both=Config(128, 64, 8, 3),
        windowed_dropout=Config(128, 64, 8, 2, maxnreg=128),  # a third stage would spill 8 bytes
    ),
    (90, 128): Row(
        Config(128, 64, 8, 3),
        dropout=Config(128, 64, 8, 2),
        both=Config(128, 32, 8, 3),
        bare=Config(128, 128, 8, 3),
    ),
    (90, 256): Row(Config(128, 32, 8, 2)),
    (100, 128): Row(Config(128, 64, 8, 3)),
    (100, 256): Row(Config(128, 32, 8, 2)),
    (120, 64): Row(Config(128, 64, 8, 2), both=Config(128, 32, 8, 2)),
}
# With few rows, tiles of 64 rows give twice as many programs.
FORWARD_SHORT: Table = {
    (80, 64): Row(Config(64, 64, 4, 2), dropout=Config(64, 64, 8, 2)),
    (90, 64): Row(Config(64, 64, 4, 3)),
    (90, 128): Row(Config(64, 64, 8, 2)),
    (100, 64): Row(Config(64, 64, 4, 3)),
}
FORWARD_FP32: Table = {
    (80, 64): Row(Config(64, 32, 8, 1), Config(32, 32, 8, 1), Config(32, 32, 8, 1)),
    (80, 128): Row(Config(16, 32, 8, 1)),
    (90, 64): Row(Config(64, 32, 4, 2), dropout=Config(64, 32, 4, 1)),
    (90, 128): Row(Config(16, 32, 8, 1)),
    (100, 64): Row(Config(64, 32, 8, 2)),
    (100, 128): Row(Config(16, 32, 8, 2)),
}
BACKWARD: Table = {
    (80, 64): Row(Config(32, 64, 4, 1), Config(32, 64, 8, 1), Config(32, 64, 8, 1)),
    (80, 128): Row(Config(32, 64, 8, 2), Config(32, 32, 8, 2), Config(32, 32, 8, 2), Config(32, 32, 8, 1)),
    (80, 256): Row(Config(16, 32, 8, 1, split=True), both=Config(32, 16, 8, 1, split=True)),
    (90, 64): Row(
        Config(64, 128, 8, 2),
        Config(64, 128, 8, 2, split=True),
        Config(64, 128, 8, 2, split=True),
        Config(32, 128, 8, 2),
    ),
    (90, 128): Row(Config(32, 128, 8, 2, split=True)),
    (90, 256): Row(
        Config(32, 32, 8, 2, split=True), Config(16, 32, 8, 2, split=True), Config(16, 32, 8, 2, split=True)
    ),
    (100, 128): Row(Config(32, 128, 8, 2)),
    (100, 256): Row(
        Config(32, 32, 8, 2, split=True), Config(32, 16, 8, 2, split=True), Config(32, 16, 8, 2, split=True)
    ),
    # Shared memory has room for one program only, but ptxas of Triton 3.6 would still use at most 128 registers and
    # spill.
    (120, 256): Row(
        Config(16, 32, 8, 1, split=True, maxnreg=240),
        Config(16, 32, 8, 1, split=True),
        Config(16, 32, 8, 1, split=True),
        Config(32, 16, 8, 1, split=True),
    ),
}
# Up to 128 keys are one block, and the kernel also sums P and delta. With dropout, 64 rows would then spill.
BACKWARD_SHORT: Table = {(90, 64): BACKWARD[90, 64]._replace(dropout=Config(32, 128, 8, 2, split=True))}
BACKWARD_FP32: Table = {
    (80, 32): Row(Config(16, 32, 8, 1)),
    (80, 64): Row(Config(32, 32, 8, 1), Config(16, 32, 8, 1), Config(16, 32, 8, 1), Config(16, 16, 8, 1)),
    (80, 128): Row(Config(16, 16, 8, 1), Config(16, 16, 8, 1, exact=True), Config(16, 16, 8, 1, exact=True)),
    (90, 32): Row(Config(16, 32, 8, 1)),
    (90, 64): Row(Config(32, 32, 8, 1), Config(16, 32, 8, 1), Config(16, 32, 8, 1), Config(16, 16, 8, 1)),
    (90, 128): Row(Config(32, 16, 8, 1), Config(16, 16, 8, 1), Config(16, 16, 8, 1), Config(16, 16, 8, 2, exact=True)),
    (100, 32): Row(Config(16, 32, 8, 1)),
    (100, 64): Row(Config(16, 32, 8, 1), Config(16, 32, 4, 1), both=Config(16, 32, 4, 1)),
    (100, 128): Row(Config(16, 16, 8, 1), both=Config(16, 16, 8, 2, exact=True)),
    (120, 128): Row(Config(16, 16, 8, 2, exact=True)),
}
DQ: Table = {
    (80, 64): Row(Config(64, 64, 8, 1)),
    (80, 128): Row(Config(64, 32, 8, 1)),
    # 64 rows would spill on sm_86 and 89, and so would 32 if ptxas used at most 128 registers, as for two programs.
    (80, 256): Row(Config(64, 16, 8, 1), windowed_dropout=Config(32, 16, 8, 1, maxnreg=240)),
    (90, 128): Row(Config(128, 64, 8, 2)),
    (90, 256): Row(Config(64, 16, 8, 2)),
    (100, 64): Row(Config(128, 64, 8, 2)),
    (100, 128): Row(Config(128, 32, 8, 2)),
    # If loads are pipelined, Triton 3.7.1 omits a fence before a product. With Triton 3.6.0, ptxas would
    # use 128 registers, and spill.
    (100, 256): Row(Config(64, 32, 8, 1, maxnreg=255)),
    (120, 256): Row(Config(32, 16, 8, 1)),
}
DQ_FP32: Table = {
    (80, 64): Row(Config(32, 32, 8, 1)),
    (80, 128): Row(Config(16, 16, 8, 1)),
    (90, 64): Row(Config(32, 32, 8, 1)),
    (90, 128): Row(Config(16, 16, 8, 1)),
    (100, 64): Row(Config(16, 32, 8, 1)),
    (100, 128): Row(Config(16, 16, 8, 2, exact=True)),
    (120, 128): Row(Config(16, 16, 8, 2, exact=True)),
}
# With larger heads, the three products per pair of fp32 operands spill in every tile.
LARGEST_FP32_HEAD_DIM = 128

_INTERPRETED = Config(32, 32, 4, 1)


def _rows(capability: int) -> tuple[int, ...]:
    """Returns the rows of the tables that apply to an architecture: its own, then one that it shares."""
    family = capability // 10 * 10
    return (family,) if family in (90, 100) else (family, 80)


def _look_up(call: ConfigKey, *tables: Table) -> Config:
    """Returns the config of a call: that of the first table with a fitting row."""
    if call.capability == 0:
        return _INTERPRETED
    rows = _rows(call.capability)
    for table in tables:
        covering = [(largest, rows.index(row)) for row, largest in table if row in rows and call.block_d <= largest]
        if covering:
            largest, rank = min(covering)
            return table[rows[rank], largest].config(call)
    raise AssertionError(f"no config for {call}")


@functools.cache
def forward_config(call: ConfigKey) -> Config:
    """Returns the tile of `_attention_fwd_kernel`."""
    if call.is_fp32:
        return _look_up(call, FORWARD_FP32)
    return _look_up(call, FORWARD_SHORT if call.bucket == "short" else {}, FORWARD)


@functools.cache
def backward_config(call: ConfigKey) -> Config:
    """Returns the tile of `_dkdv_kernel`."""
    if call.is_fp32:
        return _look_up(call, BACKWARD_FP32)
    return _look_up(call, BACKWARD_SHORT if call.bucket == "short" else {}, BACKWARD)


@functools.cache
def choose_dq_config(call: ConfigKey) -> Config:
    """Returns the tile of `_dq_kernel`."""
    return _look_up(call, DQ_FP32 if call.is_fp32 else DQ)


def tile_of(config: Config, problem: Problem) -> dict[str, object]:
    """Returns a config as keyword arguments of a kernel."""
    keywords = {
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "num_warps": config.num_warps,
        "num_stages": config.num_stages, "PRECISION": "ieee" if config.exact else problem.precision,
    }  # fmt: skip
    return keywords if config.maxnreg is None else keywords | {"maxnreg": config.maxnreg}
