"""Tokenizers of other programs work under fastformer's special ids, and a run needs no other file."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from fastformer.data import Tokenizer, load_tokenizer, train_bpe
from fastformer.data.backend import ForeignIds, Renumbered
from fastformer.data.huggingface import LibraryBackend
from fastformer.data.pieces import PieceBackend
from fastformer.data.tokenizer_files import count_unknown
from fastformer.special_ids import SpecialIds

TEXTS = ["a man walks a dog", "two men walk two dogs", "the dog walks the man </s> [PAD]"] * 20


def byte_level(special: list[str]) -> tokenizers.Tokenizer:
    """Makes a tokenizer like GPT-2's, with the special tokens at the end."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(TEXTS, trainer)
    backend.add_special_tokens(special)
    return backend


def word_piece() -> tokenizers.Tokenizer:
    """Makes a tokenizer like BERT's without lower-casing: [CLS] and [SEP] around the text, with padding and truncation
    saved.
    """
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    special = ["[UNK]", "[CLS]", "[SEP]", "[PAD]"]
    backend.train_from_iterator(
        TEXTS[:2], trainers.WordPieceTrainer(vocab_size=60, special_tokens=special, show_progress=False)
    )
    backend.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    backend.enable_padding(length=12, pad_id=3, pad_token="[PAD]")
    backend.enable_truncation(4)
    return backend


def saved(folder: Path, backend: tokenizers.Tokenizer, **config: object) -> Path:
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_special_ids_come_first_and_nothing_else_moves(tmp_path) -> None:
    backend = word_piece()
    tokenizer = load_tokenizer(saved(tmp_path, backend))
    assert tokenizer.vocab_size == backend.get_vocab_size()
    # theirs: UNK 0, CLS 1, SEP 2, PAD 3, and then the rest; ours: PAD, SEP (the end), UNK, CLS, the rest
    text = "a dog walks two men"
    theirs = tokenizers.Tokenizer.from_str(backend.to_str())
    theirs.no_truncation()
    theirs.no_padding()
    expected = theirs.encode(text, add_special_tokens=False).ids
    assert len(expected) > 4 and min(expected) > 3
    assert tokenizer.encode(text) == expected  # untouched by truncation, padding and [CLS] ... [SEP]
    assert tokenizer.decode([0, *expected, 1, *expected]) == text
    assert tokenizer.tokens([0, 1, 2, 3]) == ["<pad>", "</s>", "<unk>", "[CLS]"]
    one, two, three, *_ = expected
    middle = tokenizer.decode([two])
    tokenizer.special_ids = SpecialIds(pad=one, eos=(1, three))
    assert tokenizer.decode(expected) == tokenizer.decode([two, 1, one]) == middle
    tokenizer.special_ids = SpecialIds(unk=one)
    assert tokenizer.decode([one, two]) == middle
    tokenizer.special_ids = SpecialIds()
    assert 1 not in tokenizer.encode("a [SEP] dog") and 0 not in tokenizer.encode("a [PAD] dog")


def test_special_ids_that_the_file_lacks_get_ids_of_their_own(tmp_path) -> None:
    backend = byte_level(["<|endoftext|>"])
    end = backend.token_to_id("<|endoftext|>")
    # As GPT-2's files are: one token is beginning, end, unknown and, after a common recipe, padding too.
    names = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), "<|endoftext|>")
    tokenizer = load_tokenizer(saved(tmp_path, backend, **names))
    assert tokenizer.vocab_size == backend.get_vocab_size() + 2
    for text in ("two dogs\n\n  漢😀", "x<|endoftext|>y", "</s><pad>"):
        theirs = backend.encode(text.replace("<|", "<\0|")).ids  # they would read the special token
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text and not {0, 1, 2} & set(ids)
        if "<|" not in text:
            # PAD and UNK are new, the end moved to 1, and the others follow in their order.
            assert ids == [i + 3 - (i > end) for i in theirs]


