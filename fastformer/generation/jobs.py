"""The work that tasks of event loops wait for, and its queues: requests (`Job`), and functions (`Call`)."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from typing_extensions import Self

from fastformer.requests import BaseRequest, Load, failure
from fastformer.settings import Positive, check_value

T = TypeVar("T")
P = TypeVar("P")
R = TypeVar("R", bound=BaseRequest)

QUEUE_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # seconds
_RATE_SECONDS = 1.0  # seconds of work between two measurements of the queue's rate
_RETRY = (1.0, 30.0)  # the bounds of the seconds that a client is told to wait
_DEFAULTS = (1024, None, "wait")  # the limits of a `JobQueue`
_CHARS = 200_000  # about the characters that a slow machine reads in a second


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
    """Raised if no thread can run the request, because its session is closed or the thread has failed."""


class Job(Generic[R]):
    """Requests that were submitted together to a session. One task waits for them.

    Attributes:
        requests: the requests.
        submitted_at: the time of `time.monotonic` at which they were submitted.
        num_tokens: the number of tokens that they have to read together.
        loop: the event loop of the task.
        tokens: for each request, the streamed tokens that the task has not taken yet; the session's thread adds them.
        has_ended: for each request, whether it has ended. This attribute and the next are used only in the event loop.
        error: the error that ended all requests early, or None.
    """

    def __init__(self, requests: Sequence[R], leave: Callable[[Job[R]], object]) -> None:
        self.requests, self._leave = requests, leave
        self.submitted_at = time.monotonic()
        self.num_tokens = sum([request.num_tokens for request in requests])
        self.loop = asyncio.get_running_loop()
        self.tokens: list[deque[Any]] = [deque() for _ in requests]
        self.has_ended = [False] * len(requests)
        self.error: Exception | None = None
        self._changed = asyncio.Event()
        self._timers: list[asyncio.TimerHandle] = []

    def call_at(self, moment: float, function: Callable[[Job[R]], object]) -> None:
        """Calls a function with this job at a time of `time.monotonic`, unless the task has left by then."""
        self._timers.append(self.loop.call_later(moment - time.monotonic(), function, self))

    def late(self) -> TooLate:
        """Returns the error of a deadline that has passed."""
        return TooLate(f"{self.requests[0].name}: expected an answer within the time that it has, which is over")

    def end(self, indices: Iterable[int] = (), error: Exception | None = None) -> None:
        """Wakes the task after requests have ended or the job has failed."""
        for index in indices:
            self.has_ended[index] = True
        self.error = error or self.error
        self._changed.set()

    def leave(self) -> None:
        """Cancels the requests that haven't ended."""
        for timer in self._timers:
            timer.cancel()
        if not all([request.is_done or request.is_cancelled for request in self.requests]):
            self._leave(self)

    async def result(self, index: int) -> R:
        """Waits for the end of a request.

        Returns:
            The request, which has ended without error.

        Raises:
            TooLate, NotRunning, ValueError, RuntimeError: see `Session.ask`.
        """
        while not self.has_ended[index]:
            await self._change()
        return self._result(index)

    def _result(self, index: int) -> R:
        request = self.requests[index]
        if isinstance(request.error, NotRunning):
            raise NotRunning(f"{request.name}: {request.error}") from request.error
        if request.error is not None:
            raise failure(request.name, request.error) from request.error
        if request.is_cancelled:
            raise NotRunning(f"{request.name}: cancelled, because the model was closed")
        return request

    async def results(self) -> list[R]:
        """Waits for the end of all requests, and cancels the others if one fails; see `result`."""
        try:
            return [await self.result(index) for index in range(len(self.requests))]
        finally:
            self.leave()

    async def stream(self, index: int) -> AsyncIterator[list[Any]]:
        """Yields the new tokens of a streamed request. Tokens that come together are one list.

        Raises:
            Exception: see `result`.
        """
        while not self.has_ended[index] or self.tokens[index]:
            if tokens := self._take(index):
                yield tokens
            else:
                await self._change()
        await self.result(index)

    async def arrivals(self, piece_of: Callable[[Any, int, list[Any]], P]) -> AsyncGenerator[list[P], None]:
        """Yields lists of the pieces that came together. The first error ends all; the job has ended with the iterator.

        Args:
            piece_of: (request, its index, new tokens) -> the piece of these tokens or, without any, of the end.

        Raises:
            Exception: see `result`.
        """
        running = [*range(len(self.requests))]
        try:
            while running:
                arrived, failure = list[P](), None
                for index in [*running]:
                    request, has_ended = self.requests[index], self.has_ended[index]
                    if tokens := self._take(index):
                        arrived.append(piece_of(request, index, tokens))
                    if has_ended:
                        try:
                            self._result(index)
                        except Exception as error:
                            failure = error
                            break
                        running.remove(index)
                        arrived.append(piece_of(request, index, []))
                if arrived:
                    yield arrived
                if failure is not None:
                    raise failure
                if not arrived:
                    await self._change()
        finally:
            self.leave()

    def _take(self, index: int) -> list[Any]:
        tokens = self.tokens[index]
        return [tokens.popleft() for _ in range(len(tokens))]

    async def _change(self) -> None:
        """Waits for the next change."""
        if self.error is not None:
            raise self.error
        self._changed.clear()
        await self._changed.wait()


