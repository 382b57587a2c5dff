"""The web page at `/`: one file, whose script and style the browser runs by their hashes and by nothing else."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from fastapi.responses import HTMLResponse, Response

_FILE = Path(__file__).with_name("index.html")


def router(service: Any, limits: Any) -> APIRouter:
    """Returns the routes of the page, which is the same for all models: it asks `/v1/info` which one is served.

    Args:
        service: not needed; each router takes it.
        limits: not needed, either.
    """
    text = _FILE.read_text(encoding="utf-8")
    headers = {
        "Content-Security-Policy": policy(text),
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-cache",
    }
    page = APIRouter()

    @page.get("/", include_in_schema=False)
    async def index() -> Response:
        return HTMLResponse(text, headers=headers)

    return page


def policy(page: str) -> str:
    """Returns the Content-Security-Policy of a page: its own inline script and style, and requests to its host.

    Its script may not turn texts into markup either ("require-trusted-types-for"): a model's text is never markup.
    """
    hashes = {name: " ".join(_hashes(page, name)) for name in ("script", "style")}
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {hashes['script']}",
            f"style-src {hashes['style']}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )


def _hashes(page: str, name: str) -> list[str]:
    inner = re.findall(rf"<{name}>(.*?)</{name}>", page, re.DOTALL)
    digests = (hashlib.sha256(text.encode()).digest() for text in inner)
    return [f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests]
