"""fastformer beside busy processes: the share of its speed that is left, and the fair share."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from benchmarks.measure.timing import Timing
from benchmarks.peers.compare import PAUSE, beside, busy_neighbours, num_tokens, take_turns
from benchmarks.peers.job import PeerJob
from benchmarks.peers.side_by_side import Row, started, without_time
from benchmarks.peers.suite import SuitePlan
from benchmarks.peers.worker import Worker

_BUSY_SECONDS = 1.0  # the length of a turn beside neighbours: many slices of the scheduler


def measure(plan: SuitePlan, rounds: int, neighbours: int) -> Iterator[Row]:
    """Yields rows of fastformer, alternately alone and beside busy processes.

    Raises:
        Failed: fastformer raised an error.
    """
    if not (wanted := plan.jobs()):
        return
    configs = [config for config in plan.places(plan.precisions) if config.peer == "fastformer"]
    shared = {"suite": "decoding", "op": "peers_neighbours", "model": plan.case["name"], "provider": "fastformer"}
    with started(configs) as (workers, missing):
        for shape, job in wanted:
            yield from (shared | {"shape": shape} | row for row in without_time(missing, "precision"))
            tokens = {key: worker.turn(job).tokens for key, worker in workers.items()}

            def turn(worker: Worker, count: int, job: PeerJob = job) -> float:
                times: list[float] = []
                with busy_neighbours(count):
                    while sum(times) < _BUSY_SECONDS:
                        times.append(worker.turn(job).seconds)
                return sum(times) / len(times)

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
                    "shape": shape,
                    "precision": thing.precision,
                    "threads": threads,
                    "tokens_s": num_tokens(job, tokens[key]) / busy.p50,
                    **beside(quiet, busy, threads, neighbours),
                }
