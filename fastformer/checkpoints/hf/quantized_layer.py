"""A matrix of a quantised folder: whole numbers or 8-bit floats, and the scale and the zero of each group of inputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fastformer.checkpoints.file_matrix import FileMatrix
from fastformer.models.quantization import GROUP, Groups, num_groups


class QuantizedLayer(NamedTuple):
    """The parts of a layer whose weight is scale * (q - zero).

    Attributes:
        name: the name of the weight, for messages.
        stored: what `q` reads, with an entry for each output; it may be in a mapped file.
        q: (some entries of stored) -> their q, (out, in) uint8 or 8-bit floats.
        scales, zeros: (out, groups).
        group_of: (in) the group of each input.
        bits: the bits of q.
        is_float: whether q are floats.
    """

    name: str
    stored: Tensor
    q: Callable[[Tensor], Tensor]
    scales: Tensor
    zeros: Tensor
    group_of: Tensor
    bits: int = 4
    is_float: bool = False

    def matrix(self, folder: Path) -> FileMatrix:
        """Returns the weight (out, in) in fp32, in which the products of scales of 16 bits are exact, unread."""
        missing = num_groups(len(self.group_of)) * GROUP - len(self.group_of)
        padded = nn.functional.pad(self.group_of[None].float(), (0, missing), mode="replicate")
        blocks = padded.long().view(-1, GROUP)
        has_groups = (
            self.bits == 4
            and torch.equal(blocks, blocks[:, :1].expand_as(blocks))
            and torch.equal(self.scales.half().double(), self.scales.double())
        )
        has_zeros = bool((self.zeros != 8).any())
        source = _Source(
            f"{self.name} of {folder}", self.q, self.group_of, blocks[:, 0] if has_groups else None, has_zeros
        )
        return FileMatrix(source, (len(self.stored), len(self.group_of)), (self.stored, self.scales, self.zeros))


class _Source(NamedTuple):
    """The `Source` of a weight, whose parts are `stored`, `scales` and `zeros` of its layer.

    Attributes:
        place, q, group_of: see `QuantizedLayer`.
        blocks: the group of each 32 neighbours. None: the weight can't be int4, since q has other bits, 32 neighbours
            belong to several groups, or fp16 doesn't have the scales.
        has_zeros: whether a zero isn't 8.
    """

    place: str
    q: Callable[[Tensor], Tensor]
    group_of: Tensor
    blocks: Tensor | None
    has_zeros: bool
    dtype: torch.dtype = torch.float32

    def numbers_of(self, shape: tuple[int, ...], stored: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
        def of_inputs(part: Tensor) -> Tensor:
            return part.float() if part.shape[1] == 1 else part.float()[:, self.group_of]

        return (self.q(stored).float() - of_inputs(zeros)) * of_inputs(scales)

    def groups_of(self, shape: tuple[int, ...], stored: Tensor, scales: Tensor, zeros: Tensor) -> Groups | None:
        if self.blocks is None:
            return None
        q = nn.functional.pad(self.q(stored), (0, len(self.blocks) * GROUP - shape[1]), value=8)
        zero = zeros[:, self.blocks].to(torch.uint8).contiguous() if self.has_zeros else None
        return Groups(q[:, ::2] | q[:, 1::2] << 4, scales[:, self.blocks].half().contiguous(), zero)

    def release(self, *parts: Tensor) -> None:
        """Does nothing: the system takes the memory of a mapped file if it needs it."""


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Unpacks (rows, columns) int32 to uint8 of 4 or 8 bits, the lowest bits of each word first."""
    fields = words.contiguous().view(torch.uint8)
    return fields if bits == 8 else torch.stack([fields & 15, fields >> 4], -1).flatten(1)
