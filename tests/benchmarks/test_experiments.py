"""The verdict of an experiment follows from its figures, and its curves are those of the training."""

from __future__ import annotations

import argparse
import importlib
import re
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fastformer.training.examples
import fastformer.training.trainer
import fastformer.training.validation
from benchmarks.cases.models.bench_decoding import ENGINES
from benchmarks.experiments import (
    EXPERIMENTS,
    __main__,
    label_smoothing,
    ladder,
    learning,
    lstm,
    norm_order,
    padding,
    positions,
    sharding,
)
from benchmarks.experiments.drawing import mean_curve
from benchmarks.experiments.experiment import RESULTS, final, last_run, load
from benchmarks.experiments.learning import Curve, learn
from benchmarks.measure import record
from tests.benchmarks.running import checked_rows
from tests.covering import each

FOLDER = Path(learning.__file__).parent


@pytest.fixture
def few_numbers(monkeypatch):
    """Reduces the built-in task to a handful of examples."""
    monkeypatch.setattr(fastformer.training.examples, "_TRAIN_NUMBERS", 200)
    monkeypatch.setattr(fastformer.training.examples, "_VAL_NUMBERS", 12)
    learning.numbers.cache_clear()
    yield
    learning.numbers.cache_clear()


def line(provider, end, value=0.5, seed=0, **shape):
    """Makes a row with a curve that ends at `end`."""
    curve = {"x": [1.0, 2.0], "y": [4.0, end], "x_label": "update", "y_label": "loss"}
    shape = {"seed": seed, **shape}
    return {"provider": provider, "shape": shape, "curve": curve, "value": value, "unit": "exact match"}


def lines(ends, values=None, **shape):
    """Makes rows of several seeds for each provider."""
    return [
        line(provider, end, values[provider][seed] if values else 0.5, seed, **shape)
        for provider, seeds in ends.items()
        for seed, end in enumerate(seeds)
    ]


def test_there_is_a_line_for_each_module():
    """A module with an experiment that isn't listed would never be run."""
    modules = {p.stem for p in FOLDER.glob("*.py") if re.search("^EXPERIMENT = ", p.read_text(encoding="utf-8"), re.M)}
    assert modules == set(EXPERIMENTS)
    for name in EXPERIMENTS:
        assert load(name).name == name and load(name).claim.endswith(".")
        assert callable(importlib.import_module(f"benchmarks.experiments.{name}").main)


# Verdicts

LOW, HIGH, WIDE = [0.1, 0.2], [0.3, 0.4], [0.0, 0.5]


@each(
    "module, losses, exact, verdict",
    [
        (positions, (LOW, WIDE), (LOW, LOW), "supports"),
        (positions, (LOW, HIGH), (LOW, LOW), "contradicts"),
        (positions, (LOW, LOW), (HIGH, LOW), "contradicts"),
        (positions, ([0.1], [0.3]), ([0.5], [0.5]), "undecided"),  # one seed has no spread
        (label_smoothing, (LOW, HIGH), (LOW, HIGH), "supports"),
        (label_smoothing, (HIGH, LOW), (LOW, HIGH), "contradicts"),
        (label_smoothing, (LOW, HIGH), (HIGH, LOW), "contradicts"),
        (label_smoothing, (LOW, HIGH), (LOW, WIDE), "undecided"),
        (label_smoothing, ([1.0], [2.0]), ([0.5], [0.6]), "undecided"),
        (lstm, (LOW, HIGH), (HIGH, LOW), "supports"),
        (lstm, (HIGH, LOW), (LOW, HIGH), "contradicts"),
        (lstm, (LOW, HIGH), (LOW, LOW), "undecided"),
        (lstm, ([0.1], [0.3]), ([0.3], [0.1]), "undecided"),
        (sharding, (LOW, LOW), (LOW, HIGH), "supports"),
        (sharding, (LOW, LOW), (HIGH, LOW), "contradicts"),
        (sharding, (LOW, LOW), ([0.1, 0.35], HIGH), "undecided"),
        (sharding, ([0.1], [0.1]), ([0.1], [0.3]), "undecided"),
    ],
)
def test_two_kinds_differ_only_if_all_seeds_do(module, losses, exact, verdict):
    names = {
        positions: positions.LAYOUTS,
        label_smoothing: label_smoothing.SMOOTHING,
        lstm: lstm.MODELS,
        sharding: (sharding.FAIR, sharding.IN_TURN),
    }[module]
    assert module.judge(lines(dict(zip(names, losses, strict=True)), dict(zip(names, exact, strict=True)))) == verdict


def norm_rows(pre, post, pre_without, post_without, lr=1e-3):
    names = [f"{order}, {warm_up}" for warm_up in norm_order.WARM_UPS for order in norm_order.ORDERS]
    return lines(dict(zip(names, (pre, post, pre_without, post_without), strict=True)), lr=lr, diverged=False)


