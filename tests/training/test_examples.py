"""Tests how files and settings become a run's examples."""

from __future__ import annotations

import dataclasses
import logging
import re
import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from fastformer.data import BPETokenizer, ByteTokenizer, load_tokenizer
from fastformer.number_words import english, german
from fastformer.training import TrainConfig, examples, start
from fastformer.training import trainer as trainer_module
from fastformer.training.examples import TrainingData, encode_all, load_data
from tests.training.tiny import SIZES

POEM = "Roses are red,\n\n  violets\x0bare blue\u2028;\nsugar is sweet\n"


def lines(path: Path, texts: list[str]) -> str:
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8", newline="")
    return str(path)


def texts_of(data: TrainingData, part: str) -> list[tuple[str, str]]:
    decode = data.tokenizer.decode
    return [(decode(example.source), decode(example.target)) for example in getattr(data, part)]


def test_held_out_examples_are_not_trained_on(tmp_path, caplog) -> None:
    pairs = [(f"s{i}", f"t{i}") for i in range(250)]
    tsv = lines(tmp_path / "a", ["\t".join(pair) for pair in pairs])
    source, target = (lines(tmp_path / name, [pair[i] for pair in pairs]) for i, name in enumerate("st"))
    drawn = set()
    for files in ({"train_tsv": tsv}, {"train_source": source, "train_target": target}):
        with caplog.at_level(logging.INFO):
            last = load_data(TrainConfig(**files, tokenizer="bytes", held_out="last"))
        assert texts_of(last, "train") == pairs[:-2] and texts_of(last, "val") == last.val_texts == pairs[-2:]
        assert "2 of 250" in caplog.text
        for seed in range(8):
            caplog.clear()
            with caplog.at_level(logging.INFO):
                data = load_data(TrainConfig(**files, tokenizer="bytes", seed=seed))
            assert f"seed {seed}" in caplog.text
            assert texts_of(data, "val") == data.val_texts and len(data.val_texts) == 2
            assert texts_of(data, "train") == [pair for pair in pairs if pair not in data.val_texts]
            drawn.add(tuple(data.val_texts))
    assert 6 <= len(drawn) <= 8  # by the seed, and the same for the same lines in other files


def test_copies_of_held_out_lines_are_not_trained_on(tmp_path) -> None:
    # Copies by the text, and lines that differ only by characters that the tokenizer lacks.
    pairs = [f"one {i % 10} {'one ' * (i // 10)}\tone" for i in range(100)]
    tokenizer = foreign(tmp_path / "foreign", ["one 0123456789"])
    for name, copies in (
        ("same", pairs),
        ("spaces", [pair.replace(" ", "  ") for pair in pairs]),
        ("case", [pair.replace("one", "One") for pair in pairs]),
        ("unknown", [pair.replace(" ", " 漢", 1) for pair in pairs]),
        ("other unknown", [pair.replace(" ", " 字", 1) for pair in pairs]),
    ):
        lost = [pair.replace(" ", " 語", 1) for pair in pairs] if "unknown" in name else pairs
        file = lines(tmp_path / name.replace(" ", ""), lost + copies)
        for held_out in ("random", "last"):
            data = load_data(TrainConfig(train_tsv=file, tokenizer=tokenizer, held_out=held_out, max_len=1000))
            train, val = ({(*e.source, 0, *e.target) for e in part} for part in (data.train, data.val))
            assert len(val) == 2 and not train & val and len(data.train) == 200 - 2 * len(val)
        data = load_data(TrainConfig(train_tsv=file, tokenizer="bpe", vocab_size=40, max_len=1000))
        held = {pair[0].casefold().replace(" ", "") for pair in data.val_texts}
        assert not held & {source.casefold().replace(" ", "") for source, _ in texts_of(data, "train")}


def test_the_random_split_has_not_changed(tmp_path) -> None:
    # A run that goes on asks for its held-out lines again, under another version perhaps.
    file = lines(tmp_path / "a", [f"s{i}\tt{i}" for i in range(400)])
    data = load_data(TrainConfig(train_tsv=file, tokenizer="bytes", seed=5))
    assert [source for source, _ in data.val_texts] == ["s249", "s296", "s318", "s376"]


def test_a_hundredth_of_each_corpus_is_held_out(tmp_path) -> None:
    files = [lines(tmp_path / name, [f"{name}{i}\tt" for i in range(n)]) for name, n in (("a", 300), ("b", 100))]
    for held_out in ("last", "random"):
        data = load_data(TrainConfig(train_tsv=",".join(files), tokenizer="bytes", held_out=held_out))
        assert [source[0] for source, _ in data.val_texts] == ["a", "a", "a", "b"]
        train = texts_of(data, "train")
        assert len(train) == 396 and not {*train} & {*data.val_texts} and data.weights is None


