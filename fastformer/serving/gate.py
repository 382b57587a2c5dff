"""What is in front of the routes: the access log, checks of hosts, keys and bodies, and an end for clients that leave.

The middlewares `Watch` and `Gate` are plain ASGI: Starlette's BaseHTTPMiddleware would hide from a route that its
client has left.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Collection, Coroutine
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fastformer.generation.jobs import QueueFull
from fastformer.serving.answers import FAILED, ClientGone, EndedEarly, headers_of
from fastformer.serving.limits import Limits
from fastformer.serving.metrics import Metrics

logger = logging.getLogger("fastformer")
access = logging.getLogger("fastformer.access")

T = TypeVar("T")

KEYS = "FASTFORMER_API_KEYS"
OPEN = ("/health", "/ready")  # answered without a key, and also while the server ends
_LOG_SECONDS = 0.05
_IGNORED_BYTES = 64 << 20  # read of a body that is too large, so that its client receives the error

Respond: TypeAlias = Callable[..., Response]  # (path, status, message, headers=...) in the shape of the path's format


def read_keys(file: str | os.PathLike[str] | None = None) -> tuple[str, ...]:
    """Reads the clients' keys: one a line from a file, and from the environment, separated by white space or commas.

    Args:
        file: the file, in which empty lines and lines that begin with # are ignored; None: no file.

    Raises:
        ValueError: the file does not exist, is not in UTF-8 or has no key.
    """
    keys = os.environ.get(KEYS, "").replace(",", " ").split()
    if file is not None:
        path = Path(file).expanduser()
        if not path.is_file():
            raise ValueError(f"expected a file of keys, one a line, but there is no file {path}")
        try:
            text = path.read_text(encoding="utf-8-sig")  # Windows' editors begin a file with a mark
        except UnicodeDecodeError as error:
            raise ValueError(f"expected keys in UTF-8 in {path}, got other bytes: {error.reason}") from error
        lines = [line.strip() for line in text.splitlines()]
        given = [line for line in lines if line and not line.startswith("#")]
        if not given:
            raise ValueError(f"expected a key in each line of {path}, got none")
        keys += given
    return tuple(dict.fromkeys(keys))


def host_name(text: str) -> str:
    """Returns the name or the address in a Host header, in small letters and without its port."""
    name = text.strip().lower()
    if name.rpartition(":")[2].isdecimal() and (name.count(":") == 1 or "]:" in name):
        name = name.rpartition(":")[0]
    return name.strip("[]").rstrip(".")


def _is_own(name: str) -> bool:
    """Whether a name is this machine's, or an address. A web page can't have its own name resolved to these."""
    with suppress(ValueError):
        return bool(ipaddress.ip_address(name))
    return name == "localhost" or name.endswith(".localhost")


@dataclass
class Traffic:
    """The number of running requests, and whether the server accepts more.

    Attributes:
        in_flight: requests whose response isn't complete, except those of `OPEN`.
        is_ready: whether /ready answers 200.
        is_refusing: whether new requests are answered 503.
    """

    in_flight: int = 0
    is_ready: bool = True
    is_refusing: bool = False


@dataclass(eq=False)
class Watch:
    """Counts and times requests, and writes the access log: a line of JSON for each request, without its texts.

    Attributes:
        app: the application that gets the requests.
        traffic, metrics: record the requests.
        template_of: returns the route's template of a path, so that no client can invent labels.
        respond: makes the response for an error that the application has not handled.
        logs: whether to write the log.
    """

    app: ASGIApp
    traffic: Traffic
    metrics: Metrics
    template_of: Callable[[str], str]
    respond: Respond
    logs: bool
    _lines: list[tuple[float, Scope, str, int, float, int]] = field(default_factory=list)  # that aren't written yet
    _logging: asyncio.TimerHandle | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path, began, status, sent, first = scope["path"], time.perf_counter(), 0, 0, 0.0

        async def watched(message: Message) -> None:
            nonlocal status, sent, first
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body" and message.get("body"):
                first = first or time.perf_counter() - began
                sent += len(message["body"])
            await send(message)

        counts = path not in OPEN
        self.traffic.in_flight += counts
        try:
            # The routes answer a HEAD like a GET, and the server sends the head of the response alone.
            inner = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
            await self.app(inner, receive, watched)
        except EndedEarly:  # already logged; the server closes a connection whose response isn't complete
            pass
        except Exception as error:  # an error that no route is known to raise
            where = "".join(traceback.format_tb(error.__traceback__))  # without the message, which may hold a text
            logger.error("a request to %s failed: %s\n%s", self.template_of(path), type(error).__name__, where)
            if not status:
                await self.respond(path, 500, FAILED)(scope, receive, watched)
        finally:
            self.traffic.in_flight -= counts
            seconds, route = time.perf_counter() - began, self.template_of(path)
            self.metrics.answered(route, status or 499, seconds, first)
            if self.logs and counts:
                self._lines.append((time.time(), scope, route, status or 499, seconds, sent))
                self._log_soon()

    def _log_soon(self) -> None:
        """Writes the log when no request is running, or in a moment: no answer waits for other requests' lines."""
        if not self.traffic.in_flight:
            self._log()
        elif self._logging is None:
            self._logging = asyncio.get_running_loop().call_later(_LOG_SECONDS, self._log)

    def _log(self) -> None:
        if self._logging is not None:
            self._logging.cancel()
            self._logging = None
        lines, self._lines = self._lines, []
        for now, scope, route, status, seconds, sent in lines:
            line = {
                "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now)),
                "client": (scope.get("client") or ("",))[0],
                "method": scope["method"],
                "route": route,
                "status": status,
                "ms": round(1000 * seconds, 1),
                "bytes": sent,
            }
            access.info(json.dumps(line))


