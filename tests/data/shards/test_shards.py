"""Shards are random samples without duplicates; a broken shard is refused; interruptions change nothing."""

from __future__ import annotations

import bz2
import dataclasses
import gzip
import hashlib
import json
import lzma
import os
import random
import re
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import numpy
import pytest

from fastformer.data import load_tokenizer
from fastformer.data.order import Order
from fastformer.data.shards import left_out
from fastformer.data.shards.arrow_file import read_table, views
from fastformer.data.shards.deal import write_shard
from fastformer.data.shards.manifest import Manifest
from fastformer.data.shards.pool import encode_task
from fastformer.data.shards.reading import ShardedExamples
from fastformer.training import TrainConfig
from fastformer.training import prepare as preparing
from fastformer.training.examples import load_data, tokenizer_of
from fastformer.training.prepare import prepare
from tests.data import odd_tokenizers

pytest.importorskip("pyarrow", reason="shards are files of Arrow")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch) -> None:
    """Lets little text make several blocks of a source, and several passes over their hashes."""
    monkeypatch.setattr("fastformer.data.streams.LINES", 50)
    monkeypatch.setattr("fastformer.data.streams.TEXT", 300)
    monkeypatch.setattr(left_out, "MOST_KEYS", 64)


def pairs_of(name: str, count: int) -> list[tuple[str, str]]:
    words = random.Random(name)
    return [(f"{name} {i} {'a' * words.randrange(9)}", f"{'b' * words.randrange(9)} {i} {name}") for i in range(count)]


def tsv(path: Path, pairs: list[tuple[str, str]]) -> str:
    path.write_text("".join(f"{source}\t{target}\n" for source, target in pairs))
    return str(path)


def config_of(*files: str, **options) -> TrainConfig:
    return TrainConfig(train_tsv=",".join(files), tokenizer="bytes", **options)


def made(config: TrainConfig, out: Path, shards: int = 4) -> Manifest:
    return prepare(config, out, shards=shards, processes=1)


def texts_of(examples: ShardedExamples) -> list[tuple[str, str]]:
    decode = load_tokenizer(examples.folder).decode
    return [(decode(example.source), decode(example.target)) for example in examples]


def held_out(folder: Path) -> list[tuple[str, str]]:
    return [tuple(json.loads(line)) for line in (folder / "validation.jsonl").read_text().splitlines()]


