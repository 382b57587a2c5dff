"""The interface of tokenizers, the tokenizer of bytes, and helpers of the other tokenizers.

fastformer's own tokenizers, bytes and a BPE (`bpe`), encode every text. PAD, EOS and UNK come first in them and in
foreign ones (`tokenizer_files`), so that their special ids are the defaults of `SpecialIds`. None of them has a BOS; a
decoder begins with PAD.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from fastformer.data.checks import SPECIAL_TOKENS, check_text, check_texts, checked_ids, until_eos
from fastformer.data.cuts import ANYWHERE, AT_SPACES, pieces
from fastformer.data.user_tokens import UserTokens
from fastformer.files import write_atomically
from fastformer.special_ids import SpecialIds

if TYPE_CHECKING:
    import tokenizers

_UNK = SPECIAL_TOKENS[2]
TOKENIZER = "tokenizer.json"
BYTES = "bytes"  # the type in tokenizer.json
NUM_BYTES = 256
_GAPS = 2**16  # ids without a token that a file may have


class Tokenizer(Protocol):
    """The interface of a tokenizer."""

    @property
    def special_ids(self) -> SpecialIds:
        """The ids of the special tokens; a model that is trained with the tokenizer adopts them."""

    @property
    def vocab_size(self) -> int:
        """The number of ids."""

    def encode(self, text: str) -> list[int]:
        """Encodes a text to its ids, without EOS. A special token that is spelled out in the text is ordinary text.

        Raises:
            ValueError: the text contains a lone surrogate, which is not a character.
        """

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes many texts, on all cores if the library can."""

    def pieces(self, text: str) -> list[str]:
        """Cuts a long text so that the ids of the pieces, one after another, are the ids of the text (see `cuts`)."""

    def decode(self, ids: Iterable[int]) -> str:
        """Decodes ids to text: skips PAD, stops at EOS."""

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """Returns each id as a short readable string, for pictures and messages."""

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes tokenizer.json, which needs no other file."""


class ByteTokenizer:
    """Every UTF-8 byte is a token: id = byte + 3. It needs no training and encodes every text, in long sequences.

    Args:
        user_tokens: tokens that you define; their ids follow those of the bytes.
        drop_user_tokens: omit them from decoded text.
    """

    special_ids = SpecialIds()
    _first = len(SPECIAL_TOKENS)

    def __init__(self, user_tokens: Iterable[str] = (), *, drop_user_tokens: bool = False) -> None:
        self._user = UserTokens(user_tokens, is_dropped=drop_user_tokens)
        self._user_ids = {token: self._first + NUM_BYTES + i for i, token in enumerate(self._user.tokens)}

    @property
    def vocab_size(self) -> int:
        """The number of ids: 256 bytes, the special tokens and the user tokens."""
        return self._first + NUM_BYTES + len(self._user_ids)

    def encode(self, text: str) -> list[int]:
        """Encodes a text to its ids, without EOS."""
        check_text(text)
        ids: list[int] = []
        for place, part in enumerate(self._user.split(text)):
            if place % 2:
                ids.append(self._user_ids[part])
            else:
                ids.extend(byte + self._first for byte in part.encode("utf-8"))
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes many texts; see `encode`."""
        check_texts(texts)
        return [self.encode(text) for text in texts]

    def pieces(self, text: str) -> list[str]:
        """Cuts a long text at any place but within a user token."""
        return pieces(text, self.cuts)

    @property
    def cuts(self) -> re.Pattern[str]:
        """Where a text may be cut."""
        return AT_SPACES if self._user else ANYWHERE

    def decode(self, ids: Iterable[int]) -> str:
        """Decodes ids to text: skips PAD and UNK, stops at EOS; broken UTF-8 becomes U+FFFD."""
        found = b""
        for i in until_eos(ids, self.special_ids, self.vocab_size):
            if i >= self._first + NUM_BYTES:
                found += b"" if self._user.is_dropped else self._user_token(i).encode("utf-8")
            elif i >= self._first and i != self.special_ids.pad:
                found += bytes([i - self._first])
        return found.decode("utf-8", errors="replace")

    def _user_token(self, i: int) -> str:
        return self._user.tokens[i - self._first - NUM_BYTES]

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """Returns each id as a character, or as <0xNN> for a byte that is not a character by itself."""
        return [self._token(i) for i in checked_ids(ids, self.vocab_size)]

    def _token(self, i: int) -> str:
        byte = i - self._first
        if byte < 0:
            return SPECIAL_TOKENS[i]
        if byte >= NUM_BYTES:
            return self._user_token(i)
        return chr(byte) if 32 <= byte < 127 else f"<0x{byte:02X}>"

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes tokenizer.json."""
        values: dict[str, Any] = {"type": BYTES}
        if self._user:
            values |= {"user_tokens": self._user.tokens, "drop_user_tokens": self._user.is_dropped}
        write_atomically(Path(folder, TOKENIZER), (json.dumps(values) + "\n").encode())


def saved_bytes(file: Path, values: Mapping[str, Any]) -> ByteTokenizer:
    """Loads a tokenizer that `ByteTokenizer.save` wrote.

    Raises:
        ValueError: a damaged file.
    """
    tokens, is_dropped = values.get("user_tokens", []), values.get("drop_user_tokens", False)
    if not isinstance(tokens, list) or not isinstance(is_dropped, bool):
        raise ValueError(f"{file} is damaged or no tokenizer (user_tokens {tokens!r:.40}): copy it again")
    return ByteTokenizer(tokens, drop_user_tokens=is_dropped)


def cuts_of(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Returns where a tokenizer's texts may be cut (see `cuts`); None: nowhere, or it isn't known where."""
    found: re.Pattern[str] | None = getattr(tokenizer, "cuts", None)
    return found


