"""Converts token ids from the forms that callers use to rows, or to a right-padded batch."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, SupportsIndex, TypeAlias

import torch
from torch import Tensor

TokenIds: TypeAlias = Tensor | Sequence[SupportsIndex] | Sequence[Sequence[SupportsIndex]]
_WANTED = "(batch, seqlen) of integers: a tensor, an array, or lists of ids"


def rows_of(ids: Any, name: str = "input_ids") -> tuple[list[list[int]], bool]:
    """Returns ids as a list for each input, and whether they came as lists; a tensor or an array may be padded.

    Args:
        ids: (batch, seqlen) or (seqlen,), a tensor or an array of integers; a list of ids; a list of such lists, which
            may differ in length.
        name: the name of the argument, for messages.

    Raises:
        ValueError: another shape or another type, or a tensor or an array without inputs.
    """
    wanted = f"expected {name} {_WANTED}"
    if not isinstance(ids, Tensor):
        if not hasattr(ids, "__array__"):
            return _lists(ids, name), True
        try:
            ids = torch.as_tensor(ids, device="cpu")
        except (TypeError, ValueError) as error:
            raise ValueError(f"{wanted}; got {type(ids).__name__} ({error})") from error
    ids = ids[None] if ids.dim() == 1 else ids
    if ids.dim() != 2 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool or ids.shape[0] == 0:
        raise ValueError(f"{wanted}; got {ids.dtype} {tuple(ids.shape)}")
    if ids.device.type == "meta":
        raise ValueError(f"{wanted}; got one on the device meta, which holds no values")
    return ids.tolist(), False


def _lists(ids: Any, name: str) -> list[list[int]]:
    wanted = f"expected {name} {_WANTED}"
    if isinstance(ids, str | bytes | dict) or not hasattr(ids, "__iter__"):
        raise ValueError(f"{wanted}; got {type(ids).__name__}: turn text into ids with a tokenizer first")
    rows = list(ids)
    if not rows or not _is_list(rows[0]):
        rows = [rows]
    ids_of_rows: list[list[int]] = []
    for number, row in enumerate(rows):
        if not _is_list(row):
            raise ValueError(f"{wanted}; {name}[{number}] is {row!r}, where others are lists")
        values = row.tolist() if hasattr(row, "tolist") else list(row)
        try:
            if any(isinstance(value, bool) for value in values):
                raise TypeError("True and False are not ids")
            ids_of_rows.append([operator.index(value) for value in values])
        except TypeError as error:
            raise ValueError(f"{wanted}; {name}[{number}] holds something else: {error}") from error
    return ids_of_rows


def as_rows(ids: Any, pad_id: int | None, start_id: int | None, name: str) -> list[list[int]]:
    """Returns the ids of several beginnings as lists, without a tensor's padding and without a leading start token.

    Args:
        ids: in the forms of `rows_of`; a list may be empty.
        pad_id: the id that pads rows of a tensor or an array; None: all its ids are tokens.
        start_id: the decoder's start token; None: there is no start token to remove.
        name: the name of the argument, for messages.

    Raises:
        ValueError: see `rows_of`.
    """
    rows, is_list = rows_of(ids, name)
    if not is_list:
        rows = [_without_ends(row, pad_id) for row in rows]
    return [row[1:] if row[:1] == [start_id] else row for row in rows]


def _is_list(value: Any) -> bool:
    return hasattr(value, "__iter__") and getattr(value, "ndim", 1) > 0 and not isinstance(value, str | bytes)


def pad(sequences: Sequence[Sequence[int]], pad_id: int = 0) -> Tensor:
    """Returns lists of ids as (batch, seqlen) int64, padded on the right."""
    width = max(map(len, sequences))
    return torch.tensor([[*row, *[pad_id] * (width - len(row))] for row in sequences], dtype=torch.long, device="cpu")


def batches_by_length(lengths: Mapping[int, int], fits: Callable[[int, int], bool]) -> Iterator[list[int]]:
    """Yields batches of keys with similar lengths, the longest first: a lack of memory shows in the first batch.

    Args:
        lengths: the length of each key.
        fits: (count, longest) -> whether a batch of this size is small enough. A batch of one key always is.
    """
    batch: list[int] = []
    for key in sorted(lengths, key=lambda key: -lengths[key]):
        if batch and not fits(len(batch) + 1, lengths[batch[0]]):
            yield batch
            batch = []
        batch.append(key)
    if batch:
        yield batch


def input_rows(ids: Any, attention_mask: Any, pad_id: int, *, marks_padding: bool = True) -> list[list[int]]:
    """Returns the tokens of each input, without its padding.

    Without a mask, ids equal to pad_id are padding in a tensor or an array. A list has its own length, so a single
    list, and lists of different lengths, have no padding. Several lists of one length may have been padded by hand: ids
    equal to pad_id are padding at their ends, and tokens elsewhere.

    Args:
        ids: in the forms of `rows_of`.
        attention_mask: has the shape of the ids (if they differ in length, padded on the right), 1 = keep, 0 = padding.
        pad_id: the id of padding.
        marks_padding: False: ids equal to pad_id are tokens, for example because pad_id also ends sequences.

    Raises:
        ValueError: see `rows_of`; a mask of another shape or with other values, or an input without tokens.
    """
    rows, is_list = rows_of(ids)
    if attention_mask is not None:
        keep = _kept(attention_mask, (len(rows), max(map(len, rows))))
        rows = [_masked(row, mask, pad_id) for row, mask in zip(rows, keep, strict=True)]
    elif marks_padding and not is_list:
        rows = [[token for token in row if token != pad_id] for row in rows]
    elif marks_padding and len(rows) > 1 and len(set(map(len, rows))) == 1:
        rows = [_without_ends(row, pad_id) for row in rows]
    if not all(rows):
        raise ValueError("expected at least one token in each input, got an empty one")
    return rows


def _masked(row: list[int], mask: list[bool], pad_id: int) -> list[int]:
    return list(itertools.compress(row + [pad_id] * (len(mask) - len(row)), mask))


def _without_ends(row: list[int], pad_id: int | None) -> list[int]:
    """Returns a row without the padding at its ends."""
    tokens = [place for place, token in enumerate(row) if token != pad_id]
    return row[tokens[0] : tokens[-1] + 1] if tokens else []


def _kept(attention_mask: Any, shape: tuple[int, int]) -> list[list[bool]]:
    try:
        mask = torch.as_tensor(attention_mask, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"expected attention_mask as a tensor of 0 and 1, got {attention_mask!r:.60}") from error
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError("expected attention_mask to hold 0 (padding) and 1 (keep), got other values")
    mask = mask[None] if mask.dim() == 1 else mask
    if mask.shape != shape:
        raise ValueError(f"expected attention_mask of input_ids' shape {shape}, got {tuple(mask.shape)}")
    keep: list[list[bool]] = mask.bool().tolist()
    return keep
