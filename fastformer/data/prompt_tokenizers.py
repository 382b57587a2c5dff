"""Tokenizers of pretrained language models, for prompts and for the output of chat templates.

A prompt begins with BOS if the model expects it. A special token that is spelled out in it is ordinary text for
`encode`, and becomes its id in `encode_prompt`.
In the output of a chat template, special tokens that the template itself spells out count: `encode_template` recognises
them, and adds none of its own. Those that a message spells stay text.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastformer.data.checks import check_text, checked_ids
from fastformer.data.model_tokenizers import BackendTokenizer, SentencePieceTokenizer, piece_model, read_piece_model
from fastformer.data.tokenizer import library_errors, read_backend, visible
from fastformer.special_ids import SpecialIds

if TYPE_CHECKING:
    import sentencepiece
    import tokenizers

# The names of the special tokens that a chat template can use, in addition to the messages.
CHAT_NAMES = ("chat_template", "bos_token", "eos_token", "pad_token", "unk_token")


class PromptTokenizer(BackendTokenizer):
    """A language model's tokenizer of the `tokenizers` library.

    Args:
        backend, vocab_size, special_ids, name: see `BackendTokenizer`.
        bos: the id that prompts begin with; None: they begin with the text.
        chat: `chat_template`, the text of a template, and the spellings of the special tokens that templates can use
            (`CHAT_NAMES`), without those that the model doesn't have.

    Attributes:
        chat: the same.
    """

    type = "prompts"
    _pad_is_special = False

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        vocab_size: int,
        special_ids: SpecialIds,
        bos: int | None,
        name: str = "the tokenizer",
        chat: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(backend, vocab_size, special_ids, bos, name)
        self.chat = dict(chat or {})
        self._parsing: tokenizers.Tokenizer | None = None
        self._guards: dict[frozenset[str], _Guard] = {}

    @property
    def added_tokens(self) -> dict[str, bool]:
        """The tokens that the library recognises before all others, and whether each of them is special."""
        return {token.content: bool(token.special) for token in self._backend.get_added_tokens_decoder().values()}

    def encode_prompt(self, text: str) -> list[int]:
        """Encodes a text to BOS and its ids, as transformers does: special tokens that it spells become their ids."""
        return [*self._bos, *self.encode_template(text)]

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
            ValueError: a lone surrogate, or a text that the tokenizer can't encode.
        """
        check_text(text)
        if self._parsing is None:  # a copy: the list of special tokens belongs to the object
            found = type(self._backend).from_str(self._backend.to_str())
            found.encode_special_tokens = False
            self._parsing = found
        with library_errors(f"{self._name} can't encode this text"):
            if written is not None and 0 in written and controls:
                if controls not in self._guards:
                    self._guards[controls] = _Guard(self._parsing, controls)
                return self._guards[controls].encode(text, written)
            return list(self._parsing.encode(text, add_special_tokens=False).ids)

    def _values(self) -> dict[str, Any]:
        return {**super()._values(), "chat": self.chat}


