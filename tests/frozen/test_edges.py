"""Empty, absent, odd and extreme values mean what they did: in requests, in folders of other programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
pytest.importorskip("httpx", reason="the httpx library is not installed")
pytest.importorskip("tokenizers", reason="the tokenizers library is not installed")

from tests.frozen.edges import edges_now, fields_of  # noqa: E402
from tests.frozen.names import lost  # noqa: E402
from tests.frozen.odd import FOLDERS, KINDS, settings_now  # noqa: E402
from tests.frozen.write import EDGES, ODD  # noqa: E402
from tests.serving import models  # noqa: E402
from tests.serving.test_fields import CASES  # noqa: E402

FROZEN = json.loads(ODD.read_text())


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, Path]:
    return models.services(tmp_path_factory.mktemp("edges"))


@pytest.mark.parametrize("route", CASES)
async def test_each_field_of_a_request_takes_the_same_values(route, places) -> None:
    frozen = json.loads(EDGES.read_text())[route]
    assert [*frozen] == fields_of(route), "a field without a row: see tests/frozen/write.py"
    changes = lost(frozen, await edges_now(route, places[CASES[route][0]]))
    assert not changes, "\n".join(changes)


@pytest.mark.parametrize("kind", KINDS)
def test_each_setting_of_a_family_takes_the_same_values(kind) -> None:
    changes = lost(FROZEN[kind], settings_now(kind, FROZEN[kind]))
    assert not changes, "\n".join(changes)


@pytest.mark.parametrize("name", FOLDERS)
def test_each_part_of_a_folder_is_refused_for_the_same_faults(name) -> None:
    read, of = FOLDERS[name]
    frozen, now = FROZEN[name], read(of)
    assert [*frozen] == [*now], "a part without a row: see tests/frozen/write.py"
    changes = lost(frozen, now)
    assert not changes, "\n".join(changes)
