"""The two layouts of sinusoidal positions: alternating sines and cosines (the paper), all sines first (tensor2tensor).

python -m benchmarks.experiments.positions [--seeds 3] [--steps 240] [--quick] [--out FILE] [--picture FILE]
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.experiments.drawing import draw_curves
from benchmarks.experiments.experiment import Experiment, Row, Spread, Verdict, final, undecided_by_one_seed, value
from benchmarks.experiments.learning import SMALL, learn
from benchmarks.measure import record
from benchmarks.measure.commands import positive

LAYOUTS = {"interleaved (the paper)": "interleaved", "concatenated (tensor2tensor)": "concatenated"}


@undecided_by_one_seed
def judge(rows: Sequence[Row]) -> Verdict:
    """Judges whether the ranges over the seeds overlap, in the likelihood and in the exact match."""
    for measure in (final, value):
        paper, other = (Spread.of(rows, layout, measure) for layout in LAYOUTS)
        if paper.below(other) or other.below(paper):
            return "contradicts"
    return "supports"


EXPERIMENT = Experiment(
    name="positions",
    title="Two layouts of the positions: validation loss",
    claim="tensor2tensor puts all sines before all cosines, a slight difference from the paper, as it says.",
    judge=judge,
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
            print(f"{name}, seed {seed}: {curve}")
            rows.append(curve.row(name, {"seed": seed, "positions": layout, "steps": steps}))
    EXPERIMENT.conclude(rows, options, shared)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
