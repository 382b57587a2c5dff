"""Tests connections: endless headers, clients that never read, and pipelined requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from fastformer.serving.limits import Limits
from tests.serving.servers import Clock, listening, until

pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")

LARGE = 64 << 20  # bytes that no socket's buffers hold


class App:
    """Answers /PATH with the path, /large and /less with much data, and /wait when the client has left or `go` is set;
    /begun begins an answer, and then waits in the same way. It answers /early before it has read the body, /unread
    with as much as the system takes and a little more, and /whole with much data at once.

    Attributes:
        paths: the paths of requests that were begun.
        gone: those whose client has left before the answer.
        ended: those that have ended.
    """

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.gone: list[str] = []
        self.ended: list[str] = []
        self.go = False
        self.unsent: Callable[[], int] = lambda: 0  # bytes that the only connection has not sent

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"]
        self.paths.append(path)
        try:
            while path != "/early" and (await receive()).get("more_body"):
                pass
            if path == "/begun":
                await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"999")]})
                await send({"type": "http.response.body", "body": b"x", "more_body": True})
            if path.startswith(("/wait", "/begun")):
                await self._wait(path, receive)
            if path == "/begun":
                return
            if path == "/unread":
                await send({"type": "http.response.start", "status": 200, "headers": []})
                await asyncio.sleep(0)  # after which the bytes are the system's, as far as it takes them
                while not self.unsent():
                    await send({"type": "http.response.body", "body": b"x" * 10_000, "more_body": True})
                    await asyncio.sleep(0)
                await send({"type": "http.response.body", "body": b""})
                return
            size = {"/large": LARGE, "/less": LARGE // 4, "/whole": 500_000}.get(path)
            body = b"x" * size if size else path.encode()
            headers = [(b"content-length", str(len(body)).encode())]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": body, "more_body": path != "/whole"})
            if path != "/whole":
                await send({"type": "http.response.body", "body": b""})  # waits until the first part is nearly sent
        finally:
            self.ended.append(path)

    async def _wait(self, path: str, receive: Any) -> None:
        gone = asyncio.ensure_future(receive())
        while not self.go and not gone.done():
            await asyncio.sleep(0.005)
        if gone.done() and gone.result()["type"] == "http.disconnect":
            self.gone.append(path)
        gone.cancel()


class Served(NamedTuple):
    app: App
    place: tuple[str, int]
    server: Any
    clock: Clock

    def connected(self, **options: Any) -> socket.socket:
        client = socket.socket()
        client.settimeout(60)
        for name, value in options.items():
            client.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
        client.connect(self.place)
        return client

    def connections(self) -> int:
        return len(self.server.server_state.connections)


@contextlib.contextmanager
def serving(limits: Limits, idle_s: float = 1000) -> Iterator[Served]:
    app, clock = App(), Clock()
    with listening(app, limits, clock, lifespan="off", timeout_keep_alive=idle_s) as (server, place):
        app.unsent = lambda: sum(one.transport.get_write_buffer_size() for one in server.server_state.connections)
        yield Served(app, place, server, clock)
        app.go = True


@pytest.fixture
def served() -> Iterator[Served]:
    """Starts a server that waits 100 s for a head and for a client that doesn't read, and 1000 s for a request."""
    with serving(Limits(body_s=100, write_s=100)) as one:
        yield one


