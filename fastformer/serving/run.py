"""A server that ends in steps: it reports that it will end, refuses new requests, then waits for running ones."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from fastformer.serving.gate import Traffic
from fastformer.serving.limits import Limits
from fastformer.serving.protocol import Seldom, protocol_of
from fastformer.serving.service import Service

logger = logging.getLogger("fastformer")

_LOOK_SECONDS = 0.02
# An idle connection lives longer than the 60 s for which nginx and load balancers keep theirs. If the server closed it
# first, a request that a proxy sends at that moment would be lost.
_IDLE_SECONDS = 75
_CLOSE_SECONDS = 5  # for connections whose requests have been answered or cancelled
_NEW_SECONDS = 0.5  # at the end, for the request of a connection that has just been made
_BACKLOG = 2048  # connections that the system holds until they are accepted
_MOST_ACCEPTED = 64  # connections that are accepted in one turn of the event loop


def bound(host: str, port: int) -> list[socket.socket]:
    """Binds a socket to each address of a host. A connection is refused until a server listens on them.

    Raises:
        ValueError: the host is unknown or not this machine's, or the port is taken or not allowed.
    """
    listeners: list[socket.socket] = []
    try:
        places = socket.getaddrinfo(host.strip("[]") or None, port, flags=socket.AI_PASSIVE)
        for family, address in dict.fromkeys((place[0], place[4]) for place in places):
            try:
                listeners.append(_bound(family, address))
            except OSError as error:
                # A machine may have a name for IPv6's localhost, and no IPv6.
                if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                    raise
        if not listeners:
            raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
    except OSError as error:
        for one in listeners:
            one.close()
        reason = (error.strerror or str(error)).lower()
        raise ValueError(f"expected a host and a port to listen on, got {host} and {port}: {reason}") from error
    return listeners


def _bound(family: socket.AddressFamily, address: Any) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":  # a port is free again as soon as its last server has ended
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:  # IPv4's addresses have sockets of their own
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener


def _affordable(limits: Limits) -> tuple[int, int]:
    """Returns the most connections at a time, and the most that are accepted in one turn of the event loop.

    Both leave descriptors for files, and for connections that are being refused, which takes four turns.
    """
    try:
        import resource
    except ImportError:  # not on Windows
        return limits.max_connections, _MOST_ACCEPTED
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        taken = len(os.listdir("/dev/fd"))
    except OSError:
        taken = 64
    free = max(16, most - taken) if most >= 0 else 32 * limits.max_connections
    if (connections := free * 3 // 4) < limits.max_connections:
        logger.info("taking at most %d connections: the process may open %d files (ulimit -n)", connections, most)
    return min(limits.max_connections, connections), max(1, min(_MOST_ACCEPTED, free // 32))


class Server(uvicorn.Server):
    """Serves an application of `make_app` until a signal comes; `run` takes the sockets of `bound`.

    At SIGTERM, SIGINT or SIGHUP /ready answers 503 at once, so that a load balancer chooses other servers. After
    `limits.drain_delay_s` new requests are answered 503. When the running requests have ended, or after
    `limits.drain_s`, the process ends with exit code 0. A second signal ends it at once, except for SIGHUP, of which a
    terminal that is closed may send two.
    """

    def __init__(self, app: FastAPI) -> None:
        self.limits: Limits = app.state.limits
        self._service: Service = app.state.service
        self._traffic: Traffic = app.state.traffic
        self._ending: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._log = Seldom()
        connections, accepted = _affordable(self.limits)
        # Clients can't fill the log with lines about bytes that are not HTTP or not a form.
        logging.getLogger("python_multipart").setLevel(logging.ERROR)
        # asyncio's own event loop: if many clients connect at once, the last ones wait half as long again with uvloop.
        super().__init__(
            uvicorn.Config(
                app, loop="asyncio", http=protocol_of(self.limits, connections), backlog=accepted, ws="none",
                access_log=False, log_level="error", server_header=False, timeout_keep_alive=_IDLE_SECONDS,
                timeout_graceful_shutdown=_CLOSE_SECONDS,
            )
        )  # fmt: skip

    async def startup(self, sockets: Any = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._on_loop_error)
        try:
            await super().startup(sockets)
        except OSError as error:
            await self.lifespan.shutdown()
            raise ValueError(
                f"expected a port that stays free while the model is loaded: {(error.strerror or str(error)).lower()}"
            ) from error
        for one in sockets or ():
            one.listen(_BACKLOG)  # asyncio accepts as many in a turn as it lets wait
        # The objects of imports and of the model live on: a garbage collection that traversed all of them would
        # delay requests.
        gc.collect()
        gc.freeze()
        if self.started:
            where = ", ".join(_url(one.getsockname()) for server in self.servers for one in server.sockets)
            kind = self._service.kind
            what = "a model of speech" if kind == "speech" else f"{'an' if kind == 'encoder' else 'a'} {kind}"
            logger.info("serving %s, %s, on %s", self._service.name, what, where)

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
            self._log.warn("accepting no connections for a second: %s", error.strerror)
        else:
            loop.default_exception_handler(context)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Has `handle_exit` called at SIGHUP too, unless it is ignored, as nohup has it."""
        hangup: Any = getattr(signal, "SIGHUP", None)
        is_heard = hangup is not None and threading.current_thread() is threading.main_thread()
        with super().capture_signals():
            if not is_heard or (earlier := signal.getsignal(hangup)) is signal.SIG_IGN:
                yield
                return
            signal.signal(hangup, self.handle_exit)
            try:
                yield
            finally:
                signal.signal(hangup, earlier)

    async def shutdown(self, sockets: Any = None) -> None:
        if not self.force_exit:
            await self._take_last(sockets or ())
        await super().shutdown(sockets)
        gc.unfreeze()  # Python frees no frozen object when the process ends, and Triton 3.9 would report each of them

    async def _take_last(self, sockets: Sequence[socket.socket]) -> None:
        """Stops listening, and waits a moment for the requests of the connections that have just been made."""
        waiting: list[socket.socket] = []
        for one in sockets:
            with contextlib.suppress(OSError):  # none is left
                while True:
                    waiting.append(one.accept()[0])
        for server in self.servers:  # in the same turn: a connection that comes later is refused, and none is cut off
            server.close()
        for connection in waiting:
            connection.setblocking(False)
            await asyncio.get_running_loop().connect_accepted_socket(self._new_protocol, connection)
        end = time.monotonic() + _NEW_SECONDS
        while time.monotonic() < end and any(getattr(one, "is_new", False) for one in self.server_state.connections):
            await asyncio.sleep(_LOOK_SECONDS)

    def _new_protocol(self) -> asyncio.Protocol:
        kind: Any = self.config.http_protocol_class
        protocol: asyncio.Protocol = kind(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return protocol

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begins to end the server; a second signal ends it at once."""
        if not self._traffic.is_ready or self._loop is None:
            if sig != getattr(signal, "SIGHUP", None):
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
            await self._service.session.close(cancel=True)
            end = time.monotonic() + 1  # to answer the cancelled requests
            while traffic.in_flight and time.monotonic() < end:
                await asyncio.sleep(_LOOK_SECONDS)
        self.should_exit = True


def _url(address: Any) -> str:
    host, port = address[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
