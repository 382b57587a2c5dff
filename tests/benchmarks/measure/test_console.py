"""The end of a run shows fastformer against each competitor, its losses, and the cases that were not timed."""

from __future__ import annotations

from typing import Any

from benchmarks.measure.console import doubt, summary, table

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
