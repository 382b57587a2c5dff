"""What an `AsyncFront` runs, and how its thread tells tasks what has become of it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

from fastformer.generation.scheduler import Load
from fastformer.generation.text_io import failure

T = TypeVar("T")

QUEUE_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # seconds


class QueueFull(RuntimeError):
    """There is no place for the request now.

    Attributes:
        retry_after: seconds after which there is likely to be one.
    """

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class TooLate(RuntimeError):
    """The time of a request was over before its answer was there."""


class NotRunning(RuntimeError):
    """There is no thread that would take the request: its front is closed, or the thread has failed."""


class Asked(Protocol):
    """A request; any thread may call its methods.

    Attributes:
        error: what went wrong with it, or None.
        is_done: whether it has ended, well or not.
        is_cancelled: whether `cancel` has been called.
        deadline: a time of `time.monotonic` at which it ends with what there is; None: it has none.
        begun_at: a time of `time.monotonic` at which it left the queue for the first time; None: it hasn't.
        on_token: receives each new token, in the thread.
    """

    error: Exception | None
    is_done: bool
    is_cancelled: bool
    deadline: float | None
    begun_at: float | None

    @property
    def num_tokens(self) -> int:
        """How many tokens it has to read: what it weighs while it waits."""

    @property
    def num_new_tokens(self) -> int:
        """How many tokens its answer has, when it has ended."""

    def listen(self, on_token: Callable[[int], object]) -> None:
        """Has each new token told.

        Raises:
            ValueError: its tokens aren't known before the end.
        """

    def cancel(self) -> None:
        """Ends it before the next step, without an answer."""

    def finish(self) -> None:
        """Ends it with what there is."""

    def fail(self, error: Exception) -> object:
        """Ends it with an error."""


R = TypeVar("R", bound=Asked)


class Batching(Protocol[R]):
    """What a front's thread steps.

    Attributes:
        waiting: requests that haven't begun.
    """

    @property
    def waiting(self) -> Collection[R]: ...

    @property
    def is_idle(self) -> bool:
        """True when there is nothing to do."""

    def submit(self, requests: Iterable[R]) -> None:
        """Appends requests to the queue."""

    def step(self) -> list[R]:
        """Works for some milliseconds; the requests that ended with it: done, failed or cancelled."""

    def load(self) -> Load:
        """Its counters as they are now."""

    def clear(self) -> None:
        """Forgets all requests, and what an error may have left halfway."""

    def renewed(self) -> Batching[R]:
        """Another one, with the same limits and nothing to do."""


@dataclass(frozen=True)
class Stats:
    """The work of a front: waiting, running and done.

    Attributes:
        running: requests in the batch.
        waiting: those in front of it.
        waiting_tokens: what the latter have to read.
        rows: of the batch.
        free_tokens, capacity_tokens: of the batch's memory.
        read_tokens, cached_tokens: of sources and prompts, so far; see `Load`.
        new_tokens: of the answers so far.
        ended: requests that were answered or have failed.
        refused: calls for which there was no place.
        late: calls whose deadline came first.
        cancelled: calls whose task has left.
        steps, step_seconds: of the thread, and how long they took together.
        queue_counts: of the requests that began and have ended, how many waited up to each of `QUEUE_BOUNDS` and longer
            than the bound before it; the last number is of those beyond all bounds.
        queue_seconds: that they waited together.
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
    """Requests that were handed over together, and what their task hears of them.

    Attributes:
        requests, names: what was asked for, and what messages call each.
        came_at: a time of `time.monotonic`.
        num_tokens: that they have to read, all together.
        loop: of the task.
        tokens: of each request those that have come and weren't taken yet; the loop's own, as all that follows.
        has_ended: of each whether it has.
        error: what ended all of them before their time.
        woken: set when any of this changes.
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
        """The error of a deadline that has come."""
        return TooLate(f"{self.names[0]}: expected an answer within the time that it has, which is over")

    def forget_ends(self) -> None:
        """Calls nothing at those times."""
        for handle in self._ends:
            handle.cancel()


class Place:
    """A place in the queue that is kept for a request which is still being made."""


class Event(NamedTuple, Generic[R]):
    """A token of one of a box's requests; None: the request has ended."""

    box: Box[R]
    place: int
    token: int | None


def deliver(events: Sequence[Event[R]]) -> None:
    """Passes events on to their boxes, in the event loop of all of them."""
    for box, place, token in events:
        if token is None:
            box.has_ended[place] = True
        else:
            box.tokens[place].append(token)
        box.woken.set()


class Answers(Generic[R]):
    """The results of requests that were handed over together. Those that haven't ended when it is deleted are
    cancelled.

    It is made by `AsyncFront.submit`; one task waits for it.
    """

    def __init__(self, box: Box[R], leave: Callable[[Box[R]], object], front: str) -> None:
        self._box, self._leave, self._front = box, leave, front

    def __del__(self) -> None:
        self.leave()

    def leave(self) -> None:
        """Cancels what hasn't ended."""
        self._leave(self._box)

    async def ended(self, place: int) -> R:
        """Waits for the end of a request.

        Returns:
            The request, which has ended well.

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
        """The new tokens of a request that is listened to, those that came together as a list.

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


class Call(Generic[T]):
    """A function that runs in the thread, and the task that waits for what it gives."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function, self._loop = function, asyncio.get_running_loop()
        self.future: asyncio.Future[T] = self._loop.create_future()

    def run(self) -> None:
        """Runs it, unless its task has left."""
        if self.future.cancelled():
            return
        try:
            found = self._function()
        except Exception as error:
            self.fail(error)
        else:
            self._settle(lambda: self.future.set_result(found))

    def fail(self, error: Exception) -> None:
        """Ends it with an error."""
        self._settle(lambda: self.future.set_exception(error))

    def _settle(self, settle: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(lambda: None if self.future.done() else settle())
