"""Clients of an HTTP server that each ask again as soon as they have their answer, in the runner's event loop.

One is some kilobytes of memory and little time: the server is measured, on cores that it shares with its
clients. For a server of your own there is a scenario for locust in `benchmarks/locustfile.py`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

Body = dict[str, Any]
_LONGEST = 120.0  # seconds that an answer may take


class Refused(Exception):
    """A server answered something else than 200."""


@dataclass
class Load:
    """What came of a time under load.

    Attributes:
        seconds: that were counted.
        latencies: in seconds, of the requests that ended in them.
        tokens: new ones, of those requests.
    """

    seconds: float
    latencies: list[float] = field(default_factory=list)
    tokens: int = 0


class Client:
    """One connection that is kept open.

    Args:
        port: on this machine.
        path: that is posted to.
    """

    def __init__(self, port: int, path: str) -> None:
        self._port, self._path = port, path
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, body: Body) -> Any:
        """Posts a body as JSON; what is answered.

        Raises:
            Refused: an answer that is not 200.
        """
        content = json.dumps(body).encode()
        head = (
            f"POST {self._path} HTTP/1.1\r\nHost: 127.0.0.1:{self._port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\n\r\n"
        )
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        writer.write(head.encode() + content)
        answer = await reader.readuntil(b"\r\n\r\n")
        lines = answer.decode("latin-1").split("\r\n")
        headers = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])
        }
        found = await reader.readexactly(int(headers["content-length"]))
        if headers.get("connection", "").lower() == "close":
            self.close()
        if lines[0].split()[1] != "200":
            raise Refused(f"{lines[0]}: {found[:200]!r}")
        return json.loads(found)

    def close(self) -> None:
        """Ends the connection."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


def put_under_load(
    port: int,
    path: str,
    bodies: Iterable[tuple[Body, int]],
    said: Callable[[Any], int],
    *,
    clients: int,
    seconds: float,
    warm_up: float,
) -> Load:
    """Many clients for some time.

    Requests at work are waited for, so that the server has nothing left to do afterwards.

    Args:
        port, path: see `Client`.
        bodies: with the new tokens that each is answered with, again and again from the first.
        said: the new tokens of an answer.
        clients: that ask at once, each again when it has its answer.
        seconds: that count; the requests that end in them do.
        warm_up: seconds before that.

    Raises:
        Refused: an answer that is not 200, or that has fewer or more tokens than it should.
    """
    return asyncio.run(_load(port, path, itertools.cycle(bodies), said, clients, seconds, warm_up))


async def _load(
    port: int,
    path: str,
    bodies: Iterator[tuple[Body, int]],
    said: Callable[[Any], int],
    clients: int,
    seconds: float,
    warm_up: float,
) -> Load:
    found = Load(seconds)
    start = time.perf_counter() + warm_up
    end = start + seconds

    async def work() -> None:
        client = Client(port, path)
        try:
            while (began := time.perf_counter()) < end:
                body, expected = next(bodies)
                count = said(await asyncio.wait_for(client.ask(body), _LONGEST))
                if count != expected:
                    raise Refused(f"expected {expected} new tokens, got {count}")
                if start <= (ended := time.perf_counter()) < end:
                    found.latencies.append(ended - began)
                    found.tokens += count
        finally:
            client.close()

    await asyncio.gather(*(work() for _ in range(clients)))
    return found


def percentile(values: list[float], share: float) -> float:
    """The least value that so large a share of the values does not exceed (the nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(round(share * len(ordered), 6)) - 1)]
