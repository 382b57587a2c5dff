"""Tests `fastformer train` as a user or a scheduler runs it: resuming, signals, refused settings."""

from __future__ import annotations

import logging
import os
import re
import shlex
import signal
from pathlib import Path

import pytest
from docstring_parser import parse as parse_docstring

from fastformer.checkpoints.training_state import latest_checkpoint
from fastformer.cli import main
from fastformer.commands.train import read_settings
from fastformer.data import load_tokenizer
from fastformer.training import TrainConfig, Trainer
from fastformer.training.run_config import load_config
from tests.training.tiny import contents

FLAGS = shlex.split(
    "--tokenizer bytes --max_tokens 64 --val_examples 0 --max_len 40 --log_every 1 --model.d_model 16 "
    "--model.num_heads 2 --model.d_ff 32 --model.num_encoder_layers 1 --model.num_decoder_layers 1"
)


@pytest.fixture
def command(tmp_path) -> list[str]:
    (tmp_path / "train.tsv").write_text("".join(f"word {i}\twort {i}\n" for i in range(30)))
    return ["train", str(tmp_path / "run"), "--train_tsv", str(tmp_path / "train.tsv"), *FLAGS]


def step(run: str) -> int:
    found = latest_checkpoint(Path(run))
    assert found is not None
    return int(found[1]["counters"]["step"])


@pytest.mark.parametrize("kind", ["transformer", "gpt", "lstm"])
def test_the_help_names_the_default_model(kind, ran) -> None:
    settings = TrainConfig(model=kind, batching="bucketed").model_config(99)
    of_model, everything = (
        " ".join(ran("train", *words).out.split()) for words in (("--model.help", kind), ["--help"])
    )
    assert "--model.vocab_size" not in of_model and ("encoder_layers" in of_model) == (kind == "transformer")
    shown, presets = of_model.split("presets (--preset):")
    for name, hint in (("d_model", "an integer"), ("dropout", "a number")):
        value = getattr(settings, name)
        flag = shown.partition(f"--model.{name} ")[2].partition("--model.")[0]
        assert f"default: {value})" in flag and hint in flag and ". (" not in flag
        flag = everything.partition(f"--model.{name} ")[2].partition("--model.")[0]
        assert re.search(rf"by default {value}|{kind} {value}[,)]", flag), flag
    assert "max_len" not in everything.partition("by default")[0]
    assert not re.search(r"by default \S+ \(\)", everything)
    for setting in parse_docstring(type(settings).__doc__ or "").params:  # also where others have such a setting
        if f"--model.{setting.arg_name} " in everything:
            flag = everything.partition(f"--model.{setting.arg_name} ")[2].partition("--model.")[0]
            assert " ".join((setting.description or "").split()).rstrip(".") in flag
    if kind == "transformer":
        assert re.search(r"base d_model 512, .*num_encoder_layers 6", presets)
        assert re.search(r"tiny d_model 128, .*num_encoder_layers 2", presets)


def test_a_text_with_fewer_tokens_than_requested(command, caplog) -> None:
    caplog.set_level(logging.INFO)
    command[command.index("bytes")] = "bpe"
    assert main([*command, "--vocab_size", "4000", "--steps", "1"]) == 0
    learned = load_tokenizer(command[1]).vocab_size - 256
    assert learned < 4000 and f"no more than {learned} of them" in caplog.text


def test_the_last_of_two_flags_counts(command) -> None:
    """Of flags that take a single value; see test_every_flag.py for lists."""
    assert main([*command, "--steps", "9", "--steps", "1"]) == 0
    assert step(command[1]) == 1


def test_nothing_is_written_or_deleted_through_a_link(command, tmp_path, ran) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    line = [*command, "--steps", "3", "--save_every", "1", "--keep_last", "1"]
    assert main(line) == 0
    again = ["train", str(run), "--resume", "--steps", "5"]
    (run / "checkpoints").rename(other)
    (other / "step-00000001.pt").write_text("of another run")
    (other / ".step-00000009.pt.0123456789abcdef.tmp").touch()
    (run / "checkpoints").symlink_to(other)
    before = contents(tmp_path)
    for words in (again, [*again[:2], "--resume", "auto", *line[2:]], line):
        assert "checkpoints to be a folder, got a link" in ran(*words, code=1).err
    assert contents(tmp_path) == before
    # Files of the run that are links are replaced, and what they point to stays; the run itself may be a link.
    (run / "checkpoints").unlink()
    (other / "step-00000001.pt").unlink()
    other.rename(run / "checkpoints")
    names = ["config.yaml", "model.safetensors", "config.json", "tokenizer.json"]
    for name in names:
        (run / name).rename(tmp_path / name)
        (run / name).symlink_to(tmp_path / name)
    (tmp_path / "link").symlink_to(run)
    before = {name: (tmp_path / name).read_bytes() for name in names}
    assert main(["train", str(tmp_path / "link"), *again[2:]]) == 0
    assert before == {name: (tmp_path / name).read_bytes() for name in names}
    assert step(str(run)) == 5 and (tmp_path / "link").is_symlink()


