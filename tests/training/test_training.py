"""A run resumes as if it had never stopped, weighs tokens alike, and loses nothing when something breaks."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from fastformer import files
from fastformer.data import collate, plan_epoch, train_bpe
from fastformer.generation import Translator
from fastformer.generation.inputs import pad
from fastformer.run_folder import load_model
from fastformer.training import TrainConfig, start
from fastformer.training.build import build_model
from fastformer.training.checkpoint import average_weights, checkpoints, latest_checkpoint, load_checkpoint
from fastformer.training.evaluate import lengths_of, model_loss
from fastformer.training.schedule import FLOOR, learning_rate
from fastformer.training.settings import load_config, run_config

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


class Crash(Exception):
    pass


def test_resume_after_a_crash_between_lines_and_checkpoints(config, tmp_path) -> None:
    config.log_every, config.save_every, config.ema = 3, 5, 0.9
    start(config, tmp_path / "whole").train()
    trainer = start(config, tmp_path / "parts")
    update = trainer._update

    def crash(batches):
        if trainer.step == 9:
            raise Crash
        return update(batches)

    trainer._update = crash
    with pytest.raises(Crash):
        trainer.train()
    with open(tmp_path / "parts" / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "ki')  # what a crash leaves of a line
    resumed = start(config, tmp_path / "parts", resume=True)
    assert resumed.step == 5
    resumed.train()
    whole, parts = (
        [json.loads(line) for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]
        for run in ("whole", "parts")
    )
    assert [line["step"] for line in parts] == [3, 6, 9, 12, 12]
    for key in ("step", "loss", "nll", "lr", "grad_norm", "padding"):
        assert [line.get(key) for line in whole] == [line.get(key) for line in parts], key


def test_a_finished_run_makes_no_further_update(config, tmp_path) -> None:
    config.steps = 2
    start(config, tmp_path / "run").train()
    trainer = start(config, tmp_path / "run", resume=True)
    trainer.train()
    assert trainer.step == 2 and losses(tmp_path / "run") == [loss for _, loss in trainer.losses]


@pytest.mark.slow
@pytest.mark.parametrize("batching", ["packed", "bucketed"])
def test_kill_9_and_resume_equal_an_uninterrupted_run(config, tmp_path, batching) -> None:
    config.steps, config.save_every, config.batching = 100, 10, batching
    start(config, tmp_path / "whole").train()
    (tmp_path / "settings.yaml").write_text(json.dumps(config.to_dict()))
    command = [sys.executable, "-m", "fastformer.cli", "train", str(tmp_path / "killed")]
    process = subprocess.Popen([*command, "--config", str(tmp_path / "settings.yaml")], stdout=subprocess.DEVNULL)
    while not (tmp_path / "killed" / "checkpoints" / "step-00000050.pt").exists():
        assert process.poll() is None
        time.sleep(0.001)
    process.kill()
    process.wait()
    done = latest_checkpoint(tmp_path / "killed")[1]["counters"]["step"]
    assert 40 <= done < 100
    subprocess.run([*command, "--resume"], check=True, stdout=subprocess.DEVNULL)
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole") and len(losses(tmp_path / "whole")) == 100


def _with(config: TrainConfig, **changes) -> TrainConfig:
    return dataclasses.replace(config, **changes)


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


def test_a_checkpoint_cut_anywhere_falls_back_to_the_one_before(config, tmp_path, caplog) -> None:
    config.save_every, config.steps = 2, 4
    start(config, tmp_path / "run").train()
    newest = checkpoints(tmp_path / "run")[-1]
    data = newest.read_bytes()
    for cut in [*range(70), *torch.randint(len(data), (30,)).tolist(), len(data) - 1]:
        newest.write_bytes(data[:cut])
        caplog.clear()
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

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="could not write .*No space left.*what was saved before is whole"):
        trainer.save()
    assert checkpoints(tmp_path / "run")[-1].read_bytes() == before
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))


@pytest.mark.skipif(os.name != "posix", reason="file size limits are POSIX")
def test_a_write_that_ends_midway_keeps_what_was_there(config, tmp_path) -> None:
    import resource

    config.steps = 2
    trainer = start(config, tmp_path / "run")
    trainer.train()
    files = [*(tmp_path / "run" / "checkpoints").iterdir(), tmp_path / "run" / "model.safetensors"]
    before = [file.read_bytes() for file in files]
    with torch.no_grad():
        trainer.model.output_weight.zero_()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:  # the system refuses the rest of a file, as it does when the disk is full
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limits[1]))
        with pytest.raises(OSError, match="could not write"):
            trainer.save()
        with pytest.raises(OSError, match="could not write"):
            trainer.model.save_pretrained(tmp_path / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [file.read_bytes() for file in files] == before
    assert not list((tmp_path / "run").glob("**/.*.tmp"))


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
    with pytest.raises(RuntimeError, match="the loss became nan at update 6.*step-00000004.*--resume and a lower --lr"):
        trainer.train()
    _, state = latest_checkpoint(tmp_path / "run")
    assert all(weight.isfinite().all() for weight in state["model"].values())


def test_an_infinite_gradient_is_never_saved(config, tmp_path) -> None:
    # The loss of that update is still finite, and its checkpoint would be the last one.
    config.save_every = 2
    trainer = start(config, tmp_path / "run")
    update = trainer._update

    def broken(batches):
        loss, norm = update(batches)
        if trainer.step == 5:
            with torch.no_grad():
                trainer.model.output_weight.fill_(math.nan)
            norm = torch.tensor(math.inf)
        return loss, norm

    trainer._update = broken
    with pytest.raises(RuntimeError, match="the gradient's norm became inf at update 6.*step-00000004"):
        trainer.train()
    path, state = latest_checkpoint(tmp_path / "run")
    assert path.stem == "step-00000004" and all(weight.isfinite().all() for weight in state["model"].values())


@pytest.mark.skipif(os.name != "posix", reason="signals are POSIX")
def test_interrupt_saves_and_ends(config, tmp_path) -> None:
    trainer = start(_with(config, steps=100_000), tmp_path / "run")
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    trainer.train()
    assert trainer.interrupted and 0 < trainer.step < 100_000
    assert latest_checkpoint(tmp_path / "run")[1]["counters"]["step"] == trainer.step


def test_ema_forgets_the_random_weights(config, tmp_path) -> None:
    config.ema, config.steps, config.schedule = 0.999, 4, "constant"
    trainer = start(config, tmp_path / "run")
    expected = trainer.model.output_weight.detach().clone()
    move = trainer.ema.update_parameters

    def follow(model):
        move(model)
        if trainer.step == 0:
            expected.copy_(model.output_weight)
        else:  # decays of 2/11, 3/12, ... instead of 0.999
            decay = (1 + trainer.step) / (10 + trainer.step)
            expected.mul_(decay).add_(model.output_weight.detach() * (1 - decay))

    trainer.ema.update_parameters = follow
    trainer.train()
    assert torch.allclose(trainer.ema.module.output_weight, expected, atol=1e-7, rtol=1e-5)
    assert not torch.equal(expected, trainer.model.output_weight)


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

    config.steps, config.val_every, config.val_examples = 30, 15, 5
    trainer = start(config, tmp_path / "run")
    scores = trainer.train()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    nll = [line["nll"] for line in lines if line["kind"] == "validation"]
    assert len(nll) == 2 and nll[1] < nll[0] < math.log(259)
    assert "tok:13a" in scores.signatures["bleu_signature"] and "nc:6" in scores.signatures["chrf_signature"]
    assert load_config(tmp_path / "run").to_dict() == config.to_dict()
    Translator.from_pretrained(tmp_path / "run", load_tokenizer(tmp_path / "run")).translate(["aa 3"], max_new_tokens=4)


@pytest.mark.parametrize("batching", ["random", "bucketed", "packed"])
def test_batchings_train(config, tmp_path, batching) -> None:
    config.steps, config.batching = 2, batching
    start(config, tmp_path / "run").train()
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-2])
    assert (line["padding"] == 0.0) == (batching == "packed")


def test_gpt_trains(config, tmp_path) -> None:
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
    assert scores.nll_per_character == pytest.approx(scores.nll, rel=1e-2)  # a byte is a character here


@pytest.mark.parametrize("score", ["dot", "general", "concat"])
def test_lstm_trains_and_translates(config, tmp_path, score) -> None:
    settings = {"d_model": 16, "score": score}
    config = _with(config, model="lstm", batching="bucketed", settings=settings, steps=2, val_examples=3)
    scores = start(config, tmp_path / "lstm").train()
    assert scores.bleu is not None
    model, tokenizer = load_model(tmp_path / "lstm")
    translator = Translator(model, tokenizer)
    texts = ["aa 3", "a 1", "aaaa 7"]
    greedy = model.greedy(pad([translator.encode(text) for text in texts]), 12)
    assert translator.translate(texts, max_new_tokens=12) == [tokenizer.decode(row) for row in greedy.tolist()]
    assert len(translator.translate(texts, max_new_tokens=12, num_beams=3)) == 3
    source, target, weights = translator.attention("aa 3")
    assert weights.shape == (1, 1, len(target), len(source)) and (weights.sum(-1) - 1).abs().max() < 1e-5


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


def test_run_errors(config, tmp_path) -> None:
    with pytest.raises(ValueError, match="expected data to train on, got none"):
        start(TrainConfig(), tmp_path / "a")
    with pytest.raises(ValueError, match="has no checkpoints"):
        start(config, tmp_path / "b", resume=True)
    config.steps = 1
    start(config, tmp_path / "run").train()
    with pytest.raises(ValueError, match="holds a run already: give --resume"):
        start(config, tmp_path / "run")
    tsv = Path(config.train_tsv)
    tsv.write_text(tsv.read_text() + "one more\tline\n")
    with pytest.raises(ValueError, match=r"200 examples of .*, got 201 examples of .*give the same files"):
        start(config, tmp_path / "run", resume=True)
    tsv.write_text("".join(f"{s}\t{t}\n" for s, t in PAIRS))
    assert run_config(tmp_path / "run", {"lr": 1e-4, "steps": 7}, True).lr == 1e-4
    with pytest.raises(ValueError, match="a run that goes on keeps its seed: expected 0, got 3"):
        start(_with(config, seed=3), tmp_path / "run", resume=True)
    with pytest.raises(ValueError, match="did you mean 'd_model'"):
        build_model(_with(config, settings={"dmodel": 3}), 10)
    with pytest.raises(ValueError, match="every training example is longer than max_len 2"):
        start(_with(config, max_len=2), tmp_path / "c")
    (tmp_path / "long.tsv").write_text("x" * 100 + "\ty\n")
    with pytest.raises(ValueError, match="every validation example is longer than max_len 64"):
        start(_with(config, val_tsv=str(tmp_path / "long.tsv")), tmp_path / "d")
    with pytest.raises(ValueError, match="expected train_source and train_target together, got train_source alone"):
        start(_with(config, train_tsv=None, train_source="a"), tmp_path / "e")
    with pytest.raises(ValueError, match="expected checkpointing off for model lstm"):
        start(_with(config, model="lstm", batching="random", settings={}, checkpointing=True), tmp_path / "f")
    with pytest.raises(ValueError, match="expected a device that this PyTorch can use, got 'gpu7'"):
        start(_with(config, device="gpu7"), tmp_path / "g")


def test_run_folders_of_another_kind_or_cut_short(config, tmp_path) -> None:
    config.steps = 1
    start(config, tmp_path / "run").train()
    with pytest.raises(ValueError, match=r"expected a folder of GPT, got one of 'Transformer'.*fastformer translate"):
        load_model(tmp_path / "run", ("GPT",))
    for name in ("model.safetensors", "config.json", "tokenizer.json", "config.yaml"):
        file = tmp_path / "run" / name
        data = file.read_bytes()
        for cut in (0, len(data) // 2, len(data) - 5):
            file.write_bytes(data[:cut])
            with pytest.raises(ValueError, match=name):
                load_model(tmp_path / "run") if name != "config.yaml" else load_config(tmp_path / "run")
        file.write_bytes(data)
    train_bpe(["one two three"], 20).save(tmp_path / "run")
    with pytest.raises(ValueError, match="expected a tokenizer of 259 ids beside the model"):
        load_model(tmp_path / "run")


def test_long_examples_are_left_out_and_counted(config, tmp_path, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        trainer = start(_with(config, max_len=8), tmp_path / "run")
    dropped = len(PAIRS) - len(trainer.data.train)
    assert 0 < dropped < 200 and f"left out {dropped} training examples" in caplog.text
    assert int(lengths_of(trainer.data.train).max()) <= 8
    assert len(plan_epoch(lengths_of(trainer.data.train), max_tokens=64, batching="packed", seed=0, epoch=0)) > 1