def get(path: str, *fields: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: x", *fields, "", ""]).encode()


def everything(client: socket.socket) -> bytes:
    """Returns all data until the server closes the connection."""
    parts = []
    with contextlib.suppress(ConnectionError):
        while part := client.recv(65536):
            parts.append(part)
    return b"".join(parts)


def test_a_client_that_never_reads_is_disconnected(served) -> None:
    for path in ("/large", "/small"):
        with served.connected(SO_RCVBUF=4096) as client:
            client.sendall(get(path, *(["Connection: close"] if path == "/small" else [])))
            until(lambda: path in served.app.paths)  # noqa: B023
            if path == "/large":
                served.clock.skip(80)
                assert served.connections() == 1
                for seconds in (30, 110, 110):  # the system may take more of the data at first
                    served.clock.skip(seconds)
            until(lambda: path in served.app.ended and not served.connections())  # noqa: B023


@pytest.mark.parametrize("end", ["asked", "idle", "shutdown"])
def test_a_closed_connection_does_not_wait_for_a_client_that_never_reads(served, end) -> None:
    with served.connected(SO_RCVBUF=4096) as client:
        client.sendall(get("/unread", *(["Connection: close"] if end == "asked" else [])))
        until(lambda: "/unread" in served.app.ended)
        if end == "idle":
            served.clock.skip(1010)
        elif end == "shutdown":
            served.server.should_exit = True
        until(lambda: all(one.transport.is_closing() for one in [*served.server.server_state.connections]))
        served.clock.skip(80)
        assert served.connections() == 1
        served.clock.skip(30)
        until(lambda: not served.connections(), 5)


def test_a_client_that_reads_all_but_the_end_of_an_answer_is_disconnected(served) -> None:
    with served.connected(SO_RCVBUF=4096) as client:
        until(served.connections)
        (connection,) = served.server.server_state.connections
        connection.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        # What is left is more than the system may take at once.
        connection.transport.set_write_buffer_limits(high=200_000, low=150_000)
        client.sendall(get("/whole", "Connection: close"))
        until(served.app.unsent)
        while connection.flow.write_paused:
            client.recv(1000)
        assert connection.transport.is_closing() and served.app.unsent()
        served.clock.skip(80)
        assert served.connections() == 1
        for _ in range(2):  # the system may have taken more of the data at first
            served.clock.skip(110)
        until(lambda: not served.connections(), 5)


def test_a_slow_client_gets_the_whole_response(served) -> None:
    with served.connected(SO_RCVBUF=65536) as client:
        client.sendall(get("/large", "Connection: close"))
        count = steps = 0
        while part := client.recv(1 << 20):
            count += len(part)
            if count > (steps + 1) * (8 << 20):
                steps += 1
                served.clock.skip(80)  # three of them are longer than a client that doesn't read at all may take
        assert count > LARGE and steps > 6


def test_a_client_that_has_read_one_answer_has_all_the_time_for_the_next(served) -> None:
    with served.connected() as client:
        client.sendall(get("/less"))
        left = LARGE // 4
        while left > 0:
            left -= len(client.recv(1 << 20))
        served.clock.skip(80)
        client.sendall(get("/large"))
        until(lambda: "/large" in served.app.paths)
        served.clock.skip(30)
        assert served.connections() == 1


@pytest.mark.parametrize("head", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: x\r\nA: "])
def test_a_head_comes_in_time(served, head) -> None:
    with served.connected() as client:
        client.sendall(head)
        until(served.connections)
        served.clock.skip(80)
        assert served.connections() == 1
        served.clock.skip(30)
        until(lambda: not served.connections(), 5)
        assert everything(client) == b""


def test_the_pieces_of_a_head_come_in_time_together(served) -> None:
    with served.connected():
        until(served.connections)
        [connection] = served.server.server_state.connections
        for piece in (b"GET / HT", b"TP/1.1\r\nHost: x\r\n", b"A: ", b"b"):
            connection.loop.call_soon_threadsafe(connection.data_received, piece)
            assert served.connections() == 1
            served.clock.skip(30)
        until(lambda: not served.connections(), 5)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (get("/a"), b"\r\n"),  # a line that old clients send too many
        (get("/a"), b"GET / HTTP/1.1\r\nHost:"),
        (b"POST /early HTTP/1.1\r\nContent-Length: 2\r\n\r\n", b"xyGET / HTTP/1.1\r\nHost:"),
    ],
    ids=["a line", "a head", "behind a body"],
)
def test_a_later_head_comes_in_time_too(served, first, then) -> None:
    with served.connected() as client:
        client.sendall(first)
        assert client.recv(65536).startswith(b"HTTP/1.1 200")
        client.sendall(then)
        [connection] = served.server.server_state.connections
        until(lambda: connection.timeout_keep_alive_task is None)  # the server has read it
        served.clock.skip(80)
        assert served.connections() == 1
        served.clock.skip(30)
        until(lambda: not served.connections(), 5)


@pytest.mark.parametrize("short", ["body_s", "write_s", "idle_s"])
def test_a_limit_of_time_ends_the_connections_that_it_is_for(short) -> None:
    seconds = {"body_s": 1000.0, "write_s": 1000.0, "idle_s": 1000.0, short: 100.0}
    of_client = {
        "body_s": b"GET / HTTP/1.1\r\nHost:",  # a head without its end
        "write_s": get("/large"),  # whose answer isn't read
        "idle_s": get("/small"),
    }
    limits, names = Limits(body_s=seconds["body_s"], write_s=seconds["write_s"]), {}
    with serving(limits, seconds["idle_s"]) as served, contextlib.ExitStack() as held:
        for name, data in of_client.items():
            client = held.enter_context(served.connected(SO_RCVBUF=4096))
            names[client.getsockname()] = name
            client.sendall(data)

        def connected() -> set[str]:
            return {names[each.client] for each in [*served.server.server_state.connections]}

        until(lambda: {"/large", "/small"} <= {*served.app.paths} and "/small" in served.app.ended)
        served.clock.skip(80)
        assert connected() == of_client.keys()
        for _ in range(3):
            served.clock.skip(110)
        until(lambda: connected() == of_client.keys() - {short})


