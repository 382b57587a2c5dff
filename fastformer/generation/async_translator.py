"""An asyncio front of a `Translator`: the requests of many tasks decode together in one batch."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import Any

from fastformer.generation.bad_texts import failure
from fastformer.generation.engines import choose_engine
from fastformer.generation.flow import evaluating
from fastformer.generation.generate import RequestMaker
from fastformer.generation.requests import Request
from fastformer.generation.scheduler import Scheduler
from fastformer.generation.settings import GenerationSettings
from fastformer.generation.streaming import TextPieces
from fastformer.generation.texts import Answer, Item, as_form
from fastformer.generation.translator import Translator, check_one_stream

_SHOWN = 40  # characters of a text that an error names


class AsyncTranslator:
    """Translates for many tasks at once.

        async with AsyncTranslator(translator) as front:
            text = await front.translate("twenty-one", num_beams=4)
            async for piece in front.stream("forty-two"):
                print(piece, end="")

    Tasks ask for one text at a time, each with options of its own; what they ask for decodes in one batch, in a thread
    that has the model for itself: nobody else may use it meanwhile. A task that is cancelled, or that leaves its
    stream, gives its memory back. Tasks of several event loops may share it.

    Args:
        translator: whose model, tokenizer and limits of memory these are.
        max_waiting: how many requests may wait for room in the batch; who asks for more waits until there is room.
        engine: how to decode, one of `engines.ENGINES`; None: the fastest that can.

    Raises:
        ValueError: a max_waiting below 1, or an engine that can't decode the model.
    """

    def __init__(self, translator: Translator, *, max_waiting: int = 1024, engine: str | None = None) -> None:
        if not isinstance(translator, Translator):
            raise ValueError(f"expected a Translator, got {type(translator).__name__}")
        if not isinstance(max_waiting, int) or isinstance(max_waiting, bool) or max_waiting < 1:
            raise ValueError(f"expected max_waiting to be an integer of at least 1, got {max_waiting!r}")
        self.translator, self.max_waiting = translator, max_waiting
        self._engine = choose_engine(translator.model, engine)
        self._changed = threading.Condition()  # guards all that follows
        self._thread: threading.Thread | None = None
        self._is_closing = self._is_cancelling = False
        self._inbox: deque[_Job] = deque()
        self._parked: deque[_Ticket] = deque()
        self._promised = 0  # places in the queue of tasks that haven't taken them yet
        self._waiting = 0  # requests that the scheduler holds and hasn't begun

    async def __aenter__(self) -> AsyncTranslator:
        with self._changed:
            if self._thread is not None:
                raise RuntimeError("expected an AsyncTranslator that is closed, got one that is open already")
            self._is_closing = self._is_cancelling = False
            # A daemon: a program that forgets to close this may end all the same.
            self._thread = threading.Thread(target=self._work, name="AsyncTranslator", daemon=True)
            self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close(cancel=error is not None)

    async def close(self, *, cancel: bool = False) -> None:
        """Takes no more requests, and returns when its thread has ended.

        `async with` does it at its end, and cancels what runs if it ends with an error.

        Args:
            cancel: end what runs and what waits, whose tasks get a RuntimeError; without, they get their translations
                first.
        """
        with self._changed:
            thread = self._thread
            if thread is None:
                return
            self._is_closing = True
            if cancel:
                self._is_cancelling = True
                while self._parked:
                    self._parked.popleft().tell(is_granted=False)
            self._changed.notify()
        await asyncio.to_thread(thread.join)
        with self._changed:
            if self._thread is thread:
                self._thread = None

    async def translate(
        self,
        text: str,
        *,
        target_prefix: str | None = None,
        return_scores: bool = False,
        return_token_scores: bool = False,
        **options: Any,
    ) -> Any:
        """Translates a text, as `Translator.translate` does.

        Args:
            text: what to translate.
            target_prefix, return_scores, return_token_scores, options: see `Translator.translate`.

        Raises:
            ValueError: see `Translator.translate`.
            RuntimeError: this is closed, or was closed meanwhile with cancel; the model or a processor failed.
        """
        settings = self._settings(options)
        form = as_form(settings, return_scores, return_token_scores)
        ids, prefix = self.translator.encode_item(Item(text, target_prefix), 1, settings)
        job = await self._submit(text, ids, prefix, settings, log_probs=form.log_probs, streams=False)
        try:
            await job.events.get()
            return form.of(Answer(self.translator.tokenizer, job.finished()))
        finally:
            job.request.cancel()

    def stream(self, text: str, *, target_prefix: str | None = None, **options: Any) -> AsyncIterator[str]:
        """Gives a text's translation piece by piece, as `Translator.stream` does.

        Leaving the loop over it cancels the request, as soon as nobody holds the iterator.

        Args:
            text: what to translate.
            target_prefix, options: see `Translator.translate`; neither beams nor several samples can be streamed.

        Raises:
            ValueError, RuntimeError: see `translate`; the first at once.
        """
        settings = self._settings(options)
        check_one_stream(as_form(settings, False, False), settings)
        ids, prefix = self.translator.encode_item(Item(text, target_prefix), 1, settings)

        async def pieces() -> AsyncIterator[str]:
            job = await self._submit(text, ids, prefix, settings, log_probs=False, streams=True)
            found = TextPieces(self.translator.tokenizer, prefix)
            try:
                while (token := await job.events.get()) is not None:
                    if piece := found.add([token]):
                        yield piece
                job.finished()
                if piece := found.end():
                    yield piece
            finally:
                job.request.cancel()

        return pieces()

    def _settings(self, options: Mapping[str, Any]) -> GenerationSettings:
        settings = self.translator.settings(options)
        if settings.engine not in (None, self._engine.name) or not settings.use_cache:
            raise ValueError(
                f"expected neither engine nor use_cache: all requests decode in one batch, by engine "
                f"{self._engine.name!r}; AsyncTranslator(..., engine=) chooses another"
            )
        return settings

    # What the tasks do

    async def _submit(
        self,
        text: str,
        ids: list[int],
        prefix: list[int],
        settings: GenerationSettings,
        *,
        log_probs: bool,
        streams: bool,
    ) -> _Job:
        """Hands a request over, as soon as the queue has a place for it."""
        began = time.monotonic()
        maker = RequestMaker(self.translator.model, settings, log_probs=log_probs, engine=self._engine)
        job = _Job(text)
        job.request = maker.make(ids, prefix, place=0, on_token=job.tell if streams else None)
        if settings.max_time is not None:
            job.request.deadline = began + settings.max_time
        if not await self._take_place():
            raise job.closed()
        with self._changed:  # nothing can come between: the place is taken in the same turn of the loop
            self._promised -= 1
            self._inbox.append(job)
            self._changed.notify()
        return job

    async def _take_place(self) -> bool:
        """Waits for a place in the queue; False when there won't be one."""
        with self._changed:
            if self._thread is None or self._is_closing:
                raise RuntimeError("expected an AsyncTranslator that is open: use it inside of `async with`")
            if self._has_room():  # then nobody is parked
                self._promised += 1
                return True
            ticket = _Ticket()
            self._parked.append(ticket)
        try:
            return await ticket.future
        except asyncio.CancelledError:
            with self._changed:
                if ticket in self._parked:
                    self._parked.remove(ticket)
                elif ticket.is_granted:
                    self._promised -= 1
                    self._grant()
                self._changed.notify()
            raise

    def _has_room(self) -> bool:
        return len(self._inbox) + self._promised + self._waiting < self.max_waiting

    def _grant(self) -> None:
        """Gives free places to the tasks that have waited longest."""
        while self._parked and self._has_room():
            if self._parked.popleft().tell(is_granted=True):
                self._promised += 1

    # What the thread does

    def _work(self) -> None:
        scheduler = self._new_scheduler()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._inbox or self._is_over())
                if not self._inbox:
                    return
            with evaluating(self.translator.model):
                scheduler = self._run(scheduler)

    def _is_over(self) -> bool:
        return self._is_closing and not self._parked and not self._promised

    def _new_scheduler(self) -> Scheduler:
        return self.translator.new_scheduler(self._engine, is_endless=True)

    def _run(self, scheduler: Scheduler) -> Scheduler:
        """Steps until there is nothing to do; the scheduler that it ends with."""
        jobs: dict[Request, _Job] = {}
        while True:
            with self._changed:
                arrived = list(self._inbox)
                self._inbox.clear()
                self._waiting = len(scheduler.waiting) + len(arrived)
                is_cancelling = self._is_cancelling
            jobs |= {job.request: job for job in arrived}
            scheduler.submit(job.request for job in arrived)
            if is_cancelling:
                for request in jobs:
                    request.cancel()
            if scheduler.is_idle:
                return scheduler
            try:
                ended = scheduler.step()
            except BaseException as error:  # of the model: the thread outlives it
                ended, scheduler = self._recover(error, scheduler, jobs)
            with self._changed:
                self._waiting = len(scheduler.waiting)
                self._grant()
            for request in ended:
                with contextlib.suppress(RuntimeError):  # its loop is closed: nobody waits
                    jobs.pop(request).tell(None)

    def _recover(
        self, error: BaseException, scheduler: Scheduler, jobs: Mapping[Request, _Job]
    ) -> tuple[list[Request], Scheduler]:
        """After an error of the model, those that had begun fail; the others begin with an engine that starts anew."""
        waiting = list(scheduler.waiting)
        held = set(waiting)
        ended = [request for request in jobs if request not in held]
        if not ended:  # the first one can't even begin
            ended = [waiting.pop(0)]
        for request in ended:
            if not request.is_done:
                wrapped = RuntimeError(f"the model failed: {type(error).__name__}: {error}")
                wrapped.__cause__ = error
                request.fail(wrapped)
        scheduler = self._new_scheduler()
        scheduler.submit(waiting)
        return ended, scheduler


