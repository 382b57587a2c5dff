"""The memory layout of a batch of sequences: padded rows, or all tokens one after another (packed).

A stack omits padding: a padded batch becomes packed tokens, and the output is padded again. A nested tensor is packed
already.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastformer.engine.checks import is_traced
from fastformer.nn.errors import InputError
from fastformer.nn.masks import is_causal_mask
from fastformer.special_ids import SpecialIds


@dataclass(frozen=True, eq=False)
class SequenceLayout:
    """The lengths of a batch and whether it is padded (batch, max_seqlen, ...) or packed (total, ...).

    Build one with `padded`, `packed`, `from_ids` or `from_mask`, not by hand. Modules take it as `layout=` (their own
    sequence) and `memory_layout=` (the other sequence of cross-attention); the weights and the mathematics are the same
    either way.

    Attributes:
        seqlens: (batch,) int32, the real tokens of each sequence.
        max_seqlen: the longest sequence (packed) or the width of the batch (padded).
        cu_seqlens: (batch + 1,) int32, the begin of each packed sequence, and the end; None for a padded batch.
        positions: (total,) int64, each packed token's index in its own sequence; None for a padded batch, where the
            position is the index along the row.
        host_seqlens: seqlens on the host, if the layout was built from lengths on the host. `to` passes it on, so that
            a caller that needs the numbers (such as a cache) doesn't wait for a GPU.
    """

    seqlens: Tensor
    max_seqlen: int
    cu_seqlens: Tensor | None = None
    positions: Tensor | None = None
    host_seqlens: Tensor | None = None

    @classmethod
    def padded(cls, seqlens: Tensor, max_seqlen: int) -> SequenceLayout:
        """Makes the layout of rows of equal width with the real tokens first.

        Args:
            seqlens: (batch,) integers, the real tokens of each row.
            max_seqlen: the width of a row.

        Raises:
            ValueError: lengths of another shape or dtype; on a CPU also one below 0 or above max_seqlen.
        """
        seqlens = _lengths(seqlens)
        _check_lengths(seqlens, max_seqlen)
        return cls(seqlens, int(max_seqlen), host_seqlens=_on_host(seqlens))

    @classmethod
    def packed(cls, seqlens: Tensor, max_seqlen: int, *, total: int | None = None) -> SequenceLayout:
        """Makes the layout of sequences one after another, without gaps.

        Args:
            seqlens: (batch,) integers, the tokens of each sequence.
            max_seqlen: the longest of them.
            total: rows of the packed tensors. None: the sum of seqlens, which is read on the host (build layouts on
                the CPU and move them with `to`). More than the sum: the rest, at the end, attends to nothing.

        Raises:
            ValueError: as `padded`; a total that is below the sum (on a CPU).
        """
        seqlens = _lengths(seqlens)
        _check_lengths(seqlens, max_seqlen)
        cu_seqlens = torch.nn.functional.pad(seqlens.cumsum(0, dtype=torch.int32), (1, 0))
        if total is None:
            total = int(cu_seqlens[-1])
        elif _readable(seqlens) and not (isinstance(total, int) and total >= int(cu_seqlens[-1])):
            raise ValueError(f"expected a total of at least the sum of seqlens, {int(cu_seqlens[-1])}, got {total!r}")
        token = torch.arange(total, device=seqlens.device)
        row = torch.searchsorted(cu_seqlens[1:].contiguous(), token, right=True).clamp_(max=len(seqlens) - 1)
        # Otherwise the position of padding tokens at the end would exceed max_seqlen and any position table.
        positions = (token - cu_seqlens[row]).clamp_(max=max(int(max_seqlen) - 1, 0))
        return cls(seqlens, int(max_seqlen), cu_seqlens, positions, _on_host(seqlens))

    @classmethod
    def from_ids(cls, ids: Tensor, pad_id: int = SpecialIds.pad) -> SequenceLayout:
        """Makes the layout of right-padded ids (batch, seqlen): counts ids other than `pad_id`, without a host sync."""
        if not isinstance(ids, Tensor) or not isinstance(pad_id, int):
            raise ValueError(f"expected ids as a tensor and pad_id as an id, got {type(ids).__name__} and {pad_id!r}")
        return cls.padded((ids != pad_id).sum(-1), ids.shape[-1])

    @classmethod
    def from_mask(cls, mask: Tensor) -> SequenceLayout:
        """Makes the layout of right-padded rows from a mask, without a host sync.

        Args:
            mask: (batch, seqlen), True or 1 at real tokens, as a tokenizer of Hugging Face returns it.

        Raises:
            ValueError: a mask of another shape or dtype; on a CPU also numbers other than 0 and 1, and a token after
                padding, since a layout has no place for padding on the left.
        """
        if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.is_floating_point() or mask.is_complex():
            got = f"{mask.dtype} of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(f"expected a mask (batch, seqlen) of booleans or integers, got {got}")
        real = mask != 0
        if _readable(mask):
            if mask.dtype != torch.bool and bool((mask != real).any()):
                raise ValueError("expected a mask of 0 and 1, got other numbers")
            rows = (real[:, 1:] & ~real[:, :-1]).any(1)
            if bool(rows.any()):
                raise ValueError(
                    f"expected a mask of rows padded on the right, got a token after padding in row "
                    f"{int(rows.nonzero()[0])}"
                )
        return cls.padded(real.sum(-1), mask.shape[1])

    @property
    def is_packed(self) -> bool:
        """True for (total, ...) tensors, False for (batch, max_seqlen, ...)."""
        return self.cu_seqlens is not None

    @property
    def batch_size(self) -> int:
        """The number of sequences."""
        return self.seqlens.shape[0]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> SequenceLayout:
        """Returns the same layout on another device."""
        return self._moved(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> SequenceLayout:
        """Returns the same layout in page-locked memory of the host, from which `to` can copy without waiting."""
        return self._moved(Tensor.pin_memory)

    def _moved(self, move: Callable[[Tensor], Tensor]) -> SequenceLayout:
        cu_seqlens, positions = (None if each is None else move(each) for each in (self.cu_seqlens, self.positions))
        return SequenceLayout(move(self.seqlens), self.max_seqlen, cu_seqlens, positions, self.host_seqlens)

    def read_seqlens(self) -> Tensor:
        """Returns seqlens on the host; if the layout was built on a GPU, this waits for the GPU."""
        return self.seqlens.cpu() if self.host_seqlens is None else self.host_seqlens

    def pack(self, x: Tensor) -> Tensor:
        """Packs a padded tensor (batch, max_seqlen, ...) to (total, ...). The layout must be packed."""
        return x.flatten(0, 1).index_select(0, self._padded_index())

    def unpack(self, x: Tensor) -> Tensor:
        """Pads a packed tensor (total, ...) to (batch, max_seqlen, ...) with zeros. The layout must be packed."""
        rows = self.batch_size * self.max_seqlen
        index = self._padded_index()
        if x.shape[0] != index.shape[0]:
            raise ValueError(f"expected {index.shape[0]} packed rows, as the layout has, got {x.shape[0]}")
        # An extra row receives the padding tokens at the end of the packed tensor.
        real = torch.arange(x.shape[0], device=x.device) < self._cu_seqlens()[-1]
        out = x.new_zeros((rows + 1, *x.shape[1:])).index_copy(0, torch.where(real, index, rows), x)
        return out[:rows].unflatten(0, (self.batch_size, self.max_seqlen))

    def _cu_seqlens(self) -> Tensor:
        if self.cu_seqlens is None:
            raise ValueError("expected a packed layout, got a padded one")
        return self.cu_seqlens

    def _padded_index(self) -> Tensor:
        # The index of each packed token in the flattened padded batch.
        cu_seqlens = self._cu_seqlens()
        assert self.positions is not None
        token = torch.arange(self.positions.shape[0], device=cu_seqlens.device)
        row = torch.searchsorted(cu_seqlens[1:].contiguous(), token, right=True).clamp_(max=self.batch_size - 1)
        return row * self.max_seqlen + self.positions


def _lengths(seqlens: Tensor) -> Tensor:
    if not isinstance(seqlens, Tensor):
        raise ValueError(f"expected seqlens as a tensor of integers (batch,), got {type(seqlens).__name__}")
    if seqlens.dim() != 1 or seqlens.is_floating_point() or seqlens.dtype == torch.bool:
        raise ValueError(
            f"expected seqlens of shape (batch,) with integers, got {seqlens.dtype} {tuple(seqlens.shape)}"
        )
    return seqlens.to(torch.int32)


def _on_host(seqlens: Tensor) -> Tensor | None:
    return seqlens if seqlens.device.type == "cpu" else None


def _readable(seqlens: Tensor) -> bool:
    # On a GPU reading the values would be a host sync; under a tracer or functorch there are no values.
    return type(seqlens) is Tensor and seqlens.device.type == "cpu" and not is_traced()


def _check_lengths(seqlens: Tensor, max_seqlen: int) -> None:
    if isinstance(max_seqlen, bool | float | str) or max_seqlen is None or max_seqlen < 0:
        raise ValueError(f"expected max_seqlen to be an integer of at least 0, got {max_seqlen!r}")
    if _readable(seqlens) and seqlens.numel():
        low, high = seqlens.aminmax()
        if low < 0 or high > max_seqlen:
            raise ValueError(f"expected seqlens from 0 to max_seqlen {max_seqlen}, got {int(low)} to {int(high)}")


class Padding(NamedTuple):
    """The positions of the real tokens in a padded batch.

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

    def unpack(self, x: Tensor, fill: Tensor | None = None) -> Tensor:
        """Pads packed tokens (total, ...) to (*shape, ...), with zeros or a token `fill` (...) at padding."""
        size = (self.shape[0] * self.shape[1], *x.shape[1:])
        out = x.new_zeros(size) if fill is None else fill.to(x.dtype).expand(size).clone()
        return out.index_copy(0, self.tokens, x).unflatten(0, self.shape)


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
    if x.device.type != "cpu":
        tokens, layout = tokens.to(x.device), layout.to(x.device)
    return Padding(tokens, layout, (x.shape[0], x.shape[1]), is_contiguous)


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
