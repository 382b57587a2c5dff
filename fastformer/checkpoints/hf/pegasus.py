"""Pegasus (Zhang et al. 2020): the tokenizer. The model is one of `bart.FORMS`.

tokenizer.json               or
spiece.model                 its pieces come after masks and names that only pre-training used
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastformer.checkpoints.hf.common import (
    MakeTokenizer,
    make_translator,
    read_file,
    special_tokens,
    tokenizer_settings,
)
from fastformer.data.huggingface import LibraryBackend, read_library
from fastformer.data.pieces import PieceBackend, read_sentencepiece
from fastformer.data.tokenizer import TOKENIZER
from fastformer.files import read_json

_OFFSET = 103  # ids between those of PAD and EOS and those of other pieces, unless the folder contains the number


def read_tokenizer(folder: Path, settings: Mapping[str, Any]) -> MakeTokenizer:
    """Reads the tokenizer, as `ReadTokenizer` describes."""
    file = folder / TOKENIZER
    if file.is_file():
        backend = read_library(file, read_json(file))
        special = special_tokens(folder, settings, backend.get_vocab())
        return special["unk"], make_translator(LibraryBackend(backend, str(file)))
    file = folder / "spiece.model"
    processor = read_sentencepiece(file, read_file(file))
    offset = tokenizer_settings(folder).get("offset", _OFFSET)
    if not isinstance(offset, int) or isinstance(offset, bool) or offset < 0:
        raise ValueError(f"expected offset to be a number of ids, got {offset!r}")
    vocab = {"<pad>": 0, "</s>": 1}
    vocab |= {processor.id_to_piece(i): i + offset for i in range(2, processor.get_piece_size())}
    special = special_tokens(folder, settings, vocab)
    return special["unk"], make_translator(PieceBackend(processor, vocab, special["unk"]))
