"""Tokenizers of every kind that a text is encoded with for a new model."""

from __future__ import annotations

import functools
import io
import tempfile
from collections.abc import Callable
from pathlib import Path

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from fastformer.data import ByteTokenizer, Tokenizer, load_tokenizer, train_bpe

SAMPLE = [
    "the old tree and a red car's door; it is 1234 m away, don't!",
    "Blue dog  sees\nthe \tCat.\n\nEnd – größer Übung",
    "кот видит дом и Дерево ё й",
    "a b c d e f g h i j k l m n o p q r s t u v w x y z A B C D E F G é ﬁ ½",
]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_N, _P = normalizers, pre_tokenizers


def _split(pattern: str) -> list:
    return [_P.Split(Regex(pattern), "isolated"), _P.ByteLevel(add_prefix_space=False, use_regex=False)]


# Name: normalizers, pre-tokenizers, and whether it is known where such a tokenizer's texts may be cut.
FOREIGN: dict[str, tuple[list, list, bool]] = {
    "gpt2": ([], [_P.ByteLevel(add_prefix_space=False)], True),
    "roberta": ([], [_P.ByteLevel(add_prefix_space=True)], True),
    "llama3": ([], _split(LLAMA3), True),
    "o200k, NFC": ([_N.NFC()], _split(O200K), True),
    "another expression": ([], _split(r"\w+ \w+|.|\n"), False),
    "starcoder": ([], [_P.Digits(individual_digits=True), _P.ByteLevel(add_prefix_space=False)], True),
    "metaspace always": ([], [_P.Metaspace()], True),
    "metaspace first": ([_N.NFKC()], [_P.Metaspace(prepend_scheme="first")], True),
    "metaspace never": ([_N.Lowercase()], [_P.Metaspace(prepend_scheme="never")], True),
    "metaspace, unsplit": ([], [_P.Metaspace(split=False)], False),
    "bert": ([_N.BertNormalizer()], [_P.BertPreTokenizer()], True),
    "whitespace": ([_N.NFD(), _N.StripAccents()], [_P.Whitespace()], True),
    "whitespace split": ([_N.Replace("``", '"')], [_P.WhitespaceSplit(), _P.Punctuation()], True),
    "strip": ([_N.Strip()], [_P.Whitespace()], False),
    "replaced letters": ([_N.Replace("e", " ")], [_P.ByteLevel(add_prefix_space=False)], False),
    "replaced spaces": ([_N.Replace(Regex(r"\s+"), " ")], [_P.ByteLevel(add_prefix_space=False)], False),
    "prepend": ([_N.Prepend("a")], [_P.WhitespaceSplit()], False),
    "llama2": ([_N.Prepend("▁"), _N.Replace(" ", "▁")], [], True),
    "gemma": ([_N.Replace(" ", "▁")], [], True),
    "nothing": ([], [], False),
}
OWN: dict[str, Callable[[], Tokenizer]] = {
    "bytes": ByteTokenizer,
    "bytes, user tokens": lambda: ByteTokenizer(["<x>", "the"]),
    "bpe": lambda: train_bpe(SAMPLE * 9, 90),
    "bpe, none": lambda: train_bpe(SAMPLE * 9, 90, normalization="none"),
    "bpe, collapse": lambda: train_bpe(SAMPLE * 9, 90, spaces="collapse", normalization="nfkc_lower"),
    "bpe, user tokens": lambda: train_bpe(SAMPLE * 9, 90, user_tokens=["<x>", "the"]),
    "bpe, collapse, user tokens": lambda: train_bpe(SAMPLE * 9, 90, spaces="collapse", user_tokens=["the"]),
}
# In another vocabulary: Latin letters alone, special tokens, tokens of spaces and of words.
ADDED = {"added words": ("gpt2", ["tree", "  "]), "added, right": ("gpt2", [tokenizers.AddedToken("old", rstrip=True)])}
PIECES = {"sentencepiece": "unigram", "sentencepiece bpe": "bpe"}
NAMES = (*OWN, *FOREIGN, *ADDED, *PIECES)


def backend(name: str) -> tokenizers.Tokenizer:
    """Learns a tokenizer of the `tokenizers` library."""
    found, splits, _ = FOREIGN[ADDED.get(name, (name,))[0]]
    made = tokenizers.Tokenizer(models.BPE(unk_token="[UNK]"))
    made.normalizer = _N.Sequence(found) if found else None
    made.pre_tokenizer = _P.Sequence(splits) if splits else None
    alphabet = _P.ByteLevel.alphabet() if any(isinstance(split, _P.ByteLevel) for split in splits) else ["▁"]
    trainer = trainers.BpeTrainer(
        vocab_size=60 + len(set("".join(SAMPLE))) + len(alphabet), initial_alphabet=alphabet, show_progress=False,
        special_tokens=["<pad>", "</s>", "[UNK]"],
    )  # fmt: skip
    words = [word for text in SAMPLE for word in text.split(" ")] if not splits else SAMPLE
    made.train_from_iterator(words * 9, trainer)
    made.decoder = decoders.ByteLevel() if len(alphabet) > 1 else decoders.Metaspace()
    if name in ADDED:
        made.add_tokens(ADDED[name][1])
    return made


@functools.cache
def tokenizer(name: str) -> Tokenizer:
    """Makes a tokenizer."""
    if name in OWN:
        return OWN[name]()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "tokenizer.json")
        if name in PIECES:
            import sentencepiece

            model, file = io.BytesIO(), Path(folder, "pieces.model")
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(SAMPLE * 9), model_writer=model, model_type=PIECES[name], vocab_size=130,
                hard_vocab_limit=False, pad_id=3, minloglevel=2,
            )  # fmt: skip
            file.write_bytes(model.getvalue())
        else:
            backend(name).save(str(file))
        return load_tokenizer(file)


def saved(name: str, folder: Path) -> str:
    """Writes a tokenizer into a folder; returns the folder."""
    folder.mkdir()
    tokenizer(name).save(folder)
    return str(folder)
