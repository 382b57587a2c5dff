"""An application in the test's own event loop, and its client."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx

from fastformer.serving import make_app
from fastformer.serving.service import Service


@contextlib.asynccontextmanager
async def serving(service: Service, **options: Any) -> AsyncIterator[Any]:
    """Returns a client of a service's application."""
    app = make_app(service, **options)
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://here", timeout=20) as client:
            setattr(client, "app", app)  # noqa: B010
            yield client


def events(text: str) -> list[Any]:
    """Returns the JSON of server-sent events."""
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
