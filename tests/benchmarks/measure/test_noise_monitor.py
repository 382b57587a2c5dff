"""The noise monitor notices other processes and a slow clock."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from benchmarks.measure import noise_monitor
from benchmarks.measure.noise_monitor import NoiseMonitor
from benchmarks.measure.timing import time_interleaved
from tests.benchmarks.running import neighbours

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
