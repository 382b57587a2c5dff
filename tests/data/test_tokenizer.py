"""Tokenizers preserve texts, ids and files."""

from __future__ import annotations

import json
import random
import re
import unicodedata

import pytest
import torch

from fastformer.data import ByteTokenizer, PairTokenizer, Tokenizer, load_tokenizer, train_bpe
from fastformer.number_words import english, german, number_pairs
from fastformer.special_ids import SpecialIds
from tests.data.odd_texts import random_text

TEXTS = [words(n) for n in number_pairs(500, seed=0) for words in (english, german)]


@pytest.fixture(params=["bytes", "bpe"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return ByteTokenizer() if request.param == "bytes" else train_bpe(TEXTS, 200)


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


def test_any_eos_ends_and_the_tokenizers_pad_is_skipped(tokenizer) -> None:
    assert tokenizer.special_ids == SpecialIds()
    ids = tokenizer.encode("fünf")
    assert tokenizer.decode([0, *ids, 0, 1, *ids]) == tokenizer.decode([2, *ids, 2]) == "fünf"
    tokenizer.special_ids = SpecialIds(pad=5, eos=(6, 7))  # in both they are bytes, which would be text
    for end in (6, 7):
        assert tokenizer.decode([5, *ids, 5, end, *ids]) == "fünf"


def test_texts_may_come_as_any_iterable(tokenizer) -> None:
    trained, again = train_bpe(TEXTS, 200), train_bpe((text for text in TEXTS), 200)
    assert trained.tokens(range(456)) == again.tokens(range(456))
    assert tokenizer.encode_batch(("one", "two")) == [tokenizer.encode("one"), tokenizer.encode("two")]
    assert tokenizer.encode_batch([]) == []


def test_lone_surrogates_are_refused(tokenizer) -> None:
    for call in (tokenizer.encode, lambda text: tokenizer.encode_batch(["a", text]), lambda text: train_bpe([text], 9)):
        with pytest.raises(ValueError, match=r"\bU\+DCFF\b.*\b2\b"):
            call("ab\udcff")


def test_invalid_ids_are_refused(tokenizer) -> None:
    size = tokenizer.vocab_size
    for ids in ([size], [9, -1], [2**40], [9.0], ["9"], [None], [torch.tensor([9, 9])], "9", b"9", 9, torch.tensor(9)):
        for call in (tokenizer.decode, tokenizer.tokens):
            with pytest.raises(ValueError, match=r"\bids\b"):
                call(ids)
    assert tokenizer.decode([9, 1, size]) == tokenizer.decode([9])  # what stands behind the end is not read
    assert tokenizer.decode(torch.tensor([size - 1])) == tokenizer.decode([size - 1])


def user_defined(kind: str, tokens: list[str], *, drop: bool = False, **options: str) -> Tokenizer:
    if kind == "bytes":
        return ByteTokenizer(tokens, drop_user_tokens=drop)
    return train_bpe(
        [*TEXTS, "<2de> one <2fr> eins"], 200, user_tokens=tokens, drop_user_tokens=drop, spaces=kind, **options
    )


TAGS = ["<2de>", "<2fr>", "<2de>x", "[½]", "ß"]


@pytest.mark.parametrize("kind", ["bytes", "keep", "collapse"])
def test_user_tokens_are_neither_split_nor_normalised(kind, tmp_path) -> None:
    tokenizer = user_defined(kind, TAGS)
    single = {tag: tokenizer.encode(tag) for tag in TAGS}
    assert all(len(ids) == 1 for ids in single.values()) and len(set(map(tuple, single.values()))) == len(TAGS)
    assert max(max(ids) for ids in single.values()) < tokenizer.vocab_size
    tokenizer.save(tmp_path)
    loaded, chooser = load_tokenizer(tmp_path), random.Random(4)
    texts = ["<2de> one", "one<2de>", "(<2fr>)", "one <2de><2de>x\ntwo\n<2fr> x", "<2d e>", "<2DE>", "a\n<2de>\nb"]
    texts += ["".join(chooser.choice([*TAGS, "one", " ", "\n", "ﬁ", "<2"]) for _ in range(12)) for _ in range(200)]
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        parts = re.split("(<2de>x|<2de>|<2fr>|\\[½\\]|ß)", text)
        if kind != "bytes":
            parts[::2] = [unicodedata.normalize("NFKC", part) for part in parts[::2]]
        if kind == "collapse":
            parts = [re.sub(" *\n *", "\n", re.sub("  +", " ", part)) for part in parts]
            parts[0], parts[-1] = parts[0].lstrip(), parts[-1].rstrip()
        assert tokenizer.decode(ids) == loaded.decode(ids) == "".join(parts), text
        assert loaded.encode(text) == tokenizer.encode(text) == ids
        found = [tokenizer.tokens([i])[0] for i in ids if [i] in single.values()]
        assert found == parts[1::2], text


@pytest.mark.parametrize("kind", ["bytes", "keep", "collapse"])
def test_user_tokens_may_be_omitted_from_texts(kind, tmp_path) -> None:
    tokenizer = user_defined(kind, ["<2de>", "<2fr>"], drop=True)
    tokenizer.save(tmp_path)
    for each in (tokenizer, load_tokenizer(tmp_path)):
        ids = each.encode("<2de>one two")
        assert each.decode(ids) == "one two" and each.decode(ids[:1]) == "" and each.tokens(ids)[0] == "<2de>"
        assert each.decode(each.encode("one<2fr> two")) == "one two"
        assert ids == user_defined(kind, ["<2de>", "<2fr>"]).encode("<2de>one two")
    if kind == "collapse":
        assert tokenizer.decode(tokenizer.encode("<2de> one two")) == "one two"


@pytest.mark.parametrize("tokens", ["<2de>", [""], ["a b"], ["</s>"], ["<0x4a>"], ["x", "x"], ["\udcff"], [3]])
def test_impossible_user_tokens(tokens) -> None:
    for make in (ByteTokenizer, lambda tokens: train_bpe(TEXTS, 200, user_tokens=tokens)):
        with pytest.raises(ValueError, match="expected"):
            make(tokens)


def test_a_learned_token_is_never_a_user_token() -> None:
    # Lower case, the text spells the user token "<x>", which has to stay another one.
    bpe = train_bpe(["one <X> two"] * 50, 60, normalization="lower", user_tokens=["<x>"])
    assert bpe.decode(bpe.encode("one <X>")) == "one <x>" and bpe.encode("<x>")[0] not in bpe.encode("one <X>")
    with pytest.raises(ValueError, match="user tokens.*'x'"):
        train_bpe(["one X two"] * 50, 60, normalization="lower", user_tokens=["x"])


def test_damaged_bytes(tmp_path) -> None:
    for values in ({"user_tokens": 3}, {"user_tokens": [""]}, {"user_tokens": ["a"], "drop_user_tokens": 1}):
        (tmp_path / "tokenizer.json").write_text(json.dumps({"type": "bytes", **values}))
        with pytest.raises(ValueError, match="damaged|expected user tokens"):
            load_tokenizer(tmp_path)


@pytest.mark.parametrize("kind", [None, 3, ["bytes"], {"type": "bytes"}, "unknown"])
def test_a_type_that_no_tokenizer_has(kind, tmp_path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"type": kind}))
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


# For translators, a tokenizer pair (one for each side) is a single tokenizer in a single file.


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
