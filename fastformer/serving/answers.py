"""Responses and errors as HTTP: JSON, the status of an error, fastformer's own shape of errors, server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from typing import Any

from fastapi import Response
from pydantic import BaseModel
from starlette.responses import StreamingResponse

from fastformer.generation.jobs import NotRunning, QueueFull, TooLate

logger = logging.getLogger("fastformer")

FAILED = "the request failed; the server's log says more"
_PING_SECONDS = 15.0  # proxies close a connection that is silent for longer


class ErrorFields(BaseModel):
    """The fields of an error in fastformer's own shape."""

    message: str
    code: int
    param: str | None = None


class ErrorBody(BaseModel):
    """The body of an error response of fastformer's own routes."""

    error: ErrorFields


def error_schemas(
    body: type[BaseModel], descriptions: Mapping[int, str] | None = None
) -> dict[int | str, dict[str, Any]]:
    """Returns the `responses` of a route's schema for its errors, by status.

    Args:
        body: the model of their bodies.
        descriptions: those of further statuses, or others than the usual ones.
    """
    texts = _ERRORS | {**(descriptions or {})}
    return {status: {"model": body, "description": texts[status]} for status in sorted(texts)}


_ERRORS = {
    400: "The request is wrong, or a text can't be translated.",
    401: "No key, or a wrong one.",
    408: "The body came too slowly.",
    413: "The body, a text or the list of texts is too large.",
    422: "Not used: a body that breaks the schema is a 400.",
    429: "The queue is full; Retry-After says when to try again.",
    503: "The server ends, or the model can't go on.",
    504: "The request's time was over.",
}


# Besides those that JSON escapes. httpx, with which huggingface_hub reads streams, ends lines at them.
_LINE_ENDS = "\x85\u2028\u2029"


class ClientGone(Exception):
    """The client closed its connection before its response was complete."""


class EndedEarly(Exception):
    """A response that had begun can't be completed; its connection is closed, so that it doesn't look complete."""


def as_json(value: object) -> bytes:
    """Encodes a value as JSON in UTF-8; a lone surrogate, which UTF-8 can't hold, becomes an escape.

    Raises:
        RuntimeError: a number is NaN or infinite.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError as error:  # no fault of the request
        raise RuntimeError("the model gave numbers that JSON can't hold: NaN or infinite ones") from error
    return text.encode("utf-8", "backslashreplace")


def answer(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Makes a response with a value as JSON."""
    return Response(as_json(value), status, headers, media_type="application/json")


def error_response(status: int, message: str, **detail: Any) -> Response:
    """Makes an error response in the shape of fastformer's own routes, which resembles OpenAI's.

    Args:
        status: the HTTP status.
        message: says what was expected and what the request had.
        detail: `headers` of the response; anything else becomes a field of the error.
    """
    headers = detail.pop("headers", None)
    return answer(_error_body(status, message, **detail), status, headers)


def _error_body(status: int, message: str, **detail: Any) -> dict[str, Any]:
    return {"error": {"message": message, "code": status, **detail}}


class TooLarge(ValueError):
    """A request exceeds one of the server's limits."""


def status_of(error: Exception) -> int:
    """Returns the HTTP status for an error."""
    kinds = ((QueueFull, 429), (TooLate, 504), (NotRunning, 503), (TooLarge, 413), (ValueError, 400))
    return next((status for kind, status in kinds if isinstance(error, kind)), 500)


def explained(error: Exception) -> tuple[int, str]:
    """Returns the status and the message for an error. Failures of the server are logged, without the client's text."""
    status = status_of(error)
    if status != 500:
        return status, str(error)
    cause = error.__cause__ or error  # the outer one names the text
    logger.error("a request failed: %s", type(error).__name__, exc_info=cause if error.__cause__ else None)
    return 500, FAILED


def headers_of(error: Exception) -> dict[str, str]:
    """Returns the HTTP headers that go with an error."""
    if isinstance(error, QueueFull):
        return {"Retry-After": str(math.ceil(error.retry_after))}
    return {"Retry-After": "1"} if isinstance(error, NotRunning) else {}


def event(value: object) -> bytes:
    """Encodes a value as a server-sent event of JSON, which is one line to clients that split at other ends, too."""
    data = as_json(value)
    if not data.isascii():
        for end in _LINE_ENDS:
            data = data.replace(end.encode(), f"\\u{ord(end):04x}".encode())
    return b"data: " + data + b"\n\n"


class EventStream(StreamingResponse):
    """A response of server-sent events. While no event comes, it sends comments, so that proxies keep the connection.

    An error after the start of the response becomes an event `error`; then the connection is closed.

    Args:
        events: yields whole events, as `event` encodes them. It is closed when the client leaves.
        error_body: makes the JSON value of an error, in the format's shape, from a status and a message.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes, None], error_body: Callable[[int, str], object] | None = None
    ) -> None:
        content = _kept_open(events, error_body or _error_body)
        super().__init__(content, headers={"X-Accel-Buffering": "no", "Cache-Control": "no-cache"})


async def _kept_open(
    events: AsyncGenerator[bytes, None], error_body: Callable[[int, str], object]
) -> AsyncIterator[bytes]:
    coming: asyncio.Future[bytes] | None = None
    try:
        while True:
            coming = coming or asyncio.ensure_future(anext(events))
            done, _ = await asyncio.wait({coming}, timeout=_PING_SECONDS)
            if not done:
                yield b": still here\n\n"
                continue
            ended, coming = coming, None
            try:
                one = ended.result()
            except StopAsyncIteration:
                return
            yield one
    except Exception as error:
        status, message = explained(error)
        yield b"event: error\n" + event(error_body(status, message))
        raise EndedEarly from error
    finally:
        if coming is not None:
            coming.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await coming
        await events.aclose()
