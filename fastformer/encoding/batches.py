"""Splits a stream of texts into chunks, and each chunk into packed batches with about equal numbers of tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import numpy as np

from fastformer.settings import Positive, check_value

T = TypeVar("T")
R = TypeVar("R")

BATCH_TOKENS = 16384  # in one call of the engine
READ_AHEAD = 2048  # texts of a chunk, two of which are in memory: enough for batches of even lengths


def chunks(items: Iterable[T], check: Callable[[int, T], object] | None = None) -> Iterator[list[T]]:
    """Yields the items in lists of READ_AHEAD (the last may be shorter), and reads an iterator one list at a time.

    Args:
        items: the items.
        check: (number from 1, item) raises the error of a wrong one.
    """
    rest, numbers = iter(items), itertools.count(1)
    while chunk := list(itertools.islice(rest, READ_AHEAD)):
        if check is not None:
            for item in chunk:
                check(next(numbers), item)
        yield chunk


def made_ahead(make: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Yields `make(item)` of each item, in order, and makes the next in a thread while the caller uses one.

    The caller's thread reads the items, one ahead. A single item needs no thread.
    """
    rest, end = iter(items), object()
    item, following = next(rest, end), next(rest, end)
    if following is end:
        if item is not end:
            yield make(cast(T, item))
        return
    with ThreadPoolExecutor(1, "fastformer-texts") as executor:
        pending = executor.submit(make, cast(T, item))
        while following is not end:
            after = executor.submit(make, cast(T, following))
            yield pending.result()
            pending, following = after, next(rest, end)
        yield pending.result()


def check_several(name: str, items: object) -> None:
    """Raises a ValueError unless `items` is an iterable of several items; a mapping and bytes are not."""
    if isinstance(items, str | bytes | bytearray | Mapping) or not isinstance(items, Iterable):
        raise ValueError(f"expected {name} to be a list of texts, or an iterator of them, got {type(items).__name__}")


def packed(lengths: Sequence[int], batch_tokens: int, batch_size: int | None = None) -> Iterator[list[int]]:
    """Chooses the texts that are computed together, longest first: threads then wait the least for the last batch.

    Args:
        lengths: the number of tokens in each text.
        batch_tokens: the most tokens in a batch; a longer text is a batch of its own.
        batch_size: the most texts in a batch; None: any number.

    Yields:
        The indices into `lengths` of a batch. Each index is in one batch.
    """
    batch: list[int] = []
    total = 0
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if batch and (total + lengths[index] > batch_tokens or len(batch) == batch_size):
            yield batch
            batch, total = [], 0
        batch.append(index)
        total += lengths[index]
    if batch:
        yield batch


def check_limits(batch_tokens: int, batch_size: int | None) -> tuple[int, int | None]:
    """Returns the limits of a batch; NumPy's integers become Python's.

    Raises:
        ValueError: a limit is not an integer of at least 1.
    """
    batch_tokens, batch_size = as_int(batch_tokens), as_int(batch_size)
    check_value("batch_tokens", batch_tokens, Positive)
    if batch_size is not None:
        check_value("batch_size", batch_size, Positive)
    return batch_tokens, batch_size


def as_int(value: Any) -> Any:
    """Returns an integer of NumPy as one of Python, and any other value unchanged."""
    return int(value) if isinstance(value, np.integer) else value


@contextmanager
def progress(texts: Iterable[object], is_shown: bool | None) -> Iterator[Callable[[int], object]]:
    """Counts texts on a progress bar on standard error, if is_shown."""
    if not is_shown:
        yield lambda count: None
        return
    from tqdm import tqdm

    with tqdm(total=len(texts) if isinstance(texts, Sized) else None, unit="text") as bar:
        yield bar.update
