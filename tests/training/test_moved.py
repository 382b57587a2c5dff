"""A run continues if its data, tokenizer or first run were moved; other content is refused."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fastformer.checkpoints.training_state import checkpoints, load_checkpoint, save_checkpoint
from fastformer.cli import main
from fastformer.data import train_bpe
from fastformer.training import start
from fastformer.training.examples import load_data
from fastformer.training.run_config import load_config
from tests.training.tiny import PAIRS, changed, contents, losses, write_pairs

FLAGS = shlex.split("--max_tokens 64 --max_len 40 --val_examples 0 --log_every 1 --schedule constant --device cpu")
DEPTH = "--model.num_encoder_layers 1 --model.num_decoder_layers 1"
SIZES = shlex.split(f"--model.d_model 16 --model.d_ff 16 --model.num_heads 2 {DEPTH}")


@pytest.fixture
def data(tmp_path, monkeypatch) -> Path:
    """Returns a folder with the same data in every form."""
    folder = tmp_path / "data"
    folder.mkdir()
    write_pairs(folder / "pairs.tsv")
    write_pairs(folder / "val.tsv", PAIRS[:4])
    for side, name in enumerate(("source", "target")):
        (folder / name).write_text("".join(f"{pair[side]}\n" for pair in PAIRS))
        (folder / f"val.{name}").write_text("".join(f"{pair[side]}\n" for pair in PAIRS[:4]))
    (folder / "text").write_text("".join(f"{source} {target}\n" for source, target in PAIRS))
    train_bpe([text for pair in PAIRS for text in pair], 300).save(folder)
    monkeypatch.chdir(tmp_path)
    return folder


TSV = "--train_tsv {}/pairs.tsv --val_tsv {}/val.tsv"
PARALLEL = "--train_source {0}/source --train_target {0}/target --val_source {0}/val.source --val_target {0}/val.target"
FORMS = {
    "tsv": f"{TSV} --tokenizer bytes",
    "parallel": f"{PARALLEL} --tokenizer bytes",
    "bpe": f"{TSV} --vocab_size 300",
    "text": "--model gpt --train_text {}/text --tokenizer bytes --seqlen 16",
    "tokenizer": f"{TSV} --tokenizer {{}}/tokenizer.json",
}


def words(form: str, folder: Path | str) -> list[str]:
    given = form.replace("{0}", str(folder)).replace("{}", str(folder)).split()
    sizes = ["--model.d_model", "16", "--model.num_heads", "2", "--model.num_layers", "1"] if "gpt" in given else SIZES
    return [*given, *sizes, *FLAGS]


def run(folder: str, form: str, data: Path | str, steps: int, *more: str) -> int:
    return main(["train", folder, *words(form, data), "--steps", str(steps), *more])


SLOW = [pytest.param(form, marks=pytest.mark.slow) for form in FORMS if form != "tsv"]  # every other form of data


@pytest.mark.parametrize("form", ["tsv", *SLOW])
def test_data_on_another_mount(form, data, tmp_path) -> None:
    form = FORMS[form]
    assert run("whole", form, data, 3) == 0
    assert run("parts", form, data, 1, "--resume", "auto") == 0
    data.rename(tmp_path / "mount")
    assert run("parts", form, "mount", 2, "--resume", "auto") == 0  # relative, too
    assert run("parts", form, tmp_path / "mount", 3, "--resume") == 0
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts")
    settings = load_config("parts")
    assert str(tmp_path / "mount") in settings.data_flags() and "/data/" not in settings.data_flags()


def test_the_same_data_as_files_of_another_kind(data) -> None:
    assert run("run", FORMS["tsv"], data, 1) == 0
    assert main(["train", "run", "--resume", "--steps", "2", *PARALLEL.format(data).split()]) == 0
    assert main(["train", "run", "--resume", "--steps", "3"]) == 0


def test_missing_data_are_an_error(data, tmp_path, ran) -> None:
    for form, flag in (("parallel", "train_source"), ("text", "train_text")):
        assert run(form, FORMS[form], data, 1) == 0
        data.rename(tmp_path / "mount")
        before = contents(tmp_path / form)
        assert f"--{flag}" in ran("train", form, "--resume", "--steps", "2", code=1).err
        assert contents(tmp_path / form) == before
        (tmp_path / "mount").rename(data)


def edited(data: Path) -> None:
    for name in ("pairs.tsv", "source", "text"):
        (data / name).write_text((data / name).read_text().replace("aaa", "aba"))


@pytest.mark.parametrize(
    ("form", "flag", "moved"),
    [
        ("tsv", "train_tsv", True),
        ("text", "train_text", False),
        pytest.param("tsv", "train_tsv", False, marks=pytest.mark.slow),
        pytest.param("text", "train_text", True, marks=pytest.mark.slow),
        pytest.param("parallel", "train_source", True, marks=pytest.mark.slow),
    ],
)
def test_another_corpus_is_refused(form, flag, moved, data, tmp_path, capsys) -> None:
    form = FORMS[form]
    assert run("run", form, data, 1) == 0
    place = shutil.copytree(data, tmp_path / "mount") if moved else data
    edited(place)
    before = contents(tmp_path / "run")
    for resume in (["--resume"], ["--resume", "auto"]):
        assert run("run", form, place, 2, *resume) == 1
        assert f"--{flag} {place}" in capsys.readouterr().err
    assert contents(tmp_path / "run") == before


def other_tokenizer(data: Path) -> None:
    train_bpe(["something else " * 9, "altogether " * 9], 280).save(data)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        pytest.param(lambda place: None, 0, marks=pytest.mark.slow),
        (lambda place: (place / "tokenizer.json").unlink(), 0),  # the run has its own
        (other_tokenizer, 1),
    ],
)
def test_a_tokenizer_that_moved(change: Callable[[Path], object], code, data, tmp_path, capsys) -> None:
    assert run("run", FORMS["tokenizer"], data, 1) == 0
    place = shutil.copytree(data, tmp_path / "mount")
    change(place)
    before = contents(tmp_path / "run")
    assert run("run", FORMS["tokenizer"], place, 2, "--resume", "auto") == code
    if code:
        assert "--tokenizer" in capsys.readouterr().err and contents(tmp_path / "run") == before


def test_a_tokenizer_in_place_of_another_kind(data) -> None:
    assert run("bpe", FORMS["bpe"], data, 1) == 0
    other_tokenizer(data)
    for tokenizer, code in (("bytes", 1), ("nowhere.json", 1), ("data", 1), ("bpe/tokenizer.json", 0)):
        assert main(["train", "bpe", "--resume", "--tokenizer", tokenizer, "--steps", "2"]) == code, tokenizer


def test_the_run_of_init_from_was_moved(data, tmp_path, ran) -> None:
    assert run("begin", FORMS["tsv"], data, 1) == 0
    assert run("other", FORMS["tsv"], data, 2) == 0
    tuned = ["train", "run", *TSV.format(data, data).split(), *FLAGS, "--resume", "auto"]
    assert main([*tuned, "--steps", "1", "--init_from", "begin"]) == 0
    (tmp_path / "begin").rename(tmp_path / "moved")
    assert main([*tuned, "--steps", "2", "--init_from", "moved"]) == 0
    assert main([*tuned, "--steps", "3", "--init_from", "gone"]) == 0
    before = contents(tmp_path / "run")
    for flags in (["run", "other"], ["moved", "other"]):
        assert "--init_from" in ran("train", flags[0], "--resume", "--steps", "4", "--init_from", flags[1], code=1).err
    assert contents(tmp_path / "run") == before
    # A checkpoint of an earlier version doesn't say what the run began with.
    last = checkpoints(tmp_path / "run")[-1]
    state = load_checkpoint(last)
    del state["init_weights"]
    save_checkpoint(tmp_path / "run", 3, state, keep_last=1)
    assert main([*tuned, "--steps", "4", "--init_from", "moved"]) == 0
    assert torch.load(checkpoints(tmp_path / "run")[-1], weights_only=True)["counters"]["step"] == 4


# The same data give the same training from any kind of file; a run continues with another kind.


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
