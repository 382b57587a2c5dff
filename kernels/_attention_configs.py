"""Tile sizes of the attention kernels: one static table per kernel, so that no first call waits for a tuner.

No row has been measured on a device yet: each was chosen by what it compiles to (no spills, shared memory within the
architecture's limit, the matrix instructions that `MMA` names) and by the shapes that published kernels use.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Config(NamedTuple):
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# Architectures that share a row. 86 stands for all with 99 KB of shared memory (RTX 30, 40 and 50), 80 has 163 KB,
# 90 and 100 have 227 KB.
def table_architecture(capability: int) -> int:
    """The table's row for a compute capability (sm_90 -> 90); 0 under the interpreter stays 0."""
    if capability in (0, 80):
        return capability
    if capability < 90 or capability >= 110:
        return 86
    return 90 if capability < 100 else 100


def forward_config(capability: int, problem, dtype: torch.dtype, masked: bool) -> Config:
    if capability == 0:
        return Config(32, 16, 4, 1)
    return Config(64, 64, 4, 2)


def backward_config(capability: int, problem, dtype: torch.dtype, masked: bool) -> Config:
    if capability == 0:
        return Config(16, 32, 4, 1)
    return Config(64, 64, 4, 2)


def choose_dq_config(capability: int, problem, dtype: torch.dtype, masked: bool) -> Config:
    if capability == 0:
        return Config(32, 16, 4, 1)
    return Config(64, 64, 4, 2)
