"""The place of the layer norm: before each sub-layer (tensor2tensor today) or after the sum (the paper).

    python -m benchmarks.experiments.norm_order [--seeds 2] [--steps 150] [--lr 1e-3 3e-3] [--quick] [--out FILE]

All have the same depth and schedule, with and without warm-up. Each uses the best of several learning rates.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from benchmarks.experiments.drawing import draw_curves
from benchmarks.experiments.experiment import Experiment, Row, Spread, Verdict, final, undecided_by_one_seed
from benchmarks.experiments.learning import SMALL, learn
from benchmarks.measure import record
from benchmarks.measure.commands import positive

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ORDERS = {"pre-norm": True, "post-norm": False}
WARM_UPS = ("with warm-up", "without warm-up")


def best_rates(rows: Sequence[Row]) -> list[Row]:
    """Returns for each provider the rows of the learning rate with the lowest final loss, by the mean of its seeds."""
    found = []
    for provider in dict.fromkeys(row["provider"] for row in rows):
        own = [row for row in rows if row["provider"] == provider]
        rates = sorted({row["shape"]["lr"] for row in own})
        by_rate = [[row for row in own if row["shape"]["lr"] == lr] for lr in rates]
        ends = [Spread.of(some, provider, final).mean for some in by_rate]
        found += by_rate[ends.index(min(ends))]
    return found


@undecided_by_one_seed
def judge(rows: Sequence[Row]) -> Verdict:
    """Judges "supports" if pre-norm ends lower in all seeds, with and without warm-up."""
    best = best_rates(rows)
    verdicts = set()
    for warm_up in WARM_UPS:
        pre, post = (Spread.of(best, f"{order}, {warm_up}", final) for order in ORDERS)
        verdicts.add("supports" if pre.below(post) else "contradicts" if post.below(pre) else "undecided")
    if "contradicts" in verdicts:
        return "contradicts"
    return "supports" if verdicts == {"supports"} else "undecided"


def draw(rows: Sequence[Row], title: str, footer: str) -> Figure:
    """Draws each kind at its better learning rate."""
    best = best_rates(rows)
    names = {row["provider"]: f"{row['provider']} (lr {row['shape']['lr']:g})" for row in best}
    return draw_curves([row | {"provider": names[row["provider"]]} for row in best], title, footer)


EXPERIMENT = Experiment(
    name="norm_order",
    title="Pre-norm against post-norm: training loss",
    claim="Pre-norm, as tensor2tensor has it today, trains to a visibly lower loss than the paper's post-norm.",
    judge=judge,
    draw=draw,
)


def main(arguments: list[str] | None = None) -> int:
    """Trains a model for each order, with and without warm-up, and each seed."""
    parser = EXPERIMENT.parser()
    parser.add_argument("--seeds", type=positive, default=2, help="models of each kind and learning rate")
    parser.add_argument("--steps", type=positive, default=150, help="updates of each model")
    parser.add_argument("--layers", type=positive, default=6, help="of the encoder, and of the decoder")
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-3, 3e-3], help="learning rates, at their peak")
    options = parser.parse_args(arguments)
    shared = record.environment("cpu")
    seeds, steps, layers = (1, 20, 2) if options.quick else (options.seeds, options.steps, options.layers)
    kinds = itertools.product(range(seeds), options.lr, zip(WARM_UPS, (max(1, steps // 3), 0), strict=True), ORDERS)
    rows = []
    for seed, lr, (warm_up, warmup), order in kinds:
        sizes = {"num_encoder_layers": layers, "num_decoder_layers": layers, "norm_first": ORDERS[order]}
        curve, _ = learn(seed, steps=steps, lr=lr, warmup=warmup, model=SMALL | sizes)
        name = f"{order}, {warm_up}"
        loss = "diverged" if curve.diverged else f"training loss {curve.losses[-1][1]:.4f}"
        print(f"{name}, lr {lr:g}, seed {seed}: {loss}, exact match {curve.exact_match:.3f}")
        shape = {
            "seed": seed, "norm_first": ORDERS[order], "warmup": warmup, "steps": steps, "layers": layers, "lr": lr,
            "diverged": curve.diverged,
        }  # fmt: skip
        rows.append(curve.row(name, shape, of="losses"))
    EXPERIMENT.conclude(rows, options, shared)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
