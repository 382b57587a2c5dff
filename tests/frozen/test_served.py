"""A server tells, takes and answers what it did before; `tests/frozen/write.py` adds new routes and fields."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
pytest.importorskip("httpx", reason="the httpx library is not installed")
pytest.importorskip("tokenizers", reason="the tokenizers library is not installed")

from tests.covering import each
from tests.frozen.names import lost  # noqa: E402
from tests.frozen.served import BODIES, folders, idle_now, served_now  # noqa: E402
from tests.frozen.write import IDLE, SERVED  # noqa: E402


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, Any]:
    return folders(tmp_path_factory.mktemp("served"))


@pytest.mark.parametrize("kind", json.loads(SERVED.read_text()))
def test_a_server_tells_takes_and_answers_the_same(kind, places) -> None:
    changes = lost(json.loads(SERVED.read_text())[kind], served_now(places[kind]))
    assert not changes, "\n".join(changes)


@each("kind", BODIES)
def test_the_same_values_ask_for_nothing(kind) -> None:
    changes = lost(json.loads(IDLE.read_text())[kind.__name__], idle_now(kind))
    assert not changes, "\n".join(changes)
