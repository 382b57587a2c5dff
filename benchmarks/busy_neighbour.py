"""Measures how much of an encoder's speed is left beside a busy process, in a training step and in evaluation.

    python -m benchmarks.busy_neighbour [--mode fwd] [--threads 2] [--neighbours 1] [--out benchmarks/results/cpu.jsonl]

Each provider computes alone and beside the neighbours alternately, in turns of a second. Turns are shorter in
evaluation, whose calls are shorter. A turn has many slices of the system's scheduler. A fair share is the speed that is
left if every thread gets an equal part of the cores (`peers.compare.fair_share`). Run it on an idle machine: any other
process is one more neighbour.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from benchmarks.cases.models.bench_small_work import KINDS, StackProvider, make_inputs
from benchmarks.measure import record
from benchmarks.measure.commands import parser_of, positive
from benchmarks.measure.timing import Timing
from benchmarks.peers.compare import PAUSE, beside, busy_neighbours, take_turns

SHAPE = {"dim": 256, "layers": 6, "heads": 4, "batch": 16, "seqlen": 128}
MODES = {"step": 1.0, "fwd": 0.4}  # the seconds of a turn


def turn(call: Callable[[], object], neighbours: int, seconds: float) -> float:
    """Returns the mean seconds of a call beside a number of busy processes, over a turn of at least `seconds`."""
    with busy_neighbours(neighbours):
        call()  # a process that has just slept is slow at first
        began = time.perf_counter()
        for count in itertools.count(1):
            call()
            if (passed := time.perf_counter() - began) >= seconds:
                return passed / count
    raise AssertionError


def work(provider: str, mode: str, shape: dict[str, Any]) -> Callable[[], object]:
    """Makes a training step, or an evaluation without gradients."""
    call, inputs = StackProvider(provider, training=mode == "step"), make_inputs(shape, "cpu")
    if mode == "step":
        return lambda: call(inputs, shape)

    def evaluate() -> object:
        with torch.inference_mode():
            return call(inputs, shape)

    return evaluate


def measure(
    providers: list[str],
    threads: int,
    neighbours: int,
    rounds: int,
    seconds: float | None,
    shape: dict[str, Any],
    modes: Sequence[str] = tuple(MODES),
) -> Iterator[record.Row]:
    """Yields a row for each mode and provider."""
    shape = {**shape, "threads": threads}
    for mode in modes:
        sizes = {**shape, "dropout_p": 0.1} if mode == "step" else shape
        calls = {provider: work(provider, mode, sizes) for provider in providers}
        for call in calls.values():
            call()
        turns = {
            (provider, count): functools.partial(turn, call, count, seconds or MODES[mode])
            for provider, call in calls.items()
            for count in (0, neighbours)
        }
        measured = take_turns(turns, rounds, PAUSE)
        for provider in providers:
            quiet, busy = (Timing.of(measured[provider, count]) for count in (0, neighbours))
            yield {
                "suite": "modules",
                "op": "busy_neighbour",
                "mode": mode,
                "dtype": "float32",
                "shape": sizes,
                "provider": provider,
                **beside(quiet, busy, threads, neighbours),
                "rounds": rounds,
            }


def main(arguments: list[str] | None = None) -> int:
    """Prints a line for each mode and provider, and appends it to a file."""
    parser = parser_of("busy_neighbour", __doc__, out=True)
    parser.add_argument("--provider", nargs="+", choices=KINDS, default=list(KINDS), help="which ones")
    parser.add_argument("--mode", nargs="+", choices=MODES, default=list(MODES), help="step: training; fwd: evaluation")
    parser.add_argument("--threads", type=positive, default=2, help="of torch (default 2)")
    parser.add_argument("--neighbours", type=positive, default=1, help="busy processes (default 1)")
    parser.add_argument("--rounds", type=positive, default=5, help="turns of each, alone and not (default 5)")
    parser.add_argument("--seconds", type=float, help=f"of a turn (default {MODES['step']}, fwd {MODES['fwd']})")
    for name, size in SHAPE.items():
        parser.add_argument(f"--{name}", type=positive, default=size, help=f"of the encoder (default {size})")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    shared = record.environment("cpu")
    sizes = {name: getattr(options, name) for name in SHAPE}
    settings = options.provider, options.threads, options.neighbours, options.rounds, options.seconds, sizes
    for row in measure(*settings, options.mode):
        speedup, fair = row["speedup"], row["fair_share"]
        print(
            f"{row['mode']:4} {row['provider']:12} {row['ms_quiet']:8.1f} ms alone, {row['ms_p50']:8.1f} ms beside "
            f"{row['neighbours']}: {100 * speedup:.0f} % is left, {speedup / fair:.2f} of a fair share"
        )
        record.append(options.out, {**shared, **row})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
