"""The peers of the suites "decoding" and "model": the cases, their precisions, and a row for each peer.

for row in run("decoding", quick=True): ...
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.peers import models, side_by_side
from benchmarks.peers.cases import jobs, make_model
from benchmarks.peers.job import PRECISIONS, USUAL, PeerJob
from benchmarks.peers.reading import bytes_per_step
from benchmarks.peers.side_by_side import Row, started, without_time
from benchmarks.peers.worker import WorkerConfig, peers

SUITES = ("decoding", "model")


@dataclass(frozen=True)
class SuitePlan:
    """A case and its options.

    Attributes:
        case: a case for `cases.make_model`, or one of `models.CASES`.
        precisions: some of PRECISIONS.
        threads: numbers of threads; the better one counts for each peer.
        batches: numbers of outputs that are decoded together.
        beams: numbers of beams; 1 is greedy.
        only: the names of peers; empty: all. The baseline is always included.
        options: options for peers: the paths of `cases.LLAMA_BENCHES`.
        shape: the values, as text, that fields of a shape must have to be measured; empty: all shapes.
    """

    case: dict[str, Any]
    precisions: Sequence[str] = USUAL
    threads: Sequence[int] = ()
    batches: Sequence[int] = (1,)
    beams: Sequence[int] = (1,)
    only: Sequence[str] = ()
    options: dict[str, str] = field(default_factory=dict)
    shape: Mapping[str, str] = field(default_factory=dict)

    def has(self, shape: Mapping[str, Any]) -> bool:
        """Returns whether a shape is to be measured."""
        return all(str(shape.get(name)) == value for name, value in self.shape.items())

    def jobs(self) -> list[tuple[dict[str, int], PeerJob]]:
        """Returns the jobs of a decoder that are to be measured; see `cases.jobs`."""
        return [(shape, job) for shape, job in jobs(self.case, self.batches, self.beams) if self.has(shape)]

    def places(self, precisions: Iterable[str]) -> list[WorkerConfig]:
        """Returns a worker's place for each peer, each of these precisions that it has, and each number of threads."""
        return [
            WorkerConfig(name, precision, threads, self.case, self.options)
            for name, peer in peers(self.case).items()
            if not self.only or name in {*self.only, "read", "as it is"}
            for precision in (peer.precisions if name == "read" else precisions)
            if precision in peer.precisions
            for threads in self.threads
        ]


def plans(suite: str, *, quick: bool) -> list[SuitePlan]:
    """Returns the plans of a suite."""
    cores = torch.get_num_threads()
    one_or_all = sorted({1, cores})
    if suite == "decoding":
        if quick:
            return [SuitePlan({"name": "tiny"}, ("int8", "fp32"), one_or_all, (4,))]
        return [
            SuitePlan({"name": "base"}, threads=one_or_all, batches=(1, 16), beams=(1, 4)),
            SuitePlan({"name": "gpt2"}, threads=one_or_all),
            SuitePlan({"name": "llama"}, PRECISIONS, threads=(cores,), batches=(1, 16)),
        ]
    if suite == "model":
        # No user would run these batches with only one thread.
        if quick:
            # Compiling would take longer than all the rest.
            small = ("accelerated", "accelerated, fused loss", "onnxruntime", "openvino")
            return [SuitePlan(case, ("fp32",), (cores,), only=small) for case in models.QUICK]
        return [SuitePlan(case, ("fp32",) if case["mode"] == "training" else USUAL, (cores,)) for case in models.CASES]
    raise ValueError(f"expected a suite that has peers, one of {', '.join(SUITES)}, got {suite!r}")


def run(suite: str, *, quick: bool = False) -> Iterator[Row]:
    """Measures the peers of a suite on the CPU, each in a process of its own, at torch.get_num_threads() at most.

    Args:
        suite: one of SUITES.
        quick: use small models, which take seconds.

    Yields:
        Rows of `record.FIELDS` without the environment. A row with "missing" says why a peer has no times. A row with
        "wrong" must not be stored: the peer's result differed, and it was not timed.

    Raises:
        ValueError: the suite has no peers.
        Failed: fastformer, or the unchanged model, raised an error.
    """
    for plan in plans(suite, quick=quick):
        yield from measure(plan, rounds=3 if quick else 7)


def measure(plan: SuitePlan, rounds: int) -> Iterator[Row]:
    """Yields the rows of a plan; see `run`."""
    yield from (_models if plan.case["name"] in models.MODELS else _decoders)(plan, rounds)


def _models(plan: SuitePlan, rounds: int) -> Iterator[Row]:
    def shared(case: dict[str, Any]) -> Row:
        model, shape = case["name"], models.shape_of(case)
        return {"suite": "model", "op": "drop_in", "model": model, "shape": shape, "padding": models.padding(case)}

    is_ordered = models.is_embedding(plan.case)
    cases = [{**plan.case, "order": order} for order in models.ORDERS] if is_ordered else [plan.case]
    cases = [case for case in cases if plan.has(models.shape_of(case))]
    # int8 is measured with fp32, from which it is rounded; bf16 separately: half as many processes take half the
    # memory.
    for base, group in (("fp32", {"fp32", "int8"}), ("bf16", {"bf16"})):
        precisions = group.intersection(plan.precisions)
        configs = [
            config
            for config in plan.places(sorted({base, *precisions}))
            if config.precision in precisions or config.peer == "as it is"
        ]
        if not precisions or not cases:
            continue
        with started(configs) as (workers, missing):
            for case in cases:
                yield from (shared(case) | row for row in without_time(missing, "dtype"))
                if workers:
                    rows = side_by_side.models(workers, rounds, case.get("order"))
                    yield from (shared(case) | row for row in rows)


def _decoders(plan: SuitePlan, rounds: int) -> Iterator[Row]:
    if not (wanted := plan.jobs()):
        return
    shared = {"suite": "decoding", "op": "peers", "model": plan.case["name"]}
    model = make_model(plan.case)
    weights = {precision: bytes_per_step(model, precision) for precision in plan.precisions}
    del model
    with started(plan.places(plan.precisions)) as (workers, missing):
        for shape, job in wanted:
            yield from (shared | {"shape": shape} | row for row in without_time(missing, "precision"))
            yield from (shared | {"shape": shape} | row for row in side_by_side.decoders(workers, job, rounds, weights))
