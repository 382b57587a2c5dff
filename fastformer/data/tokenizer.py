"""Text to ids and back: bytes with no dependency, or a byte-pair encoding trained by the `tokenizers` library.

Both know every text. All tokenizers, foreign ones included (`tokenizer_files`), put PAD, EOS and UNK first: their
special ids are the defaults of `SpecialIds`. There is no BOS; a decoder begins with PAD.
"""

from __future__ import annotations

import json
import operator
import os
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from fastformer.files import write_atomically
from fastformer.special_ids import SpecialIds

if TYPE_CHECKING:
    import tokenizers

SPECIAL_TOKENS = ("<pad>", "</s>", "<unk>")  # in the order of their ids
_UNK = SPECIAL_TOKENS[2]
TOKENIZER = "tokenizer.json"
NUM_BYTES = 256
_MOST_TOKENS = 2**24  # the library would set memory aside for more than any text has
_PIECE = 50_000  # characters of a long text that are encoded at a time


class Tokenizer(Protocol):
    """What the library asks of a tokenizer."""

    @property
    def special_ids(self) -> SpecialIds:
        """What means something by itself; a model that is trained with the tokenizer takes them over."""
        ...

    @property
    def vocab_size(self) -> int:
        """The number of ids."""
        ...

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without EOS. A special token that is spelled in the text is text.

        Raises:
            ValueError: a lone surrogate, which is no character.
        """
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of many texts, on all cores where the library can."""
        ...

    def pieces(self, text: str) -> list[str]:
        """Cuts a long text where the ids of the pieces, one after another, are those of the text."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids: PAD is skipped, EOS ends it."""
        ...

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """Each id as a short readable string, for pictures and messages."""
        ...

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes tokenizer.json, which needs no other file."""
        ...


class ByteTokenizer:
    """Every UTF-8 byte is a token: id = byte + 3. Needs nothing and knows every text; sequences are long."""

    special_ids = SpecialIds()
    _first = len(SPECIAL_TOKENS)

    @property
    def vocab_size(self) -> int:
        """256 bytes and the special tokens."""
        return NUM_BYTES + self._first

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without EOS."""
        check_text(text)
        return [byte + self._first for byte in text.encode("utf-8")]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of many texts."""
        check_texts(texts)
        return [self.encode(text) for text in texts]

    def pieces(self, text: str) -> list[str]:
        """Cuts a long text, anywhere."""
        return [text[start : start + _PIECE] for start in range(0, len(text), _PIECE)]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids: PAD and UNK are skipped, EOS ends it; broken UTF-8 becomes U+FFFD."""
        kept = until_eos(ids, self.special_ids)
        if max(kept, default=0) >= self.vocab_size:
            raise ValueError(f"expected ids below {self.vocab_size}, got {max(kept)}: was another tokenizer used?")
        return bytes(i - self._first for i in kept if i >= self._first).decode("utf-8", errors="replace")

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

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes tokenizer.json."""
        write_atomically(Path(folder, TOKENIZER), (json.dumps({"type": "bytes"}) + "\n").encode())


class BPETokenizer:
    """A byte-pair encoding of the `tokenizers` library; `train_bpe` makes one.

    It knows every text: `decode(encode(text))` is the text's NFKC normal form, spaces and line ends included. Words
    begin with their space, and the first word of each line is given one (decoding takes it off again), so that a word
    is the same token wherever it stands. What no token spells is spelled in bytes, ids 3 to 258.

    Args:
        backend: a `tokenizers.Tokenizer` that `train_bpe` made, or that was read from a file which it wrote.
    """

    special_ids = SpecialIds()

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        if not hasattr(backend, "id_to_token") or not is_our_bpe(backend):
            raise ValueError("expected a tokenizer that train_bpe made; load_tokenizer reads those of other programs")
        backend.encode_special_tokens = True  # "</s>" in a text is text; the file can't say so
        self._backend = backend

    @property
    def vocab_size(self) -> int:
        """The number of ids, special ones and bytes included."""
        return self._backend.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without EOS."""
        check_text(text)
        return [i for ids in self.encode_batch(self.pieces(text)) for i in ids]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of many texts, on all cores."""
        return encode_batch(self._backend, texts)

    def pieces(self, text: str) -> list[str]:
        """Cuts a long text behind line ends."""
        return line_pieces(text)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids: special tokens are skipped, EOS ends it; broken UTF-8 becomes U+FFFD."""
        return str(self._backend.decode(until_eos(ids, self.special_ids), skip_special_tokens=True))

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """Each id as its piece of text, with visible spaces and line ends."""
        return [visible(self._backend.id_to_token(i)) for i in ids]

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes tokenizer.json, which the tokenizers and transformers libraries read too."""
        write_atomically(Path(folder, TOKENIZER), self._backend.to_str(pretty=True).encode())


def line_pieces(text: str) -> list[str]:
    """Cuts a long text behind line ends, but not before another one: a BPE may have a token for two."""
    found, start = [], 0
    while len(text) - start > _PIECE:
        end = text.find("\n", start + _PIECE)
        while end >= 0 and text[end + 1 : end + 2] == "\n":
            end += 1
        if end < 0 or end + 1 == len(text):
            break
        found.append(text[start : end + 1])
        start = end + 1
    return [*found, text[start:]]


def train_bpe(texts: Iterable[str], vocab_size: int) -> BPETokenizer:
    """A byte-pair encoding learned from texts (for a translator: of both languages).

    Args:
        texts: lines, or pieces of documents with the line ends in them.
        vocab_size: the most ids it may have, special tokens included, beside the 256 bytes: they come on top, so that a
            small vocabulary has as much room for words as before. At most half of it goes to single characters, the
            most frequent ones; the others are spelled in bytes.

    Raises:
        ImportError: the tokenizers library is not installed.
        ValueError: a vocab_size that leaves no room beside the special tokens, or text with a lone surrogate.
    """
    library = tokenizers_library()
    if not isinstance(vocab_size, int) or vocab_size >= _MOST_TOKENS:
        raise ValueError(f"expected vocab_size to be an integer below {_MOST_TOKENS:,}, got {vocab_size!r}")
    if vocab_size <= len(SPECIAL_TOKENS):
        raise ValueError(f"expected vocab_size of more than the {len(SPECIAL_TOKENS)} special tokens, got {vocab_size}")
    check_texts(texts)
    texts = list(texts)  # they are read more than once
    for text in texts:
        check_text(text)
    fallback = [f"<0x{byte:02X}>" for byte in range(NUM_BYTES)]
    alphabet = _alphabet(texts, vocab_size // 2)
    learner = _pipeline(library.models.BPE(unk_token=_UNK, byte_fallback=True))
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size + NUM_BYTES,
        special_tokens=[*SPECIAL_TOKENS, *fallback],
        show_progress=False,
        **({} if alphabet is None else {"initial_alphabet": alphabet, "limit_alphabet": len(alphabet)}),
    )
    learner.train_from_iterator(texts, trainer)
    # The bytes were special for the trainer, to get their ids; now they are ordinary tokens that text never spells.
    model = json.loads(learner.to_str())["model"]
    backend = _pipeline(
        library.models.BPE(
            vocab=model["vocab"],
            merges=[(left, right) for left, right in model["merges"]],
            unk_token=_UNK,
            byte_fallback=True,
        )
    )
    backend.add_special_tokens(list(SPECIAL_TOKENS))
    return BPETokenizer(backend)


def _alphabet(texts: Sequence[str], limit: int) -> list[str] | None:
    """The most frequent characters of some texts; None where there are no more than the limit."""
    if len(set().union(*texts)) < limit:
        return None
    counts = Counter({" ": len(texts)})
    for text in texts:
        counts.update(unicodedata.normalize("NFKC", text))
    return sorted(counts, key=lambda character: (-counts[character], character))[:limit]


def _pipeline(model: tokenizers.models.BPE) -> tokenizers.Tokenizer:
    """A model between what prepares a text for it and what undoes that."""
    library = tokenizers_library()
    normalizers, splits, decoders = library.normalizers, library.pre_tokenizers, library.decoders
    backend: tokenizers.Tokenizer = library.Tokenizer(model)
    backend.normalizer = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.Prepend(" "),  # to the text
            normalizers.Replace(library.Regex(r"\n(?=[^\n])"), "\n "),  # and to each later line that has something
        ]
    )
    backend.pre_tokenizer = splits.Sequence(
        [
            # No token may be spelled like a special token or a byte.
            splits.Split(library.Regex(r"<(?=(?:pad|/s|unk|0x[0-9A-F]{2})>)"), "isolated"),
            # Words with their space; further spaces; line ends.
            splits.Split(library.Regex(r" ?[^ \n]+| +(?![^ \n])|\n+"), "isolated"),
        ]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Replace("\n ", "\n"),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return backend


def is_our_bpe(backend: tokenizers.Tokenizer) -> bool:
    """Whether `train_bpe` made this tokenizer: its special ids and all that is around the model are as there."""
    if tuple(backend.id_to_token(i) for i in range(len(SPECIAL_TOKENS))) != SPECIAL_TOKENS:
        return False
    ours = json.loads(_pipeline(tokenizers_library().models.BPE()).to_str())
    theirs = json.loads(backend.to_str())
    around = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    return bool(theirs["model"].get("byte_fallback")) and all(ours[name] == theirs[name] for name in around)


def encode_batch(backend: tokenizers.Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """The ids of many texts by a `tokenizers.Tokenizer`, with nothing around them, on all cores.

    Raises:
        ValueError: a lone surrogate, or a text that the tokenizer can't spell and has no unknown token for.
    """
    check_texts(texts)
    try:
        return [encoding.ids for encoding in backend.encode_batch_fast(list(texts), add_special_tokens=False)]
    except Exception as error:  # TypeError for a surrogate; what the model refuses is a bare Exception
        for text in texts:
            check_text(text)
        raise ValueError(f"the tokenizer can't encode this text: {error}") from error


def check_text(text: str) -> None:
    """Raises a ValueError for what is no str, or a lone surrogate, which stands for a byte that was no UTF-8."""
    if not isinstance(text, str):
        raise ValueError(f"expected text as a str, got {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"expected text, got the lone surrogate U+{ord(text[error.start]):04X} at position {error.start}: "
            "what was read is no UTF-8"
        ) from error


def check_texts(texts: Iterable[str]) -> None:
    """Raises a ValueError unless it is several texts: a str is an iterable of characters."""
    if isinstance(texts, str | bytes) or not isinstance(texts, Iterable):
        raise ValueError(f"expected a list of texts, got {type(texts).__name__}")


def until_eos(ids: Iterable[int], special_ids: SpecialIds) -> list[int]:
    """The ids before the first that is any EOS, without PAD.

    Raises:
        ValueError: something that is no id.
    """
    kept = []
    for i in _each(ids):
        if i in special_ids.eos:
            break
        if i != special_ids.pad:
            kept.append(i)
    return kept


def _each(ids: Iterable[int]) -> Iterator[int]:
    if isinstance(ids, str | bytes) or not isinstance(ids, Iterable):
        raise ValueError(f"expected ids, a list or the like of integers, got {type(ids).__name__}")
    for i in ids:
        try:
            index = operator.index(i)
        except TypeError as error:
            raise ValueError(f"expected ids to be integers, got {i!r}") from error
        if index < 0:
            raise ValueError(f"expected ids of at least 0, got {index}")
        yield index


def visible(token: str | None) -> str:
    """A token with its spaces and line ends made visible; of an id that has none, that of UNK."""
    return _UNK if token is None else token.replace(" ", "▁").replace("\n", "↵")


def read_backend(file: Path, values: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """A tokenizer of the `tokenizers` library from what a file holds.

    Raises:
        ImportError: the library is not installed.
        ValueError: it can't read that.
    """
    library = tokenizers_library()
    try:
        backend: tokenizers.Tokenizer = library.Tokenizer.from_str(json.dumps(values))
    except Exception as error:  # the library raises a bare Exception
        raise ValueError(
            f"tokenizers {library.__version__} can't read {file}: {error}; was it written by a newer version?"
        ) from error
    return backend


def tokenizers_library() -> ModuleType:
    """The tokenizers library.

    Raises:
        ImportError: it is not installed.
    """
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError(
            "a BPE needs the tokenizers library: pip install 'fastformer[train]', or use the byte tokenizer"
        ) from error
    return tokenizers
