"""Measures the overhead of HTTP beside the library: refusals of a full queue, one request, many clients, a stream.

    python -m benchmarks.serving_costs --out benchmarks/results/serving_costs.jsonl
    python -m benchmarks.serving_costs --part refusals one --case tiny

- refusals: 200 requests at once to a server with room for 8 waiting requests, on open and on new connections: the time
  from a request's last byte to the first byte of its refusal. After each turn nothing runs or waits.
- one: a request over HTTP, to `AsyncTranslator` and to `Translator.translate`, in turns, with one model in one process.
- many: 64 clients that request 10 texts each, beside `Translator.translate` of the same texts at once. Each answer must
  be the library's translation. A text takes 20 ms or more of the whole machine.
- stream: 16 clients, one of which streams, beside 16 that don't.

The clients run in a process of their own. The exit status is 1 if an answer is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import re
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import record
from benchmarks.measure.commands import parser_of
from benchmarks.peers import servers
from benchmarks.peers.bursts import Clients
from benchmarks.peers.load import Client, percentile
from benchmarks.peers.servers import OURS, PeerServer, TextRequest, text_of
from fastformer.generation import Translator

Row = dict[str, Any]
_BURST, _MAX_WAITING = 200, 8
_CLIENTS, _EACH = 64, 10
_STREAMS = 16  # clients, one of which streams
_LIBRARY = "Translator.translate"


class Wrong(Exception):
    """Raised if an answer is wrong."""


def main(arguments: list[str] | None = None) -> int:
    """Prints a line for each figure, and writes the rows."""
    options = _options(arguments)
    shared = record.environment("cpu") | {"threads": options.threads}
    print(f"{shared['device']}, {shared['cores']} cores, commit {shared['commit']}")
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(prefix="fastformer-serving-") as name:
        model, _ = servers.write_translator(options.case, Path(name) / options.case)
        requests = servers.translations(options.case, model.config.vocab_size)
        del model
        for part in options.part:
            try:
                for row in PARTS[part](Path(name) / options.case, requests, options):
                    row = {"suite": "decoding", "op": "serving_costs", "model": options.case, **row}
                    print(line(row), flush=True)
                    record.append(options.out, shared | row)
            except Wrong as error:
                print(f"{part} is wrong: {error}")
                return 1
    return 0


def _refusals(folder: Path, requests: list[TextRequest], options: argparse.Namespace) -> Iterator[Row]:
    flags = ["--max_waiting", str(_MAX_WAITING), "--max_batch_size", "8"]
    with _running(folder, "int8", options, *flags) as server, Clients(server.port, server.path) as clients:
        body = {"text": text_of(requests[0]), "max_new_tokens": 100}
        by_kind: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(-1, options.rounds):
            for anew, seconds in by_kind.items():
                replies = clients.at_once(body, _BURST, anew=anew)
                if strange := {reply.status for reply in replies} - {200, 429}:
                    raise Wrong(f"expected 200 and 429 alone, got {sorted(strange)}")
                refused = [reply.seconds for reply in replies if reply.status == 429]
                if len(replies) - len(refused) < _MAX_WAITING:
                    raise Wrong(f"expected {_MAX_WAITING} answers or more, got {len(replies) - len(refused)}")
                seconds += refused if turn >= 0 else []  # the first turn warms up
                _expect_idle(server)
        for anew, seconds in by_kind.items():
            shape = {"part": "refusals", "requests": _BURST, "max_waiting": _MAX_WAITING, "new_connections": anew}
            yield {"provider": OURS, "precision": "int8", "shape": shape, "rounds": options.rounds, **_times(seconds)}


def _one(folder: Path, requests: list[TextRequest], options: argparse.Namespace) -> Iterator[Row]:
    for precision in options.precision:
        yield from _of_one(folder, requests, precision, 20 * options.rounds)


def _of_one(folder: Path, requests: list[TextRequest], precision: Any, turns: int) -> Iterator[Row]:
    from fastformer.serving import Limits, make_app
    from fastformer.serving.run import Server as Http
    from fastformer.serving.run import bound
    from fastformer.serving.translate_service import TranslateService

    translator = Translator.from_pretrained(folder, precision=precision)
    service = TranslateService(translator, "model", limits=Limits(drain_delay_s=0))
    server = Http(make_app(service))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=(server.serve(bound("127.0.0.1", 0)),), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)

    async def direct(text: str, count: int) -> tuple[float, str]:
        began = time.perf_counter()
        translation = await service.session.translate(text, max_new_tokens=count)
        return time.perf_counter() - began, translation

    def ask(name: str, text: str, count: int) -> tuple[float, str]:
        if name == OURS:
            seconds, answer = clients.one({"text": text, "max_new_tokens": count, "split": False})
            return seconds, answer["text"]
        if name == "AsyncTranslator":
            return asyncio.run_coroutine_threadsafe(direct(text, count), loop).result()
        began = time.perf_counter()
        translation = translator.translate(text, max_new_tokens=count)
        return time.perf_counter() - began, translation

    times: dict[str, list[float]] = {OURS: [], "AsyncTranslator": [], _LIBRARY: []}
    with Clients(server.servers[0].sockets[0].getsockname()[1], "/v1/translate") as clients:
        for turn in range(-5, turns):
            request, order, translations = requests[turn % len(requests)], list(times), set()
            for name in order[turn % 3 :] + order[: turn % 3]:
                seconds, text = ask(name, text_of(request), request.new_tokens)
                translations.add(text)
                times[name] += [seconds] if turn >= 0 else []
            if len(translations) != 1:
                raise Wrong(f"expected one translation of a text, got {len(translations)}")
    server.should_exit = True
    thread.join(10)
    for name, latencies in times.items():
        row = {"provider": name, "precision": precision, "shape": {"part": "one"}, **_times(latencies)}
        if name == OURS:
            added = [1e3 * (http - library) for http, library in zip(latencies, times["AsyncTranslator"], strict=True)]
            row |= {"value": statistics.median(added), "unit": "ms beyond AsyncTranslator, the median"}
        yield row


def _many(folder: Path, requests: list[TextRequest], options: argparse.Namespace) -> Iterator[Row]:
    texts = [text_of(request) for request in itertools.islice(itertools.cycle(requests), _CLIENTS * _EACH)]
    precision = options.many_precision
    translator = Translator.from_pretrained(folder, precision=precision)
    with _running(folder, precision, options) as server:
        rates: dict[str, list[float]] = {OURS: [], _LIBRARY: []}
        tokens, latencies = 0, list[float]()
        for turn in range(options.many_rounds):
            for name in list(rates)[:: -1 if turn % 2 else 1]:
                began = time.perf_counter()
                if name == OURS:
                    http, seconds = asyncio.run(_all(server, texts))
                    latencies += seconds
                else:
                    expected = translator.translate(texts)
                rates[name].append(len(texts) / (time.perf_counter() - began))
            wrong = sum(a != b for a, b in zip(http, expected, strict=True))
            if wrong:
                raise Wrong(f"{wrong} of {len(texts)} texts are not as the library translates them")
            tokens = sum(len(text.split()) for text in expected)
        _expect_idle(server)
    shape = {"part": "many", "clients": _CLIENTS, "texts": len(texts)}
    for name, samples in rates.items():
        rate = statistics.median(samples)
        row = {"provider": name, "precision": precision, "shape": shape, "rounds": len(samples), "requests_s": rate}
        row["tokens_s"] = rate * tokens / len(texts)
        if name == OURS:
            pairs = zip(samples, rates[_LIBRARY], strict=True)
            row |= {"speedup": statistics.median(a / b for a, b in pairs), "baseline": _LIBRARY}
            row |= _times(latencies)
        yield row


async def _all(server: PeerServer, texts: list[str]) -> tuple[list[str], list[float]]:
    """Translates texts, of which each client requests some; returns the translations and the seconds of each."""
    translations, seconds = [""] * len(texts), list[float]()

    async def work(number: int) -> None:
        client = Client(server.port, server.path)
        for index in range(number, len(texts), _CLIENTS):
            began = time.perf_counter()
            translations[index] = (await client.ask({"text": texts[index], "split": False}))["text"]
            seconds.append(time.perf_counter() - began)
        client.close()

    await asyncio.gather(*map(work, range(_CLIENTS)))
    return translations, seconds


def _stream(folder: Path, requests: list[TextRequest], options: argparse.Namespace) -> Iterator[Row]:
    with _running(folder, "int8", options) as server:
        rates: dict[int, list[float]] = {0: [], 1: []}
        for turn in range(-1, options.rounds):
            for streams, samples in rates.items():
                rate = asyncio.run(_mixed(server, requests, streams, options.seconds if turn >= 0 else 0.5))
                samples += [rate] if turn >= 0 else []
    for streams, samples in rates.items():
        shape = {"part": "stream", "clients": _STREAMS, "streams": streams}
        row = {"provider": OURS, "precision": "int8", "shape": shape, "rounds": len(samples)}
        row["tokens_s"] = statistics.median(samples)
        if streams:
            pairs = zip(samples, rates[0], strict=True)
            row |= {"speedup": statistics.median(a / b for a, b in pairs), "baseline": OURS}
        yield row


async def _mixed(server: PeerServer, requests: list[TextRequest], streams: int, seconds: float) -> float:
    """Returns the tokens a second of clients that send requests repeatedly, some of which stream."""
    bodies = itertools.cycle([(server.body(request) | {"split": False}, request.new_tokens) for request in requests])
    end = time.perf_counter() + seconds
    tokens = 0

    async def work(number: int) -> None:
        nonlocal tokens
        client = Client(server.port, server.path)
        while time.perf_counter() < end:
            body, count = next(bodies)
            if number < streams:
                await _streamed(server, body)
            else:
                await client.ask(body)
            tokens += count if time.perf_counter() < end else 0
        client.close()

    await asyncio.gather(*map(work, range(_STREAMS)))
    return tokens / seconds


async def _streamed(server: PeerServer, body: dict[str, Any]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    content = json.dumps(body | {"stream": True}).encode()
    head = f"POST {server.path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    answer = await reader.read(-1)
    writer.close()
    if b'"done":true' not in answer:
        raise Wrong(f"expected a stream to its end, got {answer[-200:]!r}")


@contextlib.contextmanager
def _running(folder: Path, precision: str, options: argparse.Namespace, *flags: str) -> Iterator[PeerServer]:
    """Runs fastformer's server in a process of its own."""
    server = servers.our_translator(folder, precision, options.threads, *flags)
    server.start(folder / "server.log")
    try:
        server.wait()
        yield server
    finally:
        server.stop()


