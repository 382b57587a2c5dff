"""Computes the texts of many requests together. No request waits for others to arrive."""

from __future__ import annotations

import time
from collections import deque

from fastformer.encoding.requests import EncodeRequest
from fastformer.encoding.tokens import Rows
from fastformer.requests import Batching, Load
from fastformer.settings import Positive, check_value

# The tokens of a step: enough to keep the cores busy, and few enough that the next step begins soon, which includes new
# requests and omits cancelled ones.
STEP_TOKENS = 4096


class EncodingScheduler(Batching[EncodeRequest]):
    """Computes the texts of waiting requests, in the order of the queue, up to a number of tokens in each step.

    A request with more tokens than that is computed in several steps. The first request of the queue determines the
    computation of a step; other requests with the same computation join it.

    Args:
        step_tokens: the most tokens that are computed together; a longer text is a step of its own.
    """

    def __init__(self, step_tokens: int = STEP_TOKENS) -> None:
        check_value("step_tokens", step_tokens, Positive)
        super().__init__()
        self.step_tokens = step_tokens
        self._read_tokens = 0

    def load(self) -> Load:
        """Returns the current counters."""
        waiting = sum(request.num_tokens for request in self.waiting)
        rows = sum(len(request.rows.ids) for request in self.running)
        return Load(len(self.running), len(self.waiting), waiting, rows, read_tokens=self._read_tokens)

    def renewed(self) -> EncodingScheduler:
        """Returns a new scheduler with the same limits."""
        return EncodingScheduler(self.step_tokens)

    def step(self) -> list[EncodeRequest]:
        """Computes the next texts.

        Returns:
            The requests that ended in this step: done, failed or cancelled.
        """
        ended = self._drop()
        parts = self._next()
        if not parts:
            return ended
        # The longest texts first: threads then wait the least for the last texts of a call.
        order = sorted(
            ((request, index) for request, indices in parts for index in indices),
            key=lambda item: -len(item[0].rows.ids[item[1]]),
        )
        if order:
            results = parts[0][0].compute(_together(order))
            row_of = {(id(request), index): row for row, (request, index) in enumerate(order)}
            for request, indices in parts:
                request.put(indices, results[[row_of[id(request), index] for index in indices]])
            self._read_tokens += sum(len(request.rows.ids[index]) for request, index in order)
        done = [request for request, _ in parts if request.is_complete]
        for request in done:
            request.finish()
        return ended + self.remove(lambda request: request.is_done)

    def _next(self) -> list[tuple[EncodeRequest, list[int]]]:
        """Removes the requests of the next step from the queue, and returns each with the indices of its texts."""
        parts: list[tuple[EncodeRequest, list[int]]] = []
        left = self.step_tokens
        for request in [*self.running, *self.waiting]:
            if parts and request.compute != parts[0][0].compute:
                continue
            indices = request.take(left, is_first=not any(chosen for _, chosen in parts))
            if not indices and not request.is_complete:
                break
            parts.append((request, indices))
            left -= sum(len(request.rows.ids[place]) for place in indices)
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
        ended = self.remove(lambda request: request.is_cancelled or request.is_late(now))
        for request in ended:
            request.finish()
        return ended


def _together(order: list[tuple[EncodeRequest, int]]) -> Rows:
    """Joins the rows of texts of several requests for one model."""
    ids = [request.rows.ids[index] for request, index in order]
    if order[0][0].rows.types is None:
        return Rows(ids)
    return Rows(ids, [request.rows.types[index] for request, index in order if request.rows.types is not None])
