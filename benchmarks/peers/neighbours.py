"""fastformer beside busy processes: the share of its speed that is left, and the fair share."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from benchmarks.measure.timing import Timing
from benchmarks.peers.cases import make_job
from benchmarks.peers.compare import PAUSE, beside, busy_neighbours, num_tokens, take_turns
from benchmarks.peers.side_by_side import Row, close, start
from benchmarks.peers.suite import Plan
from benchmarks.peers.worker import Worker

_BUSY_SECONDS = 1.0  # the length of a turn beside neighbours: many slices of the scheduler


def measure(plan: Plan, rounds: int, neighbours: int) -> Iterator[Row]:
    """Yields rows of fastformer, alternately alone and beside busy processes.

    Raises:
        Failed: fastformer raised an error.
    """
    workers, missing = start([place for place in plan.places(plan.precisions) if place.peer == "fastformer"])
    shared = {"suite": "decoding", "op": "peers_neighbours", "model": plan.case["name"], "provider": "fastformer"}
    try:
        for num_beams in plan.beams:
            for batch in plan.batches:
                job = make_job(plan.case, batch, num_beams)
                shared["shape"] = {"batch": batch, "num_beams": num_beams}
                yield from ({**shared, "precision": t.precision, "missing": why} for t, why in missing.items())
                tokens = {key: worker.turn(job).tokens for key, worker in workers.items()}

                def turn(worker: Worker, count: int, job: object = job) -> float:
                    taken: list[float] = []
                    with busy_neighbours(count):
                        while sum(taken) < _BUSY_SECONDS:
                            taken.append(worker.turn(job).seconds)  # type: ignore[arg-type]
                    return sum(taken) / len(taken)

                turns = {
                    (key, count): functools.partial(turn, worker, count)
                    for key, worker in workers.items()
                    for count in (0, neighbours)
                }
                measured = take_turns(turns, rounds, PAUSE)
                for key in workers:
                    thing, threads = key
                    quiet, busy = (Timing.of(measured[key, count]) for count in (0, neighbours))
                    yield shared | {
                        "precision": thing.precision,
                        "threads": threads,
                        "tokens_s": num_tokens(job, tokens[key]) / busy.p50,
                        **beside(quiet, busy, threads, neighbours),
                    }
    finally:
        close(workers)
