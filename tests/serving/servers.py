"""Runs a real server in a thread, on its own port."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fastformer.serving import Limits, Service, make_app, open_service


class Running(NamedTuple):
    """A running server.

    Attributes:
        url: its URL, without a trailing slash.
        service: the service.
    """

    url: str
    service: Any


@contextlib.contextmanager
def running(served: Path | Service, limits: Limits | None = None, **options: Any) -> Iterator[Running]:
    """Serves a folder or a service within the context. Options are those of `make_app`."""
    service = open_service(served, limits=limits) if isinstance(served, Path) else served
    app = make_app(service, service.limits, **options)
    with listening(app, service.limits, lifespan="on", timeout_graceful_shutdown=5) as (_, (host, port)):
        yield Running(f"http://{host}:{port}", service)


class Clock(asyncio.SelectorEventLoop):
    """An event loop whose time a test moves on, so that no test waits for a limit of time."""

    _skipped = 0.0

    def time(self) -> float:
        return super().time() + self._skipped

    def skip(self, seconds: float) -> None:
        """Moves the time on, from another thread, and returns when what was due then has been done."""

        async def move() -> None:
            self._skipped += seconds
            for _ in range(10):  # turns of the loop: a timer that closes a connection, the callbacks after it, ...
                await asyncio.sleep(0)

        asyncio.run_coroutine_threadsafe(move(), self).result(60)


@contextlib.contextmanager
def listening(
    app: Any, limits: Limits, clock: Clock | None = None, **config: Any
) -> Iterator[tuple[Any, tuple[str, int]]]:
    """Runs an application on uvicorn in a thread, on a loop if one is given; yields the server and its address."""
    import uvicorn

    from fastformer.serving.protocol import protocol_of

    server = uvicorn.Server(uvicorn.Config(app, http=protocol_of(limits), ws="none", log_level="critical", **config))
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))

    async def serve() -> None:
        await server.serve(sockets=[listener])
        # A `skip` may be what ended it.
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)

    def run() -> None:
        if clock is None:
            server.run(sockets=[listener])
        else:
            clock.run_until_complete(serve())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        until(lambda: server.started)
        yield server, listener.getsockname()
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()
        if clock is not None and not thread.is_alive():
            clock.close()
    assert not thread.is_alive(), "the server doesn't end"


def until(condition: Callable[[], object], seconds: float = 20.0) -> float:
    """Waits for a condition, and returns the seconds that it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() < began + seconds, "it doesn't come"
        time.sleep(0.005)
    return time.monotonic() - began


def post_head(path: str, length: int) -> str:
    """Returns the head of a request with a JSON body."""
    fields = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {length}"
    return f"POST {path} HTTP/1.1\r\n{fields}\r\n\r\n"