def hashes(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def test_every_pair_once_in_the_shards_or_held_out(tmp_path) -> None:
    corpora = [pairs_of("x", 230), pairs_of("y", 170)]
    files = [tsv(tmp_path / f"{i}.tsv", pairs) for i, pairs in enumerate(corpora)]
    manifest = made(config_of(*files), tmp_path / "out")
    examples, validation = ShardedExamples(tmp_path / "out"), held_out(tmp_path / "out")
    assert sorted(texts_of(examples) + validation) == sorted(corpora[0] + corpora[1])
    assert len(validation) == 4 and len(examples) == manifest.examples == 396
    assert [(s.read, s.examples + s.held_out) for s in manifest.sources] == [(230, 230), (170, 170)]
    assert examples.num_tokens == tuple(sum(e.lengths[i] for e in examples) for i in (0, 1))
    assert manifest.longest == max(max(example.lengths) for example in examples)
    assert not (tmp_path / "out" / ".work").exists()


def test_each_shard_is_a_fair_sample_and_shuffled(tmp_path) -> None:
    sizes = [900, 300, 60]
    files = [tsv(tmp_path / f"{i}.tsv", pairs_of("xyz"[i], size)) for i, size in enumerate(sizes)]
    manifest = made(config_of(*files), tmp_path / "out", shards=6)
    counts = numpy.array([shard.by_source for shard in manifest.shards])
    expected = counts.sum(0) * counts.sum(1, keepdims=True) / counts.sum()
    # 10 degrees of freedom: p > 0.001 is 29.6. Dealing in turn is far more even than drawing is.
    assert ((counts - expected) ** 2 / expected).sum() < 5
    examples = ShardedExamples(tmp_path / "out")
    first = texts_of(examples)[: manifest.shards[0].examples]
    number = [int(source.split()[1]) for source, _ in first if source.startswith("x")]
    x = numpy.array(number)
    assert abs(numpy.corrcoef(x, numpy.arange(len(x)))[0, 1]) < 0.25  # in the file they ascend


def test_only_the_first_duplicate_stays_and_none_in_validation(tmp_path) -> None:
    one, other = pairs_of("x", 300), pairs_of("y", 200)
    again = other + one[::3] + other[:50]
    files = [tsv(tmp_path / "0.tsv", one), tsv(tmp_path / "1.tsv", again)]
    manifest = made(config_of(*files, drop_duplicates=True), tmp_path / "out")
    found, validation = texts_of(ShardedExamples(tmp_path / "out")), held_out(tmp_path / "out")
    assert sorted(found + validation) == sorted(one + other)
    assert [source.left_out for source in manifest.sources] == [{}, {"duplicate": 150}]
    # Without dropping, all copies of what is held out leave the training text.
    made(config_of(*files), tmp_path / "kept")
    found, validation = texts_of(ShardedExamples(tmp_path / "kept")), held_out(tmp_path / "kept")
    assert not {*found} & {*validation} and len({*found}) + len(validation) == 500
    assert sorted(found) == sorted(pair for pair in one + again if pair not in validation)


def test_a_pair_that_is_often_repeated_is_one_of_those_to_hold_out(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(left_out, "MOST", 5)
    pairs = pairs_of("x", 6)
    made(config_of(tsv(tmp_path / "a.tsv", pairs * 40)), tmp_path / "out")
    found, validation = texts_of(ShardedExamples(tmp_path / "out")), held_out(tmp_path / "out")
    assert sorted({*found} | {*validation}) == sorted(pairs) and not {*found} & {*validation}
    assert len(validation) == 1 and len(found) == 200


def test_copies_are_known_by_their_ids(tmp_path) -> None:
    spaces = [lambda t: f"{t} ", lambda t: t.replace(" ", "  "), lambda t: t.replace(" ", "\u00a0")]
    pairs = pairs_of("x", 300)
    copies = [(spaces[i % 3](source), spaces[i % 2](target)) for i, (source, target) in enumerate(pairs)]
    file = tsv(tmp_path / "a.tsv", [pair for pair in pairs + copies if all(side.strip() for side in pair)])
    for number, options in enumerate(({}, {"drop_duplicates": True})):
        config = TrainConfig(train_tsv=file, tokenizer="bpe", vocab_size=80, **options)
        out = made(config, tmp_path / f"{number}").sources[0]
        loaded = load_data(config), load_data(TrainConfig(train_data=str(tmp_path / f"{number}")))
        for data in loaded:
            train, val = ([(tuple(e.source), tuple(e.target)) for e in part] for part in (data.train, data.val))
            assert val and {*val}.isdisjoint(train)
            assert len(train) == len({*train}) * (1 if options else 2)
        assert out.left_out == ({"duplicate": 300} if options else {})


def test_the_seed_decides_what_is_held_out(tmp_path) -> None:
    file = tsv(tmp_path / "a.tsv", pairs_of("x", 300))
    for seed in range(4):
        made(config_of(file, seed=seed), tmp_path / f"{seed}")
    assert len({tuple(held_out(tmp_path / f"{seed}")) for seed in range(4)}) == 4


def test_pairs_with_equal_concatenations_are_not_duplicates(tmp_path) -> None:
    file = tsv(tmp_path / "a.tsv", [("a", "bc"), ("ab", "c"), ("a", "bc"), ("1 a", "b"), ("1", "a b")])
    assert made(config_of(file, drop_duplicates=True), tmp_path / "out", 1).sources[0].left_out == {"duplicate": 1}


def test_dropped_lines_are_counted_by_reason(tmp_path) -> None:
    file = tmp_path / "a.tsv"
    lines = [f"{source}\t{target}" for source, target in pairs_of("x", 100)]
    bad = ["only one", "a\t", "a\tb\tc", "same here\tsame here", f"short\t{'long ' * 40}", f"{'w' * 90}\t{'v' * 90}"]
    file.write_text("\n".join(lines[:60] + bad + lines[60:]))
    options = {"drop_identical": True, "max_length_ratio": 20, "max_len": 60}
    with pytest.raises(ValueError, match=r"a\.tsv, line 61: .*; 3 of "):
        made(config_of(str(file), **options), tmp_path / "no")
    source = made(config_of(str(file), skip_bad_lines=True, **options), tmp_path / "out").sources[0]
    assert source.left_out == {
        "of 1 field": 1, "with an empty side": 1, "of 3 fields": 1, "with identical sides": 1,
        "of a length ratio above 20": 1, "of more than max_len 60 tokens": 1,
    }  # fmt: skip
    assert (source.read, source.examples + source.held_out) == (106, 100)


def test_every_form_of_the_text_gives_the_same_shards(tmp_path) -> None:
    pairs, sides = pairs_of("x", 120), ["", ""]
    for pair in pairs:
        sides = [side + text + "\n" for side, text in zip(sides, pair, strict=True)]
    packers = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "txt": bytes}
    if sys.version_info < (3, 14):
        packers["zst"] = pytest.importorskip("zstandard", reason="of the extra zstd").ZstdCompressor().compress
    for name, pack in packers.items():
        for side, text in zip(("en", "de"), sides, strict=True):
            (tmp_path / f"{side}.{name}").write_bytes(pack(text.encode()))
    rows = [{"en": source, "x": {"de": target}} for source, target in pairs]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    from pyarrow import Table, parquet

    parquet.write_table(Table.from_pylist(rows), tmp_path / "p.parquet")
    files = [tuple(str(tmp_path / f"{side}.{name}") for side in ("en", "de")) for name in packers]
    files += [(f"{tmp_path}/p.{kind}:en", f"{tmp_path}/p.{kind}:x.de") for kind in ("jsonl", "parquet")]
    found = []
    for number, (source, target) in enumerate(files):
        config = TrainConfig(train_source=source, train_target=target, tokenizer="bytes")
        found.append([shard.sha256 for shard in made(config, tmp_path / f"out{number}").shards])
    found.append([s.sha256 for s in made(config_of(tsv(tmp_path / "p.tsv", pairs)), tmp_path / "out").shards])
    assert all(shards == found[0] for shards in found)


@pytest.mark.parametrize("lines", [(120, 119), (49, 120), (50, 100)])
def test_unequal_lines(tmp_path, lines) -> None:
    for name, count in zip(("a.en", "a.de"), lines, strict=True):
        (tmp_path / name).write_text("text\n" * count)
    config = TrainConfig(train_source=f"{tmp_path}/a.en", train_target=f"{tmp_path}/a.de", tokenizer="bytes")
    with pytest.raises(ValueError, match=rf"a\.en, got {lines[1]} and {lines[0]}"):
        made(config, tmp_path / "out")


# Reading.


@pytest.fixture
def folder(tmp_path) -> Path:
    files = [tsv(tmp_path / f"{name}.tsv", pairs_of(name, 200)) for name in "xy"]
    made(config_of(*files, data_weights="1,2"), tmp_path / "out", shards=7)
    return tmp_path / "out"


def planned(examples: ShardedExamples, seed: int, epochs: int = 1, **options) -> list[list[int]]:
    order = Order(examples, max_tokens=200, batching="packed", seed=seed, **options)
    return [b for epoch in range(epochs) for window in range(order.num_windows) for b in order.plan(epoch, window)]


def test_the_order_is_a_function_of_seed_and_epoch(folder) -> None:
    # Each window's examples lie in its shards, and no window is planned as another.
    def digest(seed: int, weights=(1.0, 1.0)) -> str:
        examples = ShardedExamples(folder, window=3, weights=list(weights))
        content = [[(e.source, e.target) for e in map(examples.__getitem__, b)] for b in planned(examples, seed, 2)]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    assert digest(0) == digest(0) != digest(1)
    examples = ShardedExamples(folder, window=3, weights=[1.0, 1.0])
    first, second = planned(examples, 0), planned(examples, 0, 2)[len(planned(examples, 0)) :]
    assert sorted(i for batch in first for i in batch) == list(range(len(examples)))
    assert sorted(i for batch in second for i in batch) == list(range(len(examples))) and first != second


def test_weights_are_those_of_the_index_or_of_the_call(folder) -> None:
    of_index, of_call = ShardedExamples(folder, window=2), ShardedExamples(folder, window=2, weights=[3.0, 1.0])
    sizes = [source.examples for source in of_index.manifest.sources]
    assert len([i for batch in planned(of_index, 0) for i in batch]) == sizes[0] + 2 * sizes[1]
    assert len([i for batch in planned(of_call, 0) for i in batch]) == 3 * sizes[0] + sizes[1]
    with pytest.raises(ValueError, match=r"\bdata_weights\b.* 2 sources"):
        ShardedExamples(folder, weights=[1.0])


def test_lengths_of_any_examples(folder) -> None:
    examples = ShardedExamples(folder, window=1)
    some = [5, 391, 17, 200, 5, 0]
    assert examples.lengths_at(some).tolist() == [list(examples[i].lengths) for i in some]


def test_few_shards_are_open_and_their_arrays_are_not_copies(folder) -> None:
    examples = ShardedExamples(folder, window=2)
    for batch in planned(examples, 0):
        _ = [examples[i] for i in batch]
        assert len(examples._open) <= 3
    ids, _ = views(read_table(folder / "shard-00000.arrow").column("source"))
    assert not ids.flags.owndata and not ids.flags.writeable


@pytest.mark.parametrize("damage", ["changed", "cut short", "missing", "swapped"])
def test_a_changed_shard(folder, damage) -> None:
    shard = folder / "shard-00003.arrow"
    data = bytearray(shard.read_bytes())
    if damage == "changed":
        data[len(data) // 2] ^= 1
        shard.write_bytes(data)
    elif damage == "cut short":
        shard.write_bytes(data[:-10])
    elif damage == "missing":
        shard.unlink()
    else:
        shard.write_bytes((folder / "shard-00002.arrow").read_bytes())
    with pytest.raises(ValueError, match=r"shard-00003\.arrow"):
        planned(ShardedExamples(folder), 0)


def test_neighbouring_seeds_share_no_order(folder) -> None:
    examples = ShardedExamples(folder, window=1)

    def order(seed: int, epoch: int) -> tuple[int, ...]:
        return tuple(int(examples.window(seed, epoch, number)[0]) for number in range(7))

    orders = {order(seed, epoch) for seed in range(5) for epoch in range(5)}
    assert len(orders) >= 24  # of 5,040


# A preparation that was ended.


class Ended(Exception):
    pass


@pytest.mark.parametrize("stage", ["block", "shard", "index"])
def test_the_same_command_continues_and_writes_the_same_bytes(tmp_path, monkeypatch, stage) -> None:
    files = [tsv(tmp_path / f"{name}.tsv", pairs_of(name, 300)) for name in "xy"]
    config = config_of(*files, drop_duplicates=True)
    made(config, tmp_path / "whole")
    calls, task, write, save = [], encode_task, write_shard, Manifest.save

    def ending(name: str, function):
        def call(*given):
            calls.append(name)
            if name == stage and calls.count(name) == (1 if name == "index" else 3):
                raise Ended
            return function(*given)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(preparing, "encode_task", ending("block", task))
        patch.setattr(preparing, "write_shard", ending("shard", write))
        patch.setattr(Manifest, "save", ending("index", save))
        with pytest.raises(Ended):
            made(config, tmp_path / "ended")
        before = calls.count("block")
    with pytest.raises(ValueError, match=r"\bseed\b"):
        made(config_of(*files, drop_duplicates=True, seed=1), tmp_path / "ended")
    (tmp_path / "ended" / ".shard-00000.arrow.0123456789abcdef.tmp").touch()  # of a killed write
    monkeypatch.setattr(preparing, "encode_task", ending("again", task))
    made(config, tmp_path / "ended")
    assert hashes(tmp_path / "ended") == hashes(tmp_path / "whole")
    assert calls.count("again") == 12 - (before - (stage == "block"))
    made(config, tmp_path / "ended")  # nothing is left to do
    with pytest.raises(ValueError, match="other settings"):
        made(config_of(*files), tmp_path / "ended")


def test_a_mistake_stops_no_later_call(tmp_path) -> None:
    files = [tsv(tmp_path / f"{name}.tsv", pairs_of(name, 120)) for name in "xy"]
    with pytest.raises(ValueError, match=r"no file .*z\.tsv"):
        made(TrainConfig(train_tsv=f"{files[0]},{tmp_path}/z.tsv"), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    Path(files[0]).write_text("no pair\n")
    with pytest.raises(ValueError, match="skip_bad_lines"):  # before the first block
        made(config_of(*files, max_len=9), tmp_path / "out")
    tsv(Path(files[0]), pairs_of("x", 120))
    with Path(files[1]).open("a") as file:
        file.write("no pair\n")
    with pytest.raises(ValueError, match="skip_bad_lines"):  # after some blocks
        made(config_of(*files), tmp_path / "out")
    assert len(list((tmp_path / "out" / ".work").glob("block-*.arrow"))) > 3
    for out in ("out", "whole"):
        made(config_of(*files, skip_bad_lines=True), tmp_path / out)
    assert hashes(tmp_path / "out") == hashes(tmp_path / "whole")


def test_text_that_changed_meanwhile_is_refused(tmp_path, monkeypatch) -> None:
    file = tsv(tmp_path / "a.tsv", pairs_of("x", 200))

    def end(*given):
        raise Ended

    monkeypatch.setattr(preparing, "write_shard", end)
    with pytest.raises(Ended):
        made(config_of(file), tmp_path / "out")
    tsv(tmp_path / "a.tsv", pairs_of("y", 201))
    with pytest.raises(ValueError, match="changed"):
        made(config_of(file), tmp_path / "out")


def test_a_complete_folder_of_other_text_is_refused(tmp_path) -> None:
    files = [tsv(tmp_path / f"{name}.tsv", pairs_of(name, 100)) for name in "xy"]
    whole = made(config_of(*files, data_weights="1,2"), tmp_path / "out")
    assert made(config_of(*files, data_weights="1,2"), tmp_path / "out") == whole  # nothing is left to do
    with pytest.raises(ValueError, match="other settings"):
        made(config_of(*files, data_weights="2,1"), tmp_path / "out")
    before = hashes(tmp_path / "out")
    tsv(tmp_path / "y.tsv", pairs_of("y", 101))
    with pytest.raises(ValueError, match=r"y\.tsv"):
        made(config_of(*files, data_weights="1,2"), tmp_path / "out")
    assert hashes(tmp_path / "out") == before


def test_a_complete_folder_of_other_validation_data_is_refused(tmp_path, caplog) -> None:
    config = config_of(tsv(tmp_path / "a.tsv", pairs_of("x", 100)), val_tsv=tsv(tmp_path / "v.tsv", pairs_of("v", 5)))
    whole = made(config, tmp_path / "out")
    assert made(config, tmp_path / "out") == whole and "not read" not in caplog.text
    tsv(tmp_path / "v.tsv", pairs_of("v", 6))
    with pytest.raises(ValueError, match=r"v\.tsv"):
        made(config, tmp_path / "out")
    (tmp_path / "v.tsv").unlink()
    assert made(config, tmp_path / "out") == whole and "v.tsv was not read" in caplog.text


@pytest.mark.parametrize("lines", [None, "one side\n", "aaaaaaaa\tb\n"])
def test_validation_data_are_checked_before_anything_is_encoded(tmp_path, monkeypatch, lines) -> None:
    if lines is not None:
        (tmp_path / "v.tsv").write_text(lines)
    config = config_of(tsv(tmp_path / "a.tsv", pairs_of("x", 9)), val_tsv=str(tmp_path / "v.tsv"), max_len=5)
    monkeypatch.setattr(preparing, "encode_task", None)
    with pytest.raises(ValueError, match=r"v\.tsv|validation example"):
        made(config, tmp_path / "out")


def test_a_pipe_starts_over(tmp_path, monkeypatch, caplog) -> None:
    os.mkfifo(tmp_path / "pipe")

    def feed(name: str) -> Manifest:
        text = "".join(f"{source}\t{target}\n" for source, target in pairs_of(name, 200))
        writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=(text,))
        writer.start()
        try:
            return made(config_of(str(tmp_path / "pipe")), tmp_path / "out")
        finally:
            writer.join()

    def end(*given):
        raise Ended

    with monkeypatch.context() as patch, pytest.raises(Ended):
        patch.setattr(Manifest, "save", end)  # all shards are there
        feed("x")
    feed("y")
    assert all(source.startswith("y ") for source, _ in texts_of(ShardedExamples(tmp_path / "out")))
    caplog.clear()
    made(config_of(str(tmp_path / "pipe")), tmp_path / "out")
    assert "not read" in caplog.text


def test_a_folder_with_something_else_in_it(tmp_path) -> None:
    file = tsv(tmp_path / "a.tsv", pairs_of("x", 20))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes").write_text("mine")
    with pytest.raises(ValueError, match="empty folder"):
        made(config_of(file), tmp_path / "out")
    assert (tmp_path / "out" / "notes").read_text() == "mine"


# Language models.


def test_a_bpe_learns_from_all_of_a_long_text(tmp_path) -> None:
    # A letter a tenth: a sample that favours a part of the text lacks the letters of the others.
    text = "".join(f"{chr(97 + i // 100) * 3} {i % 9}\n" for i in range(1000))
    (tmp_path / "a.txt").write_text(text)
    pairs = [tuple(line.split(" ")) for line in text.splitlines()]
    common = {"tokenizer": "bpe", "vocab_size": 200}
    for config in (
        TrainConfig(model="gpt", train_text=f"{tmp_path}/a.txt", seqlen=16, **common),
        TrainConfig(train_tsv=tsv(tmp_path / "a.tsv", pairs), **common),
    ):
        found = []
        for seed in range(2):
            config = dataclasses.replace(config, seed=seed)
            out = tmp_path / f"{config.model}{seed}"
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("fastformer.data.cuts.PIECE", 4)
                patch.setattr(preparing, "tokenizer_of", note := Noted(tokenizer_of))
                patch.setattr(preparing, "make_tokenizer", note)
                prepare(config, out, shards=2, processes=1, bpe_characters=len(text) // 4)
            sample = "".join(map(str, note.texts))
            found.append([sample.count(chr(97 + i) * 3) for i in range(10)])
            assert len(text) // 8 < sum(map(len, map("".join, note.texts))) <= len(text) // 4
        assert all(min(counts) > 0.3 * sum(counts) / 10 for counts in found) and found[0] != found[1]


class Noted:
    def __init__(self, function) -> None:
        self.function = function
        self.texts: list[Any] = []

    def __call__(self, config, texts):
        self.texts = texts
        return self.function(config, texts)


def test_what_is_no_document_of_a_folder_is_counted_and_not_read(tmp_path, caplog) -> None:
    folder = tmp_path / "text"
    (folder / "older").mkdir(parents=True)
    (folder / "a.txt").write_text("".join(f"word {i}\n" for i in range(99)))
    (folder / "notes.md").write_text("mine")
    config = TrainConfig(model="gpt", train_text=str(folder), vocab_size=40, seqlen=8)
    with caplog.at_level("INFO"):
        whole = made(config, tmp_path / "out")
    assert "1 in a subfolder" in caplog.text and "1 of another kind" in caplog.text
    (folder / "notes.md").write_text("mine, too")
    assert made(config, tmp_path / "out") == whole
    (folder / "b.txt").write_text("more")
    with pytest.raises(ValueError, match="bytes of"):
        made(config, tmp_path / "out")


def test_a_bad_line_far_behind_is_named_by_its_number(tmp_path) -> None:
    lines = [f"line {i}".encode() for i in range(500)]
    lines[417] = b"\xff"
    for end in (b"\n", b"\r\n"):
        (tmp_path / "a.txt").write_bytes(end.join(lines))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("fastformer.data.streams._CHUNK", 64)
            config = TrainConfig(model="gpt", train_text=f"{tmp_path}/a.txt", tokenizer="bytes", seqlen=8)
            for read in (load_data, lambda config: made(config, tmp_path / "out")):
                with pytest.raises(ValueError, match=r"a\.txt, line 418\b"):
                    read(config)
        shutil.rmtree(tmp_path / "out")


def test_a_text_of_bad_lines_alone_is_refused(tmp_path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff\n\xfe\n")
    config = TrainConfig(model="gpt", train_text=f"{tmp_path}/a.txt", tokenizer="bytes", seqlen=8)
    for read in (load_data, lambda config: made(config, tmp_path / "out")):
        with pytest.raises(ValueError, match=r"a\.txt, line 1\b"):
            read(config)


def test_a_preparation_warns_of_what_a_training_warns_of(tmp_path, caplog) -> None:
    (tmp_path / "a.tsv").write_bytes(b"the dog\tsees\n\n" * 3 + "the red cat\t漢字\n".encode() * 2 + b"\xff\tx\n")
    (tmp_path / "a.txt").write_bytes("the dog\n漢字\n".encode() * 9 + b"\xff\n")
    (tmp_path / "v").write_text("the\tdog\n")
    common = {"tokenizer": odd_tokenizers.saved("bert", tmp_path / "tokenizer"), "skip_bad_lines": True}
    pairs = {"train_tsv": f"{tmp_path}/a.tsv", "max_len": 3, "val_tsv": f"{tmp_path}/v"}
    text = {"train_text": f"{tmp_path}/a.txt", "model": "gpt", "val_text": f"{tmp_path}/v"}
    for number, config in enumerate((TrainConfig(**pairs, **common), TrainConfig(**text, **common))):
        said = []
        for run in (load_data, lambda config, number=number: made(config, tmp_path / f"{number}")):
            caplog.clear()
            with caplog.at_level("WARNING"):
                run(config)
            said.append([re.sub(r" \(lines? .*?\)| of \d+(?= lines)", "", line) for line in caplog.messages])
        assert len(said[0]) == 3 and {*said[0]} == {*said[1]}


# Longer proofs.


@pytest.mark.skipif(sys.platform != "linux", reason="names of other systems are Unicode")
def test_the_name_of_a_folder_need_not_be_utf8(tmp_path) -> None:
    pairs, folder = pairs_of("x", 6), tmp_path / os.fsdecode(b"p\xfc")
    made(config_of(tsv(tmp_path / "a.tsv", pairs)), folder)
    assert sorted(texts_of(ShardedExamples(folder)) + held_out(folder)) == sorted(pairs)
