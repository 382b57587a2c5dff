"""The tokenizer: text to a model's ids and back, with the vocabulary of any library.

A `Backend` has the code that depends on the library. Values say the rest: the special ids, the tokens around a text,
the most tokens, the languages, the names for chat templates. A special token that is spelled out in a text is ordinary
text, but for `encode_prompt`, and for what a chat template writes.

In fastformer's own tokenizers (bytes, and a BPE: `bpe`) and in renumbered ones (`backend.Renumbered`), PAD, EOS and UNK
come first, so that their special ids are the defaults of `SpecialIds`. None of them has a BOS; a decoder begins with
PAD. The tokenizer of a pretrained model has that model's ids.
"""

from __future__ import annotations

import functools
import json
import operator
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from fastformer.data.backend import Backend, ByteBackend, Encoded, Frame, UserTokens, check_text, check_texts
from fastformer.data.cuts import is_long, pieces
from fastformer.files import write_atomically
from fastformer.languages import Languages
from fastformer.special_ids import SpecialIds

TOKENIZER = "tokenizer.json"
# The names of the special tokens that a chat template can use, in addition to the messages.
CHAT_NAMES = ("chat_template", "bos_token", "eos_token", "pad_token", "unk_token")
Role = Literal["own", "translator", "prompts", "encoder"]
Side = Literal["right", "left"]
_OMITTED: dict[Role, tuple[str, ...]] = {"own": ("pad", "unk"), "translator": ("pad", "unk")}
Pair = tuple[str, str]