@dataclass
class SessionStats(Load):
    """Counters of the work of a session's thread, after those of its scheduler.

    Attributes:
        waiting, waiting_tokens: also those in front of the scheduler; for the other fields of `Load` see there.
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

    new_tokens: int = 0
    ended: int = 0
    refused: int = 0
    late: int = 0
    cancelled: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    queue_counts: tuple[int, ...] = ()
    queue_seconds: float = 0.0


def end_all(events: Iterable[tuple[Job[Any], Sequence[int]]]) -> None:
    """Wakes the tasks of jobs, given the indices of their requests that have ended; runs in their event loop."""
    for job, indices in events:
        job.end(indices)


class JobQueue(Generic[R]):
    """The jobs in front of a session's batch, and the limits of their number. The session's lock guards it.

    Args:
        max_waiting, max_waiting_tokens, when_full: see `Session`.

    Attributes:
        jobs: the jobs that have a place in the queue.
        blocked: the jobs that wait for a place.
        places: places that are reserved for requests that aren't made yet.
        load: the load of the batch when it was last known, with the jobs that it has taken since.
        refused: the number of calls that were refused.
    """

    def __init__(self, max_waiting: int, max_waiting_tokens: int | None, when_full: str) -> None:
        if (max_waiting, max_waiting_tokens, when_full) != _DEFAULTS:  # each call of `generate` has a queue
            check_value("max_waiting", max_waiting, Positive)
            check_value("max_waiting_tokens", max_waiting_tokens, Positive | None)
            check_value("when_full", when_full, Literal["wait", "refuse"])
        self.max_waiting, self._max_tokens, self._refuses = max_waiting, max_waiting_tokens, when_full == "refuse"
        self.jobs: deque[Job[R]] = deque()
        self.blocked: deque[Job[R]] = deque()
        self.places: set[object] = set()
        self.load, self.refused = Load(), 0
        self._rate, self._rate_tokens, self._rate_seconds = 0.0, 0, 0.0  # tokens that leave the queue a second

    @property
    def num_queued(self) -> int:
        """The number of requests that have a place in the queue and haven't begun."""
        return self.load.waiting + sum([len(job.requests) for job in list(self.jobs)])

    @property
    def num_blocked(self) -> int:
        """The number of requests that wait for a place in the queue."""
        return sum([len(job.requests) for job in list(self.blocked)])

    @property
    def num_tokens(self) -> int:
        """The number of tokens that the queued requests have to read."""
        return self.load.waiting_tokens + sum([job.num_tokens for job in list(self.jobs)])

    def reserve(self, place: object) -> None:
        """Reserves a place for a request that isn't made yet.

        Raises:
            QueueFull: the queue is full, and refuses requests.
        """
        if self._refuses:
            if not self._has_room(1):
                raise self._full()
            self.places.add(place)

    def put(self, job: Job[R]) -> bool:
        """Appends a job. Returns whether it has a place; if not, it waits for one.

        Raises:
            QueueFull: see `reserve`.
        """
        has_place = not self.blocked and self._has_room(job.num_tokens)
        if not has_place and self._refuses:
            raise self._full()
        (self.jobs if has_place else self.blocked).append(job)
        return has_place

    def remove_blocked(self, job: Job[R]) -> bool:
        """Removes a job that waits for a place. Returns whether it did."""
        if job not in self.blocked:
            return False
        self.blocked.remove(job)
        return True

    def take(self) -> list[Job[R]]:
        """Removes and returns the jobs that the batch takes."""
        while self.blocked and self._has_room(self.blocked[0].num_tokens):
            self.jobs.append(self.blocked.popleft())
        self.load.waiting, self.load.waiting_tokens, taken = self.num_queued, self.num_tokens, [*self.jobs]
        self.jobs.clear()
        return taken

    def clear(self) -> list[Job[R]]:
        """Removes and returns all jobs."""
        jobs = [*self.jobs, *self.blocked]
        self.jobs.clear()
        self.blocked.clear()
        self.load = Load()
        return jobs

    def measure(self, load: Load, seconds: float) -> None:
        """Records the load after a step of some seconds, and the rate at which requests leave the queue."""
        before, self.load = self.load, load
        self._rate_seconds += seconds
        self._rate_tokens += max(0, load.read_tokens + load.cached_tokens - before.read_tokens - before.cached_tokens)
        if self._rate_seconds >= _RATE_SECONDS:
            self._rate = self._rate_tokens / self._rate_seconds
            self._rate_tokens, self._rate_seconds = 0, 0.0

    def check_texts(self, count: int) -> None:
        """Raises QueueFull if so many texts are still to be read that the queue refuses another one."""
        if self._refuses and count >= self.max_waiting:
            raise self._full(f"the texts of {count} requests are still to be read")

    def _has_room(self, num_tokens: int) -> bool:
        if self.num_queued + len(self.places) >= self.max_waiting:
            return False
        waiting = self.num_tokens
        return self._max_tokens is None or not waiting or waiting + num_tokens <= self._max_tokens

    def _full(self, reason: str | None = None) -> QueueFull:
        """Counts a refusal, and returns its error."""
        self.refused += 1
        reason = reason or f"{self.num_queued} requests of {self.num_tokens:,} tokens are waiting"
        least, most = _RETRY  # the seconds in which the queued requests are likely to begin
        seconds = min(most, max(least, self.num_tokens / self._rate)) if self._rate else least
        return QueueFull(f"{reason}: try again later", seconds)


