"""Training, prepared shards and the tokenizer on whole documents have the same ids, and share none that is held out."""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from fastformer.data import Tokenizer, cuts, streams
from fastformer.data.shards import left_out
from fastformer.data.shards.reading import ShardedExamples
from fastformer.data.tokenizer import cuts_of
from fastformer.training import TrainConfig
from fastformer.training.examples import TrainingData, load_data
from fastformer.training.prepare import prepare
from tests.data import odd_tokenizers
from tests.data.test_cuts import WORDS, text_of

pytest.importorskip("pyarrow", reason="shards are files of Arrow")
pytest.importorskip("sentencepiece", reason="of the extra sentencepiece")

BLANKS = ["", "\n", " \n\t\n", "\x85"]


def plain(text: str) -> str:
    return text.replace("\r\n", "\n")


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return [*tokenizer.encode_batch([text])[0], tokenizer.special_ids.first_eos]


def contents(examples: Any) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(tuple(example.source), tuple(example.target)) for example in examples]


def all_of(config: TrainConfig, folder: Path) -> list[TrainingData]:
    """Returns the data of a training in memory and in shards."""
    prepare(config, folder, shards=2, processes=1)
    names = ("model", "seqlen", "max_len", "settings", "shared_vocab")
    return [load_data(config), load_data(TrainConfig(train_data=str(folder), **{n: getattr(config, n) for n in names}))]


def write(chooser: random.Random, path: Path, data: bytes) -> str:
    packed = chooser.random() < 0.2
    path.write_bytes(gzip.compress(data) if packed else data)
    return str(path)


def text_corpus(chooser: random.Random, folder: Path) -> tuple[str, list[str]]:
    """Writes documents in some format; returns the path and the documents that a training should learn from."""
    documents = [text_of(chooser, chooser.randrange(1, 150)) for _ in range(chooser.randrange(1, 5))]
    documents += chooser.sample(BLANKS, chooser.randrange(3)) + chooser.choices(documents, k=chooser.randrange(3))
    documents = [text + chooser.choice(["", "\n", "\n\n", "\r\n", " "]) for text in documents]
    kind = chooser.choice(["file", "folder", "column"])
    if kind == "file":
        documents = [max(documents, key=len)]
        bom = chooser.choice([b"", b"\xef\xbb\xbf"])
        path = write(chooser, folder / "a.txt", bom + documents[0].encode())
    elif kind == "folder":
        (folder / "texts").mkdir()
        for number, text in enumerate(documents):
            write(chooser, folder / "texts" / f"{number}.txt", text.encode())
        path = str(folder / "texts")
    else:
        lines = "".join(json.dumps({"t": text}) + "\n" for text in documents)
        path = write(chooser, folder / "a.jsonl", lines.encode()) + ":t"
    return path, [text if kind == "column" else plain(text) for text in documents if text.strip()]


def windows_of(ids: list[int], seqlen: int) -> list[tuple[tuple[()], tuple[int, ...]]]:
    return [((), tuple(ids[i : i + seqlen + 1])) for i in range(0, len(ids) - 1, seqlen)]


