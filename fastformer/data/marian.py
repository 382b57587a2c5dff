"""The tokenizer of a Marian: a SentencePiece model for each side, and a file that says which id a piece has."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastformer.data.checks import check_text, check_texts, checked_ids, until_eos
from fastformer.data.tokenizer import TOKENIZER, visible
from fastformer.files import write_atomically
from fastformer.special_ids import SpecialIds

if TYPE_CHECKING:
    import sentencepiece

TYPE = "marian"  # in tokenizer.json


class MarianTokenizer:
    """Encodes sources, and what a translation begins with (`encode_target`); decodes translations.

    A text may begin with the code of the language that is wanted, ">>fra<<", where the vocabulary has such codes. As
    everywhere in this library, a special token that is spelled in a text is text.

    Args:
        source, target: SentencePiece models.
        source_vocab, target_vocab: the ids of their pieces.
        vocab_size: of the target, as the model has it.
        special_ids: of the model. What has no id in the vocabulary becomes unk.

    Raises:
        ValueError: ids of another vocabulary, or no unk.
    """

    def __init__(
        self,
        source: sentencepiece.SentencePieceProcessor,
        target: sentencepiece.SentencePieceProcessor,
        source_vocab: Mapping[str, int],
        target_vocab: Mapping[str, int],
        vocab_size: int,
        special_ids: SpecialIds,
    ) -> None:
        if special_ids.unk is None:
            raise ValueError("expected an id for pieces that the vocabulary lacks, got none")
        if max(target_vocab.values(), default=0) >= vocab_size:
            raise ValueError(
                f"expected ids below {vocab_size}, got {max(target_vocab.values())}: is it another model's?"
            )
        self._source, self._target = source, target
        self._source_vocab, self._target_vocab = dict(source_vocab), dict(target_vocab)
        self._source_pieces = {i: piece for piece, i in source_vocab.items()}
        self._target_pieces = {i: piece for piece, i in target_vocab.items()}
        self._source_size = max(vocab_size, 1 + max(source_vocab.values(), default=0))
        self._vocab_size, self._special_ids, self._unk = vocab_size, special_ids, special_ids.unk

    @property
    def special_ids(self) -> SpecialIds:
        """Those of the model."""
        return self._special_ids

    @property
    def vocab_size(self) -> int:
        """The number of the target's ids."""
        return self._vocab_size

    def encode(self, text: str) -> list[int]:
        """The ids of a source, without EOS."""
        return self._encode(text, self._source, self._source_vocab)

    def encode_target(self, text: str) -> list[int]:
        """The ids of a translation, without EOS."""
        return self._encode(text, self._target, self._target_vocab)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of many texts."""
        check_texts(texts)
        return [self.encode(text) for text in texts]

    def _encode(
        self, text: str, processor: sentencepiece.SentencePieceProcessor, vocab: Mapping[str, int]
    ) -> list[int]:
        check_text(text)
        pieces = []
        if text.startswith(">>") and (end := text.find("<<")) >= 0:
            pieces, text = [text[: end + 2]], text[end + 2 :]
        return [vocab.get(piece, self._unk) for piece in [*pieces, *processor.encode(text, out_type=str)]]

    def pieces(self, text: str) -> list[str]:
        """The text as it is."""
        return [text]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of a translation's ids: special tokens are skipped, EOS ends it."""
        kept = [i for i in until_eos(ids, self._special_ids, self._vocab_size) if i != self._unk]
        pieces = [self._target_pieces[i] for i in kept if i in self._target_pieces]
        return str(self._target.decode_pieces(pieces)).replace("▁", " ").strip()

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """Each id of a translation as its piece."""
        return [visible(self._target_pieces.get(i)) for i in checked_ids(ids, self._vocab_size)]

    def source_tokens(self, ids: Iterable[int]) -> list[str]:
        """Each id of a source as its piece."""
        return [visible(self._source_pieces.get(i)) for i in checked_ids(ids, self._source_size)]

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes tokenizer.json."""
        is_shared = self._source_vocab == self._target_vocab
        values = {
            "type": TYPE,
            "vocab_size": self._vocab_size,
            "special_ids": asdict(self._special_ids),
            "source": base64.b64encode(self._source.serialized_model_proto()).decode("ascii"),
            "target": base64.b64encode(self._target.serialized_model_proto()).decode("ascii"),
            "source_vocab": self._source_vocab,
            "target_vocab": None if is_shared else self._target_vocab,
        }
        write_atomically(Path(folder, TOKENIZER), json.dumps(values, ensure_ascii=False).encode() + b"\n")


def saved_marian(file: Path, values: Mapping[str, Any]) -> MarianTokenizer:
    """What `MarianTokenizer.save` wrote.

    Raises:
        ImportError: sentencepiece is not installed.
        ValueError: a damaged file.
    """
    try:
        source, target = (base64.b64decode(values[side], validate=True) for side in ("source", "target"))
        source_vocab = check_vocab(file, values["source_vocab"])
        target_vocab = values["target_vocab"]
        return MarianTokenizer(
            read_sentencepiece(file, source),
            read_sentencepiece(file, target),
            source_vocab,
            source_vocab if target_vocab is None else check_vocab(file, target_vocab),
            int(values["vocab_size"]),
            SpecialIds.from_dict(values["special_ids"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{file} is damaged or no tokenizer ({error}): copy it again or convert anew") from error


def check_vocab(file: Path, values: object) -> dict[str, int]:
    """A mapping of pieces to ids.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(values, dict) or not values:
        raise ValueError(f"expected {file} to map pieces to ids, got {values!r:.60}")
    for piece, i in values.items():
        if not isinstance(i, int) or isinstance(i, bool) or i < 0:
            raise ValueError(f"expected {file} to map pieces to ids, got {i!r} for {piece!r:.40}")
    return values


def read_sentencepiece(file: Path, model: bytes) -> sentencepiece.SentencePieceProcessor:
    """A SentencePiece model.

    Raises:
        ImportError: the library is not installed.
        ValueError: something else.
    """
    try:
        import sentencepiece
    except ImportError as error:
        raise ImportError(f"{file} needs the sentencepiece library: pip install 'fastformer[sentencepiece]'") from error
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=model)
    except RuntimeError as error:
        raise ValueError(f"expected a SentencePiece model in {file}, got something else ({error})") from error
