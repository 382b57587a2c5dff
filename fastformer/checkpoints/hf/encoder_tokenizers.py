"""The tokenizer of an encoder's folder.

tokenizer.json               of the tokenizers library; its post-processor puts special tokens around texts, and its
                             truncation gives the side on which texts are cut, if tokenizer_config.json does not
vocab.txt                    a WordPiece vocabulary, one token a line, in older folders of BERT and its relatives
vocab.json, merges.txt       a byte-level BPE, in older folders of RoBERTa
sentencepiece.bpe.model      a SentencePiece model, in older folders of XLM-RoBERTa
tokenizer_config.json        whether texts are lower-cased, the maximum length of a text, whether pairs have token types
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastformer.checkpoints.hf.common import MakeTokenizer, flag_of, read_file, tokenizer_settings
from fastformer.checkpoints.hf.prompts import add_special, chat_of
from fastformer.data.backend import Backend
from fastformer.data.huggingface import (
    LibraryBackend,
    byte_level_bpe,
    check_vocab,
    library_errors,
    read_library,
)
from fastformer.data.pieces import fairseq_pieces, read_sentencepiece
from fastformer.data.tokenizer import TOKENIZER, Tokenizer
from fastformer.files import read_json, tokenizers_library
from fastformer.models import BERTConfig, GPTConfig

if TYPE_CHECKING:
    import tokenizers

_UNK = 3  # in fairseq
_WORDS, _VOCAB, _MERGES, _PIECES = "vocab.txt", "vocab.json", "merges.txt", "sentencepiece.bpe.model"
_TYPED = ("bert", "electra")  # families whose tokenizers give token types, unless model_input_names says otherwise
# The names of special tokens in a WordPiece vocabulary: the first that the vocabulary has is taken.
_SPECIAL = {"unk": ("[UNK]", "<unk>"), "sep": ("[SEP]", "</s>"), "cls": ("[CLS]", "<s>"), "pad": ("[PAD]", "<pad>")}
_CHINESE = "tokenize_chinese_chars"
# The options of transformers' BertTokenizer, by their names in tokenizer_config.json: the library's names and defaults.
_NORMALISED: dict[str, tuple[str, bool | None]] = {
    "do_lower_case": ("lowercase", True),
    "strip_accents": ("strip_accents", None),
    _CHINESE: ("handle_chinese_chars", True),
}
# The families whose tokenizer takes them from tokenizer_config.json, and never from tokenizer.json, with the names of
# its class there. A class of no family, such as PreTrainedTokenizerFast, takes all from tokenizer.json.
_WORD_PIECES = {"bert": "Bert", "distilbert": "DistilBert", "electra": "Electra", "mpnet": "MPNet"}
_FAMILY_OF = {f"{name}Tokenizer{end}": kind for kind, name in _WORD_PIECES.items() for end in ("", "Fast")}


def read_tokenizer(kind: str, folder: Path, settings: Mapping[str, Any]) -> MakeTokenizer:
    """Reads the tokenizer, as `ReadTokenizer` describes.

    Args:
        kind: the model_type.
        folder: the folder; its files are listed at the top of this module.
        settings: the settings of the model.
    """
    named = tokenizer_settings(folder)
    inputs, class_name = named.get("model_input_names"), named.get("tokenizer_class")
    family = _FAMILY_OF.get(class_name) if isinstance(class_name, str) else kind
    has_types = "token_type_ids" in inputs if isinstance(inputs, list) else family in _TYPED
    limit = named.get("model_max_length", named.get("max_len"))  # the latter in older files
    if isinstance(limit, bool) or not isinstance(limit, int | float) or limit < 1:
        limit = None

    if (side := named.get("truncation_side", "right")) not in ("left", "right"):
        raise ValueError(
            f"expected the tokenizer's files in {folder} to have truncation_side left or right, got {side!r}"
        )

    backend: Backend
    chat = chat_of(folder, named)
    if not (folder / TOKENIZER).is_file() and kind == "xlm-roberta" and (folder / _PIECES).is_file():
        backend = fairseq_pieces(read_sentencepiece(folder / _PIECES, read_file(folder / _PIECES)))
        unk: int | None = _UNK
    else:
        file, tokenizer = _read_backend(family, folder, named)
        # tokenizer.json remembers how it last cut. Only the side outlives a call in transformers: each call says the
        # rest.
        side = named.get("truncation_side") or (tokenizer.truncation or {}).get("direction", "right")
        name = getattr(tokenizer.model, "unk_token", None) or next(
            (token for token in _SPECIAL["unk"] if tokenizer.token_to_id(token) is not None), None
        )
        unk = None if name is None else tokenizer.token_to_id(name)
        add_special(tokenizer, chat)
        backend = LibraryBackend(tokenizer, str(file))
    frames = backend.encoder_frames()

    def make(config: BERTConfig | GPTConfig) -> Tokenizer:
        max_len = config.max_len if limit is None else int(min(limit, config.max_len))
        return Tokenizer(
            backend,
            config.special_ids,
            "encoder",
            vocab_size=config.vocab_size,
            frames=frames,
            max_len=max_len,
            side=side,
            has_token_types=has_types and getattr(config, "token_types", 0) > 1,
            chat=chat,
        )

    return unk, make


def _read_backend(family: str | None, folder: Path, named: Mapping[str, Any]) -> tuple[Path, tokenizers.Tokenizer]:
    if (file := folder / TOKENIZER).is_file():
        values = dict(read_json(file))
        normalizer = values.get("normalizer")
        if family in _WORD_PIECES and isinstance(normalizer, Mapping) and normalizer.get("type") == "BertNormalizer":
            options = {
                name: named[key] if isinstance(named.get(key), bool) else usual
                for key, (name, usual) in _NORMALISED.items()
            }
            values["normalizer"] = {**normalizer, **options}
        return file, read_library(file, values)
    if (file := folder / _WORDS).is_file():
        try:
            lines = read_file(file).decode("utf-8").split("\n")
        except UnicodeDecodeError as error:
            raise ValueError(f"expected {file} to be UTF-8 ({error})") from error
        words = {line.rstrip("\r"): i for i, line in enumerate(lines) if line or i < len(lines) - 1}
        return file, word_pieces(file, words, named)
    if (file := folder / _VOCAB).is_file():
        vocab = check_vocab(file, read_json(file))
        has_space = flag_of(named, "add_prefix_space", False)
        backend = byte_level_bpe(folder / _MERGES, vocab, read_file(folder / _MERGES), add_prefix_space=has_space)
        ends = [(token, backend.token_to_id(token)) for token in ("</s>", "<s>")]
        if any(i is None for _, i in ends):
            raise ValueError(f"expected {file} to have the tokens <s> and </s>, got a vocabulary without")
        backend.post_processor = tokenizers_library().processors.RobertaProcessing(*ends, add_prefix_space=has_space)
        return file, backend
    raise ValueError(
        f"expected a {TOKENIZER}, a {_WORDS}, or {_VOCAB} and {_MERGES}, but {folder} has none of them: was "
        "the model saved completely?"
    )


def word_pieces(file: Path, vocab: Mapping[str, int], named: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Builds the tokenizer of a WordPiece vocabulary.

    Args:
        file: the file of the vocabulary, for messages.
        vocab: the ids of the pieces; ## begins those that don't begin a word.
        named: the options of tokenizer_config.json.

    Raises:
        ImportError: tokenizers is not installed.
        ValueError: the vocabulary lacks special tokens.
    """
    library = tokenizers_library()
    special = {kind: next((name for name in names if name in vocab), None) for kind, names in _SPECIAL.items()}
    unk, sep, cls = special["unk"], special["sep"], special["cls"]
    if unk is None or sep is None or cls is None:
        raise ValueError(f"expected {file} to have tokens such as [UNK], [CLS] and [SEP], got {len(vocab)} others")
    with library_errors(f"{file} is no WordPiece vocabulary"):
        backend: tokenizers.Tokenizer = library.Tokenizer(library.models.WordPiece(dict(vocab), unk_token=unk))
    strip = named.get("strip_accents")
    backend.normalizer = library.normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=flag_of(named, _CHINESE, True),
        strip_accents=strip if isinstance(strip, bool) else None,
        lowercase=flag_of(named, "do_lower_case", True),
    )
    backend.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
    ends = (sep, vocab[sep]), (cls, vocab[cls])
    processors = library.processors
    is_bert = sep == "[SEP]"
    backend.post_processor = processors.BertProcessing(*ends) if is_bert else processors.RobertaProcessing(*ends)
    backend.decoder = library.decoders.WordPiece()
    known = [*dict.fromkeys(name for name in (*special.values(), "[MASK]", "<mask>") if name in vocab)]
    backend.add_special_tokens(known)
    return backend