class _Job:
    """A request, and the task that waits for it.

    Attributes:
        request: what is asked for.
        events: the new tokens of a stream, and None at the end.
    """

    request: Request

    def __init__(self, text: str) -> None:
        self._name, self._loop = f"text {text!r:.{_SHOWN}}", asyncio.get_running_loop()
        self.events: asyncio.Queue[int | None] = asyncio.Queue()

    def tell(self, event: int | None) -> None:
        """From the thread: what comes next. Raises a RuntimeError when the loop is closed."""
        self._loop.call_soon_threadsafe(self.events.put_nowait, event)

    def finished(self) -> Request:
        """The request, which has ended well; otherwise what went wrong is raised."""
        if self.request.error is not None:
            raise failure(self._name, self.request.error) from self.request.error
        if self.request.is_cancelled:
            raise self.closed()
        return self.request

    def closed(self) -> RuntimeError:
        """The error of a request that somebody else has ended."""
        return RuntimeError(f"{self._name}: cancelled: the AsyncTranslator was closed")


class _Ticket:
    """A task that waits for a place in the queue."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[bool] = self._loop.create_future()
        self.is_granted = False

    def tell(self, *, is_granted: bool) -> bool:
        """From any thread: whether there is a place for it. False when its loop is closed."""

        def settle() -> None:
            if not self.future.done():
                self.future.set_result(is_granted)

        try:
            self._loop.call_soon_threadsafe(settle)
        except RuntimeError:
            return False
        self.is_granted = is_granted
        return True
