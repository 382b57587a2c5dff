"""The same data give the same training from any kind of file; a run continues with another kind."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import sys

import pytest

from fastformer.cli import main
from fastformer.training import start
from fastformer.training.examples import load_data
from tests.training.tiny import PAIRS, changed, losses


@pytest.fixture
def files(tmp_path) -> dict[str, tuple[str, str]]:
    """Returns the source and target files by kind."""
    sides = ["".join(f"{pair[side]}\n" for pair in PAIRS) for side in (0, 1)]
    rows = [{"en": source, "translation": {"de": target}} for source, target in PAIRS]
    (tmp_path / "a.en").write_text(sides[0])
    (tmp_path / "a.de").write_text(sides[1])
    (tmp_path / "z.en").write_bytes(gzip.compress(sides[0].encode()))
    (tmp_path / "z.de").write_bytes(lzma.compress(sides[1].encode()))
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "p.tsv").write_text("".join(f"{source}\t{target}\tCC-BY\n" for source, target in PAIRS))
    return {
        "plain": (str(tmp_path / "a.en"), str(tmp_path / "a.de")),
        "compressed": (str(tmp_path / "z.en"), str(tmp_path / "z.de")),
        "columns": (f"{tmp_path / 'p.jsonl'}:en", f"{tmp_path / 'p.jsonl'}:translation.de"),
        "three columns": (f"{tmp_path / 'p.tsv'}:1", f"{tmp_path / 'p.tsv'}:2"),
    }


def test_the_same_examples(config, files) -> None:
    found = set()
    for source, target in files.values():
        data = load_data(changed(config, train_tsv=None, val_tsv=None, train_source=source, train_target=target))
        found.add((data.train.fingerprint(), data.val.fingerprint()))
    ends = []
    for path in files["compressed"]:  # as <(cat FILE)
        reading, writing = os.pipe()
        with open(path, "rb") as file, os.fdopen(writing, "wb") as sink:
            sink.write(file.read())
        ends.append(reading)
    source, target = (f"/dev/fd/{end}" for end in ends)
    data = load_data(changed(config, train_tsv=None, val_tsv=None, train_source=source, train_target=target))
    found.add((data.train.fingerprint(), data.val.fingerprint()))
    for end in ends:
        os.close(end)
    assert len(found) == 1


def test_a_run_resumes_with_a_column(config, files, tmp_path) -> None:
    source, target = files["columns"]
    config = changed(config, train_tsv=None, val_tsv=None, train_source=source, train_target=target, steps=1)
    start(config, tmp_path / "run").train()
    assert main(["train", str(tmp_path / "run"), "--resume", "--steps", "2"]) == 0
    assert len(losses(tmp_path / "run")) == 2


def test_settings_and_a_tsv_from_pipes(config, tmp_path, monkeypatch) -> None:
    import io

    import yaml

    values = changed(config, steps=1, val_tsv=None, train_tsv="-").to_dict()
    reading, writing = os.pipe()
    os.write(writing, yaml.safe_dump(values).encode())
    os.close(writing)
    text = "".join(f"{source}\t{target}\n" for source, target in PAIRS).encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    assert main(["train", str(tmp_path / "run"), "--config", f"/dev/fd/{reading}"]) == 0
    os.close(reading)
    assert len(losses(tmp_path / "run")) == 1
