"""Detects other work on the machine while a turn is timed: other processes, the hypervisor, a slow clock.

If a process keeps one of two cores busy, a call with two threads takes twice as long, and the time alone doesn't show
why. /proc/stat counts the CPU time of all processes; less that of this process and its children, it is the time of
other processes. It counts in ticks of 10 ms, so a measurement covers at least a quarter of a second, and the whole
turn. Others may use the cores that the turn leaves free.

A fixed piece of work, timed now and then and compared with its best time, reveals a slower clock, or a neighbour on the
other thread of a core, which a cloud machine can't see. Such a neighbour may last for the whole life of a process, so
the best time is stored for later processes (`BEST`). A slow clock doesn't cause a turn to be repeated, because on a
shared machine it comes and goes within seconds; its effect on a ratio shows in the passes (`timing`). On systems other
than Linux nothing is known, and the results say so.
"""

from __future__ import annotations

import collections
import contextlib
import json
import math
import os
import platform
import time
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks.measure.record import cpu_name

WINDOW = 0.25  # the length of a measurement in seconds
ALLOWED = 0.1  # the share of the needed cores' time that others or the hypervisor may take
SLOWER = 1.3  # times the best time of the fixed work: a busy thread on the same core costs 1.3 to 2
_TRIES = 3  # tries of the fixed work, until one isn't slow
BEST = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fastformer" / "fixed_work.json"


class _Sample(NamedTuple):
    when: float  # the clock, in seconds
    busy: float  # CPU seconds of all processes
    stolen: float  # seconds taken by the hypervisor
    own_cpu: float  # CPU seconds of this process and its children


class NoiseMonitor:
    """Determines whether each turn was disturbed, and whether the clock is slow.

    watcher.begin(); ...; disturbed = watcher.end()

    Attributes:
        is_slow: whether the fixed work took far longer than its best time in the last try.

    Args:
        threads: the number of threads of the turns.
        proc: the folder of the kernel's statistics; None: nothing is watched, and `end` returns None.
        clock, own, fixed_work: functions for the time, the CPU seconds of this process and its children, and the
            seconds of the fixed work; for tests.
        cores: the number of cores of the machine.
    """

    def __init__(
        self,
        threads: int,
        *,
        proc: Path | None = Path("/proc"),
        clock: Callable[[], float] = time.perf_counter,
        own_cpu: Callable[[], float] | None = None,
        fixed_work: Callable[[], float] | None = None,
        cores: int | None = None,
    ) -> None:
        self._proc = proc if proc is not None and (proc / "stat").is_file() else None
        self._clock, self._own_cpu, self._fixed_work = clock, own_cpu or own_seconds, fixed_work or _fixed_work
        self._cores = cores or os.cpu_count() or 1
        self._threads = min(threads, self._cores)
        self._samples: collections.deque[_Sample] = collections.deque(maxlen=4096)
        self._best = _known().get(_machine(), math.inf) if fixed_work is None and self._proc is not None else math.inf
        self._began, self._tried, self.is_slow = clock(), -WINDOW, False

    def begin(self) -> None:
        """Marks the beginning of a turn."""
        if self._proc is not None:
            self._look()
            self._began = self._samples[-1].when

    def end(self) -> bool | None:
        """Marks the end of a turn; returns whether it was disturbed, or None if that isn't known."""
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
        # The rounding of ticks may add this much for each core.
        rounding = self._cores / os.sysconf("SC_CLK_TCK")
        others = (now.busy - then.busy) - (now.own_cpu - then.own_cpu) - rounding
        disturbance = max(0.0, others - (self._cores - self._threads) * passed) + max(
            0.0, now.stolen - then.stolen - rounding
        )
        return disturbance > ALLOWED * self._threads * passed

    def wait(self, seconds: float) -> None:
        """Sleeps until no process disturbs, but not longer than the given seconds."""
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
        for _ in range(_TRIES):  # a hiccup of a millisecond is not a slower clock, which lasts
            elapsed = self._fixed_work()
            if elapsed < self._best:
                self._best = elapsed
                if self._fixed_work is _fixed_work:
                    _remember(elapsed)
            self.is_slow = elapsed > SLOWER * self._best
            if not self.is_slow:
                break
            time.sleep(0.01)

    def _look(self) -> None:
        assert self._proc is not None
        # user, nice, system, idle, iowait, irq, softirq, steal
        with open(self._proc / "stat", "rb") as file:
            ticks = [int(field) / os.sysconf("SC_CLK_TCK") for field in file.readline().split()[1:9]]
        busy = sum(ticks[:3]) + sum(ticks[5:7])
        self._samples.append(_Sample(self._clock(), busy, ticks[7], self._own_cpu()))


def _machine() -> str:
    return f"{cpu_name()}, Python {platform.python_version()}"


def _known() -> dict[str, float]:
    """Returns machine -> the fewest seconds of the fixed work so far; empty if the file is missing or invalid."""
    try:
        stored = json.loads(BEST.read_text())
    except (OSError, ValueError):
        return {}
    return {name: v for name, v in stored.items() if isinstance(v, float)} if isinstance(stored, dict) else {}


def _remember(seconds: float) -> None:
    """Stores the seconds, if the folder is writable."""
    with contextlib.suppress(OSError):
        BEST.parent.mkdir(parents=True, exist_ok=True)
        BEST.write_text(json.dumps(_known() | {_machine(): seconds}))


def _fixed_work() -> float:
    """Returns the seconds of a fixed piece of work of one thread, the best of three."""
    time.sleep(0.002)  # the threads of the last turn may spin this long, perhaps on the same core
    return min(timeit.repeat(lambda: sum(range(20_000)), number=1, repeat=3))


def own_seconds() -> float:
    """Returns the CPU seconds of this process and of all processes that it has started, including those that ended."""
    ended = os.times()
    total = time.process_time() + ended.children_user + ended.children_system
    waiting = _children(os.getpid())
    while waiting:
        pid = waiting.pop()
        waiting += _children(pid)
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # the process has ended
            continue
        total += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")  # its own time and its children's
    return total


def _children(pid: int) -> list[int]:
    children = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            children += [int(child) for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split()]
    except OSError:  # the process has ended, or the kernel lacks the file
        return children
    return children
