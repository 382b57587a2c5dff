"""A text is cut only where the ids cannot depend on it; where that isn't known, it is not cut."""

from __future__ import annotations

import random
import re
import unicodedata

import pytest

from fastformer.data import cuts, streams
from fastformer.data.tokenizer import cuts_of
from tests.data import odd_tokenizers
from tests.data.odd_texts import random_text

pytest.importorskip("sentencepiece", reason="of the extra sentencepiece")

WORDS = [
    "the",
    "old",
    "tree",
    "Blue",
    "don't",
    "dog",
    "größer",
    "кот",
    "1234",
    "sees.",
    "漢字",
    "é",
    "가나",
    "<x>",
    "e",
]
SPACES = [*" " * 12, "\n", "\n\n", "  ", " \n ", "\t", "\r\n", "\x85", "\u2028", "\u00a0", "\u3000", "- ", ""]


def text_of(chooser: random.Random, words: int) -> str:
    odd = [random_text(chooser) for _ in range(3)]
    parts = [chooser.choice(WORDS) + chooser.choice(SPACES) + chooser.choice([""] * 30 + odd) for _ in range(words)]
    return "".join(parts)


@pytest.mark.parametrize("name", odd_tokenizers.NAMES)
def test_ids_of_pieces_are_those_of_the_whole(name, monkeypatch) -> None:
    monkeypatch.setattr(cuts, "PIECE", 7)
    tokenizer, chooser = odd_tokenizers.tokenizer(name), random.Random(name)
    known = odd_tokenizers.FOREIGN.get(name, ([], [], name in odd_tokenizers.OWN or name == "added words"))[2]
    known &= name != "bpe, collapse, user tokens"
    assert (cuts_of(tokenizer) is not None) == known
    for _ in range(40):
        text = text_of(chooser, 60)
        pieces = tokenizer.pieces(text)
        assert [i for ids in tokenizer.encode_batch(pieces) for i in ids] == tokenizer.encode_batch([text])[0], text
        assert (len(pieces) > 2) == known


def test_letters_are_letters_in_every_form() -> None:
    letters = re.findall(f"[{cuts.LETTERS}]", "".join(map(chr, range(0xD800))))
    assert len(letters) > 11_000
    for letter in letters:
        for form in ("NFC", "NFD", "NFKC", "NFKD"):
            for changed in (unicodedata.normalize(form, case) for case in (letter, letter.lower())):
                assert {unicodedata.ucd_3_2_0.category(changed[place])[0] for place in (0, -1)} == {"L"}


@pytest.mark.parametrize("text", ["word " * 40, "line\n" * 40, "ab" * 80])
def test_a_document_that_cannot_be_cut_is_whole_or_refused(tmp_path, monkeypatch, text) -> None:
    monkeypatch.setattr(streams, "TEXT", 20)
    monkeypatch.setattr(cuts, "WHOLE", 250)
    file = tmp_path / "a.txt"
    file.write_text(text)
    (block,) = streams.stream_documents(str(file), None)
    assert block.passages == [(text, True)]
    file.write_text(text * 2)
    with pytest.raises(ValueError, match=r"a\.txt.*\b250\b"):
        list(streams.stream_documents(str(file), None))
    assert len([*streams.stream_documents(str(file), cuts.ANYWHERE)]) > 4
