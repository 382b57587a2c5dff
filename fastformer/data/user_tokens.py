"""Tokens that you define: a language tag, a placeholder. No tokenizer splits or normalises them."""

from __future__ import annotations

import re
from collections.abc import Iterable

from fastformer.data.checks import SPECIAL_TOKENS, check_text

_TAKEN = re.compile(r"<0x..>", re.DOTALL)  # how a BPE spells a byte


class UserTokens:
    """The tokens that you define, and where they stand in a text.

    Args:
        tokens: how they are spelled in a text. Where two of them begin at one place, the longer one counts.
        is_dropped: leave them out of decoded text.

    Raises:
        ValueError: no text, an empty one, one with white space, one that is given twice, or the spelling of a special
            token or of a byte.
    """

    def __init__(self, tokens: Iterable[str] = (), *, is_dropped: bool = False) -> None:
        if isinstance(tokens, str):
            raise ValueError(f"expected user tokens as a list of texts, got the text {tokens!r:.40}")
        self.tokens, self.is_dropped = tuple(tokens), is_dropped
        for token in self.tokens:
            check_text(token)
            if not token or any(character.isspace() for character in token):
                raise ValueError(f"expected user tokens without white space, got {token!r}")
            if token in SPECIAL_TOKENS or _TAKEN.fullmatch(token):
                raise ValueError(f"expected user tokens other than special tokens and bytes, got {token!r}")
            if self.tokens.count(token) > 1:
                raise ValueError(f"expected different user tokens, got {token!r} twice")
        longest_first = sorted(self.tokens, key=len, reverse=True)
        self._pattern = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if self.tokens else None

    def __bool__(self) -> bool:
        return bool(self.tokens)

    def split(self, text: str) -> list[str]:
        """Text, token, text, token, ..., text: every second part is a user token; the text between may be empty."""
        return [text] if self._pattern is None else self._pattern.split(text)
