"""Runs cases: checks their providers, times the right ones in turns, in passes over all cases, and makes the rows.

A pass over many cases takes minutes, so the passes of one case meet different conditions of the machine (`timing`). A
case whose passes disagree, or that was disturbed too often, gets further passes while its time lasts. If they still
disagree, the result is recorded as not quiet.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.measure.case import cast, timed_call
from benchmarks.measure.checking import verdicts_of
from benchmarks.measure.roofline import measure_machine
from benchmarks.measure.suites import Case, chosen_providers
from benchmarks.measure.timing import ENOUGH, Interleaved, Ratio, device_seconds, peak_bytes
from fastformer.ops import _extension

_MOST = 3  # times the requested passes, if they disagree
_LASTING = 0.2  # the least seconds of a pass over a case on a CPU: short cases get several rounds
_APART = 3.0  # seconds between the passes over a case on a CPU, if there is time


@dataclass
class Outcome:
    """The result of one case: a row for each provider that was timed or is missing, and reasons for the others.

    Attributes:
        rows: the rows, without the fields that all rows of a run share.
        wrong: provider -> how its result differs.
        refused: provider -> why it can't compute the case.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    wrong: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


def run_cases(
    cases: Iterable[Case],
    device: str,
    *,
    providers: Sequence[str] = (),
    rounds: int = 16,
    seconds: float = 60.0,
    on_action: Callable[[str, Case], object] = lambda doing, case: None,
) -> Iterator[tuple[Case, Outcome]]:
    """Checks the providers of some cases and times those that are right, side by side, in passes over all of the cases.

    Args:
        cases: if a shape has "threads", PyTorch uses this number.
        device: "cpu" or "cuda".
        providers: the providers, besides fastformer and the baseline; empty = all.
        rounds: the number of passes. In each, a provider has an undisturbed turn, or several if it is short. Fewer
            passes, but at least three, if `seconds` are used up; up to three times as many if they disagree.
        seconds: the approximate time for a case, in all passes together.
        on_action: called before each action, with a description and the case.

    Raises:
        BaseException: an exception of fastformer or of the baseline, or one that stops the run, such as
            KeyboardInterrupt; raised after the results of cases with enough passes. A rival that can't compute a case
            is refused instead.
    """
    # torch.compile gives up on a function after eight shapes and runs it eagerly. The compiled code of these cases is
    # kept.
    torch._dynamo.reset()
    with torch._dynamo.config.patch(
        recompile_limit=10**6, accumulated_recompile_limit=10**6, fail_on_recompile_limit_hit=True
    ):
        running, stopped = [], None
        for case in cases:
            on_action("check", case)
            running.append(_Running(case, device, providers))
        began = -math.inf
        try:
            while more := [run for run in running if run.wants_more(rounds, seconds)]:
                if device == "cpu" and (left := began + min(_APART, seconds / rounds) - time.perf_counter()) > 0:
                    time.sleep(left)
                began = time.perf_counter()
                for run in more:
                    on_action(f"pass {run.timer.passes + 1}", run.case)
                    run.take(rounds, seconds)
        except BaseException as error:  # the results of minutes of passes are not lost
            stopped = error
        for run in running:
            if stopped is None or run.timer.passes >= ENOUGH:
                yield run.case, run.finish()
        if stopped is not None:
            raise stopped


