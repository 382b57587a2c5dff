"""A lock that a thread holds during a fork is open in the child."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import sys
import threading

import pytest

from fastformer import functional
from fastformer.encoding.tokens import Reader
from fastformer.generation import model_protocols
from fastformer.locks import ForkSafeLock


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fork")
def test_a_forked_child_finds_every_lock_open() -> None:
    locks = [ForkSafeLock(), Reader(None, 8)._lock, functional._lock, model_protocols._lock]
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