@dataclass(eq=False)
class Gate:
    """Checks a request's host, its key, the time and size of its body, and that the server still accepts requests.

    The routes that it protects receive the whole body at once.

    Attributes:
        app: the application that gets the requests.
        limits: the limits of the body.
        traffic: says whether new requests are refused.
        keys: a request needs one of them; empty: no request needs a key.
        hosts: the names of the server that a request may have in its Host header, in addition to localhost and
            addresses; None: any name.
        open_paths: paths that need no key.
        body_key_paths: paths whose bodies may hold the key, as `api_key`.
        queued_paths: paths whose POST requests need a place in the queue.
        upload_paths: paths whose bodies are files, with a limit of their own.
        place: holds a place in the queue while its context is open, or raises QueueFull: the request is then refused
            before its body is parsed.
        respond: makes the response for an error.
    """

    app: ASGIApp
    limits: Limits
    traffic: Traffic
    keys: Collection[str]
    hosts: Collection[str] | None
    open_paths: Collection[str]
    body_key_paths: Collection[str]
    queued_paths: Collection[str]
    upload_paths: Collection[str]
    place: Callable[[], AbstractContextManager[None]]
    respond: Respond

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # no route speaks another protocol
        path = scope["path"]
        if path in OPEN:
            await self.app(scope, receive, send)
            return
        if self.traffic.is_refusing:
            message = "the server is about to end and takes no more requests"
            await self._closing(path, 503, message)(scope, receive, send)
            return
        if (host := self._unknown_host(scope)) is not None:
            message = f"expected a host that the server knows, got {host!r:.80}: name it by --hosts, or use keys"
            await self._closing(path, 403, message)(scope, receive, send)
            return
        needs_key = bool(self.keys) and path not in self.open_paths and not self._has_key(scope)
        if needs_key and path not in self.body_key_paths:
            await self._unknown(path)(scope, receive, send)
            return
        try:
            body = await _in_time(self._body(scope, receive), self.limits.body_s)
        except asyncio.TimeoutError:
            message = f"expected the whole body within {self.limits.body_s:g} s"
            await self._closing(path, 408, message)(scope, receive, send)
            return
        if body is None:
            return  # the client has left
        if body is _TOO_LARGE:
            message = f"expected a body of at most {self._most(path):,} bytes"
            await self._closing(path, 413, message)(scope, receive, send)
            return
        if (
            path not in self.upload_paths
            and _brackets(body) > _MOST_NESTED
            and _brackets(_without_texts(body)) > _MOST_NESTED
        ):
            message = f"expected a body of at most {_MOST_NESTED:,} lists and objects"
            await self.respond(path, 400, message)(scope, receive, send)
            return
        if needs_key and not self._is_key(await _body_key(scope, body)):
            await self._unknown(path)(scope, receive, send)
            return
        if path in self.queued_paths and scope["method"] == "POST":
            try:
                with self.place():
                    await self.app(scope, _again(body, receive), send)
            except QueueFull as error:  # the app itself handles those that it raises
                await self.respond(path, 429, str(error), headers=headers_of(error))(scope, receive, send)
            return
        await self.app(scope, _again(body, receive), send)

    def _most(self, path: str) -> int:
        return self.limits.max_audio_bytes if path in self.upload_paths else self.limits.max_body_bytes

    def _closing(self, path: str, status: int, message: str) -> Response:
        return self.respond(path, status, message, headers={"Connection": "close"})

    def _unknown(self, path: str) -> Response:
        return self.respond(
            path,
            401,
            "expected a key of this server, as `Authorization: Bearer KEY`",
            headers={"WWW-Authenticate": "Bearer"},
        )

    def _unknown_host(self, scope: Scope) -> str | None:
        """Returns the name in the Host header if it isn't the server's: a web page may have had it resolved anew."""
        if self.hosts is None:
            return None
        names = [host_name(value.decode("latin-1")) for name, value in scope["headers"] if name == b"host"]
        return next((name for name in names if name not in self.hosts and not _is_own(name)), None)

    def _has_key(self, scope: Scope) -> bool:
        for name, value in scope["headers"]:
            if name == b"authorization":
                scheme, _, given = value.partition(b" ")
                return scheme.lower() == b"bearer" and self._is_key(given.strip())
        return False

    def _is_key(self, given: bytes) -> bool:
        is_known = False
        for key in self.keys:  # compares all of them, so that the time tells nothing about the key
            is_known |= hmac.compare_digest(key.encode(), given)
        return is_known

    async def _body(self, scope: Scope, receive: Receive) -> bytes | None:
        """Reads the whole body and counts its bytes; `_TOO_LARGE` if there are too many, None if the client leaves."""
        headers = dict(scope["headers"])
        most = self._most(scope["path"])
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > most and b"expect" in headers:
            return _TOO_LARGE  # the client waits for permission before it sends the body
        parts: list[bytes] = []
        size, is_large = 0, False
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            part = message.get("body", b"")
            size += len(part)
            is_large = is_large or size > most
            if is_large:
                parts.clear()  # reads and drops the rest: a client that is still sending reads no response
            else:
                parts.append(part)
            if not message.get("more_body", False) or size > most + _IGNORED_BYTES:
                return _TOO_LARGE if is_large else b"".join(parts)


