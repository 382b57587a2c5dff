"""For translators, a tokenizer pair (one for each side) is a single tokenizer in a single file."""

from __future__ import annotations

import json

import pytest

from fastformer.data import ByteTokenizer, PairTokenizer, load_tokenizer, train_bpe
from fastformer.special_ids import SpecialIds

SOURCES, TARGETS = ["one two three"] * 20, ["eins zwei drei vier", "fünf sechs"] * 20


def test_each_side_has_its_own(tmp_path) -> None:
    source, target = train_bpe(SOURCES, 30, spaces="collapse"), train_bpe(TARGETS, 60, normalization="lower")
    pair = PairTokenizer(source, target)
    pair.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert isinstance(loaded, PairTokenizer)
    for each in (pair, loaded):
        assert (each.source_vocab_size, each.vocab_size) == (source.vocab_size, target.vocab_size)
        assert each.vocab_size != each.source_vocab_size and each.special_ids == SpecialIds()
        assert each.encode("two  one ") == source.encode("two one") == each.encode_batch(["two one"])[0]
        assert each.encode_target("Zwei") == target.encode("zwei") != each.encode("zwei")
        assert each.decode(target.encode("fünf")) == "fünf" and each.tokens([259]) == target.tokens([259])
        assert each.source_tokens(source.encode("two")) == source.tokens(source.encode("two"))
        assert each.pieces("a\nb") == ["a\nb"] and each.words_begin_with_space
    assert not PairTokenizer(source, ByteTokenizer()).words_begin_with_space
    for call, size in ((pair.decode, target.vocab_size), (pair.source_tokens, source.vocab_size)):
        with pytest.raises(ValueError, match=rf"\bids\b.*\b{size}\b"):
            call([size])


def test_invalid_pairs(tmp_path) -> None:
    pair = PairTokenizer(ByteTokenizer(), ByteTokenizer())
    for sides in ((pair, ByteTokenizer()), (ByteTokenizer(), pair)):
        with pytest.raises(ValueError, match=r"\bvocabular"):
            PairTokenizer(*sides)
    with pytest.raises(ValueError, match=r"\bTokenizer\b.*\bstr\b"):
        PairTokenizer(ByteTokenizer(), "bytes")
    other = ByteTokenizer()
    other.special_ids = SpecialIds(pad=7)
    with pytest.raises(ValueError, match=r"\bspecial ids\b"):
        PairTokenizer(ByteTokenizer(), other)
    pair.save(tmp_path)
    file = tmp_path / "tokenizer.json"
    values = json.loads(file.read_text())
    for damaged in ({"type": "pair"}, {**values, "source": 3}, {**values, "target": values}, {**values, "source": {}}):
        file.write_text(json.dumps(damaged))
        with pytest.raises(ValueError, match=r"tokenizer.json"):
            load_tokenizer(tmp_path)
