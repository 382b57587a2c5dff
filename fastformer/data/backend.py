"""The part of a tokenizer that depends on a library, and the backends that need none.

A backend turns text into the ids of its own vocabulary and back, and adds no special tokens: `Tokenizer` does the rest.
To add a library, write one class like `huggingface.LibraryBackend`, and its line in `tokenizer_files.py`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, NamedTuple

from fastformer.data.cuts import ANYWHERE, AT_SPACES

SPECIAL_TOKENS = ("<pad>", "</s>", "<unk>")  # in the order of their ids
NUM_BYTES = 256
FIRST_BYTE = len(SPECIAL_TOKENS)
_UNK = 2  # the place in SPECIAL_TOKENS
_TAKEN = re.compile(r"<0x..>", re.DOTALL)  # the spelling of a byte in a BPE
Encoded = tuple[list[int], list[int]]  # ids and token types


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


class Frame(NamedTuple):
    """The special tokens around one text, or around and between two.

    Attributes:
        special: the tokens before the first text, after it, and after the second one: pairs of an id and a token type.
        types: the token type of each text.
    """

    special: tuple[tuple[tuple[int, int], ...], ...] = ((), ())
    types: tuple[int, ...] = (0,)

    @classmethod
    def of(cls, *special: Sequence[int]) -> Frame:
        """Makes a frame of ids, with type 0 everywhere."""
        return cls(tuple(tuple((i, 0) for i in ids) for ids in special), (0,) * (len(special) - 1))

    @property
    def num_special(self) -> int:
        """The number of special tokens."""
        return sum(map(len, self.special))

    @property
    def prefix(self) -> list[int]:
        """The ids before the first text."""
        return [i for i, _ in self.special[0]]

    def around(self, texts: Sequence[Sequence[int]]) -> Encoded:
        """Returns the ids and the token types of texts and the special tokens around them."""
        ids, types = self.prefix, [kind for _, kind in self.special[0]]
        for text, text_type, after in zip(texts, self.types, self.special[1:], strict=True):
            ids += [*text, *(i for i, _ in after)]
            types += [*[text_type] * len(text), *(kind for _, kind in after)]
        return ids, types


class Spelled(NamedTuple):
    """A token of a text.

    Attributes:
        id, name: its id, and its name in the vocabulary.
        text: the part of the text that it stands for, which begins at `start` and ends at `end`.
        continues: whether it continues a word.
    """

    id: int
    name: str
    text: str
    start: int
    end: int
    continues: bool


class Backend(ABC):
    """A library's tokenizer of one vocabulary.

    Attributes:
        library: the name of the library in tokenizer.json.
        size: one more than its largest id.
        words_begin_with_space: whether a word's token includes the space in front of it.
    """

    library: ClassVar[str]
    size: int
    words_begin_with_space: bool = False

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes texts to ids; a special token that a text spells is ordinary text.

        Raises:
            ValueError: a lone surrogate, or a text that the library can't encode.
        """

    @abstractmethod
    def decode(self, ids: list[int]) -> str:
        """Decodes ids to text, without the backend's special tokens and ids that it has no token for."""

    @abstractmethod
    def id_to_token(self, i: int) -> str | None:
        """Returns the token of an id; None: it has none."""

    def token_bytes(self) -> list[bytes | None]:
        """Returns for each id the bytes that it adds to a text that has begun.

        None: the token is special, or its bytes depend on its neighbours.

        Raises:
            ValueError: the bytes of tokens aren't known.
        """
        raise ValueError(f"expected a tokenizer whose tokens have known bytes, got one of {self.library}")

    def readable(self, i: int) -> str:
        """Returns the token of an id with visible spaces and line ends, or that of UNK for an id without a token."""
        token = self.id_to_token(i)
        return SPECIAL_TOKENS[_UNK] if token is None else token.replace(" ", "▁").replace("\n", "↵")

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """Returns the values for tokenizer.json from which the backend is made again."""

    @property
    def cuts(self) -> re.Pattern[str] | None:
        """Where a text may be cut (see `cuts`); None: nowhere, or it isn't known where."""
        return None

    @property
    def added_tokens(self) -> dict[str, bool]:
        """The tokens that are recognised before all others, and whether each of them is special."""
        return {}

    def encode_control(self, text: str, written: bytes | None, controls: frozenset[str]) -> list[int]:
        """Encodes a text whose special tokens become their ids; see `Tokenizer.encode_template`."""
        raise ValueError(f"expected the tokenizer of a language model's folder, got one of {self.library}")

    def add_control(self, token: str) -> None:
        """Makes a token of the vocabulary special, so that a prompt which spells it has its id."""
        raise ValueError(f"expected the tokenizer of an encoder's folder, got one of {self.library}")

    def spelled(self, texts: Sequence[str]) -> list[list[Spelled]]:
        """Returns the tokens of texts with their places, without special tokens around them."""
        raise ValueError(
            f"expected a folder with a tokenizer.json, whose tokens have places, got one of {self.library}"
        )

    def joined(self, names: Sequence[str]) -> str:
        """Returns the text of tokens with these names."""
        return " ".join(names)

    def encoder_frames(self) -> tuple[Frame, Frame]:
        """Returns the special tokens that an encoder expects around one text, and around two."""
        raise ValueError(f"expected the vocabulary of an encoder, got one of {self.library}")

    def unknown(self, text: str, unk: int) -> list[str]:
        """Returns the parts of a text that were encoded as `unk`."""
        return []


