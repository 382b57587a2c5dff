"""A training survives the loss of its terminal, and train.log has all its output."""

from __future__ import annotations

import io
import logging
import os
import re
import sys
from pathlib import Path

import pytest
import torch

from fastformer.checkpoints import load_model
from fastformer.cli import main
from fastformer.training import start
from fastformer.training.run_log import RunLog
from tests.training.tiny import changed, lines, losses

TIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ")


class Failing(io.StringIO):
    """A stream to a device that has gone away, such as a terminal."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        raise self.error

    def flush(self) -> None:
        raise self.error


class FailingTerminal(Failing):
    def isatty(self) -> bool:
        return True


def same_model(one: Path, other: Path) -> bool:
    a, b = (load_model(run)[0].state_dict() for run in (one, other))
    return all(torch.equal(a[name], b[name]) for name in a)


def test_the_log_has_what_the_terminal_has_and_the_time(config, tmp_path, capsys) -> None:
    start(changed(config, steps=3), tmp_path / "run").train()
    said = [line for line in capsys.readouterr().out.splitlines() if line]
    log = (tmp_path / "run" / "train.log").read_text().splitlines()
    assert "fastformer train" in log[0] and all(TIME.match(line) for line in log)
    assert [line[20:] for line in log if line[20:] in said] == said and len(said) > 3
    start(changed(config, steps=4), tmp_path / "run", resume=True).train()
    longer = (tmp_path / "run" / "train.log").read_text().splitlines()
    assert longer[: len(log)] == log and any("update      4/4" in line for line in longer[len(log) :])


@pytest.mark.parametrize(
    "error",
    [BrokenPipeError(32, "Broken pipe"), OSError(28, "No space left on device"), OSError(5, "Input/output error"),
     ValueError("I/O operation on closed file")],
    ids=lambda error: str(error),
)  # fmt: skip
def test_a_training_ends_as_without_the_failure(config, tmp_path, monkeypatch, error) -> None:
    config = changed(config, steps=4)
    start(config, tmp_path / "whole").train()
    for number, (out, err) in enumerate(((Failing, io.StringIO), (Failing, FailingTerminal))):
        monkeypatch.setattr(sys, "stdout", out(error))
        monkeypatch.setattr(sys, "stderr", err(error) if err is FailingTerminal else err())
        run = tmp_path / f"run-{number}"
        words = ["train", str(run), "--config", str(tmp_path / "whole" / "config.yaml")]
        if number:
            assert main(words) == 0
        else:  # the library, without the command
            start(config, run).train()
        monkeypatch.undo()
        assert same_model(run, tmp_path / "whole") and losses(run) == losses(tmp_path / "whole")
        log = (run / "train.log").read_text()
        reason = str(error.strerror if isinstance(error, OSError) else error)
        assert re.search(rf"standard output .*\({re.escape(reason)}\)", log) and "update      4/4" in log


def test_files_of_no_run_are_not_changed(config, tmp_path) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    run.mkdir()
    (run / "train.log").write_text("mine\n")
    (run / "train-2.log").symlink_to(elsewhere)
    trainer = start(changed(config, steps=1), run)
    trainer.train()
    assert (run / "train.log").read_text() == "mine\n" and not elsewhere.exists()
    assert "update      1/1" in (run / "train-3.log").read_text()
    start(changed(config, steps=2), run, resume=True).train()
    assert "update      2/2" in (run / "train-3.log").read_text() and not (run / "train-4.log").exists()


def test_an_unwritable_log_does_not_end_a_training(config, tmp_path, monkeypatch, caplog) -> None:
    trainer = start(changed(config, steps=2), tmp_path / "run")
    original = os.open

    def full(path, *args, **options):
        if str(path).endswith(".log"):
            raise OSError(28, "No space left")
        return original(path, *args, **options)

    monkeypatch.setattr(os, "open", full)
    trainer.train()
    assert trainer.position.finished and caplog.text.count("(No space left)") == 1


def test_an_error_is_written_to_the_log(config, tmp_path, monkeypatch) -> None:
    trainer = start(config, tmp_path / "run")

    def broken(*_: object) -> None:
        raise RuntimeError("the roof is on fire")

    monkeypatch.setattr(trainer, "update", broken)
    with pytest.raises(RuntimeError):
        trainer.train()
    assert "ended by RuntimeError: the roof is on fire" in (tmp_path / "run" / "train.log").read_text()
    assert not any(isinstance(handler, RunLog) for handler in logging.getLogger("fastformer").handlers)


def test_a_full_disk_for_metrics_does_not_end_a_training(config, tmp_path, monkeypatch, caplog) -> None:
    import builtins

    trainer = start(changed(config, steps=4), tmp_path / "run")
    original, opened = builtins.open, []

    def full(file, *args, **options):
        if str(file).endswith("metrics.jsonl"):
            opened.append(file)
            if len(opened) == 2:
                raise OSError(28, "No space left")
        return original(file, *args, **options)

    monkeypatch.setattr(builtins, "open", full)
    trainer.train()
    monkeypatch.undo()
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    (tmp_path / "run" / "metrics.jsonl").write_text("\n".join(filter(None, text.splitlines())))
    assert [line["step"] for line in lines(tmp_path / "run", "train")] == [1, 3, 4]
    assert "lacks the line of update 2" in caplog.text
