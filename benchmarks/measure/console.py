"""Output for people: a line for each row, and at the end fastformer beside each rival, and the cases that it loses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks.measure.timing import STEADY

Row = Mapping[str, Any]
OURS = ("fastformer", "accelerated")  # the names of fastformer in comparisons of several of its forms


def table(row: Row) -> str:
    """Formats a row: the ratio first, then the absolute time with its spread, then the share of the roofline."""
    name = " ".join(str(row[part]) for part in ("provider", "precision") if part in row)
    if "missing" in row:
        return f"    {name:<22} is missing: {row['missing']}"
    parts = [f"    {name:<22}"]
    if row.get("speedup") is not None:
        parts.append(f"{row['speedup']:>6.2f}x")
        if row.get("uncertainty") is not None:
            parts[-1] += f" ±{row['uncertainty']:>3.0%}" if row["provider"] != row["baseline"] else " " * 5
    parts.append(f"{row['ms_p50']:>10.3f} ms [{row['ms_p20']:.3f}, {row['ms_p80']:.3f}]")
    reached = ""
    if row.get("bound") == "memory" and row.get("gb_s"):
        reached = f"{row['gb_s']:>7.1f} GB/s"
    elif row.get("tflop_s"):
        reached = f"{1e3 * row['tflop_s']:>7.0f} GFLOP/s"
    if reached:
        parts.append(reached + (f" ({row['share']:.0%})" if row.get("share") else ""))
    if row.get("tokens_s"):
        parts.append(f"{row['tokens_s']:>9,.0f} tokens/s")
    if row.get("peak_mib") is not None:
        parts.append(f"peak {row['peak_mib']:.0f} MiB")
    if row.get("backends"):
        parts.append("on " + ", ".join(sorted(set(row["backends"].values()))))
    if (why := doubt(row)) is not None:
        parts.append(why)
    return "  ".join(parts)


def is_quiet(row: Row) -> bool | None:
    """Returns whether the row's ratio of fastformer, or else its `speedup`, can be relied on; None: not known."""
    quiet = row.get("quiet") if row["provider"] in OURS else row.get("ours_quiet", row.get("quiet"))
    return quiet if quiet is None else bool(quiet)


def doubt(row: Row) -> str | None:
    """Returns why a row's `speedup` can't be relied on; None if it can, or if that isn't known."""
    if row.get("quiet") is not False:
        return None
    if (row.get("uncertainty") or 0.0) > STEADY:
        return f"unsteady over {row['passes']} passes"
    if row.get("slow", 0.0) > row["disturbed"]:
        return f"slow clock: {row['slow']:.0%} of {row['rounds']} turns"
    return f"disturbed: {row['disturbed']:.0%} of {row['rounds']} turns"


def title(row: Row) -> str:
    """Formats the case of a row in a line."""
    sizes = (f"{name}={value}" for name, value in row["shape"].items())
    return " ".join([*(str(row[part]) for part in ("op", "model", "mode", "dtype") if part in row), *sizes])


def does_same_work(row: Row) -> bool:
    """Returns whether all providers of a row's case do the same work: in the suite "scaling" they don't."""
    return row.get("suite") != "scaling"


def against(row: Row) -> tuple[str, float] | None:
    """Returns (a rival, how many times faster fastformer is), if the row has this ratio."""
    if not does_same_work(row):
        return None
    if "ours" in row:
        if row["provider"] == "accelerated":
            return f"{row['baseline']}, accelerated", row["speedup"]
        return (row["provider"], row["ours"]) if row["provider"] not in OURS else None
    if row.get("speedup") and row["provider"] in OURS and row.get("baseline") and row["baseline"] != row["provider"]:
        return row["baseline"], row["speedup"]
    return None


def stage(row: Row) -> tuple[str, float] | None:
    """Returns (stage of fastformer, how many times faster it is than the plainest), if the row compares stages."""
    is_stage = "ours" not in row and row["provider"] not in OURS
    if is_stage and row.get("speedup") and row.get("baseline") not in (None, row["provider"]):
        return row["provider"], row["speedup"]
    return None


def summary(rows: Sequence[Row], not_timed: Iterable[tuple[str, str]] = ()) -> str:
    """Formats the end of a run.

    Args:
        rows: rows of any suites.
        not_timed: (provider and case, reason) of each provider that was not timed.
    """
    lines: list[str] = []
    for suite in dict.fromkeys(row["suite"] for row in rows):
        suite_rows = [row for row in rows if row["suite"] == suite]
        lines += _ratios(f"{suite}: ours is faster than", suite_rows, against)
        for baseline in dict.fromkeys(row["baseline"] for row in suite_rows if stage(row) is not None):
            same = [row for row in suite_rows if row.get("baseline") == baseline]
            lines += _ratios(f"{suite}: faster than {baseline}", same, stage)
    losses: dict[tuple[str, str], str] = {}
    for row in rows:
        if (ratio := against(row)) is not None and ratio[1] < 1:
            losses.setdefault((title(row), ratio[0]), f"  {ratio[1]:.2f}x {ratio[0]}  {title(row)}" + _mark(row))
    lines += _part("Ours is slower than", list(losses.values()))
    lines += _part("Not timed", list(dict.fromkeys(f"  {which}: {why}" for which, why in not_timed)))
    absent = dict.fromkeys(f"  {row['provider']}: {row['missing']}" for row in rows if "missing" in row)
    lines += _part("Missing", list(absent))
    shown = [is_quiet(row) for row in rows if against(row) is not None or stage(row) is not None]
    if False in shown:
        count, watched = shown.count(False), len(shown) - shown.count(None)
        lines += ["", f"~ {count} of {watched} ratios were disturbed or unsteady: run again when the machine is quiet"]
    return "\n".join(lines)


def _ratios(what: str, rows: Sequence[Row], ratio: Callable[[Row], tuple[str, float] | None]) -> list[str]:
    """Formats how many times faster: a line for each case, a column for each provider for which `ratio` has a value."""
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        if (value := ratio(row)) is not None:
            cells.setdefault(title(row), {})[value[0]] = f"{value[1]:.2f}x{_mark(row)}"
    if not cells:
        return []
    rivals = list(dict.fromkeys(rival for by_rival in cells.values() for rival in by_rival))
    widths = [max(8, len(rival) + 1) for rival in rivals]
    wide = max(map(len, [what, *cells]))
    header = "".join(f"  {rival:>{width}}" for rival, width in zip(rivals, widths, strict=True))
    lines = ["", f"{what:<{wide}}{header}"]
    for name, by_rival in cells.items():
        row_cells = (f"  {by_rival.get(rival, ''):>{width}}" for rival, width in zip(rivals, widths, strict=True))
        lines.append((f"{name:<{wide}}" + "".join(row_cells)).rstrip())
    return lines


def _mark(row: Row) -> str:
    return "~" if is_quiet(row) is False else ""


def _part(name: str, lines: list[str]) -> list[str]:
    return ["", f"{name}:", *lines] if lines else []
