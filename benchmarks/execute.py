"""One case: its providers are checked, those that are right take turns, and each gives a row."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.case import Benchmark, cast, timed_call
from benchmarks.checking import verdicts_of
from benchmarks.roofline import measure_machine
from benchmarks.suites import chosen_providers
from benchmarks.timing import peak_bytes, time_interleaved


@dataclass
class Outcome:
    """What came of one case: a row for each provider that was timed or is missing, and why the others were not.

    Attributes:
        rows: as they are written, but for what all rows of a run share.
        wrong: provider -> how it disagrees.
        refused: provider -> why it can't take the case.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    wrong: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def timed(self) -> list[dict[str, Any]]:
        """The rows that have a time."""
        return [row for row in self.rows if "missing" not in row]


def run_case(
    benchmark: Benchmark,
    shape: dict[str, Any],
    mode: str,
    dtype: torch.dtype,
    device: str,
    *,
    providers: Sequence[str] = (),
    rounds: int = 15,
    seconds: float = 60.0,
) -> Outcome:
    """Checks the providers of one case and times those that are right, side by side.

    Args:
        shape: where it has "threads", PyTorch computes with so many.
        providers: which, besides ours and the baseline; empty = all.
        rounds, seconds: see `time_interleaved`.

    Raises:
        Exception: whatever ours or the baseline raises; a rival that can't take the case is left out instead.
    """
    with _threads(shape.get("threads")):
        return _run(benchmark, shape, mode, dtype, device, providers, rounds, seconds)


def _run(
    benchmark: Benchmark,
    shape: dict[str, Any],
    mode: str,
    dtype: torch.dtype,
    device: str,
    providers: Sequence[str],
    rounds: int,
    seconds: float,
) -> Outcome:
    outcome = Outcome()
    same = {
        "suite": benchmark.suite,
        "op": benchmark.name,
        "mode": mode,
        "dtype": str(dtype).removeprefix("torch."),
        "shape": dict(shape),
        "threads": torch.get_num_threads(),
    }
    for name, how in benchmark.missing(device).items():
        if not providers or name in providers:
            outcome.rows.append({**same, "provider": name, "missing": how})
    chosen = {}
    for name in chosen_providers(benchmark, device, providers):
        if (reason := benchmark.left_out(name, shape)) is not None:
            outcome.refused[name] = reason
        else:
            chosen[name] = benchmark.providers[name]
    verdicts = verdicts_of(benchmark, chosen, shape, mode, dtype, device)
    outcome.wrong |= verdicts.wrong
    outcome.refused |= verdicts.refused
    if not (verdicts.passed(benchmark.ours) and verdicts.passed(benchmark.baseline)):
        return outcome
    torch.manual_seed(0)
    made = benchmark.make_inputs(shape, device)

    def calls_on_copies() -> dict[str, Callable[[], object]]:
        inputs = cast(made, dtype)
        return {name: timed_call(call, inputs, shape, mode) for name, call in chosen.items() if verdicts.passed(name)}

    calls = calls_on_copies()
    timings = time_interleaved(calls, rounds=rounds, device=device, seconds=seconds, anew=calls_on_copies)
    flops, moved = benchmark.flops(shape, mode), benchmark.moved(shape, mode, dtype.itemsize)
    machine = measure_machine(dtype, device) if flops or moved else None
    floor = machine.floor(flops, moved) if machine else None
    for name, timing in timings.items():
        speedup = timings.ratio(name, benchmark.baseline)
        outcome.rows.append(
            {
                **same,
                "provider": name,
                "ms_p50": 1e3 * timing.p50,
                "ms_p20": 1e3 * timing.p20,
                "ms_p80": 1e3 * timing.p80,
                "speedup": speedup.value,
                "baseline": benchmark.baseline,
                **({} if benchmark.is_ladder else {"ours": timings.ratio(benchmark.ours, name).value}),
                "rounds": len(timings.turns[name]),
                "disturbed": timings.disturbed(name),
                "quiet": speedup.quiet,
                "tflop_s": flops / timing.p50 / 1e12 if flops else None,
                "gb_s": moved / timing.p50 / 1e9 if moved else None,
                "tokens_s": benchmark.tokens(shape) / timing.p50 if benchmark.tokens else None,
                "floor_ms": 1e3 * floor if floor else None,
                "share": floor / timing.p50 if floor else None,
                "bound": machine.bound(flops, moved) if machine else None,
                "peak_mib": peak_bytes(calls[name], device) / 2**20,
                "backends": verdicts.backends[name],
            }
        )
    return outcome


@contextlib.contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