def test_corpora_have_weights(tmp_path, calls_of) -> None:
    long = "x" * 70
    files = [
        lines(tmp_path / name, [*(f"{name}{i}\tt" for i in range(n)), f"{long}\tt"]) for name, n in (("a", 3), ("b", 2))
    ]
    val = lines(tmp_path / "val", ["v\tt"])
    options = {"val_tsv": f"{val},{val}", "data_weights": "3,0.5", "tokenizer": "bytes", "max_len": 64}
    data = load_data(TrainConfig(train_tsv=",".join(files), **options))
    assert [source for source, _ in texts_of(data, "train")] == ["a0", "a1", "a2", "b0", "b1"]
    assert data.weights is not None and data.weights.tolist() == [3, 3, 3, 0.5, 0.5]  # long ones are left out
    assert data.val_texts == [("v", "t")] * 2
    config = TrainConfig(
        train_tsv=",".join(files), **options, settings=SIZES, epochs=4, max_tokens=9, device="cpu", val_examples=0
    )
    batches = calls_of(trainer_module, "collate")
    trainer = start(config, tmp_path / "run")
    assert trainer.config.steps >= 4 * 3  # nine to eleven examples in an epoch, three in a batch
    trainer.train()
    counts = Counter(data.tokenizer.decode(example.source) for batch in batches for example in batch.args[0])
    assert [counts[f"a{i}"] for i in range(3)] == [12] * 3 and 1 <= counts["b0"] + counts["b1"] <= 7


def test_texts_have_weights(tmp_path) -> None:
    (tmp_path / "b").mkdir()
    files = [lines(tmp_path / "a", ["x" * 99]), lines(tmp_path / "b" / "1.txt", ["y" * 49]) and str(tmp_path / "b")]
    config = TrainConfig(
        model="gpt", train_text=",".join(files), data_weights="1,4", tokenizer="bytes", seqlen=10, settings={}
    )
    data = load_data(config)
    assert data.weights is not None and data.weights.tolist() == [1.0] * 9 + [4.0] * 5
    texts = ["".join(data.tokenizer.tokens(example.target)) for example in data.train]
    assert texts[0] == "x" * 11 and texts[9] == "y" * 11
    assert data.val_characters == 10 + 5  # the last tenth of each


def test_filters_count_by_reason(tmp_path, caplog) -> None:
    file = lines(tmp_path / "a", ["one\teins", "two\ttwo", "one\teins", f"x\t{'y' * 50}", "three\tdrei"])
    options = {"train_tsv": file, "val_tsv": file, "tokenizer": "bytes", "drop_duplicates": True}
    with caplog.at_level(logging.INFO):
        data = load_data(TrainConfig(**options, drop_identical=True, max_length_ratio=4))
    assert texts_of(data, "train") == [("one", "eins"), ("three", "drei")] and len(data.val) == 5
    said = next(message for message in caplog.messages if message.startswith("filters left out 3 of 5"))
    assert all(part in said for part in ("1 duplicate", "1 with identical sides", "1 of a length ratio above 4"))
    assert "training text: 16 characters in 16 tokens (" in caplog.text and "validation text: 80 char" in caplog.text
    with pytest.raises(ValueError, match=r"\b5\b.*\b100\b"):
        load_data(TrainConfig(**options, min_chars=100))


@pytest.mark.parametrize("tokenizer", ["bpe", "bytes"])
def test_settings_of_the_tokenizer_stay_with_the_run(tmp_path, tokenizer) -> None:
    file = lines(tmp_path / "a", ["<2de> One 10²\tEins 10²", "<2fr>  One\tUn"] * 9)
    config = TrainConfig(
        train_tsv=file, tokenizer=tokenizer, vocab_size=60, normalization="lower", max_token_length=2, device="cpu",
        user_tokens="<2de>, <2fr>", drop_user_tokens=True, settings=SIZES,
    )  # fmt: skip
    start(config, tmp_path / "run")
    loaded = load_tokenizer(tmp_path / "run")
    ids = loaded.encode("<2de>  One 10² ")
    assert loaded.tokens(ids)[0] == "<2de>"
    if tokenizer == "bytes":
        assert loaded.decode(ids) == "  One 10² "
    else:
        assert loaded.decode(ids) == "one 10²" and max(map(len, loaded.tokens(range(259, loaded.vocab_size - 2)))) <= 2


