"""Turns are interleaved, disturbed turns are repeated or marked, and a ratio whose passes disagree is unsteady."""

from __future__ import annotations

import functools
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks.measure import noise_monitor, timing
from benchmarks.measure.noise_monitor import NoiseMonitor
from benchmarks.measure.timing import STEADY, Interleaved, Ratio, Rounds, Turn, time_interleaved
from tests.benchmarks.running import neighbours


class Script(NoiseMonitor):
    """Reports turns as a script says, and later ones as quiet."""

    def __init__(self, *disturbed: bool) -> None:
        super().__init__(1, proc=None)
        self._disturbed, self.waits = list(disturbed), 0

    def end(self) -> bool:
        return self._disturbed.pop(0) if self._disturbed else False

    def wait(self, seconds: float) -> None:
        self.waits += 1


def test_turns_are_interleaved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_TURN", 0.0)
    order: list[str] = []
    functions = {name: (lambda name=name: order.append(name)) for name in ("a", "b")}
    timing.time_interleaved(functions, rounds=4, device="cpu", watcher=NoiseMonitor(1, proc=None))
    assert order == ["a"] * 3 + ["b"] * 3 + ["a", "b", "b", "a"] * 2


@pytest.mark.parametrize("device, seconds, moves", [("cpu", 0.0, True), ("cpu", 1.0, False), ("cuda", 0.0, False)])
def test_each_round_of_short_calls_has_inputs_elsewhere(device, seconds, moves, monkeypatch) -> None:
    """The timed calls of a round use the same new copies of the inputs, after two calls that aren't timed."""
    copies: list[torch.Tensor] = []
    calls: list[tuple[str, int, int]] = []
    offsets: list[int] = []

    def note(name: str, number: int) -> None:
        calls.append((name, number, 1))

    def anew() -> dict[str, Callable[[], object]]:
        copies.append(torch.empty(10_000))
        return {name: functools.partial(note, name, len(copies)) for name in ("a", "b")}

    def turn(function: Callable[[], object], repeats: int) -> float:
        function()
        calls[-1] = (*calls[-1][:2], repeats)
        offsets.append(sum(block.numel() for block in timing._held))
        return seconds or 0.0033

    monkeypatch.setattr(timing, "_cpu_turn", turn)
    monkeypatch.setattr(timing, "_cuda_turn", turn)
    timing.time_interleaved(anew(), rounds=4, device=device, watcher=NoiseMonitor(1, proc=None), anew=anew)
    assert len(copies) == (5 if moves else 1)
    assert len({t.data_ptr() for t in copies}) == len(copies)
    assert len(set(offsets)) == len(copies)  # what lies before the copies differs from round to round
    timed = calls[6:]
    if moves:
        warm, turns = [("a", 2), ("b", 2)], [("a", 3), ("b", 3)]
        expected = [[*warm, *turns], [*warm, *turns[::-1]]] * 2
        assert timed == [(name, n + 2, times) for n, round_ in enumerate(expected) for name, times in round_]
    else:
        assert {number for _, number, _ in timed} == {1} and len(timed) == 8
    assert not timing._held


def test_a_disturbed_turn_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_TURN", 0.0)
    functions = {"a": lambda: None, "b": lambda: None}
    # Turns are a b, b a, a b, ...: a's second and b's third are disturbed.
    watcher = Script(False, False, False, True, False, True)
    rounds = time_interleaved(functions, rounds=4, device="cpu", watcher=watcher)
    assert [turn.disturbed for turn in rounds.turns["a"]] == [False, True, False, False, False]
    assert [turn.disturbed for turn in rounds.turns["b"]] == [False, False, True, False, False]
    assert watcher.waits == 1 and rounds.ratio("a", "b").quiet and rounds.disturbed("a") == 0.2


def test_results_that_are_always_disturbed_are_kept_and_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_TURN", 0.0)
    rounds = time_interleaved({"a": lambda: None}, rounds=4, device="cpu", watcher=Script(*[True] * 99))
    assert len(rounds.turns["a"]) == 12 and rounds.disturbed("a") == 1.0
    assert rounds.ratio("a", "a") == Ratio(1.0, False)


def test_the_seconds_end_it_after_three_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_TURN", 0.0)
    for watcher in (Script(), Script(*[True] * 99)):
        rounds = time_interleaved({"a": lambda: None}, rounds=9, device="cpu", seconds=0.0, watcher=watcher)
        assert len(rounds.turns["a"]) == 3


