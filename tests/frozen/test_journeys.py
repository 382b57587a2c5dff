"""Journeys give the recorded results: texts and ids exactly, numbers up to the rounding of another CPU."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.frozen.journeys import JOURNEYS
from tests.frozen.write import JOURNEYS as FILE

FROZEN = json.loads(FILE.read_text())
TOLERANCE = 1e-4


def differences(now: Any, frozen: Any, where: str) -> list[str]:
    """Returns where two results differ by more than rounding."""
    if isinstance(frozen, dict) and isinstance(now, dict):
        if frozen.keys() != now.keys():
            return [f"{where}: expected {sorted(frozen)}, got {sorted(now)}"]
        if frozen.keys() == {"number"}:
            near = abs(now["number"] - frozen["number"]) <= TOLERANCE * abs(frozen["number"]) + 1e-6
            return [] if near else [f"{where}: expected {frozen['number']}, got {now['number']}"]
        if frozen.keys() == {"tensor"}:
            mine, theirs = now["tensor"], frozen["tensor"]
            most = TOLERANCE * theirs["norm"] + 1e-6
            near = all(abs(mine[key] - theirs[key]) <= most for key in ("norm", "product"))
            return [] if near and mine["shape"] == theirs["shape"] else [f"{where}: expected {theirs}, got {mine}"]
        return [one for key in frozen for one in differences(now[key], frozen[key], f"{where}, {key}")]
    if isinstance(frozen, list) and isinstance(now, list) and len(frozen) == len(now):
        pairs = enumerate(zip(now, frozen, strict=True))
        return [one for i, (a, b) in pairs for one in differences(a, b, f"{where}[{i}]")]
    return [] if frozen == now else [f"{where}: expected {frozen!r}, got {now!r}"]


@pytest.mark.parametrize("name", FROZEN)
def test_a_journey_ends_where_it_did(name, tmp_path) -> None:
    torch.manual_seed(0)
    found = differences(json.loads(json.dumps(JOURNEYS[name](tmp_path))), FROZEN[name], name)
    assert not found, "\n".join(found)


def test_every_journey_is_frozen() -> None:
    assert list(FROZEN) == list(JOURNEYS)
