"""Cases are checked once and timed in passes; a case whose passes disagree gets more passes, or a mark."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.measure import execute, record, timing
from benchmarks.measure.case import Benchmark, Inputs, Provider, Shape
from benchmarks.measure.console import table
from benchmarks.measure.execute import run_cases
from benchmarks.measure.suites import Case
from benchmarks.measure.timing import STEADY
from tests.benchmarks.measure.test_timing import Script


class FakeClock:
    """A clock that only moves when a test moves it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """Replaces the clock of the timing, on an undisturbed machine."""
    clock = FakeClock()
    for module in (execute, timing):
        monkeypatch.setattr(module, "time", types.SimpleNamespace(perf_counter=clock.perf_counter, sleep=clock.sleep))
    monkeypatch.setattr(timing, "NoiseMonitor", lambda *_, **__: Script())
    return clock


def make_inputs(shape: Shape, device: str) -> Inputs:
    return {"x": torch.ones(shape.get("rows", 4), 8, device=device)}


def case_of(name: str, providers: dict[str, Provider], **fields: Any) -> Case:
    shape = {"rows": fields.pop("rows", 4)}
    benchmark = Benchmark(
        name=name, shapes={"cpu": [shape]}, make_inputs=make_inputs, providers=providers, baseline="eager", **fields
    )
    return Case(benchmark, shape, "fwd", "float32")


class Work:
    """Cases in which fastformer takes a second, and eager takes `ratio(pass)` seconds, or that many times `unit`.

    Attributes:
        passes: "check" or "pass N" for each case, in order.
    """

    def __init__(self, clock: FakeClock) -> None:
        self.clock, self.doing = clock, ""
        self.told: list[tuple[str, str]] = []

    def hear(self, doing: str, case: Case) -> None:
        self.doing = doing
        self.told.append((doing, case.benchmark.name))

    def provider(self, takes: Callable[[int], float], unit: float) -> Provider:
        def run(x: Inputs, shape: Shape) -> torch.Tensor:
            if self.doing.startswith("pass"):
                self.clock.now += unit * takes(int(self.doing.removeprefix("pass ")))
            return x["x"] * 2

        return run

    def case(
        self,
        name: str,
        ratio: Callable[[int], float],
        unit: float = 1.0,
        ours: Callable[[int], float] = lambda number: 1.0,
    ) -> Case:
        return case_of(name, {"fastformer": self.provider(ours, unit), "eager": self.provider(ratio, unit)})

    def run(self, *cases: Case, rounds: int = 8, seconds: float = 1000.0) -> dict[str, dict[str, Any]]:
        """Returns fastformer's row of each case."""
        rows = {}
        for case, outcome in run_cases(cases, "cpu", rounds=rounds, seconds=seconds, on_action=self.hear):
            assert not outcome.wrong and not outcome.refused
            for row in outcome.rows:
                record.check(record.environment("cpu") | row)
            rows[case.benchmark.name] = outcome.rows[0]
        return rows

    def passes(self, name: str) -> int:
        return sum(doing != "check" for doing, of in self.told if of == name)


def test_passes_go_over_all_cases(clock: FakeClock) -> None:
    work = Work(clock)
    rows = work.run(work.case("one", lambda number: 2.0), work.case("two", lambda number: 3.0), rounds=3)
    passes = [(f"pass {number}", name) for number in (1, 2, 3) for name in ("one", "two")]
    assert work.told == [("check", "one"), ("check", "two"), *passes]
    for name, ratio in (("one", 2.0), ("two", 3.0)):
        assert rows[name]["speedup"] == pytest.approx(ratio) and rows[name]["quiet"] is True
        assert (rows[name]["passes"], rows[name]["rounds"]) == (3, 3) and rows[name]["uncertainty"] < 1e-6


def test_a_case_whose_passes_disagree_gets_more_until_they_agree(clock: FakeClock) -> None:
    work = Work(clock)
    rows = work.run(
        work.case("steady", lambda number: 2.0),
        work.case("unsteady", lambda number: 2.0 + number % 2),
        work.case("once", lambda number: 3.0 if number == 1 else 2.0),
    )
    assert work.passes("steady") == 8 and rows["steady"]["quiet"] is True
    assert work.passes("unsteady") == 24 and rows["unsteady"]["quiet"] is False  # three times as many, and no more
    assert rows["unsteady"]["uncertainty"] == pytest.approx(0.088, abs=0.003)
    assert "± 9%" in table(rows["unsteady"]) and "unsteady over 24 passes" in table(rows["unsteady"])
    assert 8 < work.passes("once") < 24 and rows["once"]["quiet"] is True and rows["once"]["speedup"] == 2.0
    assert work.told[-1] == ("pass 24", "unsteady")