def turns(*seconds: float, disturbed: tuple[int, ...] = ()) -> list[Turn]:
    return [Turn(s, number in disturbed) for number, s in enumerate(seconds)]


def test_times_are_of_the_quiet_turns() -> None:
    rounds = Rounds({"a": turns(1, 9, 2, 9, 4, disturbed=(1, 3)), "b": turns(1, 9, 2, 9, 4, disturbed=(1, 3, 4))})
    assert rounds["a"].p50 == 2.0
    assert rounds["b"].p50 == 4.0  # of all: two quiet turns are too few
    assert rounds.disturbed("b") == 0.6


def test_a_ratio_is_the_median_over_rounds() -> None:
    """The machine slows down, and one turn of each function is an outlier."""
    rounds = Rounds({"a": turns(1, 2, 4, 800, 16), "b": turns(2, 4, 8, 32, 3200)})
    assert rounds.ratio("a", "b") == Ratio(2.0, True)


def test_a_ratio_is_of_turns_of_the_same_round_both_of_which_were_quiet() -> None:
    a, b = turns(1, 1, 1, 10, 10, disturbed=(0,)), turns(5, 5, 2, 20, 20, disturbed=(1,))
    assert Rounds({"a": a, "b": b}).ratio("a", "b") == Ratio(2.0, True)
    a, b = turns(1, 1, 1, 10, 10, disturbed=(0, 3)), turns(5, 5, 5, 20, 20, disturbed=(1,))
    assert Rounds({"a": a, "b": b}).ratio("a", "b") == Ratio(5.0, False)  # two quiet rounds: all count


def in_passes(*ratios: tuple[float, ...], disturbed: bool | None = False, slow: bool = False) -> Rounds:
    """Makes rounds in which b takes a given multiple of a's time, by pass and round."""
    passes = [number for number, rounds in enumerate(ratios) for _ in rounds]
    a = [Turn(2.0, disturbed, slow) for _ in passes]
    return Rounds({"a": a, "b": [Turn(2.0 * ratio, disturbed, slow) for rounds in ratios for ratio in rounds]}, passes)


def test_the_rounds_of_all_passes_are_pooled() -> None:
    """Each round counts once: the medians of the passes are 2, 4 and 4, and their means 3.4, 4 and 4."""
    ratio = in_passes((1.9, 2.0, 2.0, 2.0, 2.0, 9.0), (4.0,), (4.0,)).ratio("a", "b")
    assert (ratio.value, ratio.passes) == (2.0, 3)