class _Running:
    """A case that was checked and is being timed."""

    def __init__(self, case: Case, device: str, providers: Sequence[str]) -> None:
        self.case, self._device, self._dtype = case, device, getattr(torch, case.dtype)
        self._outcome, self.timer = Outcome(), Interleaved(device)
        benchmark = case.benchmark
        with _threads(case):
            self._same = {
                "suite": benchmark.suite,
                "op": benchmark.name,
                "mode": case.mode,
                "dtype": case.dtype,
                "shape": dict(case.shape),
                "threads": torch.get_num_threads(),
            }
            for name, how in benchmark.missing(device).items():
                if not providers or name in providers:
                    self._outcome.rows.append({**self._same, "provider": name, "missing": how})
            chosen = {}
            for name in chosen_providers(benchmark, device, providers):
                if (reason := benchmark.left_out(name, case.shape)) is not None:
                    self._outcome.refused[name] = reason
                else:
                    chosen[name] = benchmark.providers[name]
            verdicts = verdicts_of(benchmark, chosen, case.shape, case.mode, self._dtype, device)
        self._outcome.wrong |= verdicts.wrong
        self._outcome.refused |= verdicts.refused
        self._backends, self._kernels = verdicts.backends, verdicts.kernels
        self._right = {name: call for name, call in chosen.items() if verdicts.passed(name)}
        if not (verdicts.passed(benchmark.ours) and verdicts.passed(benchmark.baseline)):
            self._right = {}  # nothing can be compared

    def wants_more(self, rounds: int, seconds: float) -> bool:
        """Returns whether another pass is needed."""
        if not self._right or self.timer.passes >= _MOST * rounds:
            return False
        if self.timer.passes < min(ENOUGH, rounds):
            return True
        if self.timer.seconds > seconds:
            return False
        return self.timer.passes < rounds or any(
            ratio.quiet is False for name in self._right for ratio in (self._speedup(name), self._ours(name)) if ratio
        )

    def _speedup(self, name: str) -> Ratio:
        return self.timer.rounds.ratio(name, self.case.benchmark.baseline)

    def _ours(self, name: str) -> Ratio | None:
        """Returns how many times faster fastformer is; None if all providers are fastformer's."""
        benchmark = self.case.benchmark
        return None if benchmark.compares_stages else self.timer.rounds.ratio(benchmark.ours, name)

    def take(self, rounds: int, seconds: float) -> None:
        """Takes a pass, on inputs at other addresses than in the last one."""
        with _threads(self.case):
            copies = self._copies()
            self.timer.take(
                copies(), rounds=1, seconds=seconds / rounds, anew=copies,
                lasting=_LASTING if self._device == "cpu" else 0.0,
            )  # fmt: skip

    def _copies(self) -> Callable[[], dict[str, Callable[[], object]]]:
        """Returns a function that makes the calls of all providers, on new copies of the same inputs each time."""
        shape, mode = self.case.shape, self.case.mode
        torch.manual_seed(0)
        master = self.case.benchmark.make_inputs(shape, self._device)

        def calls() -> dict[str, Callable[[], object]]:
            inputs = cast(master, self._dtype)
            return {name: timed_call(call, inputs, shape, mode) for name, call in self._right.items()}

        return calls

    def finish(self) -> Outcome:
        """Returns the rows of missing providers, and then those of timed ones."""
        if self._right:
            with _threads(self.case):
                self._outcome.rows += self._rows()
        return self._outcome

    def _rows(self) -> Iterator[dict[str, Any]]:
        benchmark, shape, mode = self.case.benchmark, self.case.shape, self.case.mode
        timings, calls = self.timer.rounds, self._copies()()
        flops, moved = benchmark.flops(shape, mode), benchmark.moved(shape, mode, self._dtype.itemsize)
        machine = measure_machine(self._dtype, self._device, torch.get_num_threads()) if flops or moved else None
        floor = machine.floor(flops, moved) if machine else None
        on_device = device_seconds({name: calls[name] for name in timings}) if self._device == "cuda" else {}
        for name, timing in timings.items():
            speedup, ours = self._speedup(name), self._ours(name)
            yield {
                **self._same,
                "provider": name,
                **timing.fields(),
                **({"ms_device": 1e3 * on_device[name]} if name in on_device else {}),
                "speedup": speedup.value,
                "baseline": benchmark.baseline,
                **(
                    {"ours": ours.value, "ours_uncertainty": ours.uncertainty, "ours_quiet": ours.quiet} if ours else {}
                ),
                "rounds": len(timings.turns[name]),
                "disturbed": timings.disturbed(name),
                "slow": timings.slow(name),
                "passes": speedup.passes,
                "uncertainty": speedup.uncertainty,
                "quiet": speedup.quiet,
                "tflop_s": flops / timing.p50 / 1e12 if flops else None,
                "gb_s": moved / timing.p50 / 1e9 if moved else None,
                "tokens_s": benchmark.tokens(shape) / timing.p50 if benchmark.tokens else None,
                "floor_ms": 1e3 * floor if floor else None,
                "share": floor / timing.p50 if floor else None,
                "bound": machine.bound(flops, moved) if machine else None,
                "peak_mib": peak_bytes(calls[name], self._device) / 2**20,
                "backends": self._backends[name],
                **({"kernels": self._kernels} if self._kernels and name == benchmark.ours else {}),
                **({"extension": _extension.module() is not None} if name == benchmark.ours else {}),
            }


@contextlib.contextmanager
def _threads(case: Case) -> Iterator[None]:
    """Sets PyTorch's number of threads to that of the case's shape."""
    before = torch.get_num_threads()
    torch.set_num_threads(case.shape.get("threads") or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
