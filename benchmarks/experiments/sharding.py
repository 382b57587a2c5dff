"""Shards that are fair samples of all sources, against the sources one after another.

    python -m benchmarks.experiments.sharding [--pairs 6000] [--epochs 2] [--seeds 2] [--quick] [--out FILE]

Three sources of number words have up to three, six and nine digits. `fastformer prepare` makes shards of them. One
training reads the shards; the other reads the same examples in the same number of updates, source by source. The rate
is constant after its warm-up, so that a schedule doesn't hide the effect of the order.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from benchmarks.experiments.drawing import draw_curves
from benchmarks.experiments.experiment import Experiment, Row, Spread, Verdict, undecided_by_one_seed, value
from benchmarks.experiments.learning import SMALL, learn
from benchmarks.measure.commands import count
from fastformer.data.order import Order
from fastformer.data.shards.reading import ShardedExamples
from fastformer.number_words import english, german
from fastformer.training import TrainConfig
from fastformer.training.examples import TrainingData, load_data
from fastformer.training.prepare import prepare

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FAIR, IN_TURN = "fair shards", "sources one after the other"
_DIGITS = (3, 6, 9)
_SHARDS = 6
_POINTS = 40  # points on a curve
_MAX_TOKENS = 512


class BySource(ShardedExamples):
    """The same examples, with windows that each contain one source."""

    @property
    def num_windows(self) -> int:
        """The number of sources."""
        return len(self.manifest.sources)

    def window(self, seed: int, epoch: int, window: int) -> Tensor:
        """Returns the indices of one source's examples, (examples,) int64."""
        origins = torch.cat([torch.from_numpy(self._mapped(s).origin.copy()) for s in range(len(self.manifest.shards))])
        return (origins == window).nonzero().flatten()


def sources(folder: Path, pairs: int, seed: int) -> list[str]:
    """Writes the sources, with equal numbers of pairs, and returns their paths."""
    names = []
    for digits in _DIGITS:
        # Numbers of few digits occur repeatedly, as sentences of a small domain do.
        chooser = random.Random(1000 * seed + digits)
        numbers = [chooser.randrange(10 ** (digits - 3), 10**digits) for _ in range(pairs // len(_DIGITS))]
        names.append(str(folder / f"{digits}.tsv"))
        Path(names[-1]).write_text("".join(f"{english(n)}\t{german(n)}\n" for n in numbers), encoding="utf-8")
    return names


def swing(losses: Sequence[tuple[int, float]]) -> float:
    """Returns the mean change of the loss between points, in nats, over the last three quarters of a training."""
    late = [loss for _, loss in losses[len(losses) // 4 :]]
    return statistics.fmean(abs(after - before) for before, after in zip(late, late[1:], strict=False))


@undecided_by_one_seed
def judge(rows: Sequence[Row]) -> Verdict:
    """Judges "supports" if the loss varies less with fair shards, in all seeds."""
    fair, in_turn = Spread.of(rows, FAIR, value), Spread.of(rows, IN_TURN, value)
    return "supports" if fair.below(in_turn) else "contradicts" if in_turn.below(fair) else "undecided"


def draw(rows: Sequence[Row], title: str, footer: str) -> Figure:
    """Draws both ways, with the loss on held-out examples of all sources in the legend."""
    ends = {name: Spread.of(rows, name, lambda row: row["shape"]["nll"]).mean for name in (FAIR, IN_TURN)}
    names = {name: f"{name} (held out, all sources: {end:.2f})" for name, end in ends.items()}
    return draw_curves([row | {"provider": names[row["provider"]]} for row in rows], title, footer)


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Prepares the shards of each seed, and trains both ways."""
    for seed in range(options.seeds):
        with tempfile.TemporaryDirectory() as folder:
            tables = ",".join(sources(Path(folder), options.pairs, seed))
            out = Path(folder, "shards")
            prepare(TrainConfig(train_tsv=tables, vocab_size=200, seed=seed), out, shards=_SHARDS, processes=1)
            data = load_data(TrainConfig(train_data=str(out), shards_at_once=_SHARDS))
            by_source: TrainingData = dataclasses.replace(data, train=BySource(out, window=_SHARDS))
            order = Order(by_source.train, max_tokens=_MAX_TOKENS, batching="packed", seed=seed)
            steps = options.epochs * sum(len(order.plan(0, window)) for window in range(order.num_windows))
            for name, training_data in ((FAIR, data), (IN_TURN, by_source)):
                settings = {"max_tokens": _MAX_TOKENS, "schedule": "constant", "warmup": steps // 8, "lr": options.lr}
                curve, _ = learn(seed, steps=steps, data=training_data, points=_POINTS, model=SMALL, **settings)
                shape = {
                    "seed": seed, "pairs": options.pairs, "epochs": options.epochs, "steps": steps, "lr": options.lr,
                    "nll": round(curve.nll[-1], 4), "exact_match": curve.exact_match, "diverged": curve.diverged,
                }  # fmt: skip
                swung = round(swing(curve.losses), 5)
                print(f"{name}, seed {seed}: swing {swung:.3f}, held out {curve.nll[-1]:.3f}")
                yield curve.row(name, shape, of="losses") | {"value": swung, "unit": "nats from point to point"}


EXPERIMENT = Experiment(
    name="sharding",
    title="Fair shards against sources one after the other: training loss",
    claim="Shards that are fair samples of all sources, as tensor2tensor makes them, keep the loss from swinging.",
    judge=judge,
    draw=draw,
    measure=measure,
    flags={
        "seeds": count(2, "trainings of each kind"),
        "pairs": count(6000, "of all sources"),
        "epochs": count(2, "passes over the sources"),
        "lr": {"type": float, "default": 2e-3, "help": "learning rate after the warm-up"},
    },
    quick={"seeds": 1, "pairs": 600, "epochs": 1},
)
main = EXPERIMENT.main

if __name__ == "__main__":
    raise SystemExit(main())
