"""Tests a run's settings on disk, and which of them a resumed run may change."""

from __future__ import annotations

import copy
import json
import logging
import os
import re

import pytest

from fastformer.training import TrainConfig, start
from fastformer.training.run_config import FIXED, absolute_paths, check_unchanged, load_config, run_config, save_config
from fastformer.training.yaml_file import read_yaml
from tests.training.tiny import PAIRS, changed, contents, write_pairs

KEPT = """
    model preset settings task vocab_size seqlen max_len batching max_tokens accumulate ema seed shared_vocab held_out
    data_weights shards_at_once max_length_ratio min_chars max_chars drop_duplicates drop_identical normalization spaces
    max_token_length user_tokens drop_user_tokens
"""


@pytest.mark.parametrize("name", KEPT.split())
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
