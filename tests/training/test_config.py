"""Settings: what is refused, and how values of YAML are read."""

from __future__ import annotations

import pytest

from fastformer.training import TrainConfig
from fastformer.training.config import merged
from fastformer.training.sections import TASKS


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"modle": "gpt"}, "unknown setting 'modle'; did you mean 'model'"),
        ({"schedule": "linar"}, "expected schedule to be 'noam', .*, got 'linar'; did you mean 'linear'"),
        ({"steps": 0}, "expected steps of at least 1, got 0"),
        ({"steps": 1.5}, "expected steps to be an integer, got 1.5"),
        ({"lr": "fast"}, "expected lr to be a number, got 'fast'"),
        ({"lr": float("nan")}, "expected lr to be a number, got nan"),
        ({"clip": -1.0}, "expected clip of at least 0"),
        ({"checkpointing": "yes"}, "expected checkpointing to be true or false"),
        ({"train_tsv": 3}, "expected train_tsv to be text or null, got 3"),
        ({"settings": {"d_model": 3}}, "unknown setting 'settings'"),
        ({"d_model": 64}, "it belongs to the model"),
        ({"model": {"d_modle": 64}}, "unknown setting 'd_modle' of the model; did you mean 'd_model'"),
        ({"model": {"name": "gpt", "num_encoder_layers": 3}}, "GPTConfig has no setting 'num_encoder_layers'"),
        ({"preset": "bsae"}, "expected a preset of transformer out of .* did you mean 'base'"),
        ({"model": "lstm"}, "expected batching bucketed or random for the LSTM"),
        ({"average_last": 5, "save_every": 0}, "expected save_every above 0"),
        ({"label_smoothing": 1.0}, r"label_smoothing in \[0, 1\)"),
        ({"best_by": "blue"}, "expected best_by to be .*did you mean 'bleu'"),
        ({"epochs": -1}, "expected epochs of at least 0, got -1"),
        ({"epochs": 2, "steps": 5}, "expected steps or epochs, got both: 5 and 2"),
        ({"task": "letters"}, "expected task to be 'numbers' or null, got 'letters'"),
    ],
)
def test_config_errors(changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig.from_dict(changes)


def test_a_config_is_what_its_dict_says() -> None:
    config = TrainConfig(model="gpt", preset="small", settings={"dropout": 0.1}, lr=1)
    assert isinstance(config.lr, float)
    assert config.to_dict()["model"] == {"name": "gpt", "preset": "small", "dropout": 0.1}
    assert TrainConfig.from_dict(config.to_dict()) == config
    assert TrainConfig.from_dict({"model": "gpt", "preset": "small"}).preset == "small"


def test_a_task_brings_what_suits_it_behind_what_is_given() -> None:
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
def test_a_change_takes_away_what_it_contradicts(values, changes, expected) -> None:
    found = merged(values, changes)
    assert {name: value for name, value in found.items() if value is not None} == expected
    TrainConfig.from_dict(found)


def test_contradicting_changes_are_refused_still() -> None:
    for changes in ({"steps": 1, "epochs": 2}, A | B, A | C):
        with pytest.raises(ValueError, match=", got "):
            TrainConfig.from_dict(merged({"steps": 5}, changes))


def test_lists_are_texts_with_commas() -> None:
    given = {"train_tsv": ["a.tsv", "b.tsv"], "data_weights": [2, 0.5], "user_tokens": ["<2de>", "<2fr>"]}
    config = TrainConfig.from_dict(given)
    assert (config.train_tsv, config.user_tokens) == ("a.tsv,b.tsv", "<2de>,<2fr>") and config.weights() == [2, 0.5]
    assert TrainConfig.from_dict(config.to_dict()) == config
    assert (
        TrainConfig.from_dict({"train_tsv": "a", "data_weights": 2}).weights() == [2] and TrainConfig().weights() == []
    )
    with pytest.raises(ValueError, match="expected user_tokens to be values without commas"):
        TrainConfig.from_dict({"user_tokens": ["a,b", "c"]})
    with pytest.raises(ValueError, match="expected init_from to be text or null, got"):
        TrainConfig.from_dict({"init_from": ["a", "b"]})
