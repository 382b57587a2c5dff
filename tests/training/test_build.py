"""A run begins, continues, or starts from another run's model; if it can't, an error says why."""

from __future__ import annotations

import errno
import logging
import re
import shutil

import pytest
import torch

from fastformer.checkpoints import load_model
from fastformer.checkpoints.training_state import checkpoints
from fastformer.data import Example, Examples, plan_epoch
from fastformer.data.order import Order
from fastformer.training import TrainConfig, start
from fastformer.training.build import build_model, count_updates
from fastformer.training.run_config import load_config
from tests.training.tiny import PAIRS, changed, contents, write_pairs


def test_errors(config, tmp_path) -> None:
    for changes, named in (
        ({"train_tsv": None}, "train_tsv"),
        ({"train_tsv": str(tmp_path / "nowhere.tsv")}, "nowhere"),
        ({"max_len": 2}, r"\bmax_len\b"),
        ({"device": "gpu7"}, r"\bdevice\b.*gpu7"),
        ({"best_by": "bleu"}, r"\bbest_by\b"),
        ({"settings": {"dmodel": 3}}, r"\bd_model\b"),
        (
            {"model": "lstm", "batching": "random", "settings": {}, "checkpointing": True},
            r"\bcheckpointing\b.*\blstm\b",
        ),
        (
            {"model": "lstm", "batching": "random", "settings": {}, "precision": "fp16"},
            r"\bprecision\b.*\bLSTM\b.*\bfp16\b",
        ),
    ):
        with pytest.raises(ValueError, match=named):
            start(changed(config, **changes), tmp_path / "run")
        assert not (tmp_path / "run").exists()  # a mistake leaves nothing that is in the way
    with pytest.raises(ValueError, match="run"):
        start(config, tmp_path / "run", resume=True)
    with pytest.raises(ValueError, match=r"\brun folder\b"):
        start(config, "")
    with pytest.raises(ValueError, match=r"\bzero\b"):
        start(config, f"{tmp_path}/\0")
    with pytest.raises(ValueError, match=r"\bresume\b.*'maybe'"):
        start(config, tmp_path / "run", resume="maybe")


def test_a_folder_with_a_run_is_not_overwritten(config, tmp_path) -> None:
    run = tmp_path / "run"
    start(changed(config, steps=1), run).train()
    with pytest.raises(ValueError, match="--resume"):
        start(config, run)
    shutil.rmtree(run / "checkpoints")
    for resume in (False, "auto"):  # a model that the user keeps is not overwritten either
        with pytest.raises(ValueError, match="--resume"):
            start(config, run, resume=resume)


def test_all_checkpoints_damaged(config, tmp_path) -> None:
    run = tmp_path / "run"
    start(changed(config, steps=1), run).train()
    checkpoints(run)[0].write_bytes(b"")
    for resume in (True, "auto"):
        with pytest.raises(ValueError, match="checkpoints"):
            start(config, run, resume=resume)


