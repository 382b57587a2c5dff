"""The place of the layer norm: before each sub-layer (tensor2tensor today) or after the sum (the paper).

    python -m benchmarks.experiments.norm_order [--seeds 2] [--steps 150] [--lr 1e-3 3e-3] [--quick] [--out FILE]

All have the same depth and schedule, with and without warm-up. Each uses the best of several learning rates.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from benchmarks.experiments.drawing import draw_curves
from benchmarks.experiments.experiment import Experiment, Row, Spread, Verdict, final, undecided_by_one_seed
from benchmarks.experiments.learning import SMALL, learn
from benchmarks.measure.commands import count

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ORDERS = {"pre-norm": True, "post-norm": False}
WARM_UPS = ("with warm-up", "without warm-up")


def best_rates(rows: Sequence[Row]) -> list[Row]:
    """Returns for each provider the rows of the learning rate with the lowest final loss, by the mean of its seeds."""
    best = []
    for provider in dict.fromkeys(row["provider"] for row in rows):
        provider_rows = [row for row in rows if row["provider"] == provider]
        rates = sorted({row["shape"]["lr"] for row in provider_rows})
        by_rate = [[row for row in provider_rows if row["shape"]["lr"] == lr] for lr in rates]
        ends = [Spread.of(rate_rows, provider, final).mean for rate_rows in by_rate]
        best += by_rate[ends.index(min(ends))]
    return best


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


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Trains a model for each order, with and without warm-up, and each seed."""
    warm_ups = zip(WARM_UPS, (max(1, options.steps // 3), 0), strict=True)
    for seed, lr, (warm_up, warmup), order in itertools.product(range(options.seeds), options.lr, warm_ups, ORDERS):
        sizes = {name: options.layers for name in ("num_encoder_layers", "num_decoder_layers")}
        model = SMALL | sizes | {"norm_first": ORDERS[order]}
        curve, _ = learn(seed, steps=options.steps, lr=lr, warmup=warmup, model=model)
        name = f"{order}, {warm_up}"
        loss = "diverged" if curve.diverged else f"training loss {curve.losses[-1][1]:.4f}"
        print(f"{name}, lr {lr:g}, seed {seed}: {loss}, exact match {curve.exact_match:.3f}")
        shape = {
            "seed": seed, "norm_first": ORDERS[order], "warmup": warmup, "steps": options.steps,
            "layers": options.layers, "lr": lr, "diverged": curve.diverged,
        }  # fmt: skip
        yield curve.row(name, shape, of="losses")


EXPERIMENT = Experiment(
    name="norm_order",
    title="Pre-norm against post-norm: training loss",
    claim="Pre-norm, as tensor2tensor has it today, trains to a visibly lower loss than the paper's post-norm.",
    judge=judge,
    draw=draw,
    measure=measure,
    flags={
        "seeds": count(2, "models of each kind and learning rate"),
        "steps": count(150, "updates of each model"),
        "layers": count(6, "of the encoder, and of the decoder"),
        "lr": {"type": float, "nargs": "+", "default": [1e-3, 3e-3], "help": "learning rates, at their peak"},
    },
    quick={"seeds": 1, "steps": 20, "layers": 2},
)
main = EXPERIMENT.main

if __name__ == "__main__":
    raise SystemExit(main())
