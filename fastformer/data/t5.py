"""The tokenizer of a T5 that comes as a SentencePiece model, whose ids are the model's."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastformer.data.checks import check_text, check_texts, checked_ids, until_eos
from fastformer.data.marian import read_sentencepiece
from fastformer.data.tokenizer import TOKENIZER, visible
from fastformer.files import write_atomically
from fastformer.special_ids import SpecialIds

if TYPE_CHECKING:
    import sentencepiece

TYPE = "t5"  # in tokenizer.json


class T5Tokenizer:
    """Encodes sources, and what an output begins with; decodes outputs.

    As everywhere in this library, a special token that is spelled in a text is text, a sentinel ("<extra_id_0>") too.

    Args:
        processor: the SentencePiece model.
        vocab_size: of the model, which has more ids than there are pieces: sentinels, and unused ones.
        special_ids: of the model.

    Raises:
        ValueError: more pieces than ids.
    """

    def __init__(
        self, processor: sentencepiece.SentencePieceProcessor, vocab_size: int, special_ids: SpecialIds
    ) -> None:
        self._size = int(processor.get_piece_size())
        if self._size > vocab_size:
            raise ValueError(f"expected ids below {vocab_size}, got {self._size} pieces: is it another model's?")
        self._processor, self._vocab_size, self._special_ids = processor, vocab_size, special_ids

    @property
    def special_ids(self) -> SpecialIds:
        """Those of the model."""
        return self._special_ids

    @property
    def vocab_size(self) -> int:
        """The number of the model's ids."""
        return self._vocab_size

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without EOS."""
        check_text(text)
        return list(self._processor.encode(text))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of many texts."""
        check_texts(texts)
        return [self.encode(text) for text in texts]

    def pieces(self, text: str) -> list[str]:
        """The text as it is."""
        return [text]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids: what has no piece and special tokens are skipped, EOS ends it."""
        kept = until_eos(ids, self._special_ids, self._vocab_size)
        return str(self._processor.decode([i for i in kept if i < self._size and i != self._special_ids.unk]))

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """Each id as its piece."""
        each = checked_ids(ids, self._vocab_size)
        return [visible(self._processor.id_to_piece(i) if i < self._size else None) for i in each]

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes tokenizer.json."""
        values = {
            "type": TYPE,
            "vocab_size": self._vocab_size,
            "special_ids": asdict(self._special_ids),
            "model": base64.b64encode(self._processor.serialized_model_proto()).decode("ascii"),
        }
        write_atomically(Path(folder, TOKENIZER), json.dumps(values, ensure_ascii=False).encode() + b"\n")


def saved_t5(file: Path, values: Mapping[str, Any]) -> T5Tokenizer:
    """What `T5Tokenizer.save` wrote.

    Raises:
        ImportError: sentencepiece is not installed.
        ValueError: a damaged file.
    """
    try:
        processor = read_sentencepiece(file, base64.b64decode(values["model"], validate=True))
        return T5Tokenizer(processor, int(values["vocab_size"]), SpecialIds.from_dict(values["special_ids"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{file} is damaged or no tokenizer ({error}): copy it again or convert anew") from error
