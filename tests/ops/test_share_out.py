"""How ops share out their tasks among threads: each task once, on either kind of thread, for many callers, behind a
fork, and with results that don't depend on it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import fastformer
from fastformer.ops import _extension
from tests.engine.test_thread_team import in_child, until

MODULE: Any = _extension.module()
pytestmark = pytest.mark.skipif(MODULE is None, reason="no C++ extension for this CPU")
SHARINGS = ("openmp", "team", "by_load")


@pytest.fixture(autouse=True)
def settings_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    MODULE._set_sharing("by_load")


def gradients(threads: int, sharing: str) -> list[Tensor]:
    """Of a layer that is large enough for several threads: its output, and the gradients of all that learns."""
    torch.set_num_threads(threads)
    MODULE._set_sharing(sharing)
    torch.manual_seed(0)
    layer = fastformer.nn.TransformerEncoderLayer(96, 4, 200, dropout=0.1, batch_first=True)
    x = torch.randn(3, 130, 96, requires_grad=True)
    out = layer(x)
    return [out, *torch.autograd.grad(out, [x, *layer.parameters()], torch.randn_like(out))]


def test_the_kind_of_threads_and_their_number_change_no_bit() -> None:
    due = gradients(1, "by_load")
    for sharing in SHARINGS:
        for threads in (2, 3):
            for found, right in zip(gradients(threads, sharing), due, strict=True):
                assert torch.equal(found, right), (sharing, threads)


def is_shared(threads: int) -> bool:
    return bool(MODULE._tasks_check(40, 3, 40)[1] == threads)


@pytest.mark.parametrize("sharing", SHARINGS)
def test_each_task_runs_once_on_no_more_threads_than_pytorch_has(sharing: str) -> None:
    MODULE._set_sharing(sharing)
    for threads in (1, 2, 3, 2):
        torch.set_num_threads(threads)
        for tasks in (0, 1, 2, 40):
            counts, most = MODULE._tasks_check(tasks, 3, tasks)
            assert counts == [3] * tasks and most <= min(threads, max(tasks, 1))
        assert until(partial(is_shared, threads)), "no thread helps"


@pytest.mark.parametrize("sharing", SHARINGS)
def test_what_a_task_throws_reaches_the_caller_and_the_next_call_is_as_ever(sharing: str) -> None:
    MODULE._set_sharing(sharing)
    torch.set_num_threads(2)
    for _ in range(5):
        with pytest.raises(RuntimeError, match="a task broke"):
            MODULE._tasks_check(9, 1, 4)
        assert MODULE._tasks_check(9, 2, 9)[0] == [2] * 9


@pytest.mark.parametrize("sharing", SHARINGS)
def test_callers_at_the_same_time_have_tasks_of_their_own(sharing: str) -> None:
    """One of them has the team; the others have OpenMP's threads meanwhile."""
    MODULE._set_sharing(sharing)
    torch.set_num_threads(2)
    found: list[list[int]] = []
    callers = [threading.Thread(target=lambda: found.append(MODULE._tasks_check(12, 30, 12)[0])) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert found == [[30] * 12] * 4


def test_the_team_works_in_a_child_of_fork() -> None:
    MODULE._set_sharing("team")
    torch.set_num_threads(2)
    assert MODULE._tasks_check(8, 2, 8)[0] == [2] * 8

    def check() -> None:
        assert MODULE._tasks_check(8, 2, 8)[0] == [2] * 8

    in_child(check)


def test_an_unknown_sharing_is_an_error() -> None:
    with pytest.raises(ValueError, match="'openmp'"):
        MODULE._set_sharing("both")
