"""Tests how a server begins and ends: signals, running requests, the connections that it takes."""

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
from collections.abc import AsyncIterator, Iterator
from typing import Any
from unittest import mock

import httpx
import pytest

from fastformer.serving import Limits, make_app, open_service
from fastformer.serving.run import Server, bound

GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


class Running(Server):
    """A server in the test's own event loop.

    Attributes:
        at_end: is called in the turn of the event loop in which the server stops listening.
    """

    at_end: Any = None
    place: tuple[str, int]
    url: str

    async def on_tick(self, counter: int) -> bool:
        found = await super().on_tick(counter)
        if found and self.at_end is not None:
            self.at_end()
        return found


@pytest.fixture(autouse=True)
def _frozen_as_before() -> Iterator[None]:
    """Freezes what the end of a server unfreezes: all objects of the process, which each collection would look at."""
    yield
    gc.freeze()


@contextlib.asynccontextmanager
async def run(
    folder: Any, collect: Any = lambda: 0, **limits: Any
) -> AsyncIterator[tuple[Running, asyncio.Task[None], httpx.AsyncClient]]:
    service = open_service(folder, limits=Limits(**limits))
    server, [place] = Running(make_app(service)), bound("127.0.0.1", 0)
    server.place = place.getsockname()[:2]
    with mock.patch.object(gc, "collect", collect):
        ended = asyncio.create_task(server.serve([place]))
        while not server.started:
            assert not ended.done()
            await asyncio.sleep(0.005)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.place[1]}", timeout=20) as client:
        try:
            yield server, ended, client
        finally:
            server.should_exit = True
            await asyncio.wait_for(ended, 20)


def connected(server: Running) -> socket.socket:
    """Makes a connection, which the system takes for the server."""
    found = socket.create_connection(server.place, timeout=20)
    found.sendall(GET)
    return found


async def test_an_ended_server_leaves_no_object_frozen(translator_folder) -> None:
    """Python doesn't free frozen objects at its end, of which libraries such as Triton's complain on the terminal."""
    async with run(translator_folder, gc.collect):
        assert gc.get_freeze_count()
    assert not gc.get_freeze_count()


async def test_the_log_says_where_it_listens_and_answers_do_not_say_on_what(translator_folder, caplog) -> None:
    caplog.set_level(logging.INFO, "fastformer")
    async with run(translator_folder) as (server, _, client):
        assert f"tiny-translator, a translator, on http://127.0.0.1:{server.place[1]}" in caplog.text
        assert "server" not in (await client.get("/health")).headers


async def ask_while_held(server, client) -> tuple[threading.Event, asyncio.Task, asyncio.Task]:
    """Holds the model's thread until the event is set, and sends a request that waits for it."""
    gate, front = threading.Event(), server.config.app.state.service.session
    held = asyncio.create_task(front.call(lambda: gate.wait(10)))
    asked = asyncio.create_task(client.post("/v1/translate", json={"text": "a"}))
    while not front.num_queued:
        await asyncio.sleep(0.005)
    return gate, held, asked


async def test_requests_that_run_longer_than_the_drain_are_cancelled(translator_folder) -> None:
    async with run(translator_folder, drain_s=0, drain_delay_s=0) as (server, ended, client):
        gate, held, asked = await ask_while_held(server, client)
        server.handle_exit(signal.SIGTERM, None)
        await asyncio.sleep(0.05)
        gate.set()
        assert (await asked).status_code == 503 and await held
        await ended


async def test_requests_that_end_within_the_drain_are_answered(translator_folder) -> None:
    async with run(translator_folder, drain_s=60, drain_delay_s=0) as (server, ended, client):
        gate, held, asked = await ask_while_held(server, client)
        server.handle_exit(signal.SIGTERM, None)
        while (answer := await client.post("/v1/translate", json={"text": "b"})).status_code != 503:
            pass
        assert not asked.done() and answer.headers["connection"] == "close"
        gate.set()
        assert (await asked).status_code == 200 and await held
        await ended


async def test_new_requests_are_taken_until_load_balancers_know(translator_folder) -> None:
    async with run(translator_folder, drain_delay_s=60) as (server, ended, client):
        server.handle_exit(signal.SIGHUP, None)
        await asyncio.sleep(0.05)
        server.handle_exit(signal.SIGHUP, None)  # a terminal that closes may send two
        assert (await client.get("/ready")).status_code == 503
        assert (await client.post("/v1/translate", json={"text": "a"})).status_code == 200
        assert not ended.done()
        server.handle_exit(signal.SIGTERM, None)  # a second one, which ends it at once
        await asyncio.wait_for(ended, 20)


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="the system has no SIGHUP")
@pytest.mark.parametrize("earlier", [signal.SIG_DFL, signal.SIG_IGN])
def test_a_hangup_drains_unless_it_is_ignored(earlier, translator_folder) -> None:
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals need the main thread")
    server, before = Server(make_app(open_service(translator_folder))), signal.signal(signal.SIGHUP, earlier)
    try:
        with server.capture_signals():
            heard = signal.getsignal(signal.SIGHUP)
            assert heard == (server.handle_exit if earlier == signal.SIG_DFL else earlier)
            assert signal.getsignal(signal.SIGTERM) == server.handle_exit
        assert signal.getsignal(signal.SIGHUP) == earlier
    finally:
        signal.signal(signal.SIGHUP, before)


