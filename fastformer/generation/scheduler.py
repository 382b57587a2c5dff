"""Keeps an engine's batch full from a queue of requests, within a budget of memory."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fastformer.generation.engines.base import Draw, Engine, SearchingEngine, Selection, is_searching_engine
from fastformer.generation.native_search import NativeSearch, last_tokens, places_of_done
from fastformer.generation.processors import RowWise
from fastformer.generation.requests import Request

_PREFILL_TOKENS = 8192  # that one admission reads: its activations are held at once

# An engine that searches itself comes back after so long, for those who arrive, cancel or interrupt; and after so many
# steps, which is longer than any text.
_RUN_SECONDS = 0.01
_RUN_STEPS = 1_000_000
# Where a listener waits for tokens, each of the first comes by itself, and the others so few at a time, within the same
# milliseconds, that a reader doesn't notice.
_FIRST_TOLD = 64
_TOLD_STEPS = 8


class Scheduler:
    """Admits requests as rows and memory become free, steps them together, lets those go that are done.

    A request's result doesn't depend on who else is there. It is admitted when there is memory for the tokens that it
    is likely to get; when memory runs out all the same, the youngest request gives its own back and begins anew later.

    Args:
        engine: what steps.
        max_rows: decoded together, at most; one request may have more.
        max_bytes: of the engine's memory, about; one request may take more.
        is_endless: take all of the memory for the first request, because others come while it runs; else as much as the
            requests that wait when the batch is empty.

    Attributes:
        waiting: requests that haven't begun, the next one first.
        running: requests of the batch, in the engine's order.
    """

    def __init__(self, engine: Engine, *, max_rows: int, max_bytes: int, is_endless: bool = False) -> None:
        self.engine, self.max_rows, self.max_bytes, self.is_endless = engine, max_rows, max_bytes, is_endless
        self.max_tokens = max_bytes // engine.token_bytes if engine.token_bytes else max_bytes
        self._searching = engine if is_searching_engine(engine) else None
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._rows = self._tokens = 0  # what the engine was started with
        self._waiting_rows = self._running_rows = 0  # at their peaks
        self._must_look = self._has_deadlines = False  # whether requests may have to leave the queue
        self._least = 0  # tokens that the next start is to give
        self._promised = 0  # tokens of memory that the running requests are likely to need, all in all

    def submit(self, requests: Iterable[Request]) -> None:
        """Puts requests at the end of the queue."""
        for request in requests:
            self.waiting.append(request)
            self._waiting_rows += request.search.peak_rows
            request.on_cancel = self._look
            self._must_look = self._must_look or request.is_cancelled
            self._has_deadlines = self._has_deadlines or request.deadline is not None

    def _look(self) -> None:
        self._must_look = True

    @property
    def is_idle(self) -> bool:
        """True when there is nothing to do."""
        return not self.waiting and not self.running

    @property
    def wants_more(self) -> bool:
        """True while fewer rows wait than the next batch has."""
        return self._waiting_rows < self.max_rows

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Steps the batch once; an engine that searches itself, until something ends, for some milliseconds at most.

        Returns:
            The requests that ended with it: done, failed or cancelled.
        """
        ended = self._drop()
        self._admit()
        self._make_room()
        if not self.running:
            return ended
        engine = self._searching
        searches = [] if engine is None else self._native_searches()
        if engine is not None and searches:
            return ended + self._run(engine, searches)
        return ended + self._step()

    def _step(self) -> list[Request]:
        tokens = [token for request in self.running for token in request.next_tokens()]
        candidates = self.engine.step(tokens, self._selection())
        gone: list[int] = []
        parents: list[list[int]] = []
        first, changed = 0, False
        for place, request in enumerate(self.running):
            rows = request.num_rows
            kept = request.advance(candidates, first)
            first += rows
            if kept and not request.is_full:
                parents.append(kept)
                changed = changed or kept != list(range(rows))
            else:
                gone.append(place)
        left = self._release(gone)
        if changed:
            self.engine.reorder(parents)
        for request in reversed(left):
            if not request.is_done:  # its window is full: it is read again, without its older half
                request.slide()
                self._return(request)
        return [request for request in left if request.is_done]

    def _native_searches(self) -> list[NativeSearch]:
        """The searches of all that run, where an engine can advance all of them; else none."""
        searches: list[NativeSearch] = []
        for request in self.running:
            if not request.search_suffices or not isinstance(request.search, NativeSearch):
                return []
            searches.append(request.search)
        return searches

    def _run(self, engine: SearchingEngine, searches: list[NativeSearch]) -> list[Request]:
        running = self.running
        begun = len(running)
        while begun and running[begun - 1].is_new:  # those that are, were admitted last
            begun -= 1
        tokens = last_tokens(searches[:begun])
        tokens += [token for request in running[begun:] for token in request.next_tokens()]
        steps = engine.run(
            searches,
            tokens,
            log_probs=any(request.log_probs for request in running),
            max_steps=self._most_steps(),
            seconds=_RUN_SECONDS,
            # Those whom memory keeps waiting may find some as soon as one ends.
            least_rows=min(self._least_rows(), self._running_rows),
        )
        done = set(places_of_done(searches))
        gone: list[int] = []
        for place, request in enumerate(running):
            is_done = place in done
            if not request.take_steps(steps[place], searches[place].error if is_done else None, is_done):
                gone.append(place)
        return self._release(gone)

    def _most_steps(self) -> int:
        """How many steps may be taken before listeners are told."""
        listening = [request.num_told for request in self.running if request.on_token is not None]
        if not listening:
            return _RUN_STEPS
        return 1 if min(listening) < _FIRST_TOLD else _TOLD_STEPS

    def clear(self) -> None:
        """Forgets all requests, and gives back what they hold."""
        self.engine.release(range(len(self.running)))
        self.running.clear()
        self.waiting.clear()
        self._waiting_rows = self._running_rows = self._promised = 0
        self._rows = self._tokens = 0  # the engine may have failed halfway: the next batch begins anew

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

    def _drop(self) -> list[Request]:
        """Lets those go that were cancelled, and those that wait beyond their time."""
        if not self._must_look and not self._has_deadlines:  # the queue may be long
            return []
        self._must_look = False  # before the look: another thread may cancel meanwhile
        now = time.monotonic()
        waiting = [request for request in self.waiting if request.is_cancelled or request.is_late(now)]
        if waiting:
            leaving = set(map(id, waiting))
            self.waiting = deque(request for request in self.waiting if id(request) not in leaving)
            self._waiting_rows -= sum(request.search.peak_rows for request in waiting)
        running = [place for place, request in enumerate(self.running) if request.is_cancelled]
        ended = waiting + self._release(running)
        for request in ended:
            request.finish()
        if self._has_deadlines:
            left = itertools.chain(self.waiting, self.running)  # those that run may have to wait again
            self._has_deadlines = any(request.deadline is not None for request in left)
        return ended

    def _admit(self) -> None:
        """Admits from the head of the queue what rows and memory allow."""
        if not self.waiting:
            return
        if not self.running:
            self._start()
        # Requests that came after the start find no more rows than the engine was started with.
        max_rows = min(self.max_rows, self._rows)
        idle = max_rows - self._running_rows
        if self.running and self._running_rows >= self._least_rows():
            return
        new: list[Request] = []
        room, reading = min(self._tokens - self._promised, self.engine.free_tokens()), 0
        for request in self.waiting:
            rows, length = request.search.peak_rows, len(request.prompt.source or ()) + len(request.prompt.tokens)
            needed = self._expected(request)
            reading += length
            if (self.running or new) and (needed > room or rows > idle or reading > _PREFILL_TOKENS):
                break
            new.append(request)
            room, idle = room - needed, idle - rows
        if new:
            self.engine.admit([request.prompt for request in new])
            parents = [[0] * request.num_rows for request in new]
            if any(len(group) > 1 for group in parents):
                self.engine.reorder([*(list(range(request.num_rows)) for request in self.running), *parents])
            self.running += new
            for request in new:  # they leave the queue when nothing can fail any more
                self.waiting.popleft()
                self._waiting_rows -= request.search.peak_rows
                self._running_rows += request.search.peak_rows
                self._promised += self._expected(request)

    def _least_rows(self) -> int:
        """With less than this that run, others are admitted: sources are read many at a time, so a batch that is nearly
        full waits until a quarter of it is free.
        """
        max_rows = min(self.max_rows, self._rows)
        return max_rows - min(max_rows // 4, self._waiting_rows) + 1 if self.waiting else 0

    def _expected(self, request: Request) -> int:
        return self.engine.tokens_needed(request.prompt, request.search.peak_rows, request.expected_tokens)

    def _most(self, request: Request) -> int:
        return self.engine.tokens_needed(request.prompt, request.search.peak_rows, request.most_tokens)

    def _start(self) -> None:
        """Before the first request of a batch: memory for all that wait, at most the budget; at least for the first."""
        first = self.waiting[0]
        rows, tokens = self.max_rows, self.max_tokens
        if not self.is_endless:
            rows, tokens = min(rows, self._waiting_rows), 0
            for request in self.waiting:
                tokens += self._most(request)
                if tokens > self.max_tokens:
                    tokens = self.max_tokens
                    break
        rows, tokens = max(rows, first.search.peak_rows), max(tokens, self._most(first), self._least)
        self._least = 0
        # More than the budget is lent to the one request that needs it, and not kept.
        kept_rows, kept_tokens = min(self._rows, self.max_rows), min(self._tokens, self.max_tokens)
        wanted = max(rows, kept_rows), max(tokens, kept_tokens)
        if wanted != (self._rows, self._tokens):
            self._rows, self._tokens = wanted
            self.engine.start(*wanted)

    def _make_room(self) -> None:
        while self.running and self.engine.step_tokens() > self.engine.free_tokens():
            youngest = self.running[-1]
            if len(self.running) == 1 and self._most(youngest) <= self._tokens:
                self._least = 2 * self._tokens  # rows that fall away and come again may need more than was said
            self._release([len(self.running) - 1])
            youngest.restart()
            self._return(youngest)
            if not self.running:  # it began beside others, in memory that wasn't meant for it: now it gets its own
                self._admit()

    def _return(self, request: Request) -> None:
        """Puts a request that has left the engine at the head of the queue."""
        self.waiting.appendleft(request)
        self._waiting_rows += request.search.peak_rows

    def _selection(self) -> Selection:
        running = self.running
        logit_rows: list[int] = []
        draws: list[Draw | None] = []  # for each of them
        keeps: list[bool] = []  # likewise
        edited: list[tuple[Request, range]] = []  # which of them are a request's
        first, has_draws = 0, False
        for request in running:
            rows = range(first, first + request.num_rows)
            first = rows.stop
            own = request.draws()
            if own is None and not request.processors:
                continue
            if request.processors:
                edited.append((request, range(len(logit_rows), len(logit_rows) + len(rows))))
            has_draws = has_draws or own is not None
            logit_rows += rows
            draws += own if own is not None else [None] * len(rows)
            keeps += [request.keeps_scores] * len(rows)
        return Selection(
            num_candidates=max(request.search.num_candidates for request in running),
            log_probs=any(request.log_probs for request in running),
            logit_rows=logit_rows,
            process=partial(_process, edited) if edited else None,
            draws=draws if has_draws else None,
            keeps=keeps if any(keeps) else None,
        )


def _process(edited: Iterable[tuple[Request, range]], logits: Tensor) -> Tensor:
    """Lets each request's processors edit the logits of its rows, in place."""
    for _, neighbours in itertools.groupby(edited, key=lambda pair: _kind(pair[0])):
        alike = list(neighbours)
        processors = alike[0][0].processors
        rows = [row for _, own in alike for row in own]  # others that draw may stand between
        history = [row for request, _ in alike for row in request.history()]
        input_ids = torch.tensor(history, dtype=torch.long, device=logits.device)
        try:
            scores = logits[rows]
            for processor in processors:
                scores = _checked(processor(input_ids, scores), scores, processor)
            logits[rows] = scores
        except Exception as error:  # it is this request's own affair: the others go on
            for request, _ in alike:
                request.error = error
    return logits


def _kind(request: Request) -> tuple[object, ...]:
    """Requests of one kind are processed together: they ask for the same and are of one length."""
    if all(isinstance(processor, RowWise) for processor in request.processors):
        return (request.length, *request.processors)
    return (id(request),)  # a function of the user's gets the rows of one request


def _checked(found: object, scores: Tensor, processor: object) -> Tensor:
    """What a processor gave, in the dtype of the scores.

    Raises:
        ValueError: it isn't one number for each score, on their device.
    """
    if isinstance(found, np.ndarray) and found.dtype.kind in "fiu":
        found = torch.as_tensor(np.ascontiguousarray(found), device=scores.device)
    name = getattr(processor, "__name__", type(processor).__name__)
    wanted = f"expected a processor to give scores of shape {tuple(scores.shape)}"
    if not isinstance(found, Tensor):
        raise ValueError(f"{wanted}, got {type(found).__name__} from {name}")
    if found.is_nested or found.layout != torch.strided or found.dtype == torch.bool or found.is_complex():
        kind = "a nested tensor" if found.is_nested else f"{found.dtype} of layout {found.layout}"
        raise ValueError(f"{wanted} as dense numbers, got {kind} from {name}")
    if found.shape != scores.shape:
        raise ValueError(f"{wanted}, got {tuple(found.shape)} from {name}")
    if found.device != scores.device:
        raise ValueError(f"{wanted} on {scores.device}, got scores on {found.device} from {name}")
    return found.to(scores.dtype)


def run(scheduler: Scheduler, requests: list[Request], before_step: Callable[[], object] | None = None) -> None:
    """Runs requests to their end.

    Args:
        scheduler: runs them; one that is idle.
        requests: see above.
        before_step: called before each step.

    Raises:
        Exception: the first error of any of them; the others are forgotten then.
    """
    scheduler.submit(requests)
    while not scheduler.is_idle:
        if before_step is not None:
            before_step()
        for request in scheduler.step():
            if request.error is not None:
                scheduler.clear()
                raise request.error