def test_going_on_from_another_folder(config, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    start(changed(config, steps=1, train_tsv="train.tsv", val_tsv="val.tsv"), "run").train()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    start(changed(load_config("../run"), steps=2), "../run", resume=True).train()


def test_the_remains_of_a_killed_write_are_removed(config, tmp_path) -> None:
    run = tmp_path / "run"
    start(changed(config, steps=1), run).train()
    left = [run / ".model.safetensors.0123456789abcdef.tmp", run / "checkpoints" / ".step-2.pt.0123456789abcdef.tmp"]
    for file in left:
        file.touch()
    start(config, run, resume=True)
    assert not any(file.exists() for file in left)


def test_a_start_that_failed_midway_is_repeated(config, tmp_path, monkeypatch) -> None:
    def full(*given: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="space"):
        patch.setattr("fastformer.training.build.save_config", full)
        start(config, tmp_path / "run")
    start(changed(config, steps=1), tmp_path / "run").train()


# Epochs.


@pytest.mark.parametrize("epochs", [0.5, 1, 2.5])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_epochs_are_passes_over_the_data(config, tmp_path, caplog, epochs, accumulate) -> None:
    config = changed(config, accumulate=accumulate)
    del (values := config.to_dict())["steps"]
    with caplog.at_level(logging.INFO):
        trainer = start(TrainConfig.from_dict(values | {"epochs": epochs}), tmp_path / "run")
    lengths = trainer.data.train.lengths
    plans = [plan_epoch(lengths, max_tokens=64, batching="packed", seed=0, epoch=epoch) for epoch in range(3)]
    batches = sum(len(plan) for plan in plans[: int(epochs)]) + len(plans[int(epochs)]) * (epochs % 1)
    assert trainer.config.steps == max(1, int(batches / accumulate))
    assert re.search(f"{epochs:g} epochs? (is|are) {trainer.config.steps} updates?\n", caplog.text)
    saved = load_config(tmp_path / "run")
    assert (saved.steps, saved.epochs) == (trainer.config.steps, 0)


def test_less_than_an_update_counts_as_one(config) -> None:
    order = Order(Examples([Example([3], [3])]), max_tokens=64, batching="packed", seed=0)
    assert count_updates(changed(config, epochs=0.1), order) == 1


# Fine-tuning.


@pytest.fixture
def source(config, tmp_path):
    """Returns a run with a BPE and its own sizes."""
    config = changed(config, tokenizer="bpe", vocab_size=40, steps=2, preset="tiny")
    start(config, tmp_path / "source").train()
    return tmp_path / "source"


def plain(config: TrainConfig, **changes) -> TrainConfig:
    """Returns settings without sizes and a tokenizer."""
    return changed(config, settings={}, tokenizer="bpe", **changes)


def test_init_from_begins_with_the_other_model_on_other_data(config, tmp_path, source) -> None:
    config = plain(config, train_tsv=write_pairs(tmp_path / "other.tsv", PAIRS[5:30]), init_from=str(source))
    trainer = start(config, tmp_path / "run")
    model, tokenizer = load_model(source)
    assert trainer.model.config == model.config and trainer.model.training
    for name, weight in model.state_dict().items():
        assert torch.equal(trainer.model.state_dict()[name], weight), name
    assert trainer.data.tokenizer.encode("aaa 3") == tokenizer.encode("aaa 3")
    assert trainer.step == 0 and not trainer.optimizer.state and trainer.best.record is None
    trainer.train()
    assert not torch.equal(trainer.model.output_weight, model.output_weight)
    shutil.rmtree(source)  # it goes on without
    resumed = start(changed(load_config(tmp_path / "run"), steps=13), tmp_path / "run", resume=True)
    assert resumed.step == 12 and resumed.model.config == model.config
    resumed.train()


def test_init_from_accepts_another_dropout_and_refuses_other_sizes(config, tmp_path, source) -> None:
    trainer = start(
        changed(plain(config, init_from=str(source)), settings={"dropout": 0.25, "d_model": 16}), tmp_path / "a"
    )
    assert trainer.model.config.dropout == 0.25 and trainer.config.settings["d_ff"] == 32
    for changes, named in (
        ({"settings": {"d_model": 64}}, r"\bd_model\b.*\b16\b.*\b64\b"),
        ({"settings": {"d_modle": 64}}, r"'d_modle'.*'d_model'"),
        ({"preset": "base"}, r"\bd_model\b.*\b16\b.*\b512\b"),
        ({"preset": "huge"}, r"\bpreset\b.*huge"),
        ({"model": "lstm", "batching": "random", "settings": {}}, r"\bmodel\b.*'transformer'.*'lstm'"),
        ({"tokenizer": "bytes"}, r"\btokenizer\b.*'bpe'.*'bytes'"),
        ({"vocab_size": 41}, r"\bvocab_size\b.*\b41\b"),
        ({"init_from": str(tmp_path / "nowhere")}, "nowhere"),
    ):
        before = contents(source)
        with pytest.raises(ValueError, match=named):
            start(changed(plain(config, init_from=str(source)), **changes), tmp_path / "b")
        assert contents(source) == before and not (tmp_path / "b").exists()


def test_init_from_keeps_the_number_of_positions(config, tmp_path, source, caplog) -> None:
    longest = load_model(source)[0].config.max_len
    with caplog.at_level(logging.INFO):
        trainer = start(plain(config, init_from=str(source), max_len=longest + 5), tmp_path / "run")
    assert trainer.config.max_len == longest and f"max_len is {longest}" in caplog.text


@pytest.mark.parametrize("kind", ["gpt", "gpt with scaled positions", "lstm"])
def test_init_from_the_other_architectures(config, tmp_path, kind) -> None:
    (tmp_path / "text").write_text("to be or not to be that is the question\n" * 10)
    data: dict[str, object]
    sizes: dict[str, object]
    if kind.startswith("gpt"):
        data = {"train_tsv": None, "val_tsv": None, "train_text": str(tmp_path / "text"), "seqlen": 16}
        sizes = {"d_model": 16, "num_layers": 1, "num_heads": 2}
        if kind != "gpt":
            factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
            scaling = {"kind": "longrope", "factor": 2.0, "original_max_position_embeddings": 256, **factors}
            sizes |= {"positions": "rotary", "rotary_scaling": scaling, "rotary_layers": [True]}
    else:
        data = {"batching": "random"}
        sizes = {"d_model": 16, "score": "dot"}
    config = changed(config, model=kind.split()[0], settings=sizes, **data, steps=1)
    start(config, tmp_path / "a").train()
    trainer = start(changed(config, settings={}, init_from=str(tmp_path / "a")), tmp_path / "b")
    model, _ = load_model(tmp_path / "a")
    assert all(torch.equal(trainer.model.state_dict()[name], weight) for name, weight in model.state_dict().items())
    trainer.train()
    start(changed(load_config(tmp_path / "b"), steps=2), tmp_path / "b", resume=True).train()


def test_the_seed_draws_the_weights(config) -> None:
    one, same, other = (build_model(changed(config, seed=seed), 259).output_weight for seed in (1, 1, 2))
    assert torch.equal(one, same) and not torch.equal(one, other)