@pytest.mark.parametrize(
    ("config", "mapped", "pad", "eos", "unk"),
    [
        ({}, {}, None, "</s>", "<unk>"),
        ({"eos_token": "<end>", "pad_token": {"content": "<fill>", "special": True}}, {}, "<fill>", "<end>", "<unk>"),
        ({"sep_token": "<end>"}, {}, None, "<end>", "<unk>"),
        ({"eos_token": "not there"}, {}, None, "</s>", "<unk>"),
        ({"pad_token": "<unk>"}, {}, None, "</s>", "<unk>"),
        ({"unk_token": "<fill>", "pad_token": "<end>", "eos_token": "<end>"}, {}, None, "<end>", "<fill>"),
        ({"eos_token": "<end>"}, {"pad_token": "<fill>", "eos_token": "</s>"}, "<fill>", "<end>", "<unk>"),
    ],
)
def test_names_of_special_tokens(tmp_path, config, mapped, pad, eos, unk) -> None:
    backend = byte_level(["<unk>", "<fill>", "<end>", "</s>"])
    saved(tmp_path, backend, **config)
    if mapped:
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(mapped))
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    theirs = [None if name is None else backend.token_to_id(name) for name in (pad, eos, unk)]
    assert isinstance(tokenizer.backend, Renumbered) and tokenizer.backend.inner_ids[:3] == theirs
    rest = [i for i in range(backend.get_vocab_size()) if i not in theirs]
    assert tokenizer.backend.inner_ids[3:] == rest


@pytest.mark.parametrize(
    "model",
    [
        models.WordLevel({"a": 0, "<what>": 1, "b": 2}, unk_token="<what>"),
        models.Unigram([("a", -1.0), ("<what>", 0.0), ("b", -1.0)], unk_id=1),
    ],
)
def test_the_model_names_its_unknown_token(tmp_path, model) -> None:
    tokenizer = load_tokenizer(saved(tmp_path, tokenizers.Tokenizer(model)))
    assert isinstance(tokenizer.backend, Renumbered) and tokenizer.backend.inner_ids == [None, None, 1, 0, 2]
    assert [tokenizer.encode(text) for text in ("a", "b", "x")] == [[3], [4], [2]]


def test_a_run_needs_no_other_file(tmp_path) -> None:
    for place, backend in enumerate((byte_level(["<end>"]), word_piece())):
        original = saved(tmp_path / f"original{place}", backend, eos_token="<end>")
        tokenizer, run = load_tokenizer(original), tmp_path / f"run{place}"
        run.mkdir()
        tokenizer.save(run)
        for file in original.iterdir():
            file.unlink()
        loaded = load_tokenizer(run)
        assert isinstance(tokenizer.backend, Renumbered) and isinstance(loaded.backend, Renumbered)
        assert loaded.vocab_size == tokenizer.vocab_size and loaded.backend.inner_ids == tokenizer.backend.inner_ids
        text = "two dogs walk a man 漢"
        assert loaded.encode(text) == tokenizer.encode(text)
        assert loaded.decode(loaded.encode(text)) == tokenizer.decode(tokenizer.encode(text))


def test_unknown_parts_are_named(tmp_path) -> None:
    tokenizer = load_tokenizer(saved(tmp_path, word_piece()))
    texts = ["a 漢字 dog 😀", "a dog"]
    assert count_unknown(tokenizer, texts, tokenizer.encode_batch(texts)) == dict.fromkeys("漢字😀", 1)
    # Without an unknown token this library leaves out what it doesn't know.
    silent = Tokenizer(
        Renumbered(LibraryBackend(tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1}, []))), ForeignIds(None, None, None))
    )
    assert count_unknown(silent, ["ab xa x"], silent.encode_batch(["ab xa x"])) == {"x": 2}


@pytest.fixture(scope="module")
def sentencepiece_model() -> bytes:
    sentencepiece = pytest.importorskip("sentencepiece", reason="the sentencepiece library is not installed")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_writer=model, vocab_size=24, minloglevel=2
    )
    return model.getvalue()


def test_sentencepiece(tmp_path, sentencepiece_model) -> None:
    import sentencepiece

    file = tmp_path / "spiece.model"
    file.write_bytes(sentencepiece_model)
    processor = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model)
    assert (processor.unk_id(), processor.bos_id(), processor.eos_id(), processor.pad_id()) == (0, 1, 2, -1)
    tokenizer = load_tokenizer(file)
    assert tokenizer.vocab_size == 25  # with a PAD
    text = "two men walk the dog"
    # theirs: UNK 0, BOS 1, EOS 2, the rest from 3; ours: PAD, EOS, UNK, BOS, the rest from 4
    assert tokenizer.encode(text) == [i + 1 for i in processor.encode(text)]
    assert tokenizer.encode_batch([text, "a"]) == [tokenizer.encode(text), tokenizer.encode("a")]
    assert tokenizer.decode([0, *tokenizer.encode(text), 1, 9]) == text
    assert tokenizer.tokens([3, *tokenizer.encode("dog")[:1]])[0] == "<s>"
    strange = "a 漢字 man"
    assert count_unknown(tokenizer, [strange], [tokenizer.encode(strange)]) == {"漢": 1, "字": 1}
    assert tokenizer.decode(tokenizer.encode(strange)).split() == ["a", "man"]
    run = tmp_path / "run"
    run.mkdir()
    tokenizer.save(run)
    assert load_tokenizer(tmp_path).encode(text) == tokenizer.encode(text)  # a folder with the one model
    file.unlink()
    loaded = load_tokenizer(run)
    assert loaded.encode(text) == tokenizer.encode(text) and loaded.vocab_size == 25
    with pytest.raises(ValueError, match="lone surrogate"):
        tokenizer.encode("\udcff")


