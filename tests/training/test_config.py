"""Settings are completed, changed and written; each one of the user is used, refused, or reported as unused."""

from __future__ import annotations

import pytest

from fastformer.training import TrainConfig
from fastformer.training.config import merged, unused
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
    assert TrainConfig.from_dict({"train_tsv": "a", "data_weights": 2}).weights() == [2]
    assert TrainConfig().weights() == []
    with pytest.raises(ValueError, match=r"\buser_tokens\b"):
        TrainConfig.from_dict({"user_tokens": ["a,b", "c"]})
    with pytest.raises(ValueError, match=r"\binit_from\b"):
        TrainConfig.from_dict({"init_from": ["a", "b"]})


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"task": "numbers", "train_source": "a", "train_target": "b"}, ("task", "train_source")),
        ({"task": "numbers", "train_tsv": "a"}, ("task", "train_tsv")),
        ({"train_source": "a", "train_target": "b", "train_tsv": "c"}, ("train_source", "train_tsv")),
        ({"train_target": "b"}, ("train_source", "train_target")),
        ({"train_tsv": "a", "val_source": "b"}, ("val_source", "val_target")),
        ({"train_source": "a", "train_target": "b", "val_tsv": "c"}, ("train_source", "val_source", "val_tsv")),
        ({"train_tsv": "a", "val_source": "c", "val_target": "d"}, ("train_tsv", "val_tsv", "val_source")),
        ({"train_source": "a", "train_target": "b", "val_text": "c"}, ("train_source", "val_text")),
        ({"task": "numbers", "val_source": "a", "val_target": "b"}, ("task", "val_source")),
        ({"task": "numbers", "val_text": "a"}, ("task", "val_text")),
        ({"model": "gpt", "train_text": "a", "val_tsv": "b"}, ("train_text", "val_tsv")),
        ({"model": "gpt", "train_text": "a", "task": "numbers"}, ("task", "train_text")),
        ({"model": "gpt", "train_tsv": "a"}, ("gpt", "train_text", "train_tsv")),
        ({"model": "gpt", "task": "numbers"}, ("gpt", "train_text", "task")),
        ({"model": "gpt", "val_tsv": "a"}, ("gpt", "val_tsv")),
        ({"train_text": "a"}, ("transformer", "train_text", "--model gpt")),
        ({"val_text": "a"}, ("transformer", "val_text")),
        ({"model": "lstm", "batching": "bucketed", "train_text": "a"}, ("lstm", "train_text")),
        ({"train_tsv": ""}, ("train_tsv",)),
        ({"init_from": ""}, ("init_from",)),
        ({"train_source": "a,b", "train_target": "c"}, ("train_source", "train_target", "2", "1")),
        (
            {"train_source": "a", "train_target": "b", "val_source": "c,d", "val_target": "e"},
            ("val_source", "val_target", "2", "1"),
        ),
        ({"train_tsv": "a,b", "data_weights": "2"}, ("data_weights", "'2'")),
        ({"train_tsv": "a,b", "data_weights": "2,x"}, ("data_weights", "'2,x'")),
        ({"train_tsv": "a,b", "data_weights": "1,0"}, ("data_weights", "'1,0'")),
        ({"train_tsv": "a,b", "data_weights": "1,nan"}, ("data_weights", "'1,nan'")),
        ({"train_tsv": "a", "user_tokens": "<a>,"}, ("user", "''")),
        ({"train_tsv": "a", "user_tokens": "<a>,</s>"}, ("user", "'</s>'")),
        ({"model": "gpt", "train_text": "a", "spaces": "collapse"}, ("spaces", "gpt", "collapse")),
    ],
)
def test_contradicting_data_is_refused_and_named(given, named) -> None:
    with pytest.raises(ValueError) as refused:
        TrainConfig(**given)
    for name in named:
        assert name in str(refused.value)


@pytest.mark.parametrize(
    ("config", "given", "said"),
    [
        ({}, {"seqlen": 64}, ["seqlen"]),
        ({"model": "gpt"}, {"seqlen": 64}, []),
        ({"model": "gpt"}, {"max_len": 64, "val_examples": 5, "samples": 2}, ["max_len", "val_examples", "samples"]),
        ({}, {"max_len": 64, "val_examples": 5, "samples": 2}, []),
        ({"tokenizer": "bytes"}, {"vocab_size": 500}, ["vocab_size"]),
        ({"tokenizer": "bpe"}, {"vocab_size": 500}, []),
        ({}, {"smooth_others": True}, ["smooth_others"]),
        ({"label_smoothing": 0.1}, {"smooth_others": True}, []),
        ({"init_from": "run"}, {"train_text": "a"}, []),  # the run says which model it is
        ({"val_examples": 0}, {"samples": 3}, ["samples"]),
        ({"val_every": 0}, {"patience": 3}, ["patience"]),
        ({"val_every": 0}, {"patience": 0}, []),
        ({"task": "numbers"}, {"skip_bad_lines": True}, ["skip_bad_lines"]),
        ({"task": "numbers"}, {"held_out": "last", "data_weights": "2"}, ["held_out", "data_weights"]),
        ({"train_tsv": "a", "val_tsv": "b"}, {"held_out": "last"}, ["held_out"]),
        ({"train_tsv": "a"}, {"held_out": "last", "data_weights": "2"}, []),
        ({"model": "gpt"}, {"held_out": "last", "drop_duplicates": True}, ["held_out", "drop_duplicates"]),
        ({"tokenizer": "bytes"}, {"normalization": "none", "user_tokens": "<a>"}, ["normalization"]),
        ({"tokenizer": "a.model"}, {"spaces": "keep", "user_tokens": "<a>"}, ["spaces", "user_tokens"]),
        ({}, {"drop_user_tokens": True, "max_token_length": 9}, ["drop_user_tokens"]),
    ],
)
def test_settings_without_effect_are_reported(config, given, said) -> None:
    sentences = unused(TrainConfig(**config, **given), given)
    assert [sentence.partition(" ")[0] for sentence in sentences] == said