async def _in_time(work: Coroutine[Any, Any, T], seconds: float) -> T:
    """Awaits `work`, or raises asyncio's TimeoutError; `wait_for` alone would begin a task each time."""
    if sys.version_info < (3, 11):
        return await asyncio.wait_for(work, seconds)
    async with asyncio.timeout(seconds):
        return await work


_MOST_NESTED = 100_000  # lists and objects in a body: reading millions of them takes a second
_TOO_LARGE = bytes(bytearray(b"too large"))  # an object of its own, compared by identity


def _brackets(body: bytes) -> int:
    return body.count(b"[") + body.count(b"{")


def _without_texts(body: bytes) -> bytes:
    """Returns a body of JSON without its texts, which may have any brackets; of a great many, the last ones stay."""
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"")
    return b"".join(plain.split(b'"', 2 * _MOST_NESTED)[::2])


def _again(body: bytes, receive: Receive) -> Receive:
    """Makes a `receive` that returns a body that was already read, then the messages after it."""
    is_replayed = False

    async def replayed() -> Message:
        nonlocal is_replayed
        if is_replayed:
            return await receive()
        is_replayed = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed


async def until_gone(http: Request, work: Awaitable[T]) -> T:
    """Waits for an answer until it is there or its client leaves.

    Args:
        http: the request, whose body has been read.
        work: computes the answer; it is cancelled when the client closes the connection.

    Raises:
        ClientGone: the client has left.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(http))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for one in (task, gone):
            if not one.done():
                one.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await one


async def _disconnected(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def _body_key(scope: Scope, body: bytes) -> bytes:
    """Returns the `api_key` of a JSON or form body; b"" if it has none."""
    key: Any = None
    with suppress(Exception):  # a body that can't be read has no key
        if b"json" in dict(scope["headers"]).get(b"content-type", b""):
            key = json.loads(body).get("api_key")
        else:

            async def receive() -> Message:
                return {"type": "http.request", "body": body, "more_body": False}

            async with Request(scope, receive).form() as form:
                key = form.get("api_key")
    return key.encode("utf-8", "replace") if isinstance(key, str) else b""
