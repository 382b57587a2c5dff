"""HTTP/1.1 as uvicorn implements it with httptools, with limits on what a client can do to a connection.

uvicorn itself waits for a head without a time limit, accepts a head of any size, and buffers its output for a client
that never reads.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from fastformer.serving.limits import Limits

_HEAD_BYTES = 64 << 10  # the most bytes of a head, and of anything else between two pieces of a body
_MOST_PIPELINED = 16  # requests that a connection may send before the first is answered
_IGNORED_BYTES = 64 << 20  # the most bytes of the body of a request that has been answered


def protocol_of(limits: Limits) -> type[HttpToolsProtocol]:
    """Returns the protocol class of connections within the limits."""

    class Protocol(_Protocol):
        seconds, write_seconds = limits.body_s, limits.write_s

    return Protocol


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
    """

    seconds: float
    write_seconds: float

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._late: asyncio.TimerHandle | None = None  # ends the wait for a head
        self._stuck: asyncio.TimerHandle | None = None  # ends the wait for a client that doesn't read
        self._in_message = False  # between the end of a head and the end of its body
        self._head_bytes = self._ignored_bytes = self._unsent = 0
        self._running: RequestResponseCycle | None = None  # the other requests wait in `pipeline`

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(_Together(transport, self.loop))  # type: ignore[arg-type]
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_late()
        self._forget_stuck()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        if self._running is not None and not self._is_idle:  # uvicorn tells only the request that came last
            self._running.disconnected = True
            self._running.message_event.set()

    # Incoming data

    def data_received(self, data: bytes) -> None:
        if not self._in_message and self._late is None:
            self._wait_for_head()
        self._head_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._head_bytes > _HEAD_BYTES:
            self._refuse("Request header fields too large.")
        elif len(self.pipeline) > _MOST_PIPELINED or self._ignored_bytes > _IGNORED_BYTES:
            self.transport.abort()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._ignored_bytes = 0

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._forget_late()
        self._in_message, self._head_bytes = True, 0

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._head_bytes = 0
        if self.cycle.response_complete:
            self._ignored_bytes += len(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_message, self._head_bytes = False, 0

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

    def _refuse(self, message: str) -> None:
        if self._is_idle:
            self.send_400_response(message)
            self._watch_writing()
        else:
            self.transport.abort()  # another answer is being sent

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
