"""Fitted exponents are exact on power laws, close under noise, use the upper end only, and need enough points."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.measure.scaling_fits import fit, groups, report

LENGTHS = [128 << i for i in range(7)]


@pytest.mark.parametrize("exponent", [0.0, 1.0, 1.5, 2.0])
def test_a_power_law_has_its_exponent(exponent: float) -> None:
    power = fit({n: 3e-4 * n**exponent for n in LENGTHS})
    assert power.exponent == pytest.approx(exponent, abs=1e-9) and power.off == pytest.approx(0.0, abs=1e-9)
    assert power.lengths == (1024, 2048, 4096, 8192)


def test_only_the_upper_end_counts() -> None:
    """A fixed cost dominates at short lengths. The upper end is relative to the longest length of each provider."""
    bent = {n: max(float(n), 1024.0) for n in LENGTHS}
    assert fit(bent).exponent == pytest.approx(1.0)
    assert fit({n: value for n, value in bent.items() if n <= 1024}).exponent == pytest.approx(0.0)
    assert fit({**bent, 8192: bent[8192] * 2}).exponent > 1.2


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