async def test_connections_that_wait_when_the_server_stops_listening_are_answered(translator_folder) -> None:
    async with run(translator_folder) as (server, ended, _):
        clients: list[socket.socket] = []
        server.at_end = lambda: clients.extend(connected(server) for _ in range(8))
        server.should_exit = True
        await ended
        assert len(clients) == 8
        for client in clients:
            with client:
                assert client.recv(1000).startswith(b"HTTP/1.1 200")
        with pytest.raises(ConnectionError):
            connected(server)


async def test_a_server_that_is_given_no_sockets_listens_where_uvicorn_does(translator_folder) -> None:
    server = Server(make_app(open_service(translator_folder)))
    server.config.port = 0
    ended = asyncio.ensure_future(server.serve())
    while not server.started and not ended.done():
        await asyncio.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    async with httpx.AsyncClient() as client:
        assert (await client.get(f"http://127.0.0.1:{port}/health")).status_code == 200
    server.should_exit = True
    await ended


# Files that the process may open beyond those that are open; connections that are wanted; those taken, in all and in a
# turn of the event loop.
AFFORDED = [(80, 1000, 60, 2), (80, 50, 50, 2), (80, 60, 60, 2), (5, 1000, 12, 1), (4096, 9000, 3072, 64),
            (None, 7, 7, 7), (None, 100, 100, 64)]  # fmt: skip


@pytest.mark.parametrize(("files", "wanted", "most", "turn"), AFFORDED)
def test_a_server_takes_what_its_descriptors_allow(files, wanted, most, turn, translator_folder, monkeypatch, caplog):
    resource = pytest.importorskip("resource", reason="the system has no limit of descriptors")
    app = make_app(open_service(translator_folder, limits=Limits(max_connections=wanted)))
    allowed = -1 if files is None else 3 + files
    monkeypatch.setattr(os, "listdir", lambda place: ["0", "1", "2"])
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (allowed, 1 << 20))
    with caplog.at_level(logging.INFO):
        config = Server(app).config
    config.load()
    protocol: Any = config.http_protocol_class
    assert (protocol.most, config.backlog) == (most, turn)
    assert [f"at most {most} conn" in one.getMessage() for one in caplog.records] == [True] * (most < wanted)


async def test_connections_leave_descriptors_free(translator_folder, monkeypatch) -> None:
    resource = pytest.importorskip("resource", reason="the system has no limit of descriptors")
    files = len(os.listdir("/dev/fd")) + 40
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (files, files))
    async with run(translator_folder) as (server, _, client):
        with contextlib.ExitStack() as held:
            held.callback(gc.collect)
            for _ in range(files):
                held.enter_context(connected(server))
            while len(server.server_state.connections) < 20:
                await asyncio.sleep(0.005)
            answer = await client.get("/health")
            assert answer.status_code == 503 and len(server.server_state.connections) < 36
        while (await client.get("/health")).status_code != 200:
            pass


async def test_a_system_without_descriptors_fills_no_log(translator_folder, caplog) -> None:
    async with run(translator_folder):
        for number in range(1000):
            error = OSError(errno.EMFILE, "Too many open files")
            context = {"message": "socket.accept() out of system resource", "exception": error, "socket": number}
            asyncio.get_running_loop().call_exception_handler(context)
        [warning] = [record.getMessage() for record in caplog.records if record.levelno > logging.INFO]
        assert "files" in warning and "Traceback" not in caplog.text
        asyncio.get_running_loop().call_exception_handler({"message": "another", "exception": KeyError("one")})
        assert "KeyError" in caplog.text


def test_an_address_that_the_machine_lacks_is_left_out_unless_it_is_the_only_one(monkeypatch) -> None:
    here, there = (
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in ("127.0.0.1", "203.0.113.1")
    )
    for missing in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):

        class Refusing(socket.socket):
            def bind(self, address, missing=missing) -> None:
                if address[0] == "203.0.113.1":
                    raise OSError(missing, "no")
                super().bind(address)

        with monkeypatch.context() as patch:
            patch.setattr(socket, "socket", Refusing)
            patch.setattr(socket, "getaddrinfo", lambda *_, **__: [there, here])
            (listener,) = bound("both", 0)
            assert listener.getsockname()[0] == "127.0.0.1"
            listener.close()
            patch.setattr(socket, "getaddrinfo", lambda *_, **__: [there])
            with pytest.raises(ValueError, match="host and a port"):
                bound("there", 0)
