"""The tokenizer inside of a GGUF file.

tokenizer.ggml.model            "gpt2": a byte-level BPE; "llama": a SentencePiece BPE; "gemma4": that with merges;
                                "bert": WordPiece
tokenizer.ggml.pre              how a "gpt2" cuts a text into words, by name (`PRE`)
tokenizer.ggml.tokens           the tokens at their ids; scores and token_type have their scores and types
tokenizer.ggml.merges           of a "gpt2" and a "gemma4"
tokenizer.ggml.X_token_id       the ids of bos, eos, eot, eom, unknown, seperator (so spelled), padding, cls, mask
tokenizer.ggml.add_bos_token    whether a text begins with bos
tokenizer.chat_template         a template of Jinja
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fastformer.checkpoints.hf.common import MakeTokenizer
from fastformer.checkpoints.hf.encoder_tokenizers import word_pieces
from fastformer.checkpoints.hf.prompts import prompt_tokenizer
from fastformer.data.backend import Backend, Frame
from fastformer.data.huggingface import LibraryBackend, read_library
from fastformer.data.pieces import PieceBackend, read_sentencepiece
from fastformer.data.tokenizer import Tokenizer
from fastformer.models import BERTConfig, GPTConfig

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)  # types of tokens
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SLASHED = _REST.replace(r"[\r\n]*", r"[\r\n/]*")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LLAMA3 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_QWEN35 = _QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"\s\p{L}\p{N}", r"\s\p{L}\p{M}\p{N}")
_SEED = _QWEN2.replace(_REST, r" ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+")
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Scripts without spaces: Han, kana, Thai, Lao, Khmer, Burmese and Hangul.
_ASIAN = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
    "\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_TEKKEN = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|{_SLASHED}"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}?"
    rf"|\p{{N}}{{1,3}}|{_SLASHED}"
)
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DIGIT = r"\p{N}"


class _Pre(NamedTuple):
    """How a byte-level BPE cuts a text into words.

    Attributes:
        cuts: regular expressions, one after another: each match is a part, and so is what is between two.
        whole_words: whether a word that is a token is that token, whatever the merges make of it.
        adds_bos: whether a text begins with bos, if the file doesn't say so.
        nfc: whether a text is normalised first.
    """

    cuts: tuple[str, ...]
    whole_words: bool = False
    adds_bos: bool = False
    nfc: bool = False


PRE: dict[str, _Pre] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "roberta-bpe", "jina-v1-en", "jina-v2-code"), _Pre((GPT2,))),
    **dict.fromkeys(("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone"), _Pre((DIGIT, GPT2))),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2"), _Pre((_LLAMA3,), True, True)),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _Pre((_LLAMA3,))),
    "qwen2": _Pre((_QWEN2,), nfc=True),
    "qwen35": _Pre((_QWEN35,), nfc=True),
    **dict.fromkeys(("deepseek-r1-qwen", "megrez", "stablelm2"), _Pre((_QWEN2,))),
    "hunyuan": _Pre((_QWEN2,)),
    "hunyuan-dense": _Pre((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3)),
    **dict.fromkeys(("glm4", "chatglm-bpe"), _Pre((_LLAMA3,))),
    "afmoe": _Pre((r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", _ASIAN, _DEEPSEEK3)),
    "seed-coder": _Pre((_SEED,)),
    "tekken": _Pre((_TEKKEN,), True, True),
    **dict.fromkeys(("gpt-4o", "llama4"), _Pre((_GPT4O,))),
}
# Tokens that end a text in some models, whether or not a file names their ids.
_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>",
         "<|end_of_text|>", "<eos>", "<turn|>", "<|tool_response>", "<|return|>", "<|call|>")  # fmt: skip
# The tokens of a gpt-oss, whose <|end|> only ends one of the messages of an answer.
_OF_MESSAGES = {"<|return|>", "<|call|>"}
CHAT = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
_WORD = "▁"
_MOST_SPECIAL = 1 << 20


class Vocabulary(NamedTuple):
    """The tokens of a file.

    Attributes:
        path: the file, for messages.
        values: the values of the file.
        tokens: the tokens at their ids.
        types: their types.
        ids: the special ids, by the names in the keys X_token_id.
    """

    path: Path
    values: Mapping[str, Any]
    tokens: list[str]
    types: list[int]
    ids: dict[str, int]

    def get(self, name: str, kind: type, default: Any = None) -> Any:
        """Returns a value of the tokenizer.

        Raises:
            ValueError: a value of another type.
        """
        value = self.values.get(f"tokenizer.ggml.{name}", default)
        if value is not default and type(value) is not kind:
            raise ValueError(f"expected tokenizer.ggml.{name} to be a {kind.__name__}, got {value!r:.60}")
        return value

    @property
    def ends(self) -> list[int]:
        """The ids that end a text, the usual one first."""
        named = [self.ids[name] for name in ("eos", "eot", "eom") if name in self.ids]
        special = [i for i, kind in enumerate(self.types) if kind in (CONTROL, USER) and self.tokens[i] in _ENDS]
        has_messages = {self.tokens[i] for i in special} >= _OF_MESSAGES
        found = [i for i in dict.fromkeys((*named, *special)) if self.types[i] != BYTE]
        return [i for i in found if not has_messages or self.tokens[i] != "<|end|>"]

    @property
    def last(self) -> int:
        """The id after an encoder's texts."""
        named = [self.ids[name] for name in ("seperator", "eos") if name in self.ids]
        if not named:
            raise ValueError(f"expected the id of the token after a text in {self.path}, got {self.ids}")
        return named[0]

    @property
    def added(self) -> dict[str, tuple[int, bool]]:
        """The tokens that are found before all others, with their ids and whether they are special."""
        kinds = (CONTROL, USER, UNKNOWN)
        return {self.tokens[i]: (i, kind != USER) for i, kind in enumerate(self.types) if kind in kinds}


