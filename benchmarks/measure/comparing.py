"""Compares two files of results line by line: what became faster, and how well their ratios agree."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.measure import record
from benchmarks.measure.console import OURS


def compare(old: Path, new: Path) -> str:
    """Prints old time over new time, line by line: above 1 is faster now. A file may have lines of all kinds.

    The last line names the ratio that differs most among those that were quiet in both.

    Raises:
        ValueError: a file doesn't exist, or a line isn't a JSON object.
    """
    before = {record.key(row): row for row in record.read(old)}
    lines, apart = [], []
    for row in record.read(new):
        previous = before.get(record.key(row))
        now, then = record.seconds(row), None if previous is None else record.seconds(previous)
        if previous is None or now is None or then is None:
            continue
        parts = [f"{then / now:>6.2f}x"]
        for what, ratio, quiet in _ratios(row):
            if previous.get(ratio):
                parts.append(f"({what}: {previous[ratio]:.2f}x -> {row[ratio]:.2f}x)")
                if row.get(quiet) and previous.get(quiet):
                    smaller, larger = sorted((previous[ratio], row[ratio]))
                    apart.append((larger / smaller - 1, f"{what}: {' '.join(record.key(row))}"))
        if previous.get("backends", row.get("backends")) != row.get("backends"):
            parts.append(f"(other backends: {previous['backends']} -> {row.get('backends')})")
        lines.append("  ".join([*parts, " ".join(record.key(row))]))
    if not lines:
        return "no line of one file has a line about the same thing, with a time, in the other"
    if apart:
        most, where = max(apart)
        lines.append(f"of {len(apart)} ratios that were quiet in both, none differs by more than {most:.1%} ({where})")
    return "\n".join(lines)


def _ratios(row: record.Row) -> Iterator[tuple[str, str, str]]:
    """Yields (label, field, field that says whether it was quiet) for each ratio of a line to other lines."""
    provider, baseline = row.get("provider"), row.get("baseline")
    if row.get("speedup") and (baseline is None or baseline != provider):
        yield "speedup" if baseline is None else f"against {baseline}", "speedup", "quiet"
        if row.get("ours") and provider not in OURS:  # for the baseline, this is fastformer's speedup
            yield "ours against it", "ours", "ours_quiet"