def encode_batch(backend: tokenizers.Tokenizer, texts: Sequence[str], name: str = "the tokenizer") -> list[list[int]]:
    """Encodes many texts by a `tokenizers.Tokenizer` on all cores, without special tokens around them.

    Args:
        backend: the tokenizer.
        texts: the texts to encode.
        name: the name of the tokenizer in messages.

    Raises:
        ValueError: a lone surrogate, or a text that the tokenizer can't encode; the first such text is shown.
    """
    check_texts(texts)
    texts = list(texts)
    try:
        with library_errors(f"{name} can't encode this text"):
            return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]
    except ValueError:
        for text in texts:  # the library raises TypeError for a surrogate
            check_text(text)
        for text in texts if len(texts) > 1 else ():
            with library_errors(f"{name} can't encode the text {text[:40]!r}"):
                backend.encode_batch_fast([text], add_special_tokens=False)
        raise


@contextmanager
def library_errors(message: str) -> Iterator[None]:
    """Turns errors of the tokenizers library into a ValueError that begins with the message.

    The library's models raise a bare Exception. A regular expression that exceeds its limits raises a panic, which is a
    BaseException but not an Exception, so callers that catch Exception would miss it.
    """
    try:
        yield
    except Exception as error:
        raise ValueError(f"{message}: {error}") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{message}: {error}") from error


def visible(token: str | None) -> str:
    """Returns a token with visible spaces and line ends, or that of UNK for an id without a token."""
    return _UNK if token is None else token.replace(" ", "▁").replace("\n", "↵")


def read_backend(file: Path, values: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Loads a tokenizer of the `tokenizers` library from the contents of a file.

    Raises:
        ImportError: the library is not installed.
        ValueError: the library can't read the contents.
    """
    library = tokenizers_library(str(file))
    _check_sizes(file, values)
    with library_errors(f"tokenizers {library.__version__} can't read {file} (was it written by a newer version?)"):
        backend: tokenizers.Tokenizer = library.Tokenizer.from_str(json.dumps(values))
    return backend


def _check_sizes(file: Path, values: Mapping[str, Any]) -> None:
    """Checks the ids against the number of tokens: the library reserves memory for all ids up to the largest.

    Raises:
        ValueError: an id far beyond the number of tokens.
    """
    model, added = values.get("model"), values.get("added_tokens")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    ids = list(vocab.values()) if isinstance(vocab, dict) else []
    tokens = len(vocab) if isinstance(vocab, dict | list) else 0
    if isinstance(added, list):
        ids += [token.get("id") for token in added if isinstance(token, dict)]
        tokens += len(added)
    largest = max((i for i in ids if isinstance(i, int)), default=0)
    if largest > 2 * tokens + _GAPS:
        raise ValueError(
            f"expected {file} to have ids of about {tokens:,} tokens, got the id {largest}: is it damaged?"
        )


def tokenizers_library(needed_by: str = "a BPE") -> ModuleType:
    """Imports the tokenizers library.

    Args:
        needed_by: the subject of the message if it is not installed.

    Raises:
        ImportError: it is not installed.
    """
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError(f"{needed_by} needs the tokenizers library: pip install 'fastformer[train]'") from error
    return tokenizers