def _expect_idle(server: PeerServer) -> None:
    """Waits until no request runs or waits, and the whole cache is free.

    Raises:
        Wrong: the server doesn't become idle.
    """
    for _ in range(200):
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        gauges = dict(re.findall(r"^fastformer_(\w+) (\S+)$", text, re.MULTILINE))
        is_free = gauges["cache_free_tokens"] == gauges["cache_tokens"]
        if is_free and float(gauges["requests_running"]) == float(gauges["requests_waiting"]) == 0:
            return
        time.sleep(0.02)
    raise Wrong("expected nothing to run and nothing to wait after all answers, got " + json.dumps(gauges))


def _times(seconds: list[float]) -> Row:
    return {f"ms_p{p}": 1e3 * percentile(seconds, p / 100) for p in (20, 50, 80, 99)}


PARTS: dict[str, Callable[[Path, list[TextRequest], argparse.Namespace], Iterator[Row]]] = {
    "refusals": _refusals, "one": _one, "many": _many, "stream": _stream,
}  # fmt: skip


def line(row: Row) -> str:
    """Formats a row for people."""
    shape = " ".join(f"{name}={value}" for name, value in row["shape"].items() if name != "part")
    parts = [f"{row['model']} {row['shape']['part']:<9} {row['provider']}, {row['precision']} {shape}".ljust(86)]
    if "requests_s" in row:
        parts.append(f"{row['requests_s']:8.1f} texts/s")
    if "tokens_s" in row:
        parts.append(f"{row['tokens_s']:8.0f} tokens/s")
    if "ms_p50" in row:
        parts.append(f"p50 {row['ms_p50']:7.2f} ms  p99 {row['ms_p99']:7.2f} ms")
    if "value" in row:
        parts.append(f"{row['value']:.2f} {row['unit']}")
    if "speedup" in row:
        parts.append(f"{row['speedup']:.3f} of {row['baseline']}'s")
    return "  ".join(parts)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = parser_of("serving_costs", __doc__, out=True)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS), help="what is measured (all)")
    parser.add_argument("--case", choices=servers.TRANSLATORS, default="base", help="the model (base)")
    parser.add_argument("--precision", nargs="+", default=["int8", "fp32"], help="of one request (int8 fp32)")
    parser.add_argument("--many_precision", default="fp32", help="of many clients, whose texts take longer in fp32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="to compute with")
    parser.add_argument("--rounds", type=int, default=10, help="turns of refusals, streams, and twenties of one (10)")
    parser.add_argument("--many_rounds", type=int, default=2, help="turns of many clients (2)")
    parser.add_argument("--seconds", type=float, default=2.0, help="of a turn of streams (2)")
    options = parser.parse_args(arguments)
    for name in ("threads", "rounds", "many_rounds", "seconds"):
        if getattr(options, name) <= 0:
            parser.error(f"expected --{name} above 0, got {getattr(options, name)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
