"""A server tells, takes and answers what it did before; new routes and new parts of answers may be added."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
pytest.importorskip("httpx", reason="the httpx library is not installed")
pytest.importorskip("tokenizers", reason="the tokenizers library is not installed")

from tests.frozen.served import BODIES, folders, idle_now, served_now  # noqa: E402
from tests.frozen.write import IDLE, SERVED  # noqa: E402


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, Any]:
    return folders(tmp_path_factory.mktemp("served"))


def lost(frozen: Any, now: Any, place: str = "") -> list[str]:
    """Returns the places of what is gone or different."""
    if isinstance(frozen, dict) and isinstance(now, dict):
        parts = [(f"{place} {name}", each, now.get(name)) for name, each in frozen.items()]
        return [one for name, each, other in parts for one in lost(each, other, name)]
    return [] if frozen == now else [f"{place}: was {frozen}, is {now}"]


@pytest.mark.parametrize("kind", json.loads(SERVED.read_text()))
def test_a_server_tells_takes_and_answers_the_same(kind, places) -> None:
    changes = lost(json.loads(SERVED.read_text())[kind], served_now(places[kind]))
    assert not changes, "\n".join(changes)


@pytest.mark.parametrize("kind", BODIES, ids=lambda kind: kind.__name__)
def test_the_same_values_ask_for_nothing(kind) -> None:
    frozen = json.loads(IDLE.read_text())[kind.__name__]
    now = idle_now(kind, {*frozen} - {*kind.model_fields})
    changes = lost({name: value for name, value in frozen.items() if name not in kind.model_fields}, now)
    assert not changes, "\n".join(changes)
