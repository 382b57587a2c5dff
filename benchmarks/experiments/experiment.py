"""What all experiments share: a claim of the sources, rows of figures, the verdict that follows, the picture."""

from __future__ import annotations

import argparse
import importlib
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from benchmarks.experiments import EXPERIMENTS
from benchmarks.measure import record

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, Any]
RESULTS = Path(__file__).parents[1] / "results" / "experiments.jsonl"


# Of the claim; "undecided" where the spread of the seeds is larger than the difference.
Verdict = Literal["supports", "contradicts", "undecided"]


@dataclass(frozen=True)
class Experiment:
    """A claim, and how it is held against figures.

    Attributes:
        name: that of the module, the rows' "op" and the picture.
        title: over the picture.
        claim: what the sources say.
        judge: the rows of one run -> what they say of the claim.
        draw: the rows of one run, the title, the footer -> a picture.
    """

    name: str
    title: str
    claim: str
    judge: Callable[[Sequence[Row]], Verdict]
    draw: Callable[[Sequence[Row], str, str], Figure]

    def parser(self) -> argparse.ArgumentParser:
        """The options that each experiment has."""
        parser = argparse.ArgumentParser(
            prog=f"python -m benchmarks.experiments.{self.name}", description=EXPERIMENTS[self.name]
        )
        parser.add_argument("--quick", action="store_true", help="small, in seconds: shows that it runs, and no more")
        parser.add_argument("--out", type=Path, help="append JSON lines to this file")
        parser.add_argument("--picture", type=Path, help="draw this run to this file (.svg, .png, .pdf)")
        return parser

    def conclude(self, rows: list[Row], options: argparse.Namespace, shared: Row) -> Verdict:
        """Adds the verdict and what all rows share, writes, draws and prints as the options say.

        Args:
            rows: "provider", "shape", "curve", "value" and "unit" of each line.
            options: of `parser`.
            shared: `record.environment`, taken when the run began.
        """
        verdict = self.judge(rows)
        same: Row = {"verdict": verdict} | ({"quick": True} if options.quick else {})
        rows = [{"suite": "experiments", "op": self.name} | row | same | shared for row in rows]
        for row in rows:
            record.check(row)
        if options.out:
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
        return verdict

    def figure(self, rows: Sequence[Row]) -> Figure:
        """The picture of a run's rows, with the machine in its footer."""
        row = rows[0]
        threads = f"{row['threads']} thread{'s' if row['threads'] > 1 else ''}"
        return self.draw(rows, self.title, f"{row['device']}, {threads}, PyTorch {row['torch']}")


def positive(text: str) -> int:
    """For argparse: an integer above 0."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected an integer above 0, got {text}")
    return value


def load(name: str) -> Experiment:
    """The experiment of a name out of EXPERIMENTS."""
    found = importlib.import_module(f"benchmarks.experiments.{name}").EXPERIMENT
    assert isinstance(found, Experiment)
    return found


def last_run(rows: Sequence[Row], name: str) -> list[Row]:
    """The rows of the last run of an experiment; a run's rows share their time."""
    own = [row for row in rows if row.get("op") == name]
    return [row for row in own if row["time"] == own[-1]["time"]]


@dataclass(frozen=True)
class Spread:
    """The values of several seeds: mean, lowest, highest."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, rows: Sequence[Row], provider: str, value: Callable[[Row], float]) -> Spread:
        """That of a provider's rows."""
        values = [value(row) for row in rows if row["provider"] == provider]
        return cls(statistics.fmean(values), min(values), max(values))

    def below(self, other: Spread) -> bool:
        """Whether all of these values are below all of the others."""
        return self.high < other.low

    def __str__(self) -> str:
        """The mean, and the range where there is one."""
        if self.low == self.high:
            return f"{self.mean:.3g}"
        return f"{self.mean:.3g} ({self.low:.3g} to {self.high:.3g})"


def final(row: Row) -> float:
    """The last value of a row's curve; infinite where the training diverged."""
    return math.inf if row["shape"].get("diverged") else float(row["curve"]["y"][-1])


def value(row: Row) -> float:
    """The figure beside a row's curve, or in its place."""
    return float(row["value"])


def has_one_seed(rows: Sequence[Row]) -> bool:
    """Whether the rows tell nothing of the spread."""
    return len({row["shape"]["seed"] for row in rows}) == 1
