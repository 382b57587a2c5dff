"""`AsyncFront`: requests of many tasks in one batch, which a thread of its own steps.

The kind of request doesn't matter: translations, completions, embeddings. A front needs something that batches requests
(`Batching`; `Scheduler` is one), and the requests themselves (`requests.Asked`; `requests.Request` is one).
"""

from __future__ import annotations

import asyncio
import atexit
import bisect
import contextlib
import functools
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Generic, Literal, TypeVar

from typing_extensions import Self

from fastformer.generation.async_jobs import QUEUE_BOUNDS, Batching, Box, Call, Event, R, deliver
from fastformer.generation.async_jobs import Answers as Answers
from fastformer.generation.async_jobs import NotRunning as NotRunning
from fastformer.generation.async_jobs import Place as Place
from fastformer.generation.async_jobs import QueueFull as QueueFull
from fastformer.generation.async_jobs import Stats as Stats
from fastformer.generation.async_jobs import TooLate as TooLate
from fastformer.generation.async_texts import TextQueue
from fastformer.generation.model_protocols import Evaluation, Model, evaluating
from fastformer.generation.scheduler import Load
from fastformer.settings import Positive, check_value

T = TypeVar("T")

_INLINE = 2_000  # the most characters that are tokenized on the event loop, in a millisecond or two
_RATE_SECONDS = 1.0  # seconds of work between two measurements of the queue's rate
_RETRY = (1.0, 30.0)  # the bounds of the seconds that a client is told to wait

_place: ContextVar[Place | None] = ContextVar(
    "place", default=None
)  # the place that is reserved for the task's request
_open: weakref.WeakSet[AsyncFront[Any]] = weakref.WeakSet()  # the fronts whose threads may run


