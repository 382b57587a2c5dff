"""fastformer's own BPE keeps texts and merges, and learns in reasonable time."""

from __future__ import annotations

import itertools
import json
import random
import re
import time
import unicodedata
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastformer.data import BPETokenizer, load_tokenizer, train_bpe
from fastformer.number_words import english, german, number_pairs
from tests.data.odd_texts import SPELLED_LIKE_SPECIAL, random_text

TEXTS = [words(n) for n in number_pairs(500, seed=0) for words in (english, german)]
EARLIER = Path(__file__).parent / "bpe_of_an_earlier_version.json"
NORMALIZATIONS = ("nfkc", "nfc", "none", "nfkc_lower", "nfc_lower", "lower")
# Texts that spell bytes, and what a BPE learns to take for one token.
BYTES = st.lists(st.sampled_from(["<0x", "4a", "Ff", "+a", "_a", "4A", ">", "<", " ", "\n", "one"])).map("".join)
SPELL_BYTES = [
    f"{before}<0x{digits}>{behind}"
    for digits in ("4a", "Ff", "+a", "ab", "fF")
    for before in ascii_lowercase
    for behind in ascii_lowercase[:6]
]


def normalized(text: str, normalization: str = "nfkc", spaces: str = "keep") -> str:
    """Returns the expected normalisation of a text, from a second implementation."""
    if normalization.startswith("nf"):
        text = unicodedata.normalize(normalization.split("_")[0].upper(), text)
    if normalization.endswith("lower"):
        text = "".join(character.lower() for character in text)
    if spaces == "collapse":
        text = re.sub(r"[ \t]+", " ", text).strip("".join(map(chr, WHITE)))
        text = text.replace(" \n", "\n").replace("\n ", "\n")
    return text


WHITE = (*range(9, 14), 32, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000)


QUICK = {("nfkc", "keep"), ("nfc_lower", "collapse"), ("none", "keep"), ("lower", "collapse")}


@pytest.mark.parametrize(
    ("normalization", "spaces"),  # slow: every normalization with either treatment of spaces
    [
        pytest.param(*form, marks=() if form in QUICK else pytest.mark.slow)
        for form in itertools.product(NORMALIZATIONS, ("keep", "collapse"))
    ],
)
def test_every_text_is_decoded_in_its_normal_form(normalization, spaces, tmp_path) -> None:
    # The alphabet of the second one holds line ends, "<" and what special tokens are spelled with.
    chooser, options = random.Random(0), {"normalization": normalization, "spaces": spaces}
    count = 600 if (normalization, spaces) == ("nfkc", "keep") else 40
    noisy = [random_text(chooser) for _ in range(60)] + [" ".join(SPELLED_LIKE_SPECIAL * 5)] * 50
    for bpe in (train_bpe(TEXTS, 200, **options), train_bpe(noisy, 600, **options)):
        texts = [random_text(chooser) for _ in range(count)]
        texts += ["", " ", "   x", "x  ", "\n", "\n\n\nx\n", "a\n b\n  c \n \n", *SPELLED_LIKE_SPECIAL]
        bpe.save(tmp_path)
        loaded: Any = load_tokenizer(tmp_path)
        assert loaded.form == bpe.form and (bpe.form.normalization, bpe.form.spaces) == (normalization, spaces)
        for text, ids in zip(texts, bpe.encode_batch(texts), strict=True):
            assert bpe.decode(ids) == normalized(text, **options) == bpe.normalize(text), ascii(text)
            assert not {0, 1, 2} & set(ids), ascii(text)  # no special token by spelling, and nothing unknown
            assert bpe.encode(text) == ids == loaded.encode(text)


def assert_texts_come_back(bpe: BPETokenizer, count: int) -> None:
    @settings(deadline=None, max_examples=count)
    @given(BYTES)
    def comes_back(text: str) -> None:
        assert bpe.decode(bpe.encode(text)) == text

    comes_back()


def test_a_text_that_spells_bytes_is_text() -> None:
    bpe = train_bpe(SPELL_BYTES, 60)
    assert_texts_come_back(bpe, 300)
    assert all(bpe.decode(bpe.encode(text)) == text for text in SPELL_BYTES)


def test_a_tokenizer_of_an_earlier_version(tmp_path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(EARLIER.read_bytes())
    bpe = load_tokenizer(tmp_path)
    assert isinstance(bpe, BPETokenizer)
    # Its ids are those that it had; the token of a text that spells a byte is text now.
    assert bpe.encode("c<0x4a>o") == [305] and bpe.encode("twenty-one") == [325, 302, 276, 275, 270]
    assert bpe.encode("  a  b ") == [260, 260, 260, 266, 260, 260, 267, 260]
    assert bpe.encode("x" * 300) == [326, *[301] * 16, 327, 291]  # a word of any length
    for text in ("c<0x4a>o", "a<0x4a>b", "<0x4a>", "twenty-one", "  a  b ", "c\n d\n", "é 漢", "x" * 300):
        assert bpe.decode(bpe.encode(text)) == text
    assert_texts_come_back(bpe, 100)
    bpe.save(tmp_path)
    assert json.loads((tmp_path / "tokenizer.json").read_text()) == json.loads(EARLIER.read_text())


def test_no_token_is_longer_than_the_limit() -> None:
    url = "https://www.example.com/a/page?of=some&length=unknown"
    for longest in (2, 3, 5, 32):
        bpe = train_bpe([f"see {url} or not"] * 50, 400, max_token_length=longest)
        assert longest / 2 < max(map(len, bpe.tokens(range(259, bpe.vocab_size)))) <= longest
        assert bpe.decode(bpe.encode(url)) == url


def test_learning_from_a_line_without_spaces_is_no_slower_than_from_many() -> None:
    chooser, took = random.Random(0), {}
    letters = "".join(chooser.choices("ACGT", k=200_000))
    for size in (100, len(letters)):
        began = time.process_time()
        bpe = train_bpe([letters[i : i + size] for i in range(0, len(letters), size)], 300)
        took[size] = time.process_time() - began
    assert bpe.decode(bpe.encode(letters)) == letters
    assert took[len(letters)] < 4 * took[100]  # it was 60 times as long, and grew with the square


def test_words_have_the_same_tokens_everywhere() -> None:
    bpe = train_bpe(TEXTS, 200)
    word = bpe.encode("hundred")
    assert bpe.tokens(word)[0].startswith("▁")
    assert bpe.encode("hundred hundred") == word * 2
    newline = bpe.encode("\n")[1:]  # behind the space that every text begins with
    assert len(newline) == 1 and bpe.encode("hundred\nhundred") == [*word, *newline, *word]


@pytest.mark.parametrize("vocab_size", [20, 60, 200])
def test_bytes_are_added_to_the_vocabulary(vocab_size) -> None:
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


def test_errors() -> None:
    import tokenizers

    with pytest.raises(ValueError, match=r"\bvocab_size\b.*\b3$"):
        train_bpe(TEXTS, 3)
    for options in ({"normalization": "nfd"}, {"spaces": "strip"}, {"max_token_length": 1}, {"max_token_length": 2.5}):
        with pytest.raises(ValueError, match=rf"\b{next(iter(options))}\b"):
            train_bpe(TEXTS, 200, **options)
    with pytest.raises(ValueError, match=r"\btrain_bpe\b"):
        BPETokenizer(tokenizers.Tokenizer(tokenizers.models.BPE()))
