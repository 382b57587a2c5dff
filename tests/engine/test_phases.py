"""Phases of tasks on a team of threads: each task once and in its phase, for many callers, behind a fork, and no more
threads than were asked for."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from fastformer.ops import _extension

MODULE: Any = _extension.module()
pytestmark = pytest.mark.skipif(MODULE is None, reason="no C++ extension for this CPU")


def expected(sizes: list[int], rounds: int) -> list[int]:
    """What `_phases_check` computes, one task after the other."""
    written = [[0] * size for size in sizes]
    for _ in range(rounds):
        for i, own in enumerate(written):
            total = 0
            for number in written[i - 1] if len(sizes) > 1 else []:
                total = (total * 31 + number) % 2**64
            for task in range(len(own)):
                own[task] = (own[task] * 7 + total + task + 1) % 2**64
    return written[-1]


@pytest.mark.parametrize("threads", [1, 2, 3, 4, 2])
def test_each_task_runs_once_and_behind_all_of_the_phase_before(threads: int) -> None:
    dice = random.Random(threads)
    for _ in range(40):
        sizes = [dice.choice([0, 1, 1, 2, 3, 7, 40]) for _ in range(dice.randint(1, 9))]
        rounds = dice.randint(1, 6)
        assert MODULE._phases_check(sizes, rounds, threads) == expected(sizes, rounds), sizes
    sizes = [16, 1, 8, 0, 3, 2]
    assert MODULE._phases_check(sizes, 3000, threads) == MODULE._phases_check(sizes, 3000, 1)


def test_there_may_be_nothing_to_do() -> None:
    assert MODULE._phases_check([], 3, 2) == MODULE._phases_check([0], 3, 2) == MODULE._phases_check([0, 0], 3, 2) == []


def test_callers_at_the_same_time_do_not_disturb_each_other() -> None:
    sizes, rounds = [9, 1, 4, 30], 2000
    right = MODULE._phases_check(sizes, rounds, 1)
    found: list[list[int]] = []

    def call(threads: int) -> None:
        found.append(MODULE._phases_check(sizes, rounds, threads))

    callers = [threading.Thread(target=call, args=(1 + i % 3,)) for i in range(6)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert found == [right] * 6


def exit_code_of(child: int) -> int:
    """Waits for a process, which must not hang."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -1


def test_a_fork_in_the_middle_of_another_threads_run_leaves_the_child_able_to_run() -> None:
    sizes = [9, 1, 4, 30]
    right = expected(sizes, 20)
    goes_on = True

    def keep_running() -> None:
        while goes_on:
            MODULE._phases_check(sizes, 500, 2)

    caller = threading.Thread(target=keep_running)
    caller.start()
    try:
        for _ in range(10):
            child = os.fork()
            if child == 0:
                try:
                    is_right = all(MODULE._phases_check(sizes, 20, threads) == right for threads in (2, 3, 1))
                    os._exit(0 if is_right and helpers() == 2 else 1)
                finally:
                    os._exit(2)
            assert exit_code_of(child) == 0
    finally:
        goes_on = False
        caller.join()
    assert MODULE._phases_check(sizes, 20, 2) == right


def helpers() -> int:
    """The threads of this process besides those of Python's making."""
    return len(os.listdir("/proc/self/task")) - threading.active_count()


def until(holds: Callable[[], bool]) -> bool:
    """Whether it comes to hold: the machine may be busy."""
    deadline = time.monotonic() + 30
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


_PROGRAM = """
import os, threading, time
from tests.engine.test_phases import MODULE, helpers, until

def read(task, name):
    with open(f"/proc/self/task/{task}/{name}") as file:
        return file.read()

before = set(os.listdir("/proc/self/task"))
assert MODULE._phases_threads(64, 50, 1) == 1 and set(os.listdir("/proc/self/task")) == before
for threads in (2, 4, 2):
    assert until(lambda: MODULE._phases_threads(64, 50, threads) >= 2), "nobody helps"
    assert MODULE._phases_threads(64, 2000, threads) <= threads
    helping = set(os.listdir("/proc/self/task")) - before
    assert len(helping) == (1 if before and threads == 2 and len(helping) < 3 else 3), helping
for task in helping:
    # Signals are for the threads of the program; and with nothing to do it sleeps.
    blocked = int(read(task, "status").split("SigBlk:")[1].split()[0], 16)
    assert blocked >> (2 - 1) & 1 and blocked >> (15 - 1) & 1, hex(blocked)
    assert until(lambda: read(task, "stat").rsplit(")")[1].split()[0] == "S"), "it never sleeps"
slept = {task: read(task, "stat").split()[13:15] for task in helping}
time.sleep(0.1)
assert {task: read(task, "stat").split()[13:15] for task in helping} == slept
assert until(lambda: MODULE._phases_threads(64, 50, 2) >= 2), "nobody wakes"
print("well")
"""


def test_helpers_come_when_they_are_asked_for_no_more_than_that_and_sleep_in_between() -> None:
    found = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=120)
    assert (found.returncode, found.stdout) == (0, "well\n"), found.stderr