class Tokenizer:
    """A tokenizer of one vocabulary.

    Args:
        backend: the vocabulary.
        special_ids: the special ids; a model that is trained with the tokenizer adopts them.
        role: what the model is: one that is trained here ("own"), or a pretrained translator, language model
            ("prompts") or encoder. An encoder's tokenizer reads on behind EOS; a language model's omits what the
            backend calls special, and no more: its PAD can be any token, even a word.
        vocab_size: the number of the model's ids; there may be fewer tokens. None: those of the backend.
        bos: the id that texts begin with; None: they begin with the text.
        frames: for an encoder, the special tokens around one text, and around two.
        max_len: the number of tokens that texts are cut to, special tokens included; None: they are not cut.
        side: the end at which they are cut.
        has_token_types: whether the texts of a pair have types 0 and 1; else all types are 0.
        target: the vocabulary of translations, if it is another one; `vocab_size` is its size.
        languages: the languages that the model can be told. If translations begin with a language's token, `decode`
            omits it. None: the model isn't told a language.
        chat: `chat_template`, and the spellings of the special tokens that templates can use (`CHAT_NAMES`), without
            those that the model doesn't have.
        ends_sources: whether a translator's sources end with EOS, which `encode` doesn't add; those of OpenNMT don't.

    Attributes:
        backend, role, max_len, has_token_types, languages, chat, ends_sources: the same.
        has_target: whether translations have a vocabulary of their own.

    Raises:
        ValueError: more tokens than ids, or a language beyond vocab_size.
    """

    def __init__(
        self,
        backend: Backend,
        special_ids: SpecialIds | None = None,
        role: Role = "own",
        *,
        vocab_size: int | None = None,
        bos: int | None = None,
        frames: Sequence[Frame] | None = None,
        max_len: int | None = None,
        side: Side = "right",
        has_token_types: bool = False,
        target: Backend | None = None,
        languages: Languages | None = None,
        chat: Mapping[str, str] | None = None,
        ends_sources: bool = True,
    ) -> None:
        self.backend, self.role, self._bos = backend, role, bos
        self._frames = (Frame.of([] if bos is None else [bos], []),) if frames is None else tuple(frames)
        self._target, self.has_target = backend if target is None else target, target is not None
        self._vocab_size = self._target.size if vocab_size is None else vocab_size
        language_ids = {} if languages is None else {i: name for name, i in languages.ids.items()}
        if (largest := max([self._target.size - 1, *language_ids])) >= self.vocab_size:
            raise ValueError(f"expected ids below {self.vocab_size}, got {largest}: is it another model's tokenizer?")
        self.max_len, self.side, self.has_token_types = max_len, side, has_token_types
        self.languages, self._language_names = languages, language_ids
        self.special_ids = SpecialIds() if special_ids is None else special_ids
        self.chat, self.ends_sources = dict(chat or {}), ends_sources

    @property
    def special_ids(self) -> SpecialIds:
        """The special ids."""
        return self._special_ids

    @special_ids.setter
    def special_ids(self, ids: SpecialIds) -> None:
        self._special_ids = ids
        vars(self).pop("token_bytes", None)
        # The ids that decoding omits.
        self._omitted = {getattr(ids, name) for name in _OMITTED.get(self.role, ())}
        if self.languages is not None and self.languages.places != "asked":
            self._omitted |= self._language_names.keys()

    @property
    def frame(self) -> Frame:
        """The special tokens around one text."""
        return self._frames[0]

    @property
    def vocab_size(self) -> int:
        """The number of the model's ids."""
        return self._vocab_size

    @property
    def words_begin_with_space(self) -> bool:
        """Whether a word of the model's output includes the space in front of it."""
        return self._target.words_begin_with_space

    def encode(self, text: str, max_len: int | None = None) -> list[int]:
        """Encodes a text to its ids, without EOS; an encoder's tokenizer adds the special tokens around it.

        Args:
            text: the text to encode.
            max_len: see `encode_batch`.

        Raises:
            ValueError: see `encode_batch`.
        """
        if max_len is None and isinstance(text, str) and is_long(text) and self.cuts is not None:
            return [i for ids in self.encode_batch(self.pieces(text)) for i in ids]
        return self.encode_batch([text], max_len)[0]

    def encode_batch(
        self,
        texts: Sequence[str],
        max_len: int | None = None,
        *,
        prompt: str = "",
        lengths: list[int] | None = None,
    ) -> list[list[int]]:
        """Encodes many texts, on all cores if the library can; see `encode`.

        Args:
            texts: the texts to encode.
            max_len: the number of tokens that each is cut to, special tokens included; None: the tokenizer's max_len.
            prompt: what is put in front of each text. Special tokens that it spells, and no others, become their ids.
            lengths: a list to which the number of tokens of each text before it is cut is added.

        Raises:
            ValueError: a lone surrogate, which is not a character, or a text that the library can't encode; a max_len
                without room for a token.
        """
        check_texts(texts)
        frame = self._frames[0]
        limit = self._limit(max_len, frame)
        ids = self._with_prompt(texts, prompt)
        if lengths is not None:
            lengths += [len(each) + frame.num_special for each in ids]
        if limit is None and not frame.num_special:
            return ids
        before, after = ([i for i, _ in special] for special in frame.special)
        return [[*before, *self._cut(each, limit), *after] for each in ids]

    def encode_pair(self, first: str, second: str, max_len: int | None = None) -> Encoded:
        """Encodes two texts to ids and token types; see `encode_pairs`."""
        return self.encode_pairs([(first, second)], max_len)[0]

    def encode_pairs(
        self,
        pairs: Sequence[Pair],
        max_len: int | None = None,
        *,
        prompt: str = "",
        lengths: list[int] | None = None,
    ) -> list[Encoded]:
        """Encodes pairs of texts to ids and token types, with the special tokens around and between the texts.

        Args:
            pairs: two texts each.
            max_len: the number of tokens that a pair is cut to, the longer text first; see `encode_batch`.
            prompt: what is put in front of the first text of each pair; see `encode_batch`.
            lengths: see `encode_batch`.

        Raises:
            ValueError: see `encode_batch`; a pair of anything but two texts; a tokenizer that isn't an encoder's.
        """
        if len(self._frames) < 2:
            raise ValueError("expected the tokenizer of an encoder, which encodes pairs of texts, got another one")
        for pair in pairs:
            if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
                raise ValueError(f"expected pairs of two texts, got {pair!r:.60}")
            check_text(pair[0])
            check_text(pair[1])
        frame = self._frames[1]
        limit = self._limit(max_len, frame)
        firsts, seconds = ([*dict.fromkeys(texts)] for texts in zip(*pairs, strict=True)) if pairs else ((), ())
        queries = dict(zip(firsts, self._with_prompt(firsts, prompt), strict=True))  # one has many passages
        passages = dict(zip(seconds, self.backend.encode_batch(list(seconds)), strict=True))
        rows: list[Encoded] = []
        for first, second in ((queries[first], passages[second]) for first, second in pairs):
            if lengths is not None:
                lengths.append(len(first) + len(second) + frame.num_special)
            parts = zip((first, second), lengths_of_pair(len(first), len(second), limit), strict=True)
            ids, types = frame.around([self._cut(ids, length) for ids, length in parts])
            rows.append((ids, types if self.has_token_types else [0] * len(ids)))
        return rows

    def _with_prompt(self, texts: Sequence[str], prompt: str) -> list[list[int]]:
        """Returns the ids of texts behind a prompt, without the special tokens around them."""
        if not prompt:
            return self.backend.encode_batch(list(texts))
        check_text(prompt)
        controls = frozenset(token for token, is_special in self.added_tokens.items() if is_special)
        if not any(token in prompt for token in controls):
            return self.backend.encode_batch([prompt + text for text in texts])
        written = b"\1" * len(prompt)
        return [self.backend.encode_control(prompt + text, written + b"\0" * len(text), controls) for text in texts]

    def _limit(self, max_len: int | None, frame: Frame) -> int | None:
        """Returns the most tokens of the texts within a frame."""
        limit = self.max_len if max_len is None else max_len
        if limit is None:
            return None
        least = frame.num_special + 1
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < least:
            raise ValueError(
                f"expected a max_len of at least {least}, for the special tokens and one more token, got {limit!r}"
            )
        return limit - frame.num_special

    def _cut(self, ids: list[int], length: int | None) -> list[int]:
        if length is None or len(ids) <= length:
            return ids
        return ids[:length] if self.side == "right" else ids[len(ids) - length :]

    def encode_target(self, text: str) -> list[int]:
        """Encodes a translation to its ids, without EOS."""
        return (
            [*self._frames[0].prefix, *self._target.encode_batch([text])[0]] if self.has_target else self.encode(text)
        )

    def encode_prompt(self, text: str) -> list[int]:
        """Encodes a prompt as transformers does: special tokens that it spells become their ids, if there are some."""
        return [*self._frames[0].prefix, *self.encode_template(text)] if self.role == "prompts" else self.encode(text)

    def encode_template(
        self, text: str, written: bytes | None = None, controls: frozenset[str] = frozenset()
    ) -> list[int]:
        """Encodes the output of a chat template: recognises its special tokens, and adds no BOS.

        Args:
            text: the template's output.
            written: for each character 1 if the template wrote it, else 0; None: it wrote all of them.
            controls: the added tokens that are control tokens: no character that the template didn't write becomes a
                part of one.

        Raises:
            ValueError: a lone surrogate, a text that the library can't encode, or the tokenizer of another model than a
                language model or an encoder.
        """
        check_text(text)
        if self.role not in ("prompts", "encoder"):
            raise ValueError("expected the tokenizer of a language model's folder, which knows control tokens")
        return self.backend.encode_control(text, written, controls)

    @property
    def added_tokens(self) -> dict[str, bool]:
        """The tokens that are recognised before all others, and whether each of them is special."""
        return self.backend.added_tokens

    def pieces(self, text: str) -> list[str]:
        """Cuts a long text so that the ids of the pieces, one after another, are the ids of the text (see `cuts`)."""
        return pieces(text, self.cuts) if is_long(text) else [text]

    @property
    def cuts(self) -> re.Pattern[str] | None:
        """Where a text may be cut (see `cuts`); None: nowhere, or it isn't known where."""
        return None if self._frames[0].num_special or self.max_len is not None else self.backend.cuts

    def decode(self, ids: Iterable[int]) -> str:
        """Decodes ids of the model's output to text: skips special tokens, stops at EOS."""
        if self.role == "encoder":
            return self._target.decode([*_checked_ids(ids, self.vocab_size)])
        shown, ends, omitted = list[int](), self._special_ids.eos, self._omitted
        for i in _checked_ids(ids, self._vocab_size):
            if i in ends:
                break
            if i not in omitted:
                shown.append(i)
        return self._target.decode(shown)

    @functools.cached_property
    def token_bytes(self) -> Sequence[bytes | None]:
        """For each id of the model's output, the bytes that it adds to a text that has begun.

        None: `decode` omits the token, or its bytes depend on its neighbours.

        Raises:
            ValueError: the bytes of tokens aren't known.
        """
        data, omitted = self._target.token_bytes(), self._omitted.union(self.special_ids.eos)
        data += [None] * (self.vocab_size - len(data))
        return [None if i in omitted else one for i, one in enumerate(data)]

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """Returns each id of the model's output as a short readable string, for pictures and messages."""
        return [self._readable(self._target, i) for i in _checked_ids(ids, self.vocab_size)]

    def source_tokens(self, ids: Iterable[int]) -> list[str]:
        """Returns each id of a source as a short readable string."""
        return [self._readable(self.backend, i) for i in _checked_ids(ids, self._source_size)]

    def _readable(self, backend: Backend, i: int) -> str:
        name = self._language_names.get(i)
        return backend.readable(i) if name is None or backend.id_to_token(i) is not None else name

    @property
    def _source_size(self) -> int:
        return max(self.vocab_size, self.backend.size)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes tokenizer.json, which needs no other file."""
        text = json.dumps(self.to_json(), ensure_ascii=False)
        write_atomically(Path(folder, TOKENIZER), text.encode() + b"\n")

    def to_json(self) -> dict[str, Any]:
        """Returns the contents of tokenizer.json, from which `load_tokenizer` makes the tokenizer again."""
        backend = self.backend.to_json()
        if self.role == "own":
            return {"type": self.backend.library, **backend}
        kind = TYPES[self.role, self.backend.library]
        values = {"vocab_size": self.vocab_size, "special_ids": asdict(self.special_ids)}
        if self.languages is not None:
            values["languages"] = self.languages.to_dict()
        if not self.ends_sources:
            values["ends_sources"] = False
        if self.role == "encoder":
            values |= {"max_len": self.max_len, "has_token_types": self.has_token_types, "side": self.side}
            backend.pop("vocab", None)  # it follows from the model
        if self.has_target:
            other = self._target.to_json()
            vocab = None if other["vocab"] == backend["vocab"] else other["vocab"]
            names = {"source": backend["model"], "target": other["model"]}
            return {"type": "marian", **values, **names, "source_vocab": backend["vocab"], "target_vocab": vocab}
        if self.role == "prompts":
            values["chat"] = self.chat
        if self.role == "prompts" or kind == "bart":
            values["bos"] = self._bos
        return {"type": "pieces" if kind == "t5" and "vocab" in backend else kind, **values, **backend}


# The types in tokenizer.json of pretrained models' tokenizers; a translator's with a table is of the type "pieces", and
# one with two vocabularies is a "marian".
TYPES: dict[tuple[Role, str], str] = {
    ("translator", "tokenizers"): "bart",
    ("translator", "sentencepiece"): "t5",
    ("prompts", "tokenizers"): "prompts",
    ("prompts", "sentencepiece"): "prompt pieces",
    ("encoder", "tokenizers"): "encoder",
    ("encoder", "sentencepiece"): "encoder pieces",
}


class ByteTokenizer(Tokenizer):
    """Every UTF-8 byte is a token: id = byte + 3. It needs no training and encodes every text, in long sequences.

    Args:
        user_tokens: tokens that you define; their ids follow those of the bytes.
        drop_user_tokens: omit them from decoded text.
    """

    def __init__(self, user_tokens: Iterable[str] = (), *, drop_user_tokens: bool = False) -> None:
        super().__init__(ByteBackend(UserTokens(user_tokens, is_dropped=drop_user_tokens)))


def lengths_of_pair(first: int, second: int, room: int | None) -> tuple[int, int]:
    """Returns the lengths to which two texts are cut to fit together; the longer one is cut first.

    Args:
        first, second: the numbers of their tokens.
        room: the most tokens of both together; None: any number.
    """
    if room is None or first + second <= room:
        return first, second
    short, long = sorted((first, second))
    long = max(short, room - short) if short <= room else short
    if short + long > room:
        short, long = room // 2, room - room // 2
    return (short, long) if first <= second else (long, short)


def cuts_of(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Returns where a tokenizer's texts may be cut (see `cuts`); None: nowhere, or it isn't known where."""
    cuts: re.Pattern[str] | None = getattr(tokenizer, "cuts", None)
    return cuts


def _checked_ids(ids: Iterable[int], vocab_size: int) -> Iterator[int]:
    """Yields each id as an int.

    Raises:
        ValueError: something that is not an id of the vocabulary.
    """
    kind = type(ids).__name__
    if isinstance(ids, str | bytes):
        raise ValueError(f"expected ids, a list or the like of integers, got {kind}")
    try:
        each = iter(ids)
    except TypeError as error:  # also for a tensor without dimensions, which claims to be iterable
        raise ValueError(f"expected ids, a list or the like of integers, got {kind}") from error
    for i in each:
        try:
            index = operator.index(i)
        except (TypeError, ValueError) as error:  # the ValueError comes from an array with several numbers
            raise ValueError(f"expected ids to be integers, got {i!r:.40}") from error
        if index < 0:
            raise ValueError(f"expected ids of at least 0, got {index}")
        if index >= vocab_size:
            raise ValueError(f"expected ids below {vocab_size}, got {index}: was another tokenizer used?")
        yield index
