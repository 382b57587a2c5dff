"""Label smoothing 0.1 against none, on as few examples as make a model overfit.

python -m benchmarks.experiments.label_smoothing [--seeds 3] [--steps 300] [--pairs 3000] [--quick] [--out FILE]
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.experiments.drawing import draw_curves
from benchmarks.experiments.experiment import Experiment, Finding, Row, Spread, final, positive, value
from benchmarks.experiments.learning import SMALL, learn
from benchmarks.measure import record

SMOOTHING = {"no smoothing": 0.0, "smoothing 0.1": 0.1}


def find(rows: Sequence[Row]) -> Finding:
    """The claim has two halves: the likelihood gets worse, the accuracy better."""
    plain, smooth = SMOOTHING
    nll = {name: Spread.of(rows, name, final) for name in SMOOTHING}
    exact = {name: Spread.of(rows, name, value) for name in SMOOTHING}
    if nll[plain].below(nll[smooth]):
        likelihood = "worsens the likelihood"
    elif nll[smooth].below(nll[plain]):
        likelihood = "improves the likelihood"
    else:
        likelihood = "changes the likelihood by less than seeds do"
    if exact[plain].below(exact[smooth]):
        accuracy = "improves the exact match"
    elif exact[smooth].below(exact[plain]):
        accuracy = "worsens the exact match"
    else:
        accuracy = "changes the exact match by less than seeds do"
    sentence = (
        f"Smoothing {likelihood}, from {nll[plain]} to {nll[smooth]} nats a token, and {accuracy}, "
        f"from {exact[plain]} to {exact[smooth]}."
    )
    if len({row["shape"]["seed"] for row in rows}) == 1:
        return Finding("undecided", f"With a single seed, which tells nothing of the spread: {sentence}")
    if likelihood.startswith("worsens") and accuracy.startswith("improves"):
        return Finding("supports", sentence)
    if likelihood.startswith("improves") or accuracy.startswith("worsens"):
        return Finding("contradicts", sentence)
    return Finding("undecided", sentence)


EXPERIMENT = Experiment(
    name="label_smoothing",
    title="Label smoothing: validation loss, without smoothing",
    claim="Label smoothing of 0.1 worsens the perplexity and improves accuracy and BLEU.",
    find=find,
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
            print(f"{name}, seed {seed}: {curve.nll[-1]:.4f} nats a token, exact match {curve.exact_match:.3f}")
            shape = {"seed": seed, "label_smoothing": smoothing, "steps": steps, "pairs": options.pairs}
            rows.append(curve.row(name, shape))
    EXPERIMENT.conclude(rows, options, shared)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
