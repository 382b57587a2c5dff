"""`AsyncTranslator`: an asyncio interface to a `Translator`, which decodes the requests of many tasks in one batch."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from types import TracebackType
from typing import Any

from fastformer.generation.config import GenerationConfig
from fastformer.generation.engines import choose_engine
from fastformer.generation.model_protocols import Evaluation, evaluating
from fastformer.generation.paragraphs import check_split, parts_of
from fastformer.generation.request_builder import RequestBuilder
from fastformer.generation.requests import Request
from fastformer.generation.scheduler import Scheduler
from fastformer.generation.streaming import TextPieces
from fastformer.generation.text_io import Answer, Item, as_form, failure
from fastformer.generation.translator import Translator, check_one_stream
from fastformer.settings import Positive, check_value

_SHOWN = 40  # characters of a text that an error names

_open: weakref.WeakSet[AsyncTranslator] = weakref.WeakSet()  # those whose threads may run


class AsyncTranslator:
    """Translates for many tasks at once.

        async with AsyncTranslator(translator) as front:
            text = await front.translate("twenty-one", num_beams=4)
            async for piece in front.stream("forty-two"):
                print(piece, end="")

    A task asks for one text at a time, with options of its own. All requests decode in one batch, in a thread of their
    own; don't use the model elsewhere meanwhile. A task that is cancelled, or that leaves its stream, releases its
    memory. Tasks of several event loops may share an AsyncTranslator.

    Args:
        translator: whose model, tokenizer and limits of memory these are.
        max_waiting: how many requests may wait for room in the batch. A task that asks for more waits for a place.
        engine: how to decode, one of `engines.ENGINES`; None: the fastest that can.

    Raises:
        ValueError: a max_waiting below 1, or an engine that can't decode the model.
    """

    def __init__(self, translator: Translator, *, max_waiting: int = 1024, engine: str | None = None) -> None:
        if not isinstance(translator, Translator):
            raise ValueError(f"expected a Translator, got {type(translator).__name__}")
        check_value("max_waiting", max_waiting, Positive)
        self.translator, self.max_waiting = translator, max_waiting
        with evaluating(translator.model):
            self._engine = choose_engine(translator.model, engine, translator.precision)
        self._changed = threading.Condition()  # guards all that follows
        self._thread: threading.Thread | None = None
        self._is_closing = self._is_cancelling = False
        self._failure: BaseException | None = None  # what ended the thread before its time
        self._inbox: deque[_Job] = deque()  # have a place in the queue
        self._parked: deque[_Job] = deque()  # wait for one
        self._jobs: dict[Request, _Job] = {}  # what the scheduler holds; the thread's own
        self._waiting = 0  # requests that the scheduler holds and hasn't begun

    async def __aenter__(self) -> AsyncTranslator:
        with self._changed:
            if self._thread is not None:
                raise RuntimeError("expected an AsyncTranslator that is closed, got one that is open already")
            self._is_closing = self._is_cancelling = False
            self._failure = None
            # A daemon: the interpreter doesn't wait for it, and `_stop_all` ends it where the program forgot to.
            self._thread = threading.Thread(target=self._work, name="AsyncTranslator", daemon=True)
            self._thread.start()
            _open.add(self)
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
        thread = self._ask_to_end(cancel=cancel)
        if thread is None:
            return
        await asyncio.to_thread(thread.join)
        with self._changed:
            if self._thread is thread:
                self._thread = None
                _open.discard(self)

    def _ask_to_end(self, *, cancel: bool) -> threading.Thread | None:
        """Has the thread end when its work is done, or at once; the thread, None where there is none."""
        with self._changed:
            if self._thread is not None:
                self._is_closing = True
                self._is_cancelling = self._is_cancelling or cancel
                self._changed.notify()
            return self._thread

    def _stop(self) -> None:
        """Ends the thread, whatever it does, and waits for that; for the end of the program."""
        thread = self._thread
        # In a process that was forked the thread isn't there, and it may have held the lock.
        if thread is not None and thread.is_alive():
            self._ask_to_end(cancel=True)
            thread.join()

    async def translate(
        self,
        text: str,
        *,
        target_prefix: str | None = None,
        source_lang: str | None = None,
        target_lang: str | None = None,
        split: bool = False,
        return_scores: bool = False,
        return_token_scores: bool = False,
        config: GenerationConfig | None = None,
        **options: Any,
    ) -> Any:
        """Translates a text, as `Translator.translate` does.

        Args:
            text: what to translate.
            target_prefix, source_lang, target_lang, split, return_scores, return_token_scores, config, options: see
                `Translator.translate`.

        Raises:
            ValueError: see `Translator.translate`.
            RuntimeError: this is closed, or was closed meanwhile with cancel; the model or a processor failed.
        """
        config = self._config(options, config)
        form = as_form(config, return_scores, return_token_scores)
        check_split(split, form, target_prefix)
        item = Item(text, target_prefix, source_lang, target_lang)
        if split:
            return "".join([piece async for piece in self._sentences(item, config)])
        builder = self._builder(config, log_probs=form.log_probs)
        checked = self.translator.encode_item(item, 1, builder)
        return form.of(await self._answer(text, builder.build(checked, place=0)))

    async def _answer(self, text: str, request: Request) -> Answer:
        """Waits for a request of a text."""
        job = _Job(text)
        job.request = request
        self._submit(job)
        try:
            await job.events.get()
            return Answer(self.translator.tokenizer, job.finished())
        finally:
            self._leave(job)

    async def _sentences(self, item: Item, config: GenerationConfig) -> AsyncIterator[str]:
        """The translations of a text's sentences, which decode together, with the white space behind each."""
        # All are encoded first, so that a bad one is named before the work.
        builder = self._builder(config, log_probs=False)
        parts = parts_of(self.translator, item, 1, builder)
        tasks = [
            None
            if part.checked is None
            else asyncio.ensure_future(self._answer(item.text, builder.build(part.checked, place=place)))
            for place, part in enumerate(parts)
        ]
        try:
            for part, task in zip(parts, tasks, strict=True):
                said = "" if task is None else "".join((await task).texts())
                if said or part.space:
                    yield said + part.space
        finally:
            for task in tasks:
                if task is not None:
                    task.cancel()

    def stream(
        self,
        text: str,
        *,
        target_prefix: str | None = None,
        source_lang: str | None = None,
        target_lang: str | None = None,
        split: bool = False,
        config: GenerationConfig | None = None,
        **options: Any,
    ) -> AsyncIterator[str]:
        """Gives a text's translation piece by piece, as `Translator.stream` does.

        Leaving the loop over it cancels the request, as soon as the iterator is deleted.

        Args:
            text: what to translate.
            target_prefix, source_lang, target_lang, split, config, options: see `Translator.translate`; neither beams
                nor several samples can be streamed, but beams with split, whose pieces are sentences.

        Raises:
            ValueError, RuntimeError: see `translate`; the first at once.
        """
        config = self._config(options, config)
        form = as_form(config, False, False)
        check_split(split, form, target_prefix)
        item = Item(text, target_prefix, source_lang, target_lang)
        if split:
            return self._sentences(item, config)
        check_one_stream(form, config)
        builder = self._builder(config, log_probs=False)
        checked = self.translator.encode_item(item, 1, builder)

        async def pieces() -> AsyncIterator[str]:
            job = _Job(text)
            job.request = builder.build(checked, place=0, on_token=job.notify)
            found = TextPieces(self.translator.tokenizer, checked.prefix, stop=config.stop_strings)
            self._submit(job)
            try:
                while (token := await job.events.get()) is not None:
                    if piece := found.add([token]):
                        yield piece
                job.finished()
                if piece := found.end():
                    yield piece
            finally:
                self._leave(job)

        return pieces()

    def _builder(self, config: GenerationConfig, *, log_probs: bool) -> RequestBuilder:
        translator = self.translator
        return RequestBuilder(
            translator.model, config, log_probs=log_probs, engine=self._engine, tokenizer=translator.tokenizer
        )

    def _config(self, options: Mapping[str, Any], config: GenerationConfig | None) -> GenerationConfig:
        """The config of a request; all of them decode in one batch, with one engine in one precision."""
        found = self.translator.settings(options, config)
        if found.precision != self.translator.precision:
            raise ValueError(
                f"expected no precision: all requests decode in one batch, in {self.translator.precision or 'the '}"
                f"{'' if self.translator.precision else 'precision of the model'}; Translator(..., precision=) chooses"
            )
        if found.engine not in (None, self._engine.name) or not found.use_cache:
            raise ValueError(
                f"expected neither engine nor use_cache: all requests decode in one batch, by engine "
                f"{self._engine.name!r}; AsyncTranslator(..., engine=) chooses another"
            )
        return found

    # What the tasks do

    def _submit(self, job: _Job) -> None:
        """Hands a request over; as long as the queue has no place for it, it is parked in front of it."""
        with self._changed:
            if self._thread is None or self._is_closing:
                raise RuntimeError("expected an AsyncTranslator that is open: use it inside of `async with`")
            if self._failure is not None:
                raise _broken(self._failure)
            if self._has_room():  # then no request is parked
                self._inbox.append(job)
                self._changed.notify()
                return
            self._parked.append(job)
        if job.request.deadline is not None:
            job.end_at(job.request.deadline, lambda: self._unpark(job))

    def _unpark(self, job: _Job) -> None:
        """Ends a request whose time is over before it has found a place."""
        with self._changed:
            if job not in self._parked:
                return  # it has a place, and the scheduler ends it
            self._parked.remove(job)
        job.request.finish()
        job.events.put_nowait(None)

    def _leave(self, job: _Job) -> None:
        """Ends a request whose task no longer waits for it."""
        job.forget_end()
        if job.request.is_done:
            return
        job.request.cancel()
        with self._changed:
            if job in self._parked:
                self._parked.remove(job)

    def _has_room(self) -> bool:
        return self.num_queued < self.max_waiting

    @property
    def num_queued(self) -> int:
        """How many requests have a place in the queue and haven't begun; at most max_waiting."""
        return len(self._inbox) + self._waiting

    @property
    def num_blocked(self) -> int:
        """How many requests wait for a place in the queue."""
        return len(self._parked)

    # What the thread does

    def _work(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # or its tasks would wait for ever
            self._give_up(error)

    def _serve(self) -> None:
        scheduler = self.translator.new_scheduler(self._engine, is_endless=True)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._inbox or self._is_closing)
                if not self._inbox:
                    return
            with evaluating(self.translator.model) as mode:
                scheduler = self._run(scheduler, mode)

    def _run(self, scheduler: Scheduler, mode: Evaluation) -> Scheduler:
        """Steps until there is nothing to do; the scheduler that it ends with."""
        while True:
            with self._changed:
                self._waiting = len(scheduler.waiting)
                while self._parked and self._has_room():
                    self._inbox.append(self._parked.popleft())
                arrived = list(self._inbox)
                self._jobs |= {job.request: job for job in arrived}
                self._inbox.clear()
                self._waiting += len(arrived)
                is_cancelling = self._is_cancelling
            scheduler.submit(job.request for job in arrived)
            if is_cancelling:
                for request in self._jobs:
                    request.cancel()
            if scheduler.is_idle:
                return scheduler
            try:
                mode.hold()
                ended = scheduler.step()
            except BaseException as error:  # of the model: the thread outlives it
                ended, scheduler = self._recover(error, scheduler)
            for request in ended:
                self._jobs.pop(request).notify(None)

    def _recover(self, error: BaseException, scheduler: Scheduler) -> tuple[list[Request], Scheduler]:
        """After an error of the model, those that had begun fail; the others begin with an engine that starts anew."""
        waiting = list(scheduler.waiting)
        held = set(waiting)
        ended = [request for request in self._jobs if request not in held]
        if not ended:  # the first one can't even begin
            ended = [waiting.pop(0)]
        for request in ended:
            if not request.is_done:
                wrapped = RuntimeError(f"the model failed: {type(error).__name__}: {error}")
                wrapped.__cause__ = error
                request.fail(wrapped)
        scheduler.clear()  # the error's traceback holds it, and there may be no memory for two batches
        # The limits that it had: a device that has failed may not even say how much memory is free.
        anew = Scheduler(
            self._engine, max_rows=scheduler.max_rows, max_bytes=scheduler.max_bytes, is_endless=scheduler.is_endless
        )
        anew.submit(waiting)
        return ended, anew

    def _give_up(self, error: BaseException) -> None:
        """Fails every request, and refuses new ones: the thread can't go on."""
        with self._changed:
            self._failure = error
            jobs = [*self._jobs.values(), *self._inbox, *self._parked]
            self._jobs.clear()
            self._inbox.clear()
            self._parked.clear()
            self._waiting = 0
        for job in jobs:
            if not job.request.is_done:
                job.request.fail(_broken(error))
            job.notify(None)


