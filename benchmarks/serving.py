"""Measures servers of one model under load: throughput and latency by number of clients, fastformer beside others.

    python -m benchmarks.serving --out benchmarks/results/serving.jsonl
    python -m benchmarks.serving --case base --clients 16 --rounds 5
    python -m benchmarks.serving --case llama-small --llama_server PATH

A client sends its next request as soon as it has an answer. All servers of a model run at once and take turns in each
round; while one is under load the others are idle. Texts have 8 to 32 words (16 to 48 for the language model), each a
token, and request about as many new tokens. Clients and servers share the machine's cores. An answer must have the
requested number of tokens; otherwise the server is not timed, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import record
from benchmarks.measure.commands import parser_of, positive
from benchmarks.peers import servers
from benchmarks.peers.job import Missing
from benchmarks.peers.load import LoadResult, Refused, percentile, put_under_load
from benchmarks.peers.servers import LoadTest, PeerServer

Row = dict[str, Any]
_SLOWEST_MS = 30_000.0  # the longest expected wait with many clients
_CASES = (*servers.TRANSLATORS, *servers.LANGUAGE_MODELS)


def main(arguments: list[str] | None = None) -> int:
    """Prints a line for each server and number of clients, and writes the rows."""
    options = _options(arguments)
    shared = record.environment("cpu") | {"threads": options.threads}
    print(f"{shared['device']}, {shared['cores']} cores, commit {shared['commit']}")
    failed = False
    for case in options.case:
        for row in _rows(case, options):
            print(line(row), flush=True)
            if "wrong" in row:
                failed = True
            else:
                record.append(options.out, shared | row)
    return 1 if failed else 0


def _rows(case: str, options: argparse.Namespace) -> Iterator[Row]:
    """Yields the rows of a model as they are measured."""
    same = {"suite": "decoding", "op": "serving", "model": case}
    with tempfile.TemporaryDirectory(prefix="fastformer-serving-") as name:
        folder = Path(name)
        if case in servers.TRANSLATORS:
            job = servers.translators(case, folder, options.precision, options.threads)
        else:
            job = servers.language_models(case, folder, options.precision, options.threads, options.llama_server)
        if options.server:
            job.servers = [s for s in job.servers if any(s.name.startswith(name) for name in options.server)]
        try:
            for number, server in enumerate(job.servers):
                server.start(folder / f"{number}.log")
            up = dict.fromkeys(_up(job), 0.0)
            for provider, precision, why in job.missing:
                shape = {"clients": min(options.clients)}
                yield same | {"provider": provider, "precision": precision, "shape": shape, "missing": why}
            for clients in options.clients:
                for row in _measured(job, up, clients, options):
                    yield same | {"shape": {"clients": clients}} | row
        finally:
            for server in job.servers:
                server.stop()


def _up(job: LoadTest) -> Iterator[PeerServer]:
    """Yields the servers that started; the others become missing. fastformer's has to start.

    Raises:
        Missing: fastformer's server did not start.
    """
    for server in job.servers:
        try:
            server.wait()
        except Missing as error:
            if server.name == servers.OURS:
                raise
            job.missing.append((server.name, server.precision, str(error)))
        else:
            yield server


def _measured(job: LoadTest, up: dict[PeerServer, float], clients: int, options: argparse.Namespace) -> Iterator[Row]:
    """Yields a row for each server; one with a wrong answer gets a row that says so, and no further requests.

    up: the milliseconds of a request for each server, with one client; they are written, and combinations that would
        take too long with many clients are skipped.
    """
    loads: dict[PeerServer, list[LoadResult]] = {}
    for server, ms in list(up.items()):
        if ms * clients > _SLOWEST_MS:
            why = (
                f"one request takes {ms:,.0f} ms, so {clients} clients would wait for more than {_SLOWEST_MS / 1e3:g} s"
            )
            yield {"provider": server.name, "precision": server.precision, "missing": why}
        else:
            loads[server] = []
    for _ in range(options.rounds):
        for server in list(loads):
            bodies = [(server.body(request), request.new_tokens) for request in job.requests]
            try:
                loads[server].append(
                    put_under_load(
                        server.port,
                        server.path,
                        bodies,
                        server.count,
                        clients=clients,
                        seconds=options.seconds,
                        warm_up=options.warm_up,
                    )  # fmt: skip
                )
            except (Refused, OSError, EOFError, TimeoutError) as error:
                del loads[server], up[server]
                server.stop()
                yield {"provider": server.name, "precision": server.precision, "wrong": str(error) or repr(error)}
    ours = {s.precision: s for s in loads if s.name == servers.OURS}
    for server, rounds in loads.items():
        row = {"provider": server.name, "precision": server.precision, "rounds": len(rounds), **figures(rounds)}
        our_server = ours.get(server.precision)
        if our_server is not None and our_server is not server:
            pairs = zip(loads[our_server], rounds, strict=True)
            ratios = [_rate(our_load) / _rate(load) for our_load, load in pairs if load.latencies]
            if ratios:
                row["ours"] = statistics.median(ratios)
        if "ms_p50" not in row:
            window = options.warm_up + options.seconds
            row["missing"] = f"no answer within {window:g} s with {clients} clients"
            up[server] = max(up[server], 1e3 * window)
        elif clients == 1:
            up[server] = row["ms_p50"]
        yield row


def figures(loads: Sequence[LoadResult]) -> Row:
    """Computes throughput, as the median of the rounds, and the latencies of the requests of all rounds."""
    latencies = [1e3 * latency for load in loads for latency in load.latencies]
    if not latencies:
        return {}
    percentiles = {f"ms_p{p}": percentile(latencies, p / 100) for p in (20, 50, 80, 99)}
    return {
        **percentiles,
        "requests_s": statistics.median(_rate(load) for load in loads),
        "tokens_s": statistics.median(load.tokens / load.seconds for load in loads),
    }


def _rate(load: LoadResult) -> float:
    return len(load.latencies) / load.seconds


def line(row: Row) -> str:
    """Formats a row for people."""
    clients = f"{row['shape']['clients']:>3} clients" if "shape" in row else ""
    who = f"{row['model']:>11} {clients}  {row['provider']}, {row['precision']}"
    if "missing" in row:
        return f"{who}: {row['missing']}"
    if "wrong" in row:
        return f"{who} is wrong and is not timed: {row['wrong']}"
    text = (
        f"{who:<58} {row['requests_s']:8.1f} requests/s {row['tokens_s']:8.0f} tokens/s   "
        f"p50 {row['ms_p50']:8.1f} ms   p99 {row['ms_p99']:8.1f} ms"
    )
    return text + (f"   ours {row['ours']:.2f}x" if "ours" in row else "")


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = parser_of("serving", __doc__, out=True)
    parser.add_argument("--case", nargs="+", choices=_CASES, default=["base", "llama-small"], help="the models")
    parser.add_argument("--clients", type=positive, nargs="+", default=[1, 4, 16, 64], help="that ask at once")
    parser.add_argument("--precision", nargs="+", choices=("int8", "fp32"), default=["int8", "fp32"], help="of ours")
    parser.add_argument("--server", nargs="+", help="what the names of those that are measured begin with (all)")
    parser.add_argument("--threads", type=positive, default=torch.get_num_threads(), help="that a server computes with")
    parser.add_argument("--rounds", type=positive, default=2, help="turns of each server (2)")
    parser.add_argument("--seconds", type=float, default=3.0, help="of a turn that count (3)")
    parser.add_argument("--warm_up", type=float, default=0.5, help="seconds of a turn before those (0.5)")
    parser.add_argument("--llama_server", default="", metavar="PATH", help="llama.cpp's server, if not on PATH")
    options = parser.parse_args(arguments)
    if not (options.seconds > 0 and options.warm_up >= 0):
        parser.error(
            f"expected --seconds above 0 and --warm_up of at least 0, got {options.seconds}, {options.warm_up}"
        )
    return options


if __name__ == "__main__":
    sys.exit(main())
