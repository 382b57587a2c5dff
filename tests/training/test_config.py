"""Settings are completed, changed and written; each one of the user is used, refused, or reported as unused."""

from __future__ import annotations

import copy
import json
import logging
import math
import os
import re

import pytest

from fastformer.commands.train import read_settings
from fastformer.training import TrainConfig, start
from fastformer.training.config import merged, unused
from fastformer.training.run_config import FIXED, absolute_paths, check_unchanged, load_config, run_config, save_config
from fastformer.training.sections import TASKS
from fastformer.training.yaml_file import read_yaml
from tests.covering import each
from tests.training.tiny import PAIRS, changed, contents, write_pairs


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


@each(
    "given, named",
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


@each(
    "config, given, said",
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


# YAML files of settings are read as users mean them, or refused.


@each(
    "text, value",
    [
        ("1e0", 1.0),
        ("1e3", 1000.0),
        ("1e-3", 1e-3),
        (".5", 0.5),
        ("-.5e1", -5.0),
        ("1.", 1.0),
        ("010", 10),
        ("-007", -7),
        ("1_000", 1000),
        ("+3", 3),
        ("-.inf", -math.inf),
        ("yes", True),
        ("null", None),
        ("~", None),
        ("0x4", "0x4"),
        ("0o7", "0o7"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("2020-13-45", "2020-13-45"),
        ('"010"', "010"),
        ("", None),
    ],
)
def test_values(text, value, tmp_path) -> None:
    (tmp_path / "a.yaml").write_text(f"a: {text}\n")
    found = read_yaml(tmp_path / "a.yaml")["a"]
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    "text", ["steps: 3\nlr: 1\nsteps: 4\n", "model: {d_ff: 3, d_ff: 3}\n", "model:\n  d_ff: 1\n  'd_ff': 2\n"]
)
def test_a_duplicate_name_is_refused(text, tmp_path) -> None:
    (tmp_path / "twice.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"(?s)twice\.yaml.*'(steps|d_ff)'"):
        read_yaml(tmp_path / "twice.yaml")


def test_a_merged_mapping_may_be_overridden(tmp_path) -> None:
    (tmp_path / "a.yaml").write_text("model: &small {d_ff: 3, d_model: 4}\nother: {<<: *small, d_ff: 5}\n")
    assert read_yaml(tmp_path / "a.yaml")["other"] == {"d_ff": 5, "d_model": 4}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("steps: 1e3\nmodel: {d_ff: 6.4e1, dropout: 1e-1}\n", {"steps": 1000, "d_ff": 64, "dropout": 0.1}),
        ("seed: 010\n", {"seed": 10}),
        ('steps: "7"\nlr: "1e-3"\n', {"steps": 7, "lr": 1e-3}),
        ("checkpointing: yes\n", {"checkpointing": True}),
        ("train_tsv: [a.tsv, b.tsv]\ndata_weights: [2, 0.5]\n", {"train_tsv": "a.tsv,b.tsv", "data_weights": "2,0.5"}),
    ],
)
def test_settings(text, expected, tmp_path) -> None:
    (tmp_path / "a.yaml").write_text(text)
    config = TrainConfig.from_dict(read_settings(str(tmp_path / "a.yaml")))
    found = {name: getattr(config, name, config.settings.get(name)) for name in expected}
    assert found == expected and all(type(found[name]) is type(value) for name, value in expected.items())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('model: {norm_first: "no"}\n', "norm_first"),
        ('checkpointing: "yes"\n', "checkpointing"),
        ("checkpointing: maybe\n", "checkpointing"),
        ("checkpointing: 1\n", "checkpointing"),
        ("model: {vocab_size: 5}\n", "tokenizer"),
        ("model: {source_vocab_size: 5}\n", "tokenizer"),
        ("model: {special_ids: {pad: 0}}\n", "tokenizer"),
        ("steps: 1.5\n", "steps"),
        ("steps: 0x4\n", "steps"),
        ("max_minutes: 1:30\n", "max_minutes"),
        ("steps: 2020-01-01\n", "steps"),
        ("modle: gpt\n", "'model'"),
        ("schedule: linar\n", "'linear'"),
        ("lr: .nan\n", "lr.*nan"),
        ("clip: -1\n", "clip"),
        ("train_tsv: 3\n", "train_tsv.*3"),
        ("label_smoothing: 1.0\n", "label_smoothing"),
        ("epochs: -1\n", "epochs.*-1"),
    ],
)
def test_values_of_another_type_or_out_of_bounds_are_refused(text, said, tmp_path) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ValueError, match=rf"(?<!\w){said}(?!\w)"):
        TrainConfig.from_dict(read_settings(str(tmp_path / "a.yaml")))


