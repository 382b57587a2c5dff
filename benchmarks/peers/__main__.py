"""Our decoding beside CTranslate2, Hugging Face transformers and llama.cpp: the same weights, the same inputs, one run.

    python -m benchmarks.peers --case base --batch 1 16 --beams 1 4 --precision int8 bf16 fp32
    python -m benchmarks.peers --case run --run RUN --text test.en --batch 1 16    each source of another length
    python -m benchmarks.peers --case gpt2 --llama_bench PATH
    python -m benchmarks.peers --case base --neighbours 2                          ours beside busy processes

Each thing runs in processes of its own, with one and with two threads, round by round in turn; the better median
counts. Timed is the whole call from ids to ids, the encoder and Python included. Beside it stands the floor: the
weights that a step reads, in the time of a step, as a share of the bandwidth of reading 256 MiB / of reading so many
bytes again and again, which a cache may hold in part. In fp32 a peer has to give our tokens, or it is not timed and the
exit status is 1. What is not installed is left out, with a line that says so.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.peers.cases import CASES, make_job, make_model
from benchmarks.peers.compare import (
    PAUSE,
    TURN,
    Best,
    Thing,
    agreeing,
    better_threads,
    busy_neighbours,
    fair_share,
    is_wrong,
    num_tokens,
    rival,
    steps,
    take_turns,
)
from benchmarks.peers.job import PRECISIONS, Job, Missing, Tokens
from benchmarks.peers.reading import DRAM, bytes_per_step
from benchmarks.peers.worker import Failed, Place, Worker, peers
from benchmarks.timing import Timing

_BUSY_SECONDS = 1.0  # of a turn beside neighbours: many slices of the scheduler

Workers = dict[tuple[Thing, int], Worker]


def main(arguments: list[str] | None = None) -> int:
    """Prints a table for each job, and writes a line for each row of it."""
    options = _options(arguments)
    case = {"name": options.case}
    for name in ("run", "text"):
        if getattr(options, name) is not None:
            case[name] = str(getattr(options, name).resolve())
    names = [name for name in peers() if name in options.peer and name != "read"]
    if options.neighbours:
        names = ["fastformer"]
    workers: Workers = {}
    failed = False
    try:
        jobs = _jobs(case, options.batch, options.beams)
        places = [
            Place(name, precision, threads, case, {"llama_bench": options.llama_bench})
            for name in names
            for precision in options.precision
            for threads in options.threads
        ]
        places += [Place("read", "fp32", threads, case, {}) for threads in options.threads if not options.neighbours]
        workers = _start(places)
        weights = {precision: bytes_per_step(make_model(case), precision) for precision in options.precision}
        shared = record.environment("cpu")
        print(f"{shared['device']}, {shared['cores']} cores, commit {shared['commit']}")
        for shape, job in jobs:
            print(f"\n{options.case} " + " ".join(f"{key}={value}" for key, value in shape.items()), flush=True)
            if options.neighbours:
                rows = _beside_neighbours(workers, job, options.rounds, options.neighbours, shared["cores"])
            else:
                rows, wrong = _side_by_side(workers, job, options.rounds, weights)
                failed = failed or wrong
            for row in rows:
                if options.out:
                    line = {"op": "peers", "model": options.case, "shape": shape, "baseline": None}
                    record.append(options.out, shared | line | row)
    except (ValueError, Failed) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        for worker in workers.values():
            worker.close()
    return 1 if failed else 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--case", choices=CASES, default="base", help="the model")
    parser.add_argument("--run", type=Path, help="the run folder of --case run")
    parser.add_argument("--text", type=Path, help="a text in its source language")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16], help="outputs that are decoded together")
    parser.add_argument("--beams", type=int, nargs="+", default=[1, 4], help="1 is greedy")
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=["int8", "fp32"], help="of the weights")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="of which the better number counts")
    parser.add_argument("--peer", nargs="+", choices=[n for n in peers() if n != "read"], help="which ones (all)")
    parser.add_argument("--llama_bench", default="", metavar="PATH", help="llama.cpp's llama-bench, if not on PATH")
    parser.add_argument("--neighbours", type=int, default=0, help="time ours alone and beside so many busy processes")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    options = parser.parse_args(arguments)
    options.peer = options.peer or list(peers())
    for name in ("batch", "beams", "threads", "rounds"):
        if (least := min([getattr(options, name)] if name == "rounds" else getattr(options, name))) < 1:
            parser.error(f"expected --{name} of at least 1, got {least}")
    if options.neighbours < 0:
        parser.error(f"expected --neighbours of at least 0, got {options.neighbours}")
    if (options.case == "run") != (options.run is not None and options.text is not None):
        parser.error("expected --run and --text along with --case run, and only there")
    return options


def _jobs(case: dict[str, str], batches: Sequence[int], beams: Sequence[int]) -> list[tuple[dict[str, int], Job]]:
    jobs = []
    for num_beams in beams:
        for batch in batches:
            try:
                jobs.append(({"batch": batch, "num_beams": num_beams}, make_job(case, batch, num_beams)))
            except Missing as missing:
                print(f"batch {batch}, {num_beams} beams: {missing}")
    return jobs


def _start(places: Sequence[Place]) -> Workers:
    """Those that can; why the others can't is printed once for each thing."""
    workers: Workers = {}
    said = set()
    try:
        for place in places:
            thing = Thing(place.peer, place.precision)
            worker = Worker(place)
            workers[thing, place.threads] = worker
            if (missing := worker.ready()) is not None:
                workers.pop((thing, place.threads)).close()
                if thing not in said:
                    print(f"without {thing}: {missing}", flush=True)
                said.add(thing)
    except BaseException:
        for worker in workers.values():
            worker.close()
        raise
    return workers


