"""Clients in a process of their own, so that they share neither a thread nor an interpreter with a server.

Each client only writes to a socket and waits: a client that worked as much as the server would measure itself.
"""

from __future__ import annotations

import json
import multiprocessing
import selectors
import socket
import time
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, NamedTuple

_LONGEST = 60.0  # the longest wait for an answer, in seconds


class Reply(NamedTuple):
    """The status of an answer, and the seconds from the request's last byte to the answer's first."""

    status: int
    seconds: float


class Clients:
    """A process with clients of a server on this machine; a context manager.

    Args:
        port, path: where the clients post their requests.
    """

    def __init__(self, port: int, path: str) -> None:
        self._ours, child = multiprocessing.get_context("spawn").Pipe()
        self._process = multiprocessing.get_context("spawn").Process(
            target=_work, args=(port, path, child), daemon=True
        )

    def __enter__(self) -> Clients:
        self._process.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ours.send(None)
        self._process.join(10)
        self._process.kill()

    def at_once(self, body: dict[str, Any], count: int, *, anew: bool) -> list[Reply]:
        """Sends a request on each of `count` connections at once.

        Args:
            body: the body of all requests, as JSON.
            count: the number of connections.
            anew: open each connection for this call; if False, use connections that are open and have been used.
        """
        return self._asked("at_once", body, count, anew)

    def one(self, body: dict[str, Any]) -> tuple[float, Any]:
        """Sends a request on a connection that stays open; returns the seconds until the whole answer, and its JSON."""
        return self._asked("one", body)

    def _asked(self, *what: Any) -> Any:
        self._ours.send(what)
        reply = self._ours.recv()
        if isinstance(reply, Exception):
            raise reply
        return reply


def _work(port: int, path: str, orders: Connection) -> None:
    sockets = _Sockets(port, path)
    while (order := orders.recv()) is not None:
        try:
            orders.send(getattr(sockets, order[0])(*order[1:]))
        except Exception as error:
            orders.send(error)


class _Sockets:
    def __init__(self, port: int, path: str) -> None:
        self._place, self._path = ("127.0.0.1", port), path
        self._open: list[socket.socket] = []
        self._alone: socket.socket | None = None

    def _connected(self) -> socket.socket:
        connection = socket.create_connection(self._place, _LONGEST)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def _message(self, body: dict[str, Any]) -> bytes:
        content = json.dumps(body).encode()
        head = f"POST {self._path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content

    def one(self, body: dict[str, Any]) -> tuple[float, Any]:
        if self._alone is None:
            self._alone = self._connected()
        message = self._message(body)
        began = time.perf_counter()
        self._alone.sendall(message)
        answer = _whole(self._alone)
        return time.perf_counter() - began, json.loads(answer)

    def at_once(self, body: dict[str, Any], count: int, anew: bool) -> list[Reply]:
        if anew or len(self._open) != count:
            for connection in self._open:
                connection.close()
            self._open = [self._connected() for _ in range(count)]
        if not anew:
            for connection in self._open:
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                _whole(connection)
        message, sent, replies = self._message(body), {}, []
        with selectors.DefaultSelector() as selector:
            for connection in self._open:
                selector.register(connection, selectors.EVENT_READ, connection)
            for connection in self._open:
                connection.sendall(message)
                sent[connection] = time.perf_counter()
            while sent:
                ready = selector.select(_LONGEST)
                now = time.perf_counter()
                if not ready:
                    raise TimeoutError(f"{len(sent)} of {count} requests were not answered within {_LONGEST:g} s")
                for key, _ in ready:
                    status = int(key.data.recv(12, socket.MSG_PEEK)[9:12])
                    replies.append(Reply(status, now - sent.pop(key.data)))
                    selector.unregister(key.data)
        for connection in self._open:
            _whole(connection)
        return replies


def _whole(connection: socket.socket) -> bytes:
    """Reads the body of the next answer."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += _part(connection)
    head, _, body = data.partition(b"\r\n\r\n")
    length = next(
        int(line.partition(b":")[2]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")
    )
    while len(body) < length:
        body += _part(connection)
    return body


def _part(connection: socket.socket) -> bytes:
    data = connection.recv(65536)
    if not data:
        raise ConnectionError("the server has closed the connection before the whole answer was there")
    return data
