"""A training reads the shards of `fastformer prepare`: the same examples, and an exact resume."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from fastformer.cli import main
from fastformer.data import train_bpe
from fastformer.training import TrainConfig, start
from fastformer.training.config import unused
from fastformer.training.examples import load_data
from fastformer.training.prepare import prepare
from tests.training.tiny import before_updates, changed, contents, losses, weights, write_pairs

pytest.importorskip("pyarrow", reason="shards are files of Arrow")

PAIRS = [(f"{'a' * (i % 7 + 1)} {i}", f"{i} {'b' * (i % 5 + 1)}") for i in range(300)]


@pytest.fixture
def shards(config, tmp_path) -> TrainConfig:
    """Returns the settings of a training with a few windows."""
    text = changed(config, train_tsv=write_pairs(tmp_path / "many.tsv", PAIRS), val_tsv=None)
    prepare(text, tmp_path / "data", shards=5, processes=1)
    return changed(config, train_tsv=None, val_tsv=None, train_data=str(tmp_path / "data"), shards_at_once=2)


def test_a_resumed_run_equals_an_uninterrupted_one(shards, tmp_path) -> None:
    shards = changed(shards, steps=70, accumulate=2, save_every=0, schedule="constant")
    seen: list[tuple] = []

    def note(batches):
        seen.append(tuple(tuple(batch.target_in.flatten().tolist()) for batch in batches))

    whole = before_updates(start(shards, tmp_path / "whole"), note)
    whole.train()
    in_whole, seen[:] = list(seen), []
    assert whole.position.epoch >= 1  # windows and epochs were crossed
    for steps in (9, 25, 26, 70):
        before_updates(start(changed(shards, steps=steps), tmp_path / "parts", resume="auto"), note).train()
    assert seen == in_whole
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    parts = start(shards, tmp_path / "parts", resume=True)
    assert torch.equal(weights(parts), weights(whole))
    assert replace(parts.position, trained_seconds=0.0) == replace(whole.position, trained_seconds=0.0)


def test_epochs_are_counted_over_windows(shards, tmp_path) -> None:
    del (values := shards.to_dict())["steps"]
    trainer = start(TrainConfig.from_dict({**values, "epochs": 2}), tmp_path / "run")
    trainer.train()
    assert trainer.step == trainer.config.steps
    assert (trainer.position.epoch, trainer.position.window) in ((1, 2), (2, 0))


def test_shards_of_another_run_are_refused_on_resume(shards, tmp_path) -> None:
    start(changed(shards, steps=2), tmp_path / "run").train()
    text = TrainConfig(train_tsv=write_pairs(tmp_path / "o.tsv", PAIRS[:200]), tokenizer="bytes", max_len=64)
    prepare(text, tmp_path / "other", shards=5, processes=1)
    before = contents(tmp_path / "run")
    with pytest.raises(ValueError, match=r"other .*297 examples.*198 examples"):
        start(changed(shards, train_data=str(tmp_path / "other")), tmp_path / "run", resume=True)
    assert contents(tmp_path / "run") == before


def test_another_tokenizer_is_refused(shards, tmp_path) -> None:
    train_bpe(["some text"], 20).save(tmp_path)
    with pytest.raises(ValueError, match=r"tokenizer .*--tokenizer"):
        load_data(changed(shards, tokenizer=str(tmp_path)))
    load_data(changed(shards, tokenizer=str(tmp_path / "data")))
    (tmp_path / "data" / "tokenizer.json").write_bytes((tmp_path / "tokenizer.json").read_bytes())
    with pytest.raises(ValueError, match=r"tokenizer .*another, that of .*data"):
        start(shards, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"max_len": 5}, r"\bmax_len\b"),
        ({"model": "gpt", "settings": {}}, "pairs"),
        ({"data_weights": "1,2"}, r"\bdata_weights\b"),
    ],
)
def test_settings_that_do_not_fit_the_shards(shards, change, named) -> None:
    with pytest.raises(ValueError, match=named):
        load_data(changed(shards, **change))


def test_two_kinds_of_data_and_validation_beside_shards(shards, config) -> None:
    for other in ({"train_tsv": config.train_tsv}, {"val_tsv": config.val_tsv}):
        with pytest.raises(ValueError, match=r"train_data"):
            changed(shards, **other)


def test_settings_that_the_shards_fix_are_reported(shards) -> None:
    found = unused(changed(shards, min_chars=3), ["min_chars", "vocab_size", "train_data", "shards_at_once"])
    assert [line.partition(" ")[0] for line in found] == ["min_chars", "vocab_size"]


def test_the_commands(tmp_path, capsys, ran) -> None:
    # A BPE of its own, a text for a gpt, and validation data that are named.
    text = "".join(f"the line {i} of a text\n" for i in range(300))
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "v.txt").write_text(text[:500])
    data, run = str(tmp_path / "data"), str(tmp_path / "run")
    prepare_it = ["prepare", "--out", data, "--train_text", f"{tmp_path}/a.txt", "--val_text", f"{tmp_path}/v.txt"]
    assert main([*prepare_it, "--vocab_size", "40", "--seqlen", "16", "--shards", "3", "--processes", "1"]) == 0
    assert "3 shards" in capsys.readouterr().out
    assert json.loads((tmp_path / "data" / "index.json").read_text())["validation_characters"] == 500
    sizes = [word for name in ("d_model", "d_ff") for word in (f"--model.{name}", "16")]
    train = ["train", run, "--model", "gpt", "--train_data", data, "--steps", "3", "--device", "cpu", *sizes]
    assert "--seqlen 16" in ran(*train, "--seqlen", "8", code=1).err
    assert main([*train, "--seqlen", "16", "--model.num_heads", "2", "--model.num_layers", "1"]) == 0
    assert "train_tsv" in ran("prepare", "--out", data, code=1).err