@pytest.mark.parametrize("count, quantile", [(3, 4.303), (4, 3.182), (8, 2.365), (16, 2.131), (64, 1.998)])
def test_uncertainty_is_half_of_the_interval_of_students_t(count: int, quantile: float) -> None:
    """It uses the medians of passes, half of which are 10 % higher, and not single rounds; few passes give a wider
    interval.
    """
    uncertainty = in_passes(*[(0.1, 2.0 * 1.1 ** (i % 2), 9.0) for i in range(count)]).ratio("a", "b").uncertainty
    spread = math.log(1.1) * math.sqrt((count // 2) * (count - count // 2) / count / (count - 1) / count)
    assert uncertainty is not None and 0.89 * quantile < uncertainty / spread < 1.005 * quantile


def test_a_ratio_whose_passes_disagree_is_not_quiet() -> None:
    for disturbed in (False, None):
        ratio = in_passes(*[(2.0 + number % 2,) for number in range(9)], disturbed=disturbed).ratio("a", "b")
        assert ratio.quiet is False and ratio.uncertainty is not None and ratio.uncertainty > STEADY
        ratio = in_passes(*[(2.0 + 0.1 * (number % 2),) for number in range(9)], disturbed=disturbed).ratio("a", "b")
        assert ratio.quiet is (None if disturbed is None else True) and 0.0 < (ratio.uncertainty or 0.0) <= STEADY


def test_quiet_rounds_must_come_from_several_passes() -> None:
    rounds = in_passes(*[(2.0, 2.0)] * 2, *[(2.05, 2.05)] * 3)
    for number in range(4, 10):
        rounds.turns["b"][number] = rounds.turns["b"][number]._replace(disturbed=True)
    ratio = rounds.ratio("a", "b")
    assert ratio.quiet is False and (ratio.value, ratio.passes) == (2.05, 5)  # of all
    rounds.turns["b"][9] = rounds.turns["b"][9]._replace(disturbed=False)
    ratio = rounds.ratio("a", "b")
    assert ratio.quiet is True and (ratio.value, ratio.passes) == (2.0, 3)


def test_a_provider_with_a_slow_clock_is_not_quiet() -> None:
    """The slow rounds count, because on a shared machine almost all have a neighbour."""
    rounds = in_passes(*[(2.0,)] * 6, slow=True)
    assert rounds.ratio("a", "b") == Ratio(2.0, False, 6, 0.0) and rounds.slow("a") == 1.0
    for number in range(3):
        for name in ("a", "b"):
            assert rounds.ratio("a", "b").quiet is False
            rounds.turns[name][number] = rounds.turns[name][number]._replace(slow=False)
    assert rounds.ratio("a", "b") == Ratio(2.0, True, 6, 0.0) and rounds.slow("a") == 0.5


def test_passes_are_separate_and_alternate(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass has at least one round, and another if one was disturbed; rounds alternate in direction across passes."""
    monkeypatch.setattr(timing, "_TURN", 0.0)
    order: list[str] = []
    functions = {name: functools.partial(order.append, name) for name in ("a", "b")}
    timer = Interleaved("cpu")
    for disturbed in ((), (True, False), ()):
        order.clear()
        timer.take(functions, rounds=1, seconds=9.0, watcher=Script(*disturbed))
    assert timer.rounds.passes == [0, 1, 1, 2] and timer.passes == 3
    assert order == ["a", "b", "b", "a"]  # a call of each without the clock, and the fourth round


def test_a_pass_over_short_calls_has_a_minimum_time() -> None:
    timer = Interleaved("cpu")
    functions = {"a": lambda: None}
    timer.take(functions, rounds=1, seconds=9.0, watcher=Script())
    assert len(timer.rounds.passes) == 1
    timer.take(functions, rounds=1, seconds=9.0, lasting=0.2, watcher=Script())
    assert timer.rounds.passes.count(1) > 2 and timer.seconds > 0.2


# The noise monitor notices other processes and a slow clock.


TICKS = os.sysconf("SC_CLK_TCK")


class FakeMachine:
    """A machine of two cores, with its /proc/stat, whose time passes when a test says so."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now, self.own, self.others, self.stolen, self.work = folder, 0.0, 0.0, 0.0, 0.0, 1.0
        self.write()

    def write(self) -> None:
        user, stolen = (round(TICKS * seconds) for seconds in (self.own + self.others, self.stolen))
        (self.folder / "stat").write_text(f"cpu  {user} 0 0 999 7 0 0 {stolen} 0 0\ncpu0 1 1 1\n")

    def run(self, seconds: float, *, own: float = 1.0, others: float = 0.0, stolen: float = 0.0) -> None:
        """Lets time pass, while the given numbers of cores are in use."""
        self.now += seconds
        self.own += own * seconds
        self.others += others * seconds
        self.stolen += stolen * seconds
        self.write()

    def watcher(self, threads: int, fixed_work: Callable[[], float] | None = None) -> NoiseMonitor:
        return NoiseMonitor(
            threads, proc=self.folder, clock=lambda: self.now, own_cpu=lambda: self.own,
            fixed_work=fixed_work or (lambda: self.work), cores=2,
        )  # fmt: skip

    def turn(self, watcher: NoiseMonitor, seconds: float, **used: float) -> bool | None:
        """Lets time pass during a turn, and returns whether it was disturbed."""
        watcher.begin()
        self.run(seconds, **used)
        return watcher.end()


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    return FakeMachine(tmp_path)


@pytest.mark.parametrize(
    "threads, took, disturbed",
    [
        (2, {"own": 2.0}, False),
        (2, {"own": 1.0, "others": 1.0}, True),
        (2, {"own": 1.7, "others": 0.3}, True),
        (2, {"own": 1.9, "others": 0.1}, False),
        (1, {"own": 1.0, "others": 1.0}, False),  # on the core that we leave free
        (1, {"own": 0.5, "others": 1.5}, True),
        (1, {"own": 0.8, "others": 1.0, "stolen": 0.2}, True),
        (2, {"own": 1.0}, False),  # we waited for something, and no process had it
    ],
)
def test_the_load_of_other_processes_on_needed_cores(machine, threads, took, disturbed) -> None:
    assert machine.turn(machine.watcher(threads), 1.0, **took) is disturbed


def test_a_short_turn_is_judged_by_the_last_quarter_of_a_second(machine: FakeMachine) -> None:
    """A neighbour's tick is a large part of a turn of 25 ms; half a core for a quarter of a second is a real
    disturbance.
    """
    watcher = machine.watcher(2)
    disturbed = [machine.turn(watcher, 0.025, others=1.0 if 40 <= turn < 56 else 0.02) for turn in range(80)]
    assert not any(disturbed[:40]) and all(disturbed[44:56]) and not any(disturbed[67:])


def test_a_slow_clock_is_noticed_until_it_ends(machine: FakeMachine) -> None:
    """It doesn't count as a disturbance, after which the turn would be repeated."""
    watcher, turns = machine.watcher(1), []
    for machine.work in (1.0, 1.2, 1.4, 1.4, 1.2):
        turns.append((machine.turn(watcher, 0.3), watcher.is_slow))
    assert turns == [(False, slow) for slow in (False, False, True, True, False)]


@pytest.mark.parametrize("tries, slow", [((1.4, 1.4, 1.0), False), ((1.4, 1.4, 1.4), True)])
def test_a_hiccup_is_not_a_slow_clock(tries: tuple[float, ...], slow: bool, machine: FakeMachine) -> None:
    watcher = machine.watcher(1, partial(next, iter((1.0, *tries))))
    for expected in (False, slow):
        machine.turn(watcher, 0.3)
        assert watcher.is_slow == expected


def test_the_best_time_of_the_machine_persists(machine: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that always has a neighbour learns from an earlier run that the machine can be faster."""

    def slow_turns_of_a_process(*works: float) -> list[bool]:
        watcher = NoiseMonitor(1, proc=machine.folder, clock=lambda: machine.now, own_cpu=lambda: machine.own, cores=2)
        slow = []
        for machine.work in works:
            machine.turn(watcher, 0.3)
            slow.append(watcher.is_slow)
        return slow

    monkeypatch.setattr(noise_monitor, "_fixed_work", lambda: machine.work)
    assert slow_turns_of_a_process(2.0, 2.0) == [False, False]  # nothing is known yet
    assert slow_turns_of_a_process(2.0, 1.0, 1.2) == [False, False, False]
    assert slow_turns_of_a_process(2.0, 1.2, 1.4) == [True, False, True]
    stored = json.loads(noise_monitor.BEST.read_text())
    assert list(stored.values()) == [1.0]
    noise_monitor.BEST.write_text(json.dumps({"another machine": 0.1}))
    assert slow_turns_of_a_process(3.0) == [False]
    assert sorted(json.loads(noise_monitor.BEST.read_text()).values()) == [0.1, 3.0]
    for text in ("", "[1]", "null", '{"' + next(iter(stored)) + '": "x"}'):
        noise_monitor.BEST.write_text(text)
        assert slow_turns_of_a_process(4.0, 6.0) == [False, True]


def test_on_other_systems_the_load_is_unknown(tmp_path: Path) -> None:
    for proc in (None, tmp_path):
        watcher = NoiseMonitor(1, proc=proc)
        watcher.begin()
        assert watcher.end() is None
        watcher.wait(9.0)  # for nothing
    rounds = time_interleaved({"a": lambda: None}, rounds=3, device="cpu", watcher=NoiseMonitor(1, proc=None))
    assert rounds.disturbed("a") is None and rounds.ratio("a", "a").quiet is None and len(rounds.turns["a"]) == 3


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_child_processes_count_as_this_process() -> None:
    """The time of a child counts while it runs and afterwards."""
    code = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass\nprint(1, flush=True)\n"
    before = noise_monitor.own_seconds()
    with subprocess.Popen([sys.executable, "-c", code + "time.sleep(60)"], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "1\n"
        running = noise_monitor.own_seconds()
        child.kill()
    assert running - before > 0.25 and noise_monitor.own_seconds() - before > 0.25


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_busy_process_is_noticed() -> None:
    """There are as many as cores."""
    count = os.cpu_count() or 1
    with neighbours(count, "while True: pass"):
        watcher = NoiseMonitor(count)
        watcher.begin()
        time.sleep(1.0)
        assert watcher.end() is True
