"""The backend of the `sentencepiece` library."""

from __future__ import annotations

import base64
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastformer.data.backend import Backend, ControlGuard, Frame, any_of, check_text

if TYPE_CHECKING:
    import sentencepiece

_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
_CODE = re.compile(r">>.*?<<", re.DOTALL)


class PieceBackend(Backend):
    """A SentencePiece model. A piece's id is its number, or the table has its id.

    Args:
        processor: the SentencePiece model.
        vocab: the ids of its pieces, special tokens among them; None: their numbers in the model.
        unk: the id of pieces that `vocab` lacks; None: the model's own, if there is no `vocab`.
        added: tokens that the model doesn't have, with their ids; True for special ones.
        special: tokens that decoding omits, in addition to those that the model marks.
        has_codes: whether a text may begin with the code of a language, such as ">>fra<<", which is one piece.

    Raises:
        ValueError: a vocab without an unk.
    """

    library = "sentencepiece"

    def __init__(
        self,
        processor: sentencepiece.SentencePieceProcessor,
        vocab: Mapping[str, int] | None = None,
        unk: int | None = None,
        *,
        added: Mapping[str, tuple[int, bool]] | None = None,
        special: Iterable[str] = (),
        has_codes: bool = False,
    ) -> None:
        if unk is None:
            if vocab is not None:
                raise ValueError("expected an id for pieces that the vocabulary lacks, got none")
            unk = int(processor.unk_id())
        self.processor, self.vocab, self._unk = processor, None if vocab is None else dict(vocab), unk
        # Characters that the model doesn't know are a piece together, which may be spelled like a special token.
        self._ids = {piece: i for piece, i in (vocab or {}).items() if piece not in _SPECIAL}
        self._added, self._has_codes = None if added is None else dict(added), has_codes
        self._num_pieces = int(processor.get_piece_size())
        self._tokens = {i: token for token, i in (vocab or {}).items()}
        added = added or {}
        self._tokens |= {i: token for token, (i, _) in added.items()}
        if (least := min(self._tokens, default=0)) < 0:
            raise ValueError(f"expected ids of at least 0, got {least} for {self._tokens[least]!r}")
        self.size = 1 + max([*self._tokens, -1 if vocab is not None else self._num_pieces - 1], default=-1)
        self.plain = {token: i for token, (i, is_special) in added.items() if not is_special}
        self._special = {token: i for token, (i, is_special) in added.items() if is_special}
        self._hidden = {i for token, i in (vocab or {}).items() if token in _SPECIAL} | {unk, *self._special.values()}
        if vocab is None:
            numbers = {token: processor.piece_to_id(token) for token in special if token not in added}
            self._hidden |= {i for token, i in numbers.items() if processor.id_to_piece(i) == token}

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        for text in texts:
            check_text(text)
        if len(texts) == 1 or self.plain:
            return [self.split(text, self.plain) for text in texts]
        if self.vocab is None or not texts:
            return [list(ids) for ids in self.processor.encode(list(texts))] if texts else []  # on all cores
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> list[int]:
        if self.vocab is None:
            return list(self.processor.encode(text))
        code = _CODE.match(text) if self._has_codes else None
        pieces = [] if code is None else [code.group()]
        pieces += self.processor.encode(text[code.end() :] if code else text, out_type=str)
        ids, unk = self._ids, self._unk
        return [ids.get(piece, unk) for piece in pieces]

    def split(self, text: str, known: Mapping[str, int]) -> list[int]:
        """Encodes a text in which some tokens are found first."""
        if not known:
            return self._encode(text)
        ids: list[int] = []
        for place, part in enumerate(re.split(f"({any_of(known).pattern})", text)):
            if place % 2:
                ids.append(known[part])
            elif part:
                ids += self._encode(part)
        return ids

    def decode(self, ids: list[int]) -> str:
        if self.vocab is not None:
            pieces = [self._tokens[i] for i in ids if i in self._tokens and i not in self._hidden]
            return str(self.processor.decode_pieces(pieces)).replace("▁", " ").strip()
        text, run = "", list[int]()
        for i in ids:
            if (token := self._tokens.get(i)) is not None:
                text, run = f"{text}{self.processor.decode(run)}{token if token in self.plain else ''}", []
            elif i < self._num_pieces and i not in self._hidden:
                run.append(i)
        return f"{text}{self.processor.decode(run)}"

    def id_to_token(self, i: int) -> str | None:
        if (token := self._tokens.get(i)) is not None or self.vocab is not None or i >= self._num_pieces:
            return token
        return str(self.processor.id_to_piece(i))

    def token_bytes(self) -> list[bytes | None]:
        return [self._bytes_of(i) for i in range(self.size)]

    def _bytes_of(self, i: int) -> bytes | None:
        processor, token = self.processor, self.id_to_token(i)
        if token is None or i in self._hidden or token in self.plain:  # decoding omits a space behind an added token
            return None
        piece = processor.piece_to_id(token)
        if processor.is_unknown(piece) or processor.is_control(piece) or processor.is_unused(piece):
            return None
        return bytes([int(token[3:5], 16)]) if processor.is_byte(piece) else token.replace("▁", " ").encode()

    @functools.cached_property
    def _controls(self) -> dict[str, int]:
        """The model's control pieces, which no text spells, and the special tokens that it doesn't have."""
        processor = self.processor
        pieces = {processor.id_to_piece(i): i for i in range(self._num_pieces) if processor.is_control(i)}
        return pieces | self._special

    @functools.cached_property
    def _symbols(self) -> dict[str, int]:
        """Pieces that the model takes whole out of any text, whatever is around them."""
        processor = self.processor
        return {
            piece: i
            for i in range(self._num_pieces)
            if processor.get_score(i) == 0  # first, since hardly any piece of a large vocabulary passes
            and not (
                processor.is_control(i) or processor.is_unknown(i) or processor.is_unused(i) or processor.is_byte(i)
            )
            and len(piece := processor.id_to_piece(i)) > 1
            and "▁" not in piece
            and i in processor.encode(f"a{piece}a")
        }

    @property
    def added_tokens(self) -> dict[str, bool]:
        ordinary = dict.fromkeys([*self._symbols, *self.plain], False)
        return ordinary | dict.fromkeys(self._controls, True)

    def encode_control(self, text: str, written: bytes | None, controls: frozenset[str]) -> list[int]:
        if written is None or 0 not in written:
            return self.split(text, self._controls | self.plain)
        known = self._controls | self.plain | self._symbols
        return _PieceGuard(self, {token: i for token, i in known.items() if token in controls}).encode(text, written)

    def encoder_frames(self) -> tuple[Frame, Frame]:
        """Returns the frames of XLM-RoBERTa: <s> A </s>, and <s> A </s></s> B </s>."""
        if self.vocab is None:
            raise ValueError("expected the vocabulary of an encoder, with <s> and </s>, got another one")
        begin, end = self.vocab["<s>"], self.vocab["</s>"]
        return Frame.of([begin], [end]), Frame.of([begin], [end, end], [end])

    def unknown(self, text: str, unk: int) -> list[str]:
        pieces, ids = self.processor.encode(text, out_type=str), self.processor.encode(text)
        return [piece.removeprefix("▁") for piece, i in zip(pieces, ids, strict=True) if i == unk]

    def to_json(self) -> dict[str, Any]:
        values: dict[str, Any] = {"model": base64.b64encode(self.processor.serialized_model_proto()).decode("ascii")}
        if self.vocab is not None:
            values["vocab"] = self.vocab
        if self._added is not None:
            values["added"] = {token: [*each] for token, each in self._added.items()}
        return values


