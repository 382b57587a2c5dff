"""The two layouts of the sinusoidal positions: sines and cosines in turn (the paper), all sines first (tensor2tensor).

python -m benchmarks.experiments.positions [--seeds 3] [--steps 240] [--quick] [--out FILE] [--picture FILE]
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.experiments.drawing import draw_curves
from benchmarks.experiments.experiment import Experiment, Finding, Row, Spread, final, positive, value
from benchmarks.experiments.learning import SMALL, learn
from benchmarks.measure import record

LAYOUTS = {"interleaved (the paper)": "interleaved", "concatenated (tensor2tensor)": "concatenated"}


def find(rows: Sequence[Row]) -> Finding:
    """A slight difference where the ranges over the seeds overlap, in the likelihood and in the exact match."""
    paper, other = LAYOUTS
    nll = {layout: Spread.of(rows, layout, final) for layout in LAYOUTS}
    exact = {layout: Spread.of(rows, layout, value) for layout in LAYOUTS}
    apart = [
        name
        for name, spreads in (("likelihood", nll), ("exact match", exact))
        if spreads[paper].below(spreads[other]) or spreads[other].below(spreads[paper])
    ]
    figures = (
        f"interleaved positions end at {nll[paper]} nats a token and an exact match of {exact[paper]}, "
        f"concatenated ones at {nll[other]} and {exact[other]}"
    )
    losses = {
        layout: {row["shape"]["seed"]: final(row) for row in rows if row["provider"] == layout} for layout in LAYOUTS
    }
    seeds = losses[paper].keys()
    lower = sum(losses[paper][seed] < losses[other][seed] for seed in seeds)
    figures += f" (the interleaved ones have the lower loss in {lower} of {len(seeds)} seeds)"
    if len(seeds) == 1:
        return Finding("undecided", f"With a single seed, which tells nothing of the spread, {figures}.")
    if apart:
        return Finding("contradicts", f"The layouts differ in {' and '.join(apart)} beyond the seeds: {figures}.")
    return Finding("supports", f"The ranges of the layouts over the seeds overlap: {figures}.")


EXPERIMENT = Experiment(
    name="positions",
    title="Two layouts of the positions: validation loss",
    claim="tensor2tensor puts all sines before all cosines, a slight difference from the paper, as it says.",
    find=find,
    draw=draw_curves,
)


def main(arguments: list[str] | None = None) -> int:
    """Trains a model for each layout and seed."""
    parser = EXPERIMENT.parser()
    parser.add_argument("--seeds", type=positive, default=3, help="models of each layout")
    parser.add_argument("--steps", type=positive, default=240, help="updates of each model")
    options = parser.parse_args(arguments)
    shared = record.environment("cpu")
    seeds, steps = (1, 30) if options.quick else (options.seeds, options.steps)
    rows = []
    for seed in range(seeds):
        for name, layout in LAYOUTS.items():
            curve, _ = learn(seed, steps=steps, lr=5e-3, model=SMALL | {"positions": layout})
            print(f"{name}, seed {seed}: {curve.nll[-1]:.4f} nats a token, exact match {curve.exact_match:.3f}")
            rows.append(curve.row(name, {"seed": seed, "positions": layout, "steps": steps}))
    EXPERIMENT.conclude(rows, options, shared)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
