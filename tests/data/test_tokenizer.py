"""Tokenizers keep text, ids and files."""

from __future__ import annotations

import pytest

from fastformer.data import ByteTokenizer, load_tokenizer, train_bpe
from fastformer.data.number_words import english, german, number_pairs

TEXTS = [words(n) for n in number_pairs(500, seed=0) for words in (english, german)]


@pytest.fixture(params=["bytes", "bpe"])
def tokenizer(request):
    return ByteTokenizer() if request.param == "bytes" else train_bpe(TEXTS, 200)


def test_round_trip(tokenizer, tmp_path) -> None:
    tokenizer.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.vocab_size == tokenizer.vocab_size
    for text in TEXTS[:50]:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text and loaded.encode(text) == ids
        assert all(2 < i < tokenizer.vocab_size for i in ids) and len(tokenizer.tokens(ids)) == len(ids)


def test_eos_ends_and_pad_is_skipped(tokenizer) -> None:
    ids = tokenizer.encode("fünf")
    assert tokenizer.decode([0, *ids, 0, 1, *ids]) == "fünf"


def test_unknown_text() -> None:
    assert 2 in train_bpe(TEXTS, 200).encode("漢")
    assert ByteTokenizer().decode(ByteTokenizer().encode("漢 \n")) == "漢 \n"


def test_damaged_files(tmp_path) -> None:
    with pytest.raises(ValueError, match="tokenizer.json, which isn't there"):
        load_tokenizer(tmp_path)
    train_bpe(TEXTS, 200).save(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text(encoding="utf-8")[:500], encoding="utf-8")
    with pytest.raises(ValueError, match="is damaged or no tokenizer"):
        load_tokenizer(tmp_path)
