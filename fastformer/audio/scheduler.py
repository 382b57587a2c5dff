"""Runs the recordings of many callers together: windows that ask the same of the model ask it in one call."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Generator, Hashable, Sequence
from typing import Any, TypeVar

import numpy as np

from fastformer.audio.plans import Job, SpeechRequest
from fastformer.audio.windows import Ask
from fastformer.requests import Batching, Load
from fastformer.settings import Positive, check_value

R = TypeVar("R")

MAX_WINDOWS = 8


class SpeechScheduler(Batching[SpeechRequest]):
    """Decodes windows of waiting recordings together.

    Args:
        model: has the methods of `SpeechModel`.
        max_windows: the most windows that are decoded together.
    """

    def __init__(self, model: Any, max_windows: int = MAX_WINDOWS) -> None:
        check_value("max_windows", max_windows, Positive)
        super().__init__()
        self.model, self.max_windows = model, max_windows
        self._read = 0

    def load(self) -> Load:
        """Returns the current counters."""
        rows = sum(len(request.jobs) for request in self.running)
        waiting = sum(request.num_tokens for request in self.waiting)
        return Load(len(self.running), len(self.waiting), waiting, rows, read_tokens=self._read)

    def renewed(self) -> SpeechScheduler:
        """Returns a new scheduler with the same limits."""
        return SpeechScheduler(self.model, self.max_windows)

    def step(self) -> list[SpeechRequest]:
        """Asks the model once, for as many windows as it can answer together.

        Returns:
            The requests that ended in this step: done, failed or cancelled.
        """
        for request in (*self.running, *self.waiting):
            if request.is_cancelled:
                request.finish()
        ended = self.remove(lambda request: request.is_done)
        self._begin()
        group = self._group()
        if group:
            answers = _answers(self.model, [job.ask for _, job in group if job.ask is not None])
            for (request, job), answer in zip(group, answers, strict=True):
                self._guarded(request, job.advance, answer)
        for request in self.running:
            self._guarded(request, request.collect)
        return ended + self.remove(lambda request: request.is_done)

    def _begin(self) -> None:
        """Begins windows: one of each request first, then more of those that can have more."""
        while self.waiting and len(self.running) < self.max_windows:
            request = self.waiting.popleft()
            request.begun_at = time.monotonic()
            self._read += request.num_tokens
            self.running.append(request)
        for request in self.running:
            self._guarded(request, request.fill, 1)
        for request in self.running:
            free = self.max_windows - sum(len(one.jobs) for one in self.running)
            self._guarded(request, request.fill, len(request.jobs) + max(0, free))

    def _group(self) -> list[tuple[SpeechRequest, Job]]:
        """Returns the windows that ask next: the most that ask the same, or those that have waited longer."""
        groups: defaultdict[Hashable, list[tuple[SpeechRequest, Job]]] = defaultdict(list)
        for request in self.running:
            for job in () if request.is_done else request.jobs:
                if (ask := job.ask) is not None:
                    job.waited += 1
                    groups[ask.method, ask.arguments].append((request, job))
        return max(groups.values(), key=lambda group: len(group) + max(job.waited for _, job in group), default=[])

    def _guarded(self, request: SpeechRequest, work: Callable[..., object], *arguments: Any) -> None:
        """Does a part of a request's work; an error ends that request alone."""
        if request.is_done:
            return
        try:
            work(*arguments)
        except Exception as error:
            request.fail(error)


def _answers(model: Any, asks: Sequence[Ask]) -> list[Any]:
    """Asks the model for windows that share a call."""
    first, states = asks[0], np.concatenate([ask.states for ask in asks])
    values = {name: [ask.values[name] for ask in asks] for name in first.values}
    answers = getattr(model, first.method)(states, **values, **dict(first.arguments))
    return [each[None].copy() for each in answers] if first.method == "encode" else [*answers]


def answered(model: Any, work: Generator[Ask, Any, R]) -> R:
    """Returns the result of a generator whose asks the model answers one by one."""
    job = Job(work, put=list)
    job.advance()
    while job.ask is not None:
        job.advance(*_answers(model, [job.ask]))
    result: R = job.result
    return result
