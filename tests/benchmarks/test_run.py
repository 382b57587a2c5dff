"""The runner: nothing wrong is timed, what is timed is interleaved, and a row says all that a reader needs."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import record, timing
from benchmarks.case import Benchmark, Inputs, Shape
from benchmarks.run import ROOT, benchmarks, compare, run_case

SHAPE = {"rows": 64}


def make_inputs(shape: Shape, device: str) -> Inputs:
    return {"x": torch.randn(shape["rows"], 8, device=device, requires_grad=True)}


def square(x: Inputs, shape: Shape) -> torch.Tensor:
    return x["x"] * x["x"]


def wrong_gradient(x: Inputs, shape: Shape) -> torch.Tensor:
    return x["x"] * x["x"].detach()


def refuses(x: Inputs, shape: Shape) -> torch.Tensor:
    raise NotImplementedError("not this shape")


TOY = Benchmark(
    name="toy",
    shapes={"cpu": [SHAPE], "cuda": [SHAPE]},
    make_inputs=make_inputs,
    providers={"fastformer": square, "power": lambda x, shape: x["x"] ** 2},
    baseline="power",
    flops=lambda shape, mode: 8 * shape["rows"],
    moved=lambda shape, mode, itemsize: 16 * shape["rows"] * itemsize,
    tokens=lambda shape: shape["rows"],
)


def run(benchmark: Benchmark, mode: str = "fwdbwd"):
    return run_case(benchmark, SHAPE, mode, torch.float32, "cpu", rounds=3, memory=True)


@pytest.mark.parametrize("mode", ["fwd", "bwd", "fwdbwd", "step"])
def test_rows(mode: str) -> None:
    outcome = run(TOY, mode)
    assert not outcome.wrong and not outcome.refused
    assert [row["provider"] for row in outcome.rows] == ["fastformer", "power"]
    for row in outcome.rows:
        assert (row["op"], row["mode"], row["dtype"], row["shape"]) == ("toy", mode, "float32", SHAPE)
        assert 0 < row["ms_p20"] <= row["ms_p50"] <= row["ms_p80"]
        assert row["tflop_s"] > 0 and row["gb_s"] > 0 and row["tokens_s"] > 0 and row["floor_ms"] > 0
        assert row["peak_mib"] * 2**20 >= 64 * 8 * 4
    assert outcome.rows[1]["speedup"] == 1.0


def test_what_is_wrong_is_not_timed() -> None:
    rival = dataclasses.replace(TOY, providers={**TOY.providers, "rival": wrong_gradient})
    assert [row["provider"] for row in run(rival, "fwd").rows] == ["fastformer", "power", "rival"]
    outcome = run(rival)
    assert "tensor 1" in outcome.wrong["rival"] and [row["provider"] for row in outcome.rows] == ["fastformer", "power"]
    ours = dataclasses.replace(TOY, providers={"fastformer": wrong_gradient, "power": TOY.providers["power"]})
    outcome = run(ours)
    assert outcome.rows == [] and list(outcome.wrong) == ["fastformer"]


def test_integers_have_to_be_equal() -> None:
    def rank(shift: int):
        return lambda x, shape: x["x"].argsort(-1) + shift

    providers = {"fastformer": rank(0), "power": rank(0), "rival": rank(1)}
    assert list(run(dataclasses.replace(TOY, providers=providers), "fwd").wrong) == ["rival"]


def test_a_rival_may_refuse_and_ours_may_not() -> None:
    rival = dataclasses.replace(TOY, providers={**TOY.providers, "rival": refuses})
    outcome = run(rival)
    assert "not this shape" in outcome.refused["rival"] and len(outcome.rows) == 2
    with pytest.raises(NotImplementedError, match="not this shape"):
        run(dataclasses.replace(TOY, providers={"fastformer": refuses, "power": square}))


def test_turns_are_interleaved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_TURN", 0.0)
    order: list[str] = []
    functions = {name: (lambda name=name: order.append(name)) for name in ("a", "b")}
    timing.time_interleaved(functions, rounds=4, device="cpu")
    assert order == ["a"] * 3 + ["b"] * 3 + ["a", "b"] * 4


def test_every_benchmark_knows_its_providers_and_shapes() -> None:
    stems = {path.stem.removeprefix("bench_") for path in (ROOT / "benchmarks").glob("bench_*.py")}
    known = benchmarks()
    assert stems <= known.keys() and {"attention", "decoding"} <= stems
    for benchmark in known.values():
        assert benchmark.baseline in benchmark.offered("cpu") and benchmark.shapes["cpu"]
        assert benchmark.only_on.keys() <= benchmark.providers.keys()


def test_command_and_compare(tmp_path: Path) -> None:
    out = tmp_path / "new.jsonl"
    command = [
        "--op",
        "embedding",
        "--quick",
        "--mode",
        "fwd",
        "--dtype",
        "float32",
        "--device",
        "cpu",
        "--out",
        str(out),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.run", *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = record.read(out)
    assert {"commit", "dirty", "device", "threads", "torch", "command", "time"} <= rows[0].keys()
    assert rows[0]["command"].startswith("python -m benchmarks.run --op embedding")
    old = tmp_path / "old.jsonl"
    old.write_text("".join(json.dumps(row | {"ms_p50": 2 * row["ms_p50"]}) + "\n" for row in rows))
    assert compare(old, out).count("2.00x  (against eager") == len(rows)
    old.write_text("{\n")
    with pytest.raises(ValueError, match="old.jsonl, line 1: expected JSON"):
        compare(old, out)
