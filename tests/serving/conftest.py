"""A folder of a translator with random weights, and an application in the process's own event loop."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serving import models


@pytest.fixture(scope="session", autouse=True)
def _one_identifier() -> Iterator[None]:
    """Loads the model that detects languages once, which takes half a second; each service gets a copy."""
    try:
        from py3langid.langid import LanguageIdentifier
    except ImportError:
        yield
        return
    load = functools.cache(LanguageIdentifier.from_model_file)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LanguageIdentifier, "from_model_file", lambda *given, **more: copy.copy(load(*given, **more)))
        yield


@pytest.fixture(scope="session")
def translator_folder(tmp_path_factory) -> Path:
    return models.translator(tmp_path_factory.mktemp("models") / "tiny-translator")


@pytest.fixture(scope="module")
def server(folder) -> Iterator[Any]:
    """Starts a real server of the module's `folder`."""
    from tests.serving.servers import running  # where the extra `serve` is not installed, tests skip before this

    with running(folder) as found:
        yield found


@pytest.fixture(scope="module")
def http() -> Iterator[Any]:
    """Returns a client that keeps its connections, each of which takes ten milliseconds to make."""
    httpx = pytest.importorskip("httpx", reason="the httpx library is not installed")
    with httpx.Client(timeout=20) as found:
        yield found


@pytest.fixture(scope="module")
def client(server) -> Iterator[Any]:
    """Returns OpenAI's client for the server."""
    openai = pytest.importorskip("openai", reason="the openai library is not installed")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found