class AsyncFront(Generic[R]):
    """Runs the requests of many tasks in one batch, in a thread of its own.

        async with AsyncFront(model, new_scheduler) as front:
            request = await front.ask(builder.build(checked))

    A task that is cancelled releases its memory. Tasks of several event loops may share a front. Don't use the model
    elsewhere meanwhile; `call` runs a function in the thread, between two steps.

    Args:
        model: is set to evaluation while it works.
        new_batching: makes the scheduler that the thread steps; it is called in the thread.
        name: the name of the front in messages, and of its thread.
        max_waiting: how many requests may wait for room in the batch. Those of one call take their places together, so
            the last call that finds one may go beyond.
        max_waiting_tokens: how many tokens those may have to read; one call alone may have more. None: any number.
        when_full: "wait" has a task wait for a place, "refuse" raises QueueFull.

    Raises:
        ValueError: a limit below 1, another when_full.
    """

    def __init__(
        self,
        model: Model,
        new_batching: Callable[[], Batching[R]],
        *,
        name: str = "AsyncFront",
        max_waiting: int = 1024,
        max_waiting_tokens: int | None = None,
        when_full: Literal["wait", "refuse"] = "wait",
    ) -> None:
        check_value("max_waiting", max_waiting, Positive)
        check_value("max_waiting_tokens", max_waiting_tokens, Positive | None)
        check_value("when_full", when_full, Literal["wait", "refuse"])
        self.model, self.name, self.when_full = model, name, when_full
        self.max_waiting, self.max_waiting_tokens = max_waiting, max_waiting_tokens
        self._new_batching = new_batching
        self._changed = threading.Condition()  # guards all attributes below
        self._thread: threading.Thread | None = None
        self._is_closing = self._is_cancelling = False
        self._failure: BaseException | None = None  # the error that ended the thread
        self._inbox: deque[Box[R]] = deque()  # calls that have a place in the queue
        self._parked: deque[Box[R]] = deque()  # calls that wait for a place
        self._calls: deque[Call[Any]] = deque()
        self._places: set[Place | None] = set()  # places reserved for requests that aren't made yet
        self._boxes: dict[R, tuple[Box[R], int]] = {}  # each request's box and index; used only by the thread
        self._told: list[Event[R]] = []  # events not yet delivered to the tasks; used only by the thread
        self._load = Load()
        self._new_tokens = self._ended = self._refused = self._late = self._cancelled = self._steps = 0
        self._step_seconds = self._queue_seconds = 0.0
        self._queue_counts = [0] * (len(QUEUE_BOUNDS) + 1)
        self._rate, self._rate_tokens, self._rate_seconds = 0.0, 0, 0.0  # tokens that leave the queue a second
        self._texts = TextQueue(f"{name}-texts")

    # Opening and closing

    async def __aenter__(self) -> AsyncFront[R]:
        with self._changed:
            if self._thread is not None:
                raise RuntimeError(f"expected an {self.name} that is closed, got one that is open already")
            self._is_closing = self._is_cancelling = False
            self._failure = None
            # A daemon: the interpreter doesn't wait for it, and `_stop_all` ends it if the program doesn't.
            self._thread = threading.Thread(target=self._work, name=self.name, daemon=True)
            self._thread.start()
            _open.add(self)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        await self.close(cancel=error is not None)

    async def close(self, *, cancel: bool = False) -> None:
        """Refuses further requests, and returns when the thread has ended.

        Args:
            cancel: cancel running and waiting requests, whose tasks get NotRunning; if not, they are answered first.
        """
        thread = self._ask_to_end(cancel=cancel)
        if thread is None:
            return
        await asyncio.to_thread(thread.join)
        with self._changed:
            if self._thread is thread:
                self._thread = None
                _open.discard(self)
        self._texts.close()

    def _ask_to_end(self, *, cancel: bool) -> threading.Thread | None:
        """Tells the thread to end when its work is done, or at once. Returns the thread, or None if there is none."""
        with self._changed:
            if self._thread is not None:
                self._is_closing = True
                self._is_cancelling = self._is_cancelling or cancel
                self._changed.notify()
            return self._thread

    def _stop(self) -> None:
        """Ends the thread immediately and waits for it; for the end of the program."""
        thread = self._thread
        # A forked process doesn't have the thread, which may have held the lock.
        if thread is not None and thread.is_alive():
            self._ask_to_end(cancel=True)
            thread.join()

    @property
    def is_alive(self) -> bool:
        """Whether the front is open and its thread has not failed."""
        thread = self._thread
        return thread is not None and thread.is_alive() and self._failure is None

    # Called by tasks

    async def ask(self, request: R, *, deadline: float | None = None, name: str = "the request") -> R:
        """Runs a request to its end.

        Args:
            request: a request for the front's model.
            deadline: a time of `time.monotonic`; None: no deadline.
            name: the name of the request in messages.

        Returns:
            The request, which has ended without error.

        Raises:
            QueueFull: the queue is full, and the front refuses requests.
            TooLate: the deadline passed before the end.
            NotRunning: the front is closed, or was closed with cancel before the end.
            ValueError, RuntimeError: the request has failed.
        """
        answers = self.submit([request], deadline=deadline, names=[name])
        try:
            return await answers.ended(0)
        finally:
            answers.leave()

    def stream(
        self, request: R, *, deadline: float | None = None, name: str = "the request"
    ) -> AsyncIterator[list[int]]:
        """Streams the new tokens of a request. Tokens that come together are one list.

        The request has its place in the queue when this returns. It is cancelled when the iterator is deleted.

        Raises:
            ValueError: the request's tokens aren't known before its end.
            Exception: see `ask`; QueueFull and NotRunning at once.
        """
        return self.submit([request], deadline=deadline, names=[name], listen=[0]).tokens(0)

    def submit(
        self,
        requests: Sequence[R],
        *,
        deadline: float | None = None,
        names: Sequence[str] = (),
        listen: Collection[int] = (),
    ) -> Answers[R]:
        """Submits requests together.

        Args:
            requests: the requests, which run in one batch with others.
            deadline: see `ask`; for all of them.
            names: the name of each in messages.
            listen: the indices of the requests whose tokens are streamed.

        Raises:
            QueueFull, NotRunning, ValueError: see `stream`.
            TooLate: the deadline has passed.
        """
        box = Box(requests, names or ["the request"] * len(requests))
        for place in listen:
            requests[place].listen(functools.partial(self._note, box, place))
        with self._changed:
            if self._thread is None or self._is_closing:
                raise NotRunning(f"expected an {self.name} that is open: use it inside of `async with`")
            if self._failure is not None:
                raise self._broken(self._failure)
            if deadline is not None and time.monotonic() >= deadline:
                self._late += 1
                raise box.late()
            self._places.discard(_place.get())  # its own
            if not self._parked and self._has_room(box.num_tokens):
                self._inbox.append(box)
                self._changed.notify()
            elif self.when_full == "refuse":
                raise self._full()
            else:
                self._parked.append(box)
                box.end_parked_at(lambda: self._end_parked(box))
        answers = Answers(box, self._leave, self.name)
        if deadline is not None:
            box.end_at(deadline, functools.partial(self._expire, box))
        return answers

    @contextlib.contextmanager
    def place(self) -> Iterator[None]:
        """Reserves a place in the queue for a request that the caller is about to make, until it is submitted.

        If the queue is full, the caller need not begin; of many concurrent callers, only those with a place do.

        Raises:
            QueueFull: the queue is full, and the front refuses requests.
        """
        place = Place()
        with self._changed:
            if self.when_full == "refuse":
                if not self._has_room(1):
                    raise self._full()
                self._places.add(place)
        token = _place.set(place)
        try:
            yield
        finally:
            _place.reset(token)
            with self._changed:
                self._places.discard(place)

    async def aside(
        self, work: Callable[[], T], size: int, *, deadline: float | None = None, is_slow: bool = False
    ) -> T:
        """Runs a function of text without blocking the event loop for long.

        For a short text it runs at once, else in a thread that all these functions share; see `TextQueue`.

        Args:
            work: the function.
            size: the number of characters that it reads.
            deadline: a time of `time.monotonic`; None: no deadline.
            is_slow: whether it may take long even for a short text.

        Raises:
            QueueFull: as many functions wait for that thread as requests may wait, and the front refuses requests.
            TooLate: the deadline passed before the end.
            NotRunning: the front was closed before the function began.
        """
        if size <= _INLINE and not is_slow:
            return work()
        with self._changed:
            if self.when_full == "refuse" and len(self._texts) >= self.max_waiting:
                self._refused += 1
                message = f"the texts of {len(self._texts)} requests are still to be read: try again later"
                raise QueueFull(message, self._retry_after())
        try:
            return await self._texts.run(work, size, deadline)
        except TooLate:
            with self._changed:
                self._late += 1
            raise

    async def call(self, function: Callable[[], T], *, deadline: float | None = None) -> T:
        """Runs a function in the thread that steps the model, between two steps. All requests wait for it.

        Args:
            function: the function.
            deadline: a time of `time.monotonic`; None: no deadline. A function that runs already isn't stopped.

        Raises:
            NotRunning: see `ask`; or the thread ended before it ran the function.
            TooLate: the deadline passed before the end.
        """
        call = Call(function)
        with self._changed:
            if self._thread is None or self._is_closing:
                raise NotRunning(f"expected an {self.name} that is open: use it inside of `async with`")
            if self._failure is not None:
                raise self._broken(self._failure)
            self._calls.append(call)
            self._changed.notify()
        try:
            return await call.ended(deadline)
        except TooLate:
            with self._changed:
                self._late += 1
            raise

    def stats(self) -> Stats:
        """Returns the current counters. Any thread may call this."""
        with self._changed:
            load = self._load
            return Stats(
                load.running, self.num_queued + self.num_blocked, self._waiting_tokens, load.rows, load.free_tokens,
                load.capacity_tokens, load.read_tokens, load.cached_tokens, self._new_tokens, self._ended,
                self._refused, self._late, self._cancelled, self._steps, self._step_seconds,
                tuple(self._queue_counts), self._queue_seconds,
            )  # fmt: skip

    @property
    def num_queued(self) -> int:
        """The number of requests that have a place in the queue and haven't begun."""
        return sum(len(box.requests) for box in list(self._inbox)) + self._load.waiting

    @property
    def num_blocked(self) -> int:
        """The number of requests that wait for a place in the queue."""
        return sum(len(box.requests) for box in list(self._parked))

    @property
    def _waiting_tokens(self) -> int:
        return sum(box.num_tokens for box in list(self._inbox)) + self._load.waiting_tokens

    def _has_room(self, num_tokens: int) -> bool:
        if self.num_queued + len(self._places) >= self.max_waiting:
            return False
        waiting = self._waiting_tokens
        return self.max_waiting_tokens is None or not waiting or waiting + num_tokens <= self.max_waiting_tokens

    def _full(self) -> QueueFull:
        self._refused += 1
        message = f"{self.num_queued} requests of {self._waiting_tokens:,} tokens are waiting: try again later"
        return QueueFull(message, self._retry_after())

    def _retry_after(self) -> float:
        """Returns the seconds in which the waiting requests are likely to begin."""
        least, most = _RETRY
        return min(most, max(least, self._waiting_tokens / self._rate)) if self._rate else least

    def _expire(self, box: Box[R]) -> None:
        """Ends a call whose deadline has passed."""
        if all(box.has_ended):
            return
        self._late += 1
        box.error = box.late()
        self._take_back(box)
        box.woken.set()

    def _end_parked(self, box: Box[R]) -> None:
        """Ends requests whose time is over before they have a place in the queue."""
        with self._changed:
            if box not in self._parked:
                return  # they have a place, and the thread ends them
            self._parked.remove(box)
        for place, request in enumerate(box.requests):
            request.finish()
            box.has_ended[place] = True
        box.woken.set()

    def _leave(self, box: Box[R]) -> None:
        """Ends requests whose task no longer waits for them."""
        box.forget_ends()
        if not all(request.is_done or request.is_cancelled for request in box.requests):
            self._cancelled += 1
            self._take_back(box)

    def _take_back(self, box: Box[R]) -> None:
        for request in box.requests:
            if not request.is_done:
                request.cancel()
        with self._changed:
            if box in self._parked:
                self._parked.remove(box)
            self._changed.notify()

    # Called by the thread

    def _work(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # otherwise the tasks would wait for ever
            self._give_up(error)

    def _serve(self) -> None:
        batching = self._new_batching()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._inbox or self._calls or self._is_closing)
                if not self._inbox and not self._calls:
                    return
            with evaluating(self.model) as mode:
                batching = self._run(batching, mode)

    def _run(self, batching: Batching[R], mode: Evaluation) -> Batching[R]:
        """Steps until no work is left, and returns the scheduler in use at the end."""
        while True:
            with self._changed:
                self._load = load = batching.load()  # waiting requests may have been cancelled
                while self._parked and self._has_room(self._parked[0].num_tokens):
                    self._inbox.append(self._parked.popleft())
                arrived = list(self._inbox)
                self._inbox.clear()
                num_calls = len(self._calls)
                self._load = load._replace(
                    waiting=load.waiting + sum(len(box.requests) for box in arrived),
                    waiting_tokens=load.waiting_tokens + sum(box.num_tokens for box in arrived),
                )
                is_cancelling = self._is_cancelling
            for box in arrived:  # all of them before an error: `_give_up` fails only those that it knows
                self._boxes |= {request: (box, place) for place, request in enumerate(box.requests)}
            for box in arrived:
                batching.submit(box.requests)
            if is_cancelling:
                for request in self._boxes:
                    request.cancel()
            for _ in range(num_calls):
                mode.hold()
                self._calls.popleft().run()
            if batching.is_idle:
                return batching
            began = time.monotonic()
            try:
                mode.hold()
                ended = batching.step()
            except BaseException as error:  # an error of the model; the thread continues
                ended, batching = self._recover(error, batching)
            self._count(load, batching, time.monotonic() - began)
            for request in ended:
                box, place = self._boxes.pop(request)
                self._told.append(Event(box, place, None))
                self._ended += 1
                if request.begun_at is not None:
                    waited = request.begun_at - box.came_at
                    self._queue_seconds += waited
                    self._queue_counts[bisect.bisect_left(QUEUE_BOUNDS, waited)] += 1
                self._new_tokens += request.num_new_tokens
            self._tell()

    def _count(self, before: Load, batching: Batching[R], seconds: float) -> None:
        """Records the duration of a step, and the rate at which requests leave the queue."""
        after = batching.load()
        with self._changed:  # before the tasks are notified
            self._load = after
        self._steps += 1
        self._step_seconds += seconds
        self._rate_seconds += seconds
        self._rate_tokens += max(0, after.read_tokens + after.cached_tokens - before.read_tokens - before.cached_tokens)
        if self._rate_seconds >= _RATE_SECONDS:
            self._rate = self._rate_tokens / self._rate_seconds
            self._rate_tokens, self._rate_seconds = 0, 0.0

    def _note(self, box: Box[R], place: int, token: int) -> None:
        self._told.append(Event(box, place, token))

    def _tell(self) -> None:
        """Delivers the events to the tasks, in one call for each event loop, since each call wakes a loop."""
        told, self._told = self._told, []
        loops: dict[asyncio.AbstractEventLoop, list[Event[R]]] = {}
        for event in told:
            loops.setdefault(event.box.loop, []).append(event)
        for loop, events in loops.items():
            with contextlib.suppress(RuntimeError):  # the loop is closed: no task waits
                loop.call_soon_threadsafe(deliver, events)

    def _recover(self, error: BaseException, batching: Batching[R]) -> tuple[list[R], Batching[R]]:
        """Recovers from an error of the model: requests that had begun fail, the others begin with a new batch."""
        waiting = list(batching.waiting)
        held = set(waiting)
        ended = [request for request in self._boxes if request not in held]
        if not ended:  # not even the first request can begin
            ended = [waiting.pop(0)]
        for request in ended:
            if not request.is_done:
                wrapped = RuntimeError(f"the model failed: {type(error).__name__}: {error}")
                wrapped.__cause__ = error
                request.fail(wrapped)
        batching.clear()  # the error's traceback holds the batch, and there may not be memory for two
        anew = batching.renewed()
        anew.submit(waiting)
        return ended, anew

    def _give_up(self, error: BaseException) -> None:
        """Fails every request and refuses new ones, because the thread can't continue."""
        with self._changed:
            self._failure = error
            boxes = [*dict.fromkeys(box for box, _ in self._boxes.values()), *self._inbox, *self._parked]
            calls = list(self._calls)
            for held in (self._boxes, self._inbox, self._parked, self._calls):
                held.clear()
            self._load = Load()
        for box in boxes:
            for place, request in enumerate(box.requests):
                if not request.is_done:
                    request.fail(self._broken(error))
                self._told.append(Event(box, place, None))
        self._tell()
        for call in calls:
            call.fail(self._broken(error))

    def _broken(self, error: BaseException) -> NotRunning:
        found = NotRunning(f"the {self.name} can't go on, close it and open it again: {type(error).__name__}: {error}")
        found.__cause__ = error
        return found


