"""Lists the experiments, with the verdicts of their recorded runs.

python -m benchmarks.experiments
"""

from __future__ import annotations

from benchmarks.experiments import EXPERIMENTS
from benchmarks.experiments.experiment import RESULTS, last_run
from benchmarks.measure import record
from benchmarks.measure.commands import parser_of


def main(arguments: list[str] | None = None) -> int:
    """Prints a line for each experiment."""
    parser = parser_of("experiments", __doc__)
    parser.parse_args(arguments)
    rows = record.read(RESULTS) if RESULTS.is_file() else []
    for name, about in EXPERIMENTS.items():
        last_rows = last_run(rows, name)
        print(f"{name:<16} {about} ({last_rows[0]['verdict'] if last_rows else 'not recorded'})")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
