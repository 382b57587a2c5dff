"""The bytes of tokens, joined, are the text that they add, for every kind of tokenizer that continues prompts."""

from __future__ import annotations

import random

import pytest

from fastformer.data import Tokenizer
from fastformer.data.huggingface import LibraryBackend
from tests.generation.detokenizers import LINES, detokenizer

KINDS = ("bytes", "bpe", "byte level", "byte fallback", "sentencepiece")


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_tokens_are_the_text_that_they_add(kind, tmp_path_factory) -> None:
    tokenizer, draw = detokenizer(kind, tmp_path_factory.mktemp("tokenizer")), random.Random(0)
    data = tokenizer.token_bytes
    assert len(data) == tokenizer.vocab_size
    assert not any(data[i] for i in tokenizer.special_ids.eos)
    usable = [i for i, one in enumerate(data) if one]
    missing = {bytes([byte]) for byte in range(256)} - {data[i] for i in usable}
    assert missing <= {b"\n"}  # every text can be written; a BPE of ours omits a space behind the end of a line
    begin = [i for i in usable if data[i] == b"a"][-1]  # the first one may be a byte of an incomplete character
    spaced = next(i for i in usable if (data[i] or b"").startswith(b" "))
    for i in usable:
        if data[i] == b"\n":
            assert tokenizer.decode([begin, i, spaced]).encode() == b"a\n" + (data[spaced] or b"")
    for number in range(200):
        if number % 2:
            ids = [i for i in tokenizer.encode(draw.choice(LINES)) if data[i]]
        else:
            ids = draw.choices(usable, k=draw.randrange(1, 4))
        expected = b"a" + b"".join(data[i] or b"" for i in ids)
        text = tokenizer.decode([begin, *ids])
        if "\ufffd" not in expected.decode("utf-8", "replace"):
            assert text.encode() == expected


def test_a_tokenizer_that_changes_words_by_their_neighbours_has_no_bytes() -> None:
    library = pytest.importorskip("tokenizers")
    for decoder in (library.decoders.WordPiece(), library.decoders.BPEDecoder(), None):
        backend = library.Tokenizer(library.models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
        if decoder is not None:
            backend.decoder = decoder
        with pytest.raises(ValueError, match="decode"):
            _ = Tokenizer(LibraryBackend(backend)).token_bytes
