"""A malicious client: nearly valid bodies, nearly valid HTTP, and abandoned streams.

It notes what a server must not do: answer 5xx, or not answer at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from tests.serving.servers import post_head

Body = dict[str, Any]

_PATIENCE = 30.0  # seconds that a request may take which came whole
# By kind of service: bodies that are right, by their paths.
RIGHT: dict[str, dict[str, Body]] = {
    "translator": {
        "/v1/translate": {"text": "one. Two!", "max_new_tokens": 20, "num_beams": 2, "alternatives": 1},
        "/translate": {"q": "<b>a</b> b", "source": "auto", "target": "und", "format": "html", "alternatives": 1},
        "/detect": {"q": "Das ist ein Satz."},
    },
    "generator": {
        "/v1/completions": {
            "prompt": ["the dog", "two"], "max_tokens": 9, "n": 2, "logprobs": 2, "stop": ["x"], "seed": 1,
        },
        "/v1/chat/completions": {
            "messages": [{"role": "user", "content": "two birds"}], "max_tokens": 9, "logprobs": True,
            "top_logprobs": 2, "temperature": 0.7, "logit_bias": {"7": 1}, "stream_options": {"include_usage": True},
        },
        "/generate": {"inputs": "the dog", "parameters": {"max_new_tokens": 9, "details": True, "do_sample": True}},
    },
    "encoder": {
        "/v1/embeddings": {"input": ["a dog", "b"], "encoding_format": "base64", "dimensions": 4},
        "/embed": {"inputs": ["a dog", "b"], "normalize": False, "truncate": True, "prompt_name": "query"},
    },
    "cross-encoder": {
        "/predict": {"inputs": [["a dog", "b"], ["c", "d"]], "raw_scores": True, "truncate": True},
        "/rerank": {"query": "what", "texts": ["a dog", "b"], "return_text": True},
    },
}  # fmt: skip
STREAMS = ("/v1/translate", "/v1/completions", "/v1/chat/completions", "/generate")
_PATHS = ("/", "/health", "/ready", "/metrics", "/openapi.json", "/v1/info", "/v1/models", "/info", "/languages")
_STRANGE: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 10**30, -(10**30), 0.5, -0.0, 1e308, 1e-320, "", " ", "\n", "0", "null",
    "a", "\x00", "\ud800", "\U0001f3f4\u200d\u2620", "\u202e" * 50, "a" * 5000, "<" * 2000, "<p>" * 500, "&#x110000;",
    [], [[]], {}, {"a": 1}, [None], [1], ["a", 1], ["a"] * 200, [[1, 2]], "漢" * 300, "%s%n{}", "../../etc/passwd",
    {"role": "user"}, "und", "auto", "en",
]  # fmt: skip


class Attack:
    """Several concurrent clients, for some time.

    Args:
        place: the server's address.
        kind: the kind of service.
        seed: the seed of random choices.

    Attributes:
        answers: the number of answers with each status.
        wrong: the server's mistakes.
    """

    def __init__(self, place: tuple[str, int], kind: str, seed: int) -> None:
        self._place, self._right, self._dice = place, RIGHT[kind], random.Random(seed)
        self.answers: Counter[int] = Counter()
        self.wrong: list[str] = []

    def run(self, seconds: float, clients: int = 12) -> None:
        """Runs the clients."""
        asyncio.run(self._run(seconds, clients))

    async def _run(self, seconds: float, clients: int) -> None:
        end = time.monotonic() + seconds
        ways: list[tuple[int, Callable[[], Awaitable[None]]]] = [
            (8, self._strange_body), (4, self._strange_bytes), (3, self._leave_stream), (2, self._pipeline),
            (1, self._slowly), (1, self._idle), (1, self._bomb), (2, self._strange_request),
        ]  # fmt: skip

        async def work() -> None:
            while time.monotonic() < end and len(self.wrong) < 20:
                (way,) = self._dice.choices([way for _, way in ways], [weight for weight, _ in ways])
                with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                    await way()

        await asyncio.gather(*(work() for _ in range(clients)))

    # What is asked

    def _body(self) -> tuple[str, Any]:
        path = self._dice.choice(list(self._right))
        return path, json.loads(json.dumps(self._right[path]))

    def _bent(self, value: Any, depth: int = 0) -> Any:
        """Returns a value of which a part is replaced."""
        dice = self._dice
        if isinstance(value, dict) and value and dice.random() < 0.85:
            name = dice.choice(list(value))
            if dice.random() < 0.15:
                del value[name]
            elif dice.random() < 0.1:
                other = dice.choice(["x", "stream", "n", "timeout", "seed", name.upper(), "\x00"])
                value[other] = self._strange()
            else:
                value[name] = self._bent(value[name], depth + 1)
            return value
        if isinstance(value, list) and value and dice.random() < 0.6:
            place = dice.randrange(len(value))
            value[place] = self._bent(value[place], depth + 1)
            return value
        return self._strange()

    def _strange(self) -> Any:
        return copy.deepcopy(self._dice.choice(_STRANGE))

    async def _strange_body(self) -> None:
        path, body = self._body()
        for _ in range(self._dice.randint(0, 3)):
            body = self._bent(body)
        content = json.dumps(body).encode()
        if self._dice.random() < 0.2:
            content = self._dice.choice([
                content[: len(content) // 2], content.replace(b'"', b"'"), content + b"}", b"[" * 50_000,
                content.replace(b"1", b"NaN"), content.replace(b"1", b"9" * 5000), content.replace(b"a", b"\xff\xfe"),
                b"\xef\xbb\xbf" + content, content.decode().encode("utf-16"), b'{"a":' * 20_000, b"", b"\x00" * 100,
                content.replace(b"{", b'{"text":1,"text":"a",', 1),
            ])  # fmt: skip
        kinds = ["application/json"] * 8 + [
            "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x",
            "application/json; charset=utf-7", "multipart/form-data", "\xff",
        ]  # fmt: skip
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {self._dice.choice(kinds)}\r\n"
        if self._dice.random() < 0.3:
            parts = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in _cut(content, self._dice))
            message = head.encode("latin-1") + b"Transfer-Encoding: chunked\r\n\r\n" + parts + b"0\r\n\r\n"
        else:
            message = head.encode("latin-1") + f"Content-Length: {len(content)}\r\n\r\n".encode() + content
        await self._whole(message, may_be_late='"timeout"' in json.dumps(body))

    async def _strange_request(self) -> None:
        dice = self._dice
        method = dice.choice(["GET", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "POST", "TRACE", "M-SEARCH"])
        paths = [*_PATHS, *self._right, "/%00", "/..%2f..", "//", "/" + "a" * 3000, "/v1/models/%ff%fe", "*",
                 "/?" + "q" * 3000, "/v1/models/" + "%2e" * 100, "http://x/health", "/health?\xe4", "/\xff",
                 "/health#a", "/a b"]  # fmt: skip
        fields = [
            "Accept: */*", "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x",
            "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA",
            "Expect: 100-continue", "Expect: 200-ok", "Content-Length: 0", "Range: bytes=0-1", "Content-Encoding: gzip",
            "X-Forwarded-For: \x7f\x01", "Cookie: " + "a=b; " * 500, "Authorization: Bearer " + "\xff" * 20,
            "TE: trailers", "Origin: null", "Host: y", "If-None-Match: *", "Transfer-Encoding: identity",
            "Transfer-Encoding: gzip, chunked",
        ]  # fmt: skip
        chosen = "".join(f"{field}\r\n" for field in dice.sample(fields, dice.randint(0, 3)))
        version = dice.choice(["1.1"] * 6 + ["1.0", "2.0", "0.9", "1.2"])
        head = f"{method} {dice.choice(paths)} HTTP/{version}\r\nHost: localhost\r\n{chosen}\r\n"
        await self._part(head.encode("latin-1"))

    async def _strange_bytes(self) -> None:
        dice, (path, body) = self._dice, self._body()
        content = json.dumps(body).encode()
        length = dice.choice([0, 1, len(content) - 1, len(content) + 1, 10**9, 10**30, -1])
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n"
        message = bytearray(head.encode() + content)
        for _ in range(dice.choice([0, 0, 1, 3, 30])):
            place = dice.randrange(len(message))
            message[place : place + dice.randint(0, 2)] = bytes(dice.choices(range(256), k=dice.randint(0, 3)))
        if dice.random() < 0.1:
            message = bytearray(dice.randbytes(dice.randint(1, 3000)))
        await self._part(bytes(message))

    async def _pipeline(self) -> None:
        message = b""
        for _ in range(self._dice.choice([2, 3, 5, 17, 60])):
            path, body = self._body()
            if self._dice.random() < 0.5:
                content = json.dumps(self._bent(body)).encode()
                message += post_head(path, len(content)).encode() + content
            else:
                message += f"GET {self._dice.choice(_PATHS)} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
        await self._part(message)

    async def _leave_stream(self) -> None:
        """Begins to read a stream, or an answer, and leaves in the middle."""
        dice, (path, body) = self._dice, self._body()
        if path in STREAMS:
            body["stream"] = dice.random() < 0.8
            for name in ("alternatives", "num_beams", "n"):
                body.pop(name, None)
            for name in ("max_new_tokens", "max_tokens"):
                if name in body:
                    body[name] = 60
        content = json.dumps(body).encode()
        head = post_head(path, len(content))
        reader, writer = await self._connected()
        writer.write(head.encode() + content)
        way = dice.randrange(4)
        if way:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(reader.read(dice.choice([1, 100, 2000, 100_000])), dice.random())
        if way == 2:
            writer.write_eof()
            await asyncio.sleep(0.05)
        self._close(writer, abruptly=dice.random() < 0.5)

    async def _slowly(self) -> None:
        path, body = self._body()
        content = json.dumps(body).encode()
        head = post_head(path, len(content))
        message, reader_writer = head.encode() + content, await self._connected()
        place = 0
        while place < len(message):
            count = self._dice.choice([1, 1, 1, 40])
            reader_writer[1].write(message[place : place + count])
            await asyncio.sleep(self._dice.choice([0, 0, 0.001, 0.01]))
            place += count
        await self._read(*reader_writer, message)

    async def _idle(self) -> None:
        _, writer = await self._connected()
        writer.write(self._dice.choice([b"", b"G", b"GET / HTTP/1.1\r\n", post_head("/detect", 5).encode()]))
        await asyncio.sleep(3 * self._dice.random())
        self._close(writer, abruptly=self._dice.random() < 0.5)

    async def _bomb(self) -> None:
        bomb = self._dice.choice([
            b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 20_000, b"GET /" + b"a" * 300_000 + b" HTTP/1.1\r\n\r\n",
            b"POST /detect HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1;" + b"x" * 300_000,
            b"POST /detect HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n" + b"x" * 1_000_000,
            b"POST /detect HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 100_000,
            b"\r\n" * 200_000, b"GET / HTTP/1.1\r\nA:" + b" " * 300_000,
        ])  # fmt: skip
        await self._part(bomb)

    # How it is told

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(*self._place)

    @staticmethod
    def _close(writer: asyncio.StreamWriter, *, abruptly: bool = False) -> None:
        if abruptly:
            own = writer.get_extra_info("socket")
            with contextlib.suppress(OSError):
                own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        else:
            writer.close()

    async def _whole(self, message: bytes, *, may_be_late: bool = False) -> None:
        """Sends a complete request, which must be answered."""
        reader, writer = await self._connected()
        for part in _cut(message, self._dice) if self._dice.random() < 0.2 else [message]:
            writer.write(part)
            await writer.drain()
        await self._read(reader, writer, message, may_be_late=may_be_late)

    async def _read(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, message: bytes, *, may_be_late: bool = False
    ) -> None:
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n"), _PATIENCE)
            self._note(head, message, may_be_late)
            if self._dice.random() < 0.7:  # else it leaves here
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(reader.read(200_000), 1)
        except asyncio.TimeoutError:
            self.wrong.append(f"no answer to {message[:600]!r}")
        finally:
            self._close(writer)

    async def _part(self, message: bytes) -> None:
        """Sends data that need not be answered, and reads for a moment."""
        reader, writer = await self._connected()
        try:
            writer.write(message)
            await writer.drain()
            with contextlib.suppress(asyncio.TimeoutError):
                said = await asyncio.wait_for(reader.read(100_000), 0.3 + self._dice.random())
                for line in said.split(b"\r\n"):
                    if line.startswith(b"HTTP/1.1 "):
                        self._note(line, message, True)
        finally:
            self._close(writer, abruptly=self._dice.random() < 0.3)

    def _note(self, line: bytes, message: bytes, may_be_late: bool) -> None:
        status = int(line[9:12])
        self.answers[status] += 1
        if status >= 500 and not (status == 504 and may_be_late):
            self.wrong.append(f"{line!r} to {message[:1500]!r}")


def _cut(data: bytes, dice: random.Random) -> list[bytes]:
    """Splits the data into pieces."""
    places = sorted({0, len(data), *(dice.randrange(len(data) + 1) for _ in range(5))})
    return [data[first:last] for first, last in zip(places, places[1:], strict=False)]
