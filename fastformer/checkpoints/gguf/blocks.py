"""The kinds of GGUF's tensors, and their numbers in fp32.

A row is a sequence of blocks. The order of the operations is that of ggml, so that the numbers are the same bit for
bit. In the kinds with a K, 256 numbers share one or two fp16 scales, by which the small scales of 16 or 32 of them
are multiplied.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from fastformer.checkpoints.levels import E2M1, IQ4, scales_of
from fastformer.models.quantization import Groups

_ROWS_AT_ONCE = 1 << 20  # numbers that are computed at a time, so that the parts of a computation stay small


class Kind(IntEnum):
    """A type of numbers, by its number in files."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    IQ4_NL = 20
    IQ4_XS = 23
    BF16 = 30
    MXFP4 = 39


class Block(NamedTuple):
    """A kind's block.

    Attributes:
        numbers: how many numbers it has.
        size: how many bytes.
        compute: the bytes of blocks (count, size) -> their numbers (count, numbers) in fp32; None: the numbers
            themselves are stored, of `dtype`.
        dtype: see `compute`.
        groups: the bytes of blocks -> their numbers of 4 bits (count, numbers), and the scales of each 32 of them
            (count, -1); None: they have no such form.
        levels: those of `Groups`.
    """

    numbers: int
    size: int
    compute: Callable[[Tensor], Tensor] | None = None
    dtype: torch.dtype | None = None
    groups: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
    levels: Tensor | None = None


def _half(x: Tensor) -> Tensor:
    """Returns fp16 numbers (count, n) of bytes (count, 2 * n)."""
    return x.contiguous().view(torch.float16).float()


def _shifted(x: Tensor, shifts: tuple[int, ...], bits: int, width: int) -> Tensor:
    """Returns fields of bits (count, -1): each `width` bytes give the first field of each, then the second, and so on.

    Args:
        x: bytes (count, n).
        shifts: the places of the fields, from the lowest bit.
        bits: the size of a field.
        width: how many neighbours are taken together.
    """
    places = torch.tensor(shifts, dtype=torch.uint8)[:, None]
    return ((x.reshape(len(x), -1, 1, width) >> places) & ((1 << bits) - 1)).flatten(1)


def _nibbles(x: Tensor, width: int = 16) -> Tensor:
    return _shifted(x, (0, 4), 4, width)


def _fifth(x: Tensor) -> Tensor:
    """Returns 32 bits (count, 32) of 4 bytes, at the place of a fifth bit."""
    return _shifted(x, (*range(8),), 1, 1) << 4


def _in_groups(
    numbers: int, size: int, groups: Callable[[Tensor], tuple[Tensor, Tensor]], levels: Tensor | None = None
) -> Block:
    """Returns a block whose numbers are given by its groups."""
    table = None if levels is None else levels.float()[:, None]

    def compute(x: Tensor) -> Tensor:
        q, scale = groups(x)
        # Faster than an index.
        return _scaled(q.float() - 8 if table is None else functional.embedding(q.int(), table), scale.float())

    return Block(numbers, size, compute, groups=groups, levels=levels)


def _q4_0(x: Tensor) -> tuple[Tensor, Tensor]:
    return _nibbles(x[:, 2:]), x[:, :2].contiguous().view(torch.float16)


def _iq4_xs(x: Tensor) -> tuple[Tensor, Tensor]:
    scales = _shifted(x[:, 4:8], (0, 4), 4, 1) | _shifted(x[:, 2:4], (0, 2, 4, 6), 2, 1) << 4
    return _nibbles(x[:, 8:]), _half(x[:, :2]) * (scales.float() - 32)


def _mxfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    return _nibbles(x[:, 1:]), scales_of(x[:, :1])


def _q4_1(x: Tensor) -> Tensor:
    return _half(x[:, :2]) * _nibbles(x[:, 4:]).float() + _half(x[:, 2:4])


def _q5_0(x: Tensor) -> Tensor:
    return _half(x[:, :2]) * ((_nibbles(x[:, 6:]) | _fifth(x[:, 2:6])).float() - 16)


def _q5_1(x: Tensor) -> Tensor:
    return _half(x[:, :2]) * (_nibbles(x[:, 8:]) | _fifth(x[:, 4:8])).float() + _half(x[:, 2:4])


def _q8_0(x: Tensor) -> Tensor:
    return x[:, 2:].contiguous().view(torch.int8).float() * _half(x[:, :2])


def _scaled(q: Tensor, scale: Tensor, least: Tensor | None = None) -> Tensor:
    """Returns numbers (count, 256) times their scales (count, n), less the least numbers (count, n)."""
    numbers = q.float().view(*scale.shape, -1) * scale[..., None]
    return (numbers if least is None else numbers - least[..., None]).flatten(1)


