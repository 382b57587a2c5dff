"""The growth of time and memory with the length of a sequence: exponents fitted to the rows of the suite "scaling".

A power law c n^p is a line in log-log, and p is its slope, fitted by least squares. The fit uses only the upper end:
the lengths from an eighth of the provider's longest up. At short lengths, the overhead of a call, caches, and a window
that isn't full yet bend the line, and an exponent is a statement about long sequences.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.cases.models.bench_scaling import EXPECTED

UPPER_END = 8  # lengths down to this fraction (1/8) of the longest are used
LEAST_POINTS = 3  # two points always lie on a line
LONG = 4096


@dataclass(frozen=True)
class Fit:
    """A power law through the upper end of some points.

    Attributes:
        exponent: the slope in log-log.
        off: how far the farthest point is from the line: 0.05 is 5 %.
        lengths: the lengths that were used.
    """

    exponent: float
    off: float
    lengths: tuple[int, ...]


def fit(points: Mapping[int, float]) -> Fit:
    """Fits the exponent of n -> value over the upper end.

    Raises:
        ValueError: a value or length has no logarithm, or there are too few points.
    """
    if wrong := {n: value for n, value in points.items() if not (n > 0 and 0 < value < math.inf)}:
        raise ValueError(f"expected positive lengths and finite positive values, got {wrong}")
    lengths = sorted(n for n in points if n * UPPER_END >= max(points))
    if len(lengths) < LEAST_POINTS:
        expected = f"at least {LEAST_POINTS} lengths from an eighth of the longest on"
        raise ValueError(f"expected {expected}, got {lengths} of {sorted(points)}")
    x, y = [math.log(n) for n in lengths], [math.log(points[n]) for n in lengths]
    slope, intercept = statistics.linear_regression(x, y)
    residuals = [abs(b - slope * a - intercept) for a, b in zip(x, y, strict=True)]
    return Fit(slope, math.expm1(max(residuals)), tuple(lengths))


Group = tuple[str, int, str, str]  # device, threads, mode, dtype


def groups(rows: Iterable[dict[str, Any]]) -> dict[Group, dict[str, dict[int, dict[str, Any]]]]:
    """Groups the rows about scaling that have a time: (device, threads, mode, dtype) -> provider -> length -> row.

    If a file has two rows for the same length, the later one counts.
    """
    by_group: dict[Group, dict[str, dict[int, dict[str, Any]]]] = {}
    for row in rows:
        if str(row.get("op", "")).startswith("scaling") and row.get("ms_p50"):
            group = row["device"], row["threads"], row["mode"], row["dtype"]
            by_group.setdefault(group, {}).setdefault(row["provider"], {})[row["shape"]["seqlen"]] = row
    return by_group


def report(rows: Iterable[dict[str, Any]]) -> str:
    """Formats the exponents beside those of the paper's table 1, a line a provider, a table for each machine and dtype.

    Raises:
        ValueError: no row is about scaling.
    """
    by_group = groups(rows)
    if not by_group:
        raise ValueError('expected rows of the suite "scaling" (python -m benchmarks.run --suite scaling), got none')
    tables = []
    for (device, threads, mode, dtype), providers in by_group.items():
        lines = [
            f"{device}, {threads} threads, {mode}, {dtype}: time ~ n^p and peak memory ~ n^m, fitted to n of each line",
            f"    {'':<20} {'operations':<16} {'p':>5} {'(paper)':>8} {'m':>6} {'(paper)':>8}   n",
        ]
        for name in sorted(providers, key=lambda name: list(EXPECTED).index(name) if name in EXPECTED else math.inf):
            lines.append(f"    {name:<20} {_line(name, providers[name])}")
        if (found_share := causal_over_full(providers)) is not None:
            n, share = found_share
            lines.append(
                f"    causal over full at n = {n}: {share:.2f} of the time (the triangle is half of the scores)"
            )
        if max(n for rows_ in providers.values() for n in rows_) < LONG:
            lines.append(f"    No length reaches {LONG}: fixed costs still count, and these exponents are too small.")
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


def growth(rows: Mapping[int, dict[str, Any]]) -> tuple[Fit, Fit]:
    """Fits the growth of the time and the peak memory of one provider.

    Raises:
        ValueError: see `fit`.
    """
    return fit({n: row["ms_p50"] for n, row in rows.items()}), fit({n: row["peak_mib"] for n, row in rows.items()})


def _line(name: str, rows: Mapping[int, dict[str, Any]]) -> str:
    expected = EXPECTED.get(name)
    try:
        time, memory = growth(rows)
    except ValueError as error:
        return f"no fit: {error}"
    paper = (expected.operations, f"({expected.time:g})", f"({expected.memory:g})") if expected else ("", "", "")
    return (
        f"{paper[0]:<16} {time.exponent:>5.2f} {paper[1]:>8} {memory.exponent:>6.2f} {paper[2]:>8}   "
        f"{time.lengths[0]} to {time.lengths[-1]}, off by {100 * time.off:.0f} % and {100 * memory.off:.0f} % at most"
    )


def causal_over_full(providers: Mapping[str, Mapping[int, dict[str, Any]]]) -> tuple[int, float] | None:
    """Returns (the longest common length, causal attention's share of full attention's time); None without one."""
    full, causal = (providers.get(name, {}) for name in ("fastformer", "fastformer causal"))
    if not (both := full.keys() & causal.keys()):
        return None
    n = max(both)
    return n, causal[n]["ms_p50"] / full[n]["ms_p50"]
