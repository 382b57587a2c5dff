"""A server that ends in steps: it reports that it will end, refuses new requests, then waits for running ones."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import socket
import time
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from fastformer.serving.gate import Traffic
from fastformer.serving.limits import Limits
from fastformer.serving.protocol import protocol_of
from fastformer.serving.service import Service

logger = logging.getLogger("fastformer")

_LOOK_SECONDS = 0.02
# An idle connection lives longer than the 60 s for which nginx and load balancers keep theirs. If the server closed it
# first, a request that a proxy sends at that moment would be lost.
_IDLE_SECONDS = 75
_CLOSE_SECONDS = 5  # for connections whose requests have been answered or cancelled


def bound(host: str, port: int) -> list[socket.socket]:
    """Binds a socket to each address of a host. A connection is refused until a server listens on them.

    Raises:
        ValueError: the host is unknown or not this machine's, or the port is taken or not allowed.
    """
    found: list[socket.socket] = []
    try:
        places = socket.getaddrinfo(host.strip("[]") or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, address in dict.fromkeys((place[0], place[4]) for place in places):
            try:
                found.append(_bound(family, address))
            except OSError as error:
                # A machine may have a name for IPv6's localhost, and no IPv6.
                if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL) or len(places) == 1:
                    raise
        if not found:
            raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
    except OSError as error:
        for one in found:
            one.close()
        reason = (error.strerror or str(error)).lower()
        raise ValueError(f"expected a host and a port to listen on, got {host} and {port}: {reason}") from error
    return found


def _bound(family: socket.AddressFamily, address: Any) -> socket.socket:
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":  # a port is free again as soon as its last server has ended
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:  # IPv4's addresses have sockets of their own
            found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        found.bind(address)
    except OSError:
        found.close()
        raise
    return found


class Server(uvicorn.Server):
    """Serves an application of `make_app` until a signal comes; `run` takes the sockets of `bound`.

    At SIGTERM or SIGINT /ready answers 503 at once, so that a load balancer chooses other servers. After
    `limits.drain_delay_s` new requests are answered 503. When the running requests have ended, or after
    `limits.drain_s`, the process ends with exit code 0. A second signal ends it at once.
    """

    def __init__(self, app: FastAPI) -> None:
        self.limits: Limits = app.state.limits
        self._service: Service = app.state.service
        self._traffic: Traffic = app.state.traffic
        self._ending: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        # Clients can't fill the log with lines about bytes that are not HTTP or not a form.
        logging.getLogger("python_multipart").setLevel(logging.ERROR)
        # asyncio's own event loop: if many clients connect at once, the last ones wait half as long again with uvloop.
        super().__init__(
            uvicorn.Config(
                app, loop="asyncio", http=protocol_of(self.limits), ws="none", access_log=False, log_level="error",
                server_header=False, timeout_keep_alive=_IDLE_SECONDS, timeout_graceful_shutdown=_CLOSE_SECONDS,
            )
        )  # fmt: skip

    async def startup(self, sockets: Any = None) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            await super().startup(sockets)
        except OSError as error:
            await self.lifespan.shutdown()
            raise ValueError(
                f"expected a port that stays free while the model is loaded: {(error.strerror or str(error)).lower()}"
            ) from error
        # The objects of imports and of the model live on: a garbage collection that traversed all of them would
        # delay requests.
        gc.collect()
        gc.freeze()
        if self.started:
            where = ", ".join(_url(one.getsockname()) for server in self.servers for one in server.sockets)
            kind = self._service.kind
            logger.info("serving %s, %s %s, on %s", self._service.name, "an" if kind == "encoder" else "a", kind, where)

    async def shutdown(self, sockets: Any = None) -> None:
        await super().shutdown(sockets)
        gc.unfreeze()  # Python frees no frozen object when the process ends, and Triton 3.9 would report each of them

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begins to end the server; a second signal ends it at once."""
        if not self._traffic.is_ready or self._loop is None:
            self.should_exit = self.force_exit = True
            return
        self._traffic.is_ready = False
        self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        self._ending = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        limits, traffic = self.limits, self._traffic
        logger.info("ending: %d requests are under way", traffic.in_flight)
        await asyncio.sleep(limits.drain_delay_s)
        traffic.is_refusing = True
        end = time.monotonic() + limits.drain_s
        while traffic.in_flight and time.monotonic() < end:
            await asyncio.sleep(_LOOK_SECONDS)
        if traffic.in_flight:
            logger.warning("ending: cancelling %d requests, whose %g s are over", traffic.in_flight, limits.drain_s)
            await self._service.close(cancel=True)
            end = time.monotonic() + 1  # to answer the cancelled requests
            while traffic.in_flight and time.monotonic() < end:
                await asyncio.sleep(_LOOK_SECONDS)
        self.should_exit = True


def _url(address: Any) -> str:
    host, port = address[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
