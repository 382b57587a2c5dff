"""Folders whose experts are in MXFP4, as gpt-oss was published: 32 neighbouring inputs share a power of two.

The tensor X of all experts of a layer, (experts, in, out) in other folders, is

X_blocks     (experts, out, in / 32, 16) uint8: two numbers of 4 bits in each, of which the low half comes first
X_scales     (experts, out, in / 32) uint8: the exponent of the power of two, plus 127 (E8M0; 255 is NaN)

4 bits are a sign, two bits of exponent and one of mantissa (E2M1; Open Compute Project, "OCP Microscaling Formats (MX)
Specification", version 1.0).
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from fastformer.checkpoints.file_matrix import FileMatrix
from fastformer.checkpoints.levels import E2M1, scales_of
from fastformer.models.quantization import GROUP, Groups

METHOD = "mxfp4"
_BLOCKS, _SCALES = "_blocks", "_scales"
_PAIRS = torch.stack([E2M1.repeat(16), E2M1.repeat_interleave(16)], 1).float()  # those of each byte
_NAN = 255


def take_matrices(left: dict[str, Tensor], folder: Path) -> None:
    """Replaces the tensors in MXFP4 by matrices in the file, all experts' maps one below the other.

    In those whose rows of gates and of the maps beside them alternate, the gates come first.

    Args:
        left: the folder's tensors.
        folder: the folder, for messages.

    Raises:
        ValueError: there are none, or two tensors don't fit together.
    """
    names = [name.removesuffix(_BLOCKS) for name in left if name.endswith(_BLOCKS)]
    if not names:
        raise ValueError(f"expected tensors whose names end with {_BLOCKS}, as quant_method {METHOD!r} has them")
    for name in names:
        blocks, scales = left.pop(name + _BLOCKS), left.pop(name + _SCALES, None)
        if blocks.dtype != torch.uint8 or blocks.dim() != 4 or blocks.shape[-1] != GROUP // 2:
            raise ValueError(
                f"expected {name}{_BLOCKS} of torch.uint8 and shape (experts, out, groups, {GROUP // 2}), got "
                f"{blocks.dtype} {(*blocks.shape,)}"
            )
        if scales is None or scales.dtype != torch.uint8 or scales.shape != blocks.shape[:-1]:
            got = "none" if scales is None else f"{scales.dtype} {(*scales.shape,)}"
            raise ValueError(f"expected {name}{_SCALES} of torch.uint8 and shape {(*blocks.shape[:-1],)}, got {got}")
        experts, rows, groups, _ = blocks.shape
        order = None
        if name.endswith("gate_up_proj"):
            if rows % 2:
                raise ValueError(f"expected {name}{_BLOCKS} of pairs of rows, got {rows} rows for each expert")
            of_expert = torch.arange(rows).view(-1, 2).T.flatten()
            order = (torch.arange(experts)[:, None] * rows + of_expert).flatten()
        source = _Source(f"{name} of {folder}")
        shape = (experts * rows, groups * GROUP)
        left[name] = FileMatrix(source, shape, (blocks.flatten(0, 1), scales.flatten(0, 1)), order)


class _Source(NamedTuple):
    """The `Source` of a matrix, whose parts are blocks (rows, groups, 16) and scales (rows, groups)."""

    place: str
    dtype: torch.dtype = torch.float32

    def numbers_of(self, shape: tuple[int, ...], blocks: Tensor, scales: Tensor) -> Tensor:
        numbers = functional.embedding(blocks.int(), _PAIRS).flatten(2)  # several times as fast as an index
        return numbers.mul_(_scales_of(scales)[..., None]).flatten(1)

    def groups_of(self, shape: tuple[int, ...], blocks: Tensor, scales: Tensor) -> Groups:
        return Groups(blocks.flatten(1), _scales_of(scales), levels=E2M1)

    def release(self, *parts: Tensor) -> None:
        """Does nothing: the system takes the memory of a mapped file if it needs it."""


def _scales_of(exponents: Tensor) -> Tensor:
    return scales_of(exponents).masked_fill_(exponents == _NAN, torch.nan)
