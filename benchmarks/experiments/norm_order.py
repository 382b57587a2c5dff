"""Where the layer norm stands: before each sub-layer (tensor2tensor today) or after the sum (the paper).

    python -m benchmarks.experiments.norm_order [--seeds 3] [--steps 150] [--layers 6] [--quick] [--out FILE]

The same depth, learning rate and schedule for all, with warm-up and without.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import record
from benchmarks.experiments.drawing import draw_curves
from benchmarks.experiments.experiment import Experiment, Finding, Row, Spread, final, positive
from benchmarks.experiments.learning import SMALL, learn

ORDERS = {"pre-norm": True, "post-norm": False}
WARM_UPS = ("with warm-up", "without warm-up")


def find(rows: Sequence[Row]) -> Finding:
    """Supported where pre-norm ends lower in all seeds, with warm-up and without."""
    parts, verdicts = [], []
    for warm_up in WARM_UPS:
        pre, post = (Spread.of(rows, f"{order}, {warm_up}", final) for order in ORDERS)
        verdicts.append("supports" if pre.below(post) else "contradicts" if post.below(pre) else "undecided")
        parts.append(f"{warm_up} pre-norm ends at a training loss of {pre.show()} and post-norm at {post.show()}")
    diverged = sum(bool(row["shape"]["diverged"]) for row in rows)
    stopped = f"; {diverged} of {len(rows)} trainings diverged, the curves of which end early" if diverged else ""
    figures = f"{'; '.join(parts)}{stopped}."
    if len({row["shape"]["seed"] for row in rows}) == 1:
        return Finding("undecided", f"With a single seed, which tells nothing of the spread: {figures}")
    if set(verdicts) == {"supports"}:
        return Finding("supports", f"Pre-norm trains to a lower loss either way: {figures}")
    if "contradicts" in verdicts:
        where = " and ".join(w for w, verdict in zip(WARM_UPS, verdicts, strict=True) if verdict == "contradicts")
        return Finding("contradicts", f"Post-norm trains to a lower loss {where}: {figures}")
    if "supports" in verdicts:
        where = WARM_UPS[verdicts.index("supports")]
        return Finding("undecided", f"Pre-norm trains to a lower loss {where} only: {figures}")
    return Finding("undecided", f"The orders differ by less than seeds do: {figures}")


EXPERIMENT = Experiment(
    name="norm_order",
    title="Pre-norm against post-norm: training loss",
    claim="Pre-norm, as tensor2tensor has it today, trains to a visibly lower loss than the paper's post-norm.",
    find=find,
    draw=draw_curves,
)


def main(arguments: list[str] | None = None) -> int:
    """Trains a model for each order, with and without warm-up, and each seed."""
    parser = EXPERIMENT.parser()
    parser.add_argument("--seeds", type=positive, default=3, help="models of each kind")
    parser.add_argument("--steps", type=positive, default=150, help="updates of each model")
    parser.add_argument("--layers", type=positive, default=6, help="of the encoder, and of the decoder")
    parser.add_argument("--lr", type=float, default=3e-3, help="the peak of all")
    options = parser.parse_args(arguments)
    shared = record.environment("cpu")
    seeds, steps, layers = (1, 20, 2) if options.quick else (options.seeds, options.steps, options.layers)
    rows = []
    for seed in range(seeds):
        for warm_up, warmup in zip(WARM_UPS, (max(1, steps // 4), 0), strict=True):
            for order, norm_first in ORDERS.items():
                sizes = {"num_encoder_layers": layers, "num_decoder_layers": layers, "norm_first": norm_first}
                curve, _ = learn(seed, steps=steps, lr=options.lr, warmup=warmup, model=SMALL | sizes)
                name = f"{order}, {warm_up}"
                print(
                    f"{name}, seed {seed}: training loss {curve.losses[-1][1]:.4f}, exact match {curve.exact_match:.3f}"
                )
                shape = {
                    "seed": seed, "norm_first": norm_first, "warmup": warmup, "steps": steps, "layers": layers,
                    "lr": options.lr, "diverged": curve.diverged,
                }  # fmt: skip
                rows.append(curve.row(name, shape, of="losses"))
    EXPERIMENT.conclude(rows, options, shared)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
