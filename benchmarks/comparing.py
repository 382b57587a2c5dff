"""Two files of results, line by line: what became faster, and how far their ratios agree."""

from __future__ import annotations

from pathlib import Path

from benchmarks import record


def compare(old: Path, new: Path) -> str:
    """Old over new, line by line: above 1 is faster now. Lines of all kinds may share a file.

    The last line says which ratio differs most among those that were quiet in both.

    Raises:
        ValueError: a file that is not there, or a line that is not a JSON object.
    """
    before = {record.key(row): row for row in record.read(old)}
    lines, apart = [], []
    for row in record.read(new):
        known = before.get(record.key(row))
        now, then = record.seconds(row), None if known is None else record.seconds(known)
        if known is None or now is None or then is None:
            continue
        parts = [f"{then / now:>6.2f}x"]
        if row.get("speedup") and known.get("speedup"):
            against = f"against {row['baseline']}: " if "baseline" in row else ""
            parts.append(f"({against}{known['speedup']:.2f}x -> {row['speedup']:.2f}x)")
            if row.get("quiet") and known.get("quiet") and row["provider"] != row["baseline"]:
                ratios = sorted((known["speedup"], row["speedup"]))
                apart.append((ratios[1] / ratios[0] - 1, " ".join(record.key(row))))
        if known.get("backends", row.get("backends")) != row.get("backends"):
            parts.append(f"(other backends: {known['backends']} -> {row.get('backends')})")
        lines.append("  ".join([*parts, " ".join(record.key(row))]))
    if not lines:
        return "no line of one file has a line about the same thing, with a time, in the other"
    if apart:
        most, where = max(apart)
        lines.append(f"of {len(apart)} ratios that were quiet in both, none differs by more than {most:.1%} ({where})")
    return "\n".join(lines)
