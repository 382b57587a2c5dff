"""What every kind of request has, and the counters of a scheduler that runs them: those of text and those of speech."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from typing_extensions import Self


class BaseRequest(ABC):
    """A request of any kind, which a `Session` runs. Any thread may call its methods.

    Args:
        max_time: seconds until the deadline; None: no deadline.

    Attributes:
        name: the name of the request in messages.
        num_tokens: the number of tokens that it has to read, which is its weight in the queue.
        error: the error that ended the request, or None.
        is_done: whether the request has ended, with results or without.
        is_cancelled: whether `cancel` has been called.
        on_cancel: called when the request is cancelled; set by the scheduler that runs it.
        deadline: a time of `time.monotonic` at which the request ends with the results so far; None: no deadline.
        begun_at: the time of `time.monotonic` at which the request first left the queue; set by the scheduler.
    """

    name = "the request"
    num_tokens: int

    def __init__(self, max_time: float | None) -> None:
        self.error: Exception | None = None
        self.is_done = self.is_cancelled = False
        self.on_cancel: Callable[[], object] | None = None
        self.deadline = None if max_time is None else time.monotonic() + max_time
        self.begun_at: float | None = None

    @property
    @abstractmethod
    def num_new_tokens(self) -> int:
        """The number of new tokens in all results, once the request has ended."""

    @abstractmethod
    def listen(self, on_token: Callable[[int], object]) -> None:
        """Sets the listener, which is called with each new token. Call this before the request begins.

        Raises:
            ValueError: the request's tokens aren't known before the end.
        """

    @abstractmethod
    def finish(self) -> None:
        """Ends the request with the results so far."""

    def is_late(self, now: float) -> bool:
        """Returns whether the deadline has passed."""
        return self.deadline is not None and now >= self.deadline

    def cancel(self) -> None:
        """Ends the request before the next step, without results."""
        self.is_cancelled = True
        if self.on_cancel is not None:
            self.on_cancel()

    def fail(self, error: Exception) -> None:
        """Ends the request with an error."""
        self.error, self.is_done = error, True


@dataclass
class Load:
    """Counters of a scheduler's work, and the state of its memory.

    Attributes:
        running, waiting: the number of requests in the batch, and in the queue.
        waiting_tokens: the number of tokens that the requests in the queue have to read.
        rows: the number of rows in the batch.
        free_tokens, capacity_tokens: the batch's free memory and capacity, in tokens, if it has any.
        read_tokens: the number of source and prompt tokens that were read so far.
        cached_tokens: the number of prompt tokens that were not read, because an earlier prompt has the same beginning.
        drafted_tokens, accepted_tokens: the number of new tokens that were drafted, and of those that were right.
    """

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    rows: int = 0
    free_tokens: int = 0
    capacity_tokens: int = 0
    read_tokens: int = 0
    cached_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


R = TypeVar("R", bound=BaseRequest)


class Batching(ABC, Generic[R]):
    """A scheduler: the requests that wait and those that run, which a session's thread steps together.

    Attributes:
        waiting: the requests that haven't begun, the next one first.
        running: the requests that have begun.
    """

    def __init__(self) -> None:
        self.waiting: deque[R] = deque()
        self.running: list[R] = []

    @property
    def is_idle(self) -> bool:
        """True if no request waits or runs."""
        return not self.waiting and not self.running

    def submit(self, requests: Iterable[R]) -> None:
        """Appends requests to the queue."""
        self.waiting.extend(requests)

    @abstractmethod
    def step(self) -> list[R]:
        """Works for some milliseconds. Returns the requests that ended in this step: done, failed or cancelled."""

    @abstractmethod
    def load(self) -> Load:
        """Returns the current counters."""

    @abstractmethod
    def renewed(self) -> Self:
        """Returns a new scheduler with the same limits and no requests."""

    def clear(self) -> None:
        """Drops all requests, and any state that an error may have left inconsistent."""
        self.waiting.clear()
        self.running.clear()

    def remove(self, has_ended: Callable[[R], bool]) -> list[R]:
        """Removes the requests that have ended, waiting or running, and returns them."""
        ended = [request for request in (*self.running, *self.waiting) if has_ended(request)]
        if ended:
            leaving = set(map(id, ended))
            self.running = [request for request in self.running if id(request) not in leaving]
            self.waiting = deque(request for request in self.waiting if id(request) not in leaving)
        return ended


def failure(name: str, error: Exception) -> Exception:
    """Makes an error with a name: a ValueError for a ValueError, else a RuntimeError. Raise it from `error`."""
    if isinstance(error, ValueError):
        return ValueError(f"{name}: {error}")
    return RuntimeError(f"{name}: {type(error).__name__}: {error}")
