"""Padding that a stack omits: a padded batch becomes packed tokens, and the output is padded again."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastformer.nn.errors import InputError
from fastformer.nn.layout import SequenceLayout
from fastformer.nn.masks import is_causal_mask


class Padding(NamedTuple):
    """The places of the real tokens in a padded batch.

    Attributes:
        tokens: (total,) int64, the index of each real token in the flattened batch, sequence by sequence.
        layout: the layout of the packed tokens.
        shape: the batch's first two dimensions.
        is_contiguous: whether each sequence's tokens are adjacent, so that packing preserves their distances.
    """

    tokens: Tensor
    layout: SequenceLayout
    shape: tuple[int, int]
    is_contiguous: bool

    @property
    def is_none(self) -> bool:
        """Returns whether every token is real."""
        return self.tokens.numel() == self.shape[0] * self.shape[1]

    def pack(self, x: Tensor) -> Tensor:
        """Packs the real tokens of x (*shape, ...) to (total, ...)."""
        return x.flatten(0, 1).index_select(0, self.tokens)

    def unpack(self, x: Tensor) -> Tensor:
        """Pads packed tokens (total, ...) to (*shape, ...), with zeros at padding."""
        rows = self.shape[0] * self.shape[1]
        return x.new_zeros((rows, *x.shape[1:])).index_copy(0, self.tokens, x).unflatten(0, self.shape)


def read_padding(x: Tensor, key_padding_mask: Tensor | None, batch_first: bool) -> Padding | None:
    """Reads the positions of a batch's padding; on a GPU this waits for the device, once.

    Args:
        x: (batch, seqlen, ...), or (seqlen, batch, ...) without batch_first.
        key_padding_mask: torch.nn's: (batch, seqlen), bool (True = ignore), or floating and added to scores. None: all
            tokens are real.
        batch_first: see x.

    Returns:
        None for a mask that does more than ignore tokens, that requires a gradient, or that has another shape.
    """
    batch, seqlen = x.shape[:2] if batch_first else (x.shape[1], x.shape[0])
    if key_padding_mask is None:
        real = torch.ones(batch, seqlen, dtype=torch.bool, device="cpu")
    elif key_padding_mask.shape != (batch, seqlen) or key_padding_mask.requires_grad or key_padding_mask.is_meta:
        return None
    elif key_padding_mask.dtype == torch.bool:
        real = ~key_padding_mask.detach().cpu()
    elif not key_padding_mask.is_floating_point():
        return None
    else:
        added = key_padding_mask.detach().cpu()
        real = added == 0
        if not bool((real | (added == float("-inf"))).all()):
            return None
    where = real.flatten().nonzero().squeeze(1)
    seqlens = real.sum(1)
    position = torch.arange(seqlen, device="cpu")  # the default device may be another
    ends = torch.where(real, position + 1, 0).amax(1) if seqlen else seqlens
    starts = torch.where(real, position, seqlen).amin(1) if seqlen else seqlens
    is_contiguous = bool(((ends - starts == seqlens) | (seqlens == 0)).all())
    longest = int(seqlens.max()) if batch else 0
    tokens = where if batch_first else where % seqlen * batch + where // seqlen
    layout = SequenceLayout.packed(seqlens, longest)
    return Padding(tokens.to(x.device), layout.to(x.device), (x.shape[0], x.shape[1]), is_contiguous)


class Jagged(NamedTuple):
    """The sequences of a nested tensor as packed tokens, with the data for making a nested tensor of them again."""

    values: Tensor
    layout: SequenceLayout
    offsets: Tensor
    is_jagged: bool

    @classmethod
    def open(cls, x: Tensor) -> Jagged:
        """Takes apart a nested tensor (batch, any lengths, features), of either of PyTorch's layouts."""
        is_jagged = x.layout == torch.jagged
        nested: Any = x  # jagged tensors have their own class
        if is_jagged and nested.lengths() is None:
            values, offsets = nested.values(), nested.offsets()
            seqlens = offsets.diff().cpu()
        else:
            rows = x.unbind()
            values = torch.cat(rows)
            seqlens = torch.tensor([len(row) for row in rows], device="cpu")
            offsets = torch.nn.functional.pad(seqlens.cumsum(0), (1, 0)).to(values.device)
        layout = SequenceLayout.packed(seqlens, int(seqlens.max()) if len(seqlens) else 0)
        return cls(values, layout.to(values.device), offsets, is_jagged)

    def close(self, values: Tensor) -> Tensor:
        """Makes a nested tensor of the same lengths and layout with other values."""
        if self.is_jagged:
            return torch.nested.nested_tensor_from_jagged(values, self.offsets)
        sizes = self.layout.read_seqlens().tolist()
        return torch.nested.as_nested_tensor(list(values.split(sizes)))


def open_nested(
    x: Tensor, mask: Tensor | None, key_padding_mask: Tensor | None, is_causal: bool | None, *others: object
) -> tuple[Jagged, bool]:
    """Opens a nested input, whose sequences are packed tokens already.

    Args:
        x: (batch, any lengths, features), of either of PyTorch's layouts.
        mask: None, or the causal one of the longest sequence.
        key_padding_mask, others: None, since a nested tensor has no padding, and has its own layout.
        is_causal: whether each sequence attends causally; None: if the mask is causal.

    Returns:
        (its parts, whether it attends causally).

    Raises:
        InputError: another argument is given along with a nested tensor.
    """
    opened = Jagged.open(x)
    says_all = mask is None or is_causal_mask(mask, opened.layout.max_seqlen)
    if not says_all or key_padding_mask is not None or any(other is not None for other in others):
        raise InputError("expected no mask but the causal one, no layout and no cache along with a nested tensor")
    return opened, bool(is_causal) or mask is not None