def _q2_k(x: Tensor) -> Tensor:
    scales, q = x[:, :16], _shifted(x[:, 16:80], (0, 2, 4, 6), 2, 32)
    return _scaled(q, _half(x[:, 80:82]) * (scales & 15).float(), _half(x[:, 82:84]) * (scales >> 4).float())


def _q3_k(x: Tensor) -> Tensor:
    high, q = _shifted(x[:, :32], (*range(8),), 1, 32), _shifted(x[:, 32:96], (0, 2, 4, 6), 2, 32)
    scales = _shifted(x[:, 96:104], (0, 4), 4, 8) | _shifted(x[:, 104:108], (0, 2, 4, 6), 2, 4) << 4
    return _scaled(q.float() - 4 * (1 - high.float()), _half(x[:, 108:110]) * (scales.float() - 32))


def _small_scales(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the scales and the least numbers (count, 8) of Q4_K and Q5_K, in units of their large ones."""
    first, second, both = x[:, :4], x[:, 4:8], x[:, 8:12]
    scales = torch.cat([first & 63, (both & 15) | (first >> 2 & 48)], 1)
    least = torch.cat([second & 63, (both >> 4) | (second >> 2 & 48)], 1)
    return scales.float(), least.float()


def _q4_k(x: Tensor) -> Tensor:
    scales, least = _small_scales(x[:, 4:16])
    return _scaled(_nibbles(x[:, 16:], 32), _half(x[:, :2]) * scales, _half(x[:, 2:4]) * least)


def _q5_k(x: Tensor) -> Tensor:
    scales, least = _small_scales(x[:, 4:16])
    q = _nibbles(x[:, 48:], 32) | _shifted(x[:, 16:48], (*range(8),), 1, 32) << 4
    return _scaled(q, _half(x[:, :2]) * scales, _half(x[:, 2:4]) * least)


def _q6_k(x: Tensor) -> Tensor:
    q = _nibbles(x[:, :128], 64) | _shifted(x[:, 128:192], (0, 2, 4, 6), 2, 32) << 4
    return _scaled(q.float() - 32, _half(x[:, 208:]) * x[:, 192:208].contiguous().view(torch.int8).float())


BLOCKS: dict[Kind, Block] = {
    Kind.F32: Block(1, 4, dtype=torch.float32),
    Kind.F16: Block(1, 2, dtype=torch.float16),
    Kind.BF16: Block(1, 2, dtype=torch.bfloat16),
    Kind.Q4_0: _in_groups(32, 18, _q4_0),
    Kind.Q4_1: Block(32, 20, _q4_1),
    Kind.Q5_0: Block(32, 22, _q5_0),
    Kind.Q5_1: Block(32, 24, _q5_1),
    Kind.Q8_0: Block(32, 34, _q8_0),
    Kind.Q2_K: Block(256, 84, _q2_k),
    Kind.Q3_K: Block(256, 110, _q3_k),
    Kind.Q4_K: Block(256, 144, _q4_k),
    Kind.Q5_K: Block(256, 176, _q5_k),
    Kind.Q6_K: Block(256, 210, _q6_k),
    Kind.IQ4_NL: _in_groups(32, 18, _q4_0, IQ4),
    Kind.IQ4_XS: _in_groups(256, 136, _iq4_xs, IQ4),
    Kind.MXFP4: _in_groups(32, 17, _mxfp4, E2M1),
}


def numbers(kind: Kind, shape: tuple[int, ...], data: Tensor) -> Tensor:
    """Returns the numbers of a tensor: in fp32, or as they are stored if they are floating-point numbers.

    Args:
        kind: how they are stored.
        shape: the shape of the result.
        data: the bytes.
    """
    block = BLOCKS[kind]
    if block.compute is None:
        assert block.dtype is not None
        return data.view(block.dtype).view(shape)
    blocks = data.view(-1, block.size)
    result = torch.empty(len(blocks), block.numbers)
    step = max(1, _ROWS_AT_ONCE // block.numbers)
    for begin in range(0, len(blocks), step):
        result[begin : begin + step] = block.compute(blocks[begin : begin + step])
    return result.view(shape)


def int4_groups(kind: Kind, shape: tuple[int, ...], data: Tensor) -> Groups | None:
    """Returns a matrix as groups, with the numbers of the file; None: its kind has none.

    Args:
        kind, shape, data: see `numbers`.
    """
    block = BLOCKS[kind]
    if block.groups is None:
        return None
    q, scale = (part.view(shape[0], -1) for part in block.groups(data.view(-1, block.size)))
    return Groups(q[:, ::2] | q[:, 1::2] << 4, scale if block.levels is None else scale.float(), levels=block.levels)
