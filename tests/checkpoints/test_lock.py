"""Two trainings never share a folder, and a dead one locks nothing."""

from __future__ import annotations

import errno
import logging
import os
import signal
import socket
from unittest.mock import Mock

import pytest

from fastformer.checkpoints import lock as module
from fastformer.checkpoints.lock import LOCK, RunLock
from fastformer.training import start
from tests.training.tiny import contents

pytest.importorskip("fcntl", reason="locks of this kind are POSIX")


def test_a_second_training_is_refused_with_the_holder(tmp_path) -> None:
    with RunLock(tmp_path), pytest.raises(ValueError, match=rf"\b{os.getpid()}\b"):
        RunLock(tmp_path).acquire()
    with RunLock(tmp_path) as again:
        again.acquire()  # held already
    RunLock(tmp_path).acquire()


def test_a_killed_process_holds_no_lock(tmp_path) -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:  # nothing but system calls from here to its end
        RunLock(tmp_path).acquire()
        lock = RunLock(tmp_path / "sub")
        (tmp_path / "sub").mkdir()
        lock.acquire()
        os.write(writing, b"x")
        signal.pause()
    os.read(reading, 1)
    with pytest.raises(ValueError, match=rf"\b{child}\b"):
        RunLock(tmp_path / "sub").acquire()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with RunLock(tmp_path / "sub"):
        assert (tmp_path / "sub" / LOCK).read_text().startswith(f"process {os.getpid()} on ")


def test_a_file_system_without_locks_gets_a_warning(tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(module.fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    with caplog.at_level(logging.WARNING), RunLock(tmp_path):
        pass
    assert "can't be locked" in caplog.text and "make sure that no other process uses it" in caplog.text


def test_a_planted_link_is_not_followed(tmp_path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / LOCK).symlink_to(tmp_path / "victim")
    with pytest.raises(ValueError, match=rf"{LOCK}.*\blink\b"):
        RunLock(tmp_path).acquire()
    assert (tmp_path / "victim").read_text() == "precious"


def test_a_file_of_that_name_that_is_not_a_lock_stays(tmp_path) -> None:
    (tmp_path / LOCK).write_text("my notes\nprocess 3 on a host\n")
    with pytest.raises(ValueError, match=LOCK):
        RunLock(tmp_path).acquire()
    assert (tmp_path / LOCK).read_text() == "my notes\nprocess 3 on a host\n"
    # As a process leaves it that is killed before it writes its name, and that of a longer name.
    for text in ("", "process 12345678 on a machine with a name that is longer than ours, whatever that is\n"):
        (tmp_path / LOCK).write_text(text)
        for _ in range(2):
            with RunLock(tmp_path):
                assert (tmp_path / LOCK).read_text() == f"process {os.getpid()} on {socket.gethostname()}\n"


def test_two_trainers_in_a_folder(config, tmp_path) -> None:
    run = tmp_path / "run"
    first = start(config, run)
    before = contents(run)
    for resume in (False, "auto"):
        with pytest.raises(ValueError, match=rf"\b{os.getpid()}\b"):
            start(config, run, resume=resume)
    assert contents(run) == before
    first.train()
    second = start(config, run, resume=True)
    with pytest.raises(ValueError, match=rf"\b{os.getpid()}\b"):
        start(config, run, resume=True)
    del second  # a trainer that is gone holds nothing
    start(config, run, resume=True)
