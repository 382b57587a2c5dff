"""Runs one job with all peers: starts and checks them, times them in turns, and makes a row of each.

In fp32 a peer that decodes has to give fastformer's tokens, and a model has to give the results of the unchanged model.
Otherwise the difference is reported, and the peer is not timed.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure.timing import Timing
from benchmarks.peers.compare import PAUSE, TURN, Fastest, PeerKey, better_threads, num_tokens, rival, steps, take_turns
from benchmarks.peers.job import Missing, PeerJob, StepJob, Tokens
from benchmarks.peers.models import StepResults
from benchmarks.peers.reading import DRAM
from benchmarks.peers.worker import Failed, Worker, WorkerConfig

Workers = dict[tuple[PeerKey, int], Worker]
Row = dict[str, Any]

# Errors of these are errors of the run.
OURS = ("fastformer", "fastformer, CTranslate2's folder", "as it is", "accelerated", "read")
# The largest difference from the unchanged model, relative to the scale: twice what rounding explains. int8's
# difference is reported as it is; beyond a half, the weights must be wrong.
_TOLERANCES = {"fp32": 2e-3, "bf16": 0.1, "int8": 0.5}


@contextlib.contextmanager
def started(configs: Sequence[WorkerConfig]) -> Iterator[tuple[Workers, dict[PeerKey, str]]]:
    """Starts the workers of the peers, which end with the block; yields those that can run, and why others can't."""
    workers: Workers = {}
    missing: dict[PeerKey, str] = {}
    try:
        for config in configs:
            thing = PeerKey(config.peer, config.precision)
            if thing in missing:
                continue
            worker = workers[thing, config.threads] = Worker(config)
            try:
                why = worker.ready()
            except Failed as failure:
                if config.peer in OURS:
                    raise
                why = str(failure)
            if why is not None:
                workers.pop((thing, config.threads)).close()
                missing[thing] = why
        yield workers, missing
    finally:
        for worker in workers.values():
            worker.close()


def without_time(reasons: Mapping[PeerKey, str], precision: str, reason: str = "missing") -> Iterator[Row]:
    """Yields rows of programs that are not timed, with the names of the fields of their precision and of the reason."""
    for thing, why in reasons.items():
        yield {"provider": thing.peer, precision: thing.precision, reason: why}


@dataclass
class _First:
    """The results of the first turns, which are the warm-up as well.

    Attributes:
        found: the result of each program.
        repeats: the number of consecutive turns that make one turn long enough.
        refused: the reason why a program can't do this job.
    """

    results: dict[PeerKey, Any] = field(default_factory=dict)
    repeats: dict[tuple[PeerKey, int], int] = field(default_factory=dict)
    refused: dict[PeerKey, str] = field(default_factory=dict)


def _first_turns(workers: Workers, job: PeerJob | StepJob) -> _First:
    first = _First()
    with tempfile.TemporaryDirectory(prefix="fastformer-peers-") as folder:
        file = Path(folder) / "results.pt"
        for (thing, threads), worker in workers.items():
            if thing in first.refused:
                continue
            try:
                if isinstance(job, StepJob):
                    worker.turn(StepJob(str(file), job.order))
                    first.results[thing] = StepResults(*torch.load(file))
                    worker.turn(job)  # a step that isn't checked may still have to be compiled
                else:
                    first.results[thing] = worker.turn(job).tokens
                first.repeats[thing, threads] = max(1, round(TURN / worker.turn(job).seconds))
            except (Missing, Failed) as error:
                if isinstance(error, Failed) and thing.peer in OURS:
                    raise
                first.refused[thing] = str(error)
                first.results.pop(thing, None)
    return first


def _timed(
    workers: Workers,
    job: PeerJob | StepJob,
    first: _First,
    wrong: Iterable[PeerKey],
    reads: Mapping[Any, Any],
    rounds: int,
) -> dict[Any, list[float]]:
    """Returns the seconds of a job, by program and threads, and the bandwidth of the reads between them."""

    def turn(worker: Worker, times: int) -> float:
        return sum(worker.turn(job).seconds for _ in range(times)) / times

    turns = {
        key: functools.partial(turn, worker, first.repeats[key])
        for key, worker in workers.items()
        if key[0] not in {*wrong, *first.refused}
    }
    return take_turns({**turns, **reads}, rounds, PAUSE)


def _times(fastest: Fastest, thing: PeerKey, measured: Mapping[Any, list[float]], against: Fastest | None) -> Row:
    return {
        "threads": fastest.threads,
        **fastest.timing.fields(),
        "ms_by_threads": {
            str(threads): 1e3 * Timing.of(seconds).p50
            for (other, threads), seconds in measured.items()
            if other == thing
        },
        "rounds": len(measured[thing, fastest.threads]),
        "speedup": None if against is None else against.timing.p50 / fastest.timing.p50,
    }


