"""Text piece by piece, as the tokens come that it is made of."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor

# A detokenizer may change what stands behind the last word: take off spaces, join an apostrophe with what follows it.
_UNSETTLED = re.compile(r"\s\W*\Z")
_BROKEN = "\N{REPLACEMENT CHARACTER}"


class Detokenizer(Protocol):
    """What turning tokens into pieces of text asks of a tokenizer; those of `fastformer.data` have it."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without EOS."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids."""
        ...


class TextPieces:
    """Turns tokens into pieces of text, none of which is half a character or is ever taken back.

    The pieces, one after another, are the text of all tokens together. A piece is given as soon as no later token can
    change it, so some come a token late; a run of tokens that spell single bytes may come as a whole.

    Args:
        tokenizer: see above.
        begin: ids that stand before the first token.
        is_told: their text is known already: the pieces go on from it.
    """

    def __init__(self, tokenizer: Detokenizer, begin: Sequence[int] = (), *, is_told: bool = False) -> None:
        self._tokenizer, self._ids, self._begin = tokenizer, list(begin), len(begin)
        self._byte = _lone_byte(tokenizer)
        self._before = tokenizer.decode(self._ids) if is_told else ""
        self._told = self._before

    def add(self, tokens: Iterable[int]) -> str:
        """Takes new tokens; gives the text that is certain by now and hasn't been given, "" where there is none."""
        self._ids += tokens
        text = self._tokenizer.decode(self._ids)
        if self._byte is not None:
            # Some tokenizers spell a run of bytes as a whole: with one that is no UTF-8, none of it is.
            text = os.path.commonprefix([text, self._tokenizer.decode([*self._ids, self._byte])])
        text = _UNSETTLED.sub("", text.rstrip(_BROKEN))
        if not text.startswith(self._told):
            return ""
        piece, self._told = text[len(self._told) :], text
        return piece

    def end(self) -> str:
        """There are no more tokens: gives the rest.

        Raises:
            ValueError: the tokenizer gives a text that doesn't begin with what it gave before.
        """
        text = self._tokenizer.decode(self._ids)
        if text.startswith(self._told):
            return text[len(self._told) :]
        if self._told == self._before:  # new tokens have changed the text of those before them
            return self._tokenizer.decode(self._ids[self._begin :])
        raise ValueError(
            f"expected a tokenizer whose text only grows, got {text[-40:]!r} behind {self._told[-40:]!r}: what it says "
            "can't be streamed"
        )


class TextStreamer:
    """Prints text as it comes, for `generate(..., streamer=)`; the like of Hugging Face's.

    Args:
        tokenizer: with encode and decode.
        prompt: printed first, in place of the text of the ids that decoding begins with; None: that text.
    """

    def __init__(self, tokenizer: Detokenizer, *, prompt: str | None = None) -> None:
        self._tokenizer, self._prompt = tokenizer, prompt
        self._pieces: TextPieces | None = None

    def put(self, value: Tensor) -> None:
        """Takes ids: first (1, length) what decoding begins with, then (1,) each new token."""
        if self._pieces is None:
            self._pieces = TextPieces(self._tokenizer, value.flatten().tolist(), is_told=self._prompt is not None)
            self.write(self._prompt or "")
            return
        self.write(self._pieces.add(value.tolist()))

    def end(self) -> None:
        """Prints the rest and a line end; the next text may come."""
        if self._pieces is not None:
            self.write(self._pieces.end() + "\n")
        self._pieces = None

    def write(self, text: str) -> None:
        """Prints a piece; a class of your own may do something else with it."""
        if text:
            print(text, end="", flush=True)


def _lone_byte(tokenizer: Detokenizer) -> int | None:
    """A token that spells a byte which is no text by itself; None where there is none."""
    try:
        ids = tokenizer.encode("\U0010ffff")  # no character: no vocabulary has it as a whole
    except ValueError:
        return None
    return next((i for i in ids if tokenizer.decode([i]) == _BROKEN), None)
