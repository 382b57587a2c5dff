"""Text to ids and back: bytes with no dependency, or a byte-pair encoding trained by the `tokenizers` library.

Ids of both: PAD 0, EOS 1, UNK 2. There is no BOS; a decoder begins with PAD.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from fastformer.files import write_atomically

PAD_ID, EOS_ID, UNK_ID = 0, 1, 2
SPECIAL_TOKENS = ("<pad>", "</s>", "<unk>")
TOKENIZER = "tokenizer.json"


class Tokenizer(Protocol):
    """What the library asks of a tokenizer."""

    pad_id: int
    eos_id: int
    unk_id: int

    @property
    def vocab_size(self) -> int:
        """The number of ids."""
        ...

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without EOS."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids: PAD is skipped, EOS ends it."""
        ...

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """Each id as a short readable string, for pictures and messages."""
        ...

    def save(self, folder: str | os.PathLike) -> None:
        """Writes tokenizer.json."""
        ...


class ByteTokenizer:
    """Every UTF-8 byte is a token: id = byte + 3. Needs nothing and knows every text; sequences are long."""

    pad_id, eos_id, unk_id = PAD_ID, EOS_ID, UNK_ID
    _first = len(SPECIAL_TOKENS)

    @property
    def vocab_size(self) -> int:
        """256 bytes and the special tokens."""
        return 256 + self._first

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without EOS."""
        return [byte + self._first for byte in text.encode("utf-8")]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids: PAD and UNK are skipped, EOS ends it; broken UTF-8 becomes U+FFFD."""
        return bytes(i - self._first for i in until_eos(ids) if i >= self._first).decode("utf-8", errors="replace")

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """Each id as a character, or as <0xNN> for a byte that is none by itself."""
        return [
            SPECIAL_TOKENS[i]
            if i < self._first
            else chr(i - self._first)
            if 32 <= i - self._first < 127
            else f"<0x{i - self._first:02X}>"
            for i in ids
        ]

    def save(self, folder: str | os.PathLike) -> None:
        """Writes tokenizer.json."""
        write_atomically(Path(folder, TOKENIZER), (json.dumps({"type": "bytes"}) + "\n").encode())


class BPETokenizer:
    """A byte-pair encoding of the `tokenizers` library; `train_bpe` makes one.

    Args:
        backend: a `tokenizers.Tokenizer` whose first ids are PAD, EOS and UNK.
    """

    pad_id, eos_id, unk_id = PAD_ID, EOS_ID, UNK_ID

    def __init__(self, backend: Any) -> None:
        found = tuple(backend.id_to_token(i) for i in range(len(SPECIAL_TOKENS)))
        if found != SPECIAL_TOKENS:
            raise ValueError(f"expected a tokenizer whose first ids are {SPECIAL_TOKENS}, got {found}")
        self._backend = backend

    @property
    def vocab_size(self) -> int:
        """The number of ids, special ones included."""
        return self._backend.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without EOS."""
        return self._backend.encode(text).ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids: special tokens are skipped, EOS ends it."""
        return self._backend.decode(list(until_eos(ids)), skip_special_tokens=True)

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """Each id as its piece of text."""
        return [self._backend.id_to_token(i) or SPECIAL_TOKENS[UNK_ID] for i in ids]

    def save(self, folder: str | os.PathLike) -> None:
        """Writes tokenizer.json, which the tokenizers and transformers libraries read too."""
        write_atomically(Path(folder, TOKENIZER), self._backend.to_str(pretty=True).encode())


def train_bpe(texts: Iterable[str], vocab_size: int) -> BPETokenizer:
    """A byte-pair encoding with at most `vocab_size` ids, learned from texts (for a translator: both languages).

    Raises:
        ImportError: the tokenizers library is not installed.
    """
    tokenizers = _library()
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=SPECIAL_TOKENS[UNK_ID]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    backend.decoder = tokenizers.decoders.Metaspace()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(SPECIAL_TOKENS), show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    return BPETokenizer(backend)


def load_tokenizer(path: str | os.PathLike) -> Tokenizer:
    """Loads a tokenizer from a run folder or from a tokenizer.json.

    Raises:
        ValueError: no such file, or one that is damaged.
    """
    file = Path(path)
    if not file.exists():
        raise ValueError(f"expected a run folder or a {TOKENIZER}, but there is no {file}")
    file = file / TOKENIZER if file.is_dir() else file
    if not file.is_file():
        raise ValueError(f"expected the file {file}, which isn't there: was the run saved completely?")
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        if values.get("type") == "bytes":
            return ByteTokenizer()
        return BPETokenizer(_library().Tokenizer.from_file(str(file)))
    except ImportError:
        raise
    except Exception as error:  # the library raises a bare Exception
        raise ValueError(f"{file} is damaged or no tokenizer ({error}): copy it again or train anew") from error


def until_eos(ids: Iterable[int]) -> Sequence[int]:
    """The ids before the first EOS, without PAD."""
    kept = []
    for i in ids:
        if i == EOS_ID:
            break
        if i != PAD_ID:
            kept.append(int(i))
    return kept


def _library() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError(
            "a BPE needs the tokenizers library: pip install 'fastformer[train]', or use the byte tokenizer"
        ) from error
    return tokenizers
