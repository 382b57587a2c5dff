"""Watches other work of the machine while a turn is timed: other processes, the hypervisor, a slow clock.

A process that keeps one of two cores busy makes a call of two threads take twice as long, and the time alone doesn't
show it. /proc/stat counts the CPU time of all processes; minus that of this process and its children, it is what other
processes took. It counts in ticks of 10 ms, so a look covers a quarter of a second at least, and the whole turn. Cores
that the turn leaves free may be used by others.

A fixed piece of work, timed now and then against its best time, shows a slower clock, or a neighbour on the other
thread of a core, which a cloud machine is not told about. Such a neighbour may be there for as long as a process lives,
so the best time is kept from one process to the next (`BEST`). It is no reason to repeat a turn, because on a shared
machine it comes and goes by the second; what it does to a ratio shows in the passes (`timing`). On other systems than
Linux nothing is known, and the results say so.
"""

from __future__ import annotations

import collections
import contextlib
import json
import math
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks.measure.record import cpu_name

WINDOW = 0.25  # seconds that a look goes back over
ALLOWED = 0.1  # of the time of the cores that we need, taken by others or by the hypervisor
SLOWER = 1.3  # times the best of the fixed work: a thread next door costs 1.3 to 2
_TRIES = 3  # of the fixed work, until one isn't slow
BEST = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fastformer" / "fixed_work.json"


class _Sample(NamedTuple):
    when: float  # seconds of the clock
    busy: float  # CPU seconds of all processes
    stolen: float  # by the hypervisor
    own: float  # CPU seconds of this process and its children


class NoiseMonitor:
    """Says of each turn whether something disturbed it, and whether the clock is slow.

    watcher.begin(); ...; disturbed = watcher.end()

    Attributes:
        is_slow: whether the fixed work took far longer than at best when it was tried last.

    Args:
        threads: that the turns compute with.
        proc: the folder of the kernel's figures; None: nothing is watched, and `end` gives None.
        clock, own, fixed_work: seconds now, CPU seconds of our processes, seconds of the fixed work; for tests.
        cores: of the machine.
    """

    def __init__(
        self,
        threads: int,
        *,
        proc: Path | None = Path("/proc"),
        clock: Callable[[], float] = time.perf_counter,
        own: Callable[[], float] | None = None,
        fixed_work: Callable[[], float] | None = None,
        cores: int | None = None,
    ) -> None:
        self._proc = proc if proc is not None and (proc / "stat").is_file() else None
        self._clock, self._own, self._fixed_work = clock, own or own_seconds, fixed_work or _fixed_work
        self._cores = cores or os.cpu_count() or 1
        self._threads = min(threads, self._cores)
        self._samples: collections.deque[_Sample] = collections.deque(maxlen=4096)
        self._best = _known().get(_machine(), math.inf) if fixed_work is None and self._proc is not None else math.inf
        self._began, self._tried, self.is_slow = clock(), -WINDOW, False

    def begin(self) -> None:
        """A turn begins."""
        if self._proc is not None:
            self._look()
            self._began = self._samples[-1].when

    def end(self) -> bool | None:
        """A turn ends: whether it was disturbed; None where it isn't known."""
        if self._proc is None:
            return None
        self._look()
        now = self._samples[-1]
        self._probe(now.when)
        past = [sample for sample in self._samples if sample.when <= min(self._began, now.when - WINDOW)]
        then = past[-1] if past else self._samples[0]
        while self._samples[0].when < then.when:
            self._samples.popleft()
        passed = now.when - then.when
        # What ticks may add to a core by rounding belongs to no process.
        rounding = self._cores / os.sysconf("SC_CLK_TCK")
        others = (now.busy - then.busy) - (now.own - then.own) - rounding
        taken = max(0.0, others - (self._cores - self._threads) * passed) + max(
            0.0, now.stolen - then.stolen - rounding
        )
        return taken > ALLOWED * self._threads * passed

    def wait(self, seconds: float) -> None:
        """Sleeps until no process disturbs, for so long at most."""
        end = self._clock() + seconds
        while self._proc is not None and (left := end - self._clock()) > 0:
            self.begin()
            time.sleep(min(left, WINDOW))
            if not self.end():
                break

    def _probe(self, now: float) -> None:
        if now - self._tried < WINDOW:
            return
        self._tried = now
        for _ in range(_TRIES):  # a hiccup of a millisecond is none of a slower clock, which lasts
            taken = self._fixed_work()
            if taken < self._best:
                self._best = taken
                if self._fixed_work is _fixed_work:
                    _remember(taken)
            self.is_slow = taken > SLOWER * self._best
            if not self.is_slow:
                break
            time.sleep(0.01)

    def _look(self) -> None:
        assert self._proc is not None
        # user, nice, system, idle, iowait, irq, softirq, steal
        with open(self._proc / "stat", "rb") as file:
            ticks = [int(field) / os.sysconf("SC_CLK_TCK") for field in file.readline().split()[1:9]]
        busy = sum(ticks[:3]) + sum(ticks[5:7])
        self._samples.append(_Sample(self._clock(), busy, ticks[7], self._own()))


def _machine() -> str:
    return f"{cpu_name()}, Python {platform.python_version()}"


def _known() -> dict[str, float]:
    """Machine -> the fewest seconds that the fixed work ever took; empty where nothing, or something else, was kept."""
    try:
        kept = json.loads(BEST.read_text())
    except (OSError, ValueError):
        return {}
    return {name: each for name, each in kept.items() if isinstance(each, float)} if isinstance(kept, dict) else {}


def _remember(seconds: float) -> None:
    """Keeps them, where the folder lets it."""
    with contextlib.suppress(OSError):
        BEST.parent.mkdir(parents=True, exist_ok=True)
        BEST.write_text(json.dumps(_known() | {_machine(): seconds}))


def _fixed_work() -> float:
    """The seconds of a fixed piece of work of one thread, the best of three."""
    time.sleep(0.002)  # the last turn's threads spin for so long, on the other thread of our core perhaps
    tries = []
    for _ in range(3):
        began = time.perf_counter()
        sum(range(20_000))
        tries.append(time.perf_counter() - began)
    return min(tries)


def own_seconds() -> float:
    """CPU seconds of this process and of all that it has started, those that ended included."""
    ended = os.times()
    total = time.process_time() + ended.children_user + ended.children_system
    waiting = _children(os.getpid())
    while waiting:
        pid = waiting.pop()
        waiting += _children(pid)
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        total += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")  # its own, and its children's
    return total


def _children(pid: int) -> list[int]:
    found = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            found += [int(child) for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split()]
    except OSError:  # it has ended, or this kernel doesn't say
        return found
    return found
