"""A matrix of a quantised folder: whole numbers or 8-bit floats, and the scale and the zero of each group of inputs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from fastformer.models.quantization import GROUP, Groups, num_groups


class QuantizedLayer(NamedTuple):
    """The parts of a layer whose weight is scale * (q - zero).

    Attributes:
        q: (out, in) uint8, or 8-bit floats.
        scales, zeros: (groups, out).
        group_of: (in) the group of each input.
        bits: the bits of q.
    """

    q: Tensor
    scales: Tensor
    zeros: Tensor
    group_of: Tensor
    bits: int = 4

    def numbers(self) -> Tensor:
        """Returns the weight (out, in) in fp32, in which the products of scales of 16 bits are exact."""
        scale, zero = (part[self.group_of].T.float() for part in (self.scales, self.zeros))
        return (self.q.float() - zero) * scale

    def groups(self) -> Groups | None:
        """Returns the layer as int4, in groups of 32 neighbours.

        None: q has other bits, 32 neighbours belong to several groups, or fp16 doesn't have the scales.
        """
        outputs, inputs = self.q.shape
        if self.bits != 4 or not torch.equal(self.scales.half().double(), self.scales.double()):
            return None
        missing = num_groups(inputs) * GROUP - inputs
        padded = nn.functional.pad(self.group_of[None].float(), (0, missing), mode="replicate")
        blocks = padded.long().view(-1, GROUP)
        if not torch.equal(blocks, blocks[:, :1].expand_as(blocks)):
            return None
        q = nn.functional.pad(self.q, (0, missing), value=8)
        scale, zero = (part[blocks[:, 0]].T.contiguous() for part in (self.scales, self.zeros))
        return Groups(q[:, ::2] | q[:, 1::2] << 4, scale.half(), zero.to(torch.uint8))


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Unpacks (rows, columns) int32 to uint8 of 4 or 8 bits, the lowest bits of each word first."""
    fields = words.contiguous().view(torch.uint8)
    return fields if bits == 8 else torch.stack([fields & 15, fields >> 4], -1).flatten(1)
