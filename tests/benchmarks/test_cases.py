"""What a case may declare, and every case of the suites: all providers agree at a tiny shape, and costs are counted."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from benchmarks.case import Benchmark, Inputs, Shape
from benchmarks.checking import verdicts_of
from benchmarks.execute import Outcome, run_case
from benchmarks.suites import benchmarks

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
    both = dataclasses.replace(TOY, providers={**TOY.providers, "cube": cube})
    assert list(run(both).wrong) == ["cube"]
    outcome = run(dataclasses.replace(both, oracles={"cube": lambda x, shape: x["x"] * x["x"] * x["x"]}))
    assert not outcome.wrong and [row["provider"] for row in outcome.rows] == ["fastformer", "baseline", "cube"]
    assert list(run(dataclasses.replace(both, oracles={"cube": square, "fastformer": square})).wrong) == ["cube"]
    # The one that ratios are against may have an answer to be held to, too.
    assert list(run(dataclasses.replace(both, oracles={"cube": cube, "baseline": cube})).wrong) == ["baseline"]


def test_what_is_left_out_of_a_shape_is_named_with_its_reason() -> None:
    def left_out(provider: str, shape: Shape) -> str | None:
        return "4 GiB of scores" if provider == "plain" and shape["rows"] > 4 else None

    case = dataclasses.replace(TOY, providers={**TOY.providers, "plain": cube}, left_out=left_out)
    outcome = run(case)
    assert [row["provider"] for row in outcome.rows] == ["fastformer", "baseline"]
    assert outcome.refused == {"plain": "4 GiB of scores"} and not outcome.wrong  # it is neither run nor checked
    shorter = run_case(case, {"rows": 4}, "fwd", torch.float32, "cpu", rounds=1, seconds=0.0)
    assert list(shorter.wrong) == ["plain"] and not shorter.refused


def tiny_shapes() -> list[tuple[str, dict[str, Any]]]:
    """Of each case a shape that takes no time, with every option that its shapes have."""
    modules = [
        (name + suffix, {"batch": 4, "seqlen": 10, "dim": 32, "heads": 4, "padding": padding, **options})
        for name in ("multihead_attention", "encoder_layer", "decoder_layer", "encoder", "decoder")
        for suffix, options in (("", {}), ("_training", {"dropout_p": 0.0}), ("_training", {"dropout_p": 0.1}))
        for padding in ("none", "half")
    ]
    scaling = {"heads": 2, "head_dim": 64, "window": 255, "materialised": True}
    return [
        ("scaling", {"seqlen": 300, **scaling}),  # longer than the window
        ("scaling_lstm", {"seqlen": 5, "width": 16}),
        *modules,
    ]


@pytest.mark.parametrize("name, shape", tiny_shapes(), ids=str)
def test_all_providers_of_a_case_agree(name: str, shape: dict[str, Any]) -> None:
    """But for what torch.compile makes, which takes seconds each: the runner checks it whenever it is timed."""
    case = benchmarks()[name]
    assert shape.keys() == case.shapes["cpu"][0].keys()
    eager = {name: call for name, call in case.offered("cpu").items() if name not in case.compiled}
    for mode in case.modes:
        found = verdicts_of(case, eager, shape, mode, torch.float32, "cpu")
        assert not found.wrong and not found.refused and found.backends.keys() == eager.keys()
        # What is ours runs on kernels, and what isn't calls none.
        for provider, backends in found.backends.items():
            assert bool(backends) == provider.startswith("fastformer")


def test_what_keeps_all_scores_ends_where_the_shape_says() -> None:
    case = benchmarks()["scaling"]
    *_, longest = case.shapes["cpu"]
    assert longest["seqlen"] == 8192 and case.left_out("baseline", longest) == (
        "its scores alone are 2 GiB in fp32, held several times"
    )
    assert case.left_out("fastformer", longest) is None
    assert [shape["seqlen"] for shape in case.shapes["cpu"] if case.left_out("baseline", shape) is None][-1] == 4096
    assert case.shapes["cuda"][-1]["seqlen"] == 65536
