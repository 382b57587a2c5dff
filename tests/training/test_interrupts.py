"""Signals end a training after everything is saved, and no signal is lost."""

from __future__ import annotations

import functools
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from fastformer.checkpoints import load_model
from fastformer.checkpoints.training_state import checkpoints, latest_checkpoint
from fastformer.models.weights import read_notes
from fastformer.training import start
from fastformer.training.interrupts import SIGNALS, Interrupted, Interrupts
from tests.training.tiny import before_updates, changed, contents, lines, losses, weights

pytestmark = pytest.mark.skipif(os.name != "posix", reason="these signals are POSIX")


@pytest.fixture(autouse=True)
def _is_interruptible() -> Iterator[None]:
    """Undoes that a shell lets background processes ignore SIGINT, or nohup SIGHUP, which a training would respect."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {signum: signal.signal(signum, handler) for signum, handler in usual.items()}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


def at_step(trainer, step: int, *signals: int) -> None:
    """Sends signals in the middle of the update after `step`."""

    def signal_now(_):
        if trainer.step == step:
            for signum in signals:
                signal.raise_signal(signum)

    before_updates(trainer, signal_now)


@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGUSR1, 138)]
)
def test_each_signal_ends_the_training_after_the_current_update(config, tmp_path, signum, code, caplog) -> None:
    before = [signal.getsignal(s) for s in SIGNALS]
    trainer = start(config, tmp_path / "run")
    at_step(trainer, 3, signum)
    trainer.train()
    assert trainer.step == 4 and trainer.interrupted and trainer.interrupts.exit_code == code
    assert latest_checkpoint(tmp_path / "run")[1]["counters"]["step"] == 4
    assert re.search(rf"{signal.Signals(signum).name}\b.*\b4\b.*--resume", caplog.text)
    assert [signal.getsignal(s) for s in SIGNALS] == before
    assert lines(tmp_path / "run", "validation") == []  # the time that is left may be short
    model, _ = load_model(tmp_path / "run")  # there is a model all the same
    assert torch.equal(model.output_weight, trainer.model.output_weight)


def test_an_interrupted_run_ends_like_an_uninterrupted_one(config, tmp_path) -> None:
    config = changed(config, val_every=4, save_every=5, average_last=2, keep_last=2)
    whole = start(config, tmp_path / "whole")
    whole.train()
    first = start(config, tmp_path / "parts")
    at_step(first, 3, signal.SIGTERM)  # where a validation is due too
    first.train()
    second = start(config, tmp_path / "parts", resume=True)
    validate = second.validate

    def interrupted(model):
        if second.step == 8:
            signal.raise_signal(signal.SIGUSR1)
        return validate(model)

    second.validate = interrupted
    assert second.train() is not None and second.step == 8 and second.position.validated == 4
    third = start(config, tmp_path / "parts", resume=True)
    third.train()
    for kind in ("train", "validation", "average"):
        for key in ("step", "loss", "nll", "lr", "kept"):
            assert [a.get(key) for a in lines(tmp_path / "whole", kind)] == [
                b.get(key) for b in lines(tmp_path / "parts", kind)
            ]
    names = [[path.name for path in checkpoints(tmp_path / run)] for run in ("whole", "parts")]
    assert names[0] == names[1]
    one, other = (load_model(tmp_path / run)[0].state_dict() for run in ("whole", "parts"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert read_notes(tmp_path / "whole") == read_notes(tmp_path / "parts")


def test_a_signal_before_the_first_update_is_not_lost(config, tmp_path) -> None:
    start(config, tmp_path / "whole").train()
    trainer = start(config, tmp_path / "run")
    with trainer.interrupts, trainer.interrupts.held():
        signal.raise_signal(signal.SIGTERM)
        trainer.train()
    assert trainer.step == 0 and trainer.interrupts.exit_code == 143
    start(config, tmp_path / "run", resume=True).train()
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_a_signal_while_data_is_read_ends_at_once() -> None:
    with Interrupts() as interrupts, pytest.raises(Interrupted) as caught:
        signal.raise_signal(signal.SIGHUP)
    assert caught.value.signum == signal.SIGHUP and interrupts.exit_code == 129
    assert isinstance(caught.value, KeyboardInterrupt)


def test_a_second_signal_ends_at_once_and_keeps_checkpoints(config, tmp_path) -> None:
    trainer = start(changed(config, save_every=2), tmp_path / "run")
    at_step(trainer, 5, signal.SIGINT, signal.SIGINT)
    with pytest.raises(Interrupted):
        trainer.train()
    assert latest_checkpoint(tmp_path / "run")[1]["counters"]["step"] == 4
    assert not list((tmp_path / "run").rglob("*.tmp"))
    start(config, tmp_path / "run", resume=True).train()  # nothing is locked any more


def test_ignored_signals_stay_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
    try:
        with Interrupts() as interrupts:
            signal.raise_signal(signal.SIGHUP)
        assert interrupts.signum is None and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_entered_again_inside() -> None:
    before = signal.getsignal(signal.SIGTERM)
    interrupts = Interrupts()
    with interrupts:
        with interrupts:
            pass
        with interrupts.held():
            signal.raise_signal(signal.SIGTERM)
            assert (interrupts.signum, interrupts.name) == (signal.SIGTERM, "SIGTERM")
            with pytest.raises(Interrupted), interrupts.at_once():
                raise AssertionError("it had come before")
    assert signal.getsignal(signal.SIGTERM) is before


def test_another_thread_trains_as_the_main_one_and_leaves_signals_alone(config, tmp_path) -> None:
    """Python lets only the main thread set what a signal does."""

    def handlers() -> list[object]:
        return [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]

    before, found = handlers(), {}
    for name in ("main", "other"):
        trainer, seen = start(changed(config, steps=3, save_every=2), tmp_path / name), list[list[object]]()
        before_updates(trainer, functools.partial(lambda found, _: found.append(handlers()), seen))
        if name == "main":
            trainer.train()
        else:
            thread = threading.Thread(target=trainer.train)
            thread.start()
            thread.join()
        assert len(seen) == 3 and (before in seen) == (name == "other")
        assert trainer.position.finished and not trainer.interrupted
        found[name] = (losses(tmp_path / name), weights(trainer).tolist(), sorted(contents(tmp_path / name)))
    assert found["main"] == found["other"] and before == handlers()


@pytest.mark.slow
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 138), (signal.SIGINT, 130)])
def test_the_command_ends_with_the_signals_code(config, tmp_path, signum, code) -> None:
    run = tmp_path / "run"
    flags = shlex.split("--tokenizer bytes --max_tokens 64 --steps 1000000 --val_every 0 --resume auto")
    command = [sys.executable, "-m", "fastformer.cli", "train", str(run), "--train_tsv", config.train_tsv, *flags]
    for _ in range(2):  # begins, and goes on
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        before = len(losses(run)) if (run / "metrics.jsonl").exists() else 0
        while not (run / "metrics.jsonl").exists() or len(losses(run)) <= before:
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signum)
        _, error = process.communicate(timeout=60)
        assert process.returncode == code and "continue with --resume" in error and "Traceback" not in error
    assert latest_checkpoint(run)[1]["counters"]["step"] > 50