def test_settings_of_another_run_and_flags_over_them(config, tmp_path) -> None:
    """A run's config.yaml has every setting, so each flag overrides one of them."""
    start(changed(config, steps=1), tmp_path / "first").train()
    options = {"steps": 1, "val_examples": 0, "device": "cpu", "init_from": str(tmp_path / "first")}
    start(TrainConfig(train_tsv=config.train_tsv, **options), tmp_path / "tuned")
    for run in ("first", "tuned"):  # the model of the second has every size
        given = read_settings(str(tmp_path / run / "config.yaml"))
        assert TrainConfig.from_dict(given) == load_config(tmp_path / run)
        found = TrainConfig.from_dict(merged(given, {"epochs": 0.2, "train_source": "a", "train_target": "b"}))
        assert (found.epochs, found.train_tsv, found.train_source) == (0.2, None, "a")
        assert TrainConfig.from_dict(merged(given, {"task": "numbers"})).val_tsv is None


def test_the_settings_of_a_run_that_were_edited(config, tmp_path) -> None:
    start(changed(config, steps=1), tmp_path / "run")
    file = tmp_path / "run" / "config.yaml"
    file.write_text(file.read_text().replace("steps: 1\n", "steps: 1e1\n").replace("seed: 0\n", "seed: 00\n"))
    assert load_config(tmp_path / "run").steps == 10
    (tmp_path / "run" / "checkpoints").mkdir()
    (tmp_path / "run" / "checkpoints" / "step-00000001.pt").touch()
    assert run_config(tmp_path / "run", {"epochs": 3}, "auto").epochs == 3