def read_vocabulary(path: Path, values: Mapping[str, Any]) -> Vocabulary:
    """Reads the tokens of a file and their types.

    Raises:
        ValueError: there are none, or values of other types, lengths or ranges.
    """
    tokens, types = (values.get(f"tokenizer.ggml.{name}") for name in ("tokens", "token_type"))
    if not isinstance(tokens, list) or not tokens or not all(type(token) is str for token in tokens):
        raise ValueError(f"expected {path} to have a tokenizer, got tokenizer.ggml.tokens {tokens!r:.60}")
    types = [NORMAL] * len(tokens) if types is None else [*types] if isinstance(types, list) else types
    if not isinstance(types, list) or len(types) != len(tokens) or not all(type(kind) is int for kind in types):
        raise ValueError(f"expected a tokenizer.ggml.token_type of each of {len(tokens)} tokens, got {types!r:.60}")
    ids = {}
    for key, i in values.items():
        if (match := re.fullmatch(r"tokenizer\.ggml\.(\w+)_token_id", key)) is not None:
            if type(i) is not int or not 0 <= i < len(tokens):
                raise ValueError(f"expected {key} to be one of {len(tokens)} ids, got {i!r:.60}")
            ids[match[1]] = i
    if sum(kind in (CONTROL, USER) for kind in types) > _MOST_SPECIAL:
        raise ValueError(f"expected at most {_MOST_SPECIAL:,} special tokens in {path}")
    vocabulary = Vocabulary(path, values, tokens, types, ids)
    for i in vocabulary.ends:  # a text must not spell one
        types[i] = CONTROL
    return vocabulary


def decoder_tokenizer(vocabulary: Vocabulary, *, encodes: bool = False) -> MakeTokenizer:
    """Returns the id of the unknown token, and what makes the tokenizer of a decoder.

    Args:
        vocabulary: the tokens of the file.
        encodes: whether the tokens that the file puts around a text are those of an encoder's text.

    Raises:
        ImportError: the library of the tokenizer is not installed.
        ValueError: a tokenizer that fastformer doesn't have, or one that is damaged.
    """
    kind, pre = vocabulary.get("model", str), vocabulary.get("pre", str)
    backend: Backend
    if kind == "gpt2":
        backend, adds_bos = _byte_level(vocabulary, pre), _pre(vocabulary, pre).adds_bos
    elif kind == "llama":
        backend, adds_bos = _sentencepiece(vocabulary), True
    elif kind == "gemma4":
        backend, adds_bos = _merged_pieces(vocabulary), True
    else:
        raise ValueError(f"expected a tokenizer.ggml.model of 'gpt2', 'llama' or 'gemma4', got {kind!r}")
    ids = vocabulary.ids
    bos = ids.get("bos", 1 if kind == "llama" else None) if vocabulary.get("add_bos_token", bool, adds_bos) else None
    chat = {name: vocabulary.tokens[ids[key]] for name, key in CHAT.items() if key in ids}
    template = vocabulary.values.get("tokenizer.chat_template")
    if template is not None:
        if not isinstance(template, str):
            raise ValueError(f"expected tokenizer.chat_template to be a text, got {template!r:.60}")
        chat["chat_template"] = template
    if not encodes:
        return ids.get("unknown"), prompt_tokenizer(backend, bos, chat)
    adds_eos = vocabulary.get("add_eos_token", bool, False)
    if adds_eos and "eos" not in ids:
        raise ValueError(f"expected the id of eos in {vocabulary.path}, which ends texts")
    frame = Frame.of([] if bos is None else [bos], [ids["eos"]] if adds_eos else [])

    def make(config: GPTConfig) -> Tokenizer:
        return Tokenizer(
            backend, config.special_ids, "encoder", vocab_size=config.vocab_size, frames=(frame,),
            max_len=config.max_len, chat=chat,
        )  # fmt: skip

    return ids.get("unknown"), make


