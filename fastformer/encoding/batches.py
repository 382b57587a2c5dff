"""Texts as they come: some at a time, each lot as packed batches of about as many tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from typing import TypeVar

from fastformer.settings import Positive, check_value

T = TypeVar("T")

BATCH_TOKENS = 16384  # of a call of the engine
READ_AHEAD = 4096  # texts that are held at a time: enough that their lengths fill the batches evenly


def chunks(items: Iterable[T], size: int = READ_AHEAD) -> Iterator[list[T]]:
    """The items in lists of `size`, the last one shorter; an iterator is read no further than that."""
    rest = iter(items)
    while chunk := list(itertools.islice(rest, size)):
        yield chunk


def check_several(name: str, items: object) -> None:
    """Raises a ValueError for what is no iterable of several items, such as a mapping or bytes."""
    if isinstance(items, str | bytes | bytearray | Mapping) or not isinstance(items, Iterable):
        raise ValueError(f"expected {name} to be a list of texts, or an iterator of them, got {type(items).__name__}")


def packed(lengths: Sequence[int], batch_tokens: int, batch_size: int | None = None) -> Iterator[list[int]]:
    """Which texts are computed together: the longest first, since the last batch then has the least to wait for.

    Args:
        lengths: tokens of each text.
        batch_tokens: of a batch at most; a text that is longer than that is a batch of its own.
        batch_size: texts of a batch at most; None: any number.

    Yields:
        Indices into `lengths`, each in one batch.
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
    """The limits of a batch as they are.

    Raises:
        ValueError: one is no integer of at least 1.
    """
    check_value("batch_tokens", batch_tokens, Positive)
    check_value("batch_size", batch_size, Positive | None)
    return batch_tokens, batch_size


@contextmanager
def progress(texts: Iterable[object], is_shown: bool | None) -> Iterator[Callable[[int], object]]:
    """Counts texts on a bar on standard error, if it is asked for."""
    if not is_shown:
        yield lambda count: None
        return
    from tqdm import tqdm

    with tqdm(total=len(texts) if isinstance(texts, Sized) else None, unit="text") as bar:
        yield bar.update
