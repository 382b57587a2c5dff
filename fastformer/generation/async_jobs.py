"""The requests and calls that an `AsyncFront` runs, and the delivery of their results from its thread to tasks."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from fastformer.generation.requests import Asked
from fastformer.generation.scheduler import Load
from fastformer.generation.text_io import failure

T = TypeVar("T")

QUEUE_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # seconds


class QueueFull(RuntimeError):
    """Raised if the queue has no place for the request.

    Attributes:
        retry_after: the seconds after which a place is likely to be free.
    """

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class TooLate(RuntimeError):
    """Raised if the deadline of a request passes before its answer is complete."""


class NotRunning(RuntimeError):
    """Raised if no thread can run the request, because its front is closed or the thread has failed."""


R = TypeVar("R", bound=Asked)


class Batching(Protocol[R]):
    """The interface of the scheduler that a front's thread steps.

    Attributes:
        waiting: the requests that haven't begun.
    """

    @property
    def waiting(self) -> Collection[R]: ...

    @property
    def is_idle(self) -> bool:
        """True if no request waits or runs."""

    def submit(self, requests: Iterable[R]) -> None:
        """Appends requests to the queue."""

    def step(self) -> list[R]:
        """Works for some milliseconds. Returns the requests that ended in this step: done, failed or cancelled."""

    def load(self) -> Load:
        """Returns the current counters."""

    def clear(self) -> None:
        """Drops all requests, and any state that an error may have left inconsistent."""

    def renewed(self) -> Batching[R]:
        """Returns a new scheduler with the same limits and no requests."""


@dataclass(frozen=True)
class Stats:
    """Counters of a front's work.

    Attributes:
        running: the number of requests in the batch.
        waiting: the number of requests that wait for the batch.
        waiting_tokens: the number of tokens that the waiting requests have to read.
        rows: the number of rows in the batch.
        free_tokens, capacity_tokens: the batch's free memory and capacity, in tokens.
        read_tokens, cached_tokens: the numbers of source and prompt tokens so far; see `Load`.
        new_tokens: the number of tokens in the answers so far.
        ended: the number of requests that were answered or have failed.
        refused: the number of calls that were refused because the queue was full.
        late: the number of calls whose deadline passed before their end.
        cancelled: the number of calls whose task no longer waits for them.
        steps, step_seconds: the number of the thread's steps, and their total duration.
        queue_counts: a histogram of the time in the queue, over the requests that began and have ended: for each of
            `QUEUE_BOUNDS` those that waited up to it and longer than the bound before it; last, those beyond them.
        queue_seconds: the total time that these requests waited.
    """

    running: int
    waiting: int
    waiting_tokens: int
    rows: int
    free_tokens: int
    capacity_tokens: int
    read_tokens: int
    cached_tokens: int
    new_tokens: int
    ended: int
    refused: int
    late: int
    cancelled: int
    steps: int
    step_seconds: float
    queue_counts: tuple[int, ...]
    queue_seconds: float


class Box(Generic[R]):
    """Requests that were submitted together, and the state that is delivered to their task.

    Attributes:
        requests, names: the requests, and the name of each in messages.
        came_at: the time of `time.monotonic` at which they were submitted.
        num_tokens: the number of tokens that they have to read together.
        loop: the event loop of the task.
        tokens: for each request, the tokens that were delivered and not yet taken. This attribute and those below are
            used only in the event loop.
        has_ended: for each request, whether it has ended.
        error: the error that ended all of them early, or None.
        woken: set when any of these changes.
    """

    def __init__(self, requests: Sequence[R], names: Sequence[str]) -> None:
        self.requests, self.names, self.loop = requests, names, asyncio.get_running_loop()
        self.came_at = time.monotonic()
        self.num_tokens = sum(request.num_tokens for request in requests)
        self.tokens: list[list[int]] = [[] for _ in requests]
        self.has_ended = [False] * len(requests)
        self.error: Exception | None = None
        self.woken = asyncio.Event()
        self._ends: list[asyncio.TimerHandle] = []

    def end_at(self, deadline: float, end: Callable[[], object]) -> None:
        """Calls `end` at a time of `time.monotonic`."""
        self._ends.append(self.loop.call_later(deadline - time.monotonic(), end))

    def end_parked_at(self, end: Callable[[], object]) -> None:
        """Calls `end` when the time of all requests is over, if it ever is."""
        deadlines = [request.deadline for request in self.requests]
        known = [deadline for deadline in deadlines if deadline is not None]
        if known and len(known) == len(deadlines):
            self.end_at(max(known), end)

    def late(self) -> TooLate:
        """Returns the error of a deadline that has passed."""
        return TooLate(f"{self.names[0]}: expected an answer within the time that it has, which is over")

    def forget_ends(self) -> None:
        """Cancels the calls of `end_at` and `end_parked_at`."""
        for handle in self._ends:
            handle.cancel()


class Place:
    """A place in the queue that is reserved for a request that isn't made yet."""


