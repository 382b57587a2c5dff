"""Each task of an op runs once, on either kind of thread, for many callers, after a fork, with equal results."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fastformer
from fastformer.ops import _extension
from tests.engine.test_thread_team import in_child, until

pytestmark = pytest.mark.skipif(_extension.load() is None, reason="no C++ extension for this CPU")
CHECKS: Any = torch.ops.fastformer_checks
SHARINGS = ("openmp", "team", "by_load")


def tasks_check(tasks: int, rounds: int, breaks: int) -> tuple[list[int], int]:
    """Returns how often each task ran, and on how many threads. Tasks from `breaks` on throw."""
    counts, most = CHECKS.tasks_check(tasks, rounds, breaks)
    return counts.tolist(), most


def waits_check(regions: list[tuple[int, int, int]]) -> list[int]:
    """Returns for how many milliseconds the team takes over after each region."""
    milliseconds: list[int] = CHECKS.waits_check(torch.tensor(regions)).tolist()
    return milliseconds


@pytest.fixture(autouse=True)
def settings_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    CHECKS.set_sharing("by_load")


def gradients(threads: int, sharing: str) -> list[Tensor]:
    """Returns the output and all gradients of a layer that is large enough for several threads."""
    torch.set_num_threads(threads)
    CHECKS.set_sharing(sharing)
    torch.manual_seed(0)
    layer = fastformer.nn.TransformerEncoderLayer(96, 4, 200, dropout=0.1, batch_first=True)
    x = torch.randn(3, 130, 96, requires_grad=True)
    out = layer(x)
    return [out, *torch.autograd.grad(out, [x, *layer.parameters()], torch.randn_like(out))]


def test_neither_the_kind_nor_the_number_of_threads_changes_bits() -> None:
    due = gradients(1, "by_load")
    for sharing in SHARINGS:
        for threads in (2, 3):
            for gradient, right in zip(gradients(threads, sharing), due, strict=True):
                assert torch.equal(gradient, right), (sharing, threads)


def is_shared(threads: int) -> bool:
    return bool(tasks_check(40, 3, 40)[1] == threads)


@pytest.mark.parametrize("sharing", SHARINGS)
def test_each_task_runs_once_on_no_more_threads_than_pytorch_has(sharing: str) -> None:
    CHECKS.set_sharing(sharing)
    for threads in (1, 2, 3, 2):
        torch.set_num_threads(threads)
        for tasks in (0, 1, 2, 40):
            counts, most = tasks_check(tasks, 3, tasks)
            assert counts == [3] * tasks and most <= min(threads, max(tasks, 1))
        assert until(partial(is_shared, threads)), "no thread helps"


@pytest.mark.parametrize("sharing", SHARINGS)
def test_an_error_of_a_task_reaches_the_caller_and_the_next_call_works(sharing: str) -> None:
    CHECKS.set_sharing(sharing)
    torch.set_num_threads(2)
    for _ in range(5):
        with pytest.raises(RuntimeError, match="a task broke"):
            tasks_check(9, 1, 4)
        assert tasks_check(9, 2, 9)[0] == [2] * 9


@pytest.mark.parametrize("sharing", SHARINGS)
def test_callers_at_the_same_time_have_tasks_of_their_own(sharing: str) -> None:
    """One of them uses the team; the others use OpenMP's threads in the meantime."""
    CHECKS.set_sharing(sharing)
    torch.set_num_threads(2)
    with ThreadPoolExecutor(4) as callers:
        assert [*callers.map(lambda _: tasks_check(12, 30, 12)[0], range(4))] == [[30] * 12] * 4


def test_the_team_works_in_a_child_of_fork() -> None:
    CHECKS.set_sharing("team")
    torch.set_num_threads(2)
    assert tasks_check(8, 2, 8)[0] == [2] * 8

    def check() -> None:
        assert tasks_check(8, 2, 8)[0] == [2] * 8

    in_child(check)