class _Guard:
    """Encodes texts in which only some characters may become control tokens.

    The library looks for added tokens before it does anything else. `_finder` does this alone, with the tokenizer's own
    normaliser, in each part that the template wrote, apart from the rest: what it finds depends on no message. If the
    tokenizer finds the same in the whole text, its ids are right. Otherwise `_copy` encodes the text. It has other
    names for the control tokens, secret ones, which stand in the text where a control token was found: it cuts the text
    there as the tokenizer would, and whatever else spells a control token is ordinary text for it.

    Args:
        backend: the tokenizer, which recognises special tokens.
        controls: the control tokens.
    """

    def __init__(self, backend: tokenizers.Tokenizer, controls: frozenset[str]) -> None:
        self._backend = backend
        self._known = {str(token.content): int(i) for i, token in backend.get_added_tokens_decoder().items()}
        self._controls = {token: i for token, i in self._known.items() if token in controls}
        values = self._values()
        # The model says "unknown" itself, and some call that a special token.
        unk = {values["model"].get("unk_id"), self._known.get(values["model"].get("unk_token"))}
        self._watched = {*self._controls.values()} - unk
        unknown = self._secret(0)
        values |= {"pre_tokenizer": None, "model": {"type": "WordLevel", "vocab": {unknown: 0}, "unk_token": unknown}}
        self._finder = type(backend).from_str(json.dumps(values))
        self._found = {self._finder.token_to_id(token): token for token in self._controls}
        self._copy: tokenizers.Tokenizer | None = None
        self._names: dict[str, str] = {}
        self._ids: dict[int, int] = {}

    def encode(self, text: str, written: bytes) -> list[int]:
        """Encodes a text; `written` has a 1 for each character that may become a part of a control token."""
        own = [
            (run.start() + start, run.start() + end, token)
            for run in re.finditer(b"\1+", written)
            for start, end, token in self._find(text[run.start() : run.end()])
        ]
        expected = [i for _, _, token in own if (i := self._controls[token]) in self._watched]
        if self._find(text) == own:
            ids = list(self._backend.encode(text, add_special_tokens=False).ids)
            if [i for i in ids if i in self._watched] == expected:
                return ids
        copy, parts, last = self._renamed(), [], 0
        for start, end, token in own:
            parts += [text[last:start], self._names[token]]
            last = end
        marked = "".join([*parts, text[last:]])
        ids = [self._ids.get(i, i) for i in copy.encode(marked, add_special_tokens=False).ids]
        if [i for i in ids if i in self._watched] != expected:
            raise ValueError("a message changes the control tokens of the chat, whatever their names are")
        return ids

    def _find(self, text: str) -> list[tuple[int, int, str]]:
        """Returns the control tokens in a text with their places, without the white space that they take away."""
        encoding, found = self._finder.encode(text, add_special_tokens=False), []
        for i, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if i in self._found:
                said = text[start:end]
                start += len(said) - len(said.lstrip())
                found.append((start, max(start, end - len(said) + len(said.rstrip())), self._found[i]))
        return found

    def _renamed(self) -> tokenizers.Tokenizer:
        """Makes the copy, when a message first needs it."""
        if self._copy is None:
            values = self._values()
            self._names = {token: self._secret(number) for number, token in enumerate(self._controls)}
            for token in values["added_tokens"]:
                token["content"] = self._names.get(token["content"], token["content"])
            _rename(values["model"], self._names, self._controls)
            copy = type(self._backend).from_str(json.dumps(values))
            found = {token: copy.token_to_id(self._names.get(token, token)) for token in self._known}
            self._ids = {new: self._known[token] for token, new in found.items() if new is not None}
            self._copy = copy
        return self._copy

    def _values(self) -> dict[str, Any]:
        values: dict[str, Any] = json.loads(self._backend.to_str())
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


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True)) or r"(?!)")


