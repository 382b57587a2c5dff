"""Guards hold for as long as nothing has changed, whatever the classes look like."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from fastformer.nn.guards import Guards


class Mixin:
    """Not a module, and without a __call__: every look at it on the class makes another object."""


class Model(Mixin, nn.Sequential):
    pass


def patch_mixin(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mixin, "__call__", lambda self, x: x, raising=False)


def patch_forward(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: x)


def hook(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    model.get_submodule("0").register_forward_hook(lambda *_: None)


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("change", [patch_mixin, patch_forward, hook])
def test_guards_hold_until_something_changes(change: Any, everything: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(nn.Linear(2, 2), nn.ReLU())
    guards = Guards(model, model.children(), [(nn, "Linear"), (nn.Module, "__call__")], everything=everything)
    assert guards.hold(model) and guards.hold(model)
    change(model, monkeypatch)
    assert not guards.hold(model)
    monkeypatch.undo()
    assert guards.hold(model) == (change is not hook)
