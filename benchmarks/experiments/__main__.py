"""What the experiments found: a list, or, with --write, README.md and the pictures from the recorded lines.

python -m benchmarks.experiments [--write]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.experiments import EXPERIMENTS
from benchmarks.experiments.experiment import RESULTS, Row, last_run, load
from benchmarks.measure import record
from benchmarks.publish import style

PAGE = Path(__file__).with_name("README.md")
_HEAD = """# The sources' experiments

Each is a command that holds a claim of the sources against figures. Where seeds differ, ranges are over them, and a
difference counts where all of one side are below all of the other. The program derives each finding from the figures;
`python -m benchmarks.experiments --write` writes this page and draws the pictures from
[results/experiments.jsonl](../results/experiments.jsonl). `--quick` shows in seconds that an experiment runs.
"""


def main(arguments: list[str] | None = None) -> int:
    """Lists the experiments, or writes the page and the pictures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.experiments", description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write README.md and draw what is recorded")
    options = parser.parse_args(arguments)
    rows = record.read(RESULTS) if RESULTS.is_file() else []
    for name, about in EXPERIMENTS.items():
        own = last_run(rows, name)
        print(f"{name:<16} {about} ({own[0]['verdict'] if own else 'not recorded'})")
        if options.write and own:
            style.save(load(name).figure(own), picture(name), own)
    if options.write:
        PAGE.write_text(page(rows), encoding="utf-8")
    return 0


def picture(name: str) -> str:
    """What an experiment's picture is called, without its ending."""
    return f"experiment_{name}"


def page(rows: Sequence[Row]) -> str:
    """README.md for the recorded lines."""
    parts = [_HEAD]
    for name, about in EXPERIMENTS.items():
        experiment, own = load(name), last_run(rows, name)
        parts.append(f"## {about[0].upper()}{about[1:]}\n\nThe sources: {experiment.claim}\n")
        if not own:
            parts.append(f"Not recorded yet: `python -m benchmarks.experiments.{name}`\n")
            continue
        row = own[0]
        parts.append(f"![{experiment.title}](../pictures/{picture(name)}.svg)\n")
        parts.append(f"**{row['verdict'].capitalize()}**: {row['finding']}\n")
        parts.append(f"`{row['command']}`, at {row['commit']}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    raise SystemExit(main())