def encoder_tokenizer(vocabulary: Vocabulary) -> MakeTokenizer:
    """Returns the id of the unknown token, and what makes the tokenizer of an encoder; see `decoder_tokenizer`."""
    kind, ids = vocabulary.get("model", str), vocabulary.ids
    backend: Backend
    if kind == "bert":
        backend, has_types = _words(vocabulary), True
        frames = backend.encoder_frames()
    elif kind == "gpt2":
        backend, has_types = _byte_level(vocabulary, vocabulary.get("pre", str)), False
        missing = [name for name in ("bos", "eos") if name not in ids]
        if missing:
            raise ValueError(f"expected the id of {missing[0]} in {vocabulary.path}, which begins and ends texts")
        end = [ids["eos"]]
        frames = Frame.of([ids["bos"]], end), Frame.of([ids["bos"]], end * 2, end)
    else:
        raise ValueError(f"expected a tokenizer.ggml.model of 'bert' or 'gpt2' for an encoder, got {kind!r}")

    def make(config: BERTConfig) -> Tokenizer:
        return Tokenizer(
            backend, config.special_ids, "encoder", vocab_size=config.vocab_size, frames=frames,
            max_len=config.max_len, has_token_types=has_types and config.token_types > 1,
        )  # fmt: skip

    return ids.get("unknown"), make


def _pre(vocabulary: Vocabulary, name: str | None) -> _Pre:
    if name not in PRE:
        raise ValueError(
            f"expected {vocabulary.path} to have a tokenizer.ggml.pre in {', '.join(PRE)}, got {name!r}: without the "
            "right one, texts become other tokens; convert the model again with a newer llama.cpp"
        )
    return PRE[name]


def _byte_level(vocabulary: Vocabulary, name: str | None) -> LibraryBackend:
    """Makes a byte-level BPE of the tokenizers library."""
    pre = _pre(vocabulary, name)
    cuts: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": cut}, "behavior": "Isolated", "invert": False} for cut in pre.cuts
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return _merging(
        vocabulary,
        {"ignore_merges": pre.whole_words},
        normalizer={"type": "NFC"} if pre.nfc else None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": [*cuts, level]},
        decoder=level,
    )


def _merged_pieces(vocabulary: Vocabulary) -> LibraryBackend:
    """Makes a BPE of the tokenizers library that merges characters, with spaces as ▁, and spells others by bytes."""
    unk = vocabulary.ids.get("unknown")
    model = {"byte_fallback": True, "fuse_unk": True, "unk_token": None if unk is None else vocabulary.tokens[unk]}
    spaces = {"type": "Replace", "pattern": {"String": _WORD}, "content": " "}
    return _merging(
        vocabulary,
        model,
        normalizer={"type": "Replace", "pattern": {"String": " "}, "content": _WORD},
        pre_tokenizer=None,
        decoder={"type": "Sequence", "decoders": [spaces, {"type": "ByteFallback"}, {"type": "Fuse"}]},
    )


