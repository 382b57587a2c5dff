"""Lists the experiments, with the verdicts of their recorded runs.

python -m benchmarks.experiments
"""

from __future__ import annotations

import argparse

from benchmarks.experiments import EXPERIMENTS
from benchmarks.experiments.experiment import RESULTS, last_run
from benchmarks.measure import record


def main(arguments: list[str] | None = None) -> int:
    """Prints a line for each experiment."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.experiments", description=__doc__.splitlines()[0])
    parser.parse_args(arguments)
    rows = record.read(RESULTS) if RESULTS.is_file() else []
    for name, about in EXPERIMENTS.items():
        own = last_run(rows, name)
        print(f"{name:<16} {about} ({own[0]['verdict'] if own else 'not recorded'})")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
