"""`TokenTexts`: the part of a text that each of its tokens adds."""

from __future__ import annotations

import codecs
import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from fastformer.generation.streaming import BROKEN, ByteRuns, ScoredToken

_CONTEXT = 6  # the ids before the first token that are decoded with it
_MOST_IDS = 64  # the most ids of a run of bytes, or of special tokens, that are decoded again for each token after them
_CHARACTER = 4  # the most bytes of a character


class Spelled(NamedTuple):
    """The spelling of a token.

    Attributes:
        text: what the token adds to the text: "" for a special token, and for one that doesn't end a character.
        shown: the text; for a special token its name, as for an alternative without a whole character.
        data: the bytes that it adds; None for a special token, or if they aren't known.
    """

    text: str
    shown: str
    data: bytes | None


class SpelledToken(NamedTuple):
    """A token of a text, and the likeliest tokens at its place.

    Attributes:
        scored: the token, with its scores.
        spelled: its spelling. The texts of all tokens, joined, are the text, and so are their bytes.
        alternatives: the spellings of `scored.alternatives`, as if each were there in the token's stead.
    """

    scored: ScoredToken
    spelled: Spelled
    alternatives: list[Spelled]


class TokenTexts:
    """Finds the parts of a text that its tokens add. The tokens of a character come together with its last one.

    A token alone may have another text than it has behind others: SentencePiece drops the space of the first one.

    Args:
        tokenizer: with encode and decode; with tokens and token_bytes too, names and bytes of tokens are found.
        begin: the ids before the first token, whose text the tokens continue.
    """

    def __init__(self, tokenizer: Any, begin: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._runs = ByteRuns(tokenizer)
        self._special: dict[int, bool] = {}
        self._ids = list(begin[-_CONTEXT:])  # a few tokens that were told, and all after them
        self._told = len(self._ids)
        self._before = self._text()  # the text of those that were told
        self._held: list[tuple[ScoredToken, list[Spelled]]] = []  # of a character, or a run of bytes, that isn't whole
        self._held_text = ""

    def add(self, tokens: Iterable[ScoredToken]) -> list[SpelledToken]:
        """Adds tokens, and returns those whose texts are certain now."""
        spelled: list[SpelledToken] = []
        for one in tokens:
            alternatives = [self._alternative(token) for token, _ in one.alternatives]
            self._ids.append(one.token)
            text = self._text()[len(self._before) :]
            if self.is_special(one.token):
                goes_on = bool(self._held)
            else:
                goes_on = text.endswith(BROKEN) or (self._runs.are_whole and self._runs.go_on_behind(one.token))
            if goes_on:
                self._held.append((one, alternatives))
                self._held_text = text
                if len(self._held) >= _MOST_IDS + (_CHARACTER if text.endswith(BROKEN) else 0):
                    spelled += self.end()
                    del self._ids[self._told :]
                continue
            if self._held and text.startswith(self._held_text):  # the held ones are no part of this token's character
                text = text[len(self._held_text) :]
                spelled += self.end()
            spelled += self._divided([*self._held, (one, alternatives)], text)
            self._held, self._held_text = [], ""
            if text:  # the next text may depend on a token that has a text
                self._ids = self._ids[self._told :]
                self._before = self._text()
            elif len(self._ids) > _MOST_IDS and self.is_special(one.token) and self.is_special(self._ids[-2]):
                del self._ids[-2]
            self._told = len(self._ids)
        return spelled

    def end(self) -> list[SpelledToken]:
        """Returns the tokens that are left at the end of the text."""
        spelled = self._divided(self._held, self._held_text)
        self._held, self._held_text = [], ""
        return spelled

    def is_special(self, token: int) -> bool:
        """Returns whether a token has no text, wherever it is. White space may have none at the beginning of a text."""
        if token not in self._special:
            has_text = bool(self._tokenizer.decode([token]) or not self.name(token).strip("▁ "))
            self._special[token] = not has_text
        return self._special[token]

    def name(self, token: int) -> str:
        """Returns the tokenizer's name of a token, or "" if it has none."""
        return str(self._tokenizer.tokens([token])[0]) if hasattr(self._tokenizer, "tokens") else ""

    @functools.cached_property
    def _bytes(self) -> Sequence[bytes | None]:
        try:
            data: Sequence[bytes | None] = self._tokenizer.token_bytes
            return data
        except (AttributeError, ValueError):
            return ()

    def _bytes_of(self, token: int) -> bytes | None:
        return self._bytes[token] if token < len(self._bytes) else None

    def _text(self, *more: int) -> str:
        return str(self._tokenizer.decode([*self._ids, *more])) if self._ids or more else ""

    def _alternative(self, token: int) -> Spelled:
        text = self._text(token)[len(self._before) :]
        text = text[len(self._held_text) :] if text.startswith(self._held_text) else text
        is_broken, name = text.endswith(BROKEN), self.name(token)
        data = self._bytes_of(token) if is_broken or self._held else None
        spelled = self._spelled(token, text, data if is_broken or data is not None else text.encode())
        return spelled._replace(shown=name or text) if is_broken or not text else spelled

    def _divided(self, run: Sequence[tuple[ScoredToken, list[Spelled]]], text: str) -> list[SpelledToken]:
        """Divides the text of a run of tokens among them."""
        tokens = [one.token for one, _ in run]
        data: list[bytes | None]
        if len(tokens) < 2 and BROKEN not in text:
            data, texts = [text.encode()] * len(tokens), [text] * len(tokens)
        else:
            data = [b"" if self.is_special(token) else self._bytes_of(token) for token in tokens]
            reader = codecs.getincrementaldecoder("utf-8")("replace")
            texts = [reader.decode(each or b"") for each in data]
            texts[-1] += reader.decode(b"", True)
            if None in data or "".join(texts) != text:
                if len(text) == len(tokens):  # U+FFFD for each byte of a run that isn't UTF-8
                    texts = list(text)
                else:
                    data = [None] * (len(tokens) - 1) + [text.encode()]
                    texts = [""] * (len(tokens) - 1) + [text]
        return [
            SpelledToken(one, self._spelled(one.token, part, each), others)
            for (one, others), part, each in zip(run, texts, data, strict=True)
        ]

    def _spelled(self, token: int, text: str, data: bytes | None) -> Spelled:
        is_special = self.is_special(token)
        return Spelled(text, self.name(token) if is_special else text, None if is_special else data)
