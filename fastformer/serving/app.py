"""The application: the routes of the model's kind, health, metrics, and errors in the shape of each format."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import logging
import re
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import asdict
from types import ModuleType
from typing import Any

import pydantic
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import PlainTextResponse
from starlette.routing import compile_path

from fastformer import __version__
from fastformer.serving import answers, page
from fastformer.serving.answers import ClientGone, answer, explained, headers_of
from fastformer.serving.gate import Gate, Traffic, Watch, host_name
from fastformer.serving.limits import Limits
from fastformer.serving.metrics import Metrics
from fastformer.serving.service import Service

logger = logging.getLogger("fastformer")

# pydantic's names of the possible types of a field
_BRANCH = re.compile(r"(constrained-)?(str|int|bool|float)|.*[\[(].*")
# As a browser sends them: in small letters, with a port only if it isn't the scheme's own.
_ORIGIN = re.compile(r"(?!http://.*:80$|https://.*:443$)[a-z][a-z0-9+.-]*://[a-z0-9._\[\]:-]+|null")
_HOST = re.compile(r"[a-z0-9._:-]+")
_UNMATCHED = "unmatched"  # the name of a path without a route, in metrics and the log
# The formats of each kind of service: modules with `router(service, limits)` and `error_response(status, message)`.
# BODY_KEYS of a module are the paths whose bodies may hold a key; UNQUEUED are paths whose POST requests need no place
# in the queue, and UPLOADS those whose bodies are files.
_FORMATS = {
    "translator": ("translate", "libretranslate"),
    "generator": ("openai_models", "openai", "tgi"),
    "encoder": ("openai_models", "embeddings", "tei"),
    "multi-vector": ("openai_models", "embeddings", "rerank"),
    "cross-encoder": ("openai_models", "rerank", "tei"),
    "speech": ("openai_models", "openai_audio"),
}


def make_app(
    service: Service,
    limits: Limits | None = None,
    *,
    keys: Sequence[str] = (),
    metrics_public: bool = False,
    page_public: bool = False,
    origins: Sequence[str] = (),
    hosts: Sequence[str] | None = None,
    access_log: bool = False,
) -> FastAPI:
    """Makes the application that serves a model. Its lifespan opens and closes the service.

    Args:
        service: see `open_service`.
        limits: see `Limits`; None: the service's.
        keys: each request needs one of them, except /health and /ready; empty: no request needs a key.
        metrics_public: answer /metrics without a key too.
        page_public: answer the page at / without a key too; the page's own requests still need one.
        origins: the origins of other web pages whose scripts may read answers; "*" allows all.
        hosts: the names that a request may have in its Host header, in addition to localhost and addresses; None: any.
            Without keys, this keeps web pages from reading answers by a name that they have resolved anew.
        access_log: write a line of JSON for each request to the logger "fastformer.access".

    Raises:
        ValueError: no browser would send the origin, because it has no scheme, or has a path, a usual port, capital
            letters or a *; or a host is no name.
    """
    limits = limits or service.limits
    for origin in origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise ValueError(
                "expected origins as browsers send them, such as https://example.com, or * alone for all, got "
                f"{origin!r:.80}"
            )
    names = None if hosts is None else {host_name(host) for host in hosts}
    for name in names or ():
        if not _HOST.fullmatch(name):
            raise ValueError(f"expected hosts such as example.com, got {name!r:.80}")

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with service.session:
            yield

    app = FastAPI(
        title="fastformer",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    state = app.state
    state.service, state.limits, state.has_keys = service, limits, bool(keys)
    state.traffic, state.metrics = Traffic(), Metrics(service)
    state.paths = _Paths()
    modules = [importlib.import_module(f"fastformer.serving.{name}") for name in _FORMATS.get(service.kind, ())]
    posted: list[str] = []
    for module in (*modules, page):
        routes = module.router(service, limits)
        app.include_router(routes)
        posted += [route.path for route in routes.routes if "POST" in getattr(route, "methods", ())]
        state.paths.add((route.path for route in routes.routes), module)
    _add_state_routes(app, service, limits)
    state.paths.add((route.path for route in app.routes if hasattr(route, "path")), answers)
    _add_errors(app)
    # The middleware that is added last sees a request first.
    public = {path for path, is_public in (("/metrics", metrics_public), ("/", page_public)) if is_public}
    body_keys = {path for module in modules for path in getattr(module, "BODY_KEYS", ())}
    queued = {path for path in posted if not any(path in getattr(module, "UNQUEUED", ()) for module in modules)}
    uploads = {path for module in modules for path in getattr(module, "UPLOADS", ())}
    app.add_middleware(
        Gate, limits=limits, traffic=state.traffic, keys=tuple(keys), hosts=names, open_paths=public,
        body_key_paths=body_keys, queued_paths=queued, upload_paths=uploads, place=service.session.place,
        respond=state.paths.respond,
    )  # fmt: skip
    if origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(origins), allow_methods=["*"], allow_headers=["*"],
            expose_headers=["Retry-After"],
        )  # fmt: skip
    app.add_middleware(
        Watch, traffic=state.traffic, metrics=state.metrics, template_of=state.paths.templates.__getitem__,
        respond=state.paths.respond, logs=access_log,
    )  # fmt: skip
    return app


class _Templates(dict[str, str]):
    """The route template of each path; those that match only themselves are entries."""

    def __init__(self) -> None:
        self.patterns: list[tuple[re.Pattern[str], str]] = []

    def __missing__(self, path: str) -> str:
        return next((template for pattern, template in self.patterns if pattern.match(path)), _UNMATCHED)


class _Paths:
    """Finds the route template and the format of a path before the request is routed.

    Attributes:
        templates: the route template of each path.
    """

    def __init__(self) -> None:
        self.templates = _Templates()
        self._modules: dict[str, ModuleType] = {}  # by template

    def add(self, templates: Iterable[str], module: ModuleType) -> None:
        """Adds the templates of routes, with the module that makes their errors."""
        for template in templates:
            self._modules.setdefault(template, module)
            self.templates.patterns.append((compile_path(template)[0], template))
            if "{" not in template:
                self.templates[template] = template

    def respond(self, path: str, status: int, message: str, **detail: Any) -> Response:
        """Makes an error response in the shape of a path's format."""
        module = self._modules.get(self.templates[path], answers)
        response: Response = getattr(module, "error_response", answers.error_response)(status, message, **detail)
        return response


