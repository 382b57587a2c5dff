"""`Session`: runs the requests of one model in one batch, in the caller's thread or in a thread of its own.

The kind of request doesn't matter: translations, completions, embeddings. A session needs something that batches
requests (`Batching`; `Scheduler` is one), and the requests themselves (`requests.BaseRequest`; `Request` is one).
"""

from __future__ import annotations

import asyncio
import atexit
import bisect
import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextvars import ContextVar
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast

from typing_extensions import Self

from fastformer.generation.evaluation import Evaluation, evaluating
from fastformer.generation.jobs import (
    QUEUE_BOUNDS,
    Call,
    Job,
    JobQueue,
    NotRunning,
    R,
    SessionStats,
    TextQueue,
    TooLate,
    at_once,
    end_all,
)
from fastformer.requests import Batching

if TYPE_CHECKING:  # a session of speech needs no PyTorch
    from fastformer.generation.model_protocols import Model
    from fastformer.generation.requests import Request
    from fastformer.generation.scheduler import Scheduler
    from fastformer.generation.text_io import Source

T = TypeVar("T")

READ_AHEAD = 4096  # inputs of a stream in memory: several batches, because an answer may have to wait for its turn
_INLINE = 2_000  # the most characters that are tokenized on the event loop, in a millisecond or two

_place: ContextVar[object | None] = ContextVar("place", default=None)  # reserved for the task's request
_open: weakref.WeakSet[Session[Any]] = weakref.WeakSet()  # the sessions whose threads may run


