"""A malformed command ends with its exit code and a one-line message, and changes nothing."""

from __future__ import annotations

import json
import os
import random
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fastformer.cli import main
from fastformer.training.config import TrainConfig
from tests.covering import each
from tests.training.tiny import SIZES, contents


@pytest.fixture(scope="module")
def origin(tmp_path_factory) -> Path:
    """Makes a folder with a run, a language model's run, and files for commands."""
    folder = tmp_path_factory.mktemp("malformed")
    (folder / "pairs.tsv").write_text("".join(f"word {i}\twort {i}\n" for i in range(30)))
    (folder / "text.txt").write_text("to be or not to be\n" * 20)
    (folder / "folder.png").mkdir()
    for name, text in {
        "unknown_model.yaml": "model: {dropuot: 0.1}\n",
        "misplaced.yaml": "d_model: 64\n",
        "type.yaml": "steps: many\n",
        "list.yaml": "- steps\n- 3\n",
        "cut.yaml": "",
        "deep.yaml": "{" * 1000,
        "tag.yaml": "!!python/object/apply:os.system ['touch hacked']\n",
        "cycle.yaml": "model: &a [*a]\n",
    }.items():
        (folder / name).write_text(text)
    run = ["train", str(folder / "run"), "--train_tsv", str(folder / "pairs.tsv"), "--tokenizer", "bytes"]
    run += [word for name, value in SIZES.items() for word in (f"--model.{name}", str(value))]
    assert main([*run, "--steps", "2", "--max_len", "40", "--val_examples", "2"]) == 0
    gpt = ["train", str(folder / "gpt"), "--model", "gpt", "--train_text", str(folder / "text.txt"), "--tokenizer"]
    gpt += ["bytes", "--model.d_model", "16", "--model.num_layers", "1", "--seqlen", "16", "--steps", "1"]
    assert main(gpt) == 0
    return folder


