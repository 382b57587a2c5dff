"""A row that breaks the schema of results is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.measure import record


def line(**fields: Any) -> dict[str, Any]:
    row = {"suite": "ops", "op": "rotary", "provider": "eager", "shape": {"batch": 1}, **record.environment("cpu")}
    return {name: value for name, value in (row | fields).items() if value is not ...}


TIMES = {"ms_p20": 1.0, "ms_p50": 2.0, "ms_p80": 2.0}


@pytest.mark.parametrize(
    "fields, named",
    [
        ({"milliseconds": 1.0}, "milliseconds"),
        ({"suite": ..., "commit": ...}, "commit"),
        ({"suite": "op"}, "suite"),
        ({**TIMES, "ms_p50": "2"}, "ms_p50"),
        ({**TIMES, "ms_p50": True}, "ms_p50"),
        ({**TIMES, "ms_p20": float("nan")}, "ms_p20"),
        ({"threads": 1.0}, "threads"),
        ({"triton": 3}, "triton"),
        ({"bound": "cache"}, "bound"),
        ({"ms_p50": 1.0}, "ms_p80"),
        ({**TIMES, "ms_p80": 1.5}, "ms_p80"),
        ({**TIMES, "ms_p20": 0}, "ms_p20"),
        ({**TIMES, "missing": "pip install it"}, "missing"),
        ({"missing": "pip install it", "speedup": 1.0}, "missing"),
        ({"share": 0.5}, "floor_ms"),
        ({"curve": {"x": [1], "y": [1]}}, "x_label"),
        ({"curve": {"x": [1], "y": [], "x_label": "", "y_label": ""}}, "x_label"),
    ],
)
def test_violations_of_the_schema_are_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=rf"\b{named}\b"):
        record.check(line(**fields))


def test_a_command_names_no_machine_and_is_quoted_if_a_shell_would_split_it() -> None:
    program = str(record.ROOT / "benchmarks" / "peers" / "__main__.py")
    command = record.command([program, "--peer", "as it is", "accelerated", "--out", "/some/where/rows.jsonl"])
    assert command == "python -m benchmarks.peers --peer 'as it is' accelerated --out rows.jsonl"
    assert record.command(["/x/benchmarks/run.py", "--op", "rotary"]) == "python -m benchmarks.run --op rotary"
