"""HTTP/1.1 as uvicorn implements it with httptools, with limits on what a client can do to a connection.

uvicorn itself takes any number of connections, waits for a head without a time limit, accepts a head of any size, and
buffers its output for a client that never reads.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from fastformer.serving.answers import error_response
from fastformer.serving.limits import Limits

logger = logging.getLogger("fastformer")

_HEAD_BYTES = 64 << 10  # the most bytes of a head, and of anything else between two pieces of a body
_MOST_PIPELINED = 16  # requests that a connection may send before the first is answered
_IGNORED_BYTES = 64 << 20  # the most bytes of the body of a request that has been answered
_TOO_LARGE = "Request header fields too large."
_REFUSED_SECONDS = 1.0  # for a client to read that its connection is refused
_QUIET_SECONDS = 60.0  # between two lines of the log about the same


def protocol_of(limits: Limits, most_connections: int | None = None) -> type[HttpToolsProtocol]:
    """Returns the protocol class of connections within the limits.

    Args:
        limits: the limits.
        most_connections: the most connections at a time; None: those of the limits.
    """

    class Protocol(_Protocol):
        seconds, write_seconds = limits.body_s, limits.write_s
        most = limits.max_connections if most_connections is None else most_connections
        refused, log = set[Any](), Seldom()

    return Protocol


class Seldom:
    """Writes a warning to the log at most once in a while, so that clients can't fill it."""

    def __init__(self) -> None:
        self._next = 0.0

    def warn(self, message: str, *args: object) -> None:
        """Writes a warning, unless the last one came a moment ago."""
        if (now := time.monotonic()) >= self._next:
            self._next = now + _QUIET_SECONDS
            logger.warning(message, *args)


def _as_http(response: Any) -> bytes:
    """Returns a response as the bytes of HTTP/1.1."""
    lines = [b"HTTP/1.1 503 Service Unavailable", *(name + b": " + value for name, value in response.raw_headers)]
    return b"\r\n".join([*lines, b"", bytes(response.body)])


_HEADERS = {"Connection": "close", "Retry-After": "1"}
_FULL = _as_http(
    error_response(503, "the server has as many connections as it takes: try again later", headers=_HEADERS)
)