class ControlGuard(ABC):
    """Encodes texts in which only some characters may become control tokens.

    If the library finds the same control tokens in the whole text as in those parts that the template wrote, its ids
    are right. Otherwise `apart` encodes the text with these tokens alone.
    """

    ids: Mapping[str, int]  # of the control tokens
    watched: frozenset[int]  # those of them that only the template can write

    @abstractmethod
    def find(self, text: str) -> list[tuple[int, int, str]]:
        """Returns the control tokens that the library finds in a text: where each begins and ends, and its name."""

    @abstractmethod
    def whole(self, text: str) -> list[int]:
        """Encodes a text in which all control tokens count."""

    @abstractmethod
    def apart(self, text: str, tokens: list[tuple[int, int, str]]) -> list[int]:
        """Encodes a text in which these control tokens count, and no others."""

    def encode(self, text: str, written: bytes) -> list[int]:
        """Encodes a text; `written` has a 1 for each character that may become a part of a control token.

        Raises:
            ValueError: characters of a message become a control token all the same.
        """
        tokens: list[tuple[int, int, str]] = []
        expected, is_watched = list[int](), self.watched.__contains__
        for run in re.finditer(b"\1+", written):
            for start, end, token in self.find(text[run.start() : run.end()]):
                tokens.append((run.start() + start, run.start() + end, token))
                expected += filter(is_watched, [self.ids[token]])
        if self.find(text) == tokens:
            ids = self.whole(text)
            if [*filter(is_watched, ids)] == expected:
                return ids
        ids = self.apart(text, tokens)
        if [*filter(is_watched, ids)] != expected:
            raise ValueError("a message changes the control tokens of the chat, whatever their names are")
        return ids


