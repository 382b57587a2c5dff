"""The application: the routes of what the model is, health, and errors in the shape of each format."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from types import ModuleType

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import compile_path

from fastformer import __version__
from fastformer.generation.async_jobs import NotRunning, QueueFull, TooLate
from fastformer.serving import answers, openai, page, tei, tgi, translate
from fastformer.serving.answers import ClientGone, answer
from fastformer.serving.limits import Limits
from fastformer.serving.service import Service

# The formats of each kind of service.
_MODULES: dict[str, tuple[ModuleType, ...]] = {
    "translator": (translate,),
    "generator": (openai, tgi),
    "encoder": (openai, tei),
    "cross-encoder": (openai, tei),
}


def make_app(
    service: Service,
    limits: Limits | None = None,
    *,
    keys: Sequence[str] = (),
    metrics_public: bool = False,
    origins: Sequence[str] = (),
) -> FastAPI:
    """The application that serves a model. Its lifespan opens and closes the service.

    Args:
        service: see `open_service`.
        limits: see `Limits`; None: the service's.
        keys: one of which each request has to bring, but for /health and /ready; empty: none has to.
        metrics_public: answer /metrics without a key too.
        origins: of web pages elsewhere whose scripts may read answers; "*" is all.
    """
    limits = limits or service.limits

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with service:
            yield

    app = FastAPI(title="fastformer", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service, app.state.limits = service, limits
    app.state.formats = []  # the module of each route, by a pattern of its path
    for module in _MODULES.get(service.kind, ()):
        routes = module.router(service, limits)
        app.include_router(routes)
        app.state.formats += [(compile_path(route.path)[0], module) for route in routes.routes]
    app.include_router(page.router(service, limits))
    _add_state_routes(app, service, limits)
    _add_errors(app)
    return app


def _add_state_routes(app: FastAPI, service: Service, limits: Limits) -> None:
    @app.get("/health")
    async def health() -> Response:
        """200 as long as the model can answer; an orchestrator restarts what fails here."""
        return answer({"status": "ok"}) if service.is_alive else answer({"status": "failed"}, 503)

    @app.get("/ready")
    async def ready() -> Response:
        """200 as long as new requests are taken; a load balancer sends them elsewhere otherwise."""
        return answer({"status": "ready"}) if service.is_alive else answer({"status": "failed"}, 503)

    @app.get("/v1/info")
    async def info() -> Response:
        """What is served."""
        found = {"model": service.name, "kind": service.kind, "version": __version__, "limits": asdict(limits)}
        return answer({**found, "languages": getattr(service, "languages", [])})


def format_of(http: Request) -> ModuleType:
    """The module whose errors a path has."""
    formats: list[tuple[re.Pattern[str], ModuleType]] = http.app.state.formats
    return next((module for pattern, module in formats if pattern.match(http.url.path)), answers)


def _add_errors(app: FastAPI) -> None:
    async def of_http(http: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        fields = getattr(error, "fields", {})  # what a format's errors have besides
        found: Response = format_of(http).error_response(
            error.status_code, str(error.detail), headers=error.headers, **fields
        )
        return found

    async def of_schema(http: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        message, param = schema_message(error)
        found: Response = format_of(http).error_response(400, message, **({"param": param} if param else {}))
        return found

    async def of_value(http: Request, error: Exception) -> Response:
        found: Response = format_of(http).error_response(400, str(error))
        return found

    async def of_front(http: Request, error: Exception) -> Response:
        seconds = str(math.ceil(error.retry_after)) if isinstance(error, QueueFull) else "1"
        headers = {"Retry-After": seconds} if isinstance(error, QueueFull | NotRunning) else None
        found: Response = format_of(http).error_response(answers.status_of(error), str(error), headers=headers)
        return found

    async def of_gone(http: Request, error: Exception) -> Response:
        return Response(status_code=499)  # as nginx calls it, in the log alone: the client has left

    app.add_exception_handler(HTTPException, of_http)
    app.add_exception_handler(RequestValidationError, of_schema)
    app.add_exception_handler(ValueError, of_value)
    for kind in (QueueFull, TooLate, NotRunning, RuntimeError):
        app.add_exception_handler(kind, of_front)
    app.add_exception_handler(ClientGone, of_gone)


def schema_message(error: RequestValidationError) -> tuple[str, str]:
    """The first thing that is wrong with a body, in one line, without what the body holds; and where it is."""
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"] if part != "body")
    return f"{place}: {first['msg']}" if place else str(first["msg"]), place