class _PieceGuard(ControlGuard):
    """Encodes texts in which only some characters may become control tokens; see `ControlGuard`."""

    def __init__(self, backend: PieceBackend, ids: Mapping[str, int]) -> None:
        self._backend, self.ids, self.watched = backend, ids, frozenset(ids.values())
        self._pattern = any_of(ids)

    def find(self, text: str) -> list[tuple[int, int, str]]:
        return [(*match.span(), match.group()) for match in self._pattern.finditer(text)]

    def whole(self, text: str) -> list[int]:
        return self._backend.encode_control(text, None, frozenset())

    def apart(self, text: str, tokens: list[tuple[int, int, str]]) -> list[int]:
        plain = {token: i for token, i in self._backend.plain.items() if token not in self.ids}
        ids, last = list[int](), 0
        for start, end, token in [*tokens, (len(text), len(text), None)]:
            for i in self._backend.split(text[last:start], plain):
                ids += self._letters(i) if i in self.watched else [i]
            ids += [] if token is None else [self.ids[token]]
            last = end
        return ids

    def _letters(self, i: int) -> list[int]:
        """Returns the ids of the letters of a piece, or of their bytes."""
        processor, ids = self._backend.processor, list[int]()
        for letter in processor.id_to_piece(i):
            spelled = [processor.piece_to_id(f"<0x{byte:02X}>") for byte in letter.encode()]
            whole = processor.piece_to_id(letter)
            ids += [whole] if whole != processor.unk_id() or processor.unk_id() in spelled else spelled
        return ids


def fairseq_vocab(processor: sentencepiece.SentencePieceProcessor) -> dict[str, int]:
    """Returns the ids of XLM-RoBERTa and mBART: fairseq's special tokens, and the pieces' numbers plus one."""
    pieces = {str(processor.id_to_piece(i)): i + 1 for i in range(3, processor.get_piece_size())}
    return {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, **pieces}


def fairseq_pieces(processor: sentencepiece.SentencePieceProcessor) -> PieceBackend:
    """Makes the backend of XLM-RoBERTa."""
    vocab = fairseq_vocab(processor)
    return PieceBackend(processor, vocab, vocab["<unk>"])


def read_sentencepiece(file: Path, model: bytes) -> sentencepiece.SentencePieceProcessor:
    """Loads a SentencePiece model from bytes.

    Args:
        file: the file of the bytes, for messages.
        model: the bytes.

    Raises:
        ImportError: the library is not installed.
        ValueError: the bytes are no SentencePiece model.
    """
    try:
        import sentencepiece
    except ImportError as error:
        raise ImportError(f"{file} needs the sentencepiece library: pip install 'fastformer[sentencepiece]'") from error
    try:
        if model:  # the library takes nothing for a model that comes later
            return sentencepiece.SentencePieceProcessor(model_proto=model)
    except RuntimeError as error:
        raise ValueError(f"expected a SentencePiece model in {file}, got something else ({error})") from error
    raise ValueError(f"expected a SentencePiece model in {file}, got an empty file")


def read_saved_pieces(file: Path, model: str) -> sentencepiece.SentencePieceProcessor:
    """Loads a SentencePiece model from the text in `PieceBackend.to_json`.

    Raises:
        ImportError: the library is not installed.
        ValueError: another text.
    """
    return read_sentencepiece(file, base64.b64decode(model, validate=True))
