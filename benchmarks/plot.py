"""Draws the benchmarks' pictures from the committed results: SVG, for light and for dark pages.

python -m benchmarks.plot [NAME ...] [--results DIR] [--out DIR]
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.measure.commands import parser_of
from benchmarks.publish.charts import charts
from benchmarks.publish.latest import RESULTS, Results
from benchmarks.publish.style import PICTURES, save


def main(arguments: list[str] | None = None) -> int:
    """Draws the pictures that have rows, and names the command that makes the rows of the others.

    Returns 1 if a NAME can't be drawn.
    """
    available = charts()
    parser = parser_of("plot", __doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of pictures (all): {', '.join(available)}")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of JSON lines")
    parser.add_argument("--out", type=Path, default=PICTURES, help="the folder of pictures")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - available.keys():
        parser.error(f"expected names of pictures, {', '.join(available)}; got {', '.join(sorted(unknown))}")
    try:
        results = Results(options.results)
    except ValueError as error:
        parser.error(str(error))
    missing = 0
    for name in options.names or available:
        chart = available[name]
        if rows := chart.select(results):
            print(save(chart.draw(rows), name, rows, options.out))
        else:
            print(f"{name} is not drawn, its rows are missing: {chart.command}")
            missing += 1
    return 1 if options.names and missing else 0


if __name__ == "__main__":
    raise SystemExit(main())
