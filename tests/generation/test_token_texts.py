"""The texts of tokens, joined, are the text of all of them, and so are their bytes."""

from __future__ import annotations

import random

import pytest

from fastformer.generation.streaming import ScoredToken
from fastformer.generation.token_texts import SpelledToken, TokenTexts
from tests.generation.detokenizers import KINDS, LINES, detokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tokenizer")


def spelled(tokenizer, ids, begin=(), others=()) -> list[SpelledToken]:
    texts, found = TokenTexts(tokenizer, begin), []
    for token in ids:
        found += texts.add([ScoredToken(token, 0.0, [(other, 0.0) for other in others])])
    return found + texts.end()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("words", "marian")])
def test_texts_and_bytes_of_tokens_join_to_the_text(kind, folder) -> None:
    tokenizer, draw = detokenizer(kind, folder), random.Random(0)
    size = tokenizer.vocab_size
    for number in range(150):
        ids = tokenizer.encode(draw.choice(LINES)) if number % 2 else [draw.randrange(3, size) for _ in range(30)]
        place = draw.randrange(0, 8)
        if number % 3 == 0:
            ids[place + 2 : place + 2] = [draw.randrange(3, size), 0]  # a special token between others
        begin, new = ids[:place], ids[place:]
        before, text = tokenizer.decode(begin), tokenizer.decode(ids)
        found = spelled(tokenizer, new, begin)
        assert [one.scored.token for one in found] == new
        if text.startswith(before):  # else the first new token completes a character of the prompt
            assert before + "".join(one.spelled.text for one in found) == text
            data = [one.spelled.data for one in found]
            said = b"".join(each or b"" for each in data).decode("utf-8", "replace")
            assert before + said == text or "\ufffd" in text, (ids, data)


def test_a_space_belongs_to_the_token_that_begins_with_it(folder) -> None:
    tokenizer = detokenizer("sentencepiece", folder)
    begin, new = tokenizer.encode("the then"), tokenizer.encode("there and")
    assert "".join(one.spelled.shown for one in spelled(tokenizer, new, begin)) == " there and"
    assert "".join(one.spelled.shown for one in spelled(tokenizer, new)) == "there and"


@pytest.mark.parametrize("kind", ["bytes", "bpe", "byte level", "byte fallback", "sentencepiece"])
def test_a_character_of_several_tokens_has_the_bytes_of_each(kind, folder) -> None:
    tokenizer = detokenizer(kind, folder)
    begin, new = tokenizer.encode("the "), tokenizer.encode("the 漢")[len(tokenizer.encode("the ")) :]
    *first, last = spelled(tokenizer, new, begin, others=new)
    assert last.spelled.text == "漢" and not any(one.spelled.text for one in first) and first
    data = [one.spelled.data for one in (*first, last)]
    assert b"".join(data) == "漢".encode() and all(data)
    cut = spelled(tokenizer, new[:1], begin)
    assert [(one.spelled.text, one.spelled.data) for one in cut] == [("\ufffd", data[0])]
    # Each of the tokens in the last one's stead: it alone ends the character.
    assert [other.data for other in last.alternatives] == data
    assert [other.text.count("漢") for other in last.alternatives] == [0] * len(first) + [1]


class Watched:
    """A tokenizer that notes the most ids that it decoded at once."""

    def __init__(self, tokenizer) -> None:
        self.tokenizer, self.most = tokenizer, 0

    def decode(self, ids) -> str:
        self.most = max(self.most, len(ids))
        return self.tokenizer.decode(ids)

    def __getattr__(self, name: str):
        return getattr(self.tokenizer, name)


@pytest.mark.parametrize("kind", ["bytes", "bpe", "byte level", "byte fallback", "sentencepiece"])
def test_a_long_run_without_characters_is_not_decoded_again_and_again(kind, folder) -> None:
    tokenizer = Watched(detokenizer(kind, folder))
    begin, whole = tokenizer.encode("the "), tokenizer.encode("the 漢")
    part = whole[len(begin)]  # the first byte of a character
    for run in ([part] * 400, [0] * 400):
        new = [*run, *tokenizer.encode("there")]
        found = spelled(tokenizer, new, begin)
        assert tokenizer.most < 100 and [one.scored.token for one in found] == new
        assert tokenizer.decode(begin) + "".join(one.spelled.text for one in found) == tokenizer.decode([*begin, *new])
        tokenizer.most = 0


@pytest.mark.parametrize("kind", ["bytes", "bpe", "byte level", "byte fallback", "sentencepiece"])
def test_a_long_run_of_bytes_has_whole_characters(kind, folder) -> None:
    tokenizer = detokenizer(kind, folder)
    for text in ("漢" * 70, "é" * 150, "aé漢" * 40):
        found = spelled(tokenizer, tokenizer.encode(text))
        assert "".join(one.spelled.text for one in found) == tokenizer.decode(tokenizer.encode(text))
