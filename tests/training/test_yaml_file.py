"""YAML files of settings are read as users mean them, or refused."""

from __future__ import annotations

import math

import pytest

from fastformer.commands.train import read_settings
from fastformer.training import TrainConfig, start
from fastformer.training.config import merged
from fastformer.training.run_config import absolute_paths, load_config, run_config
from fastformer.training.yaml_file import read_yaml
from tests.training.tiny import changed


@pytest.mark.parametrize(
    ("text", "value"),
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
