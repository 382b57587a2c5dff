"""Checks of texts and of ids that all tokenizers share."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator

from fastformer.special_ids import SpecialIds

SPECIAL_TOKENS = ("<pad>", "</s>", "<unk>")  # in the order of their ids


def check_text(text: str) -> None:
    """Raises a ValueError unless the text is a str without lone surrogates, which stand for bytes that aren't UTF-8."""
    if not isinstance(text, str):
        raise ValueError(f"expected text as a str, got {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"expected text, got the lone surrogate U+{ord(text[error.start]):04X} at position {error.start}: "
            "it is not UTF-8"
        ) from error


def check_texts(texts: Iterable[str]) -> None:
    """Raises a ValueError for a single str, which is an iterable of characters, in the place of several texts."""
    if isinstance(texts, str | bytes) or not isinstance(texts, Iterable):
        raise ValueError(f"expected a list of texts, got {type(texts).__name__}")


def until_eos(ids: Iterable[int], special_ids: SpecialIds, vocab_size: int) -> list[int]:
    """Returns the ids before the first EOS of any kind.

    Raises:
        ValueError: something that is not an id of the vocabulary.
    """
    return list(itertools.takewhile(lambda i: i not in special_ids.eos, checked_ids(ids, vocab_size)))


def checked_ids(ids: Iterable[int], vocab_size: int) -> Iterator[int]:
    """Yields each id as an int.

    Raises:
        ValueError: something that is not an id of the vocabulary.
    """
    kind = type(ids).__name__
    if isinstance(ids, str | bytes):
        raise ValueError(f"expected ids, a list or the like of integers, got {kind}")
    try:
        each = iter(ids)
    except TypeError as error:  # also for a tensor without dimensions, which claims to be iterable
        raise ValueError(f"expected ids, a list or the like of integers, got {kind}") from error
    for i in each:
        try:
            index = operator.index(i)
        except (TypeError, ValueError) as error:  # the ValueError comes from an array with several numbers
            raise ValueError(f"expected ids to be integers, got {i!r:.40}") from error
        if index < 0:
            raise ValueError(f"expected ids of at least 0, got {index}")
        if index >= vocab_size:
            raise ValueError(f"expected ids below {vocab_size}, got {index}: was another tokenizer used?")
        yield index
