"""Pieces of text are what the whole text is, and none is half a character or taken back."""

from __future__ import annotations

import random
import string

import pytest
import torch

from fastformer.data import ByteTokenizer
from fastformer.data.tokenizer import train_bpe
from fastformer.generation import generate
from fastformer.generation.streaming import TextPieces, TextStreamer
from fastformer.models import GPT

TEXT = "Zwölf Boxkämpfer — 日本語のテキスト, naïve 👩‍🚀 café's  end.\n\n  A new line isn't lost\t!"


class WordPiece:
    """A tokenizer of words that, as that of BERT, takes spaces back when an apostrophe or a stop follows."""

    words = ("<pad>", "</s>", "<unk>", "don", "'", "t", "go", ".", "now", "!", "##ne")

    def __init__(self) -> None:
        decoders = pytest.importorskip("tokenizers", reason="the decoder is the tokenizers library's").decoders
        self.decoder = decoders.WordPiece(cleanup=True)

    def encode(self, text: str) -> list[int]:
        return [2]

    def decode(self, ids) -> str:
        return self.decoder.decode([self.words[i] for i in ids if i > 2])


@pytest.fixture(scope="module")
def bpe():
    pytest.importorskip("tokenizers", reason="a BPE needs the tokenizers library")
    return train_bpe([string.ascii_letters + " ä the then there and\nanother's line"] * 3, 100)


def pieces_of(tokenizer, ids, begin=(), **options) -> list[str]:
    pieces = TextPieces(tokenizer, begin, **options)
    return [*(pieces.add([i]) for i in ids), pieces.end()]


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_real_text_comes_as_it_is(kind, request) -> None:
    tokenizer = ByteTokenizer() if kind == "bytes" else request.getfixturevalue("bpe")
    ids = tokenizer.encode(TEXT)
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert sum(map(bool, pieces)) > 30
    if kind == "bytes":
        assert pieces[:8] == ["Z", "w", "", "ö", "l", "f", "", " B"]
    assert "".join(pieces_of(tokenizer, [*ids, 1, *ids])) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", ["bytes", "bpe", "words"])
def test_whatever_the_tokens_the_pieces_are_the_text(kind, request) -> None:
    # Tokens as no text has them: broken bytes, spaces and line ends in rows, specials between.
    tokenizer = {"bytes": ByteTokenizer, "words": WordPiece}.get(kind, lambda: request.getfixturevalue("bpe"))()
    size = len(tokenizer.words) if kind == "words" else tokenizer.vocab_size
    chance = random.Random(0)
    usual = [i for i in range(size) if i != 1]
    odd = [i for i in usual if not tokenizer.decode([i]).isalpha()]
    for _ in range(150):
        ids = [chance.choice(usual if chance.random() < 0.5 else odd) for _ in range(20)]
        cut = chance.randrange(20)
        assert "".join(pieces_of(tokenizer, ids[cut:], ids[:cut])) == tokenizer.decode(ids)
        pieces = TextPieces(tokenizer)
        assert pieces.add(ids[:cut]) + pieces.add(ids[cut:]) + pieces.end() == tokenizer.decode(ids)


def test_what_is_told_already_is_not_said_again(bpe) -> None:
    begin, new = bpe.encode("the then "), bpe.encode("and another")
    assert "".join(pieces_of(bpe, new, begin, is_told=True)) == bpe.decode([*begin, *new])[len("the then ") :]
    # Here the first byte of a character makes one broken run with the bytes before it, which were text.
    byte = bpe.encode("\U0001f469")[-4:]
    assert "".join(pieces_of(bpe, byte[:1], byte, is_told=True)) == "\N{REPLACEMENT CHARACTER}"


def test_a_tokenizer_that_takes_back_what_it_said_is_an_error() -> None:
    class Backwards:
        def encode(self, text: str) -> list[int]:
            raise ValueError("it can't")

        def decode(self, ids) -> str:
            return "".join(string.ascii_lowercase[i] for i in reversed(list(ids)))

    with pytest.raises(ValueError, match="expected a tokenizer whose text only grows, got 'ba' behind 'a'"):
        pieces_of(Backwards(), [0, 1])


class Recorder:
    """Hugging Face's TextStreamer in short: it takes the prompt first, then token by token, then the end."""

    def __init__(self) -> None:
        self.values: list[torch.Tensor] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        assert not self.ended and (value.ndim == 1 or value.shape[0] == 1)
        self.values.append(value)

    def end(self) -> None:
        self.ended += 1


@pytest.fixture(scope="module")
def model() -> GPT:
    torch.manual_seed(0)
    return GPT.from_preset("tiny", vocab_size=259, d_model=32, num_layers=1, num_heads=4, max_len=40).eval()


def test_a_streamer_of_hugging_faces_kind_hears_each_token(model) -> None:
    recorder, ids = Recorder(), ByteTokenizer().encode("abc")
    out = generate(model, [ids], max_new_tokens=6, do_sample=True, seed=1, streamer=recorder)
    assert [value.shape for value in recorder.values] == [(1, 3), *[(1,)] * (out.shape[1] - 3)]
    assert torch.equal(torch.cat([value.flatten() for value in recorder.values]), out[0]) and recorder.ended == 1


@pytest.mark.parametrize("prompt", [None, "as it was typed "])
def test_a_text_streamer_prints_what_decoding_says(model, prompt, capsys) -> None:
    tokenizer = ByteTokenizer()
    streamer, ids = TextStreamer(tokenizer, prompt=prompt), tokenizer.encode("ab ")
    for seed in range(4):  # one after another
        out = generate(model, [ids], max_new_tokens=12, do_sample=True, seed=seed, streamer=streamer)
        said = tokenizer.decode(out[0].tolist())
        assert capsys.readouterr().out == (said if prompt is None else prompt + said[3:]) + "\n"