def test_missing_parts_are_named(tmp_path, sentencepiece_model) -> None:
    with pytest.raises(ValueError, match="nothing"):
        load_tokenizer(tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"\btokenizer\.json\b"):
        load_tokenizer(tmp_path)
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(ValueError, match=r"\btokenizer\.json\b.*AutoTokenizer.*save_pretrained"):
        load_tokenizer(tmp_path)
    for name in ("a.model", "b.model"):
        (tmp_path / name).write_bytes(b"no model")
    with pytest.raises(ValueError, match=r"\bSentencePiece\b.*\bgot 2\b"):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match=r"\bSentencePiece\b.*a\.model"):
        load_tokenizer(tmp_path / "a.model")
    file = tmp_path / "tokenizer.json"
    for text, named in (
        ('{"model_type": "bert"}', "'model'.*'model_type'"),
        ("[1]", r"tokenizer\.json"),
        ("[" * 100_000, r"tokenizer\.json"),
        ('{"version": "1.0", "model": {"type": "Foo"}}', r"tokenizer\.json"),
        ('{"type": "foreign", "library": "tokenizers", "model": {}}', r"tokenizer\.json"),
        ('{"type": "foreign", "library": "sentencepiece", "special_ids": {}, "model": "!"}', r"tokenizer\.json"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=named):
            load_tokenizer(tmp_path)
    whole = train_bpe(TEXTS, 60).backend.tokenizer.to_str(pretty=True)
    for cut in (0, 500, len(whole) - 5):
        file.write_text(whole[:cut])
        with pytest.raises(ValueError, match=r"tokenizer\.json"):
            load_tokenizer(tmp_path)


def test_impossible_ids(tmp_path) -> None:
    model = LibraryBackend(byte_level([]))
    size = model.size
    for ids in (ForeignIds(1, 1, None), ForeignIds(None, size, None), ForeignIds(-1, None, None)):
        with pytest.raises(ValueError, match=rf"\bspecial ids\b.*\b{size}\b"):
            Renumbered(model, ids)
    chooser = random.Random(0)
    for _ in range(20):
        pad, eos, unk = chooser.sample(range(size), 3)
        inner_ids = Renumbered(model, ForeignIds(pad, eos, unk)).inner_ids
        assert len(inner_ids) == size and set(inner_ids) == set(range(size))


def exploding(kind: str) -> tokenizers.Tokenizer:
    """Makes a tokenizer with a regular expression that fails on forty letters."""
    backend = byte_level(["</s>"])
    pattern = tokenizers.Regex("(a+)+$")
    if kind == "pre_tokenizer":
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(pattern, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif kind == "normalizer":
        backend.normalizer = normalizers.Replace(pattern, "b")
    else:
        backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse(), decoders.Replace(pattern, "b")])
    return backend


@pytest.mark.parametrize("kind", ["pre_tokenizer", "normalizer", "decoder"])
def test_a_regular_expression_that_gives_up_is_a_value_error(kind, tmp_path) -> None:
    text = "a" * 40 + "!"
    as_it_was = load_tokenizer(saved(tmp_path / "one", exploding(kind)))
    as_it_was.save(tmp_path)
    ids = SpecialIds(pad=398, eos=399, unk=None)
    bart = Tokenizer(LibraryBackend(exploding(kind), "the bart"), ids, "translator", vocab_size=400)
    found = ((as_it_was, "one/tokenizer.json"), (load_tokenizer(tmp_path), "json"), (bart, "the bart"))
    for tokenizer, name in found[:1] if kind == "normalizer" else found:  # half a second each
        with pytest.raises(ValueError, match=name) as caught:
            tokenizer.decode(tokenizer.encode(text))
        assert not isinstance(caught.value.__cause__, Exception)  # it would have passed any `except Exception`
        assert tokenizer.decode(tokenizer.encode("good")) == "good"
    if kind == "pre_tokenizer":
        with pytest.raises(ValueError, match=r"one/tokenizer\.json.*'aaaa"):
            as_it_was.encode_batch(["good", text])


