"""The backend of the `tokenizers` library, for files that Hugging Face's libraries save."""

from __future__ import annotations

import functools
import itertools
import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastformer.data.backend import Backend, ControlGuard, Frame, Spelled, check_text
from fastformer.data.cuts import cuts_of
from fastformer.files import tokenizers_library

if TYPE_CHECKING:
    import tokenizers

_GAPS = 2**16  # ids without a token that a file may have
_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# The characters by which byte-level tokenizers, such as GPT-2's, write bytes: a byte that is no visible character of
# Latin-1 has one from U+0100 on.
_VISIBLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTES = {chr(byte): byte for byte in _VISIBLE}
_BYTES |= {chr(0x100 + n): byte for n, byte in enumerate(sorted({*range(256)} - {*_VISIBLE}))}
_PROBES = 1000  # tokens that are tried until one of them is text


class LibraryBackend(Backend):
    """A tokenizer of the `tokenizers` library.

    A special token that is spelled out in a text is ordinary text, with one exception: if a Unigram model has the token
    as a piece of its vocabulary, the library finds it.

    Args:
        tokenizer: the library's object. Padding and truncation that it may hold are switched off.
        name: its name in messages.
    """

    library = "tokenizers"
    words_begin_with_space = True

    def __init__(self, tokenizer: tokenizers.Tokenizer, name: str = "the tokenizer") -> None:
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.encode_special_tokens = True  # "</s>" in a text is ordinary text
        self.tokenizer, self._name = tokenizer, name
        self.size = 1 + max(tokenizer.get_vocab().values(), default=-1)
        self._parser: tokenizers.Tokenizer | None = None
        self._guards: dict[frozenset[str], _LibraryGuard] = {}

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes texts to ids on all cores; an error shows the first text that can't be encoded."""
        try:
            with library_errors(f"{self._name} can't encode this text"):
                return [encoding.ids for encoding in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
        except ValueError:
            for text in texts:  # the library raises TypeError for a surrogate
                check_text(text)
            for text in texts if len(texts) > 1 else ():
                with library_errors(f"{self._name} can't encode the text {text[:40]!r}"):
                    self.tokenizer.encode_batch_fast([text], add_special_tokens=False)
            raise

    def decode(self, ids: list[int]) -> str:
        """Decodes ids to text; broken UTF-8 becomes U+FFFD."""
        with library_errors(f"{self._name} can't decode these ids"):
            return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def id_to_token(self, i: int) -> str | None:
        return self.tokenizer.id_to_token(i)

    def token_bytes(self) -> list[bytes | None]:
        decoder = json.loads(self.tokenizer.to_str())["decoder"] or {}
        steps = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
        kinds = [step.get("type") for step in steps]
        if kinds == ["ByteLevel"]:
            bytes_of = _visible_bytes
        elif not {*kinds} - {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
            # `Strip` only changes the beginning or the end of a text.
            spaces = [step for step in steps if step["type"] in ("Replace", "Metaspace")]
            signs = {step.get("replacement") if "pattern" not in step else step["pattern"].get("String"): step
                     for step in spaces}  # fmt: skip
            if [*signs] != ["▁"] or any(step.get("content", " ") != " " for step in spaces):
                raise ValueError(f"expected {self._name} to write spaces as ▁, got the decoder {decoder!r:.200}")
            bytes_of = functools.partial(_piece_bytes, has_bytes="ByteFallback" in kinds)
        else:
            raise ValueError(f"expected {self._name} to decode each token by itself, got {decoder!r:.200}")
        added = self.tokenizer.get_added_tokens_decoder()
        special = {i for i, token in added.items() if token.special}
        names = [None if i in special else self.id_to_token(i) for i in range(self.size)]
        return [None if name is None else bytes_of(name) for name in names]

    @functools.cached_property
    def cuts(self) -> re.Pattern[str] | None:
        return cuts_of(json.loads(self.tokenizer.to_str()))

    @functools.cached_property
    def added_tokens(self) -> dict[str, bool]:
        return {token.content: bool(token.special) for token in self.tokenizer.get_added_tokens_decoder().values()}

    def encode_control(self, text: str, written: bytes | None, controls: frozenset[str]) -> list[int]:
        if self._parser is None:  # a copy: whether special tokens count belongs to the object
            parser = type(self.tokenizer).from_str(self.tokenizer.to_str())
            parser.encode_special_tokens = False
            self._parser = parser
        with library_errors(f"{self._name} can't encode this text"):
            if written is not None and 0 in written and controls:
                if controls not in self._guards:
                    self._guards[controls] = _LibraryGuard(self._parser, controls)
                return self._guards[controls].encode(text, written)
            return list(self._parser.encode(text, add_special_tokens=False).ids)

    def add_control(self, token: str) -> None:
        self.tokenizer.add_special_tokens([_special_token(token)])
        self._parser = None
        self._guards.clear()
        vars(self).pop("added_tokens", None)

    def spelled(self, texts: Sequence[str]) -> list[list[Spelled]]:
        with library_errors(f"{self._name} can't encode these texts"):
            encodings = self.tokenizer.encode_batch(list(texts), add_special_tokens=False)
        has_mark = bool(getattr(self.tokenizer.model, "continuing_subword_prefix", None))
        rows: list[list[Spelled]] = []
        for text, encoding in zip(texts, encodings, strict=True):
            rows.append([])
            for i, name, (start, end) in zip(encoding.ids, encoding.tokens, encoding.offsets, strict=True):
                part = text[start:end]
                # Without a mark of tokens that continue a word, those continue one that no space precedes.
                continues = len(name) != len(part) if has_mark else start > 0 and " " not in text[start - 1 : start + 1]
                rows[-1].append(Spelled(i, name, part, start, end, continues))
        return rows

    def joined(self, names: Sequence[str]) -> str:
        decoder = self.tokenizer.decoder
        return " ".join(names) if decoder is None else str(decoder.decode(list(names)))

    def unknown(self, text: str, unk: int) -> list[str]:
        with library_errors(f"{self._name} can't encode the text {text[:40]!r}"):
            encoding = self.tokenizer.encode(text, add_special_tokens=False)
        return [text[start:end] for i, (start, end) in zip(encoding.ids, encoding.offsets, strict=True) if i == unk]

    def frame(self, num_texts: int = 1) -> Frame:
        """Returns the special tokens that the library's post-processor puts around one text, or two.

        Raises:
            ValueError: the post-processor does something else.
        """
        with library_errors(f"{self._name} can't encode its own tokens"):
            encodings = (self.tokenizer.encode(token, add_special_tokens=False) for token in self._probes())
            probes = [*itertools.islice((encoding for encoding in encodings if encoding.ids), num_texts)]
            if len(probes) < num_texts:
                raise ValueError("none of them is text")
            lengths, ids = [len(probe.ids) for probe in probes], [i for probe in probes for i in probe.ids]
            whole = self.tokenizer.post_process(probes[0], probes[1] if num_texts > 1 else None, True)
        special: list[list[tuple[int, int]]] = [[] for _ in range(num_texts + 1)]
        types, ends, text = [0] * num_texts, [*itertools.accumulate(lengths)], list[int]()
        for i, kind, is_special in zip(whole.ids, whole.type_ids, whole.special_tokens_mask, strict=True):
            place = sum(end <= len(text) for end in ends)  # the number of texts that are over
            if is_special:
                special[place if len(text) > 0 else 0].append((i, kind))
            else:
                types[min(place, num_texts - 1)] = kind
                text.append(i)
        if text != ids:
            raise ValueError(f"expected {self._name} to put special tokens around texts, got {whole.ids} for {ids}")
        return Frame(tuple(map(tuple, special)), tuple(types))

    def _probes(self) -> Iterator[str]:
        """Yields tokens, most of which are text."""
        yield from "ab"
        yield from itertools.islice(self.tokenizer.get_vocab(), _PROBES)

    def encoder_frames(self) -> tuple[Frame, Frame]:
        return self.frame(1), self.frame(2)

    def to_json(self) -> dict[str, Any]:
        return {"backend": json.loads(self.tokenizer.to_str())}


def _visible_bytes(name: str) -> bytes:
    """Returns the bytes that a token of a byte-level tokenizer writes."""
    data = [_BYTES.get(character, -1) for character in name]
    return name.encode() if -1 in data else bytes(data)


def _piece_bytes(name: str, *, has_bytes: bool) -> bytes:
    """Returns the bytes of a token whose spaces are ▁."""
    match = _BYTE.fullmatch(name) if has_bytes else None
    return bytes([int(match[1], 16)]) if match else name.replace("▁", " ").encode()


class _LibraryGuard(ControlGuard):
    """Encodes texts in which only some characters may become control tokens.

    The library looks for added tokens before it does anything else. `_finder` does this alone, with the tokenizer's own
    normaliser, in each part that the template wrote, apart from the rest: what it finds depends on no message. `_copy`
    has other names for the control tokens, secret ones, which stand in the text where a control token was found: it
    cuts the text there as the tokenizer would, and whatever else spells a control token is ordinary text for it.

    Args:
        tokenizer: the tokenizer, which recognises special tokens.
        controls: the control tokens.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, controls: frozenset[str]) -> None:
        self._tokenizer, self._known = tokenizer, added_tokens(tokenizer)
        self.ids = {token: i for token, i in self._known.items() if token in controls}
        values = self._values()
        # The model says "unknown" itself, and some call that a special token.
        unk = {values["model"].get("unk_id"), self._known.get(values["model"].get("unk_token"))}
        self.watched = frozenset(self.ids.values()) - unk
        unknown = self._secret(0)
        values |= {"pre_tokenizer": None, "model": {"type": "WordLevel", "vocab": {unknown: 0}, "unk_token": unknown}}
        self._finder = type(tokenizer).from_str(json.dumps(values))
        self._tokens = {self._finder.token_to_id(token): token for token in self.ids}
        self._copy: tokenizers.Tokenizer | None = None
        self._names: dict[str, str] = {}
        self._own_ids: dict[int, int] = {}  # the tokenizer's ids by those of the copy

    def whole(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def find(self, text: str) -> list[tuple[int, int, str]]:
        """Returns the control tokens in a text with their places, without the white space that they take away."""
        encoding, matches = self._finder.encode(text, add_special_tokens=False), []
        for i, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if i in self._tokens:
                match = text[start:end]
                start += len(match) - len(match.lstrip())
                matches.append((start, max(start, end - len(match) + len(match.rstrip())), self._tokens[i]))
        return matches

    def apart(self, text: str, tokens: list[tuple[int, int, str]]) -> list[int]:
        copy, parts, last = self._renamed(), [], 0
        for start, end, token in tokens:
            parts += [text[last:start], self._names[token]]
            last = end
        marked = "".join([*parts, text[last:]])
        return [self._own_ids.get(i, i) for i in copy.encode(marked, add_special_tokens=False).ids]

    def _renamed(self) -> tokenizers.Tokenizer:
        """Makes the copy, when a message first needs it."""
        if self._copy is None:
            values = self._values()
            self._names = {token: self._secret(number) for number, token in enumerate(self.ids)}
            for token in values["added_tokens"]:
                token["content"] = self._names.get(token["content"], token["content"])
            _rename(values["model"], self._names, self.ids)
            copy = type(self._tokenizer).from_str(json.dumps(values))
            new_ids = {token: copy.token_to_id(self._names.get(token, token)) for token in self._known}
            self._own_ids = {new: self._known[token] for token, new in new_ids.items() if new is not None}
            self._copy = copy
        return self._copy

    def _values(self) -> dict[str, Any]:
        values: dict[str, Any] = json.loads(self._tokenizer.to_str())
        return values | {"post_processor": None, "truncation": None, "padding": None}

    @staticmethod
    def _secret(number: int) -> str:
        """Returns a name that no text has, and that no normaliser changes or joins with its neighbours."""
        letters = "qxzjkvwf"
        counted = "".join(letters[int(digit)] for digit in f"{number:08o}")
        return f"|{''.join(secrets.choice(letters) for _ in range(24))}{counted}|"


def _rename(model: dict[str, Any], names: Mapping[str, str], ids: Mapping[str, int]) -> None:
    """Gives tokens other names in the JSON values of a tokenizer's model, which then makes none of them from a text."""
    vocab = model.get("vocab")
    if isinstance(vocab, list):
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
    elif isinstance(vocab, dict):
        model["vocab"] = {names.get(token, token): i for token, i in vocab.items()}
        taken = {*vocab.values()}
        model["vocab"] |= {names[token]: i for token, i in ids.items() if i not in taken}
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        prefix = model.get("continuing_subword_prefix") or ""
        model["merges"] = [
            pair for pair in pairs if not {*pair, pair[0] + pair[1].removeprefix(prefix)}.intersection(names)
        ]


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


def read_library(file: Path, values: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Loads a tokenizer of the `tokenizers` library from the contents of a file.

    Raises:
        ImportError: the library is not installed.
        ValueError: the library can't read the contents.
    """
    library = tokenizers_library(str(file))
    _check_sizes(file, values)
    with library_errors(f"tokenizers {library.__version__} can't read {file} (was it written by a newer version?)"):
        tokenizer: tokenizers.Tokenizer = library.Tokenizer.from_str(json.dumps(values))
    return tokenizer


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


def byte_level_bpe(
    file: Path, vocab: Mapping[str, int], merges: bytes, *, add_prefix_space: bool
) -> tokenizers.Tokenizer:
    """Builds a byte-level BPE from a vocabulary and its merges.

    Args:
        file: the file of the merges, for messages.
        vocab: the ids of tokens.
        merges: two tokens a line, separated by a space, the first to be merged first, after a line of the version.
        add_prefix_space: whether the first word of a text gets a space.

    Raises:
        ImportError: tokenizers is not installed.
        ValueError: the merges are damaged or don't fit the vocabulary.
    """
    library = tokenizers_library()
    try:
        lines = merges.decode("utf-8").split("\n")
        pairs = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
        tokenizer: tokenizers.Tokenizer = library.Tokenizer(library.models.BPE(vocab=dict(vocab), merges=pairs))
    except Exception as error:  # the library raises nothing more specific than Exception
        raise ValueError(f"{file} is damaged, or of another vocabulary ({error}): copy it again") from error
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = library.decoders.ByteLevel()
    tokenizer.add_special_tokens([name for name in _SPECIAL if name in vocab])
    return tokenizer


def _special_token(token: str) -> tokenizers.AddedToken:
    import tokenizers

    return tokenizers.AddedToken(token, normalized=False, special=True)


def added_tokens(tokenizer: tokenizers.Tokenizer) -> dict[str, int]:
    """Returns the ids of the tokens that a tokenizer has in addition to its vocabulary, special tokens included."""
    return {str(token.content): int(i) for i, token in tokenizer.get_added_tokens_decoder().items()}


def check_vocab(file: Path, values: object) -> dict[str, int]:
    """Returns `values` if it maps pieces to ids.

    Raises:
        ValueError: it does not.
    """
    if not isinstance(values, dict) or not values:
        raise ValueError(f"expected {file} to map pieces to ids, got {values!r:.60}")
    for piece, i in values.items():
        if not isinstance(i, int) or isinstance(i, bool) or i < 0:
            raise ValueError(f"expected {file} to map pieces to ids, got {i!r} for {piece!r:.40}")
    return values
