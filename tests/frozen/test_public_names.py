"""Public names, signatures, flags and state_dict keys are still there; new ones may be added."""

from __future__ import annotations

import importlib
import json

from tests.covering import each
from tests.frozen.names import described, flags_now, lost, missing, state_dicts_now
from tests.frozen.write import FLAGS, NAMES, STATE_DICTS

FROZEN = json.loads(NAMES.read_text())


@each("package", FROZEN)
def test_public_names_still_exist(package) -> None:
    module = importlib.import_module(package)
    gone = [name for name in FROZEN[package] if not hasattr(module, name)]
    assert not gone, f"{package} has no {', '.join(gone)} any more"
    changes = [
        change
        for name, frozen in FROZEN[package].items()
        for change in missing(frozen, described(getattr(module, name)), name)
    ]
    assert not changes, "\n".join(changes)


def test_flags_have_their_bounds_and_defaults() -> None:
    changes = lost(json.loads(FLAGS.read_text()), flags_now())
    assert not changes, "\n".join(changes)


def test_state_dicts_have_their_keys_and_shapes() -> None:
    frozen, now = json.loads(STATE_DICTS.read_text()), state_dicts_now()
    assert frozen.keys() == now.keys()
    for name, entries in frozen.items():
        assert now[name] == entries, name
