"""Answers and errors as HTTP: the shape of our own errors, server-sent events, and requests whose client leaves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

from fastapi import Request, Response
from pydantic import BaseModel
from starlette.responses import StreamingResponse

from fastformer.generation.async_jobs import NotRunning, QueueFull, TooLate

logger = logging.getLogger("fastformer")

T = TypeVar("T")

FAILED = "the request failed; the server's log says more"
_PING_SECONDS = 15.0  # without a byte for longer, proxies give a connection up


class ErrorFields(BaseModel):
    """What went wrong."""

    message: str
    code: int
    param: str | None = None


class ErrorBody(BaseModel):
    """Of an answer that is none, of our own routes."""

    error: ErrorFields


def error_schemas(body: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """What a route of a translator says of its errors in the schema, whose bodies are these."""
    return {status: {"model": body, "description": text} for status, text in _ERRORS.items()}


_ERRORS = {
    400: "The request is wrong, or a text can't be translated.",
    401: "No key, or a wrong one.",
    408: "The body came too slowly.",
    413: "The body, a text or the list of texts is too large.",
    422: "Not used: a body that breaks the schema is a 400.",
    429: "There is no place in the queue; Retry-After says when there may be.",
    503: "The server ends, or the model can't go on.",
    504: "The request's time was over.",
}


class ClientGone(Exception):
    """The client closed its connection before its answer was there."""


class EndedEarly(Exception):
    """An answer that had begun can't be ended as it should; its connection is closed, so that it doesn't look whole."""


def as_json(value: object) -> bytes:
    """JSON in UTF-8; a lone surrogate, which UTF-8 can't hold, becomes an escape.

    Raises:
        RuntimeError: a number that is NaN or infinite.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError as error:  # no fault of the request
        raise RuntimeError("the model gave numbers that JSON can't hold: NaN or infinite ones") from error
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
    return answer(_error_body(status, message, **detail), status, headers)


def _error_body(status: int, message: str, **detail: Any) -> dict[str, Any]:
    return {"error": {"message": message, "code": status, **detail}}


class TooLarge(ValueError):
    """More than the server's limits allow."""


def status_of(error: Exception) -> int:
    """The status of HTTP that tells of an error."""
    kinds = ((QueueFull, 429), (TooLate, 504), (NotRunning, 503), (TooLarge, 413), (ValueError, 400))
    return next((status for kind, status in kinds if isinstance(error, kind)), 500)


def explained(error: Exception) -> tuple[int, str]:
    """The status and the message of an error. Failures of the server are logged, without the client's text."""
    status = status_of(error)
    if status != 500:
        return status, str(error)
    cause = error.__cause__ or error  # the outer one names the text
    logger.error("a request failed: %s", type(error).__name__, exc_info=cause if error.__cause__ else None)
    return 500, FAILED


def headers_of(error: Exception) -> dict[str, str]:
    """Headers that go with an error."""
    if isinstance(error, QueueFull):
        return {"Retry-After": str(math.ceil(error.retry_after))}
    return {"Retry-After": "1"} if isinstance(error, NotRunning) else {}


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


async def behind(first: T, rest: AsyncIterator[T]) -> AsyncIterator[T]:
    """What has been taken of an iterator, and then the rest of it, which is closed at the end."""
    try:
        yield first
        async for one in rest:
            yield one
    finally:
        await rest.aclose()  # type: ignore[attr-defined]


def event(value: object) -> bytes:
    """A value as a server-sent event of JSON."""
    return b"data: " + as_json(value) + b"\n\n"


class EventStream(StreamingResponse):
    """Server-sent events. A comment goes out where nothing else does for a while, and keeps proxies from giving up.

    An error that comes when the answer has begun is an event `error`, behind which the connection is closed.

    Args:
        events: each a whole event, as `event` writes it. It is closed when the client leaves.
        error_body: the JSON of an error, in the shape of the format: of a status and a message.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], error_body: Callable[[int, str], object] | None = None) -> None:
        told = _with_errors(_with_pings(events), error_body or _error_body)
        super().__init__(told, headers={"X-Accel-Buffering": "no", "Cache-Control": "no-cache"})


async def _with_errors(
    events: AsyncGenerator[bytes, None], error_body: Callable[[int, str], object]
) -> AsyncIterator[bytes]:
    try:
        async for one in events:
            yield one
    except Exception as error:
        status, message = explained(error)
        yield b"event: error\n" + event(error_body(status, message))
        raise EndedEarly from error
    finally:
        await events.aclose()


async def _with_pings(events: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
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
