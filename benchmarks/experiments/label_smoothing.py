"""Label smoothing 0.1 against none, on few enough examples that a model overfits.

python -m benchmarks.experiments.label_smoothing [--seeds 3] [--steps 300] [--pairs 3000] [--quick] [--out FILE]
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.experiments.drawing import draw_curves
from benchmarks.experiments.experiment import Experiment, Row, Spread, Verdict, final, undecided_by_one_seed, value
from benchmarks.experiments.learning import SMALL, learn
from benchmarks.measure import record
from benchmarks.measure.commands import positive

SMOOTHING = {"no smoothing": 0.0, "smoothing 0.1": 0.1}


@undecided_by_one_seed
def judge(rows: Sequence[Row]) -> Verdict:
    """Judges both halves of the claim: the likelihood gets worse, the accuracy better."""
    plain, smooth = (Spread.of(rows, name, final) for name in SMOOTHING)
    exact, exact_smooth = (Spread.of(rows, name, value) for name in SMOOTHING)
    if plain.below(smooth) and exact.below(exact_smooth):
        return "supports"
    return "contradicts" if smooth.below(plain) or exact_smooth.below(exact) else "undecided"


EXPERIMENT = Experiment(
    name="label_smoothing",
    title="Label smoothing: validation loss, without smoothing",
    claim="Label smoothing of 0.1 worsens the perplexity and improves accuracy and BLEU.",
    judge=judge,
    draw=draw_curves,
)


def main(arguments: list[str] | None = None) -> int:
    """Trains a model for each smoothing and seed."""
    parser = EXPERIMENT.parser()
    parser.add_argument("--seeds", type=positive, default=3, help="models of each smoothing")
    parser.add_argument("--steps", type=positive, default=300, help="updates of each model")
    parser.add_argument("--pairs", type=positive, default=3000, help="training examples")
    options = parser.parse_args(arguments)
    shared = record.environment("cpu")
    seeds, steps = (1, 30) if options.quick else (options.seeds, options.steps)
    rows = []
    for seed in range(seeds):
        for name, smoothing in SMOOTHING.items():
            curve, _ = learn(
                seed, steps=steps, num_train=options.pairs, lr=5e-3, label_smoothing=smoothing,
                model=SMALL | dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.1),
            )  # fmt: skip
            print(f"{name}, seed {seed}: {curve}")
            shape = {"seed": seed, "label_smoothing": smoothing, "steps": steps, "pairs": options.pairs}
            rows.append(curve.row(name, shape))
    EXPERIMENT.conclude(rows, options, shared)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
