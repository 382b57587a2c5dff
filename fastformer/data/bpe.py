"""fastformer's byte-pair encoding, trained by the `tokenizers` library."""

from __future__ import annotations

import functools
import json
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from fastformer.data.backend import FIRST_BYTE, NUM_BYTES, SPECIAL_TOKENS, UserTokens, check_text, check_texts
from fastformer.data.cuts import AT_LINES, AT_LINES_AND_WORDS, AT_WORDS_WITHOUT_SPACE
from fastformer.data.huggingface import LibraryBackend, library_errors
from fastformer.data.tokenizer import TOKENIZER, Tokenizer
from fastformer.files import tokenizers_library, write_atomically

if TYPE_CHECKING:
    import tokenizers

Normalization = Literal["nfkc", "nfc", "none", "nfkc_lower", "nfc_lower", "lower"]
Spaces = Literal["keep", "collapse"]

MAX_TOKEN_LENGTH = 32  # no token of Multi30k's 32,000 most useful ones is longer
LEARNING = AT_LINES_AND_WORDS  # where text that a BPE learns from may be cut
_UNK = SPECIAL_TOKENS[2]
_BYTE_IDS = range(FIRST_BYTE, FIRST_BYTE + NUM_BYTES)
_MOST_TOKENS = 2**24  # the library reserves memory for as many; no text needs more
# The most characters of a word, of a run of spaces or of a run of line ends; longer ones are cut. The time of learning
# grows with the square of a word's length, and in languages without spaces a word is as long as its line.
_LONGEST_WORD = 128
# The library's decoder also reads spellings of a byte that it never writes, such as "<0x4a>" and "<0x+a>".
_SPELLED = r"pad|/s|unk|0x[0-9A-Fa-f+][0-9A-Fa-f]"


@dataclass(frozen=True)
class TextForm:
    """The form into which a BPE changes a text before it looks for tokens.

    Attributes:
        normalization: the form that the text is brought to: Unicode's NFKC, which also changes how a text looks ("10²"
            becomes "102", "½" becomes "1⁄2", a no-break space becomes a space); NFC, which does not; or "none". With
            "_lower", or "lower" for it alone, the text becomes lower case.
        spaces: "keep" them all; or "collapse" runs of spaces and tabs into one space and remove white space at the
            ends of the text and beside its line ends.
        is_old: whether the tokenizer is of an earlier version, which didn't cut long words.
    """

    normalization: Normalization = "nfkc"
    spaces: Spaces = "keep"
    is_old: bool = False

    def __post_init__(self) -> None:
        for name, value, choices in (
            ("normalization", self.normalization, get_args(Normalization)),
            ("spaces", self.spaces, get_args(Spaces)),
        ):
            if value not in choices:
                raise ValueError(f"expected {name} in {choices}, got {value!r}")


