"""Checks of texts that all tokenizers share."""

from __future__ import annotations

from collections.abc import Iterable

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
