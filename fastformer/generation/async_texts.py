"""`TextQueue`: functions of text, such as the encoding of a prompt, which run in a thread of their own."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastformer.generation.async_jobs import NotRunning, TooLate, for_task, in_time

T = TypeVar("T")

_CHARS = 200_000  # about the characters that a slow machine reads in a second


@dataclass(order=True)
class _Job:
    """A function that waits for the thread, and the future of its result."""

    due: float
    number: int  # the order of arrival
    work: Callable[[], Any] = field(compare=False)
    deadline: float | None = field(compare=False)
    future: Future[Any] = field(default_factory=Future, compare=False)

    def run(self) -> None:
        """Runs the function, unless its task no longer waits for it."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            if self.deadline is not None and time.monotonic() >= self.deadline:
                raise _late()
            found = self.work()
        except BaseException as error:
            self.future.set_exception(for_task(error))
        else:
            self.future.set_result(found)


class TextQueue:
    """Runs functions of text one by one, in a thread of its own.

    Short texts overtake long ones: each is due when it would be read if it alone came, and the earliest runs first. So
    the long texts of one client delay another client's short text by the one that runs at most, and a long text is not
    overtaken by those that come much later.

    Args:
        name: the name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Lock()  # guards the attributes below
        self._waiting: list[_Job] = []  # a heap
        self._numbers = itertools.count()
        self._executor: ThreadPoolExecutor | None = None
        self._num_asked = 0

    def __len__(self) -> int:
        """Returns the number of functions whose tasks wait for them."""
        return self._num_asked

    async def run(self, work: Callable[[], T], size: int, deadline: float | None = None) -> T:
        """Runs a function.

        Args:
            work: the function.
            size: the number of characters that it reads.
            deadline: a time of `time.monotonic`; None: no deadline. A function that runs already isn't stopped.

        Raises:
            TooLate: the deadline passed before the end.
            NotRunning: the queue was closed before the function began.
        """
        with self._changed:
            job = _Job(time.monotonic() + size / _CHARS, next(self._numbers), work, deadline)
            heapq.heappush(self._waiting, job)
            if self._executor is None:
                self._executor = ThreadPoolExecutor(1, thread_name_prefix=self._name)
            self._executor.submit(self._run_first)
            self._num_asked += 1
        try:
            found: T = await in_time(asyncio.wrap_future(job.future), deadline, _late)
            return found
        finally:
            job.work = _nothing  # a request that left holds no text while its job waits
            with self._changed:
                self._num_asked -= 1

    def close(self) -> None:
        """Refuses the functions that haven't begun. The queue may be used again."""
        with self._changed:
            waiting, self._waiting = self._waiting, []
            executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=False, cancel_futures=True)
        for job in waiting:
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(NotRunning("the text was not read, because the model is being closed"))

    def _run_first(self) -> None:
        with self._changed:
            job = heapq.heappop(self._waiting) if self._waiting else None  # none is left after `close`
        if job is not None:
            job.run()


def _late() -> TooLate:
    return TooLate("expected the text to be read within the time that the request has, which is over")


def _nothing() -> None:
    """Stands for the function of a task that no longer waits."""
