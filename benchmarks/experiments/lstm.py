"""The Transformer against its predecessor, an LSTM with attention, with equal CPU time and numbers of parameters.

    python -m benchmarks.experiments.lstm [--seeds 3] [--seconds 30] [--quick] [--out FILE] [--picture FILE]

Both train on one thread, on the same padded batches. A few updates of each show how many fit into the time, so that
both learning rate schedules are complete when the time is over.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks.experiments.drawing import draw_curves
from benchmarks.experiments.experiment import Experiment, Row, Spread, Verdict, final, undecided_by_one_seed, value
from benchmarks.experiments.learning import SMALL, learn
from benchmarks.measure.commands import count

TRANSFORMER, LSTM = "Transformer", "LSTM with attention"
# One layer each, with as many parameters as SMALL; each has the better learning rate of 5e-3 and 1e-2.
MODELS: dict[str, dict[str, Any]] = {
    TRANSFORMER: {"model": SMALL, "lr": 5e-3},
    LSTM: {"model": {"name": "lstm", "d_model": 100}, "lr": 1e-2},
}
_TRIED = 20  # the updates that show how long one takes


@undecided_by_one_seed
def judge(rows: Sequence[Row]) -> Verdict:
    """Judges "supports" if the Transformer is better in likelihood and exact match when the time is over."""
    loss, other_loss = (Spread.of(rows, name, final) for name in (TRANSFORMER, LSTM))
    exact, other_exact = (Spread.of(rows, name, value) for name in (TRANSFORMER, LSTM))
    if loss.below(other_loss) and other_exact.below(exact):
        return "supports"
    return "contradicts" if other_loss.below(loss) and exact.below(other_exact) else "undecided"


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Trains both models for each seed."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # the CPU time of several threads would add up, including time spent waiting
    try:
        for settings in MODELS.values():  # the first updates of a process take longer
            learn(0, steps=3, batching="bucketed", **settings)
        for seed in range(options.seeds):
            # Both are tried before either trains, so that they meet the same conditions.
            tried = {name: learn(seed, steps=_TRIED, batching="bucketed", **MODELS[name])[0] for name in MODELS}
            for name, settings in MODELS.items():
                steps = max(10, round(options.seconds / tried[name].seconds[-1] * _TRIED))
                curve, _ = learn(seed, steps=steps, batching="bucketed", **settings)
                print(f"{name}, seed {seed}: {steps} updates in {curve.seconds[-1]:.1f} s of CPU time, {curve}")
                shape = {"seed": seed, "steps": steps, "lr": settings["lr"]}
                yield curve.row(name, shape, over="seconds") | {"threads": 1}
    finally:
        torch.set_num_threads(before)


EXPERIMENT = Experiment(
    name="lstm",
    title="Transformer against LSTM with attention: validation loss over CPU time",
    claim="The Transformer reaches a better quality than recurrent models, at a fraction of their training time.",
    judge=judge,
    draw=draw_curves,
    measure=measure,
    flags={"seeds": count(3, "models of each kind"), "seconds": count(30, "of CPU time that each training takes")},
    quick={"seeds": 1, "seconds": 2},
)
main = EXPERIMENT.main

if __name__ == "__main__":
    raise SystemExit(main())
