"""User tokens, such as a language tag or a placeholder, which no tokenizer splits or normalises."""

from __future__ import annotations

import re
from collections.abc import Iterable

from fastformer.data.checks import SPECIAL_TOKENS, check_text

_TAKEN = re.compile(r"<0x..>", re.DOTALL)  # the spelling of a byte in a BPE


class UserTokens:
    """The user tokens of a tokenizer, which it finds in texts.

    Args:
        tokens: their spellings in a text. If two of them begin at the same place, the longer one counts.
        is_dropped: omit them from decoded text.

    Raises:
        ValueError: a token that is not a str, is empty, has white space in it, is given twice, or is the spelling of a
            special token or of a byte.
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
        """Splits a text into text, token, text, ..., text: every second part is a user token; texts may be empty."""
        return [text] if self._pattern is None else self._pattern.split(text)
