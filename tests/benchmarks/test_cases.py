"""What a case may declare, and every case of the suites: all providers agree at a tiny shape, and costs are counted."""

from __future__ import annotations

import dataclasses

import torch

from benchmarks.case import Benchmark, Inputs, Shape
from benchmarks.execute import Outcome, run_case

SHAPE = {"rows": 8}


def square(x: Inputs, shape: Shape) -> torch.Tensor:
    return x["x"] ** 2


def cube(x: Inputs, shape: Shape) -> torch.Tensor:
    return x["x"] ** 3


TOY = Benchmark(
    name="toy",
    shapes={"cpu": [SHAPE]},
    make_inputs=lambda shape, device: {"x": torch.randn(shape["rows"], 4, requires_grad=True)},
    providers={"fastformer": square, "baseline": lambda x, shape: x["x"] * x["x"]},
    baseline="baseline",
)


def run(benchmark: Benchmark, mode: str = "fwdbwd") -> Outcome:
    return run_case(benchmark, SHAPE, mode, torch.float32, "cpu", rounds=1, seconds=0.0)


def test_a_case_may_ask_several_questions() -> None:
    providers = {**TOY.providers, "cube": cube, "slow cube": lambda x, shape: x["x"] * x["x"] * x["x"]}
    both = dataclasses.replace(TOY, providers=providers)
    assert list(run(both).wrong) == ["cube", "slow cube"]
    both = dataclasses.replace(both, oracles={"cube": "slow cube", "slow cube": "slow cube"})
    outcome = run(both)
    assert not outcome.wrong and [row["provider"] for row in outcome.rows] == list(providers)
    assert list(run(dataclasses.replace(both, oracles={**both.oracles, "cube": "baseline"})).wrong) == ["cube"]


def test_what_is_left_out_of_a_shape_is_named_with_its_reason_and_still_knows_what_is_right() -> None:
    def left_out(provider: str, shape: Shape) -> str | None:
        return "4 GiB of scores" if provider == "plain" and shape["rows"] > 4 else None

    case = dataclasses.replace(
        TOY,
        providers={**TOY.providers, "wrong": cube, "plain": square},
        oracles={"fastformer": "plain", "wrong": "plain"},
        left_out=left_out,
    )
    outcome = run(case)
    assert [row["provider"] for row in outcome.rows] == ["fastformer", "baseline"]
    assert outcome.refused == {"plain": "4 GiB of scores"} and list(outcome.wrong) == ["wrong"]
    shorter = run_case(case, {"rows": 4}, "fwd", torch.float32, "cpu", rounds=1, seconds=0.0)
    assert [row["provider"] for row in shorter.rows] == ["fastformer", "baseline", "plain"] and not shorter.refused
