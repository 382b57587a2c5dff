"""Reads inputs and returns answers in the same order, while a scheduler keeps its batch full."""

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
    """A source of inputs that arrive over time."""

    def get(self, wait: bool) -> T_co | None:
        """Returns the next input.

        Args:
            wait: wait until an input arrives; False returns None if none has arrived yet.

        Raises:
            EOFError: there are no more inputs.
        """


class IterableSource(Generic[T]):
    """An iterable as a `Source`. An iterable can't tell whether an item has arrived, so `get` always waits."""

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

    An input is read when the batch has room for it; while requests run, the function never waits for an input. An error
    of the source or of `begin` is raised after the answers to the inputs before it.

    Args:
        scheduler: runs the requests; it must be idle.
        source: the inputs.
        begin: makes the request of an input; None: the input needs no request.
        model: the model that decodes; it is set to evaluation meanwhile.
        read_ahead: the most inputs that are in memory: read, and not yet answered.

    Yields:
        The inputs that come next in the order and whose requests are done, with these requests.
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
