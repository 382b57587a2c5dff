"""Tokenizers keep text, ids and files."""

from __future__ import annotations

import random
import sys
import unicodedata

import pytest

from fastformer.data import BPETokenizer, ByteTokenizer, Tokenizer, load_tokenizer, train_bpe
from fastformer.data import tokenizer as module
from fastformer.data.number_words import english, german, number_pairs
from fastformer.data.tokenizer import SPECIAL_TOKENS
from fastformer.special_ids import SpecialIds

TEXTS = [words(n) for n in number_pairs(500, seed=0) for words in (english, german)]
# The tokenizers library normalises by an older Unicode than Python; these characters mean the same in both.
CHARACTERS = [
    chr(code)
    for code in range(sys.maxunicode + 1)
    if unicodedata.ucd_3_2_0.category(chr(code)) not in ("Cn", "Cs", "Co")
]
SPELLED_LIKE_SPECIAL = ("<pad>", "</s>", "<unk>", "<0x0A>", "<0xFF>", "<s>", "▁", "Ġ", "\ufeff", "�")


@pytest.fixture(params=["bytes", "bpe"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return ByteTokenizer() if request.param == "bytes" else train_bpe(TEXTS, 200)


def random_text(chooser: random.Random) -> str:
    kinds = (
        lambda: chooser.choice(CHARACTERS),
        lambda: chooser.choice("one two<>"),
        lambda: chooser.choice("  \n\t\r\x00\x0b\x0c\x85\u2028"),
        lambda: chooser.choice(SPELLED_LIKE_SPECIAL),
        lambda: chooser.choice("😀🏳️‍🌈漢字ﬁ½é́ⅸ\u00a0"),
    )
    return "".join(chooser.choice(kinds)() for _ in range(chooser.randrange(25)))


def test_every_text_comes_back_in_its_normal_form() -> None:
    # The alphabet of the second one holds line ends, "<" and what special tokens are spelled with.
    chooser = random.Random(0)
    noisy = [random_text(chooser) for _ in range(300)] + [" ".join(SPELLED_LIKE_SPECIAL * 5)] * 50
    for bpe in (train_bpe(TEXTS, 200), train_bpe(noisy, 600)):
        texts = [random_text(chooser) for _ in range(1500)]
        texts += ["", " ", "   x", "x  ", "\n", "\n\n\nx\n", "a\n b\n  c \n \n", *SPELLED_LIKE_SPECIAL]
        for text, ids in zip(texts, bpe.encode_batch(texts), strict=True):
            assert bpe.decode(ids) == unicodedata.normalize("NFKC", text), ascii(text)
            assert not {0, 1, 2} & set(ids), ascii(text)  # no special token by spelling, and nothing unknown
            assert bpe.encode(text) == ids


def test_bytes_keep_every_text() -> None:
    chooser, tokenizer = random.Random(1), ByteTokenizer()
    texts = [random_text(chooser) for _ in range(200)]
    assert [tokenizer.decode(ids) for ids in tokenizer.encode_batch(texts)] == texts


def test_round_trip(tokenizer, tmp_path) -> None:
    tokenizer.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert type(loaded) is type(tokenizer) and loaded.vocab_size == tokenizer.vocab_size
    for text in [*TEXTS[:50], "</s> 漢\n x"]:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text and loaded.encode(text) == ids and loaded.decode(ids) == text
        assert all(2 < i < tokenizer.vocab_size for i in ids) and len(tokenizer.tokens(ids)) == len(ids)


def test_eos_ends_and_pad_is_skipped(tokenizer) -> None:
    ids = tokenizer.encode("fünf")
    assert tokenizer.decode([0, *ids, 0, 1, *ids]) == "fünf"
    assert tokenizer.decode([2, *ids, 2]) == "fünf"


def test_any_eos_ends_and_the_tokenizers_pad_is_skipped(tokenizer) -> None:
    assert tokenizer.special_ids == SpecialIds()
    ids = tokenizer.encode("fünf")
    tokenizer.special_ids = SpecialIds(pad=5, eos=(6, 7))  # in both they are bytes, which would be text
    for end in (6, 7):
        assert tokenizer.decode([5, *ids, 5, end, *ids]) == "fünf"


def test_special_tokens_spelled_in_a_text_are_text(tokenizer) -> None:
    for token in SPECIAL_TOKENS:
        assert tokenizer.decode(tokenizer.encode(f"eins {token}zwei")) == f"eins {token}zwei"


def test_words_are_the_same_tokens_wherever_they_stand() -> None:
    bpe = train_bpe(TEXTS, 200)
    word = bpe.encode("hundred")
    assert bpe.tokens(word)[0].startswith("▁")
    assert bpe.encode("hundred hundred") == word * 2
    newline = bpe.encode("\n")[1:]  # behind the space that every text begins with
    assert len(newline) == 1 and bpe.encode("hundred\nhundred") == [*word, *newline, *word]


@pytest.mark.parametrize("vocab_size", [20, 60, 200])
def test_bytes_stand_beside_the_vocabulary(vocab_size) -> None:
    bpe = train_bpe(TEXTS, vocab_size)
    assert bpe.vocab_size == vocab_size + 256
    assert bpe.tokens([3, 3 + 0xAB, 258]) == ["<0x00>", "<0xAB>", "<0xFF>"]
    assert all(not token.startswith("<0x") for token in bpe.tokens(range(259, bpe.vocab_size)))


def test_a_small_vocabulary_keeps_room_for_words() -> None:
    # 2,000 characters that come once must not push out the words that come 400 times.
    rare = [chr(0x4E00 + i) for i in range(2000)]
    bpe = train_bpe(["hundred thousand"] * 400 + rare, 60)
    assert len(bpe.encode("hundred thousand")) == 2
    assert bpe.vocab_size == 60 + 256 and bpe.decode(bpe.encode("".join(rare))) == "".join(rare)


def test_training_does_not_depend_on_chance() -> None:
    rare = ["".join(chr(0x4E00 + (i * 7 + j) % 500) for j in range(30)) for i in range(50)]
    first, second = train_bpe(rare, 100), train_bpe(rare, 100)
    assert first.tokens(range(first.vocab_size)) == second.tokens(range(second.vocab_size))


def test_pieces_of_a_long_text(tokenizer, monkeypatch) -> None:
    monkeypatch.setattr(module, "_PIECE", 40)
    chooser = random.Random(2)
    for _ in range(30):
        text = "".join(chooser.choice(["one", " ", "\n", "\n", "ﬁ", "x" * 50]) for _ in range(80))
        pieces = tokenizer.pieces(text)
        assert "".join(pieces) == text and len(pieces) > 2
        whole = tokenizer.encode_batch([text])[0]
        assert [i for piece in pieces for i in tokenizer.encode_batch([piece])[0]] == whole == tokenizer.encode(text)


def test_texts_may_come_as_any_iterable(tokenizer) -> None:
    trained, again = train_bpe(TEXTS, 200), train_bpe((text for text in TEXTS), 200)
    assert trained.tokens(range(456)) == again.tokens(range(456))
    assert tokenizer.encode_batch(("one", "two")) == [tokenizer.encode("one"), tokenizer.encode("two")]
    assert tokenizer.encode_batch([]) == []


def test_lone_surrogates_are_refused(tokenizer) -> None:
    for call in (tokenizer.encode, lambda text: tokenizer.encode_batch(["a", text]), lambda text: train_bpe([text], 9)):
        with pytest.raises(ValueError, match=r"expected text, got the lone surrogate U\+DCFF at position 2"):
            call("ab\udcff")


def test_errors() -> None:
    import tokenizers

    with pytest.raises(ValueError, match="vocab_size of more than the 3 special tokens, got 3"):
        train_bpe(TEXTS, 3)
    with pytest.raises(ValueError, match="expected a tokenizer that train_bpe made"):
        BPETokenizer(tokenizers.Tokenizer(tokenizers.models.BPE()))
