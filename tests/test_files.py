"""A file is written whole or not at all, and nothing else is touched."""

from __future__ import annotations

import copy
import os
import pickle
import secrets
import signal
import stat
import sys
import threading
from unittest.mock import Mock

import pytest

from fastformer import functional
from fastformer.encoding.tokens import Reader
from fastformer.files import read_json, remove_left_overs, write_atomically
from fastformer.generation import evaluation
from fastformer.locks import ForkSafeLock


def test_the_mode_is_what_the_umask_leaves(tmp_path) -> None:
    for mask, mode in ((0o022, 0o644), (0o077, 0o600), (0o002, 0o664)):
        before = os.umask(mask)
        try:
            write_atomically(tmp_path / f"{mask}", b"x")
        finally:
            os.umask(before)
        assert stat.S_IMODE((tmp_path / f"{mask}").stat().st_mode) == mode


def test_a_planted_link_is_never_followed(tmp_path, monkeypatch) -> None:
    (tmp_path / "victim").write_bytes(b"precious")
    monkeypatch.setattr(secrets, "token_hex", lambda count: "00" * count)  # an attacker guesses the name
    (tmp_path / f".file.{'00' * 8}.tmp").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="file"):
        write_atomically(tmp_path / "file", b"new")
    assert (tmp_path / "victim").read_bytes() == b"precious" and not (tmp_path / "file").exists()
    monkeypatch.undo()
    (tmp_path / ".file.tmp").symlink_to(tmp_path / "victim")  # a name that doesn't vary
    (tmp_path / "link").symlink_to(tmp_path / "victim")
    write_atomically(tmp_path / "file", b"new")
    write_atomically(tmp_path / "link", b"new")
    assert (tmp_path / "victim").read_bytes() == b"precious"
    assert (tmp_path / "link").read_bytes() == b"new" and not (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, error) -> None:
    write_atomically(tmp_path / "file", b"old")
    monkeypatch.setattr(os, "fsync", Mock(side_effect=error))
    with pytest.raises(type(error), match="No space left" if isinstance(error, OSError) else None):
        write_atomically(tmp_path / "file", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_bytes() == b"old"


def test_only_leftovers_of_a_kill_are_removed(tmp_path) -> None:
    end = "0123456789abcdef.tmp"
    others = [".mine.tmp", ".a.pt.0123456789abcde.tmp", f"a.pt.{end}", ".hidden", f".thesis.{end}", f".link.pt.{end}"]
    for name in (*others[:-1], f".a.pt.{end}", f".b.json.{end}"):
        (tmp_path / name).touch()
    (tmp_path / others[-1]).symlink_to(tmp_path / ".hidden")
    (tmp_path / f".folder.pt.{end}").mkdir()
    remove_left_overs(tmp_path, ["*.pt", "b.json"])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*others, f".folder.pt.{end}"])


def test_a_file_that_is_far_too_large_is_not_read(tmp_path) -> None:
    with open(tmp_path / "x.json", "wb") as file:
        file.truncate(1 << 29)  # without a byte on the disk
    with pytest.raises(ValueError, match="small"):
        read_json(tmp_path / "x.json")
    (tmp_path / "x.json").write_text('{"a": 1, "a": 2}')
    assert read_json(tmp_path / "x.json") == {"a": 2}
    for wrong, unique in (('{"a": 1, "a": 2}', True), ("[]", False), ("{", False), ("[" * 100_000, False)):
        (tmp_path / "x.json").write_text(wrong)
        with pytest.raises(ValueError, match="x.json"):
            read_json(tmp_path / "x.json", unique_names=unique)


# A lock that a thread holds during a fork is open in the child.


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fork")
def test_a_forked_child_finds_every_lock_open() -> None:
    locks = [ForkSafeLock(), Reader(None, 8)._lock, functional._lock, evaluation._lock]
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with locks[0], locks[1], locks[2], locks[3]:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # ends a child that waits
        for lock in locks:
            with lock:
                pass
        os._exit(0)
    done.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0


def test_a_copy_is_open() -> None:
    lock = ForkSafeLock()
    with lock:
        for other in (copy.deepcopy(lock), pickle.loads(pickle.dumps(lock))):
            with other:
                assert other is not lock