@pytest.fixture
def folder(origin, tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(shutil.copytree(origin, tmp_path / "work"))
    monkeypatch.setattr("fastformer.data.files._WRITER_SECONDS", 0.1)
    os.mkfifo("pipe")  # to open it would wait for ever
    return tmp_path / "work"


def refused(words: list[str], code: int, phrases: tuple[str, ...], folder: Path, ran) -> None:
    before = contents(folder)
    error = ran(*words, code=code).err
    last = error.splitlines()[-1]
    assert last.startswith("fastformer: "), error
    assert error.count("fastformer: ") == 1 and "Traceback" not in error and "a bug" not in error, error
    for word in phrases:
        assert word in last, f"{words} should say {word!r}: {error}"
    assert contents(folder) == before, "a refused command wrote something"


FLAGS: list[tuple[str, tuple[str, ...]]] = [
    # Unknown commands, flags and choices; the message names the nearest one.
    ("", ("expected a command", "fastformer --help")),
    ("trian new", ("unknown command 'trian'", "'train'")),
    ("--verison", ("unrecognized", "--verison")),
    ("train", ("required", "run")),
    ("train new --stepz 3", ("--stepz", "did you mean '--steps'?", "fastformer train --help")),
    ("train new --d_model 64", ("--d_model", "did you mean '--model.d_model'?")),
    ("train new --model.dropuot 0.1", ("did you mean '--model.dropout'?",)),
    ("train new --settings {}", ("unrecognized arguments: --settings",)),
    ("train new --checkpointing maybe", ("unrecognized arguments: maybe",)),
    ("train new --model gtp", ("'transformer', 'gpt' or 'lstm'", "got 'gtp'", "did you mean 'gpt'?")),
    ("train new --model.help lstmm", ("lstmm", "'lstm'")),
    ("train new --model.norm batch", ("--model.norm", "'layer' or 'rms'", "got 'batch'")),
    ("translate run x --beams 4", ("--beams", "did you mean '--num_beams'?")),
    ("translate run two words", ("unrecognized arguments: words",)),
    # Values of a wrong type.
    ("train new --model.window_size all", ("--model.window_size", "an integer or null", "got 'all'")),
]

VALUES: list[tuple[str, tuple[str, ...]]] = [
    # Out of bounds, or contradicting each other.
    ("train new --task numbers --steps 0", ("steps", "got 0")),
    ("train new --task numbers --seed 9223372036854775808", ("seed",)),
    ("train new --task numbers --average_last 5 --save_every 0", ("save_every",)),
    ("train new --task numbers --model.max_len 8", ("max_len", "64", "8")),
    ("train new --task numbers --model.num_layers 3", ("TransformerConfig", "num_layers", "num_encoder_layers")),
    ("train new --task numbers --preset bsae", ("did you mean 'base'?",)),
    ("train new --task numbers --model lstm --batching packed", ("bucketed", "LSTM")),
    # Data that is missing, broken, or given twice.
    ("train new", ("train_tsv",)),
    ("train new --train_tsv nothing.tsv", ("nothing.tsv",)),
    ("train new --train_tsv pairs.tsv --tokenizer nothing.json", ("nothing.json",)),
    # Run folders.
    ("train pairs.tsv --task numbers", ("run folder", "pairs.tsv")),
    ("train run --resume --model.d_model 32", ("settings", "32")),
    ("translate nothing x", ("nothing",)),
    ("translate gpt x", ("Transformer", "'GPT'", "fastformer generate")),
    ("generate run x", ("GPT", "'Transformer'", "fastformer translate")),
    ("average nothing", ("nothing",)),
    ("average run --last 0", ("--last", "0")),
    ("demo --out run", ("run", "--out")),
    ("demo --out pairs.tsv", ("pairs.tsv",)),
    # Requests to a model.
    ("translate run --file nothing.txt", ("nothing.txt",)),
    ("translate run x --attention nowhere/a.png --max_new_tokens 2", ("nowhere/a.png",)),
    # YAML.
    ("train new --config unknown_model.yaml", ("'dropuot' of the model", "did you mean 'dropout'?")),
    ("train new --config misplaced.yaml", ("'d_model'", "model: {d_model: ...}")),
    ("train new --config type.yaml", ("type.yaml", "steps", "'many'")),
    ("train new --config list.yaml", ("list.yaml", "name: value")),
    ("train new --config cut.yaml", ("cut.yaml", "nothing")),
    ("train new --config deep.yaml", ("deep.yaml", "no YAML")),
    ("train new --config tag.yaml", ("tag.yaml", "no YAML")),
    ("train new --config cycle.yaml", ("cycle.yaml", "model")),
    ("train new --config .", (" .",)),
    ("train new --config run/model.safetensors", ("model.safetensors", "no YAML")),
    # Sizes that nothing can have.
    ("train new --train_tsv pairs.tsv --tokenizer bytes --max_tokens 3", ("max_tokens", "8 tokens", "3")),
    # Names of missing files, and files of a wrong kind.
    ("train new --train_tsv .", ("text file",)),
    ("train new --train_tsv pipe", ("text file", "pipe")),
    ("train new --train_tsv pairs.tsv --tokenizer pipe", ("pipe", "file")),
    ("train new --train_tsv pairs.tsv --tokenizer text.txt", ("text.txt", "tokenizer.json")),
    ("train new --train_tsv pairs.tsv --tokenizer .", ("tokenizer.json",)),
    ("train pairs.tsv/x --train_tsv pairs.tsv --tokenizer bytes", ("pairs.tsv",)),
    ("train new --train_tsv pairs.tsv --tokenizer bytes --init_from text.txt", ("text.txt",)),
    ("train new --model gpt --train_text run", ("*.txt", "run")),
    ("translate text.txt x", ("text.txt",)),
    ("translate run x --attention /", ("PNG", "'/'")),
    ("translate run x --attention folder.png", ("PNG", "'folder.png'")),
    ("translate run --file text.txt --reference pairs.tsv", ("20", "30", "aligned")),
    ("translate run --file text.txt --reference nothing.txt", ("nothing.txt",)),
    ("average text.txt", ("text.txt",)),
]


@each("command, phrases", FLAGS)
def test_flags_that_do_not_fit(command, phrases, tmp_path, monkeypatch, ran) -> None:
    monkeypatch.chdir(tmp_path)
    refused(shlex.split(command), 2, phrases, tmp_path, ran)


@each("command, phrases", VALUES)
def test_impossible_values(command, phrases, folder, ran) -> None:
    refused(shlex.split(command), 1, phrases, folder, ran)


def cut(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: len(data) * 2 // 3])


def piped(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)  # to open it would wait for ever


def changed(**changes: object) -> Callable[[Path], object]:
    return lambda file: file.write_text(json.dumps(json.loads(file.read_text()) | changes)) and None


DAMAGE: list[tuple[str, Callable[[Path], object], tuple[str, ...]]] = [
    ("model.safetensors", Path.unlink, ("model.safetensors",)),
    ("model.safetensors", cut, ("model.safetensors", "damaged")),
    ("config.json", changed(architecture="Tranformer"), ("'Tranformer'",)),
    ("config.json", changed(d_model=32), ("model.safetensors", "misshapen")),
    ("config.json", changed(special_ids={"start": 259}), ("259", "start")),
    ("config.json", changed(special_ids={"pad": 3}), ("tokenizer", "pad=3")),
    ("config.json", lambda file: file.write_text("[" * 100_000) and None, ("config.json",)),
    ("config.json", lambda file: file.write_bytes(b"\xff\xfe") and None, ("config.json",)),
    ("tokenizer.json", lambda file: file.write_text('{"model": {"type": "BPE"}}') and None, ("tokenizer.json",)),
    ("tokenizer.json", Path.unlink, ("tokenizer.json",)),
    ("tokenizer.json", cut, ("tokenizer.json",)),
]


@pytest.mark.parametrize(("name", "damage", "phrases"), DAMAGE)
def test_damaged_models(name, damage, phrases, folder, ran) -> None:
    damage(folder / "run" / name)
    refused(["translate", "run", "x"], 1, phrases, folder, ran)


@pytest.mark.parametrize(
    ("name", "damage", "phrases"),
    [
        ("config.yaml", Path.unlink, ("config.yaml",)),
        ("config.yaml", lambda file: file.write_text("steps: x\n...\n") and None, ("steps",)),
        ("checkpoints/step-00000002.pt", cut, ("damaged",)),
        ("checkpoints/step-00000002.pt", piped, ("damaged",)),
    ],
)
def test_damaged_runs_do_not_resume(name, damage, phrases, folder, ran) -> None:
    damage(folder / "run" / name)
    refused(["train", "run", "--resume"], 1, phrases, folder, ran)


def test_a_typo_is_recognised(tmp_path, monkeypatch, ran) -> None:
    """A flag with one letter doubled, dropped or swapped is refused, and the message names the correct flag."""
    monkeypatch.chdir(tmp_path)
    slips, names = random.Random(0), [name for name in TrainConfig().to_dict() if len(name) > 5]
    for name in slips.sample(names, 12):
        place, kind = slips.randrange(1, len(name) - 1), slips.choice("+-x")
        letters = {"+": 2 * name[place], "-": "", "x": name[place + 1] + name[place]}[kind]
        slip = name[:place] + letters + name[place + (2 if kind == "x" else 1) :]
        if slip in TrainConfig().to_dict():
            continue
        assert f"did you mean '--{name}'?" in ran("train", "new", f"--{slip}", "1", code=2).err, (slip, name)


@pytest.mark.parametrize("name", ["config.json", "config.yaml", "tokenizer.json", "metrics.jsonl"])
def test_a_new_run_overwrites_no_file_of_the_user(name, folder, ran) -> None:
    (folder / "new").mkdir()
    (folder / "new" / name).write_text("mine")
    command = "train new --train_tsv pairs.tsv --tokenizer bytes"
    refused(command.split(), 1, (name,), folder, ran)


def test_metrics_are_written_only_to_their_file(folder, ran) -> None:
    (folder / "run" / "metrics.jsonl").rename(folder / "elsewhere.jsonl")
    for put in (
        lambda path: path.symlink_to("../elsewhere.jsonl"),
        lambda path: path.symlink_to("nowhere"),
        Path.mkdir,
        os.mkfifo,
    ):
        put(folder / "run" / "metrics.jsonl")
        before = (folder / "elsewhere.jsonl").read_bytes()
        assert "metrics.jsonl" in ran("train", "run", "--resume", "--steps", "3", code=1).err
        assert (folder / "elsewhere.jsonl").read_bytes() == before
        path = folder / "run" / "metrics.jsonl"
        path.rmdir() if path.is_dir() else path.unlink()