@pytest.mark.parametrize(
    ("ends", "verdict"),
    [
        ((LOW, HIGH, LOW, HIGH), "supports"),
        ((HIGH, LOW, LOW, HIGH), "contradicts"),
        ((LOW, HIGH, HIGH, LOW), "contradicts"),
        ((LOW, LOW, LOW, HIGH), "undecided"),
        ((LOW, LOW, LOW, LOW), "undecided"),
        ((LOW[:1], HIGH[:1], LOW[:1], HIGH[:1]), "undecided"),
    ],
)
def test_norm_order_is_decided_with_and_without_warm_up(ends, verdict):
    assert norm_order.judge(norm_rows(*ends)) == verdict


def test_norm_order_takes_the_better_rate_of_each():
    """Otherwise the verdict would be about a learning rate that doesn't suit one of them."""
    fast = norm_rows([0.1, 0.2], [3.0, 3.1], [0.1, 0.2], [3.0, 3.1], lr=3e-3)
    slow = norm_rows([0.5, 0.6], [0.3, 0.4], [0.5, 0.6], [0.05, 0.06])
    best = norm_order.best_rates([*slow, *fast])
    assert {(row["provider"][:4], row["shape"]["lr"]) for row in best} == {("pre-", 3e-3), ("post", 1e-3)}
    assert norm_order.judge([*slow, *fast]) == "contradicts"
    for row in slow:
        row["shape"]["diverged"] = True  # what diverged has no end
    assert norm_order.judge([*slow, *fast]) == "supports"


@pytest.mark.parametrize(
    ("speeds", "agreement", "verdict"),
    [
        ([100, 140, 200, 400, 4000, 5000, 4500], 1.0, "supports"),
        ([100, 110, 120, 400, 4000, 5000, 6000], 1.0, "undecided"),  # less than the notes say
        ([100, 140, 200, 190, 4000, 5000, 6000], 1.0, "contradicts"),
        ([100, 140, 200, 400, 4000, 5000, 6000], 0.99, "contradicts"),  # other tokens in fp32
    ],
)
def test_each_stage_is_compared_with_the_one_below(speeds, agreement, verdict):
    rows = [
        {"provider": name, "value": speed, "shape": {"agreement": agreement if name == "cpp fp32" else 1.0}}
        for name, speed in zip(ladder.STAGES, speeds, strict=True)
    ]
    assert ladder.judge(rows) == verdict


@pytest.mark.parametrize(("random", "verdict"), [(250.0, "supports"), (150.0, "contradicts"), (101.0, "contradicts")])
def test_padding_is_compared_with_its_slots(random, verdict):
    rows = [
        {"provider": name, "value": value, "shape": {"padding": ratio}}
        for name, value, ratio in (("random", random, 0.6), ("bucketed", 100.0, 0.05), ("packed", 95.0, 0.0))
    ]
    assert padding.judge(rows) == verdict


# What is measured


def test_each_line_of_padding_reads_every_example_once():
    options = argparse.Namespace(text=None)
    examples, _ = padding.examples_of(options)
    lengths = torch.tensor([example.lengths for example in examples])
    ratios = []
    for name in padding.LINES:
        batches = padding.plan(lengths, name, 4096)
        assert sorted(i for batch in batches for i in batch) == list(range(len(examples)))
        ratios.append(padding.padding_ratio(lengths, name, batches))
    assert ratios == sorted(ratios, reverse=True) and ratios[0] > 0.45 and ratios[-1] == 0  # as Multi30k's


def test_seconds_count_only_training(monkeypatch, few_numbers):
    """An update takes 1, and a validation 100, which doesn't count."""
    now = 0.0

    def costs(seconds, function):
        def timed(*args, **kwargs):
            nonlocal now
            now += seconds
            return function(*args, **kwargs)

        return timed

    monkeypatch.setattr(learning, "time", SimpleNamespace(process_time=lambda: now))
    trainer: Any = fastformer.training.trainer
    monkeypatch.setattr(trainer, "collate", costs(1.0, trainer.collate))
    monkeypatch.setattr(trainer, "validate_part", costs(100.0, trainer.validate_part))
    monkeypatch.setattr(fastformer.training.validation, "mean_of", lambda losses, examples: 2.5)
    curve, model = learn(0, steps=7, num_train=100, max_tokens=256, model=learning.SMALL | {"d_ff": 64})
    assert curve.updates == [1, 2, 3, 4, 5, 6, 7] and curve.seconds == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert curve.nll == [2.5] * 7 and [update for update, _ in curve.losses] == curve.updates
    assert curve.num_parameters == sum(p.numel() for p in model.parameters()) and not model.training
    row = curve.row("a", {"seed": 0}, over="seconds")
    assert row["curve"]["x"] == curve.seconds and row["curve"]["y"] == curve.nll
    losses = curve.row("a", {"seed": 0}, of="losses")["curve"]
    assert losses["y"] == [round(loss, 6) for _, loss in curve.losses] and losses["y_label"].startswith("training")


def test_a_training_that_diverges_is_a_row(few_numbers):
    curve, _ = learn(0, steps=4, lr=1e30, clip=0.0, max_tokens=256, model=learning.SMALL)
    assert curve.diverged and curve.exact_match == 0
    row = curve.row("a", {"seed": 0, "diverged": True}, of="losses")
    assert final(row) == float("inf")
    xs, ys = mean_curve([row["curve"]])
    assert xs == row["curve"]["x"] and ys == pytest.approx(row["curve"]["y"])