def test_spaces_are_text_only_for_a_language_model(tmp_path) -> None:
    pairs, text = lines(tmp_path / "a", ["a  b\tc ", "b  a\td "] * 20), lines(tmp_path / "t", ["a  b "] * 40)
    for spaces, of_pairs, of_text in (("auto", "a b", "a  b "), ("keep", "a  b ", "a  b ")):
        translator = load_data(TrainConfig(train_tsv=pairs, vocab_size=20, spaces=spaces)).tokenizer
        gpt = load_data(TrainConfig(model="gpt", train_text=text, vocab_size=20, spaces=spaces)).tokenizer
        assert translator.decode(translator.encode("a  b ")) == of_pairs
        assert gpt.decode(gpt.encode("a  b ")) == of_text


def test_numbers_of_validation_are_not_trained_on() -> None:
    data = load_data(TrainConfig(task="numbers", tokenizer="bytes", max_len=1000))
    train, val = texts_of(data, "train"), texts_of(data, "val")
    assert (len(train), len(val)) == (20_000, 1000) and val == data.val_texts
    assert not {source for source, _ in train} & {source for source, _ in val}
    assert not {target for _, target in train} & {target for _, target in val}
    known = {english(n): german(n) for n in range(1000)}
    assert {english(n) for n in range(100)} <= {source for source, _ in train}  # no word is left to be guessed
    assert [known[source] for source, _ in train if source in known] == [t for source, t in train if source in known]
    for part, other in zip(examples.number_texts(0), examples.number_texts(1), strict=True):
        assert len(set(part) & set(other)) < len(part) // 5  # another seed draws other numbers


def test_examples_of_exactly_max_len_stay(tmp_path, caplog) -> None:
    file = lines(tmp_path / "a", ["1234567\tx", "12345678\tx", "x\t1234567", "x\t12345678"])
    config = TrainConfig(train_tsv=file, val_tsv=file, tokenizer="bytes", max_len=8)
    with caplog.at_level(logging.WARNING):
        data = load_data(config)
    assert texts_of(data, "train") == data.val_texts == [("1234567", "x"), ("x", "1234567")]
    assert len([m for m in caplog.messages if re.search(r"\b2 (training|validation) .*\bmax_len 8\b", m)]) == 2


def test_bad_lines_stop_or_are_dropped(tmp_path, caplog) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"one\teins\n\ntwo\tzw\xff\n" + b"x\ty\n" * 5)
    config = TrainConfig(train_tsv=str(file), val_tsv=str(file), tokenizer="bytes")
    with pytest.raises(ValueError, match=r"\ba, line 2\b.*\b2 of 8\b.*\b3\b.*skip_bad_lines"):
        load_data(config)
    with caplog.at_level(logging.WARNING):
        data = load_data(dataclasses.replace(config, skip_bad_lines=True))
    assert len(data.train) == len(data.val) == 6
    assert caplog.text.count("2 of 8 lines") == 2


@pytest.mark.parametrize("kind", ["train_tsv", "train_text"])
def test_one_of_several_corpora_may_have_bad_lines_alone(tmp_path, caplog, kind) -> None:
    good = lines(tmp_path / "good", [f"{i} one\tein {i}" for i in range(60)])
    (tmp_path / "bad").write_bytes(b"\xff\t\xff\n" * 4)
    bad = str(tmp_path / "bad")

    def read(files: list[str], weights: str) -> TrainingData:
        model = "gpt" if kind == "train_text" else "transformer"
        settings = {kind: ",".join(files), "model": model, "data_weights": weights}
        return load_data(TrainConfig(**settings, tokenizer="bytes", skip_bad_lines=True, seqlen=16))

    data, alone = read([bad, good, bad], "1,2,1"), read([good], "2")
    assert [*data.train] == [*alone.train] and [*data.val] == [*alone.val] and set(data.weights.tolist()) == {2.0}
    assert caplog.text.count("4 not UTF-8") == 2
    with pytest.raises(ValueError, match="bad"):
        read([bad, bad], "1,1")


@pytest.mark.parametrize("tokenizer", ["bpe", "bytes"])
def test_line_ends_are_text_and_eos_ends_documents(tmp_path, tokenizer, monkeypatch) -> None:
    monkeypatch.setattr("fastformer.data.cuts.PIECE", 50)  # documents are cut into pieces
    folder = tmp_path / "poems"
    folder.mkdir()
    for i in range(3):
        (folder / f"{i}.txt").write_text(f"{i} {POEM * 4}", newline="")
    val = lines(tmp_path / "val", ["one", "", "two"])
    config = TrainConfig(
        model="gpt", train_text=str(folder), val_text=val, tokenizer=tokenizer, vocab_size=80, seqlen=7
    )
    data = load_data(config)
    assert isinstance(data.tokenizer, BPETokenizer if tokenizer == "bpe" else ByteTokenizer)
    ids = [i for example in data.train for i in example.target[:-1]] + data.train[-1].target[-1:]
    ends = [place for place, i in enumerate(ids) if i == 1]
    assert len(ends) == 3 and ends[-1] == len(ids) - 1
    begins = [0, *(end + 1 for end in ends)]
    found = [data.tokenizer.decode(ids[begin:end]) for begin, end in zip(begins, ends, strict=False)]
    assert found == [f"{i} {POEM * 4}" for i in range(3)]
    assert data.val_characters == len("one\n\ntwo\n")
    # What a prompt gives goes on where training left off: the same ids, line ends included.
    prompt = data.tokenizer.encode(f"0 {POEM}")
    assert prompt == ids[: len(prompt)] and 1 not in prompt and 2 not in prompt