class HasFront:
    """An object whose requests an `AsyncFront` runs. `async with` opens it.

    Attributes:
        front: the `AsyncFront`.
    """

    front: AsyncFront[Any]

    async def __aenter__(self) -> Self:
        await self.front.__aenter__()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        await self.close(cancel=error is not None)

    async def close(self, *, cancel: bool = False) -> None:
        """Refuses further requests, and returns when the thread has ended.

        `async with` calls this at its end, with cancel if it ends with an error.

        Args:
            cancel: cancel running and waiting requests, whose tasks get a RuntimeError; if not, they are answered
                first.
        """
        await self.front.close(cancel=cancel)

    async def aside(
        self, work: Callable[[], T], size: int, *, deadline: float | None = None, is_slow: bool = False
    ) -> T:
        """Runs a function of text without blocking the event loop for long; see `AsyncFront.aside`."""
        return await self.front.aside(work, size, deadline=deadline, is_slow=is_slow)

    @property
    def is_alive(self) -> bool:
        """Whether the object is open and its thread has not failed."""
        return self.front.is_alive

    @property
    def num_queued(self) -> int:
        """The number of requests that have a place in the queue and haven't begun."""
        return self.front.num_queued

    @property
    def num_blocked(self) -> int:
        """The number of requests that wait for a place in the queue."""
        return self.front.num_blocked

    def stats(self) -> Stats:
        """Returns the current counters. Any thread may call this."""
        return self.front.stats()


@atexit.register
def _stop_all() -> None:
    """Ends the threads of fronts that the program has not closed.

    An interpreter that ends kills its daemons when they come back from C++, which C++ answers by aborting the program.
    The threads that aren't daemons have ended by now: those may use a front until then.
    """
    for front in list(_open):
        front._stop()
