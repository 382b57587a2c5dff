"""Turns texts and pairs of texts into ids, cut to the model's maximum length."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from fastformer.data.tokenizer import Tokenizer
from fastformer.locks import ForkSafeLock
from fastformer.settings import Positive, check_value

logger = logging.getLogger("fastformer")

R = TypeVar("R")

Pair = tuple[str, str]


class Rows(NamedTuple):
    """Texts as ids for the model.

    Attributes:
        ids: the ids of each text, including special tokens.
        types: the type of each of these tokens; None: all are 0.
    """

    ids: list[list[int]]
    types: list[list[int]] | None = None

    def select(self, indices: Sequence[int]) -> Rows:
        """Returns the rows at these indices."""
        types = None if self.types is None else [self.types[index] for index in indices]
        return Rows([self.ids[index] for index in indices], types)


class Reader:
    """Makes rows from texts. Several threads may use one reader.

    Args:
        tokenizer: the tokenizer of the model's folder.
        max_len: the most tokens in a row; longer texts are cut at their end.
        lowers: whether texts are lower-cased first.

    Attributes:
        max_len: as above.
        num_cut: the number of texts that were cut so far.
    """

    def __init__(self, tokenizer: Tokenizer, max_len: int, *, lowers: bool = False) -> None:
        self.tokenizer, self.max_len, self._lowers = tokenizer, max_len, lowers
        self.num_cut = 0
        self._lock = ForkSafeLock()

    def set_max_len(self, value: int, most: int) -> None:
        """Sets max_len.

        Args:
            value: the new max_len.
            most: the number of the model's positions.

        Raises:
            ValueError: the value is not an integer from 1 to most.
        """
        check_value("max_seq_length", value, Positive)
        if value > most:
            raise ValueError(f"expected max_seq_length of at most {most}, the model's positions, got {value}")
        self.max_len = value

    def texts(self, texts: Sequence[str], prompt: str = "", *, cuts: bool = True, max_len: int | None = None) -> Rows:
        """Makes a row from each text.

        Args:
            texts: the texts.
            prompt: what is put in front of each text.
            cuts: whether texts of more than max_len tokens are cut; if not, they are an error.
            max_len: the most tokens of these texts; None: the reader's.

        Raises:
            ValueError: a text contains a lone surrogate, which is not a character, or is too long.
        """
        if self._lowers:
            prompt, texts = self._lowered(prompt), [lowered(text) for text in texts]
        encode = self.tokenizer.encode_batch
        return Rows(
            self._encoded(lambda most, lengths: encode(texts, most, prompt=prompt, lengths=lengths), cuts, max_len)
        )

    def num_prompt_tokens(self, prompt: str) -> int:
        """Returns the number of tokens at the beginning of a row that come from a prompt in front of its text."""
        encode, prompt = self.tokenizer.encode_batch, self._lowered(prompt) if self._lowers else prompt
        (alone,), (nothing,) = encode([""], self.max_len, prompt=prompt), encode([""], self.max_len)
        # The last token is of every text, such as [SEP].
        return len(alone) - int(bool(nothing) and alone[-1] == nothing[-1])

    def pairs(self, pairs: Sequence[Pair], prompt: str = "", *, cuts: bool = True) -> Rows:
        """Makes a row from each pair, with the types of its tokens if the model has types.

        Args:
            pairs: the pairs of texts.
            prompt: what is put in front of the first text of each pair.
            cuts: as for `texts`.

        Raises:
            ValueError: a text contains a lone surrogate, which is not a character, or a pair is too long.
        """
        if self._lowers:
            prompt, pairs = self._lowered(prompt), [(lowered(first), lowered(second)) for first, second in pairs]
        encode = self.tokenizer.encode_pairs
        rows = self._encoded(lambda most, lengths: encode(pairs, most, prompt=prompt, lengths=lengths), cuts)
        types = [types for _, types in rows] if self.tokenizer.has_token_types else None
        return Rows([ids for ids, _ in rows], types)

    def _lowered(self, prompt: str) -> str:
        """Lower-cases a prompt, but for the tokens that it spells."""
        tokens = "|".join(map(re.escape, self.tokenizer.added_tokens))
        parts = re.split(f"({tokens})", prompt) if tokens else [prompt]
        return "".join(part if number % 2 else lowered(part) for number, part in enumerate(parts))

    def _encoded(self, encode: Callable[[int, list[int]], list[R]], cuts: bool, max_len: int | None = None) -> list[R]:
        """Returns the rows of texts or pairs, and counts those that were cut.

        Args:
            encode: (the most tokens of a row, a list to which the lengths before cutting are added) -> the rows.
            cuts, max_len: see `texts`.
        """
        max_len, lengths = self.max_len if max_len is None else max_len, list[int]()
        rows = encode(max_len, lengths)
        long = [index for index, length in enumerate(lengths) if length > max_len]
        if long and not cuts:
            raise ValueError(
                f"expected texts of at most {max_len:,} tokens, got one of {lengths[long[0]]:,} at place {long[0]}: "
                "shorten it, or ask for truncation"
            )
        with self._lock:
            is_first, self.num_cut = self.num_cut == 0, self.num_cut + len(long)
        if long and is_first:
            logger.warning(
                "cut a text to max_seq_length, %d tokens; num_cut counts such texts. This warning is shown once",
                max_len,
            )
        return rows


def lowered(text: str) -> str:
    """Lower-cases a text character by character, as the tokenizers library does, so without the final sigma."""
    return text.lower() if text.isascii() else "".join(map(str.lower, text))