class PiecePromptTokenizer(SentencePieceTokenizer):
    """The SentencePiece model of a language model; its piece numbers are the language model's ids.

    Args:
        processor, vocab_size, special_ids: see `SentencePieceTokenizer`.
        bos, chat: see `PromptTokenizer`.
        added: tokens that the SentencePiece model doesn't have, with their ids; True for special ones.

    Raises:
        ValueError: more pieces than ids, or ids beyond vocab_size.
    """

    type = "prompt pieces"
    _pad_is_special = False

    def __init__(
        self,
        processor: sentencepiece.SentencePieceProcessor,
        vocab_size: int,
        special_ids: SpecialIds,
        bos: int | None,
        chat: Mapping[str, str] | None = None,
        added: Mapping[str, tuple[int, bool]] | None = None,
    ) -> None:
        super().__init__(processor, vocab_size, special_ids)
        self.chat, self._bos, self._added = dict(chat or {}), bos, dict(added or {})
        if beyond := [token for token, (i, _) in self._added.items() if not 0 <= i < vocab_size]:
            raise ValueError(f"expected ids below {vocab_size}, got {self._added[beyond[0]][0]} for {beyond[0]!r}")
        own = {processor.id_to_piece(i): i for i in range(self._size) if processor.is_control(i)}
        self._special = own | {token: i for token, (i, is_special) in self._added.items() if is_special}
        self._plain = {token: i for token, (i, is_special) in self._added.items() if not is_special}
        self._names = {i: token for token, (i, _) in self._added.items()}
        # Pieces that the model takes whole out of any text, whatever is around them.
        self._symbols = {
            piece: i
            for i in range(self._size)
            if processor.get_score(i) == 0  # first, since hardly any piece of a large vocabulary passes
            and not (
                processor.is_control(i) or processor.is_unknown(i) or processor.is_unused(i) or processor.is_byte(i)
            )
            and len(piece := processor.id_to_piece(i)) > 1
            and "▁" not in piece
            and i in processor.encode(f"a{piece}a")
        }
        pieces = {token: processor.piece_to_id(token) for token in self.chat.values() if token not in self._added}
        self._unsaid |= {i for token, i in pieces.items() if processor.id_to_piece(i) == token}  # what the folder names

    def encode(self, text: str) -> list[int]:
        """Encodes a text to BOS and its ids, without EOS."""
        check_text(text)
        return [*([] if self._bos is None else [self._bos]), *self._split(text, self._plain)]

    @property
    def added_tokens(self) -> dict[str, bool]:
        """See `PromptTokenizer.added_tokens`."""
        return {
            **dict.fromkeys(self._symbols, False),
            **dict.fromkeys(self._plain, False),
            **dict.fromkeys(self._special, True),
        }

    def encode_prompt(self, text: str) -> list[int]:
        """See `PromptTokenizer.encode_prompt`."""
        return [*([] if self._bos is None else [self._bos]), *self.encode_template(text)]

    def encode_template(
        self, text: str, written: bytes | None = None, controls: frozenset[str] = frozenset()
    ) -> list[int]:
        """See `PromptTokenizer.encode_template`."""
        check_text(text)
        known = self._special | self._plain
        if written is None or 0 not in written:
            return self._split(text, known)
        watched = {token: i for token, i in (known | self._symbols).items() if token in controls}
        own = [
            (run.start() + found.start(), run.start() + found.end())
            for run in re.finditer(b"\1+", written)
            for found in _any_of(watched).finditer(text[run.start() : run.end()])
        ]
        expected, unsaid = [watched[text[start:end]] for start, end in own], {*watched.values()}
        if [found.span() for found in _any_of(watched).finditer(text)] == own:
            ids = self._split(text, known)
            if [i for i in ids if i in unsaid] == expected:
                return ids
        ids, last = [], 0
        plain = {token: i for token, i in self._plain.items() if token not in controls}
        for start, end in [*own, (len(text), len(text))]:
            for i in self._split(text[last:start], plain):
                ids += self._letters(i) if i in unsaid else [i]
            ids += [watched[text[start:end]]] if start < end else []
            last = end
        if [i for i in ids if i in unsaid] != expected:
            raise ValueError("a message changes the control tokens of the chat: one of them is a single letter")
        return ids

    def _split(self, text: str, known: Mapping[str, int]) -> list[int]:
        if not known:
            return list(self._processor.encode(text))
        ids: list[int] = []
        for place, part in enumerate(re.split(f"({_any_of(known).pattern})", text)):
            if place % 2:
                ids.append(known[part])
            elif part:
                ids.extend(self._processor.encode(part))
        return ids

    def _letters(self, i: int) -> list[int]:
        """Returns the ids of the letters of a piece, or of their bytes."""
        own, ids = self._processor, []
        for letter in own.id_to_piece(i):
            spelled = [own.piece_to_id(f"<0x{byte:02X}>") for byte in letter.encode()]
            whole = own.piece_to_id(letter)
            ids += [whole] if whole != own.unk_id() or own.unk_id() in spelled else spelled
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Decodes ids to text: skips special tokens and ids without a token, stops at EOS."""
        said = ""
        run: list[int] = []
        for i in [*self._said(ids), None]:
            token = None if i is None else self._names.get(i)
            if i is not None and token is None:
                if i < self._size and i != self._processor.unk_id():
                    run.append(i)
                continue
            said, run = said + str(self._processor.decode(run)), []
            said += token if token in self._plain else ""
        return said

    def tokens(self, ids: Iterable[int]) -> list[str]:
        each = checked_ids(ids, self.vocab_size)
        own = self._processor.id_to_piece
        return [visible(self._names.get(i) or (own(i) if i < self._size else None)) for i in each]

    def _values(self) -> dict[str, Any]:
        added = {token: [i, is_special] for token, (i, is_special) in self._added.items()}
        return {"model": piece_model(self._processor), "bos": self._bos, "chat": self.chat, "added": added}


PROMPT_TOKENIZERS = (PromptTokenizer.type, PiecePromptTokenizer.type)


def saved_prompt_tokenizer(file: Path, values: Mapping[str, Any]) -> PromptTokenizer | PiecePromptTokenizer:
    """Loads a tokenizer that `save` of one of these classes wrote, whose type is one of `PROMPT_TOKENIZERS`.

    Args:
        file: tokenizer.json.
        values: its contents.

    Raises:
        ImportError: the library that the tokenizer needs is not installed.
        KeyError, TypeError, ValueError, AttributeError: damaged contents; `load_tokenizer` names the file.
    """
    sizes = int(values["vocab_size"]), SpecialIds.from_dict(values["special_ids"])
    bos = None if values["bos"] is None else int(values["bos"])
    chat = {str(name): str(text) for name, text in values["chat"].items()}
    if values["type"] == PromptTokenizer.type:
        return PromptTokenizer(read_backend(file, values["backend"]), *sizes, bos, str(file), chat)
    added = {str(token): (int(i), bool(special)) for token, (i, special) in values["added"].items()}
    return PiecePromptTokenizer(read_piece_model(file, values["model"]), *sizes, bos, chat, added)