class Stream(Generic[T]):
    """The pieces of a job's answers: an asynchronous iterator, which cancels the job if it is closed or deleted.

    Args:
        job: the job; None: all pieces are known already.
        pieces: yields the pieces.
    """

    def __init__(self, job: Job[Any] | None, pieces: AsyncGenerator[T, None]) -> None:
        self._job, self._pieces = job, pieces
        self._first: list[T] = []

    async def begin(self) -> Self:
        """Waits for the first piece, so that an error before it is raised here; the iterator returns it too.

        Raises:
            StopAsyncIteration: there is no piece.
            Exception: see `Job.result`.
        """
        self._first.append(await anext(self._pieces))
        return self

    def __aiter__(self) -> Stream[T]:
        return self

    def __anext__(self) -> Coroutine[Any, Any, T]:
        return at_once(self._first.pop()) if self._first else self._pieces.__anext__()

    async def aclose(self) -> None:
        """Cancels the requests that haven't ended."""
        self._leave()
        await self._pieces.aclose()

    def __del__(self) -> None:
        self._leave()

    def _leave(self) -> None:
        if self._job is not None:
            self._job.leave()


class Call(Generic[T]):
    """A function that a thread runs, and the future of its result.

    Args:
        function: the function.
        deadline: a time of `time.monotonic` after which the function isn't begun; None: no deadline.
    """

    def __init__(self, function: Callable[[], T], deadline: float | None = None) -> None:
        self._function: Callable[[], T] | None = function
        self._deadline = deadline
        self.future: Future[T] = Future()

    async def result(self) -> T:
        """Waits for the function's result. The function no longer begins if the task is cancelled.

        Raises:
            TooLate: the deadline passed before the end; a function that runs already isn't stopped.
        """
        future = asyncio.wrap_future(self.future)
        try:
            left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
            await asyncio.wait((future,), timeout=left)
            if not future.done():
                raise _late()
            return future.result()
        finally:
            future.cancel()
            self._function = None  # a call whose task has left holds no text while it waits

    def run(self) -> None:
        """Runs the function, unless its task no longer waits for it.

        Raises:
            BaseException: the function's error, if it ends a thread.
        """
        function = self._function
        if function is None or not self.future.set_running_or_notify_cancel():
            return
        try:
            if self._deadline is not None and time.monotonic() >= self._deadline:
                raise _late()
            value = function()
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception):
                raise
        else:
            self.future.set_result(value)

    def fail(self, error: BaseException) -> None:
        """Ends a call that hasn't begun with an error."""
        if self.future.set_running_or_notify_cancel():
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, Exception) and not isinstance(error, StopIteration):
            self.future.set_exception(error)
            return
        raised = RuntimeError(f"the function ended with {type(error).__name__}: {error}")  # one that a task can raise
        raised.__cause__ = error
        self.future.set_exception(raised)


