"""Clients of an HTTP server, in the runner's event loop; each sends its next request as soon as it has an answer.

A client needs some kilobytes of memory and little time, so that the server is measured, on cores that it shares with
its clients. For a server of your own, `benchmarks/locustfile.py` has a scenario for locust.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

Body = dict[str, Any]
_LONGEST = 120.0  # the longest wait for an answer, in seconds


class Refused(Exception):
    """Raised if a server answers with another status than 200."""


@dataclass
class LoadResult:
    """The result of a time under load.

    Attributes:
        seconds: the counted time.
        latencies: the latencies, in seconds, of the requests that ended in that time.
        tokens: the number of these requests' new tokens.
    """

    seconds: float
    latencies: list[float] = field(default_factory=list)
    tokens: int = 0


class Client:
    """One connection that stays open.

    Args:
        port: a port on this machine.
        path: the path to post to.
    """

    def __init__(self, port: int, path: str) -> None:
        self._port, self._path = port, path
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, body: Body) -> Any:
        """Posts a body as JSON, and returns the answer.

        Raises:
            Refused: the status of the answer is not 200.
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
        reply = await reader.readexactly(int(headers["content-length"]))
        if headers.get("connection", "").lower() == "close":
            self.close()
        if lines[0].split()[1] != "200":
            raise Refused(f"{lines[0]}: {reply[:200]!r}")
        return json.loads(reply)

    def close(self) -> None:
        """Closes the connection."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


def put_under_load(
    port: int,
    path: str,
    bodies: Iterable[tuple[Body, int]],
    count_tokens: Callable[[Any], int],
    *,
    clients: int,
    seconds: float,
    warm_up: float,
) -> LoadResult:
    """Runs many clients for some time.

    Requests that are running at the end are waited for, so that the server has nothing left to do afterwards.

    Args:
        port, path: see `Client`.
        bodies: bodies with the number of new tokens in the answer; they are repeated from the first.
        count_tokens: answer -> its number of new tokens.
        clients: the number of concurrent clients.
        seconds: the counted time: requests that end in it count.
        warm_up: the seconds before that.

    Raises:
        Refused: an answer isn't 200, or has a wrong number of tokens.
    """
    load, repeated = LoadResult(seconds), itertools.cycle(bodies)
    start = time.perf_counter() + warm_up
    end = start + seconds

    async def work() -> None:
        client = Client(port, path)
        try:
            while (began := time.perf_counter()) < end:
                body, expected = next(repeated)
                count = count_tokens(await asyncio.wait_for(client.ask(body), _LONGEST))
                if count != expected:
                    raise Refused(f"expected {expected} new tokens, got {count}")
                if start <= (ended := time.perf_counter()) < end:
                    load.latencies.append(ended - began)
                    load.tokens += count
        finally:
            client.close()

    async def all_of_them() -> None:
        await asyncio.gather(*(work() for _ in range(clients)))

    asyncio.run(all_of_them())
    return load


def percentile(values: list[float], share: float) -> float:
    """Returns the least value that at least this share of the values does not exceed (the nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(round(share * len(ordered), 6)) - 1)]
