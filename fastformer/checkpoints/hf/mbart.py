"""mBART (Liu et al. 2020) and mBART-50 (Tang et al. 2020): the tokenizers. The models are among `bart.FORMS`.

tokenizer.json               the languages are special tokens, such as "en_XX"
sentencepiece.bpe.model      without a tokenizer.json: ids are one larger than the model's, as in fairseq; the languages
                             follow
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastformer.checkpoints.hf.common import (
    MakeTokenizer,
    check_tokenizer_class,
    languages_of,
    make_translator,
    read_file,
    special_tokens,
)
from fastformer.data.huggingface import LibraryBackend, added_tokens, read_library
from fastformer.data.pieces import PieceBackend, fairseq_vocab, read_sentencepiece
from fastformer.data.tokenizer import TOKENIZER
from fastformer.files import read_json
from fastformer.languages import Languages

_LANGUAGE = re.compile(r"[a-z]{2,3}_[A-Z]{2}")
# In the order of their ids: mBART's 25, and those that mBART-50 adds.
_CODES = (
    "ar_AR cs_CZ de_DE en_XX es_XX et_EE fi_FI fr_XX gu_IN hi_IN it_IT ja_XX kk_KZ ko_KR lt_LT lv_LV my_MM ne_NP nl_XX "
    "ro_RO ru_RU si_LK tr_TR vi_VN zh_CN"
)
_MORE_CODES = (
    "af_ZA az_AZ bn_IN fa_IR he_IL hr_HR id_ID ka_GE km_KH mk_MK ml_IN mn_MN mr_IN pl_PL ps_AF pt_XX sv_SE sw_KE ta_IN "
    "te_IN th_TH tl_XX uk_UA ur_PK xh_ZA gl_ES sl_SI"
)


def read_tokenizer(folder: Path, settings: Mapping[str, Any]) -> MakeTokenizer:
    """Reads the tokenizer, as `ReadTokenizer` describes.

    mBART's decoder begins with the target language, so a loaded tokenizer translates into one language only.
    """
    named = check_tokenizer_class(folder, ("MBartTokenizer", "MBart50Tokenizer"))
    file = folder / TOKENIZER
    backend = read_library(file, read_json(file)) if file.is_file() else None
    codes = _CODES.split() if named == "MBartTokenizer" else [*_CODES.split(), *_MORE_CODES.split()]
    if backend is not None:
        ids = {name: i for name, i in added_tokens(backend).items() if _LANGUAGE.fullmatch(name)}
        is_many = named == "MBart50Tokenizer" or (named is None and len(ids) > len(_CODES.split()))
    else:
        if named is None:
            raise ValueError(f"expected a {TOKENIZER} in {folder}, or a tokenizer_config.json with a tokenizer_class")
        is_many = named == "MBart50Tokenizer"
        path = folder / "sentencepiece.bpe.model"
        processor = read_sentencepiece(path, read_file(path))
        size = processor.get_piece_size()
        vocab = fairseq_vocab(processor)
        ids = {code: size + 1 + place for place, code in enumerate(codes)}
        vocab["<mask>"] = size + 1 + len(codes)
    languages = languages_of(folder, settings, ids, "front" if is_many else "start")
    _check_start(languages, settings)
    if backend is not None:
        special = special_tokens(folder, settings, backend.get_vocab())
        return special["unk"], make_translator(LibraryBackend(backend, str(file)), languages=languages)
    special = special_tokens(folder, settings, vocab)
    return special["unk"], make_translator(PieceBackend(processor, vocab, special["unk"]), languages=languages)


def _check_start(languages: Languages, settings: Mapping[str, Any]) -> None:
    if languages.places == "start" and languages.target is None:
        raise ValueError(
            "expected an mBART with a decoder_start_token_id that is the language it translates into, got "
            f"{settings.get('decoder_start_token_id')!r}"
        )