def _add_state_routes(app: FastAPI, service: Service, limits: Limits) -> None:
    traffic: Traffic = app.state.traffic

    @app.get("/health")
    async def health() -> Response:
        """Returns 200 as long as the model can answer; an orchestrator restarts a server that fails here."""
        return answer({"status": "ok"}) if service.session.is_alive else answer({"status": "failed"}, 503)

    @app.get("/ready")
    async def ready() -> Response:
        """Returns 200 as long as the server accepts new requests; otherwise a load balancer chooses other servers."""
        if not service.session.is_alive:
            return answer({"status": "failed"}, 503)
        return answer({"status": "ready"}) if traffic.is_ready else answer({"status": "ending"}, 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Returns counters and times for Prometheus."""
        return Response(app.state.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/info")
    async def info() -> Response:
        """Describes the model that is served and its limits."""
        fields = {"model": service.name, "kind": service.kind, "version": __version__, "limits": asdict(limits)}
        if (has_chat := getattr(service, "has_chat", None)) is not None:
            fields["chat"] = has_chat
        return answer({**fields, "languages": getattr(service, "languages", [])})


def _add_errors(app: FastAPI) -> None:
    respond = app.state.paths.respond

    async def of_http(http: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        fields = getattr(error, "fields", {})  # further fields of a format's errors
        return respond(http.url.path, error.status_code, str(error.detail), headers=error.headers, **fields)

    async def of_schema(http: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError | pydantic.ValidationError)
        message, param = schema_message(error)
        return respond(http.url.path, 400, message, **({"param": param} if param else {}))

    async def of_service(http: Request, error: Exception) -> Response:
        status, message = explained(error)
        return respond(http.url.path, status, message, headers=headers_of(error))

    async def of_gone(http: Request, error: Exception) -> Response:
        return Response(status_code=499)  # for the log alone

    app.add_exception_handler(HTTPException, of_http)
    app.add_exception_handler(RequestValidationError, of_schema)
    app.add_exception_handler(pydantic.ValidationError, of_schema)
    app.add_exception_handler(ValueError, of_service)
    app.add_exception_handler(RuntimeError, of_service)
    app.add_exception_handler(ClientGone, of_gone)


def schema_message(error: RequestValidationError | pydantic.ValidationError) -> tuple[str, str]:
    """Returns the first error in a body as one line, without the body's content, and the place of the error."""
    errors = error.errors()
    first = errors[0]
    if first["type"] == "json_invalid":  # its place is a number of characters
        return f"expected JSON, got something else: {first['ctx']['error']}", ""
    if first["type"] in ("model_attributes_type", "missing") and tuple(first["loc"]) == ("body",):
        return "expected a JSON object with the header Content-Type: application/json", ""
    # A field of several types has an error for each of them. That of the type that the value has says more.
    others = (one for one in errors if not one["type"].endswith("_type"))
    error_of_field = next((one for one in others if _field(one) == _field(first)), first)
    place = ".".join(str(part) for part in error_of_field["loc"] if part != "body" and not _is_branch(part))
    return f"{place}: {error_of_field['msg']}" if place else str(error_of_field["msg"]), place


def _field(error: Mapping[str, Any]) -> list[int | str]:
    return list(itertools.takewhile(lambda part: not _is_branch(part), error["loc"]))


def _is_branch(part: int | str) -> bool:
    return _BRANCH.fullmatch(str(part)) is not None
