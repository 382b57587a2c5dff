"""The schema of results: what breaks it is said, and every committed line keeps it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.measure import record

FOLDER = record.ROOT / "benchmarks" / "results"
FILES = [p for p in sorted(FOLDER.glob("*.jsonl")) if not p.stem.startswith(("machine_code", "host_time"))]


def line(**fields: Any) -> dict[str, Any]:
    row = {"suite": "ops", "op": "rotary", "provider": "eager", "shape": {"batch": 1}, **record.environment("cpu")}
    return {name: value for name, value in (row | fields).items() if value is not ...}


TIMES = {"ms_p20": 1.0, "ms_p50": 2.0, "ms_p80": 2.0}


@pytest.mark.parametrize(
    "fields",
    [{}, TIMES, {**TIMES, "share": 0.5, "floor_ms": 1.0, "bound": "memory"}, {"missing": "pip install it"}, {"x": ...}],
)
def test_what_keeps_the_schema(fields: dict[str, Any]) -> None:
    record.check(line(**fields))


@pytest.mark.parametrize(
    "fields, says",
    [
        ({"milliseconds": 1.0}, "expected fields that benchmarks/measure/record.py knows, got 'milliseconds'"),
        ({"suite": ..., "commit": ...}, "expected a line with 'suite', 'commit', got"),
        ({"suite": "op"}, "expected a suite out of ops, modules, .*, got 'op'"),
        ({**TIMES, "ms_p50": "2"}, "expected ms_p50 .* to be float or int, got '2'"),
        ({**TIMES, "ms_p50": True}, "expected ms_p50 .* to be float or int, got True"),
        ({**TIMES, "ms_p20": float("nan")}, "expected ms_p20 .* to be finite, got nan"),
        ({"threads": 1.0}, "expected threads .* to be int, got 1.0"),
        ({"triton": 3}, "expected triton .* to be str or null, got 3"),
        ({"bound": "cache"}, 'expected bound to be "compute" or "memory", got .cache'),
        ({"ms_p50": 1.0}, r"expected 0 < ms_p20 <= ms_p50 <= ms_p80, got \[1.0\]"),
        ({**TIMES, "ms_p80": 1.5}, r"expected 0 < .*, got \[1.0, 2.0, 1.5\]"),
        ({**TIMES, "ms_p20": 0}, r"expected 0 < .*, got \[0, 2.0, 2.0\]"),
        ({**TIMES, "missing": "pip install it"}, "expected no time of a provider that is missing"),
        ({"missing": "pip install it", "speedup": 1.0}, "expected no time of a provider that is missing"),
        ({"share": 0.5}, "expected share along with floor_ms, got 0.5 and None"),
        ({"curve": {"x": [1], "y": [1]}}, "expected a curve with x and y of equal length, x_label and y_label"),
        ({"curve": {"x": [1], "y": [], "x_label": "", "y_label": ""}}, "expected a curve with x and y of equal length"),
    ],
)
def test_what_breaks_the_schema_is_said(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        record.check(line(**fields))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_committed_line_keeps_the_schema(path: Path) -> None:
    rows = record.read(path)
    assert rows
    for number, row in enumerate(rows, 1):
        try:
            record.check(row)
        except ValueError as error:
            pytest.fail(f"{path.name}, line {number}: {error}")


def test_a_command_is_quoted_where_a_shell_would_part_it() -> None:
    program = str(record.ROOT / "benchmarks" / "peers" / "__main__.py")
    said = record.command([program, "--peer", "as it is", "accelerated", "--out", "/some/where/rows.jsonl"])
    assert said == "python -m benchmarks.peers --peer 'as it is' accelerated --out rows.jsonl"