@atexit.register
def _stop_all() -> None:
    """Ends the threads of what was left open.

    An interpreter that ends kills its daemons when they come back from C++, which C++ answers by aborting the program.
    The threads that aren't daemons have ended by now: those may use a translator until then.
    """
    for front in list(_open):
        front._stop()


def _broken(error: BaseException) -> RuntimeError:
    found = RuntimeError(
        f"the AsyncTranslator can't go on, close it and open it again: {type(error).__name__}: {error}"
    )
    found.__cause__ = error
    return found


class _Job:
    """A request, and the task that waits for it.

    Attributes:
        request: what is asked for.
        events: the new tokens of a stream, and None at the end.
    """

    request: Request

    def __init__(self, text: str) -> None:
        self._name, self._loop = f"text {text!r:.{_SHOWN}}", asyncio.get_running_loop()
        self._end: asyncio.TimerHandle | None = None
        self.events: asyncio.Queue[int | None] = asyncio.Queue()

    def notify(self, event: int | None) -> None:
        """Passes an event from the thread to the task."""
        with contextlib.suppress(RuntimeError):  # its loop is closed: no task waits
            self._loop.call_soon_threadsafe(self.events.put_nowait, event)

    def end_at(self, deadline: float, end: Callable[[], object]) -> None:
        """Calls `end` at a time of `time.monotonic`."""
        self._end = self._loop.call_later(deadline - time.monotonic(), end)

    def forget_end(self) -> None:
        """Calls nothing at that time."""
        if self._end is not None:
            self._end.cancel()

    def finished(self) -> Request:
        """The request, which has ended well; otherwise what went wrong is raised."""
        if self.request.error is not None:
            raise failure(self._name, self.request.error) from self.request.error
        if self.request.is_cancelled:
            raise self.closed()
        return self.request

    def closed(self) -> RuntimeError:
        """The error of a request that `close` has ended."""
        return RuntimeError(f"{self._name}: cancelled: the AsyncTranslator was closed")