def test_a_head_behind_another_request_comes_in_time_too(served) -> None:
    with served.connected() as client:
        client.sendall(get("/a") + b"GET /b HTTP/1.1\r\nHost:")
        until(lambda: "/a" in served.app.ended)
        served.clock.skip(80)
        assert served.connections() == 1
        served.clock.skip(30)
        until(lambda: not served.connections(), 5)
        assert everything(client).endswith(b"/a")
    with served.connected() as client:  # its time is over before the answer is
        client.sendall(get("/wait") + b"GET /c HTTP/1.1\r\nHost:")
        until(lambda: "/wait" in served.app.paths)
        served.clock.skip(150)
        assert served.connections() == 1
        served.app.go = True
        until(lambda: "/wait" in served.app.ended)
        served.clock.skip(110)
        until(lambda: not served.connections(), 5)
        assert everything(client).endswith(b"/wait")
    assert not {"/b", "/c"} & {*served.app.paths}


def test_an_answer_may_take_longer_than_a_head(served) -> None:
    with served.connected() as client:
        client.sendall(get("/wait") + b"\r\n")  # old clients send a line too many
        until(lambda: "/wait" in served.app.paths)
        served.clock.skip(150)
        served.app.go = True
        assert client.recv(65536).endswith(b"/wait")
        client.sendall(get("/again", "Connection: close"))
        assert everything(client).endswith(b"/again")


@pytest.mark.parametrize("protocol", ["websocket", "h2c"])
def test_another_protocol_is_not_spoken(served, protocol) -> None:
    with served.connected() as client:
        client.sendall(get("/a", "Connection: Upgrade", f"Upgrade: {protocol}") + b"\x81\x05hello" * 100)
        assert everything(client).endswith(b"/a")
    with served.connected() as client:
        body = "Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 2\r\n\r\nxy"
        client.sendall(f"POST /b HTTP/1.1\r\nHost: x\r\n{body}".encode())
        assert everything(client).endswith(b"/b")


@pytest.mark.parametrize(
    "line",
    [
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n", b"GET /a HTTP/1.1\r\n" + b"A: b\r\n" * 50_000,
        b"GET /a HTTP/1.1\r\n" + b"A" * 100_000 + b": b\r\n",
        b"GET /a HTTP/1.1\r\n" + b"A" * 40_000 + b": " + b"b" * 40_000 + b"\r\n",
    ],
)  # fmt: skip
def test_a_head_stays_within_its_size_in_one_piece_too(served, line) -> None:
    with served.connected() as client:
        until(served.connections)
        [connection] = served.server.server_state.connections
        connection.loop.call_soon_threadsafe(connection.data_received, line + b"\r\n")
        assert everything(client).startswith(b"HTTP/1.1 400") and not served.app.paths


@pytest.mark.parametrize("more", [0, 1])
def test_a_head_of_64_kib_is_read(served, more) -> None:
    """The names and values of its fields count, and its URL."""
    value = b"b" * ((64 << 10) - len(b"/a" + b"Host" + b"x" + b"A") + more)
    with served.connected() as client:
        until(served.connections)
        [connection] = served.server.server_state.connections
        head = b"GET /a HTTP/1.1\r\nHost: x\r\nA: " + value + b"\r\n\r\n"
        connection.loop.call_soon_threadsafe(connection.data_received, head)
        until(lambda: "/a" in served.app.paths) if not more else everything(client)
        assert ("/a" in served.app.paths) == (not more)


def test_each_head_of_60_kib_on_a_connection_is_answered(served) -> None:
    cookie = f"Cookie: a={'b' * (60 << 10)}"
    with served.connected() as client:
        client.sendall(get("/", cookie))
        assert client.recv(1000).startswith(b"HTTP/1.1 200 ")
        client.sendall(get("/", cookie, "Connection: close"))
        assert b"HTTP/1.1 200 " in everything(client)


def test_an_error_is_not_sent_into_an_answer(served) -> None:
    with served.connected() as client:
        client.sendall(get("/begun"))
        said = client.recv(1000)
        client.sendall(b"no HTTP\r\n\r\n")
        assert b"HTTP/1.1 400" not in said + everything(client)