def test_a_training_that_a_signal_ends_gives_no_row(monkeypatch, few_numbers):
    """The trainer saves and returns as if it were finished."""
    trainer: Any = fastformer.training.trainer
    collate = trainer.collate

    def interrupted(*args, **kwargs):
        signal.raise_signal(signal.SIGTERM)
        return collate(*args, **kwargs)

    monkeypatch.setattr(trainer, "collate", interrupted)
    with pytest.raises(SystemExit) as end:
        learn(0, steps=4, max_tokens=256, model=learning.SMALL)
    assert end.value.code == 128 + signal.SIGTERM


def test_both_models_of_the_lstm_are_as_large(few_numbers):
    sizes = [learn(0, steps=1, batching="bucketed", **settings)[0].num_parameters for settings in lstm.MODELS.values()]
    assert max(sizes) < 1.05 * min(sizes)


# Commands


def run(module, folder, *words):
    """Runs a module's command, and returns its rows, each of which follows the schema."""
    out, drawn = folder / "rows.jsonl", folder / "drawn.svg"
    assert module.main([*words, "--out", str(out), "--picture", str(drawn)]) == 0
    return checked_rows(out)


def fake_learn(seed, *, steps, **settings):
    curve = Curve(updates=[1, steps], seconds=[0.5, 1.0], nll=[3.0, 2.0], losses=[(1, 3.0), (steps, 2.0)])
    return curve, torch.nn.Identity()


@pytest.mark.parametrize("module", [positions, label_smoothing, norm_order, lstm], ids=lambda module: module.__name__)
def test_trainings_become_rows_and_a_picture(module, monkeypatch, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="not installed: pip install matplotlib")
    monkeypatch.setattr(module, "learn", fake_learn)
    threads = torch.get_num_threads()
    rows = run(module, tmp_path, "--seeds", "2")
    assert torch.get_num_threads() == threads and (tmp_path / "drawn.svg").stat().st_size > 1000
    name = module.EXPERIMENT.name
    assert last_run(rows, name) == rows and {row["shape"]["seed"] for row in rows} == {0, 1}
    for row in rows:
        assert row["verdict"] == module.judge(rows) and "quick" not in row
    printed = capsys.readouterr().out
    assert rows[0]["verdict"] in printed and all(row["provider"] in printed for row in rows)


def test_a_swing_is_the_mean_change_after_the_first_quarter():
    assert sharding.swing([(i, loss) for i, loss in enumerate([9.0, 1, 3, 2, 2])]) == pytest.approx((2 + 1 + 0) / 3)


def test_sharding_trains_on_the_same_examples_both_ways(monkeypatch, tmp_path):
    pytest.importorskip("pyarrow", reason="shards are files of Arrow")
    seen = []

    def noted(seed, *, data, **settings):
        windows = [data.train.window(0, 0, window) for window in range(data.train.num_windows)]
        seen.append([[tuple(data.train[i].source) for i in window.tolist()] for window in windows])
        return fake_learn(seed, **settings)

    monkeypatch.setattr(sharding, "learn", noted)
    rows = run(sharding, tmp_path, "--quick")
    fair, in_turn = seen
    assert len(fair) == 1 and len(in_turn) == 3
    assert sorted(fair[0]) == sorted(example for window in in_turn for example in window)
    assert [row["provider"] for row in rows] == [sharding.FAIR, sharding.IN_TURN]


def test_padding_runs(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib", reason="not installed: pip install matplotlib")
    monkeypatch.setattr(padding, "_SENTENCES", 300)
    monkeypatch.setattr(padding, "_VOCAB_SIZE", 50)
    rows = run(padding, tmp_path, "--quick")
    assert [row["provider"] for row in rows] == list(padding.LINES) and all(row["quick"] for row in rows)
    for row in rows:
        tokens = sum(sum(example.lengths) for example in padding.examples_of(argparse.Namespace(text=None))[0])
        assert row["value"] == pytest.approx(tokens / row["tokens_s"])


def test_the_ladder_runs(monkeypatch, few_numbers, tmp_path):
    pytest.importorskip("matplotlib", reason="not installed: pip install matplotlib")
    monkeypatch.setattr(
        ladder, "learn", lambda seed, **settings: learn(seed, steps=1, max_tokens=256, model=learning.SMALL)
    )
    rows = run(ladder, tmp_path, "--quick", "--lines", "3")
    assert [row["provider"] for row in rows] == [r for r, (engine, _) in ladder.STAGES.items() if engine in ENGINES]
    for row in rows:
        assert row["provider"] in ladder.ROUNDED or row["shape"]["agreement"] == 1


# What is recorded


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_recorded_verdict_matches_its_figures(name):
    rows = last_run(record.read(RESULTS), name)
    assert rows and {row["verdict"] for row in rows} == {load(name).judge(rows)}
    assert not any(row.get("quick") or row["dirty"] for row in rows)


def test_the_list(capsys):
    assert __main__.main([]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in EXPERIMENTS) and "(supports)" in printed
