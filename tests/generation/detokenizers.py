"""Small tokenizers of every kind that streaming supports, all trained on the same lines."""

from __future__ import annotations

import functools
import io
import json
import string

import pytest

from fastformer.data import ByteTokenizer, Tokenizer, load_tokenizer, train_bpe
from fastformer.data.pieces import PieceBackend
from fastformer.special_ids import SpecialIds

LINES = [
    string.ascii_letters,
    "the then there and",
    "another's line isn't lost.",
    "ä naïve café , no ! «so» 日本",
    "a = [1, 2]  # ok",
] * 4
SPECIAL = ["<pad>", "</s>", "<unk>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


class WordPiece:
    """A tokenizer of words that, like BERT's, removes a space when an apostrophe or a full stop follows."""

    words = ("<pad>", "</s>", "<unk>", "don", "'", "t", "go", ".", "now", "!", "##ne")
    vocab_size = len(words)

    def __init__(self) -> None:
        decoders = pytest.importorskip("tokenizers", reason="the decoder is the tokenizers library's").decoders
        self.decoder = decoders.WordPiece(cleanup=True)

    def encode(self, text: str) -> list[int]:
        return [2]

    def decode(self, ids) -> str:
        return self.decoder.decode([self.words[i] for i in ids if i > 2])


def _bpe():
    pytest.importorskip("tokenizers", reason="a BPE needs the tokenizers library")
    return train_bpe(LINES, 100)


def _foreign(kind: str, folder):
    library = pytest.importorskip("tokenizers", reason="the tokenizers library is not installed")
    pre, decoders = library.pre_tokenizers, library.decoders
    if kind == "byte level":  # as GPT-2
        backend = library.Tokenizer(library.models.BPE())
        backend.pre_tokenizer, backend.decoder = pre.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        trainer = library.trainers.BpeTrainer(
            vocab_size=330, special_tokens=SPECIAL, initial_alphabet=pre.ByteLevel.alphabet(), show_progress=False
        )
        backend.train_from_iterator(LINES, trainer)
    else:  # as Llama: bytes beside pieces whose space is a sign
        words = dict.fromkeys("▁".join(["", *"".join(LINES)]))
        vocab = {token: i for i, token in enumerate([*SPECIAL, *BYTES, *words])}
        backend = library.Tokenizer(library.models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
        backend.normalizer = library.normalizers.Sequence(
            [library.normalizers.Prepend("▁"), library.normalizers.Replace(" ", "▁")]
        )
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    (folder / "tokenizer.json").write_text(backend.to_str())
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "</s>", "pad_token": "<pad>"}))
    return load_tokenizer(folder)


def _processor(**options):
    library = pytest.importorskip("sentencepiece", reason="the sentencepiece library is not installed")
    model = io.BytesIO()
    library.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_writer=model, hard_vocab_limit=False, minloglevel=2, **options
    )
    return library.SentencePieceProcessor(model_proto=model.getvalue())


def _t5():
    processor = _processor(vocab_size=330, byte_fallback=True, remove_extra_whitespaces=False)
    return Tokenizer(PieceBackend(processor), SpecialIds(pad=1, eos=2, unk=0), "translator")


def _marian():
    processor = _processor(vocab_size=110)
    pieces = [processor.id_to_piece(i) for i in range(3, processor.get_piece_size())]
    vocab = {piece: i for i, piece in enumerate(["<pad>", "</s>", "<unk>", *pieces])}
    source, target = (PieceBackend(processor, vocab, 2, has_codes=True) for _ in range(2))
    return Tokenizer(source, role="translator", target=target)


KINDS = ("bytes", "bpe", "words", "byte level", "byte fallback", "sentencepiece", "marian")


@functools.cache
def detokenizer(kind: str, folder):
    """Makes a tokenizer. `folder` is for the file of another library's tokenizer."""
    plain = {"bytes": ByteTokenizer, "bpe": _bpe, "words": WordPiece, "sentencepiece": _t5, "marian": _marian}
    return plain[kind]() if kind in plain else _foreign(kind, folder)


class Counted:
    """A tokenizer that counts the ids that it decodes."""

    def __init__(self, tokenizer) -> None:
        self.tokenizer, self.encode, self.decoded = tokenizer, tokenizer.encode, 0

    def decode(self, ids) -> str:
        ids = list(ids)
        self.decoded += len(ids)
        return self.tokenizer.decode(ids)
