"""The two layouts of sinusoidal positions: alternating sines and cosines (the paper), all sines first (tensor2tensor).

python -m benchmarks.experiments.positions [--seeds 3] [--steps 240] [--quick] [--out FILE] [--picture FILE]
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence

from benchmarks.experiments.drawing import draw_curves
from benchmarks.experiments.experiment import Experiment, Row, Spread, Verdict, final, undecided_by_one_seed, value
from benchmarks.experiments.learning import SMALL, learn
from benchmarks.measure.commands import count

LAYOUTS = {"interleaved (the paper)": "interleaved", "concatenated (tensor2tensor)": "concatenated"}


@undecided_by_one_seed
def judge(rows: Sequence[Row]) -> Verdict:
    """Judges whether the ranges over the seeds overlap, in the likelihood and in the exact match."""
    for measure in (final, value):
        paper, other = (Spread.of(rows, layout, measure) for layout in LAYOUTS)
        if paper.below(other) or other.below(paper):
            return "contradicts"
    return "supports"


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Trains a model for each layout and seed."""
    for seed, (name, layout) in itertools.product(range(options.seeds), LAYOUTS.items()):
        curve, _ = learn(seed, steps=options.steps, lr=5e-3, model=SMALL | {"positions": layout})
        print(f"{name}, seed {seed}: {curve}")
        yield curve.row(name, {"seed": seed, "positions": layout, "steps": options.steps})


EXPERIMENT = Experiment(
    name="positions",
    title="Two layouts of the positions: validation loss",
    claim="tensor2tensor puts all sines before all cosines, a slight difference from the paper, as it says.",
    judge=judge,
    draw=draw_curves,
    measure=measure,
    flags={"seeds": count(3, "models of each layout"), "steps": count(240, "updates of each model")},
)
main = EXPERIMENT.main

if __name__ == "__main__":
    raise SystemExit(main())
