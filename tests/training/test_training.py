"""A run resumes as if it had never stopped, weighs tokens alike, and loses nothing when something breaks."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import threading
from pathlib import Path

import pytest
import torch

from fastformer.data import collate, plan_epoch
from fastformer.training import TrainConfig, start
from fastformer.training import checkpoint as checkpointing
from fastformer.training.build import build_model, load_config
from fastformer.training.checkpoint import average_weights, checkpoints, latest_checkpoint, load_checkpoint
from fastformer.training.evaluate import lengths_of, model_loss
from fastformer.training.schedule import FLOOR, learning_rate

SMALL = {"d_model": 32, "d_ff": 64, "num_heads": 4, "num_encoder_layers": 1, "num_decoder_layers": 1}
PAIRS = [(f"{'a' * (i % 7 + 1)} {i % 10}", f"{i % 10} {'b' * (i % 5 + 1)}") for i in range(200)]


@pytest.fixture
def config(tmp_path) -> TrainConfig:
    (tmp_path / "train.tsv").write_text("".join(f"{s}\t{t}\n" for s, t in PAIRS))
    (tmp_path / "val.tsv").write_text("".join(f"{s}\t{t}\n" for s, t in PAIRS[:20]))
    return TrainConfig(
        train_tsv=str(tmp_path / "train.tsv"),
        val_tsv=str(tmp_path / "val.tsv"),
        settings=dict(SMALL),
        tokenizer="bytes",
        max_tokens=128,
        steps=12,
        warmup=4,
        log_every=1,
        val_examples=0,
        max_len=64,
        device="cpu",
    )


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "train"]


def test_resume_equals_an_uninterrupted_run(config, tmp_path) -> None:
    # Dropout, EMA and the position within an epoch all have to come back.
    config.ema, config.save_every, config.schedule = 0.9, 5, "constant"
    whole = start(config, tmp_path / "whole")
    whole.train()
    start(_with(config, steps=5), tmp_path / "parts").train()
    resumed = start(config, tmp_path / "parts", resume=True)
    assert resumed.step == 5
    resumed.train()
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[name]), name
    assert torch.equal(whole.ema.module.output_weight, resumed.ema.module.output_weight)


def _with(config: TrainConfig, **changes) -> TrainConfig:
    return TrainConfig.from_dict(config.to_dict() | changes)


def gradient(model, examples, plan, packed: bool) -> torch.Tensor:
    batches = [collate([examples[i] for i in batch], packed=packed) for batch in plan]
    tokens = sum(batch.num_target_tokens for batch in batches)
    model.zero_grad()
    for batch in batches:
        (model_loss(model, batch) / tokens).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def test_accumulation_and_packing_leave_the_gradient(config, tmp_path) -> None:
    config.settings |= {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
    trainer = start(config, tmp_path / "run")
    examples = trainer.data.train[:32]
    one = gradient(trainer.model, examples, [list(range(32))], packed=False)
    for plan, packed in (([list(range(i, i + 4)) for i in range(0, 32, 4)], False), ([list(range(32))], True)):
        other = gradient(trainer.model, examples, plan, packed)
        assert (one - other).norm() < 1e-5 * one.norm()
    unequal = [list(range(1)), list(range(1, 32))]  # a mean of batch means would weigh the first example 31 times
    assert (one - gradient(trainer.model, examples, unequal, False)).norm() < 1e-5 * one.norm()


def test_gradient_checkpointing_changes_nothing(config, tmp_path) -> None:
    config.steps = 3
    start(config, tmp_path / "a").train()
    start(_with(config, checkpointing=True), tmp_path / "b").train()
    for a, b in zip(losses(tmp_path / "a"), losses(tmp_path / "b"), strict=True):
        assert abs(a - b) < 1e-5


@pytest.mark.parametrize("cut", [0, 10, 60, 1000, -1])
def test_a_cut_checkpoint_falls_back_to_the_one_before(config, tmp_path, cut, caplog) -> None:
    config.save_every, config.steps = 2, 4
    start(config, tmp_path / "run").train()
    newest = checkpoints(tmp_path / "run")[-1]
    newest.write_bytes(newest.read_bytes()[:cut])
    with caplog.at_level(logging.WARNING):
        path, state = latest_checkpoint(tmp_path / "run")
    assert state["counters"]["step"] == 2 and path != newest
    assert "is damaged or cut short" in caplog.text and "going back to the checkpoint before" in caplog.text
    resumed = start(config, tmp_path / "run", resume=True)
    assert resumed.step == 2


def test_a_flipped_byte_is_noticed(config, tmp_path) -> None:
    config.steps = 1
    start(config, tmp_path / "run").train()
    path = checkpoints(tmp_path / "run")[-1]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="damaged"):
        load_checkpoint(path)
    with pytest.raises(ValueError, match="every checkpoint in .* is damaged"):
        start(config, tmp_path / "run", resume=True)


def test_a_full_disk_keeps_what_was_there(config, tmp_path, monkeypatch) -> None:
    config.steps = 2
    trainer = start(config, tmp_path / "run")
    trainer.train()
    before = checkpoints(tmp_path / "run")[-1].read_bytes()

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpointing.os, "fsync", full)
    with pytest.raises(OSError, match="could not write .*No space left.*what was saved before is whole"):
        trainer.save()
    assert checkpoints(tmp_path / "run")[-1].read_bytes() == before
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))


def test_nan_stops_and_keeps_the_last_good_checkpoint(config, tmp_path) -> None:
    config.save_every = 2
    trainer = start(config, tmp_path / "run")
    update = trainer._update

    def broken(batches):
        if trainer.step == 5:
            with torch.no_grad():
                trainer.model.output_weight.fill_(math.nan)
        return update(batches)

    trainer._update = broken
    with pytest.raises(RuntimeError, match="the loss became nan at update 6.*step-00000004.*Lower lr"):
        trainer.train()
    _, state = latest_checkpoint(tmp_path / "run")
    assert all(weight.isfinite().all() for weight in state["model"].values())


@pytest.mark.skipif(os.name != "posix", reason="signals are POSIX")
def test_interrupt_saves_and_ends(config, tmp_path) -> None:
    trainer = start(_with(config, steps=100_000), tmp_path / "run")
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    trainer.train()
    assert trainer.interrupted and 0 < trainer.step < 100_000
    assert latest_checkpoint(tmp_path / "run")[1]["counters"]["step"] == trainer.step


def test_keep_last_and_average(config, tmp_path) -> None:
    config.save_every, config.keep_last, config.average_last = 2, 2, 2
    trainer = start(config, tmp_path / "run")
    trainer.train()
    kept = checkpoints(tmp_path / "run")
    assert [path.stem for path in kept] == ["step-00000010", "step-00000012"]
    first, second = (load_checkpoint(path)["model"] for path in kept)
    for name, weight in average_weights(kept).items():
        assert torch.allclose(weight, (first[name].double() + second[name].double()).float() / 2)


def test_validation_improves_and_the_result_loads(config, tmp_path) -> None:
    from fastformer.data import load_tokenizer
    from fastformer.generation import Translator

    config.steps, config.val_every, config.val_examples = 30, 15, 5
    trainer = start(config, tmp_path / "run")
    scores = trainer.train()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    nll = [line["nll"] for line in lines if line["kind"] == "validation"]
    assert len(nll) == 2 and nll[1] < nll[0] < math.log(259)
    assert scores.bleu is None or "tok:13a" in scores.signatures["bleu"]
    assert load_config(tmp_path / "run").to_dict() == config.to_dict()
    Translator.from_pretrained(tmp_path / "run", load_tokenizer(tmp_path / "run")).translate(["aa 3"], max_new_tokens=4)


@pytest.mark.parametrize("batching", ["random", "bucketed", "packed"])
def test_batchings_train(config, tmp_path, batching) -> None:
    config.steps, config.batching = 2, batching
    start(config, tmp_path / "run").train()
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-2])
    assert (line["padding"] == 0.0) == (batching == "packed")


def test_gpt_and_lstm_train(config, tmp_path) -> None:
    (tmp_path / "text").write_text("to be or not to be that is the question\n" * 40)
    gpt = TrainConfig(
        model="gpt",
        train_text=str(tmp_path / "text"),
        tokenizer="bytes",
        seqlen=32,
        max_tokens=256,
        steps=40,
        warmup=5,
        lr=1e-2,
        settings={"d_model": 32, "num_layers": 1, "num_heads": 4},
        device="cpu",
    )
    scores = start(gpt, tmp_path / "gpt").train()
    assert scores.nll < 3.0 < math.log(259)
    lstm = _with(config, model="lstm", batching="bucketed", settings={"d_model": 16}, steps=2)
    start(lstm, tmp_path / "lstm").train()


def test_bf16_autocast_trains(config, tmp_path) -> None:
    config.precision, config.steps = "bf16", 3
    start(config, tmp_path / "run").train()
    assert all(math.isfinite(loss) for loss in losses(tmp_path / "run"))


def test_early_stopping(config, tmp_path) -> None:
    config.lr, config.val_every, config.patience, config.steps = 1e-12, 1, 2, 50
    config.val_examples = 1  # exact match stays 0
    trainer = start(config, tmp_path / "run")
    trainer.train()
    assert trainer.step < 50


def test_schedules() -> None:
    options = {"lr": 2.0, "warmup": 8000, "steps": 300_000, "d_model": 512}
    # tensor2tensor's peak and later values, data-and-training of the sources
    assert learning_rate(8000, schedule="t2t", **options) == pytest.approx(9.882e-4, rel=1e-3)
    assert learning_rate(100_000, schedule="t2t", **options) == pytest.approx(2.80e-4, rel=2e-3)
    paper = {"lr": 1.0, "warmup": 4000, "steps": 100_000, "d_model": 512}
    assert learning_rate(4000, schedule="noam", **paper) == pytest.approx(6.988e-4, rel=1e-3)
    assert learning_rate(1, schedule="noam", **paper) == pytest.approx(6.988e-4 / 4000, rel=1e-3)
    ours = {"lr": 1e-3, "warmup": 10, "steps": 110, "d_model": 64}
    for schedule in ("linear", "cosine"):
        assert learning_rate(5, schedule=schedule, **ours) == pytest.approx(5e-4)
        assert learning_rate(110, schedule=schedule, **ours) == pytest.approx(FLOOR * 1e-3)
    assert learning_rate(60, schedule="linear", **ours) == pytest.approx((1 + FLOOR) / 2 * 1e-3)
    assert learning_rate(100, schedule="constant", **ours) == 1e-3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"modle": "gpt"}, "unknown setting 'modle'; did you mean 'model'"),
        ({"schedule": "linar"}, "expected schedule out of .*did you mean 'linear'"),
        ({"steps": 0}, "expected steps of at least 1, got 0"),
        ({"steps": 1.5}, "expected steps to be an integer, got 1.5"),
        ({"lr": "fast"}, "expected lr to be a number, got 'fast'"),
        ({"lr": float("nan")}, "expected lr to be a number, got nan"),
        ({"clip": -1.0}, "expected clip of at least 0"),
        ({"checkpointing": "yes"}, "expected checkpointing to be true or false"),
        ({"train_tsv": 3}, "expected train_tsv to be text, got 3"),
        ({"settings": "d_model"}, "expected settings to be a mapping"),
        ({"model": "lstm"}, "expected batching bucketed or random for the LSTM"),
        ({"average_last": 5, "save_every": 0}, "expected save_every above 0"),
        ({"label_smoothing": 1.0}, r"label_smoothing in \[0, 1\)"),
        ({"task": "letters"}, r"expected task out of \(None, 'numbers'\), got 'letters'"),
    ],
)
def test_config_errors(changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig.from_dict(changes)


def test_settings_take_the_numbers_that_yaml_reads_as_text() -> None:
    config = TrainConfig.from_dict(
        {"lr": "2e-3", "steps": 5.0, "clip": 1, "settings": {"dropout": "1e-1", "norm": "rms"}}
    )
    assert (config.lr, config.steps, config.clip) == (2e-3, 5, 1.0) and isinstance(config.clip, float)
    assert config.settings == {"dropout": 0.1, "norm": "rms"} and isinstance(config.steps, int)


def test_run_errors(config, tmp_path) -> None:
    with pytest.raises(ValueError, match="expected data to train on, got none"):
        start(TrainConfig(), tmp_path / "a")
    with pytest.raises(ValueError, match="has no checkpoints"):
        start(config, tmp_path / "b", resume=True)
    config.steps = 1
    start(config, tmp_path / "run").train()
    with pytest.raises(ValueError, match="holds a run already: give --resume"):
        start(config, tmp_path / "run")
    with pytest.raises(ValueError, match="of another model than the settings describe"):
        start(_with(config, settings=SMALL | {"d_model": 64}), tmp_path / "run", resume=True)
    with pytest.raises(ValueError, match="did you mean 'd_model'"):
        build_model(_with(config, settings={"dmodel": 3}), 10)
    with pytest.raises(ValueError, match="every training example is longer than max_len 2"):
        start(_with(config, max_len=2), tmp_path / "c")


def test_long_examples_are_left_out_and_counted(config, tmp_path, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        trainer = start(_with(config, max_len=8), tmp_path / "run")
    assert 0 < trainer.data.dropped < 200 and f"left out {trainer.data.dropped} examples" in caplog.text
    assert int(lengths_of(trainer.data.train).max()) <= 8
    assert len(plan_epoch(lengths_of(trainer.data.train), max_tokens=64, batching="packed", seed=0, epoch=0)) > 1
