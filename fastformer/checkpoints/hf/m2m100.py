"""M2M100 (Fan et al. 2020) and NLLB (NLLB Team et al. 2022): the tokenizers. The models are among `bart.FORMS`.

tokenizer.json               of an NLLB; its languages are special tokens, such as "eng_Latn"
sentencepiece.bpe.model      of an M2M100
vocab.json                   the ids of an M2M100's pieces; the ids of the languages ("en") follow them
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastformer.checkpoints.hf.common import (
    MakeTokenizer,
    check_tokenizer_class,
    flag_of,
    languages_of,
    make_translator,
    read_file,
    special_tokens,
    tokenizer_settings,
)
from fastformer.data.huggingface import LibraryBackend, added_tokens, check_vocab, read_library
from fastformer.data.pieces import PieceBackend, read_sentencepiece
from fastformer.data.tokenizer import TOKENIZER
from fastformer.files import read_json

_CLASSES = ("M2M100Tokenizer", "NllbTokenizer")
_LANGUAGE = re.compile(r"[a-z]{3}_[A-Z][a-z]{3}")
# The languages of M2M100 in the order of their ids, and those of WMT21's models.
_CODES = {
    "m2m100": (
        "af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl gu ha he hi hr ht hu "
        "hy id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml mn mr ms my ne nl no ns oc or pa pl ps pt "
        "ro ru sd si sk sl so sq sr ss su sv sw ta th tl tn tr uk ur uz vi wo xh yi yo zh zu"
    ),
    "wmt21": "en ha is ja cs ru zh de",
}


def read_tokenizer(folder: Path, settings: Mapping[str, Any]) -> MakeTokenizer:
    """Reads the tokenizer, as `ReadTokenizer` describes."""
    named = check_tokenizer_class(folder, _CLASSES)
    if named == "M2M100Tokenizer" or (named is None and (folder / "vocab.json").is_file()):
        return _read_pieces(folder, settings)
    file = folder / TOKENIZER
    backend = read_library(file, read_json(file))
    special = special_tokens(folder, settings, backend.get_vocab())
    ids = {name: i for name, i in added_tokens(backend).items() if _LANGUAGE.fullmatch(name)}
    is_behind = flag_of(tokenizer_settings(folder), "legacy_behaviour", False)
    languages = languages_of(folder, settings, ids, "behind" if is_behind else "front")
    return special["unk"], make_translator(LibraryBackend(backend, str(file)), languages=languages)


def _read_pieces(folder: Path, settings: Mapping[str, Any]) -> MakeTokenizer:
    vocab = check_vocab(folder / "vocab.json", read_json(folder / "vocab.json"))
    file = folder / "sentencepiece.bpe.model"
    processor = read_sentencepiece(file, read_file(file))
    special = special_tokens(folder, settings, vocab)
    codes = tokenizer_settings(folder).get("language_codes", "m2m100")
    if not isinstance(codes, str) or codes not in _CODES:
        raise ValueError(f"expected language_codes in {(*_CODES,)}, got {codes!r}")
    ids = {code: len(vocab) + place for place, code in enumerate(_CODES[codes].split())}
    languages = languages_of(folder, settings, ids, "front")
    return special["unk"], make_translator(PieceBackend(processor, vocab, special["unk"]), languages=languages)
