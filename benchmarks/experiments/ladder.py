"""The decoding ladder on a trained model: each stage's tokens a second, and its accuracy.

    python -m benchmarks.experiments.ladder [--lines 64] [--rounds 5] [--steps 300] [--quick] [--out FILE]

A model of the built-in task is trained first; then each engine in turn translates unseen numbers greedily.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from benchmarks.cases.models.bench_decoding import ENGINES
from benchmarks.experiments.experiment import Experiment, Row, Verdict
from benchmarks.experiments.learning import learn, numbers
from benchmarks.measure.commands import count
from benchmarks.measure.timing import time_interleaved
from benchmarks.publish import style
from fastformer.data.examples import encode_pair
from fastformer.generation import generate
from fastformer.generation.config import Precision

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STAGES: dict[str, tuple[str, Precision | None]] = {
    "recompute": ("recompute", None),
    "encode_once": ("encode_once", None),
    "cross_cache": ("cross_cache", None),
    "kv_cache": ("kv_cache", None),
    "cpp fp32": ("cpp", "fp32"),
    "cpp bf16": ("cpp", "bf16"),
    "cpp int8": ("cpp", "int8"),
}
ROUNDED = ("cpp bf16", "cpp int8")
# The gain of a stage over the one below, according to one author's notes.
NOTES = {"encode_once": 1.33, "cross_cache": 1.42}


def judge(rows: Sequence[Row]) -> Verdict:
    """Judges "supports" if stages gain about as much as in the notes, and all fp32 stages give the same tokens."""
    speed = {row["provider"]: float(row["value"]) for row in rows}
    gains = {above: speed[above] / speed[below] for below, above in itertools.pairwise(speed)}
    exact = [row for row in rows if row["provider"] not in ROUNDED]
    if any(row["shape"]["agreement"] < 1 for row in exact):
        return "contradicts"
    if any(gain < 1 for stage, gain in gains.items() if stage not in ROUNDED):
        return "contradicts"
    return "supports" if all(gains[stage] >= 0.9 * gain for stage, gain in NOTES.items()) else "undecided"


def draw(rows: Sequence[Row], title: str, footer: str) -> Figure:
    """Draws bars on a logarithmic scale, the slowest on top, with their figures."""
    shape = rows[0]["shape"]
    fig = style.figure(title, footer=f"{footer}; {shape['lines']} lines at a time")
    (axes,) = fig.axes
    names = [row["provider"] for row in rows]
    speeds = [float(row["value"]) for row in rows]
    axes.barh(names, speeds, color=[style.color_of(name) for name in names], height=0.6)
    for name, speed, row in zip(names, speeds, rows, strict=True):
        axes.annotate(
            f"{speed:,.0f}   exact match {row['shape']['exact_match']:.3f}", (speed, name), xytext=(5, 0),
            textcoords="offset points", va="center", fontsize=9,
        )  # fmt: skip
    axes.set(xlabel="tokens a second", xscale="log", xlim=(min(speeds) / 2, max(speeds) * 6))
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    return fig


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Trains, then times the stages side by side."""
    longest, seconds = (8, 5.0) if options.quick else (64, 120.0)
    curve, model = learn(0, steps=options.steps, lr=3e-3, model={})
    print(f"trained for {options.steps} updates: exact match {curve.exact_match:.3f} on all validation pairs")
    data = numbers(0)
    pairs = data.val_texts[: options.lines]
    sources = [encode_pair(data.tokenizer.encode(source), []).source for source, _ in pairs]
    outputs: dict[str, torch.Tensor] = {}

    def translate(stage: str) -> None:
        engine, precision = STAGES[stage]
        tokens = generate(model, sources, max_new_tokens=longest, engine=engine, precision=precision)
        assert isinstance(tokens, torch.Tensor)
        outputs[stage] = tokens

    stages = [stage for stage, (engine, _) in STAGES.items() if engine in ENGINES]
    if "cpp fp32" not in stages:
        print("the C++ extension is not built, so that its stages are missing")
    functions = {stage: functools.partial(translate, stage) for stage in stages}
    timings = time_interleaved(functions, rounds=options.rounds, device="cpu", seconds=seconds)
    texts = {stage: [data.tokenizer.decode(row) for row in outputs[stage].tolist()] for stage in stages}
    for stage in stages:
        speed = int((outputs[stage] != 0).sum()) / timings[stage].p50
        exact = sum(text == target for text, (_, target) in zip(texts[stage], pairs, strict=True)) / len(pairs)
        same = sum(a == b for a, b in zip(texts[stage], texts[stages[0]], strict=True)) / len(pairs)
        print(f"{stage:>12}: {speed:>10,.0f} tokens/s, exact match {exact:.3f}, as {stages[0]}: {same:.3f}")
        yield {
            "provider": stage,
            "shape": {"lines": len(pairs), "steps": options.steps, "exact_match": exact, "agreement": same},
            "value": speed,
            "unit": "tokens a second",
            **timings[stage].fields(),
        }


EXPERIMENT = Experiment(
    name="ladder",
    title="The decoding ladder on a trained model",
    claim="Encoding once makes decoding 1.33 times as fast, keeping cross-attention's keys and values 1.42 times; "
    "each further stage is faster, with the same tokens.",
    judge=judge,
    draw=draw,
    measure=measure,
    flags={
        "lines": count(64, "texts that are translated at a time, at most 1000"),
        "rounds": count(5, "of each stage"),
        "steps": count(300, "updates of the model"),
    },
    quick={"lines": 8, "rounds": 3, "steps": 10},
)
main = EXPERIMENT.main

if __name__ == "__main__":
    raise SystemExit(main())