def test_a_home_folder_is_found(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text("steps: 3\n")
    assert read_yaml("~/c.yaml") == {"steps": 3}
    settings = TrainConfig(train_tsv="~/a.tsv,~/b.tsv", tokenizer="~/t.json", init_from="~/run", val_tsv="v.tsv")
    found = absolute_paths(settings)
    assert found.train_tsv == f"{tmp_path}/a.tsv,{tmp_path}/b.tsv" and found.tokenizer == f"{tmp_path}/t.json"
    assert found.init_from == f"{tmp_path}/run" and found.val_tsv == f"{tmp_path}/v.tsv"
    (tmp_path / "~").mkdir()
    (tmp_path / "~" / "a.tsv").touch()  # of that very name
    assert absolute_paths(TrainConfig(train_tsv="~/a.tsv")).train_tsv == f"{tmp_path}/~/a.tsv"


# Tests a run's settings on disk, and which of them a resumed run may change.


KEPT = """
    model preset settings task vocab_size seqlen max_len batching max_tokens accumulate ema seed shared_vocab held_out
    data_weights shards_at_once max_length_ratio min_chars max_chars drop_duplicates drop_identical normalization spaces
    max_token_length user_tokens drop_user_tokens
"""


@each("name", KEPT.split())
def test_settings_of_the_weights_and_the_order_are_kept(config, name) -> None:
    assert set(FIXED.split()) == set(KEPT.split())
    other = copy.copy(config)  # not a new one, which would ask whether the settings fit together
    setattr(other, name, "another")
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        check_unchanged(other, json.dumps(config.to_dict()), "step-1.pt")


def test_allowed_changes_are_reported(config, caplog) -> None:
    with caplog.at_level(logging.INFO):
        check_unchanged(changed(config, lr=1e-4, steps=40), json.dumps(config.to_dict()), "step-1.pt")
    for said in (r"\blr\b.*\b0.0001\b.*\b0.002\b", r"\bsteps\b.*\b40\b.*\b12\b"):
        assert re.search(said, caplog.text)
    assert len(caplog.messages) == 2


@pytest.mark.parametrize("saved", ["", "[]", "3", "null", '{"lr": "x"}', '{"no": 1}'])
def test_invalid_settings_in_a_checkpoint(config, saved) -> None:
    with pytest.raises(ValueError, match=r"step-1\.pt"):
        check_unchanged(config, saved, "step-1.pt")


def test_an_edited_file_is_compared_with_the_checkpoint(config, tmp_path, caplog) -> None:
    run = tmp_path / "run"
    start(changed(config, steps=2), run).train()
    file = run / "config.yaml"
    text = file.read_text()
    for old, new, name in (
        ("seed: 0", "seed: 1", "seed"),
        ("batching: packed", "batching: random", "batching"),
    ):
        assert old in text
        file.write_text(text.replace(old, new))
        before = contents(run)
        with pytest.raises(ValueError, match=rf"\b{name}\b"):
            start(load_config(run), run, resume=True)
        assert contents(run) == before
    file.write_text(text.replace("steps: 2", "steps: 3").replace("lr: 0.002", "lr: 0.001"))
    with caplog.at_level(logging.INFO):
        trainer = start(load_config(run), run, resume=True)
    trainer.train()
    assert trainer.step == 3 and trainer.optimizer.param_groups[0]["lr"] <= 0.001


def test_settings_of_a_run(config, tmp_path) -> None:
    run = tmp_path / "run"
    with pytest.raises(ValueError, match="run"):
        run_config(run, {}, True)
    assert run_config(run, {"steps": 3}, "auto").steps == 3
    start(changed(config, steps=1), run).train()
    assert run_config(run, {"steps": 3}) == TrainConfig(steps=3)
    for resume in (True, "auto"):
        found = run_config(run, {"lr": 1e-4, "steps": 7}, resume)
        assert found == changed(config, lr=1e-4, steps=7)
        assert run_config(run, {"epochs": 3}, resume).epochs == 3
    with pytest.raises(ValueError, match="'step'.*'steps'"):
        run_config(run, {"step": 3}, True)


def test_a_file_that_is_cut_short(config, tmp_path) -> None:
    save_config(tmp_path, config)
    assert load_config(tmp_path) == config
    file = tmp_path / "config.yaml"
    data = file.read_bytes()
    for cut in (0, len(data) // 2, len(data) - 5):
        file.write_bytes(data[:cut])
        with pytest.raises(ValueError, match="config.yaml"):
            load_config(tmp_path)
    file.write_text("a: [")
    with pytest.raises(ValueError, match="config.yaml"):
        read_yaml(file)
    with pytest.raises(ValueError, match="none.yaml"):
        read_yaml(tmp_path / "none.yaml")


def test_paths_mean_the_same_from_anywhere(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = absolute_paths(TrainConfig(train_tsv="a.tsv", val_tsv="/b.tsv", tokenizer="sub/tokenizer.json"))
    assert (found.train_tsv, found.val_tsv) == (os.path.join(os.getcwd(), "a.tsv"), "/b.tsv")
    assert found.tokenizer == os.path.join(os.getcwd(), "sub", "tokenizer.json") and found.train_text is None
    assert absolute_paths(TrainConfig(tokenizer="bytes")).tokenizer == "bytes"
    two = absolute_paths(TrainConfig(tokenizer="a.model,b", shared_vocab=False)).tokenizer
    assert two == f"{os.path.join(os.getcwd(), 'a.model')},{os.path.join(os.getcwd(), 'b')}"
    for name in ("c,d.tsv", "e.tsv"):
        (tmp_path / name).touch()
    for given, meant in (("a.tsv, b/c.tsv", ["a.tsv", "b/c.tsv"]), ("c,d.tsv", ["c,d.tsv"]), ("e.tsv,", ["e.tsv", ""])):
        absolute = absolute_paths(TrainConfig(train_tsv=given)).train_tsv
        assert absolute == ",".join(os.path.abspath(path) for path in meant)


def test_a_run_of_an_earlier_version_keeps_the_split_that_it_had(config, tmp_path) -> None:
    write_pairs(tmp_path / "more.tsv", PAIRS * 6)
    config = changed(
        config, train_tsv=str(tmp_path / "more.tsv"), val_tsv=None, held_out="last", spaces="keep", steps=2
    )
    run = tmp_path / "run"
    trainer = start(config, run)
    trainer.train()
    file, saved = run / "config.yaml", json.dumps(config.to_dict())
    for line in ("held_out: last\n", "spaces: keep\n"):
        assert line in file.read_text()
        file.write_text(file.read_text().replace(line, ""))
    assert load_config(run).held_out == "last" and load_config(run).spaces == "keep"
    found = {name: value for name, value in json.loads(saved).items() if name not in ("held_out", "spaces")}
    assert check_unchanged(config, json.dumps(found), "step-1.pt") == config
    again = start(run_config(run, {"steps": 3}, True), run, resume=True)
    assert again.data.val_texts == trainer.data.val_texts == (PAIRS * 6)[-2:]
    with pytest.raises(ValueError, match=r"\bheld_out\b.*'last'.*'random'"):
        check_unchanged(changed(config, held_out="random"), json.dumps(found), "step-1.pt")
