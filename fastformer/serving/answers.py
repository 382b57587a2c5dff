"""Answers and errors as HTTP: the shape of our own errors, server-sent events, and requests whose client leaves."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Mapping
from typing import Any, TypeVar

from fastapi import Request, Response
from starlette.responses import StreamingResponse

from fastformer.generation.async_jobs import NotRunning, QueueFull, TooLate

T = TypeVar("T")

_PING_SECONDS = 15.0  # without a byte for longer, proxies give a connection up


class ClientGone(Exception):
    """The client closed its connection before its answer was there."""


def as_json(value: object) -> bytes:
    """JSON in UTF-8; a lone surrogate, which UTF-8 can't hold, becomes an escape."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")


def answer(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A value as JSON."""
    return Response(as_json(value), status, headers, media_type="application/json")


def error_response(status: int, message: str, **detail: Any) -> Response:
    """An error in the shape of our own routes, which resembles OpenAI's.

    Args:
        status: of HTTP.
        message: what was expected and what came.
        detail: `headers` of the response; anything else becomes a field of the error.
    """
    headers = detail.pop("headers", None)
    return answer({"error": {"message": message, "code": status, **detail}}, status, headers)


def status_of(error: Exception) -> int:
    """The status of HTTP that tells of an error."""
    for kind, status in ((QueueFull, 429), (TooLate, 504), (NotRunning, 503), (ValueError, 400)):
        if isinstance(error, kind):
            return status
    return 500


async def until_gone(http: Request, work: Awaitable[T]) -> T:
    """Waits for an answer as long as its client does.

    Args:
        http: whose body has been read.
        work: is cancelled when the client closes the connection.

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
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await one


async def _disconnected(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def event(value: object) -> bytes:
    """A value as a server-sent event of JSON."""
    return b"data: " + as_json(value) + b"\n\n"


class EventStream(StreamingResponse):
    """Server-sent events. A comment goes out where nothing else does for a while, and keeps proxies from giving up.

    Args:
        events: each a whole event, as `event` writes it. It is closed when the client leaves.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes]) -> None:
        super().__init__(_with_pings(events), headers={"X-Accel-Buffering": "no", "Cache-Control": "no-cache"})


async def _with_pings(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    coming: asyncio.Future[bytes] | None = None
    try:
        while True:
            if coming is None:
                coming = asyncio.ensure_future(anext(events))
            done, _ = await asyncio.wait({coming}, timeout=_PING_SECONDS)
            if not done:
                yield b": still here\n\n"
                continue
            try:
                found = coming.result()
            except StopAsyncIteration:
                return
            finally:
                coming = None
            yield found
    finally:
        if coming is not None:
            coming.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await coming
        close = getattr(events, "aclose", None)
        if close is not None:
            await close()