class BPEBackend(LibraryBackend):
    """A tokenizer of the `tokenizers` library that `train_bpe` made; see `BPETokenizer`.

    Attributes:
        form: the form into which it changes a text before it looks for tokens.
        user: its user tokens.
    """

    library = "bpe"

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        form = form_of(tokenizer) if hasattr(tokenizer, "id_to_token") else None
        if form is None:
            raise ValueError("expected a tokenizer that train_bpe made; load_tokenizer reads those of other programs")
        super().__init__(tokenizer)
        self.form, values = form, self.to_json()
        added = [token for token in values["added_tokens"] if token["id"] >= FIRST_BYTE]
        # The file marks user tokens that decoding drops as special, so that other programs can drop them too.
        self.user = UserTokens(
            (token["content"] for token in added), is_dropped=any(token["special"] for token in added)
        )
        self._user_ids = {token["content"]: int(token["id"]) for token in added}
        self._plain = LibraryBackend(_without_user_tokens(values)) if added else self
        self._tokens = [self.id_to_token(i) or "" for i in range(self.size)]
        self._dropped = set(self._user_ids.values()) if self.user.is_dropped else set()

    def normalized(self, text: str) -> list[str]:
        """Splits a text into text, user token, text, ..., text, with each text in its normal form."""
        normalizers = tokenizers_library().normalizers
        form = normalizers.Sequence(_normalizers(self.form))
        parts = [part if place % 2 else form.normalize_str(part) for place, part in enumerate(self.user.split(text))]
        if self.form.spaces == "collapse":
            strip = normalizers.Strip
            parts[0] = strip(left=True, right=False).normalize_str(parts[0])
            parts[-1] = strip(left=False, right=True).normalize_str(parts[-1])
            parts[::2] = [part.replace(" \n", "\n").replace("\n ", "\n") for part in parts[::2]]
        return parts

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if not self.user:
            return super().encode_batch(texts)
        # The library would add a space to the text after a user token, as it does to the first word of a line.
        split_texts: list[list[str]] = []
        for text in texts:
            check_text(text)
            parts = self.normalized(text)
            parts[::2] = [re.sub(r"\n(?=[^\n])", "\n ", part) for part in parts[::2]]
            if parts[0]:
                parts[0] = f" {parts[0]}"
            split_texts.append(parts)
        encoded = iter(self._plain.encode_batch([part for parts in split_texts for part in parts[::2]]))
        return [
            [i for place, part in enumerate(parts) for i in ([self._user_ids[part]] if place % 2 else next(encoded))]
            for parts in split_texts
        ]

    @property
    def cuts(self) -> re.Pattern[str] | None:
        """Where a text may be cut: where the library puts a space before the part behind the cut, too."""
        if self.form.spaces == "keep":
            return AT_LINES if self.user else AT_LINES_AND_WORDS
        return None if self.user else AT_WORDS_WITHOUT_SPACE

    def decode(self, ids: list[int]) -> str:
        parts: list[str] = []
        spelled = bytearray()  # bytes of characters that no token spells
        ids = [i for i in ids if i >= FIRST_BYTE]
        for i in ids:
            if i in _BYTE_IDS:
                spelled.append(i - FIRST_BYTE)
                continue
            if spelled:
                parts.append(spelled.decode("utf-8", errors="replace"))
                spelled.clear()
            if i not in self._dropped:
                parts.append(self._tokens[i])
        parts.append(spelled.decode("utf-8", errors="replace"))
        text = "".join(parts)
        if not ids or self._tokens[ids[0]] not in self._user_ids or self._dropped:
            text = text.removeprefix(" ")  # the space that encoding added to the first word
        return text.replace("\n ", "\n")

    def token_bytes(self) -> list[bytes | None]:
        data: list[bytes | None] = [token.encode() for token in self._tokens]
        data[: _BYTE_IDS.stop] = [*[None] * FIRST_BYTE, *(bytes([byte]) for byte in range(NUM_BYTES))]
        # A text has no space after the end of a line.
        return [None if i in self._dropped or not one or b"\n" in one else one for i, one in enumerate(data)]

    def to_json(self) -> dict[str, Any]:
        values: dict[str, Any] = json.loads(self.tokenizer.to_str())
        return values


