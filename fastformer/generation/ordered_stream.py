"""Reads inputs and gives answers in their order, while a scheduler keeps its batch full."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from fastformer.generation.model_protocols import Model, evaluating
from fastformer.generation.requests import Request
from fastformer.generation.scheduler import Scheduler

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Source(Protocol[T_co]):
    """Inputs as they arrive."""

    def get(self, wait: bool) -> T_co | None:
        """The next one.

        Args:
            wait: wait for it; False gives None where none has arrived yet.

        Raises:
            EOFError: there are no more.
        """


class IterableSource(Generic[T]):
    """An iterable as a `Source`. It can't say whether an item has arrived, so `get` always waits."""

    def __init__(self, items: Iterable[T]) -> None:
        self._rest = iter(items)

    def get(self, wait: bool) -> T | None:
        for item in self._rest:
            return item
        raise EOFError


def ordered_stream(
    scheduler: Scheduler,
    source: Source[T],
    begin: Callable[[T], Request | None],
    *,
    model: Model,
    read_ahead: int,
) -> Iterator[list[tuple[T, Request | None]]]:
    """Runs a request for each input of a source; the answers come in the order of the inputs.

    Inputs are read when the batch has room for them; while requests run, nothing waits for an input. An error of the
    source or of `begin` is raised in its turn, after the answers to the inputs before it.

    Args:
        scheduler: runs the requests; one that is idle.
        source: of inputs.
        begin: makes the request of an input; None: there is nothing to do for it.
        model: what decodes; it is set to evaluation while it does.
        read_ahead: the most inputs that are held at a time: read, and their answers not yet given.

    Yields:
        The inputs whose turn it is and their requests, which are done.
    """
    held: deque[tuple[T, Request | None]] = deque()
    is_open, failure = True, None

    def read(wait: bool) -> None:
        nonlocal is_open, failure
        while is_open and len(held) < read_ahead and scheduler.wants_more:
            try:
                item = source.get(wait)
                if item is None:
                    return
                request = begin(item)
            except EOFError:
                is_open = False
            except Exception as error:
                is_open, failure = False, error
            else:
                held.append((item, request))
                if request is not None:
                    scheduler.submit([request])
                wait = False

    while True:
        read(wait=not held)
        if not held:
            break
        with evaluating(model) as mode:
            while not _is_done(held[0]):
                mode.hold()
                scheduler.step()
                read(wait=False)
        ready = [held.popleft()]
        while held and _is_done(held[0]):
            ready.append(held.popleft())
        yield ready
    if failure is not None:
        raise failure


def _is_done(held: tuple[object, Request | None]) -> bool:
    return held[1] is None or held[1].is_done
