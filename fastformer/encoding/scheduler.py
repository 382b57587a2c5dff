"""Computes the texts of many requests together, as they come: no request waits for others to arrive."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable

from fastformer.encoding.requests import EncodeRequest
from fastformer.encoding.tokens import Rows
from fastformer.generation.scheduler import Load
from fastformer.settings import Positive, check_value

# Of a step: as much as keeps the cores busy, and little enough that the next step, which takes what has come meanwhile
# and leaves out what was cancelled, begins soon.
STEP_TOKENS = 4096


class EncodingScheduler:
    """Takes the texts of the requests that wait, the first ones first, up to a number of tokens in each step.

    A request with more texts than that is computed in several steps. The first request of the queue decides what is
    computed; others that ask for the same join it.

    Args:
        step_tokens: that are computed together at most; a text that is longer is a step of its own.

    Attributes:
        waiting: requests that haven't begun, the next one first.
        running: those that have.
    """

    def __init__(self, step_tokens: int = STEP_TOKENS) -> None:
        check_value("step_tokens", step_tokens, Positive)
        self.step_tokens = step_tokens
        self.waiting: deque[EncodeRequest] = deque()
        self.running: list[EncodeRequest] = []
        self._read_tokens = 0

    @property
    def is_idle(self) -> bool:
        """True when there is nothing to do."""
        return not self.waiting and not self.running

    def submit(self, requests: Iterable[EncodeRequest]) -> None:
        """Appends requests to the queue."""
        self.waiting.extend(requests)

    def load(self) -> Load:
        """Its counters as they are now."""
        waiting = sum(request.num_tokens for request in self.waiting)
        rows = sum(len(request.rows.ids) for request in self.running)
        return Load(len(self.running), len(self.waiting), waiting, rows, read_tokens=self._read_tokens)

    def renewed(self) -> EncodingScheduler:
        """Another one within the same limits."""
        return EncodingScheduler(self.step_tokens)

    def step(self) -> list[EncodeRequest]:
        """Computes the next texts.

        Returns:
            The requests that ended with it: done, failed or cancelled.
        """
        ended = self._drop()
        parts = self._next()
        if not parts:
            return ended
        # The longest texts first: the last ones of a call then have the least to wait for.
        order = sorted(
            ((request, place) for request, places in parts for place in places),
            key=lambda one: -len(one[0].rows.ids[one[1]]),
        )
        if order:
            found = parts[0][0].compute(_together(order))
            row_of = {(id(request), place): row for row, (request, place) in enumerate(order)}
            for request, places in parts:
                request.put(places, found[[row_of[id(request), place] for place in places]])
            self._read_tokens += sum(len(request.rows.ids[place]) for request, place in order)
        done = [request for request, _ in parts if request.is_complete]
        for request in done:
            request.finish()
        leaving = set(map(id, done))
        self.running = [request for request in self.running if id(request) not in leaving]
        return ended + done

    def clear(self) -> None:
        """Forgets all requests."""
        self.waiting.clear()
        self.running.clear()

    def _next(self) -> list[tuple[EncodeRequest, list[int]]]:
        """The requests of the next step, each with the places of its texts; they leave the queue."""
        parts: list[tuple[EncodeRequest, list[int]]] = []
        left = self.step_tokens
        for request in [*self.running, *self.waiting]:
            if parts and request.compute != parts[0][0].compute:
                continue
            places = request.take(left, is_first=not any(taken for _, taken in parts))
            if not places and not request.is_complete:
                break
            parts.append((request, places))
            left -= sum(len(request.rows.ids[place]) for place in places)
        begun, now = {id(request) for request, _ in parts}, time.monotonic()
        for request in self.waiting:
            if id(request) in begun:
                request.begun_at = now
                self.running.append(request)
        self.waiting = deque(request for request in self.waiting if id(request) not in begun)
        return parts

    def _drop(self) -> list[EncodeRequest]:
        """Removes requests that were cancelled, and those that have waited beyond their deadline."""
        now = time.monotonic()
        ended = [request for request in [*self.running, *self.waiting] if request.is_cancelled or request.is_late(now)]
        if ended:
            leaving = set(map(id, ended))
            self.running = [request for request in self.running if id(request) not in leaving]
            self.waiting = deque(request for request in self.waiting if id(request) not in leaving)
        for request in ended:
            request.finish()
        return ended


def _together(order: list[tuple[EncodeRequest, int]]) -> Rows:
    """The rows of texts of several requests of one model."""
    ids = [request.rows.ids[place] for request, place in order]
    if order[0][0].rows.types is None:
        return Rows(ids)
    return Rows(ids, [request.rows.types[place] for request, place in order if request.rows.types is not None])
