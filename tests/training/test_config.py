"""Tests how settings are completed, changed and written."""

from __future__ import annotations

import pytest

from fastformer.training import TrainConfig
from fastformer.training.config import merged
from fastformer.training.sections import TASKS


def test_a_config_equals_its_dict() -> None:
    config = TrainConfig(model="gpt", preset="small", settings={"dropout": 0.1}, lr=1)
    assert isinstance(config.lr, float)
    assert config.to_dict()["model"] == {"name": "gpt", "preset": "small", "dropout": 0.1}
    assert TrainConfig.from_dict(config.to_dict()) == config
    assert TrainConfig.from_dict({"model": "gpt", "preset": "small"}).preset == "small"


def test_a_task_sets_defaults_that_the_user_may_override() -> None:
    numbers = TrainConfig.from_dict({"task": "numbers", "lr": 1e-3, "model": {"dropout": 0.1}})
    suits = {name: value for name, value in TASKS["numbers"].items() if name not in ("lr", "model")}
    assert {name: getattr(numbers, name) for name in suits} == suits
    assert numbers.lr == 1e-3
    assert numbers.settings == {**TASKS["numbers"]["model"], "dropout": 0.1}
    assert TrainConfig.from_dict(numbers.to_dict()) == numbers
    # Another architecture has other settings, and epochs stand in place of steps.
    assert TrainConfig.from_dict({"task": "numbers", "model": "lstm"}).settings == {}
    assert TrainConfig.from_dict({"task": "numbers", "epochs": 2}).epochs == 2
    assert TrainConfig.from_dict({"train_tsv": "x"}) == TrainConfig(train_tsv="x")
    tuned = TrainConfig.from_dict({"task": "numbers", "init_from": "run"})
    assert (tuned.vocab_size, tuned.settings, tuned.lr) == (TrainConfig().vocab_size, {}, TASKS["numbers"]["lr"])


A, B, C = {"train_tsv": "a", "val_tsv": "b"}, {"train_source": "c", "train_target": "d"}, {"task": "numbers"}


@pytest.mark.parametrize(
    ("values", "changes", "expected"),
    [
        ({"epochs": 2}, {"steps": 1}, {"steps": 1}),
        ({"steps": 900, "epochs": 0.0}, {"epochs": 3}, {"epochs": 3}),
        ({"steps": 900}, {"epochs": 0}, {"steps": 900, "epochs": 0}),
        ({"steps": 900}, {"lr": 1}, {"steps": 900, "lr": 1}),
        (A, B, B),
        (B | {"val_source": "x", "val_target": "y"}, A, A),
        (C, A, A),
        (A, C, C),
        (A, {"model": "gpt", "train_text": "t"}, {"model": {"name": "gpt"}, "train_text": "t"}),
        (A, {"train_tsv": "z"}, {"train_tsv": "z", "val_tsv": "b"}),
        (A, {"val_tsv": "z"}, {"train_tsv": "a", "val_tsv": "z"}),
        (A | dict.fromkeys(("task", "train_text")), B, B),
    ],
)
def test_a_change_resets_contradicting_settings(values, changes, expected) -> None:
    found = merged(values, changes)
    assert {name: value for name, value in found.items() if value is not None} == expected
    TrainConfig.from_dict(found)


def test_contradicting_changes_are_still_refused() -> None:
    for changes, named in (({"steps": 1, "epochs": 2}, "epochs"), (A | B, "train_tsv"), (A | C, "task")):
        with pytest.raises(ValueError, match=rf"\b{named}\b"):
            TrainConfig.from_dict(merged({"steps": 5}, changes))


def test_lists_are_written_with_commas() -> None:
    given = {"train_tsv": ["a.tsv", "b.tsv"], "data_weights": [2, 0.5], "user_tokens": ["<2de>", "<2fr>"]}
    config = TrainConfig.from_dict(given)
    assert (config.train_tsv, config.user_tokens) == ("a.tsv,b.tsv", "<2de>,<2fr>") and config.weights() == [2, 0.5]
    assert TrainConfig.from_dict(config.to_dict()) == config
    assert (
        TrainConfig.from_dict({"train_tsv": "a", "data_weights": 2}).weights() == [2] and TrainConfig().weights() == []
    )
    with pytest.raises(ValueError, match=r"\buser_tokens\b"):
        TrainConfig.from_dict({"user_tokens": ["a,b", "c"]})
    with pytest.raises(ValueError, match=r"\binit_from\b"):
        TrainConfig.from_dict({"init_from": ["a", "b"]})