class ByteBackend(Backend):
    """Every UTF-8 byte is a token: id = byte + 3. User tokens follow.

    Args:
        user: the user tokens.
    """

    library = "bytes"

    def __init__(self, user: UserTokens) -> None:
        self.user = user
        self._user_ids = {token: FIRST_BYTE + NUM_BYTES + i for i, token in enumerate(user.tokens)}
        self.size = FIRST_BYTE + NUM_BYTES + len(self._user_ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> list[int]:
        check_text(text)
        ids: list[int] = []
        for place, part in enumerate(self.user.split(text)):
            ids += [self._user_ids[part]] if place % 2 else [byte + FIRST_BYTE for byte in part.encode("utf-8")]
        return ids

    def decode(self, ids: list[int]) -> str:
        """Decodes ids to text; broken UTF-8 becomes U+FFFD."""
        data = bytearray()
        for i in ids:
            if i >= FIRST_BYTE + NUM_BYTES:
                data += b"" if self.user.is_dropped else self.user.tokens[i - FIRST_BYTE - NUM_BYTES].encode("utf-8")
            elif i >= FIRST_BYTE:
                data.append(i - FIRST_BYTE)
        return data.decode("utf-8", errors="replace")

    def token_bytes(self) -> list[bytes | None]:
        user = [None if self.user.is_dropped else token.encode() for token in self.user.tokens]
        return [*[None] * FIRST_BYTE, *(bytes([byte]) for byte in range(NUM_BYTES)), *user]

    def id_to_token(self, i: int) -> str:
        """Returns a special or user token, a character, or <0xNN> for a byte that is not a character by itself."""
        byte = i - FIRST_BYTE
        if byte < 0:
            return SPECIAL_TOKENS[i]
        if byte >= NUM_BYTES:
            return self.user.tokens[byte - NUM_BYTES]
        return chr(byte) if 32 <= byte < 127 else f"<0x{byte:02X}>"

    readable = id_to_token

    @property
    def cuts(self) -> re.Pattern[str]:
        return AT_SPACES if self.user else ANYWHERE

    def to_json(self) -> dict[str, Any]:
        return {"user_tokens": self.user.tokens, "drop_user_tokens": self.user.is_dropped} if self.user else {}


@dataclass(frozen=True)
class ForeignIds:
    """The special ids of a library's file; None: it lacks the token, or its id means another special token."""

    pad: int | None
    eos: int | None
    unk: int | None

    @classmethod
    def distinct(cls, *, pad: int | None, eos: int | None, unk: int | None) -> ForeignIds:
        """Builds the ids without those that have two purposes: files often use one token for padding, too."""
        unk = None if unk == eos else unk
        return cls(None if pad in (eos, unk) else pad, eos, unk)


class Renumbered(Backend):
    """Another backend with other ids: PAD, EOS and UNK come first, and the other tokens follow in their order.

    A special token that the backend lacks gets an id of its own.

    Args:
        inner: the backend.
        ids: its own ids of PAD, EOS and UNK.

    Attributes:
        inner: the backend.
        inner_ids: its id for each id; None: it has none.
    """

    library = "foreign"
    words_begin_with_space = True

    def __init__(self, inner: Backend, ids: ForeignIds) -> None:
        self.inner, self._special = inner, ids
        special = (ids.pad, ids.eos, ids.unk)
        known = [i for i in special if i is not None]
        if len(set(known)) < len(known) or any(not 0 <= i < inner.size for i in known):
            raise ValueError(f"expected different special ids below {inner.size}, got {special}")
        self.inner_ids = [*special, *(i for i in range(inner.size) if i not in special)]
        self._new_ids = {old: new for new, old in enumerate(self.inner_ids) if old is not None}
        self.size = len(self.inner_ids)
        self._spelled: set[str] = set()  # characters that are known to have tokens
        self._lost: set[str] = set()  # characters that are known to have none

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        new_ids = self._new_ids
        return [[new_ids[i] for i in ids] for ids in self.inner.encode_batch(texts)]

    def decode(self, ids: list[int]) -> str:
        return self.inner.decode([old for i in ids if (old := self.inner_ids[i]) is not None])

    def token_bytes(self) -> list[bytes | None]:
        inner, special = self.inner.token_bytes(), len(SPECIAL_TOKENS)
        return [None if old is None or i < special else inner[old] for i, old in enumerate(self.inner_ids)]

    def id_to_token(self, i: int) -> str | None:
        return SPECIAL_TOKENS[i] if i < len(SPECIAL_TOKENS) else self.inner.id_to_token(self.inner_ids[i] or 0)

    @property
    def cuts(self) -> re.Pattern[str] | None:
        return self.inner.cuts

    def unknown_parts(self, text: str, ids: Sequence[int]) -> list[str]:
        """Returns the parts of a text that no token represents; `ids` is the encoded text."""
        if self._special.unk is not None:
            return self.inner.unknown(text, self._special.unk) if _UNK in ids else []
        # Without an unknown token, some libraries omit the parts that they don't know.
        for character in set(text) - self._spelled - self._lost:
            is_spelled = character.isspace() or bool(self.encode_batch([character])[0])
            (self._spelled if is_spelled else self._lost).add(character)
        return [character for character in text if character in self._lost] if self._lost else []

    def to_json(self) -> dict[str, Any]:
        (model,) = self.inner.to_json().values()
        return {"special_ids": asdict(self._special), "library": self.inner.library, "model": model}


def any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Returns a pattern of these tokens; if two begin at the same place, the longer one counts."""
    return re.compile("|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True)) or r"(?!)")
