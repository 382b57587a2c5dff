"""Marian (Junczys-Dowmunt et al. 2018): the tokenizer. The model is one of `bart.FORMS`.

source.spm, target.spm       SentencePiece models
vocab.json                   the ids of pieces; target_vocab.json if the target has its own vocabulary
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastformer.checkpoints.hf.common import MakeTokenizer, make_translator, read_file, special_tokens
from fastformer.data.huggingface import check_vocab
from fastformer.data.pieces import PieceBackend, read_sentencepiece
from fastformer.data.tokenizer import Tokenizer
from fastformer.files import read_json
from fastformer.languages import Languages
from fastformer.models import TransformerConfig

_LANGUAGE = re.compile(r">>[^<>\s]+<<")  # the token of a target language, in models that translate into several


def read_tokenizer(folder: Path, settings: Mapping[str, Any]) -> MakeTokenizer:
    """Reads the tokenizer, as `ReadTokenizer` describes."""
    vocab = check_vocab(folder / "vocab.json", read_json(folder / "vocab.json"))
    target_file = folder / "target_vocab.json"
    target_vocab = check_vocab(target_file, read_json(target_file)) if target_file.is_file() else vocab
    special = special_tokens(folder, settings, target_vocab)
    files = (folder / "source.spm", vocab), (folder / "target.spm", target_vocab)
    source, target = (
        PieceBackend(read_sentencepiece(file, read_file(file)), table, special["unk"], has_codes=True)
        for file, table in files
    )
    ids = {piece[2:-2]: i for piece, i in vocab.items() if _LANGUAGE.fullmatch(piece)}
    languages = Languages(ids, "asked") if ids else None

    translator = make_translator(source, target=target, languages=languages)

    def make(config: TransformerConfig) -> Tokenizer:
        if max(vocab.values()) >= (config.source_vocab_size or config.vocab_size):
            raise ValueError(f"its vocab.json has ids up to {max(vocab.values())}, which the model doesn't have")
        return translator(config)

    return special["unk"], make
