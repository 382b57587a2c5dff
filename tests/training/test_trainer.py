"""Tests the training loop: updates, validations that change nothing, and models that learn."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import load_file

from fastformer.checkpoints import load_model
from fastformer.data import collate, load_tokenizer
from fastformer.generation import Translator, generate
from fastformer.training import Trainer, start
from fastformer.training.config import TrainConfig
from fastformer.training.schedule import rate_of
from tests.training.tiny import SIZES, before_updates, changed, lines, losses, nll_of, weights, write_pairs

NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}


def descend(trainer: Trainer, *batches, packed: bool = False) -> tuple[torch.Tensor, float, float]:
    """Runs one update of plain gradient descent. Returns the applied gradient, the loss, and the norm."""
    # With SGD at a rate of 1 the step is the gradient; a trainer itself has AdamW.
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=1.0)  # type: ignore[assignment]
    before = weights(trainer)
    examples = [[trainer.data.train[i] for i in batch] for batch in batches]
    loss, norm = trainer.update([collate(batch, packed=packed) for batch in examples])
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
    expected = nll_of(trainer.model, trainer.data.train[:20], max_tokens=64)
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
    start(changed(config, steps=1), tmp_path / "old").train()
    config = changed(config, beta1=0.7, beta2=0.8, eps=1e-3, weight_decay=0.3)
    for trainer in (start(config, tmp_path / "new"), start(config, tmp_path / "old", resume=True)):
        (group,) = trainer.optimizer.param_groups
        assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.7, 0.8), 1e-3, 0.3)
        assert sum(p.numel() for p in group["params"]) == sum(p.numel() for p in trainer.model.parameters())
        assert isinstance(trainer.optimizer, torch.optim.AdamW)


@pytest.mark.parametrize("schedule", ["noam", "linear"])
def test_each_update_has_the_learning_rate_of_its_number(config, tmp_path, schedule) -> None:
    config = changed(config, schedule=schedule, lr=0.01)
    trainer = start(config, tmp_path / "run")
    used = []
    step = trainer.optimizer.step

    def counted(*args, **options):
        used.append(trainer.optimizer.param_groups[0]["lr"])
        return step(*args, **options)

    trainer.optimizer.step = counted
    trainer.train()
    expected = [rate_of(config, n, 16) for n in range(1, 13)]
    assert used == expected
    assert [(line["step"], line["lr"]) for line in lines(tmp_path / "run", "train")] == list(enumerate(expected, 1))


def test_label_smoothing_applies_to_training_and_not_to_validation(config, tmp_path) -> None:
    config = changed(config, settings=SIZES | NO_DROPOUT, clip=0.0, label_smoothing=0.5)
    trainer = start(config, tmp_path / "run")
    _, smoothed, _ = descend(trainer, range(20))
    plain = descend(start(changed(config, label_smoothing=0.0), tmp_path / "plain"), range(20))[1]
    spread = descend(start(changed(config, smooth_others=True), tmp_path / "others"), range(20))[1]
    assert abs(smoothed - plain) > 1e-3 and spread != smoothed
    model = trainer.model.eval()
    by_hand = nll_of(model, trainer.data.val)
    assert trainer.validate(model).nll == pytest.approx(by_hand, rel=1e-5)


def test_batches_of_an_update_and_of_an_epoch(config, tmp_path) -> None:
    # Groups go on across the end of an epoch: nothing is left out, nothing is seen twice.
    trainer = start(changed(config, accumulate=3), tmp_path / "run")
    tokens: list[int] = []
    total = int(trainer.data.train.lengths.sum())

    def count(batches):
        assert len(batches) == 3
        tokens.extend(batch.num_tokens for batch in batches)

    before_updates(trainer, count).train()
    per_epoch, passed = [], 0
    for n in tokens:
        passed += n
        if passed >= total:
            per_epoch.append(passed)
            passed = 0
    assert len(tokens) == 36 and len(per_epoch) >= 3 and set(per_epoch) == {total}
    assert trainer.position.epoch == len(per_epoch) and sum(tokens) == total * len(per_epoch) + passed


def test_gradient_checkpointing_changes_nothing(config, tmp_path) -> None:
    config = changed(config, steps=3)
    start(config, tmp_path / "a").train()
    start(changed(config, checkpointing=True), tmp_path / "b").train()
    assert losses(tmp_path / "a") == pytest.approx(losses(tmp_path / "b"), abs=1e-5)


def test_bf16_autocast_trains(config, tmp_path) -> None:
    trainer = start(changed(config, precision="bf16", steps=3), tmp_path / "run")
    trainer.train()
    assert all(math.isfinite(loss) for loss in losses(tmp_path / "run")) and trainer.scaler.is_enabled() is False
    plain = start(changed(config, steps=3), tmp_path / "plain")
    plain.train()
    assert losses(tmp_path / "plain") != losses(tmp_path / "run")


LSTM = {"model": "lstm", "batching": "bucketed", "settings": {"d_model": 16}}


def has_bf16_lstm() -> bool:
    try:
        with torch.autocast("cpu", torch.bfloat16):
            torch.nn.LSTM(16, 16)(torch.zeros(2, 1, 16))
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize(("changes", "casts"), [({}, 2 * 2 * 2), (LSTM, 0)], ids=["transformer", "lstm"])
def test_each_batch_on_a_device_of_many_launches_casts_its_weights_together(
    config, tmp_path, monkeypatch, changes, casts
) -> None:
    if changes and not has_bf16_lstm():
        pytest.skip("oneDNN has no LSTM in bf16 for this CPU")
    config = changed(config, precision="bf16", steps=2, accumulate=2, cuda_graphs=False, **changes)
    with torch.profiler.profile() as alone:
        start(config, tmp_path / "alone").train()
    monkeypatch.setenv("FASTFORMER_CPU_GRAPHS", "1")
    with torch.profiler.profile() as together:
        start(config, tmp_path / "together").train()
    counts = [
        sum(event.name == "aten::_foreach_copy_" for event in found.events() or ()) for found in (alone, together)
    ]
    assert counts == [0, casts]
    assert losses(tmp_path / "together") == pytest.approx(losses(tmp_path / "alone"), rel=1e-3)


@pytest.mark.parametrize("batching", ["random", "bucketed", "packed"])
def test_all_batchings_train(config, tmp_path, batching) -> None:
    start(changed(config, steps=2, batching=batching), tmp_path / "run").train()
    assert all((line["padding"] == 0.0) == (batching == "packed") for line in lines(tmp_path / "run", "train"))


# Running averages.


@pytest.mark.parametrize("ema", [0.999, 0.05])
def test_ema_forgets_the_random_weights_and_is_saved(config, tmp_path, ema) -> None:
    config = changed(config, ema=ema, steps=4, schedule="constant")
    trainer = start(config, tmp_path / "run")
    expected = trainer.model.output_weight.detach().clone()
    table = trainer.model.embedding.position.table.add_(1.0)  # a buffer is not averaged
    update = trainer.update

    def follow(batches):
        found = update(batches)
        weight = trainer.model.output_weight.detach()
        if trainer.step == 0:
            assert torch.equal(trainer.ema.module.output_weight, weight)
            expected.copy_(weight)
        else:  # decays of 2/11, 3/12, ... where they are below the given one
            decay = min(ema, (1 + trainer.step) / (10 + trainer.step))
            expected.mul_(decay).add_(weight * (1 - decay))
        return found

    trainer.update = follow
    scores = trainer.train()
    assert torch.allclose(trainer.ema.module.output_weight, expected, atol=1e-7, rtol=1e-5)
    assert not torch.equal(expected, trainer.model.output_weight)
    assert torch.equal(trainer.ema.module.embedding.position.table, table)
    saved = load_file(tmp_path / "run" / "model.safetensors")
    for name, weight in trainer.ema.module.state_dict().items():
        assert torch.equal(saved[name], weight), name
    assert scores.nll == trainer.validate(trainer.ema.module).nll != trainer.validate(trainer.model).nll


# Validation and what is kept.


def test_validation_does_not_change_training(config, tmp_path) -> None:
    start(changed(config, val_every=0), tmp_path / "without").train()
    trainer = start(changed(config, val_every=1, val_examples=2), tmp_path / "with")
    trainer.train()
    assert losses(tmp_path / "with") == losses(tmp_path / "without")  # dropout came back each time
    assert [line["step"] for line in lines(tmp_path / "with", "validation")] == list(range(1, 13))
    assert [line["step"] for line in lines(tmp_path / "without", "validation")] == [12]


def test_val_examples_limits_the_translations(config, tmp_path, capsys) -> None:
    references = [(f"{i}", "一个 句子" if i > 2 else "一个句子") for i in range(8)]
    config = changed(config, val_tsv=write_pairs(tmp_path / "val.tsv", references), steps=1, bleu_tokenize="char")
    for count, said in ((3, "first 3 of 8 lines"), (99, "all lines")):
        start(changed(config, val_examples=count), tmp_path / str(count)).train()
        (line,) = lines(tmp_path / str(count), "validation")
        assert line["translated"] == min(count, 8) and "tok:char" in line["bleu_signature"]
        assert said in capsys.readouterr().out
    start(changed(config, val_examples=0), tmp_path / "none").train()
    assert "translated" not in lines(tmp_path / "none", "validation")[0]


def test_a_line_of_the_log_is_the_mean_since_the_last_one(config, tmp_path, calls_of) -> None:
    trainer = start(changed(config, steps=7, log_every=3), tmp_path / "run")
    updates = calls_of(trainer, "update")
    trainer.train()
    each = [float(update.result[0]) for update in updates]
    assert [step for step, _ in trainer.position.losses] == [3, 6, 7]
    means = [sum(each[:3]) / 3, sum(each[3:6]) / 3, each[6]]
    assert [loss for _, loss in trainer.position.losses] == pytest.approx(means, rel=1e-6)
    assert losses(tmp_path / "run") == [loss for _, loss in trainer.position.losses]


def test_every_update_is_made_in_training_mode(config, tmp_path) -> None:
    trainer = start(changed(config, steps=4, val_every=2, val_examples=2), tmp_path / "run")
    trainer.model.eval()  # as one that was loaded from a folder is
    modes: list[set[bool]] = []

    def note(_):
        modes.append({module.training for module in trainer.model.modules()})

    before_updates(trainer, note).train()
    assert modes == 4 * [{True}]


def test_the_time_limit(config, tmp_path) -> None:
    trainer = start(changed(config, max_minutes=1.0), tmp_path / "run")
    trainer.position.trained_seconds = 60.5
    trainer.train()
    assert trainer.step == 0 and trainer.position.finished
    del trainer
    # The minutes before a run was resumed count as well, and go on from there.
    again = start(changed(config, max_minutes=1.0, steps=2), tmp_path / "run", resume=True)
    assert again.position.trained_seconds == 60.5
    again.train()
    assert again.step == 0
    again.config = changed(again.config, max_minutes=2.0)
    again.train()
    assert again.step == 2 and 60.5 < again.position.trained_seconds < 120


# The kinds of models.


def test_the_result_translates(config, tmp_path) -> None:
    scores = start(changed(config, steps=60, lr=1e-2, val_examples=3, val_every=30), tmp_path / "run").train()
    first, last = (line["nll"] for line in lines(tmp_path / "run", "validation"))
    assert last < first < math.log(259) and last == scores.nll
    assert "nc:6" in scores.signatures["chrf_signature"]
    translator = Translator.from_pretrained(tmp_path / "run", load_tokenizer(tmp_path / "run"))
    assert len(translator.translate(["aa 3"], max_new_tokens=4)) == 1


def test_a_gpt_memorises_a_text(config, tmp_path) -> None:
    (tmp_path / "text").write_text("abcdefgh" * 60)  # each letter follows from the one before, if from the right one
    gpt = TrainConfig(
        model="gpt", train_text=str(tmp_path / "text"), tokenizer="bytes", seqlen=16, max_tokens=128, steps=40,
        warmup=5, lr=2e-2, settings={"d_model": 16, "num_layers": 1, "num_heads": 2}, device="cpu",
    )  # fmt: skip
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
    ids = [torch.tensor(translator.encode(text)) for text in texts]
    greedy = model.greedy(torch.nn.utils.rnn.pad_sequence(ids, batch_first=True), 12)
    assert translator.translate(texts, max_new_tokens=12) == [tokenizer.decode(row) for row in greedy.tolist()]
    source, target, attention = translator.attention("aa 3")
    assert attention.shape == (1, 1, len(target), len(source)) and (attention.sum(-1) - 1).abs().max() < 1e-5