class _Together:
    """A transport that sends all data of one turn of the event loop in one call: a head and the body after it.

    Args:
        transport: the connection's transport.
        loop: the connection's event loop.
    """

    def __init__(self, transport: asyncio.BaseTransport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport: Any = transport
        self._loop, self._parts = loop, list[bytes]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Queues bytes, which are sent before the event loop's next turn."""
        if not self._parts:
            self._loop.call_soon(self._send)
        self._parts.append(data)

    def close(self) -> None:
        """Sends the queued bytes and closes the transport."""
        self._send()
        self._transport.close()

    def get_write_buffer_size(self) -> int:
        """Returns the number of bytes that have been written and not sent."""
        return int(self._transport.get_write_buffer_size()) + sum(map(len, self._parts))

    def _send(self) -> None:
        parts, self._parts = self._parts, []
        if parts and not self._transport.is_closing():
            self._transport.write(b"".join(parts))


class _Protocol(HttpToolsProtocol):
    """A connection whose client has to send heads in time and within their size, and to read its answers.

    Attributes:
        seconds: the time limit of a head.
        write_seconds: seconds without progress after which the connection of a client that doesn't read is closed.
        most: the most connections at a time; a further one is answered 503 and closed.
        refused: the connections that were refused and aren't closed yet.
        log: writes that connections are refused.
    """

    seconds: float
    write_seconds: float
    most: int
    refused: set[Any]
    log: Seldom

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._late: asyncio.TimerHandle | None = None  # ends the wait for a head
        self._stuck: asyncio.TimerHandle | None = None  # ends the wait for a client that doesn't read
        self._in_head = self._in_message = False  # the latter between the end of a head and the end of its body
        self._head_bytes = self._field_bytes = self._ignored_bytes = self._unsent = 0
        self._running: RequestResponseCycle | None = None  # the other requests wait in `pipeline`

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if len(self.connections) >= self.most:
            self._turn_away(transport)
            return
        super().connection_made(_Together(transport, self.loop))  # type: ignore[arg-type]
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self.refused.discard(self)
        self._forget_late()
        self._forget_stuck()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        if self._running is not None and not self._is_idle:  # uvicorn tells only the request that came last
            self._running.disconnected = True
            self._running.message_event.set()

    @property
    def is_new(self) -> bool:
        """Whether the client has sent no request yet."""
        return self.cycle is None

    def _turn_away(self, transport: Any) -> None:
        self.log.warn("refusing connections: %d are open, which is the most", len(self.connections))
        self.transport = transport
        transport.write(_FULL)
        if len(self.refused) >= max(1, self.most // 16) or not transport.can_write_eof():
            transport.close()
            return
        # The client still sends its request. If its data met a closed socket, it might not read the answer.
        transport.write_eof()
        self.refused.add(self)
        self._late = self.loop.call_later(_REFUSED_SECONDS, transport.close)

    # Incoming data

    def data_received(self, data: bytes) -> None:
        if self in self.refused:
            return
        if not self._in_message and self._late is None:
            self._wait_for_head()
        self._head_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._head_bytes > _HEAD_BYTES:
            self.send_400_response(_TOO_LARGE)
        elif len(self.pipeline) > _MOST_PIPELINED or self._ignored_bytes > _IGNORED_BYTES:
            self.transport.abort()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._ignored_bytes, self._field_bytes = True, 0, 0
        if self._late is None:  # it came in the same piece as the end of another request
            self._wait_for_head()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count_field(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count_field(len(name) + len(value))

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._forget_late()
        self._in_head, self._in_message, self._head_bytes = False, True, 0

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._head_bytes = 0
        if self.cycle.response_complete:
            self._ignored_bytes += len(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_message, self._head_bytes = False, 0

    def _count_field(self, size: int) -> None:
        """Counts a part of a head, which may come whole in a piece with other data."""
        self._field_bytes += size
        if self._field_bytes > _HEAD_BYTES:
            raise ValueError(_TOO_LARGE)  # the parser stops, and uvicorn calls `send_400_response`

    def send_400_response(self, msg: str) -> None:
        """Answers a request that can't be read, unless another is being answered, and closes the connection."""
        is_its_own = self._running is self.cycle and self._running is not None and not self._running.response_started
        if not self._is_idle and not is_its_own:
            self.transport.abort()
            return
        super().send_400_response(_TOO_LARGE if self._field_bytes > _HEAD_BYTES else msg)
        self._watch_writing()

    def _unsupported_upgrade_warning(self) -> None:
        """Answers a request to change the protocol over HTTP, and closes the connection after it."""
        if self.cycle is not None:
            self.cycle.keep_alive = False

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _wait_for_head(self) -> None:
        self._late = self.loop.call_later(self.seconds, self._give_up)

    def _give_up(self) -> None:
        self._late = None
        if self._is_idle and not self.transport.is_closing():
            self._close()

    @property
    def _is_idle(self) -> bool:
        """Whether no answer is being sent."""
        return self._running is None or bool(self._running.response_complete)

    # Outgoing data

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._forget_stuck()
        if self.transport.is_closing():
            self._watch_writing()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._watch_writing()
        elif self._in_head and self._late is None and self._is_idle:  # its time was over while others were answered
            self._wait_for_head()

    def shutdown(self) -> None:
        super().shutdown()
        if self.transport.is_closing():
            self._watch_writing()

    def timeout_keep_alive_handler(self) -> None:
        if not self.transport.is_closing():
            self._close()

    def _close(self) -> None:
        self.transport.close()
        self._watch_writing()

    def _watch_writing(self) -> None:
        """Aborts the connection if none of the written bytes leaves for a while."""
        if self._stuck is None and (unsent := self.transport.get_write_buffer_size()):
            self._unsent = unsent
            self._stuck = self.loop.call_later(self.write_seconds, self._look_at_writing)

    def _look_at_writing(self) -> None:
        self._stuck = None
        if self.transport.get_write_buffer_size() >= self._unsent:
            self.transport.abort()
        else:
            self._watch_writing()

    def _forget_late(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _forget_stuck(self) -> None:
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None