class Session(Generic[R]):
    """Runs the requests of one model in one batch.

        session.run(requests)  # in the caller's thread
        for ready in session.map(source, build):  # the same, while inputs arrive
            ...
        async with session:  # in a thread of its own, for many tasks at once
            request = await session.ask(request)

    A task that is cancelled releases its memory. Tasks of several event loops may share a session. Don't use the model
    elsewhere meanwhile; `call` runs a function in the thread, between two steps. A session that is used in the caller's
    thread is not opened; threads may share it, and their calls run one after another.

    Args:
        model: is set to evaluation while it works.
        new_batching: makes the scheduler; the thread calls it, or the first call in the caller's thread.
        name: the name of the session in messages, and of its thread.
        max_waiting: how many requests may wait for room in the batch. Those of one call take their places together, so
            the last call that finds one may go beyond.
        max_waiting_tokens: how many tokens those may have to read; one call alone may have more. None: any number.
        when_full: "wait" has a task wait for a place, "refuse" raises QueueFull.

    Attributes:
        model: the same.
        queue: the requests in front of the batch.

    Raises:
        ValueError: a limit below 1, another when_full.
    """

    def __init__(
        self,
        model: Model,
        new_batching: Callable[[], Batching[R]],
        *,
        name: str | None = None,
        max_waiting: int = 1024,
        max_waiting_tokens: int | None = None,
        when_full: Literal["wait", "refuse"] = "wait",
    ) -> None:
        self.model, self.name, self._new_batching = model, name or type(self).__name__, new_batching
        self._scheduler: Scheduler | None = None  # of calls in their caller's thread
        self._turn = threading.Lock()  # held by such a call
        self._caller: int | None = None  # the thread that holds it
        self._changed = threading.Condition()  # guards all attributes below
        self._thread: threading.Thread | None = None
        self._is_closing = self._is_cancelling = False
        self._failure: BaseException | None = None  # the error that ended the thread
        self.queue: JobQueue[R] = JobQueue(max_waiting, max_waiting_tokens, when_full)
        self._calls: deque[Call[Any]] = deque()
        self._jobs: dict[R, tuple[Job[R], int]] = {}  # each request's job and index; used only by the thread
        self._streaming: dict[Job[R], int] = {}  # streamed jobs, and the number of their requests that run; likewise
        self._new_tokens = self._ended = self._late = self._cancelled = self._steps = 0
        self._step_seconds = self._queue_seconds = 0.0
        self._queue_counts = [0] * (len(QUEUE_BOUNDS) + 1)
        self._texts = TextQueue(f"{self.name}-texts")

    # In the caller's thread

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler of calls in their caller's thread.

        Raises:
            RuntimeError: the session is open, so that its thread decodes.
        """
        if self._thread is not None:
            raise RuntimeError(f"expected an {self.name} that is not open, to decode in this thread, got an open one")
        if self._scheduler is None:
            self._scheduler = cast("Scheduler", self._new_batching())
        return self._scheduler

    @contextlib.contextmanager
    def turn(self) -> Iterator[Scheduler]:
        """Lends the scheduler to a call in its caller's thread, after the calls of other threads.

        Raises:
            RuntimeError: a call of this thread has it already, such as a stream that is open.
        """
        if self._caller == threading.get_ident():
            raise RuntimeError("expected one call at a time: close the stream that is open, or make another object")
        with self._turn:
            self._caller, scheduler = threading.get_ident(), self.scheduler
            try:
                yield scheduler
            except GeneratorExit:
                scheduler.cancel_all()
                raise
            finally:
                self._caller = None
                if not scheduler.is_idle:  # an error interrupted a step
                    scheduler.clear()

    def run(self, requests: Sequence[Request], mode: Evaluation | None = None) -> None:
        """Runs requests to their end, in the caller's thread.

        Args:
            requests: the requests.
            mode: keeps the model in evaluation; None: this call does.

        Raises:
            Exception: the first error of any request; the other requests are then cancelled.
        """
        from fastformer.generation.scheduler import run

        with self.turn() as scheduler, contextlib.nullcontext(mode) if mode else evaluating(self.model) as held:
            run(scheduler, requests, held.hold)

    def tokens(self, request: Request) -> Iterator[list[int]]:
        """Yields the new tokens of a request as they come, in the caller's thread. At the end it may have an error."""
        tokens: list[int] = []
        request.listen(tokens.append)
        with self.turn() as scheduler:
            scheduler.submit([request])
            while not request.is_done:
                with evaluating(self.model):
                    scheduler.step()
                yield tokens.copy()
                tokens.clear()

    def map(
        self, source: Source[T], build: Callable[[T], Request | None], *, read_ahead: int = READ_AHEAD
    ) -> Iterator[list[tuple[T, Request | None]]]:
        """Runs a request for each input of a source, in the caller's thread; the answers come in the inputs' order.

        An input is read when the batch has room for it; while requests run, the method never waits for an input. An
        error of the source or of `build` is raised after the answers to the inputs before it.

        Args:
            source: the inputs.
            build: makes the request of an input; None: the input needs no request.
            read_ahead: the most inputs that are in memory: read, and not yet answered.

        Yields:
            The inputs that come next in the order and whose requests are done, with these requests.
        """
        pending: deque[tuple[T, Request | None]] = deque()
        is_open, failure = True, None

        def read(wait: bool) -> None:
            nonlocal is_open, failure
            while is_open and len(pending) < read_ahead and scheduler.wants_more:
                try:
                    item = source.get(wait)
                    if item is None:
                        return
                    request = build(item)
                except EOFError:
                    is_open = False
                except Exception as error:
                    is_open, failure = False, error
                else:
                    pending.append((item, request))
                    if request is not None:
                        scheduler.submit([request])
                    wait = False

        with self.turn() as scheduler:
            while True:
                read(wait=not pending)
                if not pending:
                    break
                with evaluating(self.model) as mode:
                    while not _is_done(pending[0]):
                        mode.hold()
                        scheduler.step()
                        read(wait=False)
                ready = [pending.popleft()]
                while pending and _is_done(pending[0]):
                    ready.append(pending.popleft())
                yield ready
        if failure is not None:
            raise failure

    # Opening and closing the thread

    async def __aenter__(self) -> Self:
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

        `async with` calls this at its end, with cancel if it ends with an error.

        Args:
            cancel: cancel running and waiting requests, whose tasks get a RuntimeError; if not, they are answered
                first.
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
        """Whether the object is open and its thread has not failed."""
        thread = self._thread
        return thread is not None and thread.is_alive() and self._failure is None

    # Called by tasks

    async def ask(self, request: R, *, deadline: float | None = None) -> R:
        """Runs a request to its end.

        Args:
            request: a request for the session's model.
            deadline: a time of `time.monotonic`; None: no deadline.

        Returns:
            The request, which has ended without error.

        Raises:
            QueueFull: the queue is full, and the session refuses requests.
            TooLate: the deadline passed before the end.
            NotRunning: the session is closed, or was closed with cancel before the end.
            ValueError, RuntimeError: the request has failed.
        """
        (request,) = await self.submit([request], deadline=deadline).results()
        return request

    def submit(self, requests: Sequence[R], *, deadline: float | None = None, streams: bool = False) -> Job[R]:
        """Submits requests together, which have their places in the queue when this returns.

        Args:
            requests: the requests, which run in one batch with others.
            deadline: see `ask`; for all of them.
            streams: whether their tokens are streamed.

        Raises:
            QueueFull, NotRunning: see `ask`.
            ValueError: the tokens of a request aren't known before its end.
            TooLate: the deadline has passed.
        """
        with self._changed:
            self._check_open()
            job = Job(requests, self._leave)
            if streams:
                for request, tokens in zip(requests, job.tokens, strict=True):
                    request.listen(tokens.append)
            if deadline is not None and time.monotonic() >= deadline:
                self._late += 1
                raise job.late()
            self.queue.places.discard(_place.get())  # its own
            if self.queue.put(job):
                self._changed.notify()
            else:
                ends = [request.deadline for request in requests if request.deadline is not None]
                if len(ends) == len(requests):
                    job.call_at(max(ends), self._end_blocked)
            if streams:
                self._streaming[job] = len(requests)
        if deadline is not None:
            job.call_at(deadline, self._expire)
        return job

    @contextlib.contextmanager
    def place(self) -> Iterator[None]:
        """Reserves a place in the queue for a request that the caller is about to make, until it is submitted.

        If the queue is full, the caller need not begin; of many concurrent callers, only those with a place do.

        Raises:
            QueueFull: the queue is full, and the session refuses requests.
        """
        place = object()
        with self._changed:
            self.queue.reserve(place)
        token = _place.set(place)
        try:
            yield
        finally:
            _place.reset(token)
            with self._changed:
                self.queue.places.discard(place)

    def aside(
        self, work: Callable[[], T], size: int, *, deadline: float | None = None, is_slow: bool = False
    ) -> Coroutine[Any, Any, T]:
        """Runs a function of text without blocking the event loop for long.

        For a short text it runs at once, else in a thread that all these functions share; see `TextQueue`.

        Args:
            work: the function.
            size: the number of characters that it reads.
            deadline: a time of `time.monotonic`; None: no deadline.
            is_slow: whether it may take long even for a short text.

        Raises:
            QueueFull: as many functions wait for that thread as requests may wait, and the session refuses requests.
            TooLate: the deadline passed before the end.
            NotRunning: the session was closed before the function began.
        """
        if size <= _INLINE and not is_slow:
            return at_once(work())
        if self._texts.num_waiting:
            with self._changed:
                self.queue.check_texts(self._texts.num_waiting)
        return self._texts.run(work, size, deadline)

    async def call(self, function: Callable[[], T], *, deadline: float | None = None) -> T:
        """Runs a function in the thread that steps the model, between two steps. All requests wait for it.

        Args:
            function: the function.
            deadline: a time of `time.monotonic`; None: no deadline. A function that runs already isn't stopped.

        Raises:
            NotRunning: see `ask`; or the thread ended before it ran the function.
            TooLate: the deadline passed before the end.
        """
        call = Call(function, deadline)
        with self._changed:
            self._check_open()
            self._calls.append(call)
            self._changed.notify()
        try:
            return await call.result()
        except TooLate:
            with self._changed:
                self._late += 1
            raise

    def _check_open(self) -> None:
        if self._thread is None or self._is_closing:
            raise NotRunning(f"expected an {self.name} that is open: use it inside of `async with`")
        if self._failure is not None:
            raise self._broken(self._failure)

    def stats(self) -> SessionStats:
        """Returns the current counters. Any thread may call this."""
        with self._changed:
            queue = self.queue
            waiting = {"waiting": queue.num_queued + queue.num_blocked, "waiting_tokens": queue.num_tokens}
            return SessionStats(
                **{**vars(queue.load), **waiting}, new_tokens=self._new_tokens, ended=self._ended,
                refused=queue.refused, late=self._late + self._texts.late, cancelled=self._cancelled, steps=self._steps,
                step_seconds=self._step_seconds, queue_counts=tuple(self._queue_counts),
                queue_seconds=self._queue_seconds,
            )  # fmt: skip

    max_waiting = property(attrgetter("queue.max_waiting"), doc="The number of requests that may wait for room.")
    num_queued = property(attrgetter("queue.num_queued"), doc="The number of requests in the queue.")
    num_blocked = property(attrgetter("queue.num_blocked"), doc="The number of requests that wait for a place in it.")

    def _expire(self, job: Job[R]) -> None:
        """Ends a job whose deadline has passed."""
        if not all(job.has_ended):
            self._late += 1
            job.end(error=job.late())
            self._withdraw(job)

    def _end_blocked(self, job: Job[R]) -> None:
        """Ends requests whose time is over before they have a place in the queue."""
        with self._changed:
            if not self.queue.remove_blocked(job):
                return  # they have a place, and the thread ends them
            self._streaming.pop(job, None)
        for request in job.requests:
            request.finish()
        job.end(range(len(job.requests)))

    def _leave(self, job: Job[R]) -> None:
        """Ends requests whose task no longer waits for them."""
        self._cancelled += 1
        self._withdraw(job)

    def _withdraw(self, job: Job[R]) -> None:
        for request in job.requests:
            if not request.is_done:
                request.cancel()
        with self._changed:
            if self.queue.remove_blocked(job):
                self._streaming.pop(job, None)
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
                self._changed.wait_for(lambda: self.queue.jobs or self._calls or self._is_closing)
                if not self.queue.jobs and not self._calls:
                    return
            with evaluating(self.model) as mode:
                batching = self._run(batching, mode)

    def _run(self, batching: Batching[R], mode: Evaluation) -> Batching[R]:
        """Steps until no work is left, and returns the scheduler in use at the end."""
        while True:
            with self._changed:
                arrived = self.queue.take() if self.queue.jobs or self.queue.blocked else ()
                num_calls = len(self._calls)
                is_cancelling = self._is_cancelling
            for job in arrived:  # all of them before an error: `_give_up` fails only those that it knows
                for index, request in enumerate(job.requests):
                    self._jobs[request] = job, index
            for job in arrived:
                batching.submit(job.requests)
            if is_cancelling:
                for request in self._jobs:
                    request.cancel()
            for _ in range(num_calls):
                mode.hold()
                self._calls.popleft().run()
            load = self.queue.load
            if not load.running and not load.waiting:
                return batching
            mode.hold()  # a call or another thread may have set the model to training
            began = time.monotonic()
            try:
                ended = batching.step()
            except BaseException as error:  # an error of the model; the thread continues
                ended, batching = self._recover(error, batching)
            seconds, load = time.monotonic() - began, batching.load()
            with self._changed:  # before the tasks are notified
                self.queue.measure(load, seconds)
            self._steps += 1
            self._step_seconds += seconds
            self._tell(ended)

    def _tell(self, ended: Sequence[R]) -> None:
        """Tells the tasks which requests have ended or have new tokens."""
        events: list[tuple[Job[R], list[int]]] = []
        for request in ended:
            job, index = self._jobs.pop(request)
            events.append((job, [index]))
            self._ended += 1
            if request.begun_at is not None:
                waited = request.begun_at - job.submitted_at
                self._queue_seconds += waited
                self._queue_counts[bisect.bisect_left(QUEUE_BOUNDS, waited)] += 1
            self._new_tokens += request.num_new_tokens
        if self._streaming:
            with self._changed:
                events += [(job, []) for job in self._streaming if any(job.tokens)]
                for job, indices in events:
                    if job in self._streaming:
                        self._streaming[job] -= len(indices)
                        if not self._streaming[job]:
                            del self._streaming[job]
        self._notify(events)

    def _notify(self, events: Iterable[tuple[Job[R], Sequence[int]]]) -> None:
        """Delivers events to the tasks, in one call for each event loop, since each call wakes a loop."""
        loops: dict[asyncio.AbstractEventLoop, list[tuple[Job[R], Sequence[int]]]] = {}
        for event in events:
            loops.setdefault(event[0].loop, []).append(event)
        for loop, events_of_loop in loops.items():
            with contextlib.suppress(RuntimeError):  # the loop is closed: no task waits
                loop.call_soon_threadsafe(end_all, events_of_loop)

    def _recover(self, error: BaseException, batching: Batching[R]) -> tuple[list[R], Batching[R]]:
        """Recovers from an error of the model: requests that had begun fail, the others begin with a new batch."""
        waiting = list(batching.waiting)
        unbegun = set(waiting)
        ended = [request for request in self._jobs if request not in unbegun]
        if not ended:  # not even the first request can begin
            ended = [waiting.pop(0)]
        for request in ended:
            if not request.is_done:
                wrapped = RuntimeError(f"the model failed: {type(error).__name__}: {error}")
                wrapped.__cause__ = error
                request.fail(wrapped)
        batching.clear()  # the error's traceback holds the batch, and there may not be memory for two
        renewed = batching.renewed()
        renewed.submit(waiting)
        return ended, renewed

    def _give_up(self, error: BaseException) -> None:
        """Fails every request and refuses new ones, because the thread can't continue."""
        with self._changed:
            self._failure = error
            jobs = [*dict.fromkeys(job for job, _ in self._jobs.values()), *self.queue.clear()]
            calls = list(self._calls)
            for collection in (self._jobs, self._calls, self._streaming):
                collection.clear()
        for job in jobs:
            for request in job.requests:
                if not request.is_done:
                    request.fail(self._broken(error))
        self._notify((job, range(len(job.requests))) for job in jobs)
        for call in calls:
            call.fail(self._broken(error))

    def _broken(self, error: BaseException) -> NotRunning:
        broken = NotRunning(f"the {self.name} can't go on, close it and open it again: {type(error).__name__}: {error}")
        broken.__cause__ = error
        return broken


def _is_done(pair: tuple[object, Request | None]) -> bool:
    return pair[1] is None or pair[1].is_done


@atexit.register
def _stop_all() -> None:
    """Ends the threads of sessions that the program has not closed.

    An interpreter that ends kills its daemons when they come back from C++, which C++ answers by aborting the program.
    The threads that aren't daemons have ended by now: those may use a session until then.
    """
    for session in list(_open):
        session._stop()
