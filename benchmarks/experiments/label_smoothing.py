"""Label smoothing 0.1 against none, on few enough examples that a model overfits.

python -m benchmarks.experiments.label_smoothing [--seeds 3] [--steps 300] [--pairs 3000] [--quick] [--out FILE]
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence

from benchmarks.experiments.drawing import draw_curves
from benchmarks.experiments.experiment import Experiment, Row, Spread, Verdict, final, undecided_by_one_seed, value
from benchmarks.experiments.learning import SMALL, learn
from benchmarks.measure.commands import count

SMOOTHING = {"no smoothing": 0.0, "smoothing 0.1": 0.1}


@undecided_by_one_seed
def judge(rows: Sequence[Row]) -> Verdict:
    """Judges both halves of the claim: the likelihood gets worse, the accuracy better."""
    plain, smooth = (Spread.of(rows, name, final) for name in SMOOTHING)
    exact, exact_smooth = (Spread.of(rows, name, value) for name in SMOOTHING)
    if plain.below(smooth) and exact.below(exact_smooth):
        return "supports"
    return "contradicts" if smooth.below(plain) or exact_smooth.below(exact) else "undecided"


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Trains a model for each smoothing and seed."""
    dropout = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.1)
    for seed, (name, smoothing) in itertools.product(range(options.seeds), SMOOTHING.items()):
        curve, _ = learn(
            seed, steps=options.steps, num_train=options.pairs, lr=5e-3, label_smoothing=smoothing,
            model=SMALL | dropout,
        )  # fmt: skip
        print(f"{name}, seed {seed}: {curve}")
        shape = {"seed": seed, "label_smoothing": smoothing, "steps": options.steps, "pairs": options.pairs}
        yield curve.row(name, shape)


EXPERIMENT = Experiment(
    name="label_smoothing",
    title="Label smoothing: validation loss, without smoothing",
    claim="Label smoothing of 0.1 worsens the perplexity and improves accuracy and BLEU.",
    judge=judge,
    draw=draw_curves,
    measure=measure,
    flags={
        "seeds": count(3, "models of each smoothing"),
        "steps": count(300, "updates of each model"),
        "pairs": count(3000, "training examples"),
    },
)
main = EXPERIMENT.main

if __name__ == "__main__":
    raise SystemExit(main())
