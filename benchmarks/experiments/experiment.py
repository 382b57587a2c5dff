"""The shared part of all experiments: a claim of the sources, rows of figures, the resulting verdict, the picture."""

from __future__ import annotations

import argparse
import importlib
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from benchmarks.experiments import EXPERIMENTS
from benchmarks.measure import record
from benchmarks.measure.commands import parser_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, Any]
RESULTS = Path(__file__).parents[1] / "results" / "experiments.jsonl"


# The verdict on the claim; "undecided" if the spread of the seeds is larger than the difference.
Verdict = Literal["supports", "contradicts", "undecided"]
Judge = Callable[[Sequence[Row]], Verdict]


@dataclass(frozen=True)
class Experiment:
    """A claim, the measurement of figures, and the way to judge the claim by them.

    Attributes:
        name: the name of the module, of the rows' "op" and of the picture.
        title: the title of the picture.
        claim: the claim of the sources.
        judge: the rows of one run -> the verdict on the claim.
        draw: (the rows of one run, the title, the footer) -> a picture.
        measure: the options of the command -> "provider", "shape", "curve", "value" and "unit" of each line.
        flags: the options of this experiment's command, without "--" -> argparse's description of them.
        quick: the values that --quick gives them.
        device: "cpu" or "cuda".
    """

    name: str
    title: str
    claim: str
    judge: Judge
    draw: Callable[[Sequence[Row], str, str], Figure]
    measure: Callable[[argparse.Namespace], Iterable[Row]]
    flags: Mapping[str, Mapping[str, Any]]
    quick: Mapping[str, Any] = field(default_factory=lambda: {"seeds": 1, "steps": 30})
    device: str = "cpu"

    def main(self, arguments: list[str] | None = None) -> int:
        """Runs the command: measures, judges, and writes, draws and prints the rows as the options say."""
        parser = parser_of(f"experiments.{self.name}", EXPERIMENTS[self.name], out=True)
        parser.add_argument("--quick", action="store_true", help="small, in seconds: shows that it runs, and no more")
        parser.add_argument("--picture", type=Path, help="draw this run to this file (.svg, .png, .pdf)")
        for name, flag in self.flags.items():
            parser.add_argument(f"--{name}", **flag)
        options = parser.parse_args(arguments)
        if options.quick:
            vars(options).update(self.quick)
        shared: Row = {"suite": "experiments", "op": self.name} | record.environment(self.device)
        try:
            rows = list(self.measure(options))
        except argparse.ArgumentTypeError as error:
            parser.error(str(error))
        verdict = self.judge(rows)
        shared |= {"verdict": verdict} | ({"quick": True} if options.quick else {})
        rows = [shared | row for row in rows]
        for row in rows:
            record.check(row)
        for row in rows:
            record.append(options.out, row)
        if options.picture:
            self.figure(rows).savefig(options.picture, dpi=150, facecolor="white")
        for provider in dict.fromkeys(row["provider"] for row in rows):
            unit = next(row["unit"] for row in rows if row["provider"] == provider)
            figures = [f"{Spread.of(rows, provider, value)} {unit}"]
            if "curve" in rows[0]:
                figures.insert(0, f"ends at {Spread.of(rows, provider, final)} {rows[0]['curve']['y_label']}")
            print(f"{provider}: {', '.join(figures)}")
        print(f"The sources: {self.claim}\nThe figures: {verdict}")
        return 0

    def figure(self, rows: Sequence[Row]) -> Figure:
        """Draws the picture of a run's rows, with the machine in its footer."""
        row = rows[0]
        threads = f"{row['threads']} thread{'s' if row['threads'] > 1 else ''}"
        return self.draw(rows, self.title, f"{row['device']}, {threads}, PyTorch {row['torch']}")


def load(name: str) -> Experiment:
    """Loads the experiment with a name in EXPERIMENTS."""
    experiment = importlib.import_module(f"benchmarks.experiments.{name}").EXPERIMENT
    assert isinstance(experiment, Experiment)
    return experiment


def last_run(rows: Sequence[Row], name: str) -> list[Row]:
    """Returns the rows of the last run of an experiment; the rows of a run share their time."""
    runs = [row for row in rows if row.get("op") == name]
    return [row for row in runs if row["time"] == runs[-1]["time"]]


@dataclass(frozen=True)
class Spread:
    """The values of several seeds: mean, lowest and highest."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, rows: Sequence[Row], provider: str, value: Callable[[Row], float]) -> Spread:
        """Computes the spread of a provider's rows."""
        values = [value(row) for row in rows if row["provider"] == provider]
        return cls(statistics.fmean(values), min(values), max(values))

    def below(self, other: Spread) -> bool:
        """Returns whether all of these values are below all of the others."""
        return self.high < other.low

    def __str__(self) -> str:
        """Formats the mean, and the range if there are several values."""
        if self.low == self.high:
            return f"{self.mean:.3g}"
        return f"{self.mean:.3g} ({self.low:.3g} to {self.high:.3g})"


def final(row: Row) -> float:
    """Returns the last value of a row's curve; infinity if the training diverged."""
    return math.inf if row["shape"].get("diverged") else float(row["curve"]["y"][-1])


def value(row: Row) -> float:
    """Returns the figure of a row that has one, with or without a curve."""
    return float(row["value"])


def undecided_by_one_seed(judge: Judge) -> Judge:
    """Decorates a judge: a single seed shows no spread."""
    return lambda rows: "undecided" if len({row["shape"]["seed"] for row in rows}) == 1 else judge(rows)
