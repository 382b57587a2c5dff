"""Keeps an engine's batch full from a queue of requests, within a budget of memory."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable

import torch
from torch import Tensor

from fastformer.generation.engines.interface import Draw, Engine, Selection
from fastformer.generation.requests import Request

_PREFILL_TOKENS = 8192  # that one admission reads: its activations are held at once


class Scheduler:
    """Admits requests as rows and memory become free, steps them together, lets those go that are done.

    A request's result doesn't depend on who else is there. It is admitted when there is memory for the tokens that it
    is likely to get; when memory runs out all the same, the youngest request gives its own back and begins anew later.

    Args:
        engine: what steps.
        max_rows: decoded together, at most; one request may have more.
        max_bytes: of the engine's memory, about; one request may take more.

    Attributes:
        waiting: requests that haven't begun, the next one first.
        running: requests of the batch, in the engine's order.
    """

    def __init__(self, engine: Engine, *, max_rows: int, max_bytes: int) -> None:
        self.engine, self.max_rows = engine, max_rows
        self.max_tokens = max_bytes // engine.token_bytes if engine.token_bytes else max_bytes
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._rows = self._tokens = 0  # what the engine was started with
        self._waiting_rows = self._running_rows = 0  # at their peaks
        self._promised = 0  # tokens of memory that the running requests are likely to need, all in all

    def submit(self, requests: Iterable[Request]) -> None:
        """Puts requests at the end of the queue."""
        for request in requests:
            self.waiting.append(request)
            self._waiting_rows += request.search.peak_rows

    @property
    def is_idle(self) -> bool:
        """True when there is nothing to do."""
        return not self.waiting and not self.running

    def run(self) -> None:
        """Steps until all requests are done."""
        while not self.is_idle:
            self.step()

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Steps the batch once.

        Returns:
            The requests that ended with it: done, failed or cancelled.
        """
        ended = self._drop_cancelled()
        ended += self._admit()
        self._make_room()
        if not self.running:
            return ended
        tokens = [token for request in self.running for token in request.next_tokens()]
        candidates = self.engine.step(tokens, self._selection())
        gone: list[int] = []
        parents: list[list[int]] = []
        first, changed = 0, False
        for place, request in enumerate(self.running):
            rows = request.num_rows
            kept = request.advance(candidates, first)
            first += rows
            if kept:
                parents.append(kept)
                changed = changed or kept != list(range(rows))
            else:
                gone.append(place)
        ended += self._release(gone)
        if changed:
            self.engine.reorder(parents)
        return ended

    def clear(self) -> None:
        """Forgets all requests, and gives back what they hold."""
        self.engine.release(range(len(self.running)))
        self.running.clear()
        self.waiting.clear()
        self._waiting_rows = self._running_rows = self._promised = 0

    def _release(self, places: list[int]) -> list[Request]:
        if not places:
            return []
        self.engine.release(places)
        gone = [self.running[place] for place in places]
        for request in gone:
            self._running_rows -= request.search.peak_rows
            self._promised -= self._expected(request)
        leaving = set(places)
        self.running = [request for place, request in enumerate(self.running) if place not in leaving]
        return gone

    def _drop_cancelled(self) -> list[Request]:
        waiting = [request for request in self.waiting if request.is_cancelled]
        if waiting:
            self.waiting = deque(request for request in self.waiting if not request.is_cancelled)
            self._waiting_rows -= sum(request.search.peak_rows for request in waiting)
        running = [place for place, request in enumerate(self.running) if request.is_cancelled]
        ended = waiting + self._release(running)
        for request in ended:
            request.is_done = True
        return ended

    def _admit(self) -> list[Request]:
        """Admits from the head of the queue what rows and memory allow; returns requests whose time is over."""
        if not self.waiting:
            return []
        idle = self.max_rows - self._running_rows
        # Sources are read many at a time: a batch that is nearly full waits until a quarter of it is free.
        if self.running and idle < min(self.max_rows // 4, self._waiting_rows):
            return []
        if not self.running:
            self._start()
        late: list[Request] = []
        new: list[Request] = []
        room, reading = min(self._tokens - self._promised, self.engine.free_tokens()), 0
        while self.waiting:
            request = self.waiting[0]
            rows, length = request.search.peak_rows, len(request.prompt.source or ()) + len(request.prompt.tokens)
            if request.deadline is not None and time.monotonic() >= request.deadline:
                self._take()
                request.finish()
                late.append(request)
                continue
            needed = self._expected(request)
            reading += length
            if (self.running or new) and (needed > room or rows > idle or reading > _PREFILL_TOKENS):
                break
            self._take()
            new.append(request)
            room, idle = room - needed, idle - rows
        if new:
            self.engine.admit([request.prompt for request in new])
            parents = [[0] * request.num_rows for request in new]
            if any(len(group) > 1 for group in parents):
                self.engine.reorder([*(list(range(request.num_rows)) for request in self.running), *parents])
            self.running += new
            for request in new:
                self._running_rows += request.search.peak_rows
                self._promised += self._expected(request)
        return late

    def _expected(self, request: Request) -> int:
        return self.engine.tokens_needed(request.prompt, request.search.peak_rows, request.expected_tokens)

    def _take(self) -> None:
        self._waiting_rows -= self.waiting.popleft().search.peak_rows

    def _start(self) -> None:
        """Before the first request of a batch: memory for all that wait, at most the budget; at least for the first."""

        def needed(request: Request) -> int:
            return self.engine.tokens_needed(request.prompt, request.search.peak_rows, request.search.limit)

        first = self.waiting[0]
        tokens = 0
        for request in self.waiting:
            tokens += needed(request)
            if tokens > self.max_tokens:
                break
        tokens = max(min(tokens, self.max_tokens), needed(first))
        rows = max(min(self.max_rows, self._waiting_rows), first.search.peak_rows)
        if rows > self._rows or tokens > self._tokens:
            self._rows, self._tokens = max(rows, self._rows), max(tokens, self._tokens)
            self.engine.start(self._rows, self._tokens)

    def _make_room(self) -> None:
        while (needed := self.engine.step_tokens()) > 0 and needed > self.engine.free_tokens():
            assert len(self.running) > 1, "a request alone has memory for all of its tokens"
            (request,) = self._release([len(self.running) - 1])
            request.restart()
            self.waiting.appendleft(request)
            self._waiting_rows += request.search.peak_rows

    def _selection(self) -> Selection:
        running = self.running
        draws: list[Draw | None] = []
        has_draws = False
        for request in running:
            own = request.draws()
            has_draws = has_draws or own is not None
            draws += own if own is not None else [None] * request.num_rows
        return Selection(
            num_candidates=max(request.search.num_candidates for request in running),
            log_probs=any(request.log_probs for request in running),
            process=self._process if any(request.processors for request in running) else None,
            draws=draws if has_draws else None,
        )

    def _process(self, logits: Tensor) -> Tensor:
        """Lets each request's processors edit the logits of its rows."""
        logits = logits.clone()
        first = 0
        for request in self.running:
            rows = slice(first, first + request.num_rows)
            first = rows.stop
            if not request.processors:
                continue
            history = torch.tensor(request.history(), dtype=torch.long, device=logits.device)
            try:
                scores = logits[rows]
                for processor in request.processors:
                    scores = processor(history, scores)
                if scores.shape != logits[rows].shape:
                    raise ValueError(
                        f"expected a processor to give scores of shape {tuple(logits[rows].shape)}, got "
                        f"{tuple(scores.shape)} from {type(processor).__name__}"
                    )
                logits[rows] = scores
            except Exception as error:  # it is this request's own affair: the others go on
                request.error = error
        return logits


def run(scheduler: Scheduler, requests: list[Request]) -> None:
    """Runs requests to their end.

    Raises:
        Exception: the first error of any of them; the others are forgotten then.
    """
    scheduler.submit(requests)
    while not scheduler.is_idle:
        for request in scheduler.step():
            if request.error is not None:
                scheduler.clear()
                raise request.error
