"""Beside a process that is busy half of the time, a provider that is 20 % slower is ranked so in 10 runs of 10."""

from __future__ import annotations

import time

import pytest
import torch

from benchmarks.measure.case import Benchmark, Inputs, Shape
from tests.benchmarks.running import neighbours, run_case

BUSY = """
import time
while True:
    end = time.perf_counter() + 1.0
    while time.perf_counter() < end:
        pass
    time.sleep(1.0)
"""


def make_inputs(shape: Shape, device: str) -> Inputs:
    return {"a": torch.randn(400 * shape["threads"], 400), "b": torch.randn(400, 400)}


def work(x: Inputs, shape: Shape) -> torch.Tensor:
    for _ in range(9):
        torch.mm(x["a"], x["b"])
    return torch.mm(x["a"], x["b"])


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_a_difference_of_a_fifth_is_noticed_beside_a_neighbour(threads, capsys) -> None:
    """The rounds and seconds are those of a case with --quick."""
    shape = {"threads": threads}
    inputs = make_inputs(shape, "cpu")

    def seconds() -> float:
        began = time.perf_counter()
        work(inputs, shape)
        return time.perf_counter() - began

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    with neighbours(1, BUSY):
        pause = 0.2 * min(seconds() for _ in range(30))
    torch.set_num_threads(before)

    def slower(x: Inputs, shape: Shape) -> torch.Tensor:
        time.sleep(pause)
        return work(x, shape)

    benchmark = Benchmark(
        name="work", shapes={"cpu": [shape]}, make_inputs=make_inputs, providers={"fastformer": work, "slower": slower},
        baseline="slower",
    )  # fmt: skip
    runs = []
    with neighbours(1, BUSY):
        for _ in range(10):
            ours, _ = run_case(benchmark, shape, "fwd", rounds=16, seconds=9.0).rows
            runs.append((round(ours["speedup"], 3), ours["quiet"], ours["passes"], ours["rounds"], ours["disturbed"]))
    with capsys.disabled():
        print(f"\n{threads} threads: ratio, quiet, passes, rounds, disturbed: {runs}")
    assert all(ratio > 1 for ratio, *_ in runs)
