"""The memory layout of a batch of sequences: padded rows, or all tokens one after another."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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

        def move(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device, non_blocking=non_blocking)

        seqlens = self.seqlens.to(device, non_blocking=non_blocking)
        return SequenceLayout(seqlens, self.max_seqlen, move(self.cu_seqlens), move(self.positions), self.host_seqlens)

    def pin_memory(self) -> SequenceLayout:
        """Returns the same layout in page-locked memory of the host, from which `to` can copy without waiting."""

        def pin(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.pin_memory()

        seqlens = self.seqlens.pin_memory()
        return SequenceLayout(seqlens, self.max_seqlen, pin(self.cu_seqlens), pin(self.positions), self.host_seqlens)

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
    # On a GPU reading the values would be a host sync; under a tracer there are no values.
    return type(seqlens) is Tensor and seqlens.device.type == "cpu" and not torch.compiler.is_compiling()


def _check_lengths(seqlens: Tensor, max_seqlen: int) -> None:
    if isinstance(max_seqlen, bool | float | str) or max_seqlen is None or max_seqlen < 0:
        raise ValueError(f"expected max_seqlen to be an integer of at least 0, got {max_seqlen!r}")
    if _readable(seqlens) and seqlens.numel():
        low, high = (int(bound) for bound in seqlens.aminmax())
        if low < 0 or high > max_seqlen:
            raise ValueError(f"expected seqlens from 0 to max_seqlen {max_seqlen}, got {low} to {high}")
