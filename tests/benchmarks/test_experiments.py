"""Experiments: the finding is what the figures say, curves are those of the training, the page is that of the rows."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fastformer.training.examples
import fastformer.training.trainer
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
)
from benchmarks.experiments.drawing import mean_curve
from benchmarks.experiments.experiment import RESULTS, Finding, Spread, final, last_run, load
from benchmarks.experiments.learning import Curve, learn
from benchmarks.measure import record
from benchmarks.publish import style
from fastformer.data.batching import padding_ratio

FOLDER = Path(learning.__file__).parent


@pytest.fixture
def few_numbers(monkeypatch):
    """The built-in task with a handful of examples."""
    monkeypatch.setattr(fastformer.training.examples, "_TRAIN_NUMBERS", 200)
    monkeypatch.setattr(fastformer.training.examples, "_VAL_NUMBERS", 12)
    learning.numbers.cache_clear()
    yield
    learning.numbers.cache_clear()


def line(provider, end, value=0.5, seed=0, **shape):
    """A row with a curve that ends at `end`."""
    curve = {"x": [1.0, 2.0], "y": [4.0, end], "x_label": "update", "y_label": "loss"}
    return {
        "provider": provider,
        "shape": {"seed": seed, **shape},
        "curve": curve,
        "value": value,
        "unit": "exact match",
    }


def lines(ends, values=None, **shape):
    """Rows of several seeds for each provider."""
    return [
        line(provider, end, values[provider][seed] if values else 0.5, seed, **shape)
        for provider, some in ends.items()
        for seed, end in enumerate(some)
    ]


def test_there_is_a_line_for_each_module():
    """A module with an experiment that nobody lists would never be run."""
    own = {p.stem for p in FOLDER.glob("*.py") if re.search("^EXPERIMENT = ", p.read_text(encoding="utf-8"), re.M)}
    assert own == set(EXPERIMENTS)
    for name in EXPERIMENTS:
        assert load(name).name == name and load(name).claim.endswith(".")
        assert callable(importlib.import_module(f"benchmarks.experiments.{name}").main)


# Findings


def test_a_spread_is_below_only_with_all_of_its_values():
    rows = lines({"a": [1.0, 2.0], "b": [2.5, 3.0], "c": [1.9, 9.0]})
    a, b, c = (Spread.of(rows, name, final) for name in "abc")
    assert (a.mean, a.low, a.high, str(a)) == (1.5, 1.0, 2.0, "1.5 (1 to 2)")
    assert a.below(b) and not b.below(a) and not a.below(c) and not a.below(a)


def test_positions_are_equal_where_seeds_differ_more():
    paper, other = positions.LAYOUTS
    exact = {paper: [0.9, 0.8], other: [0.85, 0.95]}
    same = positions.find(lines({paper: [0.1, 0.2], other: [0.15, 0.25]}, exact))
    assert same.verdict == "supports" and "0.15 (0.1 to 0.2)" in same.sentence and "in 2 of 2 seeds" in same.sentence
    apart = positions.find(lines({paper: [0.1, 0.2], other: [0.3, 0.4]}, exact))
    assert apart.verdict == "contradicts" and "differ in likelihood beyond" in apart.sentence
    exact[other] = [0.5, 0.6]
    assert (
        "in likelihood and exact match" in positions.find(lines({paper: [0.1, 0.2], other: [0.3, 0.4]}, exact)).sentence
    )
    assert positions.find(lines({paper: [0.1], other: [0.3]})).verdict == "undecided"  # one seed has no spread


def test_label_smoothing_has_two_halves():
    plain, smooth = label_smoothing.SMOOTHING

    def found(nll, exact) -> Finding:
        return label_smoothing.find(
            lines(dict(zip((plain, smooth), nll, strict=True)), dict(zip((plain, smooth), exact, strict=True)))
        )

    worse, better = ([1.0, 1.1], [1.2, 1.3]), ([0.5, 0.6], [0.7, 0.8])
    assert found(worse, better) == Finding(
        "supports",
        "Smoothing worsens the likelihood, from 1.05 (1 to 1.1) to 1.25 (1.2 to 1.3) nats a token, and improves the "
        "exact match, from 0.55 (0.5 to 0.6) to 0.75 (0.7 to 0.8).",
    )
    assert (
        found(worse[::-1], better).verdict == "contradicts"
        and "improves the likelihood" in found(worse[::-1], better).sentence
    )
    assert (
        found(worse, better[::-1]).verdict == "contradicts"
        and "worsens the exact match" in found(worse, better[::-1]).sentence
    )
    assert found(worse, ([0.5, 0.8], [0.6, 0.7])).verdict == "undecided"
    assert found(([1.0], [2.0]), ([0.5], [0.6])).verdict == "undecided"


def norm_rows(pre, post, pre_without, post_without, **shape):
    names = (
        "pre-norm, with warm-up",
        "post-norm, with warm-up",
        "pre-norm, without warm-up",
        "post-norm, without warm-up",
    )
    shape = {"lr": 1e-3, "diverged": False} | shape
    return lines(dict(zip(names, (pre, post, pre_without, post_without), strict=True)), **shape)


def test_norm_order_is_decided_with_and_without_warm_up():
    low, high = [0.1, 0.2], [0.3, 0.4]
    assert norm_order.find(norm_rows(low, high, low, high)).verdict == "supports"
    for rows, where in (
        (norm_rows(high, low, low, high), "lower loss with warm-up:"),
        (norm_rows(low, high, high, low), "lower loss without warm-up:"),
        (norm_rows(high, low, high, low), "lower loss with warm-up and without warm-up:"),
    ):
        found = norm_order.find(rows)
        assert found.verdict == "contradicts" and where in found.sentence
    half = norm_order.find(norm_rows(low, low, low, high))
    assert half.verdict == "undecided" and "without warm-up only" in half.sentence
    assert norm_order.find(norm_rows(low, low, low, low)).verdict == "undecided"
    assert norm_order.find(norm_rows(low[:1], high[:1], low[:1], high[:1])).verdict == "undecided"


def test_norm_order_takes_the_better_rate_of_each():
    """Else the finding would be about a rate that does not suit one of them."""
    fast = norm_rows([0.1, 0.2], [3.0, 3.1], [0.1, 0.2], [3.0, 3.1], lr=3e-3)
    slow = norm_rows([0.5, 0.6], [0.3, 0.4], [0.5, 0.6], [0.05, 0.06], lr=1e-3)
    best = norm_order.best_rates([*slow, *fast])
    assert {(row["provider"][:4], row["shape"]["lr"]) for row in best} == {("pre-", 3e-3), ("post", 1e-3)}
    found = norm_order.find([*slow, *fast])
    assert found.verdict == "contradicts" and "0.35 (0.3 to 0.4) (lr 0.001)" in found.sentence
    lost = norm_rows([0.5, 0.6], [0.3, 0.4], [0.5, 0.6], [0.05, 0.06], lr=1e-3, diverged=True)
    kept = norm_order.find([*lost, *fast])
    assert kept.verdict == "supports" and "8 of 16 trainings diverged" in kept.sentence


def test_the_lstm_is_compared_when_the_time_is_over():
    names = (lstm.TRANSFORMER, lstm.LSTM)

    def found(nll, exact) -> Finding:
        return lstm.find(lines(dict(zip(names, nll, strict=True)), dict(zip(names, exact, strict=True)), steps=70))

    low, high = [0.1, 0.2], [0.3, 0.4]
    assert found((low, high), (high, low)).verdict == "supports"
    assert found((high, low), (low, high)).verdict == "contradicts"
    assert found((low, high), (low, low)).verdict == "undecided"
    assert found(([0.1], [0.3]), ([0.3], [0.1])).verdict == "undecided"
    assert "after 2 s of CPU time" in found((low, high), (high, low)).sentence


def rungs(speeds, agreement=1.0):
    same = {"cpp fp32": agreement}
    return [
        {"provider": name, "value": speed, "shape": {"exact_match": 0.9, "agreement": same.get(name, 1.0)}}
        for name, speed in zip(ladder.RUNGS, speeds, strict=True)
    ]


def test_each_rung_is_held_against_the_one_below():
    found = ladder.find(rungs([100, 140, 200, 400, 4000, 5000, 4500]))
    assert found.verdict == "supports"
    assert (
        "encode_once 1.40x (the notes: 1.33x), cross_cache 1.43x (the notes: 1.42x), kv_cache 2.00x" in found.sentence
    )
    assert "cpp int8 is 45 times as fast as recompute" in found.sentence
    assert ladder.find(rungs([100, 110, 120, 400, 4000, 5000, 6000])).verdict == "undecided"  # less than the notes say
    slower = ladder.find(rungs([100, 140, 200, 190, 4000, 5000, 6000]))
    assert slower.verdict == "contradicts" and "(kv_cache)" in slower.sentence
    other = ladder.find(rungs([100, 140, 200, 400, 4000, 5000, 6000], agreement=0.99))
    assert other.verdict == "contradicts" and "cpp fp32 says other tokens than recompute" in other.sentence


def epochs(seconds, ratios=(0.6, 0.1, 0.05, 0.0)):
    names = ("random", "bucketed, pools of 1024", "bucketed", "packed")
    return [
        {"provider": name, "value": value, "shape": {"padding": ratio}}
        for name, value, ratio in zip(names, seconds, ratios, strict=True)
    ]


def test_padding_is_held_against_its_slots():
    found = padding.find(epochs((250.0, 110.0, 100.0, 95.0)))
    assert (
        found.verdict == "supports"
        and "2.50 times as long" in found.sentence
        and "2.37 times the slots" in found.sentence
    )
    assert padding.find(epochs((150.0, 110.0, 100.0, 95.0))).verdict == "contradicts"
    assert "next to nothing" in padding.find(epochs((101.0, 100.0, 100.0, 99.0))).sentence


# What is measured


def test_each_line_of_padding_reads_every_example_once():
    options = argparse.Namespace(text=None)
    examples, _ = padding.examples_of(options)
    lengths = torch.tensor([example.lengths for example in examples])
    ratios = []
    for name in padding.LINES:
        batches = padding.plan(lengths, name, 4096)
        assert sorted(i for batch in batches for i in batch) == list(range(len(examples)))
        ratios.append(padding_ratio(lengths, batches, packed=padding.is_packed(name)))
    assert ratios == sorted(ratios, reverse=True) and ratios[0] > 0.45 and ratios[-1] == 0  # as Multi30k's


def test_seconds_are_those_of_training(monkeypatch, few_numbers):
    """An update takes 1, a validation 100, which is left out."""
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
    monkeypatch.setattr(trainer, "negative_log_likelihood", costs(100.0, lambda *args, **kwargs: 2.5))
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


def test_a_training_that_a_signal_ends_is_no_row(monkeypatch, few_numbers):
    """The trainer saves and returns as if it were done."""
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


def test_the_mean_of_curves_ends_with_the_shortest():
    xs, ys = mean_curve([{"x": [1.0, 2.0, 3.0], "y": [1.0, 4.0, 9.0]}, {"x": [3.0, 4.0], "y": [1.0, 1.0]}])
    assert xs == [2.0, 3.0] and ys == pytest.approx([1.0, 2.0])


# Commands


def fake_learn(seed, *, steps, **settings):
    curve = Curve(updates=[1, steps], seconds=[0.5, 1.0], nll=[3.0, 2.0], losses=[(1, 3.0), (steps, 2.0)])
    return curve, torch.nn.Identity()


@pytest.mark.parametrize("module", [positions, label_smoothing, norm_order, lstm], ids=lambda module: module.__name__)
def test_trainings_become_rows_and_a_picture(module, monkeypatch, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="not installed: pip install matplotlib")
    monkeypatch.setattr(module, "learn", fake_learn)
    threads = torch.get_num_threads()
    out, drawn = tmp_path / "rows.jsonl", tmp_path / "drawn.svg"
    assert module.main(["--seeds", "2", "--out", str(out), "--picture", str(drawn)]) == 0
    assert torch.get_num_threads() == threads and drawn.stat().st_size > 1000
    rows = record.read(out)
    name = module.EXPERIMENT.name
    assert last_run(rows, name) == rows and {row["shape"]["seed"] for row in rows} == {0, 1}
    for row in rows:
        record.check(row)
        assert row["finding"] == module.find(rows).sentence and "quick" not in row
    assert rows[0]["finding"] in capsys.readouterr().out


def test_padding_runs(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib", reason="not installed: pip install matplotlib")
    monkeypatch.setattr(padding, "_SENTENCES", 300)
    monkeypatch.setattr(padding, "_VOCAB_SIZE", 50)
    out, drawn = tmp_path / "rows.jsonl", tmp_path / "drawn.svg"
    assert padding.main(["--quick", "--out", str(out), "--picture", str(drawn)]) == 0
    rows = record.read(out)
    assert [row["provider"] for row in rows] == list(padding.LINES) and all(row["quick"] for row in rows)
    for row in rows:
        record.check(row)
        tokens = sum(sum(example.lengths) for example in padding.examples_of(argparse.Namespace(text=None))[0])
        assert row["value"] == pytest.approx(tokens / row["tokens_s"])


def test_padding_reads_a_text(tmp_path):
    source, target = tmp_path / "a.txt", tmp_path / "b.txt"
    source.write_text("one two three\nfour\n", encoding="utf-8")
    target.write_text("eins zwei drei\nvier\n", encoding="utf-8")
    examples, vocab_size = padding.examples_of(argparse.Namespace(text=[source, target]))
    assert len(examples) == 2 and vocab_size > max(examples[0].target) and examples[0].target[-1] == 1  # EOS


def test_the_ladder_runs(monkeypatch, few_numbers, tmp_path):
    pytest.importorskip("matplotlib", reason="not installed: pip install matplotlib")
    monkeypatch.setattr(
        ladder, "learn", lambda seed, **settings: learn(seed, steps=1, max_tokens=256, model=learning.SMALL)
    )
    out, drawn = tmp_path / "rows.jsonl", tmp_path / "drawn.svg"
    assert ladder.main(["--quick", "--lines", "3", "--out", str(out), "--picture", str(drawn)]) == 0
    rows = record.read(out)
    assert [row["provider"] for row in rows] == [r for r, (engine, _) in ladder.RUNGS.items() if engine in ENGINES]
    for row in rows:
        record.check(row)
        assert row["provider"] in ladder.ROUNDED or row["shape"]["agreement"] == 1


@pytest.mark.parametrize(
    ("module", "arguments", "message"),
    [
        (positions, ["--seeds", "0"], "--seeds: expected an integer above 0, got 0"),
        (lstm, ["--seconds", "-3"], "--seconds: expected an integer above 0"),
        (padding, ["--d-model", "100"], "--d-model: expected a multiple of 64, got 100"),
        (padding, ["--text", "nowhere.en", "nowhere.de"], "nowhere.en"),
        (norm_order, ["--lr", "fast"], "--lr: invalid float value: 'fast'"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(module, arguments, message, capsys):
    with pytest.raises(SystemExit) as error:
        module.main(arguments)
    assert error.value.code == 2 and message in capsys.readouterr().err


# What is recorded

ROWS = record.read(RESULTS) if RESULTS.is_file() else []


@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if last_run(ROWS, name)])
def test_a_recorded_finding_is_that_of_its_figures(name):
    rows = last_run(ROWS, name)
    found = load(name).find(rows)
    assert {(row["verdict"], row["finding"]) for row in rows} == {(found.verdict, found.sentence)}
    assert not any(row.get("quick") or row["dirty"] for row in rows)
    drawn = style.stamp_of((style.PICTURES / f"{__main__.picture(name)}.svg").read_text(encoding="utf-8"))
    assert drawn.rows == style.digest(rows), "draw it again: python -m benchmarks.experiments --write"


def test_the_page_is_that_of_the_rows():
    assert __main__.PAGE.read_text(encoding="utf-8") == __main__.page(ROWS)


def test_the_last_run_counts():
    rows = [
        {"op": "a", "time": "1"},
        {"op": "a", "time": "2"},
        {"op": "b", "time": "3"},
        {"op": "a", "time": "2", "n": 2},
    ]
    assert last_run(rows, "a") == [rows[1], rows[3]] and last_run(rows, "c") == []


def test_the_list_and_the_page(monkeypatch, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="not installed: pip install matplotlib")
    monkeypatch.setattr(__main__, "PAGE", tmp_path / "README.md")
    monkeypatch.setattr(__main__, "RESULTS", tmp_path / "rows.jsonl")
    monkeypatch.setattr(style, "save", lambda fig, name, rows: (tmp_path / name).touch())
    shared = {"device": "cpu", "threads": 1, "torch": "2", "time": "1", "command": "python", "commit": "abc"}
    paper, other = positions.LAYOUTS
    for row in lines({paper: [0.1, 0.2], other: [0.15, 0.25]}):
        row |= {"op": "positions", "finding": "They are equal.", "verdict": "supports"} | shared
        record.append(tmp_path / "rows.jsonl", row)
    assert __main__.main([]) == 0 and not (tmp_path / "README.md").exists()
    assert "(supports)" in capsys.readouterr().out
    assert __main__.main(["--write"]) == 0
    page = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "**Supports**: They are equal." in page and page.count("Not recorded yet") == len(EXPERIMENTS) - 1
    assert (tmp_path / "experiment_positions").exists() and json.dumps(page)
