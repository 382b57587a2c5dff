"""Ids as people hold them, made into right-padded batches and back."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, SupportsIndex, TypeAlias

import torch
from torch import Tensor

from fastformer.nn import SequenceLayout

TokenIds: TypeAlias = Tensor | Sequence[SupportsIndex] | Sequence[Sequence[SupportsIndex]]
_WANTED = "(batch, seqlen) of integers: a tensor, an array, or lists of ids"


def as_batch(ids: Any, pad_id: int, device: torch.device, name: str = "input_ids") -> Tensor:
    """Ids as (batch, seqlen) int64 on a device.

    Args:
        ids: (batch, seqlen) or (seqlen,), a tensor or an array of integers; a list of ids; a list of such lists, which
            may differ in length.
        pad_id: what shorter lists get behind them.
        device: where the batch goes.
        name: of the argument, for messages.

    Raises:
        ValueError: other shapes, other types, nothing at all.
    """
    wanted = f"expected {name} {_WANTED}"
    if not isinstance(ids, Tensor) and hasattr(ids, "__array__"):
        try:
            ids = torch.as_tensor(ids, device="cpu")
        except (TypeError, ValueError) as error:
            raise ValueError(f"{wanted}; got {type(ids).__name__} ({error})") from error
    if not isinstance(ids, Tensor):
        ids = pad(_lists(ids, name), pad_id)
    ids = ids[None] if ids.dim() == 1 else ids
    if ids.dim() != 2 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool or ids.shape[0] == 0:
        raise ValueError(f"{wanted}; got {ids.dtype} {tuple(ids.shape)}")
    if ids.device.type == "meta":
        raise ValueError(f"{wanted}; got one on the device meta, which holds no values")
    batch: Tensor = ids.to(device=device, dtype=torch.long)
    return batch


def _lists(ids: Any, name: str) -> list[list[int]]:
    wanted = f"expected {name} {_WANTED}"
    if isinstance(ids, str | bytes | dict) or not hasattr(ids, "__iter__"):
        raise ValueError(f"{wanted}; got {type(ids).__name__}: turn text into ids with a tokenizer first")
    rows = list(ids)
    if not rows or not _is_list(rows[0]):
        rows = [rows]
    found: list[list[int]] = []
    for number, row in enumerate(rows):
        if not _is_list(row):
            raise ValueError(f"{wanted}; {name}[{number}] is {row!r}, where others are lists")
        values = row.tolist() if hasattr(row, "tolist") else list(row)
        try:
            if any(isinstance(value, bool) for value in values):
                raise TypeError("True and False are no ids")
            found.append([operator.index(value) for value in values])
        except TypeError as error:
            raise ValueError(f"{wanted}; {name}[{number}] holds something else: {error}") from error
    return found


def as_rows(ids: Any, pad_id: int | None, start_id: int | None, name: str) -> list[list[int]]:
    """Ids of several beginnings as lists, without the padding of a tensor and without a start token in front.

    Args:
        ids: as `as_batch` takes them; a list may be empty.
        pad_id: what a tensor or an array has around shorter rows; None: all its ids are tokens.
        start_id: of a decoder; None: there is none to take away.
        name: of the argument, for messages.

    Raises:
        ValueError: see `as_batch`.
    """
    rows: list[list[int]]
    if isinstance(ids, Tensor) or hasattr(ids, "__array__"):
        rows = as_batch(ids, 0, torch.device("cpu"), name).tolist()
        for row in rows:
            while row and row[-1] == pad_id:
                row.pop()
            while row and row[0] == pad_id:
                row.pop(0)
    else:
        rows = _lists(ids, name)
    return [row[1:] if row[:1] == [start_id] else row for row in rows]


def _is_list(value: Any) -> bool:
    return hasattr(value, "__iter__") and getattr(value, "ndim", 1) > 0 and not isinstance(value, str | bytes)


def pad(sequences: Sequence[Sequence[int]], pad_id: int = 0) -> Tensor:
    """Lists of ids as (batch, seqlen) int64, padded on the right."""
    width = max(map(len, sequences))
    return torch.tensor([[*row, *[pad_id] * (width - len(row))] for row in sequences], dtype=torch.long, device="cpu")


def as_inputs(
    ids: Any, attention_mask: Any, pad_id: int, device: torch.device, *, marks_padding: bool = True
) -> tuple[Tensor, SequenceLayout]:
    """Ids as a batch with its padding on the right, and their layout.

    Without a mask, ids equal to pad_id are padding in a tensor or an array. A list knows its length: a lone one, and
    lists that differ in length, are taken as they are. Several of one length may have been padded by hand: ids equal to
    pad_id are padding at their ends, and tokens further in.

    Args:
        ids: as `as_batch` takes them.
        attention_mask: of their shape (as padded on the right where they differ in length), 1 = keep, 0 = padding.
        pad_id: of padding.
        device: where the batch goes.
        marks_padding: False: ids equal to pad_id are tokens, as where it is also what ends a sequence.

    Raises:
        ValueError: see `as_batch`; a mask of another shape or other values, an input with nothing to keep.
    """
    rows: list[list[int]] | None = None
    if not isinstance(ids, Tensor) and not hasattr(ids, "__array__"):
        rows = _lists(ids, "input_ids")
        ids = pad(rows, pad_id)
    batch = as_batch(ids, pad_id, device)
    lengths = [batch.shape[1]] * len(batch) if rows is None else [len(row) for row in rows]
    if attention_mask is not None:
        keep = _kept(batch, attention_mask)
    elif marks_padding and rows is None:
        keep = batch != pad_id
    elif marks_padding and len(lengths) > 1 and len(set(lengths)) == 1:
        real = batch != pad_id
        keep = (real.cumsum(1) > 0) & (real.flip(1).cumsum(1).flip(1) > 0)
    else:
        keep = torch.arange(batch.shape[1], device=device) < torch.tensor(lengths, device=device)[:, None]
    seqlens = keep.sum(1)
    if bool((seqlens == 0).any()):
        raise ValueError("expected at least one token in each input, got an empty one")
    order = (~keep).long().argsort(dim=1, stable=True)
    width = int(seqlens.max())
    return batch.gather(1, order)[:, :width], SequenceLayout.padded(seqlens, width)


def _kept(ids: Tensor, attention_mask: Any) -> Tensor:
    try:
        mask = torch.as_tensor(attention_mask, device=ids.device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"expected attention_mask as a tensor of 0 and 1, got {attention_mask!r:.60}") from error
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError("expected attention_mask to hold 0 (padding) and 1 (keep), got other values")
    keep = mask.bool()
    keep = keep[None] if keep.dim() == 1 else keep
    if keep.shape != ids.shape:
        raise ValueError(f"expected attention_mask of input_ids' shape {tuple(ids.shape)}, got {tuple(keep.shape)}")
    return keep


def left_padded(ids: Tensor, layout: SequenceLayout, pad_id: int) -> Tensor:
    """Right-padded ids with their padding moved to the left."""
    width = ids.shape[1]
    position = torch.arange(width, device=ids.device) - (width - layout.seqlens[:, None])
    return torch.where(position >= 0, ids.gather(1, position.clamp(min=0).long()), pad_id)