def test_an_id_far_beyond_the_tokens_is_refused(tmp_path, monkeypatch) -> None:
    whole = json.loads(byte_level(["</s>"]).to_str())
    vocab = whole["model"]["vocab"]
    far = {**whole["model"], "vocab": {**vocab, "zzz": 2**31}}
    added = [{**whole["added_tokens"][0], "id": 2**31 - 5}]
    saved_by_us = {"special_ids": {"pad": None, "eos": None, "unk": None}, "library": "tokenizers", "type": "foreign"}
    monkeypatch.setattr(tokenizers.Tokenizer, "from_str", lambda text: pytest.fail("it was read"))
    for values in ({**whole, "model": far}, {**whole, "added_tokens": added}, {**saved_by_us, "model": {"model": far}}):
        (tmp_path / "tokenizer.json").write_text(json.dumps(values))
        with pytest.raises(ValueError, match=r"tokenizer\.json\b.*\b2147483"):
            load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "spiece.model", "special_tokens_map.json"])
def test_a_file_of_gigabytes_is_not_read(name, tmp_path) -> None:
    (tmp_path / "tokenizer.json").write_text(byte_level(["</s>"]).to_str())
    with (tmp_path / name).open("ab") as file:
        file.truncate(30 << 30)
    with pytest.raises(ValueError, match=name):
        load_tokenizer(tmp_path / name if name == "spiece.model" else tmp_path)


def test_ids_with_gaps_are_accepted(tmp_path) -> None:
    backend = json.loads(byte_level(["</s>"]).to_str())
    backend["model"]["vocab"]["zzz"] = 1000
    (tmp_path / "tokenizer.json").write_text(json.dumps(backend))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode("two dogs")) == "two dogs"
    assert tokenizer.vocab_size == 1001 + 2  # and two special ids


def test_invalid_ids_are_refused(tmp_path, sentencepiece_model) -> None:
    (tmp_path / "a.model").write_bytes(sentencepiece_model)
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model)
    pieces = {processor.id_to_piece(i): i for i in range(processor.get_piece_size())}
    ids = SpecialIds(pad=24, eos=2, unk=0, start=24)
    found: list[Any] = [
        load_tokenizer(saved(tmp_path / "hf", byte_level(["</s>"]))),
        load_tokenizer(tmp_path / "a.model"),
        Tokenizer(PieceBackend(processor), ids, "translator", vocab_size=30),
        Tokenizer(PieceBackend(processor, pieces, 0), ids, "translator", vocab_size=25),
        Tokenizer(LibraryBackend(byte_level([])), role="translator", vocab_size=400),
    ]
    for tokenizer in found:
        calls = [tokenizer.decode, tokenizer.tokens, *([tokenizer.source_tokens] if tokenizer is found[3] else [])]
        for wrong in ([tokenizer.vocab_size], [-1], [2**40], [5.0], ["5"], "5", 5):
            for call in calls:
                with pytest.raises(ValueError, match=r"\bids\b"):
                    call(wrong)
        assert isinstance(tokenizer.decode([tokenizer.vocab_size - 1]), str)


def test_unknown_characters_are_never_a_special_token() -> None:
    sentencepiece = pytest.importorskip("sentencepiece", reason="the sentencepiece library is not installed")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["abc cab bca", "bac"] * 20), model_writer=model, vocab_size=9, minloglevel=2,
        hard_vocab_limit=False,
    )  # fmt: skip
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    vocab = {"<pad>": 0, "</s>": 1, "<unk>": 2, "<s>": 3, "▁": 4} | {letter: 5 + i for i, letter in enumerate("abc漢")}
    tokenizer = Tokenizer(PieceBackend(processor, vocab, 2), role="translator")
    assert processor.encode("a </s>", out_type=str)[-1] == "</s>"  # characters that it lacks are a piece together
    for special in ("</s>", "<s>", "<pad>"):
        assert tokenizer.encode(f"a {special}")[-1] == 2
    assert tokenizer.encode("漢")[-1] == 8  # a piece that only the table has, as in transformers