def test_the_last_tenth_of_a_text_is_held_out(tmp_path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, length in (("a", 50), ("b", 45), ("c", 5)):
        (folder / f"{name}.txt").write_text("".join(chr(65 + i % 26) for i in range(length)))
    config = TrainConfig(model="gpt", train_text=str(folder), tokenizer="bytes", seqlen=1000)
    data = load_data(config)
    texts = {
        part: [bytes(i - 3 if i > 2 else 0x7C for i in example.target).decode() for example in getattr(data, part)]
        for part in ("train", "val")
    }
    whole = [(folder / f"{name}.txt").read_text() for name in "abc"]
    assert texts == {"train": [f"{whole[0]}|{whole[1][:40]}|"], "val": [f"{whole[1][40:]}|{whole[2]}|"]}
    assert data.val_characters == 10
    (tmp_path / "short").write_text("x")
    with pytest.raises(ValueError, match=r"\bshort\b.*\bval_text\b"):
        load_data(dataclasses.replace(config, train_text=str(tmp_path / "short")))


def foreign(folder: Path, texts: list[str]) -> str:
    backend = tokenizers.Tokenizer(models.BPE(unk_token="[UNK]"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=60, special_tokens=["[UNK]", "</s>"], show_progress=False)
    backend.train_from_iterator(texts, trainer)
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    return str(folder)


def test_characters_that_a_foreign_tokenizer_lacks_are_counted(tmp_path, caplog, monkeypatch) -> None:
    monkeypatch.setattr(examples, "ENCODED_AT_ONCE", 3)  # counts go on from batch to batch
    texts = [f"one {word}\tone" for word in ("one", "漢字", "漢", "one", "😀")]
    config = TrainConfig(
        train_tsv=lines(tmp_path / "a", texts),
        val_tsv=lines(tmp_path / "b", ["one\tone"]),
        tokenizer=foreign(tmp_path / "foreign", ["one one"]),
    )
    with caplog.at_level(logging.WARNING):
        data = load_data(config)
    total = sum(len(text) - 1 for text in texts)
    (said,) = [message for message in caplog.messages if "unknown" in message]
    assert all(word in said for word in (f"4 characters of {total}", "'漢' '字' '😀'"))
    assert data.train[2].source.count(2) == 1 and data.tokenizer.vocab_size < 60
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        load_data(dataclasses.replace(config, tokenizer="bpe", vocab_size=30))
    assert not caplog.messages


def test_a_run_keeps_a_foreign_tokenizer(tmp_path) -> None:
    original = foreign(tmp_path / "foreign", ["one two three"])
    file = lines(tmp_path / "a", ["one two\tthree"] * 3)
    config = TrainConfig(train_tsv=file, val_tsv=file, tokenizer=original, settings=SIZES, device="cpu")
    trainer = start(config, tmp_path / "run")
    shutil.rmtree(original)
    loaded = load_tokenizer(tmp_path / "run")
    assert loaded.vocab_size == trainer.data.tokenizer.vocab_size == trainer.model.config.vocab_size
    assert [*loaded.encode("one two"), 1] == trainer.data.train[0].source
    assert loaded.decode(trainer.data.train[0].target) == "three"
    again = load_data(dataclasses.replace(config, tokenizer=str(tmp_path / "run")))  # another run's tokenizer
    assert again.train.fingerprint() == trainer.data.train.fingerprint()


def test_a_tokenizer_without_line_ends_is_noticed(tmp_path, caplog) -> None:
    text = lines(tmp_path / "a", ["one one"] * 30)
    config = TrainConfig(model="gpt", train_text=text, tokenizer=foreign(tmp_path / "foreign", ["one one"]))
    for tokenizer, warned in ((config.tokenizer, True), ("bpe", False), ("bytes", False)):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            load_data(dataclasses.replace(config, tokenizer=tokenizer, vocab_size=20))
        assert ("drops line ends" in caplog.text) == warned


def test_a_bar_on_a_terminal(capsys, monkeypatch) -> None:
    for terminal in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal)
        assert list(encode_all(ByteTokenizer(), ["a"] * 9000, "training")) == [[100]] * 9000
        assert ("tokenizing training text" in capsys.readouterr().err) == terminal