def models(workers: Workers, rounds: int, order: str | None = None) -> Iterator[Row]:
    """Yields a row for each way to run a model, compared with the unchanged model; with sentences, in one order."""
    base = next(thing for thing, _ in workers if thing.peer == "as it is")
    first = _first_turns(workers, StepJob(order=order))
    errors = {thing: result.error(first.results[base]) for thing, result in first.results.items()}
    wrong = {
        thing: f"its results are off by {error:.2g} of their size"
        for thing, error in errors.items()
        if not error <= _TOLERANCES[thing.precision]
    }
    yield from without_time(first.refused, "dtype")
    yield from without_time(wrong, "dtype", "wrong")
    measured = _timed(workers, StepJob(order=order), first, wrong, {}, rounds)
    best = better_threads(measured)
    for thing, fastest in sorted(best.items(), key=lambda item: item[0].precision == "int8"):
        row: Row = {"provider": thing.peer, "dtype": thing.precision, "baseline": base.peer, "error": errors[thing]}
        ours = PeerKey("accelerated", thing.precision)
        if ours in best and thing != ours:
            rounds_of = measured[thing, fastest.threads], measured[ours, best[ours].threads]
            row["ours"] = statistics.median(b / a for b, a in zip(*rounds_of, strict=True))
        yield row | _times(fastest, thing, measured, best[base])


def decoders(workers: Workers, job: PeerJob, rounds: int, weights: Mapping[str, int]) -> Iterator[Row]:
    """Yields a row for each peer that decodes, compared with the fastest program of another kind.

    Args:
        workers: the workers of the decoders, and of "read".
        job: the job of all of them.
        rounds: the turns of each.
        weights: precision -> the bytes that a decode step reads.
    """
    decoding = {key: worker for key, worker in workers.items() if key[0].peer != "read"}
    readers = {threads: worker for (thing, threads), worker in workers.items() if thing.peer == "read"}
    first = _first_turns(decoding, job)
    expected = first.results.get(PeerKey("fastformer", "fp32"))
    same = {
        thing: sum(a == b for a, b in zip(expected, fastest, strict=True)) if expected and fastest else None
        for thing, fastest in first.results.items()
    }
    total = sum(map(len, job.batches))
    # If outputs end by themselves, the beam searches of other programs differ from fastformer's. Near-ties change some
    # outputs in any case.
    is_comparable = job.num_beams == 1 or job.new_tokens is not None
    wrong = {
        thing: f"{count} of {total} outputs are ours"
        for thing, count in same.items()
        if thing.precision == "fp32" and is_comparable and count is not None and 4 * count < 3 * total
    }
    yield from without_time(first.refused, "precision")
    yield from without_time(wrong, "precision", "wrong")

    def read(worker: Worker, count: int) -> float:
        return count / worker.turn(PeerJob([[[count]]], 1, 1)).seconds

    reads = {
        (PeerKey("read", str(size)), threads): functools.partial(read, worker, size)
        for size in sorted({DRAM, *weights.values()})
        for threads, worker in readers.items()
    }
    measured = _timed(decoding, job, first, wrong, reads, rounds)
    bandwidth: dict[int, float] = {}
    for thing, threads in reads:
        size, rate = int(thing.precision), Timing.of(measured.pop((thing, threads))).p50
        bandwidth[size] = max(rate, bandwidth.get(size, 0.0))
    best = better_threads(measured)
    for thing, fastest in best.items():
        against = rival(thing, best)
        row: Row = {"provider": thing.peer, "precision": thing.precision, "baseline": str(against) if against else None}
        row |= _times(fastest, thing, measured, best[against] if against else None)
        row |= {"same_tokens": same[thing]}
        yield row | rates(weights[thing.precision], fastest.timing.p50, job, first.results[thing], bandwidth)


def rates(size: int, seconds: float, job: PeerJob, tokens: Tokens | None, bandwidth: Mapping[int, float]) -> Row:
    """Returns the tokens a second, and the share of the speed of only reading the weights.

    Args:
        size: the bytes of weights that a step reads.
        seconds: the seconds of the job.
        job: the job.
        tokens: the outputs, if they are known.
        bandwidth: number of bytes -> bytes a second when this many are read repeatedly.
    """
    row: Row = {"tokens_s": num_tokens(job, tokens) / seconds}
    if (count := steps(job, tokens)) is not None:
        # The encoder's time counts as part of the steps, so the share may be a little too low, but never too high.
        row |= {"ms_step": 1e3 * seconds / count, "weight_bytes_step": size}
        if bandwidth:
            rate = size * count / seconds
            row |= {"share_of_dram": rate / bandwidth[DRAM], "share_of_cached": rate / bandwidth[size]}
    return row