def check_text(seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chooser = random.Random(seed)
    name = chooser.choice(odd_tokenizers.NAMES)
    path, documents = text_corpus(chooser, folder)
    tokenizer, seqlen = odd_tokenizers.tokenizer(name), chooser.choice([3, 8, 50])
    monkeypatch.setattr(cuts, "PIECE", chooser.choice([20, 50_000]))
    whole = [i for text in documents for i in ids_of(tokenizer, text)]
    val = folder / "val.txt"
    val.write_text("one val\n\nand  two", encoding="utf-8")
    common = {
        "model": "gpt", "train_text": path, "tokenizer": odd_tokenizers.saved(name, folder / "tokenizer"),
        "seqlen": seqlen, "settings": {}, "skip_bad_lines": True,
    }  # fmt: skip
    for data in all_of(TrainConfig(**common, val_text=str(val)), folder / "whole"):
        assert Counter(contents(data.train)) == Counter(windows_of(whole, seqlen)), (seed, name)
        assert contents(data.val) == windows_of(ids_of(tokenizer, val.read_text()), seqlen)
    # In blocks of a few words, too, for which shards have other windows.
    monkeypatch.setattr(streams, "TEXT", 30)
    blocks = [block.documents(skip_bad=True)[0] for block in streams.stream_documents(path, cuts_of(tokenizer))]
    ids = [[i for text, ends in block for i in ids_of(tokenizer, text)[: None if ends else -1]] for block in blocks]
    assert [i for block in ids for i in block] == whole, (seed, name)
    prepare(TrainConfig(**common, val_text=str(val)), folder / "blocks", shards=2, processes=1)
    expected = Counter(window for block in ids for window in windows_of(block, seqlen))
    assert Counter(contents(ShardedExamples(folder / "blocks"))) == expected, (seed, name)
    if len({*windows_of(whole, seqlen)}) > 20:
        for data in all_of(TrainConfig(**common), folder / "held"):
            assert data.val and not {*contents(data.val)} & {*contents(data.train)}, (seed, name)


def pair_corpus(chooser: random.Random, folder: Path) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """Writes pairs in some format, among them copies that differ by their spaces; returns settings and the pairs."""

    def sentence() -> str:
        return " ".join(chooser.choices(WORDS, k=chooser.randrange(1, 9)))

    def odd(text: str) -> str:
        if chooser.random() < 0.7:
            return text
        return chooser.choice([f"{text} ", f" {text}", text.replace(" ", "  "), text.replace(" ", "\u00a0")])

    pairs = [(sentence(), sentence()) for _ in range(chooser.choice([5, 40, 300]))]
    pairs = [(odd(source), odd(target)) for source, target in pairs * chooser.randrange(1, 4)]
    chooser.shuffle(pairs)
    blanks = [("", "x"), (" ", "\t"), ("x", "")] if chooser.random() < 0.5 else []
    rows = pairs + blanks
    chooser.shuffle(rows)
    pairs = [pair for pair in rows if all(side.strip() for side in pair)]
    kind, end = chooser.choice(["tsv", "files", "columns"]), chooser.choice(["\n", "\r\n"])
    if kind == "tsv":
        rows = [row for row in rows if not any("\t" in side for side in row)]
        data = end.join("\t".join(row) for row in rows).encode()
        return {"train_tsv": write(chooser, folder / "a.tsv", data)}, pairs
    names = ("train_source", "train_target")
    if kind == "files":
        sides = ["".join(row[side] + end for row in rows).encode() for side in (0, 1)]
        return {name: write(chooser, folder / name, data) for name, data in zip(names, sides, strict=True)}, pairs
    lines = "".join(json.dumps(dict(zip("st", row, strict=True))) + "\n" for row in rows)
    path = write(chooser, folder / "a.jsonl", lines.encode())
    return {names[0]: f"{path}:s", names[1]: f"{path}:t"}, pairs


def check_pairs(seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chooser = random.Random(seed)
    name = chooser.choice(odd_tokenizers.NAMES)
    files, pairs = pair_corpus(chooser, folder)
    monkeypatch.setattr(streams, "LINES", chooser.choice([7, 16_384]))
    monkeypatch.setattr(left_out, "MOST_KEYS", chooser.choice([64, 1 << 21]))
    tokenizer = odd_tokenizers.tokenizer(name)
    expected = [tuple(tuple(ids_of(tokenizer, side)) for side in pair) for pair in pairs]
    duplicates = chooser.random() < 0.5
    config = TrainConfig(
        **files, tokenizer=odd_tokenizers.saved(name, folder / "tokenizer"), skip_bad_lines=True, max_len=10_000,
        drop_duplicates=not duplicates, held_out=chooser.choice(["random", "last"]), seed=seed,
    )  # fmt: skip
    for data in all_of(config, folder / "held"):
        train, val = contents(data.train), contents(data.val)
        assert val and {*val}.isdisjoint(train), (seed, name)
        assert {*train} | {*val} <= {*expected} and Counter(train) <= Counter(expected), (seed, name)
        assert len({*train}) >= 0.7 * len({*expected}) - 1, (seed, name)
        if not duplicates:
            assert len({*train}) == len(train)
        texts = [tuple(tuple(ids_of(tokenizer, side)) for side in pair) for pair in data.val_texts]
        assert texts == val, (seed, name)


@pytest.mark.parametrize("check", [check_text, check_pairs])
@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 100))])
def test_a_random_corpus(check, seed, tmp_path, monkeypatch) -> None:
    check(seed, tmp_path, monkeypatch)