def _side_by_side(
    workers: Workers, job: Job, rounds: int, weights: dict[str, int]
) -> tuple[list[dict[str, Any]], bool]:
    """Times all workers on a job. Returns the rows, and whether a peer was wrong."""
    decoding = {key: worker for key, worker in workers.items() if key[0].peer != "read"}
    readers = {threads: worker for (thing, threads), worker in workers.items() if thing.peer == "read"}
    tokens: dict[Thing, Tokens | None] = {}
    repeats: dict[tuple[Thing, int], int] = {}
    wrong: set[Thing] = set()
    refused: set[Thing] = set()
    for key, worker in decoding.items():  # the warm-up as well
        thing = key[0]
        if thing in refused:
            continue
        try:
            tokens[thing] = worker.turn(job).tokens
            repeats[key] = max(1, round(TURN / worker.turn(job).seconds))
        except Missing as missing:
            refused.add(thing)
            print(f"    {thing} was not timed: {missing}")
    expected = tokens.get(Thing("fastformer", "fp32"))
    same: dict[Thing, int | None] = {}
    for thing, found in tokens.items():
        same[thing] = None if expected is None or found is None else agreeing(expected, found)
        total = sum(map(len, job.batches))
        # Where outputs end by themselves, the beam searches of others are not ours.
        is_comparable = job.num_beams == 1 or job.new_tokens is not None
        if (
            thing.precision == "fp32"
            and is_comparable
            and same[thing] is not None
            and is_wrong(same[thing] or 0, total)
        ):
            wrong.add(thing)
            print(f"    {thing} is wrong and was not timed: {same[thing]} of {total} outputs are ours")

    def decode(worker: Worker, times: int) -> float:
        return sum(worker.turn(job).seconds for _ in range(times)) / times

    def read(worker: Worker, count: int) -> float:
        return count / worker.turn(Job([[[count]]], 1, 1)).seconds

    turns = {
        key: functools.partial(decode, worker, repeats[key])
        for key, worker in decoding.items()
        if key[0] not in wrong | refused
    }
    sizes = sorted({DRAM, *weights.values()})
    reads = {
        (Thing("read", str(size)), threads): functools.partial(read, worker, size)
        for size in sizes
        for threads, worker in readers.items()
    }
    measured = take_turns({**turns, **reads}, rounds, PAUSE)
    bandwidth = {
        size: max(Timing.of(s).p50 for (thing, _), s in measured.items() if thing == Thing("read", str(size)))
        for size in sizes
        if readers
    }
    for size, rate in bandwidth.items():
        print(f"    {size / 2**20:.0f} MiB are read again and again at {rate / 1e9:.0f} GB/s")
    best = better_threads({key: measured[key] for key in turns})
    rows = []
    for thing in best:
        rows.append(_row(thing, best, job, tokens[thing], weights, bandwidth))
        rows[-1]["same_tokens"] = same[thing]
        rows[-1]["ms_by_threads"] = {
            str(threads): 1e3 * Timing.of(measured[thing, threads]).p50 for other, threads in turns if other == thing
        }
        print(_table(rows[-1], sum(map(len, job.batches))), flush=True)
    return rows, bool(wrong)


