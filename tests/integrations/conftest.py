"""Fixtures for the engine under accelerated encoders."""

from __future__ import annotations

from typing import Any

import pytest

from fastformer.encoding.engine import PackedEncoder


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the calls of the engine."""
    found, plain = [0], PackedEncoder.states

    def counting(self: Any, *args: Any) -> Any:
        found[0] += 1
        return plain(self, *args)

    monkeypatch.setattr(PackedEncoder, "states", counting)
    return found