class BPETokenizer(Tokenizer):
    """A byte-pair encoding of the `tokenizers` library; `train_bpe` makes one.

    It encodes every text: `decode(encode(text))` is `normalize(text)`. Words begin with their space, and encoding adds
    one to the first word of each line (decoding removes it), so that a word is the same token at any place. Characters
    that no token spells are spelled in bytes, ids 3 to 258.

    Args:
        backend: a `tokenizers.Tokenizer` that `train_bpe` made, or that was read from a file which it wrote.
    """

    backend: BPEBackend

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        super().__init__(BPEBackend(backend))

    @property
    def form(self) -> TextForm:
        """The form into which the tokenizer changes a text before it looks for tokens."""
        return self.backend.form

    @property
    def user_tokens(self) -> tuple[str, ...]:
        """The tokens that the tokenizer's user defined."""
        return self.backend.user.tokens

    def normalize(self, text: str) -> str:
        """Returns the text in the tokenizer's form, as `decode(encode(text))` does; user tokens stay."""
        check_text(text)
        return "".join(self.backend.normalized(text))

    def to_json(self) -> dict[str, Any]:
        return self.backend.to_json()

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes tokenizer.json, which the tokenizers and transformers libraries read too."""
        write_atomically(Path(folder, TOKENIZER), self.backend.tokenizer.to_str(pretty=True).encode())


def train_bpe(
    texts: Iterable[str],
    vocab_size: int,
    *,
    normalization: Normalization = "nfkc",
    spaces: Spaces = "keep",
    max_token_length: int = MAX_TOKEN_LENGTH,
    user_tokens: Iterable[str] = (),
    drop_user_tokens: bool = False,
) -> BPETokenizer:
    """Learns a byte-pair encoding from texts (for a translator: of both languages).

    Args:
        texts: lines, or pieces of documents with their line ends.
        vocab_size: the most ids, special and user tokens included. The 256 bytes are not counted, so that even a small
            vocabulary has room for words. At most half of it goes to single
            characters, the most frequent ones; the others are spelled in bytes.
        normalization, spaces: see `TextForm`.
        max_token_length: the most characters of a token, its space included; at least 2.
        user_tokens: tokens that you define: one that is spelled in a text gets its id, and is neither split nor
            normalised.
        drop_user_tokens: omit them from decoded text.

    Raises:
        ImportError: the tokenizers library is not installed.
        ValueError: a vocab_size without room for more than special and user tokens, text with a lone surrogate, a
            setting that is not allowed, or a user token that can't be one.
    """
    library = tokenizers_library()
    form, user = TextForm(normalization, spaces), UserTokens(user_tokens, is_dropped=drop_user_tokens)
    for name, value in (("vocab_size", vocab_size), ("max_token_length", max_token_length)):
        if not isinstance(value, int) or isinstance(value, bool) or not 2 <= value < _MOST_TOKENS:
            raise ValueError(f"expected {name} to be an integer of at least 2 below {_MOST_TOKENS:,}, got {value!r}")
    taken = len(SPECIAL_TOKENS) + len(user.tokens)
    if vocab_size <= taken:
        yours = f" and your {len(user.tokens)}" if user else ""
        raise ValueError(
            f"expected vocab_size of more than the {len(SPECIAL_TOKENS)} special tokens{yours}, got {vocab_size}"
        )
    check_texts(texts)
    texts = list(texts)  # the texts are read more than once
    for text in texts:
        check_text(text)
    if user:
        texts = [part for text in texts for part in user.split(text)[::2]]
    fallback = [f"<0x{byte:02X}>" for byte in range(NUM_BYTES)]
    room = vocab_size - len(user.tokens)
    alphabet = _alphabet(texts, room // 2, form)
    learner = _pipeline(library.models.BPE(unk_token=_UNK, byte_fallback=True), form, user.tokens)
    trainer = library.trainers.BpeTrainer(
        vocab_size=room + NUM_BYTES,
        special_tokens=[*SPECIAL_TOKENS, *fallback],
        show_progress=False,
        max_token_length=max_token_length + 1,  # the library keeps tokens below it
        **({} if alphabet is None else {"initial_alphabet": alphabet, "limit_alphabet": len(alphabet)}),
    )
    with library_errors("the BPE can't be learned"):
        learner.train_from_iterator(texts, trainer)
    # The trainer needed the bytes as special tokens, to give them their ids; now they become ordinary tokens that text
    # never spells.
    model = json.loads(learner.to_str())["model"]
    for token in user.tokens:
        if token in model["vocab"]:  # a single character
            raise ValueError(f"expected user tokens that no text becomes by its normalization, got {token!r}")
    backend = _pipeline(
        library.models.BPE(
            vocab=model["vocab"],
            merges=[(left, right) for left, right in model["merges"]],
            unk_token=_UNK,
            byte_fallback=True,
        ),
        form,
        user.tokens,
    )
    backend.add_special_tokens(list(SPECIAL_TOKENS))
    added = [library.AddedToken(token, normalized=False, special=user.is_dropped) for token in user.tokens]
    (backend.add_special_tokens if user.is_dropped else backend.add_tokens)(added)
    return BPETokenizer(backend)


def _alphabet(texts: Sequence[str], limit: int, form: TextForm) -> list[str] | None:
    """Returns the most frequent characters of some texts, or None if they have fewer than the limit."""
    if len(set().union(*texts)) < limit:
        return None
    counts = Counter({" ": len(texts)})
    for text in texts:
        if form.normalization.startswith("nf"):
            text = unicodedata.normalize("NFKC" if form.normalization.startswith("nfkc") else "NFC", text)
        counts.update(text.lower() if form.normalization.endswith("lower") else text)
    return sorted(counts, key=lambda character: (-counts[character], character))[:limit]


def _normalizers(form: TextForm) -> list[tokenizers.normalizers.Normalizer]:
    """Returns the normalizers that work on a part of a text as they do on the whole."""
    library = tokenizers_library()
    normalizers = library.normalizers
    steps: list[tokenizers.normalizers.Normalizer] = []
    if form.normalization.startswith("nfkc"):
        steps.append(normalizers.NFKC())
    elif form.normalization.startswith("nfc"):
        steps.append(normalizers.NFC())
    if form.normalization.endswith("lower"):
        steps.append(normalizers.Lowercase())
    if form.spaces == "collapse":
        steps.append(normalizers.Replace(library.Regex(r"[ \t]+"), " "))
    return steps


def _pipeline(model: tokenizers.models.BPE, form: TextForm, user_tokens: Sequence[str]) -> tokenizers.Tokenizer:
    """Builds a tokenizer of a model, the normalizers and splits in front of it, and the decoders that undo them."""
    library = tokenizers_library()
    normalizers, splits, decoders = library.normalizers, library.pre_tokenizers, library.decoders
    backend: tokenizers.Tokenizer = library.Tokenizer(model)
    ends = [normalizers.Strip(), normalizers.Replace(" \n", "\n"), normalizers.Replace("\n ", "\n")]
    backend.normalizer = normalizers.Sequence(
        [
            *_normalizers(form),
            *(ends if form.spaces == "collapse" else []),
            normalizers.Prepend(" "),  # to the text
            normalizers.Replace(library.Regex(r"\n(?=[^\n])"), "\n "),  # and to each later line that isn't empty
        ]
    )
    # No token may be spelled like a special token, a byte or a user token.
    spelled = r"<(?=(?:pad|/s|unk|0x[0-9A-F]{2})>)" if form.is_old else rf"<(?=(?:{_SPELLED})>)"
    for token in user_tokens if not form.is_old else ():
        spelled += f"|{re.escape(token[0])}(?={re.escape(token[1:])})"
    # Words with their space; further spaces; line ends.
    most = "+" if form.is_old else f"{{1,{_LONGEST_WORD}}}"
    words = rf" ?[^ \n]{most}| {most}(?![^ \n])|\n{most}"
    backend.pre_tokenizer = splits.Sequence(
        [splits.Split(library.Regex(spelled), "isolated"), splits.Split(library.Regex(words), "isolated")]
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


def form_of(backend: tokenizers.Tokenizer) -> TextForm | None:
    """Returns the form of a tokenizer that `train_bpe` made; None for any other, by its special ids or by its parts."""
    first = [*SPECIAL_TOKENS, *(f"<0x{byte:02X}>" for byte in range(NUM_BYTES))]
    if [backend.id_to_token(i) for i in range(len(first))] != first:
        return None
    values = json.loads(backend.to_str())
    if not values["model"].get("byte_fallback"):
        return None
    user_tokens = tuple(token["content"] for token in values["added_tokens"] if token["id"] >= FIRST_BYTE)
    around = {name: values[name] for name in _AROUND}
    return next((form for form in _FORMS if _around(form, user_tokens) == around), None)


_AROUND = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
_FORMS = (
    *(TextForm(*choice) for choice in product(get_args(Normalization), get_args(Spaces))),
    TextForm(is_old=True),
)


@functools.lru_cache(maxsize=64)
def _around(form: TextForm, user_tokens: tuple[str, ...]) -> dict[str, Any]:
    """Returns the values of a tokenizer's file without those of the model."""
    values = json.loads(_pipeline(tokenizers_library().models.BPE(), form, user_tokens).to_str())
    return {name: values[name] for name in _AROUND}


def _without_user_tokens(values: dict[str, Any]) -> tokenizers.Tokenizer:
    """Returns the tokenizer of a file as one that expects normalised text and has no user tokens."""
    added = [token for token in values["added_tokens"] if token["id"] < FIRST_BYTE]
    plain = {**values, "normalizer": None, "added_tokens": added}
    backend: tokenizers.Tokenizer = tokenizers_library().Tokenizer.from_str(json.dumps(plain))
    backend.encode_special_tokens = True
    return backend