@dataclass(frozen=True, slots=True)
class Event(Generic[R]):  # no named tuple: a generic one needs Python 3.11
    """A new token of one of a box's requests; without a token (None), the end of the request."""

    box: Box[R]
    place: int
    token: int | None


def deliver(events: Sequence[Event[R]]) -> None:
    """Delivers events to their boxes; runs in the event loop that all of these boxes share."""
    for event in events:
        if event.token is None:
            event.box.has_ended[event.place] = True
        else:
            event.box.tokens[event.place].append(event.token)
        event.box.woken.set()


class Answers(Generic[R]):
    """The results of requests that were submitted together by `AsyncFront.submit`. One task waits for them.

    If the object is deleted, the requests that haven't ended are cancelled.
    """

    def __init__(self, box: Box[R], leave: Callable[[Box[R]], object], front: str) -> None:
        self._box, self._leave, self._front = box, leave, front

    def __del__(self) -> None:
        self.leave()

    def leave(self) -> None:
        """Cancels the requests that haven't ended."""
        self._leave(self._box)

    async def ended(self, place: int) -> R:
        """Waits for the end of a request.

        Returns:
            The request, which has ended without error.

        Raises:
            TooLate, NotRunning, ValueError, RuntimeError: see `AsyncFront.ask`.
        """
        box = self._box
        await self._until(lambda: box.has_ended[place])
        request = box.requests[place]
        if isinstance(request.error, NotRunning):
            raise NotRunning(f"{box.names[place]}: {request.error}") from request.error
        if request.error is not None:
            raise failure(box.names[place], request.error) from request.error
        if request.is_cancelled:
            raise NotRunning(f"{box.names[place]}: cancelled: the {self._front} was closed")
        return request

    async def tokens(self, place: int) -> AsyncIterator[list[int]]:
        """Yields the new tokens of a request in `listen`. Tokens that come together are one list.

        Raises:
            Exception: see `ended`.
        """
        box = self._box
        while True:
            await self._until(lambda: box.has_ended[place] or bool(box.tokens[place]))
            new, box.tokens[place] = box.tokens[place], []
            if not new:
                await self.ended(place)
                return
            yield new

    async def _until(self, condition: Callable[[], bool]) -> None:
        box = self._box
        while not condition():
            if box.error is not None:
                raise box.error
            box.woken.clear()
            await box.woken.wait()


async def in_time(future: asyncio.Future[T], deadline: float | None, late: Callable[[], TooLate]) -> T:
    """Returns a future's result, and cancels the future if its task is cancelled or its deadline passes.

    Args:
        future: the future.
        deadline: a time of `time.monotonic`; None: no deadline.
        late: makes the error of a deadline that has passed.
    """
    try:
        await asyncio.wait((future,), timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
        if not future.done():
            raise late()
        return future.result()
    finally:
        future.cancel()


def for_task(error: BaseException) -> Exception:
    """Returns an error of another thread as one that a task can raise: no StopIteration, and none that ends a loop."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    found = RuntimeError(f"the function ended with {type(error).__name__}: {error}")
    found.__cause__ = error
    return found


class Call(Generic[T]):
    """A function that runs in the thread, and the task that waits for its result."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function, self._loop = function, asyncio.get_running_loop()
        self.future: asyncio.Future[T] = self._loop.create_future()

    async def ended(self, deadline: float | None) -> T:
        """Returns the function's result.

        Raises:
            TooLate: the deadline passed before the end; the function no longer begins.
        """
        return await in_time(
            self.future, deadline, lambda: TooLate("expected an answer within the time that it has, which is over")
        )

    def run(self) -> None:
        """Runs the function, unless its task no longer waits for it."""
        if self.future.cancelled():
            return
        try:
            found = self._function()
        except BaseException as error:
            self.fail(error)
            if not isinstance(error, Exception):  # ends the thread
                raise
        else:
            self._settle(lambda: self.future.set_result(found))

    def fail(self, error: BaseException) -> None:
        """Fails with an error."""
        self._settle(lambda: self.future.set_exception(for_task(error)))

    def _settle(self, settle: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(lambda: None if self.future.done() else settle())