def test_each_ratio_has_its_own_uncertainty(clock: FakeClock) -> None:
    """Two ratios to the baseline may be steady, while jitter in opposite directions makes their own ratio unsteady."""
    rows = {}
    for seconds in (45.0, 1000.0):
        work = Work(clock)
        case = work.case("op", lambda number: 2.0, ours=lambda number: 1 + 0.08 * (number % 2))
        case.benchmark.providers["rival"] = work.provider(lambda number: 3 - 0.24 * (number % 2), 1.0)
        [(_, outcome)] = run_cases([case], "cpu", rounds=8, seconds=seconds, on_action=work.hear)
        rows[work.passes("op")] = outcome.rows
    few, more = rows
    assert few == 8 < more < 24
    ours, eager, rival = rows[few]
    assert (eager["uncertainty"], eager["quiet"]) == (0.0, True) and eager["ours_uncertainty"] > 0.01
    assert ours["quiet"] is rival["quiet"] is eager["ours_quiet"] is True and rival["ours_quiet"] is False
    assert rival["uncertainty"] < STEADY < rival["ours_uncertainty"]
    assert (eager["ours"], rival["ours"]) == (pytest.approx(1.93, abs=0.1), pytest.approx(2.78, abs=0.25))
    assert rival["speedup"] == pytest.approx(0.69, abs=0.04)
    assert rows[more][2]["ours_quiet"] is True and rows[more][2]["ours_uncertainty"] < STEADY


@pytest.mark.parametrize("stops_at", ["pass 2", "pass 5"])
def test_a_stopped_run_returns_cases_with_enough_passes(clock: FakeClock, stops_at: str) -> None:
    work = Work(clock)

    def stop(number: int) -> float:
        if work.doing == stops_at:
            work.doing = "the end"
            raise KeyboardInterrupt
        return 2.0

    results = []
    with pytest.raises(KeyboardInterrupt):
        for case, outcome in run_cases(
            [work.case("one", lambda number: 3.0), work.case("two", stop), work.case("three", lambda number: 4.0)],
            "cpu", rounds=8, seconds=1000.0, on_action=work.hear,
        ):  # fmt: skip
            results.append((case.benchmark.name, outcome.rows[0]["speedup"], outcome.rows[0]["rounds"]))
    passes = {"pass 2": [], "pass 5": [("one", 3.0, 5), ("two", 2.0, 4), ("three", 4.0, 4)]}
    assert results == [(name, pytest.approx(ratio), rounds) for name, ratio, rounds in passes[stops_at]]


def test_the_seconds_end_it_after_three_passes(clock: FakeClock) -> None:
    """In the first pass, three calls of each function don't count, because they may compile."""
    work = Work(clock)
    cases = [work.case("unsteady", lambda number: 2.0 + number % 2), work.case("steady", lambda number: 2.0)]
    rows = work.run(*cases, seconds=50.0)
    assert (work.passes("unsteady"), work.passes("steady")) == (15, 8)  # of 4 and 3 seconds, and of 3
    assert rows["unsteady"]["quiet"] is False
    work = Work(clock)
    rows = work.run(work.case("long", lambda number: 2.0), seconds=0.0)
    assert work.passes("long") == 3 and rows["long"]["quiet"] is True and rows["long"]["rounds"] == 3


def test_passes_over_a_single_short_case_are_spaced(clock: FakeClock) -> None:
    """There are three seconds between passes, but the total time stays within the limit."""
    for seconds, apart in ((1000.0, 3.0), (8.0, 1.0), (0.0, None)):
        work, began = Work(clock), clock.now
        clock.slept.clear()
        work.run(work.case("short", lambda number: 2.0, unit=0.01), seconds=seconds)
        if apart is None:
            assert not clock.slept
        else:
            assert len(clock.slept) == 7 and clock.now - began == pytest.approx(7 * apart, rel=0.25)


def test_kernels_are_compiled_once() -> None:
    """This holds for any number of cases of a function. torch.compile gives up on it after a few: two here."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    def square(x: Inputs, shape: Shape) -> torch.Tensor:
        return x["x"] * x["x"]

    compiled = torch.compile(square, dynamic=False, backend=backend)
    providers = {"fastformer": square, "eager": square, "compiled": compiled}
    cases = [case_of("square", providers, compiled=("compiled",), rows=rows) for rows in (*range(2, 6), 2)]
    with torch._dynamo.config.patch(recompile_limit=2):
        outcomes = [outcome for _, outcome in run_cases(cases, "cpu", rounds=3, seconds=0.0)]
    assert [outcome.refused for outcome in outcomes] == [{}] * 5  # the last is compiled already, which is proof too
    assert len(graphs) == 4 and all(len(outcome.rows) == 3 for outcome in outcomes)