@pytest.mark.skipif(os.name != "posix", reason="pipes are POSIX")
def test_a_folder_under_a_files_name_is_refused_at_once(command, tmp_path, ran) -> None:
    run = tmp_path / "run"
    assert main([*command, "--steps", "1"]) == 0
    for name in ("config.yaml", "model.safetensors", "config.json", "tokenizer.json", ".lock"):
        whole = (run / name).read_bytes()
        (run / name).unlink()
        put = os.mkfifo if name == "config.yaml" else Path.mkdir
        put(run / name)
        before = contents(run)
        assert name in ran("train", str(run), "--resume", "--steps", "2", code=1).err
        assert contents(run) == before
        (run / name).rmdir() if (run / name).is_dir() else (run / name).unlink()
        (run / name).write_bytes(whole)


@pytest.mark.skipif(os.name != "posix", reason="these signals are POSIX")
def test_a_preempted_job_resumes_with_the_same_command(command, monkeypatch, capsys, caplog) -> None:
    line = [*command, "--steps", "6", "--resume", "auto"]
    update = Trainer.update

    def preempted(trainer, batches):
        os.kill(os.getpid(), signal.SIGUSR1)
        return update(trainer, batches)

    monkeypatch.setattr(Trainer, "update", preempted)
    for expected in (1, 2):
        assert main(line) == 128 + signal.SIGUSR1
        assert step(command[1]) == expected
    monkeypatch.undo()
    assert main(line) == 0 and step(command[1]) == 6
    capsys.readouterr()
    with caplog.at_level(logging.INFO):
        assert main(line) == 0
    assert "nothing is left to do" in caplog.text and "update 6 of 6 is done" in caplog.text
    assert "validation" not in capsys.readouterr().out


@pytest.mark.skipif(os.name != "posix", reason="these signals are POSIX")
def test_a_signal_while_data_is_read(command, monkeypatch, ran) -> None:
    def terminated(*args: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("fastformer.training.build.load_data", terminated)
    before = signal.getsignal(signal.SIGTERM)
    assert "interrupted" in ran(*command, code=128 + signal.SIGTERM).err
    assert signal.getsignal(signal.SIGTERM) is before and not Path(command[1]).exists()


def test_epochs_instead_of_steps(command, ran) -> None:
    assert "expected steps or epochs, got both" in ran(*command, "--epochs", "1", "--steps", "3", code=1).err
    assert main([*command, "--epochs", "1"]) == 0
    steps = load_config(command[1]).steps
    assert 1 < steps == step(command[1])
    assert main([*command[:2], "--resume", "--epochs", "2"]) == 0
    assert load_config(command[1]).steps > steps


def test_fine_tuning(command, tmp_path, ran) -> None:
    assert main([*command, "--steps", "1"]) == 0
    other = ["train", str(tmp_path / "other"), "--train_tsv", str(tmp_path / "train.tsv"), "--steps", "1"]
    ran(*other, "--val_examples", "0", "--init_from", command[1])
    assert load_config(other[1]).settings["d_model"] == 16
    bad = ["train", str(tmp_path / "bad"), *other[2:]]
    assert "nowhere" in ran(*bad, "--init_from", str(tmp_path / "nowhere"), code=1).err
    error = ran(*bad, "--init_from", command[1], "--model.d_model", "32", code=1).err
    assert "has d_model 16, got 32: leave d_model out" in error


@pytest.mark.parametrize(
    "line, key, got",
    [
        ("tokenizer: 5", "tokenizer", "5"), ("steps: 5.5", "steps", "5.5"), ("seed: true", "seed", "True"),
        ("steps: 1e400", "steps", "inf"), ("model: {window_layers: maybe}", "model.window_layers", "maybe"),
        ("model: {positions: 3}", "model.positions", "3"), ("lr: fast", "lr", "fast"),
    ],
)  # fmt: skip
def test_a_setting_of_another_type_is_named_with_its_value(line, key, got, tmp_path) -> None:
    (tmp_path / "c.yaml").write_text(f"{line}\n")
    with pytest.raises(ValueError, match=re.escape(f"expected {key} to be ")) as raised:
        read_settings(str(tmp_path / "c.yaml"))
    assert str(raised.value).endswith(f"got '{got}'") and "\n" not in str(raised.value)
