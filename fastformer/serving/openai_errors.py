"""Errors in OpenAI's shape, and their description in the schema of each of its routes."""

from __future__ import annotations

from typing import Any

from fastapi import Response
from starlette.exceptions import HTTPException

from fastformer.serving.answers import answer, error_schemas
from fastformer.serving.openai_bodies import Body, ErrorBody, unsupported_field

_TYPES = {
    401: ("authentication_error", "invalid_api_key"),
    403: ("permission_error", None),
    404: ("not_found_error", None),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
    503: ("service_unavailable_error", "service_unavailable"),
    504: ("timeout_error", "timeout"),
}

# The names that clients of Hugging Face send if they are configured with a URL and no model.
_PLACEHOLDERS = ("dummy", "tgi")

ERRORS = error_schemas(
    ErrorBody,
    {
        400: "The request is wrong; `param` says where.",
        404: "Another model than the one that is served.",
        413: "The body is too large.",
    },
)


class ApiError(HTTPException):
    """An error with OpenAI's fields.

    Args:
        message: says what was expected and what the request had.
        param: the wrong field of the request.
        code: names the error for programs.
        status: the HTTP status.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(status, message)
        self.fields = {"param": param, "code": code}


def error_fields(status: int, message: str, **detail: Any) -> dict[str, Any]:
    """Returns the JSON value of an error."""
    usual = ("server_error", None) if status >= 500 else ("invalid_request_error", None)
    kind, code = _TYPES.get(status, usual)
    return {
        "error": {
            "message": message,
            "type": kind,
            "param": detail.get("param"),
            "code": code if detail.get("code") is None else detail["code"],
        }
    }


def error_response(status: int, message: str, **detail: Any) -> Response:
    """Makes an error response in OpenAI's shape.

    Args:
        status, message: see `ApiError`.
        detail: param and code, as for `ApiError`; headers of the response.
    """
    return answer(error_fields(status, message, **detail), status, detail.get("headers"))


def check_model(requested: str | None, served: str) -> None:
    """Raises an ApiError if a request names another model than the one that is served."""
    if requested not in (None, served, *_PLACEHOLDERS):
        raise ApiError(
            f"expected the model {served!r}, which is served here, got {requested!r:.80}",
            param="model",
            code="model_not_found",
            status=404,
        )


def check_body(body: Body, served: str) -> None:
    """Raises an ApiError if a body names another model, or has a value of a field that isn't supported."""
    check_model(getattr(body, "model", None), served)
    name = unsupported_field(body)
    if name is not None:
        raise ApiError(
            f"expected no {name}, which this server doesn't support: leave it out",
            param=name,
            code="unsupported_parameter",
        )
