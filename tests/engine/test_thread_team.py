"""The thread team runs each task once and in its stage, for many callers, after a fork, on no extra threads."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fastformer.ops import _extension

MODULE: Any = _extension.module()
pytestmark = pytest.mark.skipif(MODULE is None, reason="no C++ extension for this CPU")


def expected(sizes: list[int], rounds: int) -> list[int]:
    """Returns the result of `_stages_check`, with one task after the other."""
    written = [[0] * size for size in sizes]
    for _ in range(rounds):
        for i, stage in enumerate(written):
            total = 0
            for number in written[i - 1] if len(sizes) > 1 else []:
                total = (total * 31 + number) % 2**64
            for task in range(len(stage)):
                stage[task] = (stage[task] * 7 + total + task + 1) % 2**64
    return written[-1]


@pytest.mark.parametrize("threads", [1, 2, 3, 4, 2])
def test_each_task_runs_once_and_after_the_previous_stage(threads: int) -> None:
    dice = random.Random(threads)
    for _ in range(40):
        sizes = [dice.choice([0, 1, 1, 2, 3, 7, 40]) for _ in range(dice.randint(1, 9))]
        rounds = dice.randint(1, 6)
        assert MODULE._stages_check(sizes, rounds, threads) == expected(sizes, rounds), sizes
    sizes = [16, 1, 8, 0, 3, 2]
    assert MODULE._stages_check(sizes, 3000, threads) == MODULE._stages_check(sizes, 3000, 1)


def test_there_may_be_nothing_to_do() -> None:
    assert MODULE._stages_check([], 3, 2) == MODULE._stages_check([0], 3, 2) == MODULE._stages_check([0, 0], 3, 2) == []


def test_callers_at_the_same_time_do_not_disturb_each_other() -> None:
    sizes, rounds = [9, 1, 4, 30], 10_000  # long enough to meet
    right = MODULE._stages_check(sizes, rounds, 1)
    with ThreadPoolExecutor(4) as callers:
        results = callers.map(lambda threads: MODULE._stages_check(sizes, rounds, threads), (2, 3, 2, 3))
        assert [*results] == [right] * 4


def test_a_fork_in_the_middle_of_another_threads_run_leaves_the_child_able_to_run() -> None:
    sizes = [9, 1, 4, 30]
    right = expected(sizes, 20)
    goes_on = True

    def keep_running() -> None:
        while goes_on:
            MODULE._stages_check(sizes, 500, 2)

    def check() -> None:
        assert all(MODULE._stages_check(sizes, 20, threads) == right for threads in (2, 3, 1))

    caller = threading.Thread(target=keep_running)
    caller.start()
    try:
        for _ in range(10):
            in_child(check)
    finally:
        goes_on = False
        caller.join()
    assert MODULE._stages_check(sizes, 20, 2) == right


def windows_alone(together: int, alone: int, waits: bool, by_one: int, count: int, threads: int = 8) -> str:
    """Returns, for windows of 30 ms with 10 runs each, T for the team or A for the caller alone.

    Work is done at the given speeds together and alone, and would take by_one at the pace of one thread.
    """
    runs: list[tuple[int, float, int, bool, int]] = []
    for place in range(3 * count):
        is_alone = MODULE._contention_check([*runs, (10, 1, threads, False, 10)])[-1]
        waited = waits and place % 3 == 0
        runs.append((10, alone, 1, False, 10) if is_alone else (10, together, threads, waited, by_one))
    modes = MODULE._contention_check(runs)
    assert all(len(set(modes[i : i + 3])) == 1 for i in range(0, len(modes), 3))
    return "".join("TA"[mode] for mode in modes[::3])


def test_callers_continue_alone_only_while_that_is_faster() -> None:
    """As long as threads wait long for each other, trials continue, less and less often if their outcome stays the
    same.
    """
    assert windows_alone(10, 20, False, 20, 99) == windows_alone(10, 20, True, 30, 99) == 99 * "T"
    assert windows_alone(20, 10, True, 29, 99) == "TA" + 17 * "T" + "A" + 33 * "T" + "A" + 33 * "T" + "A" + 11 * "T"
    assert windows_alone(10, 20, True, 20, 60) == "TA" + 9 * "A" + "T" + 17 * "A" + "T" + 30 * "A"


def test_two_busy_threads_are_not_queried() -> None:
    """On an idle machine too, they wait a little at the end of each stage."""
    assert windows_alone(10, 20, True, 15, 99, threads=2) == 99 * "T"
    assert windows_alone(10, 20, True, 14, 9, threads=2) == "T" + 8 * "A"


def test_callers_get_helpers_again_if_these_are_faster_again() -> None:
    together, alone, again = (30, 10, 2, True, 20), (30, 20, 1, False, 30), (30, 40, 2, False, 60)
    assert MODULE._contention_check([together] + 10 * [alone] + 30 * [again]) == [False] + 10 * [True] + 30 * [False]


def test_a_long_run_is_not_slower_than_short_ones() -> None:
    """A prompt has as many tasks as a step, and takes ten times as long."""
    prompt, alone, step = (300, 100.0, 2, True, 400), (30, 7.0, 1, False, 30), (30, 10.0, 2, False, 40)
    assert MODULE._contention_check([prompt, alone, step, step]) == [False, True, False, False]


def until(holds: Callable[[], bool]) -> bool:
    """Returns whether a condition becomes true; the machine may be busy."""
    deadline = time.monotonic() + 30
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def in_child(check: Callable[[], object]) -> None:
    """Calls a function in a forked child, which has no helpers at first."""
    child = os.fork()
    if child == 0:
        try:
            check()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(1)
    if not until(lambda: os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None):
        os.kill(child, signal.SIGKILL)  # it hangs
    assert os.waitpid(child, 0)[1] == 0


def read(task: str, name: str) -> str:
    return Path(f"/proc/self/task/{task}/{name}").read_text()


def is_shared(threads: int) -> bool:
    return bool(MODULE._stages_threads(16, 5, threads) == threads)


def sleeps(task: str) -> bool:
    return read(task, "stat").rsplit(")")[1].split()[0] == "S"


def cpu_time(task: str) -> list[str]:
    return read(task, "stat").rsplit(")")[1].split()[11:13]


def test_helpers_start_on_demand_and_sleep_between_runs() -> None:
    def check() -> None:
        before = set(os.listdir("/proc/self/task"))
        assert MODULE._stages_threads(16, 1, 1) == 1
        helping: set[str] = set()
        for threads, most in ((1, 1), (2, 2), (4, 4), (2, 4)):
            assert until(partial(is_shared, threads)), "no thread helps"
            helping = set(os.listdir("/proc/self/task")) - before
            assert len(helping) == most - 1
        for _ in range(20):  # those who have just helped are awake
            MODULE._stages_threads(16, 1, 4)
            assert MODULE._stages_threads(16, 1, 2) <= 2
        for task in helping:
            blocked = int(read(task, "status").split("SigBlk:")[1].split()[0], 16)
            assert all(blocked >> (number - 1) & 1 for number in (signal.SIGINT, signal.SIGTERM))
            assert until(partial(sleeps, task)), "it never sleeps"
        slept = {task: cpu_time(task) for task in helping}
        time.sleep(0.1)
        assert {task: cpu_time(task) for task in helping} == slept
        assert until(partial(is_shared, 2)), "no thread wakes"

    in_child(check)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_an_error_of_a_task_reaches_only_its_caller(threads) -> None:
    sizes = [7, 1, 12]
    for _ in range(50):
        with pytest.raises(RuntimeError, match="a task broke"):
            MODULE._stages_break(9, threads)
        assert MODULE._stages_check(sizes, 3, threads) == expected(sizes, 3)