class TextQueue:
    """Runs functions of text one by one, in a thread of its own.

    Short texts overtake long ones: each is due when it would be read if it alone came, and the earliest runs first. So
    the long texts of one client delay another client's short text by the one that runs at most, and a long text is not
    overtaken by those that come much later.

    Args:
        name: the name of the thread.

    Attributes:
        num_waiting: the number of functions whose tasks wait for them.
        late: the number of functions whose deadline passed.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Lock()  # guards the attributes below
        self.num_waiting = self.late = 0
        self._waiting: list[tuple[float, int, Call[Any]]] = []  # a heap, by the due time and the order of arrival
        self._numbers = itertools.count()
        self._executor: ThreadPoolExecutor | None = None

    async def run(self, function: Callable[[], T], size: int, deadline: float | None = None) -> T:
        """Runs a function.

        Args:
            function: the function.
            size: the number of characters that it reads.
            deadline: a time of `time.monotonic`; None: no deadline.

        Raises:
            TooLate: the deadline passed before the end.
            NotRunning: the queue was closed before the function began.
        """
        call = Call(function, deadline)
        with self._changed:
            heapq.heappush(self._waiting, (time.monotonic() + size / _CHARS, next(self._numbers), call))
            if self._executor is None:
                self._executor = ThreadPoolExecutor(1, thread_name_prefix=self._name)
            self._executor.submit(self._run_first)
            self.num_waiting += 1
        try:
            return await call.result()
        except TooLate:
            with self._changed:
                self.late += 1
            raise
        finally:
            with self._changed:
                self.num_waiting -= 1

    def close(self) -> None:
        """Refuses the functions that haven't begun. The queue may be used again."""
        with self._changed:
            waiting, self._waiting = self._waiting, []
            executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=False, cancel_futures=True)
        for _, _, call in waiting:
            call.fail(NotRunning("the text was not read, because the model is being closed"))

    def _run_first(self) -> None:
        with self._changed:
            call = heapq.heappop(self._waiting)[-1] if self._waiting else None  # none is left after `close`
        if call is not None:
            with contextlib.suppress(BaseException):  # the task has the error
                call.run()


async def at_once(value: T) -> T:
    return value


def _late() -> TooLate:
    return TooLate("expected an answer within the time that the request has, which is over")