def test_connections_beyond_the_most_are_refused_and_fill_no_log(caplog) -> None:
    limits = Limits(max_connections=32, body_s=60)
    with serving(limits) as found, contextlib.ExitStack() as held:
        first, *_ = [held.enter_context(found.connected()) for _ in range(32)]
        until(lambda: found.connections() == 32)
        for place in range(100):
            refused = held.enter_context(found.connected())
            if place < 2:  # whether the client has asked or not
                refused.sendall(get("/refused") * place)
            if place in (0, 1, 99):
                head, _, body = everything(refused).partition(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 503") and b"retry-after" in head.lower()
                assert json.loads(body)["error"]["code"] == 503
        lines = [one for one in caplog.records if "connections" in one.getMessage()]
        assert len(lines) == 1 and found.connections() == 32 and not found.app.paths
        first.close()
        until(lambda: found.connections() == 31)
        with found.connected() as client:
            client.sendall(get("/a", "Connection: close"))
            assert everything(client).endswith(b"/a")


def test_a_refused_connection_is_closed_in_a_moment() -> None:
    with serving(Limits(max_connections=1, body_s=60)) as found, found.connected(), found.connected() as refused:
        assert everything(refused).startswith(b"HTTP/1.1 503")
        found.clock.skip(2)

        def is_closed() -> bool:
            try:
                refused.sendall(b"x")
            except ConnectionError:
                return True
            return False

        until(is_closed, 10)


def test_a_head_stays_within_its_size(served) -> None:
    bombs = [
        b"GET /" + b"a" * 1_000_000, b"GET / HTTP/1.1\r\nA: " + b"a" * 1_000_000,
        b"GET / HTTP/1.1\r\n" + b"A: bbbbbbbbbbbbbbbb\r\n" * 50_000,
        b"POST /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1;" + b"e" * 1_000_000,
        b"POST /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + b"A: bbbbbbbbbbbbbbbb\r\n" * 50_000,
    ]  # fmt: skip
    for bomb in bombs:
        with served.connected() as client:
            with contextlib.suppress(ConnectionError):
                for first in range(0, len(bomb), 10_000):
                    client.sendall(bomb[first : first + 10_000])
            assert b"200 OK" not in everything(client)
    until(lambda: not served.connections())
    with served.connected() as client:  # a large body is no head, and neither is one in small pieces
        body = b"x" * 200_000
        client.sendall(f"POST /a HTTP/1.1\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        assert everything(client).endswith(b"/a")
        with served.connected() as other:
            other.sendall(b"POST /b HTTP/1.1\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n")
            other.sendall(b"1\r\nx\r\n" * 50_000 + b"0\r\n\r\n")
            assert everything(other).endswith(b"/b")


def test_no_endless_body_is_read_after_its_answer(served) -> None:
    part = b"x" * (1 << 20)

    def sent(client: socket.socket, size: int, most: int) -> int:
        """Sends a request for /early, whose body is `size` MiB, and then up to `most` MiB. Returns how many."""
        client.sendall(f"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: {size * len(part)}\r\n\r\n".encode())
        assert client.recv(65536).endswith(b"/early")
        for place in range(most):
            try:
                client.sendall(part)
            except ConnectionError:
                return place
        return most

    with served.connected() as client:  # each request may be large
        assert [sent(client, 40, 40) for _ in range(2)] == [40, 40]
        client.sendall(get("/again", "Connection: close"))
        assert everything(client).endswith(b"/again")
    with served.connected() as client:
        assert sent(client, 1000, 200) < 200


def test_pipelined_requests_are_answered_in_order(served) -> None:
    with served.connected() as client:
        client.sendall(b"".join(get(f"/{number}") for number in range(8)) + get("/last", "Connection: close"))
        bodies = [part.rpartition(b"\r\n\r\n")[2] for part in everything(client).split(b"HTTP/1.1 200 OK")[1:]]
        assert bodies == [f"/{number}".encode() for number in range(8)] + [b"/last"]
    with served.connected() as client:
        client.sendall(get("/wait/1") + get("/wait/2"))
        until(lambda: "/wait/1" in served.app.paths)
    until(lambda: served.app.gone == ["/wait/1"])  # though it is not the last that came
    assert "/wait/2" not in served.app.paths
    with served.connected() as client:
        client.sendall(get("/wait/3") + get("/b") * 5000)
        everything(client)
    until(lambda: not served.connections())
    assert "/b" not in served.app.paths


def test_a_half_closed_connection_counts_as_closed(served) -> None:
    with served.connected() as client:
        client.sendall(get("/wait"))
        until(lambda: "/wait" in served.app.paths)
        client.shutdown(socket.SHUT_WR)
        assert everything(client) == b""
    until(lambda: served.app.gone == ["/wait"])


@pytest.mark.parametrize(
    "wrong",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET \xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
        b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
        b"POST / HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\nA\x00: b\r\n\r\n",
    ],
    ids=range(11),
)
def test_invalid_http_gets_an_error(served, wrong) -> None:
    with served.connected() as client:
        client.sendall(wrong)
        assert everything(client).startswith(b"HTTP/1.1 400")
    with served.connected() as client:
        client.sendall(get("/a", "Connection: close"))
        assert everything(client).endswith(b"/a")
