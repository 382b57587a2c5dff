"""Selects the lines of `benchmarks/results/` that count, those of each case's latest run, for tables and pictures.

The lines of a run have the same time, and its providers ran in turns, so their ratios are meaningful. Lines of an
earlier run of the same case are history, even those of a provider that the latest run omitted. Decoding beside one
engine and beside another are two cases, because both engines need not be installed at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.measure import record

Row = dict[str, Any]
Key = TypeVar("Key")
RESULTS = Path(__file__).parents[1] / "results"
# Compiled code and host time are not the speed of a provider; results of CPUs without AVX-512 have tables of their own.
WITHOUT_AVX512 = "avx2"
# The gain of accelerate() on CPUs for which PyTorch's own products reach the full rate: less than on the latest
# machine, on which they reach half of it.
AT_FULL_RATE = "drop_in_full_rate"
# Intel CPUs with AMX have tables of their own, too.
WITH_AMX = "amx"
# Attention on a GPU by the kernels for one architecture, in a run of their own.
GPU_FORMS = "cuda_attention_forms"
_OTHER_KINDS = ("machine_code", "host_time", "nightly", WITHOUT_AVX512, AT_FULL_RATE, WITH_AMX, GPU_FORMS)
# The fields that identify a case, besides its shape; providers and their precisions are compared within it.
_CASE = ("op", "mode", "dtype", "model", "data")
_ABSENT = object()


class Results:
    """The results in all files of a folder.

    Attributes:
        folder: the folder.
        kind: the kind of the files, if they are not the usual ones.
        rows: the lines that count, in the order of the files' names and of their lines.
    """

    def __init__(self, folder: Path = RESULTS, *, with_quick: bool = False, kind: str | None = None) -> None:
        """Reads every `*.jsonl`.

        Args:
            folder: the folder of the files.
            with_quick: whether the lines of a --quick run count, too.
            kind: only the files of another kind, whose names begin with it. None: all files but those of other kinds.

        Raises:
            ValueError: the folder doesn't exist, or a line isn't a JSON object; the message has file and line.
        """
        if not folder.is_dir():
            raise ValueError(f"expected a folder of results, but there is no folder {folder}")
        self.folder, self.kind = folder, kind
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
        """Returns the file and the line of a row, such as "cpu.jsonl:12"."""
        return self._origins[id(row)]

    def find(self, test: Callable[[Row], bool] | None = None, /, **fields: Any) -> list[Row]:
        """Returns the rows that have all of these fields; see `matches`."""
        return [row for row in self.rows if matches(row, fields) and (test is None or test(row))]


def grouped(rows: Iterable[Row], key: Callable[[Row], Key]) -> dict[Key, list[Row]]:
    """Returns the rows by a key, in the order of their first rows."""
    groups: dict[Key, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def case_of(row: Mapping[str, Any]) -> str:
    """Returns the measured case without its provider: rows of one case are compared with each other."""
    parts = {name: row[name] for name in _CASE if row.get(name) is not None}
    parts["shape"] = row.get("shape") or {}
    parts["platform"] = platform_of(row)
    # Peers and speech run with their better number of threads; all other cases differ by the number of threads.
    if row.get("op") not in ("peers", "speech"):
        parts["threads"] = row.get("threads")
    elif baseline := row.get("baseline"):
        parts["beside"] = baseline.rpartition(" ")[0]
    return json.dumps(parts, sort_keys=True)


def platform_of(row: Mapping[str, Any]) -> str:
    """Returns "cpu" or "cuda"; rows of a GPU have a pair of numbers as capability."""
    return "cuda" if isinstance(row.get("capability"), list) else "cpu"


def latest(rows: Iterable[Row]) -> list[Row]:
    """Returns the lines of each case's latest run; lines without a time are of one run, the earliest."""
    rows = list(rows)
    last: dict[str, str] = {}
    for row in rows:
        case = case_of(row)
        last[case] = max(row.get("time") or "", last.get(case, ""))
    return [row for row in rows if (row.get("time") or "") == last[case_of(row)]]


def matches(row: Mapping[str, Any], fields: Mapping[str, Any]) -> bool:
    """Returns whether a row has these values: in its own fields, in its shape, or nested, such as `beam_4__chrf`.

    A tuple of values matches any of them.
    """
    for name, allowed in fields.items():
        value = value_of(row, name)
        if value is _ABSENT or (value not in allowed if isinstance(allowed, tuple) else value != allowed):
            return False
    return True


def value_of(row: Mapping[str, Any], name: str) -> Any:
    """Returns a field of a row or of its shape, or `_ABSENT`; two underscores separate the names of nested fields."""
    value: Any = row
    for part in name.split("__"):
        if not isinstance(value, Mapping) or part not in value:
            shape = row.get("shape")
            return shape.get(name, _ABSENT) if isinstance(shape, Mapping) else _ABSENT
        value = value[part]
    return value


def was_timed(row: Mapping[str, Any]) -> bool:
    """Returns whether a row has a time; rows of a missing provider don't."""
    return "missing" not in row and record.seconds(dict(row)) is not None


def machine(rows: Iterable[Mapping[str, Any]]) -> str:
    """Describes the machines of the rows for a footer: devices, threads, PyTorch."""
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
