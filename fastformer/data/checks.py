"""What is text and what are ids: the checks that all tokenizers share."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator

from fastformer.special_ids import SpecialIds

SPECIAL_TOKENS = ("<pad>", "</s>", "<unk>")  # in the order of their ids


def check_text(text: str) -> None:
    """Raises a ValueError for what is no str, or a lone surrogate, which stands for a byte that was no UTF-8."""
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
    """Raises a ValueError unless it is several texts: a str is an iterable of characters."""
    if isinstance(texts, str | bytes) or not isinstance(texts, Iterable):
        raise ValueError(f"expected a list of texts, got {type(texts).__name__}")


def until_eos(ids: Iterable[int], special_ids: SpecialIds, vocab_size: int) -> list[int]:
    """The ids before the first that is any EOS, without PAD.

    Raises:
        ValueError: something that is no id of the vocabulary.
    """
    kept = []
    for i in checked_ids(ids, vocab_size):
        if i in special_ids.eos:
            break
        if i != special_ids.pad:
            kept.append(i)
    return kept


def checked_ids(ids: Iterable[int], vocab_size: int) -> Iterator[int]:
    """The ids as they are, each as an int.

    Raises:
        ValueError: something that is no id of the vocabulary.
    """
    kind = type(ids).__name__
    if isinstance(ids, str | bytes):
        raise ValueError(f"expected ids, a list or the like of integers, got {kind}")
    try:
        each = iter(ids)
    except TypeError as error:  # of a tensor without dimensions, too, which says that it is iterable
        raise ValueError(f"expected ids, a list or the like of integers, got {kind}") from error
    for i in each:
        try:
            index = operator.index(i)
        except (TypeError, ValueError) as error:  # the latter of an array with several numbers
            raise ValueError(f"expected ids to be integers, got {i!r:.40}") from error
        if index < 0:
            raise ValueError(f"expected ids of at least 0, got {index}")
        if index >= vocab_size:
            raise ValueError(f"expected ids below {vocab_size}, got {index}: was another tokenizer used?")
        yield index
