"""The tokenizers of BART's relatives, whose models are among `bart.FORMS`.

Marian (Junczys-Dowmunt et al. 2018): source.spm and target.spm; vocab.json has the ids of their pieces, and
    target_vocab.json those of the target, if it has its own vocabulary
mBART (Liu et al. 2020) and mBART-50 (Tang et al. 2020): tokenizer.json, whose languages are special tokens, such as
    "en_XX"; or sentencepiece.bpe.model, where ids are one larger than the model's, as in fairseq, and the languages
    follow
M2M100 (Fan et al. 2020): sentencepiece.bpe.model; vocab.json has the ids of its pieces, and those of the languages
    ("en") follow
NLLB (NLLB Team et al. 2022): tokenizer.json, whose languages are special tokens, such as "eng_Latn"
Pegasus (Zhang et al. 2020): tokenizer.json; or spiece.model, whose pieces come after masks and names that only
    pre-training used
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
from fastformer.data.pieces import PieceBackend, fairseq_vocab, read_sentencepiece
from fastformer.data.tokenizer import TOKENIZER, Tokenizer
from fastformer.files import read_json
from fastformer.languages import Languages, Places
from fastformer.models import TransformerConfig

_MARIAN_LANGUAGE = re.compile(r">>[^<>\s]+<<")  # the token of a target language, in models that translate into several
_MBART_LANGUAGE = re.compile(r"[a-z]{2,3}_[A-Z]{2}")
_NLLB_LANGUAGE = re.compile(r"[a-z]{3}_[A-Z][a-z]{3}")
# In the order of their ids: mBART's 25, and those that mBART-50 adds.
_MBART_CODES = (
    "ar_AR cs_CZ de_DE en_XX es_XX et_EE fi_FI fr_XX gu_IN hi_IN it_IT ja_XX kk_KZ ko_KR lt_LT lv_LV my_MM ne_NP nl_XX "
    "ro_RO ru_RU si_LK tr_TR vi_VN zh_CN"
)
_MORE_CODES = (
    " af_ZA az_AZ bn_IN fa_IR he_IL hr_HR id_ID ka_GE km_KH mk_MK ml_IN mn_MN mr_IN pl_PL ps_AF pt_XX sv_SE sw_KE "
    "ta_IN te_IN th_TH tl_XX uk_UA ur_PK xh_ZA gl_ES sl_SI"
)
# The languages of M2M100 in the order of their ids, and those of WMT21's models.
_CODES = {
    "m2m100": (
        "af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl gu ha he hi hr ht hu "
        "hy id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml mn mr ms my ne nl no ns oc or pa pl ps pt "
        "ro ru sd si sk sl so sq sr ss su sv sw ta th tl tn tr uk ur uz vi wo xh yi yo zh zu"
    ),
    "wmt21": "en ha is ja cs ru zh de",
}
_PEGASUS_OFFSET = 103  # ids between those of PAD and EOS and those of other pieces, unless the folder has the number


def read_marian(folder: Path, settings: Mapping[str, Any]) -> MakeTokenizer:
    """Reads the tokenizer, as `ReadTokenizer` describes."""
    vocab = check_vocab(folder / "vocab.json", read_json(folder / "vocab.json"))
    target_file = folder / "target_vocab.json"
    target_vocab = check_vocab(target_file, read_json(target_file)) if target_file.is_file() else vocab
    special = special_tokens(folder, settings, target_vocab)
    source, target = (
        PieceBackend(_pieces(folder / file), table, special["unk"], has_codes=True)
        for file, table in (("source.spm", vocab), ("target.spm", target_vocab))
    )
    ids = {piece[2:-2]: i for piece, i in vocab.items() if _MARIAN_LANGUAGE.fullmatch(piece)}
    translator = make_translator(source, target=target, languages=Languages(ids, "asked") if ids else None)

    def make(config: TransformerConfig) -> Tokenizer:
        if max(vocab.values()) >= (config.source_vocab_size or config.vocab_size):
            raise ValueError(f"its vocab.json has ids up to {max(vocab.values())}, which the model doesn't have")
        return translator(config)

    return special["unk"], make


def read_mbart(folder: Path, settings: Mapping[str, Any]) -> MakeTokenizer:
    """Reads the tokenizer, as `ReadTokenizer` describes.

    mBART's decoder begins with the target language, so a loaded tokenizer translates into one language only.
    """
    named = check_tokenizer_class(folder, ("MBartTokenizer", "MBart50Tokenizer"))
    is_many = named == "MBart50Tokenizer"
    library = _library(folder) if (folder / TOKENIZER).is_file() else None
    if library is not None:
        ids = _languages_in(library, _MBART_LANGUAGE)
        is_many = is_many or (named is None and len(ids) > len(_MBART_CODES.split()))
    elif named is None:
        raise ValueError(f"expected a {TOKENIZER} in {folder}, or a tokenizer_config.json with a tokenizer_class")
    else:
        processor, codes = _pieces(folder / "sentencepiece.bpe.model"), (_MBART_CODES + _MORE_CODES * is_many).split()
        first, vocab = processor.get_piece_size() + 1, fairseq_vocab(processor)
        ids = {code: first + place for place, code in enumerate(codes)}
        vocab["<mask>"] = first + len(codes)
    languages = languages_of(folder, settings, ids, "front" if is_many else "start")
    if languages.places == "start" and languages.target is None:
        raise ValueError(
            "expected an mBART with a decoder_start_token_id that is the language it translates into, got "
            f"{settings.get('decoder_start_token_id')!r}"
        )
    if library is not None:
        return _of_library(folder, settings, library, languages)
    return _of_pieces(folder, settings, processor, vocab, languages)


def read_m2m100(folder: Path, settings: Mapping[str, Any]) -> MakeTokenizer:
    """Reads the tokenizer of an M2M100 or an NLLB, as `ReadTokenizer` describes."""
    named = check_tokenizer_class(folder, ("M2M100Tokenizer", "NllbTokenizer"))
    options = tokenizer_settings(folder)
    if named == "NllbTokenizer" or (named is None and not (folder / "vocab.json").is_file()):
        library = _library(folder)
        places: Places = "behind" if flag_of(options, "legacy_behaviour", False) else "front"
        languages = languages_of(folder, settings, _languages_in(library, _NLLB_LANGUAGE), places)
        return _of_library(folder, settings, library, languages)
    vocab = check_vocab(folder / "vocab.json", read_json(folder / "vocab.json"))
    processor, codes = _pieces(folder / "sentencepiece.bpe.model"), options.get("language_codes", "m2m100")
    if not isinstance(codes, str) or codes not in _CODES:
        raise ValueError(f"expected language_codes in {(*_CODES,)}, got {codes!r}")
    ids = {code: len(vocab) + place for place, code in enumerate(_CODES[codes].split())}
    return _of_pieces(folder, settings, processor, vocab, languages_of(folder, settings, ids, "front"))


def read_pegasus(folder: Path, settings: Mapping[str, Any]) -> MakeTokenizer:
    """Reads the tokenizer, as `ReadTokenizer` describes."""
    if (folder / TOKENIZER).is_file():
        return _of_library(folder, settings, _library(folder))
    processor = _pieces(folder / "spiece.model")
    offset = tokenizer_settings(folder).get("offset", _PEGASUS_OFFSET)
    if not isinstance(offset, int) or isinstance(offset, bool) or offset < 0:
        raise ValueError(f"expected offset to be a number of ids, got {offset!r}")
    vocab = {"<pad>": 0, "</s>": 1}
    vocab |= {processor.id_to_piece(i): i + offset for i in range(2, processor.get_piece_size())}
    return _of_pieces(folder, settings, processor, vocab)


def _library(folder: Path) -> Any:
    return read_library(folder / TOKENIZER, read_json(folder / TOKENIZER))


def _pieces(file: Path) -> Any:
    return read_sentencepiece(file, read_file(file))


def _languages_in(library: Any, pattern: re.Pattern[str]) -> dict[str, int]:
    return {name: i for name, i in added_tokens(library).items() if pattern.fullmatch(name)}


def _of_library(
    folder: Path, settings: Mapping[str, Any], library: Any, languages: Languages | None = None
) -> MakeTokenizer:
    special = special_tokens(folder, settings, library.get_vocab())
    return special["unk"], make_translator(LibraryBackend(library, str(folder / TOKENIZER)), languages=languages)


def _of_pieces(
    folder: Path,
    settings: Mapping[str, Any],
    processor: Any,
    vocab: Mapping[str, int],
    languages: Languages | None = None,
) -> MakeTokenizer:
    special = special_tokens(folder, settings, vocab)
    return special["unk"], make_translator(PieceBackend(processor, vocab, special["unk"]), languages=languages)