def _row(
    thing: Thing,
    best: dict[Thing, Best],
    job: Job,
    tokens: Tokens | None,
    weights: dict[str, int],
    bandwidth: dict[int, float],
) -> dict[str, Any]:
    found, against = best[thing], rival(thing, best)
    row: dict[str, Any] = {
        "provider": thing.peer,
        "precision": thing.precision,
        "threads": found.threads,
        "ms_p50": 1e3 * found.timing.p50,
        "ms_p20": 1e3 * found.timing.p20,
        "ms_p80": 1e3 * found.timing.p80,
        "tokens_s": num_tokens(job, tokens) / found.timing.p50,
        "speedup": None if against is None else best[against].timing.p50 / found.timing.p50,
        "baseline": None if against is None else str(against),
    }
    count = steps(job, tokens)
    if count is not None:
        # The encoder's time counts as the steps': a little is left out of the share, never added.
        rate = weights[thing.precision] * count / found.timing.p50
        row |= {"ms_step": 1e3 * found.timing.p50 / count, "weight_bytes_step": weights[thing.precision]}
        if bandwidth:
            row["share_of_dram"] = rate / bandwidth[DRAM]
            row["share_of_cached"] = rate / bandwidth[weights[thing.precision]]
    return row


def _table(row: dict[str, Any], outputs: int) -> str:
    parts = [f"    {row['provider']:<12} {row['precision']:<5} {row['tokens_s']:>9,.0f} tokens/s"]
    parts.append(f"{row['ms_p50']:>9.1f} ms [{row['ms_p20']:.1f}, {row['ms_p80']:.1f}] on {row['threads']}")
    if row["speedup"] is not None:
        parts.append(f"{row['speedup']:.2f}x {row['baseline']}")
    if "share_of_dram" in row:
        parts.append(
            f"reads {row['weight_bytes_step'] / 2**20:.0f} MiB in {row['ms_step']:.2f} ms: "
            f"{100 * row['share_of_dram']:.0f} / {100 * row['share_of_cached']:.0f} %"
        )
    if row["same_tokens"] is not None:
        parts.append(f"{row['same_tokens']} of {outputs} as ours fp32")
    return "  ".join(parts)


def _beside_neighbours(workers: Workers, job: Job, rounds: int, neighbours: int, cores: int) -> list[dict[str, Any]]:
    """Ours, quiet and beside busy processes in turn: what is left of its speed, and what would be fair."""
    tokens = {key: worker.turn(job).tokens for key, worker in workers.items()}

    def turn(worker: Worker, count: int) -> float:
        taken: list[float] = []
        with busy_neighbours(count):
            while sum(taken) < _BUSY_SECONDS:
                taken.append(worker.turn(job).seconds)
        return sum(taken) / len(taken)

    turns = {
        (key, count): functools.partial(turn, worker, count)
        for key, worker in workers.items()
        for count in (0, neighbours)
    }
    measured = take_turns(turns, rounds, PAUSE)
    rows = []
    for key in workers:
        thing, threads = key
        quiet, busy = (Timing.of(measured[key, count]) for count in (0, neighbours))
        kept, fair = quiet.p50 / busy.p50, fair_share(threads, neighbours, cores)
        rows.append(
            {
                "op": "peers_neighbours",
                "provider": thing.peer,
                "precision": thing.precision,
                "threads": threads,
                "neighbours": neighbours,
                "ms_p50": 1e3 * busy.p50,
                "ms_p20": 1e3 * busy.p20,
                "ms_p80": 1e3 * busy.p80,
                "ms_quiet": 1e3 * quiet.p50,
                "tokens_s": num_tokens(job, tokens[key]) / busy.p50,
                "speedup": kept,
                "baseline": "quiet",
                "fair_share": fair,
            }
        )
        print(
            f"    {thing} on {threads}: quiet {1e3 * quiet.p50:.1f} ms, beside {neighbours} busy processes "
            f"{1e3 * busy.p50:.1f} ms: keeps {100 * kept:.0f} % of its speed, a fair share is {100 * fair:.0f} %: "
            f"{kept / fair:.2f}x",
            flush=True,
        )
    return rows


if __name__ == "__main__":
    sys.exit(main())
