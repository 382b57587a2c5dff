"""Every number of a model is among the settings of the family that it is saved as, or the family refuses it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from fastformer.checkpoints.hf import DECODER_FORMS, ENCODER_FORMS, FAMILIES, from_model
from fastformer.checkpoints.hf.common import Checkpoint
from fastformer.integrations import from_huggingface
from tests.checkpoints.present import PRESENT
from tests.integrations.config_fields import Change, made

# Families that another one's code saves.
LIKE_OTHERS = ("mbart", "pegasus", "mt5", "ministral", "olmo3", "cwm", "qwen3", "qwen3_moe", "xlm-roberta", "camembert")
# Further numbers that are no shapes of weights, if they are there.
COUNTS = {"max_distance": 17, "num_experts_per_tok": 1, "window_size": 7}


def others(config: Any) -> Iterator[dict[str, Any]]:
    """Yields each number with another value, and all of the dropouts, which have one setting in some families."""
    numbers = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    if config.positions != "relative":
        numbers.pop("max_distance", None)
    dropouts = [name for name in numbers if name.endswith("dropout")]
    for names in (dropouts, [name for name in dropouts if name != "activation_dropout"]):
        yield dict.fromkeys(names, 0.3125)
    for name, value in numbers.items():
        if isinstance(value, float) or (value is not None and name in COUNTS):
            yield {name: COUNTS.get(name) or value * 0.75 + 0.125}


@pytest.mark.parametrize("kind", [kind for kind in PRESENT if kind not in LIKE_OTHERS])
def test_a_saved_model_has_the_same_numbers(kind: str) -> None:
    model = from_huggingface(made(Change(kind, "use_cache", True, head=kind in ENCODER_FORMS)))
    forms: dict[str, Any] = {**DECODER_FORMS, **ENCODER_FORMS}
    save = forms[kind].from_model if kind in forms else from_model

    def saved(**change: Any) -> tuple[Any, dict[str, Any], dict[str, Any]]:
        changed = copy.copy(model)
        changed.config = dataclasses.replace(model.config, **change)
        return changed.config, *save(changed)

    kept: dict[str, Any] = {}
    for change in others(model.config):
        with contextlib.suppress(ValueError):
            saved(**kept, **{name: value for name, value in change.items() if name not in kept})
            kept = {**change, **kept}
    config, settings, weights = saved(**kept)
    assert FAMILIES[settings["model_type"]].to_model(Checkpoint(settings, weights)).config == config
    assert kept.keys() & {"dropout", "layer_norm_eps"}, kept
