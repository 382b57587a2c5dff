"""Tokenizers of pretrained language models, for prompts and for the output of chat templates.

A prompt begins with BOS if the model expects it, and a special token that is spelled out in a prompt is ordinary text.
In the output of a chat template, special tokens that are spelled out count: `encode_template` recognises them, and adds
none of its own.
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
        self._of_templates: tokenizers.Tokenizer | None = None
        self._of_marked: _RenamedTokens | None = None

    @property
    def special_tokens(self) -> list[str]:
        """The spellings that `encode_template` recognises as special tokens."""
        return [token.content for token in self._backend.get_added_tokens_decoder().values() if token.special]

    def encode_template(self, text: str, mark: str | None = None) -> list[int]:
        """Encodes the output of a chat template: recognises its special tokens, and adds no BOS.

        Args:
            text: the template's output.
            mark: a character. A special token with the mark in it is ordinary text, and is encoded without the mark.

        Raises:
            ValueError: a lone surrogate, or a text that the tokenizer can't encode.
        """
        check_text(text)
        if mark is not None and mark in text:
            if self._of_marked is None:
                self._of_marked = _RenamedTokens(self._backend)
            with library_errors(f"{self._name} can't encode this text"):
                return self._of_marked.encode(text, mark)
        if self._of_templates is None:  # a copy: the list of special tokens belongs to the object
            found = type(self._backend).from_str(self._backend.to_str())
            found.encode_special_tokens = False
            self._of_templates = found
        with library_errors(f"{self._name} can't encode this text"):
            return list(self._of_templates.encode(text, add_special_tokens=False).ids)

    def _values(self) -> dict[str, Any]:
        return {**super()._values(), "chat": self.chat}


class _RenamedTokens:
    """A copy of a tokenizer whose special tokens have names that no text holds, so that their own names are text.

    The library cuts a text at special tokens before it does anything else. With other names it cuts the text at the
    same places, and the parts between them get the same ids.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        values, nonce = json.loads(backend.to_str()), secrets.token_hex(8)
        values["post_processor"] = values["truncation"] = values["padding"] = None
        known = {token["content"]: token["id"] for token in values["added_tokens"]}
        self._renamed: dict[str, str] = {}
        for token in values["added_tokens"]:
            if token["special"]:
                name = f"\U000f1000{nonce}.{token['id']}\U000f1000"
                self._renamed[token["content"]] = name
                token["content"] = name
        self._copy = type(backend).from_str(json.dumps(values))
        found = {token: self._copy.token_to_id(self._renamed.get(token, token)) for token in known}
        self._ids = {found[token]: i for token, i in known.items()}
        self._special = {known[token] for token in self._renamed}
        longest_first = "|".join(re.escape(token) for token in sorted(known, key=len, reverse=True))
        self._known = re.compile(longest_first or r"(?!)")

    def encode(self, text: str, mark: str) -> list[int]:
        """Encodes a text; a special token with the mark in it is ordinary text."""
        text = self._known.sub(lambda match: self._renamed.get(match[0], match[0]), text).replace(mark, "")
        ids = []
        for i in self._copy.encode(text, add_special_tokens=False).ids:
            if i not in self._ids and i in self._special:
                raise ValueError("the name of a special token in a text has no other ids than the token's")
            ids.append(self._ids.get(i, i))
        return ids


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
        pieces = {token: processor.piece_to_id(token) for token in self.chat.values() if token not in self._added}
        self._unsaid |= {i for token, i in pieces.items() if processor.id_to_piece(i) == token}  # what the folder names

    def encode(self, text: str) -> list[int]:
        """Encodes a text to BOS and its ids, without EOS."""
        check_text(text)
        return [*([] if self._bos is None else [self._bos]), *self._split(text, self._plain)]

    @property
    def special_tokens(self) -> list[str]:
        """See `PromptTokenizer.special_tokens`."""
        return [*self._special]

    def encode_template(self, text: str, mark: str | None = None) -> list[int]:
        """See `PromptTokenizer.encode_template`."""
        check_text(text)
        return self._split(text, self._special | self._plain, mark or "")

    def _split(self, text: str, known: Mapping[str, int], mark: str = "") -> list[int]:
        if not known:
            return list(self._processor.encode(text.replace(mark, "") if mark else text))
        longest_first = "|".join(re.escape(token) for token in sorted(known, key=len, reverse=True))
        ids: list[int] = []
        for place, part in enumerate(re.split(f"({longest_first})", text)):
            if place % 2:
                ids.append(known[part])
            elif part := part.replace(mark, "") if mark else part:
                ids.extend(self._processor.encode(part))
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
