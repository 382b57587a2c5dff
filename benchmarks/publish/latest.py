"""The lines of `benchmarks/results/` that count: those of each case's latest run. Tables and pictures use these.

The lines of a run share their time, and its providers took turns, so their ratios mean something. Lines of an earlier
run of the same case are history, even those of a provider that the latest run left out. Decoding beside one engine and
beside another are two cases, since both engines need not be installed at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.measure import record

Row = dict[str, Any]
RESULTS = Path(__file__).parents[1] / "results"
# Compiled code and host time are no speed of a provider; results of CPUs without AVX-512 have tables of their own.
WITHOUT_AVX512 = "avx2"
# What accelerate() gains where PyTorch's own products have the CPU's whole rate: less than on the latest one, where
# they have half of it.
AT_FULL_RATE = "drop_in_full_rate"
_OTHER_KINDS = ("machine_code", "host_time", WITHOUT_AVX512, AT_FULL_RATE)
# What makes two lines of the same case; the providers and their precisions are what is compared.
_CASE = ("op", "mode", "dtype", "model", "data")
_ABSENT = object()


class Results:
    """All files of a folder.

    Attributes:
        folder: the folder.
        rows: the lines that count, in the order of the files' names and of the lines.
    """

    def __init__(self, folder: Path = RESULTS, *, with_quick: bool = False, kind: str | None = None) -> None:
        """Reads every `*.jsonl`.

        Args:
            folder: where they are.
            with_quick: the lines of a --quick run count, too.
            kind: only the files of another kind, whose names begin so. They are left out else.

        Raises:
            ValueError: no such folder, or a line that is not a JSON object; file and line are named.
        """
        if not folder.is_dir():
            raise ValueError(f"expected a folder of results, but there is no folder {folder}")
        self.folder = folder
        self._origins: dict[int, str] = {}
        everything = []
        for path in sorted(folder.glob("*.jsonl")):
            if not path.stem.startswith(kind) if kind else path.stem.startswith(_OTHER_KINDS):
                continue
            for number, row in enumerate(record.read(path), 1):
                self._origins[id(row)] = f"{path.name}:{number}"
                everything.append(row)
        self._everything = everything  # keeps the rows, and with them their ids
        self.rows = latest(row for row in everything if with_quick or not row.get("quick"))

    def origin(self, row: Row) -> str:
        """The file and the line of a row, such as "cpu.jsonl:12"."""
        return self._origins[id(row)]

    def find(self, test: Callable[[Row], bool] | None = None, /, **fields: Any) -> list[Row]:
        """The rows that have all of these fields; see `matches`."""
        return [row for row in self.rows if matches(row, fields) and (test is None or test(row))]


def case_of(row: Mapping[str, Any]) -> str:
    """The measured case without its provider: rows of one case are compared with one another."""
    parts = {name: row[name] for name in _CASE if row.get(name) is not None}
    parts["shape"] = row.get("shape") or {}
    parts["platform"] = platform_of(row)
    # Peers run with the number of threads that is better for each; all else is told apart by it.
    if row.get("op") != "peers":
        parts["threads"] = row.get("threads")
    elif baseline := row.get("baseline"):
        parts["beside"] = baseline.rpartition(" ")[0]
    return json.dumps(parts, sort_keys=True)


def platform_of(row: Mapping[str, Any]) -> str:
    """ "cpu", or "cuda", whose capability is a pair of numbers."""
    return "cuda" if isinstance(row.get("capability"), list) else "cpu"


def latest(rows: Iterable[Row]) -> list[Row]:
    """The lines of each case's latest run. Of lines without a time the last of its kind counts."""
    timed: dict[str, str] = {}
    last: dict[tuple[str, ...], Row] = {}
    rows = list(rows)
    for row in rows:
        if time := row.get("time"):
            case = case_of(row)
            timed[case] = max(time, timed.get(case, ""))
        else:
            last[record.key(row)] = row
    kept = []
    for row in rows:
        if row.get("time"):
            if timed[case_of(row)] == row["time"]:
                kept.append(row)
        elif last[record.key(row)] is row:
            kept.append(row)
    return kept


def matches(row: Mapping[str, Any], fields: Mapping[str, Any]) -> bool:
    """Whether a row has these values: of its own fields, of its shape's, or of `beam_4__chrf`, nested ones.

    A tuple of values means any of them.
    """
    for name, wanted in fields.items():
        found = value_of(row, name)
        if found is _ABSENT or (found not in wanted if isinstance(wanted, tuple) else found != wanted):
            return False
    return True


def value_of(row: Mapping[str, Any], name: str) -> Any:
    """A field of a row, else of its shape; nested ones are parted by two underscores. `_ABSENT` where there is none."""
    found: Any = row
    for part in name.split("__"):
        if not isinstance(found, Mapping) or part not in found:
            shape = row.get("shape")
            return shape.get(name, _ABSENT) if isinstance(shape, Mapping) else _ABSENT
        found = found[part]
    return found


def was_timed(row: Mapping[str, Any]) -> bool:
    """Whether it says something about time: rows of an absent provider don't."""
    return "missing" not in row and record.seconds(dict(row)) is not None


def machine(rows: Iterable[Mapping[str, Any]]) -> str:
    """On what the rows came to be, for a footer: devices, threads, PyTorch."""
    rows = list(rows)

    def all_of(name: str) -> str:
        return ", ".join(sorted({str(row[name]) for row in rows if row.get(name) is not None}))

    parts = [all_of("device")]
    if threads := all_of("threads"):
        parts.append(f"{threads} thread{'s' * (threads != '1')}")
    if torch := all_of("torch"):
        parts.append(f"PyTorch {torch}")
    if commits := all_of("commit"):
        parts.append(f"commit {commits}")
    return " · ".join(part for part in parts if part)