def _merging(vocabulary: Vocabulary, model: Mapping[str, Any], **parts: Any) -> LibraryBackend:
    """Makes a BPE of the tokenizers library with the tokens and the merges of a file."""
    merges = vocabulary.get("merges", list, [])
    pairs = [merge.split(" ") for merge in merges if isinstance(merge, str)]
    if len(pairs) < len(merges) or any(len(pair) != 2 for pair in pairs):
        raise ValueError(f"expected tokenizer.ggml.merges of {vocabulary.path} to be pairs of tokens")
    vocab = {token: i for i, token in enumerate(vocabulary.tokens) if vocabulary.types[i] != UNUSED}
    if len(vocab) < len(vocabulary.tokens) - vocabulary.types.count(UNUSED):
        raise ValueError(f"expected tokens that differ in {vocabulary.path}, got some of them twice")
    added = [
        {
            "id": i, "content": token, "special": is_special, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False,
        }
        for token, (i, is_special) in vocabulary.added.items() if token
    ]  # fmt: skip
    values: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": added,
        **parts,
        "model": {"type": "BPE", "vocab": vocab, "merges": pairs, **model},
    }
    return LibraryBackend(read_library(vocabulary.path, values), str(vocabulary.path))


def _words(vocabulary: Vocabulary) -> LibraryBackend:
    """Makes a WordPiece of the tokenizers library. In the file, ▁ marks the pieces that begin words."""
    vocab = {
        token if kind == CONTROL else token[1:] if token.startswith(_WORD) else f"##{token}": i
        for i, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind != UNUSED
    }
    lowers = vocabulary.get("normalizer.lowercase", bool, True)
    strips = vocabulary.get("normalizer.strip_accents", bool, lowers)
    options = {"do_lower_case": lowers, "strip_accents": strips}
    return LibraryBackend(word_pieces(vocabulary.path, vocab, options), str(vocabulary.path))


def _sentencepiece(vocabulary: Vocabulary) -> PieceBackend:
    """Makes the SentencePiece model of the tokens and their scores."""
    scores = vocabulary.get("scores", list)
    if scores is None or len(scores) != len(vocabulary.tokens) or not all(type(each) is float for each in scores):
        raise ValueError(f"expected a tokenizer.ggml.scores of each token in {vocabulary.path}, got {scores!r:.60}")
    if len({*vocabulary.tokens}) < len(vocabulary.tokens):
        raise ValueError(f"expected tokens that differ in {vocabulary.path}, got some of them twice")
    space = vocabulary.get("add_space_prefix", bool, True)
    trims = vocabulary.get("remove_extra_whitespaces", bool, False)
    model = b"".join(_message(vocabulary, scores, has_prefix=space, trims=trims))
    tokens, ids = vocabulary.tokens, vocabulary.ids
    ends = {tokens[ids[name]]: (ids[name], True) for name in ("eot", "eom") if name in ids}
    special = [tokens[ids[name]] for name in CHAT.values() if name in ids]
    return PieceBackend(read_sentencepiece(vocabulary.path, model), added=ends, special=special)


def _message(vocabulary: Vocabulary, scores: Sequence[float], *, has_prefix: bool, trims: bool) -> Iterator[bytes]:
    """Yields the fields of a SentencePiece `ModelProto`: its pieces (1), how it was trained (2), its normaliser (3)."""
    first = vocabulary.types.index(UNKNOWN) if UNKNOWN in vocabulary.types else 0
    unk = vocabulary.ids.get("unknown", first)
    # Some files call the ids without a token unknown, too.
    types = [UNUSED if kind == UNKNOWN else kind for kind in vocabulary.types]
    types[unk] = UNKNOWN
    for i, (token, kind) in enumerate(zip(vocabulary.tokens, types, strict=True)):
        if not token or kind not in range(NORMAL, BYTE + 1):
            raise ValueError(f"expected tokens of types 1 to 6 in {vocabulary.path}, got {token!r:.60} of type {kind}")
        piece = token.replace(" ", _WORD) if kind == USER else token
        yield _bytes(1, _bytes(1, piece.encode()) + b"\x15" + struct.pack("<f", scores[i]) + _number(3, kind))
    ids = {name: vocabulary.ids.get(name, -1) for name in ("bos", "eos", "padding")}
    trained = [(3, 2), (35, BYTE in types), (40, unk), (41, ids["bos"]), (42, ids["eos"]), (43, ids["padding"])]
    yield _bytes(2, b"".join(_number(field, value) for field, value in trained))
    normal = [(3, has_prefix), (4, trims)]
    yield _bytes(3, _bytes(1, b"identity") + b"".join(_number(field, value) for field, value in normal))


def _varint(value: int) -> bytes:
    value, data = value & (1 << 64) - 1, bytearray()
    while value > 127:
        data.append(value & 127 | 128)
        value >>= 7
    return bytes([*data, value])


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(int(value))


def _bytes(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(data)) + data