def test_no_thread_is_bound_to_a_core_after_a_call() -> None:
    """A helper leaves the caller's core by binding itself to others, but only for a moment."""
    CHECKS.set_sharing("team")
    torch.set_num_threads(3)  # more than many machines have cores: some share one

    def cores_of(task: str) -> str | None:
        try:
            status = Path(f"/proc/self/task/{task}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):  # a thread of another test that has just ended
            return None
        return status.split("Cpus_allowed_list:")[1].split()[0]

    cores = cores_of(str(threading.get_native_id()))
    for _ in range(20):
        tasks_check(40, 1, 40)
    assert until(lambda: {cores_of(task) for task in os.listdir("/proc/self/task")} - {None} == {cores})


def test_the_team_takes_over_after_two_long_waits_and_longer_if_they_recur() -> None:
    """Times are (when, worked, waited) in microseconds.

    A wait is long in absolute terms and relative to the caller's work.
    """
    assert waits_check([(0, 900, 499), (10, 900, 499), (20, 9000, 2000), (30, 9000, 2000)]) == [0] * 4
    assert waits_check([(0, 900, 600), (99_999, 900, 600)]) == [0, 250]
    assert waits_check([(0, 900, 600), (100_000, 900, 600), (150_000, 900, 600)]) == [0, 0, 250]
    regions, now, due = [(0, 0, 5000)], 1000, [0]
    for hold in (250, 500, 1000, 2000, 4000, 4000):
        regions += [(now, 0, 5000), (now + 9000, 0, 5000)]  # the second while the team runs all ops: no region of ours
        due += [hold, 0]
        now += 1000 * hold + 50_000
        regions.append((now, 0, 5000))
        due.append(0)
        now += 50_000
    assert waits_check(regions) == due
    now += 10_000_000  # much later all begins anew
    assert waits_check([*regions, (now, 0, 5000), (now + 10, 0, 5000)])[-2:] == [0, 250]


_SPINS = """
import os, threading, time
import torch
from fastformer.ops import _extension

_extension.load()
x = torch.zeros(2**18)
torch.set_num_threads(2)


def others_time():
    tasks = [task for task in os.listdir("/proc/self/task") if int(task) != threading.get_native_id()]
    return sum(int(open(f"/proc/self/task/{task}/schedstat").read().split()[0]) for task in tasks) / 1e6


def spun():
    x.add_(1)
    before = others_time()
    time.sleep(0.05)
    return others_time() - before


def until(holds):
    return any(holds(spun()) for _ in range(100))


assert until(lambda ms: ms > 2), "libgomp's thread never spins"
torch.ops.fastformer_checks.suppress_openmp_spinning(60_000)
assert until(lambda ms: ms < 1), "it goes on spinning"
assert sum(spun() < 1 for _ in range(9)) >= 5
torch.ops.fastformer_checks.suppress_openmp_spinning(0)
assert until(lambda ms: ms > 2), "it doesn't spin again"
"""


@pytest.mark.slow  # a process of its own: any other thread's region changes what OpenMP's threads do
@pytest.mark.skipif("libgomp" not in Path("/proc/self/maps").read_text(), reason="another OpenMP library than libgomp")
def test_openmps_threads_sleep_between_regions_while_requested() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    subprocess.run([sys.executable, "-c", _SPINS], check=True, env=environment, timeout=60)


_BOUND = """
import os, threading
from pathlib import Path
import torch
from fastformer.ops import _extension

_extension.load()
checks = torch.ops.fastformer_checks
torch.set_num_threads(2)


def cores_of(task):
    return Path(f"/proc/self/task/{task}/status").read_text().split("Cpus_allowed_list:")[1].split()[0]


before = set(os.listdir("/proc/self/task"))
checks.set_sharing("team")
for _ in range(1000):
    if checks.tasks_check(40, 3, 40)[1] == 2:
        break
(helper,) = set(os.listdir("/proc/self/task")) - before
print(cores_of(threading.get_native_id()), cores_of(helper))
"""


@pytest.mark.slow  # a process of its own: the variable counts where PyTorch is imported
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core is all that a helper can have")
@pytest.mark.skipif("libgomp" not in Path("/proc/self/maps").read_text(), reason="another OpenMP library than libgomp")
def test_a_helper_has_other_cores_than_the_one_that_openmp_binds_the_caller_to() -> None:
    environment = {**os.environ, "OMP_PROC_BIND": "true", "OMP_PLACES": "cores", "OMP_NUM_THREADS": "2"}
    run = subprocess.run([sys.executable, "-c", _BOUND], capture_output=True, text=True, env=environment, timeout=60)
    assert run.returncode == 0, run.stderr
    callers, helpers = run.stdout.split()
    assert callers.isdigit() and not helpers.isdigit()
