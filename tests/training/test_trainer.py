"""The loop: what an update is, what is kept and saved, and that stopping and going on change nothing."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from fastformer.data import collate, load_tokenizer
from fastformer.generation import Translator, generate
from fastformer.generation.inputs import pad
from fastformer.models.pretrained import read_notes
from fastformer.run_folder import load_model
from fastformer.run_folder.checkpoint import average_weights, checkpoints, latest_checkpoint, load_checkpoint, step_of
from fastformer.training import Trainer, start
from fastformer.training import trainer as module
from fastformer.training.config import TrainConfig
from fastformer.training.evaluate import Scores, negative_log_likelihood
from fastformer.training.schedule import learning_rate
from fastformer.training.settings import load_config
from fastformer.training.trainer import DivergedError
from tests.training.tiny import SIZES, Crash, changed, contents, lines, losses

NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}


def weights(trainer: Trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()]).clone()


def descend(trainer: Trainer, *batches, packed: bool = False) -> tuple[torch.Tensor, float, float]:
    """One update by plain gradient descent. Returns the gradient as it was applied, the loss, and the norm."""
    # With SGD at a rate of 1 the step is the gradient; a trainer itself has AdamW.
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=1.0)  # type: ignore[assignment]
    before = weights(trainer)
    examples = [[trainer.data.train[i] for i in batch] for batch in batches]
    loss, norm = trainer._update([collate(batch, packed=packed) for batch in examples])
    return (before - weights(trainer)) / trainer.optimizer.param_groups[0]["lr"], float(loss), float(norm)


# One update.


def test_every_token_of_an_update_weighs_the_same(config, tmp_path) -> None:
    config = changed(config, settings=SIZES | NO_DROPOUT, clip=0.0, lr=1.0, warmup=0, schedule="constant")
    cuts = {
        "one": [range(20)],
        "unequal": [range(1), range(1, 20)],  # a mean of batch means would weigh the first example 19 times
        "many": [range(i, i + 4) for i in range(0, 20, 4)],
        "packed": [range(7), range(7, 20)],
    }
    found = {}
    for name, batches in cuts.items():
        found[name] = descend(start(config, tmp_path / name), *batches, packed=name == "packed")
    trainer = start(config, tmp_path / "nll")
    trainer.model.train()
    expected = negative_log_likelihood(
        trainer.model, trainer.data.train[:20], max_tokens=64, packed=False, device=trainer.device
    )
    for gradient, loss, norm in found.values():
        assert (gradient - found["one"][0]).norm() < 1e-4 * found["one"][0].norm()
        assert loss == pytest.approx(expected, rel=1e-5)
        assert norm == pytest.approx(float(found["one"][0].norm()), rel=1e-4)


def test_clipping_bounds_the_update_and_shows_the_norm_before(config, tmp_path) -> None:
    config = changed(config, settings=SIZES | NO_DROPOUT, lr=1.0, warmup=0, schedule="constant")
    free, _, norm = descend(start(changed(config, clip=0.0), tmp_path / "free"), range(20))
    clipped, _, shown = descend(start(changed(config, clip=0.01), tmp_path / "clipped"), range(20))
    assert shown == pytest.approx(norm, rel=1e-5) and norm > 0.1
    assert float(clipped.norm()) == pytest.approx(0.01, rel=1e-2)
    assert torch.nn.functional.cosine_similarity(free, clipped, dim=0) > 0.999
    loose, _, _ = descend(start(changed(config, clip=1e4), tmp_path / "loose"), range(20))
    assert torch.equal(loose, free)


def test_the_optimizer_has_the_settings(config, tmp_path) -> None:
    config = changed(config, beta1=0.7, beta2=0.8, eps=1e-3, weight_decay=0.3)
    trainer = start(config, tmp_path / "run")
    (group,) = trainer.optimizer.param_groups
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.7, 0.8), 1e-3, 0.3)
    assert sum(p.numel() for p in group["params"]) == sum(p.numel() for p in trainer.model.parameters())
    assert isinstance(trainer.optimizer, torch.optim.AdamW)


@pytest.mark.parametrize("schedule", ["noam", "linear"])
def test_each_update_has_the_learning_rate_of_its_number(config, tmp_path, schedule) -> None:
    trainer = start(changed(config, schedule=schedule, lr=0.01), tmp_path / "run")
    used = []
    step = trainer.optimizer.step

    def counted(*args, **options):
        used.append(trainer.optimizer.param_groups[0]["lr"])
        return step(*args, **options)

    trainer.optimizer.step = counted
    trainer.train()
    expected = [learning_rate(n, schedule=schedule, lr=0.01, warmup=4, steps=12, d_model=16) for n in range(1, 13)]
    assert used == expected
    assert [(line["step"], line["lr"]) for line in lines(tmp_path / "run", "train")] == list(enumerate(expected, 1))


def test_label_smoothing_is_trained_with_and_not_validated_with(config, tmp_path) -> None:
    config = changed(config, settings=SIZES | NO_DROPOUT, clip=0.0, label_smoothing=0.5)
    trainer = start(config, tmp_path / "run")
    _, smoothed, _ = descend(trainer, range(20))
    plain = descend(start(changed(config, label_smoothing=0.0), tmp_path / "plain"), range(20))[1]
    spread = descend(start(changed(config, smooth_others=True), tmp_path / "others"), range(20))[1]
    assert abs(smoothed - plain) > 1e-3 and spread != smoothed
    model = trainer.model.eval()
    by_hand = negative_log_likelihood(model, trainer.data.val, max_tokens=999, packed=False, device=trainer.device)
    assert trainer.validate(model).nll == pytest.approx(by_hand, rel=1e-5)


def test_batches_of_an_update_and_of_an_epoch(config, tmp_path) -> None:
    # Groups go on across the end of an epoch: nothing is left out, nothing is seen twice.
    trainer = start(changed(config, accumulate=3), tmp_path / "run")
    tokens: list[int] = []
    total = int(trainer.lengths.sum())
    update = trainer._update

    def count(batches):
        assert len(batches) == 3
        tokens.extend(batch.num_tokens for batch in batches)
        return update(batches)

    trainer._update = count
    trainer.train()
    per_epoch, passed = [], 0
    for n in tokens:
        passed += n
        if passed >= total:
            per_epoch.append(passed)
            passed = 0
    assert len(tokens) == 36 and len(per_epoch) >= 3 and set(per_epoch) == {total}
    assert trainer.epoch == len(per_epoch) and sum(tokens) == total * len(per_epoch) + passed


def test_gradient_checkpointing_changes_nothing(config, tmp_path) -> None:
    config = changed(config, steps=3)
    start(config, tmp_path / "a").train()
    start(changed(config, checkpointing=True), tmp_path / "b").train()
    assert losses(tmp_path / "a") == pytest.approx(losses(tmp_path / "b"), abs=1e-5)


def test_bf16_autocast_trains(config, tmp_path) -> None:
    trainer = start(changed(config, precision="bf16", steps=3), tmp_path / "run")
    seen = []
    trainer.model.register_forward_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    trainer.train()
    assert all(math.isfinite(loss) for loss in losses(tmp_path / "run")) and trainer.scaler.is_enabled() is False
    plain = start(changed(config, steps=3), tmp_path / "plain")
    plain.train()
    assert losses(tmp_path / "plain") != losses(tmp_path / "run")


@pytest.mark.parametrize("batching", ["random", "bucketed", "packed"])
def test_batchings_train(config, tmp_path, batching) -> None:
    start(changed(config, steps=2, batching=batching), tmp_path / "run").train()
    assert all((line["padding"] == 0.0) == (batching == "packed") for line in lines(tmp_path / "run", "train"))


# Running averages.


def test_ema_forgets_the_random_weights_and_is_what_is_saved(config, tmp_path) -> None:
    config = changed(config, ema=0.999, steps=4, schedule="constant")
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
    scores = trainer.train()
    assert torch.allclose(trainer.ema.module.output_weight, expected, atol=1e-7, rtol=1e-5)
    assert not torch.equal(expected, trainer.model.output_weight)
    saved = load_file(tmp_path / "run" / "model.safetensors")
    for name, weight in trainer.ema.module.state_dict().items():
        assert torch.equal(saved[name], weight), name
    assert scores.nll == trainer.validate(trainer.ema.module).nll != trainer.validate(trainer.model).nll


def test_a_small_ema_decay_is_taken_as_it_is(config, tmp_path) -> None:
    trainer = start(changed(config, ema=0.05, steps=3), tmp_path / "run")
    average, new = [torch.ones(3)], [torch.zeros(3)]
    trainer._move_average(average, new, None)
    assert average[0].tolist() == pytest.approx([0.05] * 3)
    trainer.step, trainer.config.ema = 90, 0.999
    average = [torch.ones(3)]
    trainer._move_average(average, new, None)
    assert average[0].tolist() == pytest.approx([0.91] * 3)


# Validation and what is kept.


def test_validation_leaves_training_as_it_was(config, tmp_path) -> None:
    start(changed(config, val_every=0), tmp_path / "without").train()
    trainer = start(changed(config, val_every=1, val_examples=2), tmp_path / "with")
    modes = []
    validate = trainer.validate

    def counted(model):
        scores = validate(model)
        modes.append(trainer.model.training)
        return scores

    trainer.validate = counted
    trainer.train()
    assert losses(tmp_path / "with") == losses(tmp_path / "without")  # dropout came back each time
    assert [line["step"] for line in lines(tmp_path / "with", "validation")] == list(range(1, 13))
    assert [line["step"] for line in lines(tmp_path / "without", "validation")] == [12]


@pytest.mark.parametrize(("val_examples", "expected"), [(0, None), (3, 3), (99, 8)])
def test_as_many_are_translated_as_val_examples_says(config, tmp_path, monkeypatch, val_examples, expected) -> None:
    counts = []

    def count(translator, pairs, nll, num_samples):
        counts.append(len(pairs))
        return Scores(nll)

    monkeypatch.setattr(module, "translate_and_score", count)
    start(changed(config, steps=1, val_examples=val_examples), tmp_path / "run").train()
    assert counts == ([] if expected is None else [expected])


def scripted(trainer: Trainer, nll: dict[int, float], **scores: float) -> Trainer:
    """Validations say what a test wants them to say."""
    trainer.validate = lambda model: Scores(nll[trainer.step], **scores)
    return trainer


def kept(run) -> list[int]:
    return [line["step"] for line in lines(run, "validation") if line["kept"]]


def test_the_best_model_is_kept_and_named(config, tmp_path, capsys) -> None:
    run = tmp_path / "run"
    trainer = start(changed(config, val_every=3), run)
    snapshots = {}
    validate = {3: 3.0, 6: 2.0, 9: 2.0, 12: 2.5}

    def scores(model):
        snapshots[trainer.step] = {name: weight.clone() for name, weight in model.state_dict().items()}
        return Scores(validate[trainer.step])

    trainer.validate = scores
    trainer.train()
    assert kept(run) == [3, 6]  # what is only as good is not better
    saved = load_file(run / "model.safetensors")
    assert all(torch.equal(saved[name], weight) for name, weight in snapshots[6].items())
    assert read_notes(run) == {"model": "update 6", "scores": "nll 2.0000"}
    out = capsys.readouterr().out
    assert "kept update 6: nll 2.0000; best so far" in out
    assert "not kept: update 6 is better (nll 2.0000)" in out
    assert f"the model in {run} is update 6: nll 2.0000" in out


def test_numbers_are_kept_by_exact_match(tmp_path, monkeypatch) -> None:
    config = TrainConfig(task="numbers", tokenizer="bytes", settings=SIZES, steps=2, val_every=1, max_tokens=64)
    monkeypatch.setattr(
        "fastformer.training.examples.number_texts", lambda seed: ([("a", "b")] * 4, [("a", "b"), ("c", "d")])
    )
    trainer = start(config, tmp_path / "run")
    exact = {1: 0.5, 2: 0.75}
    trainer.validate = lambda model: Scores(2.0 + trainer.step, exact_match=exact[trainer.step], bleu=0.0, chrf=1.0)
    trainer.train()
    assert kept(tmp_path / "run") == [1, 2] and trainer.best.record.step == 2


def test_a_bleu_of_zero_leaves_it_to_the_likelihood(config, tmp_path) -> None:
    trainer = start(changed(config, steps=3, val_every=1, val_examples=2), tmp_path / "run")
    scripted(trainer, {1: 3.0, 2: 2.0, 3: 2.5}, bleu=0.0, chrf=0.0, exact_match=0.0).train()
    assert trainer.best.measure == "bleu" and kept(tmp_path / "run") == [1, 2]


@pytest.mark.parametrize("patience", [1, 2])
def test_patience_counts_validations_without_a_better_one(config, tmp_path, patience) -> None:
    config = changed(config, val_every=1, patience=patience, steps=9)
    nll = {1: 3.0, 2: 2.0, 3: 2.0} | dict.fromkeys(range(4, 10), 2.5)
    trainer = scripted(start(config, tmp_path / "run"), nll)
    trainer.train()
    assert trainer.step == 2 + patience and trainer.finished
    assert len(lines(tmp_path / "run", "validation")) == 2 + patience  # none twice
    again = scripted(start(changed(config, patience=patience + 1), tmp_path / "run", resume=True), nll)
    again.train()
    assert again.step == 3 + patience  # those before count


def test_a_worse_model_does_not_overwrite_the_best_after_resuming(config, tmp_path) -> None:
    run = tmp_path / "run"
    start(changed(config, val_examples=4), run).train()
    before = (run / "model.safetensors").read_bytes()
    for changes in ({"lr": 1.0, "schedule": "constant"}, {"lr": 1.0, "schedule": "constant", "val_examples": 0}):
        trainer = start(changed(config, steps=start(config, run, resume=True).step + 3, **changes), run, resume=True)
        bad = trainer.best.bad_validations
        trainer.train()
        assert trainer.best.bad_validations == bad + 1 and trainer.best.record.step == 12
    assert (run / "model.safetensors").read_bytes() == before


def test_a_better_likelihood_is_kept_after_a_run_with_bleu(config, tmp_path) -> None:
    run = tmp_path / "run"
    scripted(start(changed(config, steps=1, val_examples=2), run), {1: 3.0}, bleu=30.0).train()
    scripted(start(changed(config, steps=2), run, resume=True), {2: 2.0}).train()
    assert kept(run) == [1, 2]


@pytest.mark.parametrize("keep_last", [1, 5])
def test_average_last_is_what_the_folder_holds(config, tmp_path, capsys, keep_last) -> None:
    run = tmp_path / "run"
    trainer = start(changed(config, save_every=2, val_every=4, keep_last=keep_last, average_last=3), run)
    nll = {4: 1.0, 8: 2.0, 12: 3.0}  # the best single update is an early one: the average was asked for all the same
    scripted(trainer, nll).train()
    assert [step_of(path) for path in checkpoints(run)] == [4, 6, 8, 10, 12][-max(keep_last, 3) :]
    paths = checkpoints(run)[-3:]
    states = [load_checkpoint(path)["model"] for path in paths]
    saved = load_file(run / "model.safetensors")
    for name, weight in saved.items():
        mean = sum(state[name].double() for state in states) / 3
        assert torch.allclose(weight.double(), mean, atol=1e-7), name
    assert read_notes(run)["model"] == "the average of updates 8, 10, 12"
    assert (
        f"the model in {run} is the average of updates 8, 10, 12: nll 3.0000; the best single update, 4: nll 1.0000"
        in capsys.readouterr().out
    )
    assert [line["step"] for line in lines(run, "average")] == [12]
    assert [line["step"] for line in lines(run, "validation")] == [4, 8, 12]


def test_the_average_with_ema_is_of_the_running_averages(config, tmp_path) -> None:
    run = tmp_path / "run"
    trainer = start(changed(config, steps=4, save_every=2, average_last=2, ema=0.9), run)
    validated = []
    validate = trainer.validate

    def counted(model):
        validated.append(model)
        return validate(model)

    trainer.validate = counted
    scores = trainer.train()
    states = [load_checkpoint(path)["ema"]["module.embedding.weight"] for path in checkpoints(run)]
    saved = load_file(run / "model.safetensors")["embedding.weight"]
    assert torch.allclose(saved, (states[0] + states[1]) / 2, atol=1e-7)
    assert scores.nll == validate(load_model(run)[0]).nll and len(validated) == 2


def test_without_average_last_the_best_stays(config, tmp_path) -> None:
    trainer = start(changed(config, save_every=2, val_every=4), tmp_path / "run")
    scripted(trainer, {4: 1.0, 8: 2.0, 12: 3.0}).train()
    assert read_notes(tmp_path / "run")["model"] == "update 4"


@pytest.mark.parametrize(("keep_last", "expected"), [(1, [12]), (2, [10, 12]), (3, [5, 10, 12])])
def test_keep_last(config, tmp_path, keep_last, expected) -> None:
    start(changed(config, save_every=5, keep_last=keep_last), tmp_path / "run").train()
    assert [step_of(path) for path in checkpoints(tmp_path / "run")] == expected


# Going on.


def test_resume_equals_an_uninterrupted_run(config, tmp_path) -> None:
    # Dropout, EMA and the position within an epoch all have to come back.
    config = changed(config, ema=0.9, save_every=5, schedule="constant", accumulate=2)
    whole = start(config, tmp_path / "whole")
    whole.train()
    assert whole.epoch >= 2
    start(changed(config, steps=5), tmp_path / "parts").train()
    resumed = start(config, tmp_path / "parts", resume=True)
    assert resumed.step == 5
    resumed.train()
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert torch.equal(weights(whole), weights(resumed))
    assert torch.equal(whole.ema.module.output_weight, resumed.ema.module.output_weight)
    assert (resumed.epoch, resumed.batch, resumed.losses) == (whole.epoch, whole.batch, whole.losses)


def test_resume_after_a_crash_between_lines_and_checkpoints(config, tmp_path) -> None:
    config = changed(config, log_every=3, save_every=5, ema=0.9)
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
    assert [line["step"] for line in lines(tmp_path / "parts")] == [3, 6, 9, 12, 12]
    for key in ("step", "loss", "nll", "lr", "grad_norm", "padding"):
        assert [line.get(key) for line in lines(tmp_path / "whole")] == [
            line.get(key) for line in lines(tmp_path / "parts")
        ], key


@pytest.mark.parametrize("where", ["validate", "save_model"])
def test_a_run_that_ends_in_its_first_validation_goes_on(config, tmp_path, monkeypatch, where) -> None:
    config = changed(config, val_every=3)
    start(config, tmp_path / "whole").train()
    trainer = start(config, tmp_path / "run")

    def crash(*args, **options):
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "validate", crash) if where == "validate" else patch.setattr(module, "save_model", crash)
        with pytest.raises(Crash):
            trainer.train()
    assert [step_of(path) for path in checkpoints(tmp_path / "run")] == [3]
    start(config, tmp_path / "run", resume=True).train()
    for key in ("step", "kind", "loss", "nll", "kept"):
        assert [line.get(key) for line in lines(tmp_path / "run")] == [
            line.get(key) for line in lines(tmp_path / "whole")
        ]


@pytest.mark.parametrize("changes", [{}, {"average_last": 2, "save_every": 1}, {"patience": 1, "val_every": 1}])
def test_a_finished_run_adds_nothing(config, tmp_path, caplog, changes) -> None:
    config = changed(config, steps=3, **changes)
    run = tmp_path / "run"
    trainer = start(config, run)
    if "patience" in changes:
        scripted(trainer, {1: 1.0, 2: 2.0})
    trainer.train()
    before = contents(run)
    caplog.set_level("INFO")
    again = start(load_config(run), run, resume=True)
    assert again.train() is None and again.step == trainer.step
    assert contents(run) == before
    assert f"nothing is left to do in {run}" in caplog.text


def test_a_checkpoint_without_its_parts(config, tmp_path) -> None:
    run = tmp_path / "run"
    trainer = start(changed(config, steps=1), run)
    trainer.train()
    for part, value in (("best", None), ("losses", 3), ("meter", {}), ("rng", "x"), ("optimizer", {}), ("data", None)):
        with pytest.raises(ValueError, match="step-1.pt"):
            trainer.load_state_dict(trainer.state_dict() | {part: value}, "step-1.pt")
        state = trainer.state_dict()
        del state[part]
        with pytest.raises(ValueError, match="step-1.pt"):
            trainer.load_state_dict(state, "step-1.pt")
    other = start(changed(config, settings=SIZES | {"d_ff": 24}), tmp_path / "other")
    with pytest.raises(ValueError, match="step-1.pt is of another model than the settings describe"):
        other.load_state_dict(trainer.state_dict(), "step-1.pt")


@pytest.mark.slow
@pytest.mark.parametrize("batching", ["packed", "bucketed"])
def test_kill_9_and_resume_equal_an_uninterrupted_run(config, tmp_path, batching) -> None:
    config = changed(config, steps=100, save_every=10, batching=batching)
    start(config, tmp_path / "whole").train()
    (tmp_path / "settings.yaml").write_text(json.dumps(config.to_dict()))
    command = [sys.executable, "-m", "fastformer.cli", "train", str(tmp_path / "killed"), "--resume", "auto"]
    command += ["--config", str(tmp_path / "settings.yaml")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while not (tmp_path / "killed" / "checkpoints" / "step-00000050.pt").exists():
        assert process.poll() is None
        time.sleep(0.001)
    process.kill()
    process.wait()
    done = latest_checkpoint(tmp_path / "killed")[1]["counters"]["step"]
    assert 40 <= done < 100
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole") and len(losses(tmp_path / "whole")) == 100


# What breaks.


def broken_from(trainer: Trainer, step: int, norm: float | None = None) -> None:
    """From an update on the weights are NaN; with `norm`, after an update whose loss is still a number."""
    update = trainer._update

    def broken(batches):
        loss, found = update(batches) if norm is not None else (None, None)
        if trainer.step == step:
            with torch.no_grad():
                trainer.model.output_weight.fill_(math.nan)
            found = torch.tensor(norm) if norm is not None else None
        return (loss, found) if norm is not None else update(batches)

    trainer._update = broken


def test_nan_stops_and_keeps_the_last_good_checkpoint(config, tmp_path) -> None:
    trainer = start(changed(config, save_every=2), tmp_path / "run")
    broken_from(trainer, 5)
    with pytest.raises(
        DivergedError, match="the loss became nan at update 6.*step-00000004.*--resume and a lower --lr"
    ):
        trainer.train()
    latest = latest_checkpoint(tmp_path / "run")
    assert latest is not None
    _, state = latest
    assert all(weight.isfinite().all() for weight in state["model"].values())


def test_an_infinite_gradient_is_never_saved(config, tmp_path) -> None:
    # The loss of that update is still finite, and its checkpoint would be the last one.
    trainer = start(changed(config, save_every=2), tmp_path / "run")
    broken_from(trainer, 5, norm=math.inf)
    with pytest.raises(DivergedError, match="the gradient's norm became inf at update 6.*step-00000004"):
        trainer.train()
    latest = latest_checkpoint(tmp_path / "run")
    assert latest is not None
    path, state = latest
    assert path.stem == "step-00000004" and all(weight.isfinite().all() for weight in state["model"].values())


def test_nan_before_any_checkpoint_does_not_advise_to_resume(config, tmp_path) -> None:
    trainer = start(config, tmp_path / "run")
    broken_from(trainer, 1)
    with pytest.raises(
        DivergedError, match="update 2: .*no checkpoint was saved yet. Train again with a lower"
    ) as caught:
        trainer.train()
    assert "--resume" not in str(caught.value)
    start(config, tmp_path / "run").train()  # nothing is in the way


@pytest.mark.skipif(sys.platform == "win32", reason="file size limits are POSIX")
def test_a_write_that_ends_midway_keeps_what_was_there(config, tmp_path) -> None:
    import resource

    trainer = start(changed(config, steps=2), tmp_path / "run")
    trainer.train()
    before = contents(tmp_path / "run")
    with torch.no_grad():
        trainer.model.output_weight.zero_()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:  # the system refuses the rest of a file, as it does when the disk is full
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
        with pytest.raises(OSError, match="could not write"):
            trainer.save()
        with pytest.raises(OSError, match="could not write"):
            trainer.model.save_pretrained(tmp_path / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert contents(tmp_path / "run") == before


def test_a_line_of_the_log_is_the_mean_since_the_last_one(config, tmp_path, monkeypatch) -> None:
    trainer = start(changed(config, steps=7, log_every=3), tmp_path / "run")
    update, found = trainer._update, []

    def noted(batches):
        found.append(update(batches))
        return found[-1]

    monkeypatch.setattr(trainer, "_update", noted)
    trainer.train()
    each = [float(loss) for loss, _ in found]
    assert [step for step, _ in trainer.losses] == [3, 6, 7]
    means = [sum(each[:3]) / 3, sum(each[3:6]) / 3, each[6]]
    assert [loss for _, loss in trainer.losses] == pytest.approx(means, rel=1e-6)
    assert losses(tmp_path / "run") == [loss for _, loss in trainer.losses]


def test_every_update_is_made_in_training_mode(config, tmp_path, monkeypatch) -> None:
    trainer = start(changed(config, steps=4, val_every=2, val_examples=2), tmp_path / "run")
    trainer.model.eval()  # as one that was loaded from a folder is
    update, modes = trainer._update, []

    def noted(batches):
        modes.append({module.training for module in trainer.model.modules()})
        return update(batches)

    monkeypatch.setattr(trainer, "_update", noted)
    trainer.train()
    assert modes == 4 * [{True}]


def test_the_time_limit(config, tmp_path) -> None:
    trainer = start(changed(config, max_minutes=1.0), tmp_path / "run")
    trainer.trained_seconds = 59.0
    assert trainer._end() is None
    trainer.trained_seconds = 60.5
    trainer.train()
    assert trainer.step == 0 and trainer.finished
    del trainer
    # The minutes before a run was resumed count as well, and go on from there.
    again = start(changed(config, max_minutes=1.0, steps=2), tmp_path / "run", resume=True)
    assert again.trained_seconds == 60.5 and again._end() is not None
    again.config = changed(again.config, max_minutes=2.0)
    again.train()
    assert again.step == 2 and 60.5 < again.trained_seconds < 120


# The kinds of models.


def test_the_result_translates(config, tmp_path) -> None:
    scores = start(changed(config, steps=60, lr=1e-2, val_examples=3, val_every=30), tmp_path / "run").train()
    first, last = (line["nll"] for line in lines(tmp_path / "run", "validation"))
    assert last < first < math.log(259) and last == scores.nll
    assert "nc:6" in scores.signatures["chrf_signature"]
    translator = Translator.from_pretrained(tmp_path / "run", load_tokenizer(tmp_path / "run"))
    assert len(translator.translate(["aa 3"], max_new_tokens=4)) == 1


def test_gpt_learns_a_text_by_heart(config, tmp_path) -> None:
    (tmp_path / "text").write_text("abcdefgh" * 60)  # each letter follows from the one before, if from the right one
    gpt = TrainConfig(
        model="gpt",
        train_text=str(tmp_path / "text"),
        tokenizer="bytes",
        seqlen=16,
        max_tokens=128,
        steps=40,
        warmup=5,
        lr=2e-2,
        settings={"d_model": 16, "num_layers": 1, "num_heads": 2},
        device="cpu",
    )
    scores = start(gpt, tmp_path / "gpt").train()
    assert scores.nll < 0.5 < math.log(8)
    assert scores.nll_per_character == pytest.approx(scores.nll, rel=0.03)  # a byte is a character here
    model, tokenizer = load_model(tmp_path / "gpt")
    found = generate(model, torch.tensor([tokenizer.encode("abc")]), max_new_tokens=6)
    assert tokenizer.decode(found[0].tolist()).endswith("defgha")


@pytest.mark.parametrize("score", ["dot", "general", "concat"])
def test_lstm_trains_and_translates(config, tmp_path, score) -> None:
    settings = {"d_model": 16, "score": score}
    config = changed(config, model="lstm", batching="bucketed", settings=settings, steps=2, val_examples=3)
    assert start(config, tmp_path / "lstm").train().chrf is not None
    model, tokenizer = load_model(tmp_path / "lstm")
    translator = Translator(model, tokenizer)
    texts = ["aa 3", "a 1", "aaaa 7"]
    greedy = model.greedy(pad([translator.encode(text) for text in texts]), 12)
    assert translator.translate(texts, max_new_tokens=12) == [tokenizer.decode(row) for row in greedy.tolist()]
    source, target, attention = translator.attention("aa 3")
    assert attention.shape == (1, 1, len(target), len(source)) and (attention.sum(-1) - 1).abs().max() < 1e-5


def test_average_of_one_checkpoint_is_itself(config, tmp_path, caplog) -> None:
    start(changed(config, steps=2, save_every=5, average_last=3), tmp_path / "run").train()
    assert "there is one checkpoint alone to average" in caplog.text
    assert read_notes(tmp_path / "run")["model"] == "update 2"
    state = average_weights(checkpoints(tmp_path / "run"))
    saved = load_file(tmp_path / "run" / "model.safetensors")
    assert all(torch.equal(state[name], weight) for name, weight in saved.items())
