"""The end of a run shows fastformer against each competitor, its losses, and the cases that were not timed."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.measure import record
from benchmarks.measure.console import doubt, summary, table
from benchmarks.measure.scaling_fits import fit, groups, report
from tests.covering import each

CASE = {"suite": "ops", "op": "rotary", "mode": "fwd", "dtype": "float32", "shape": {"batch": 4}}


def row(provider: str, ours: float, **fields: Any) -> dict[str, Any]:
    return CASE | {"provider": provider, "ours": ours, "speedup": 1.0, "baseline": "eager", "quiet": True} | fields


def test_ours_against_each_rival() -> None:
    other = {"shape": {"batch": 8}}
    rows = [
        row("fastformer", 1.0), row("eager", 2.5), row("torch.compile", 0.9),
        row("fastformer", 1.0, **other), row("eager", 3.0, quiet=False, **other),
        CASE | {"provider": "liger", "missing": "pip install liger-kernel"},
    ]  # fmt: skip
    text = summary(rows, [("sdpa, rotary", "it is wrong: tensor 0"), ("sdpa, rotary", "it is wrong: tensor 0")])
    lines = text.splitlines()
    assert lines[1].split() == ["ops:", "ours", "is", "faster", "than", "eager", "torch.compile"]
    assert lines[2].split() == ["rotary", "fwd", "float32", "batch=4", "2.50x", "0.90x"]
    assert lines[3].split() == ["rotary", "fwd", "float32", "batch=8", "3.00x~"]
    losses = lines.index("Ours is slower than:")
    assert lines[losses + 1].split() == ["0.90x", "torch.compile", "rotary", "fwd", "float32", "batch=4"]
    assert lines[losses + 2] == ""
    assert text.count("sdpa, rotary: it is wrong: tensor 0") == 1
    assert "  liger: pip install liger-kernel" in lines and lines[-1].startswith(
        "~ 1 of 3 ratios were disturbed or unsteady"
    )


def test_stages_are_compared_with_the_plainest_and_never_lose() -> None:
    case = {"suite": "decoding", "op": "decoding", "shape": {"batch": 8}, "baseline": "recompute", "quiet": True}
    speedups = {"kv_cache": 6.0, "cpp": 16.0, "recompute": 1.0}
    text = summary([case | {"provider": name, "speedup": speedup} for name, speedup in speedups.items()])
    header, line = text.splitlines()[1:]
    assert header.split() == ["decoding:", "faster", "than", "recompute", "kv_cache", "cpp"]
    assert line.split() == ["decoding", "batch=8", "6.00x", "16.00x"]


def test_providers_that_do_different_work_are_not_compared() -> None:
    lengths = [row(name, 0.5) | {"suite": "scaling"} for name in ("fastformer", "fastformer window", "torch.nn.LSTM")]
    assert summary(lengths) == ""
    assert summary([*lengths, row("eager", 2.0)]).splitlines()[1].split()[-1] == "eager"


def test_a_row_shows_its_share_of_the_roofline() -> None:
    times = {"ms_p50": 2.0, "ms_p20": 1.5, "ms_p80": 3.0, "tflop_s": 0.12, "gb_s": 7.0, "share": 0.42}
    assert "120 GFLOP/s (42%)" in table(row("eager", 1.0, bound="compute", **times))
    memory = table(row("eager", 1.0, bound="memory", quiet=False, disturbed=0.75, rounds=12, **times))
    assert "7.0 GB/s (42%)" in memory and "GFLOP/s" not in memory and "disturbed: 75% of 12 turns" in memory
    assert "is missing: pip install x" in table(CASE | {"provider": "x", "missing": "pip install x"})


def test_a_row_gives_the_reason_for_its_mark() -> None:
    fields = {"rounds": 12, "passes": 9, "disturbed": 0.25, "slow": 0.5, "uncertainty": 0.05}
    assert doubt(row("eager", 1.0, **fields)) is None and doubt(row("eager", 1.0, **fields | {"quiet": None})) is None
    fields["quiet"] = False
    assert doubt(row("eager", 1.0, **fields)) == "slow clock: 50% of 12 turns"
    assert doubt(row("eager", 1.0, **fields | {"slow": 0.0})) == "disturbed: 25% of 12 turns"
    assert doubt(row("eager", 1.0, **fields | {"uncertainty": 0.2})) == "unsteady over 9 passes"


# A row that breaks the schema of results is refused by name.


def line(**fields: Any) -> dict[str, Any]:
    row = {"suite": "ops", "op": "rotary", "provider": "eager", "shape": {"batch": 1}, **record.environment("cpu")}
    return {name: value for name, value in (row | fields).items() if value is not ...}


TIMES = {"ms_p20": 1.0, "ms_p50": 2.0, "ms_p80": 2.0}


@each(
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


# Fitted exponents are exact on power laws, close under noise, use the upper end only, and need enough points.


LENGTHS = [128 << i for i in range(7)]


@pytest.mark.parametrize("exponent", [0.0, 1.0, 1.5, 2.0])
def test_a_power_law_has_its_exponent(exponent: float) -> None:
    power = fit({n: 3e-4 * n**exponent for n in LENGTHS})
    assert power.exponent == pytest.approx(exponent, abs=1e-9) and power.off == pytest.approx(0.0, abs=1e-9)
    assert power.lengths == (1024, 2048, 4096, 8192)


@pytest.mark.parametrize("lengths", [[], [4096], [4096, 8192], [128, 256, 8192], [512, 4096, 8192]])
def test_too_few_lengths_are_an_error(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="expected at least 3 lengths from an eighth of the longest on, got "):
        fit({n: float(n) for n in lengths})


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_values_without_a_logarithm_are_errors(value: float) -> None:
    with pytest.raises(ValueError, match="expected positive lengths and finite positive values, got {4096"):
        fit({2048: 1.0, 4096: value, 8192: 4.0})


def rows(provider: str, time: float, memory: float, longest: int = 8192, **changed: Any) -> list[dict[str, Any]]:
    return [
        {
            "op": "scaling", "device": "a CPU", "threads": 2, "mode": "fwdbwd", "dtype": "float32",
            "provider": provider, "shape": {"seqlen": n}, "ms_p50": 1e-6 * n**time, "peak_mib": 1e-3 * n**memory,
        } | changed
        for n in LENGTHS if n <= longest
    ]  # fmt: skip


def test_report() -> None:
    causal = [row | {"ms_p50": 0.55 * row["ms_p50"]} for row in rows("fastformer causal", 2.0, 1.0)]
    lstm = rows("torch.nn.LSTM", 1.25, 0.75, op="scaling_lstm")
    other = [{"op": "attention", "provider": "sdpa", "ms_p50": 1.0, "shape": {"seqlen": 64}}]
    measured = rows("baseline", 2.2, 1.8, longest=4096) + rows("fastformer", 2.0, 1.0) + causal + lstm + other
    lines = report(measured).splitlines()
    assert lines[0].startswith("a CPU, 2 threads, fwdbwd, float32")
    table = {line[4:25].strip(): line[25:].split() for line in lines[2:6]}
    assert list(table) == ["fastformer", "fastformer causal", "baseline", "torch.nn.LSTM"]  # as the paper has them
    assert table["fastformer"][2:6] == ["2.00", "(2)", "1.00", "(1)"]
    assert table["baseline"][2:9] == ["2.20", "(2)", "1.80", "(2)", "512", "to", "4096,"]
    assert table["torch.nn.LSTM"][2:9] == ["1.25", "(1)", "0.75", "(1)", "1024", "to", "8192,"]
    assert lines[6].strip().startswith("causal over full at n = 8192: 0.55 of the time") and len(lines) == 7


def test_missing_and_short_providers_are_reported() -> None:
    text = report(rows("fastformer", 2.0, 1.0) + rows("baseline", 2.0, 2.0, longest=256))
    assert "no fit: expected at least 3 lengths" in next(line for line in text.splitlines() if "baseline" in line)
    assert "causal" not in text and " 2.00 " in text
    # Rows without times, such as an absent peer's, are nothing to fit.
    assert "sdpa" not in report(rows("fastformer", 2.0, 1.0) + rows("sdpa", 2.0, 1.0, ms_p50=None))
    assert "No length reaches 4096" in report(rows("fastformer", 2.0, 1.0, longest=1024)) and "No length" not in text
    with pytest.raises(ValueError, match='expected rows of the suite "scaling"'):
        report([])


def test_machines_and_dtypes_are_not_mixed() -> None:
    mixed = rows("fastformer", 2.0, 1.0) + rows("fastformer", 1.0, 1.0, dtype="bfloat16")
    mixed += rows("fastformer", 1.5, 1.0, threads=1) + rows("fastformer", 1.0, 1.0, device="a GPU")
    assert len(groups(mixed)) == 4 and report(mixed).count("time ~ n^p") == 4
    # The later row about one thing counts.
    (providers,) = groups(rows("fastformer", 2.0, 1.0) + rows("fastformer", 1.0, 1.0)).values()
    assert providers["fastformer"][8192]["ms_p50"] == pytest.approx(1e-6 * 8192)
