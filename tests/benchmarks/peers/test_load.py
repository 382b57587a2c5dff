"""Clients of a server count the right answers and measure their time."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from benchmarks.measure import record
from benchmarks.peers.load import LoadResult, Refused, percentile, put_under_load
from benchmarks.serving import figures, line


class Handler(BaseHTTPRequestHandler):
    """Responds with as many words as requested, after 20 ms; with `lock`, one request at a time."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    lock = threading.Lock()
    most = running = 0

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.lock:
            Handler.running += 1
            Handler.most = max(Handler.most, self.running)
        time.sleep(0.02)
        with self.lock:
            Handler.running -= 1
        answer = json.dumps({"text": " ".join(["t"] * body["words"])}).encode()
        self.send_response(body.get("status", 200))
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:
        pass


class FakeServer(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        pass  # a client that was refused closes its connections


@pytest.fixture
def port() -> Iterator[int]:
    server = FakeServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    Handler.most = Handler.running = 0
    yield server.server_address[1]
    server.shutdown()
    thread.join()
    server.server_close()


def words(answer: dict[str, str]) -> int:
    return len(answer["text"].split())


def test_clients_send_requests_at_once_and_count_answers_in_time(port: int) -> None:
    bodies = [({"words": 3}, 3), ({"words": 5}, 5)]
    load = put_under_load(port, "/any", bodies, words, clients=4, seconds=0.4, warm_up=0.1)
    assert Handler.most == 4 and Handler.running == 0  # what was begun was waited for
    # At least 20 ms each: four clients can't have more than 80 in 0.4 s, and have some.
    assert 8 <= len(load.latencies) <= 84 and min(load.latencies) >= 0.02
    assert 3 * len(load.latencies) <= load.tokens <= 5 * len(load.latencies)


@pytest.mark.parametrize(("body", "expected"), [({"words": 3, "status": 503}, 3), ({"words": 2}, 3)])
def test_an_invalid_answer_is_an_error(body: dict[str, int], expected: int, port: int) -> None:
    with pytest.raises(Refused, match="503" if "status" in body else "2"):
        put_under_load(port, "/any", [(body, expected)], words, clients=2, seconds=0.2, warm_up=0.0)


def test_a_percentile_is_one_of_the_values() -> None:
    values = [float(i) for i in range(100, 0, -1)]
    assert [percentile(values, share) for share in (0.2, 0.5, 0.99, 1.0)] == [20.0, 50.0, 99.0, 100.0]
    assert percentile([7.0], 0.5) == percentile([7.0], 0.99) == 7.0


def test_figures_are_a_line_of_results() -> None:
    loads = [LoadResult(2.0, [0.1] * 10, 80), LoadResult(2.0, [0.2] * 20, 160), LoadResult(2.0, [0.3] * 12, 96)]
    fields = figures(loads)
    assert fields["requests_s"] == 6.0 and fields["tokens_s"] == 48.0
    assert (fields["ms_p20"], fields["ms_p50"], fields["ms_p99"]) == (100.0, 200.0, 300.0)
    row: dict[str, Any] = {"suite": "decoding", "op": "serving", "model": "base", "shape": {"clients": 16}, **fields}
    row |= {"provider": "p", "precision": "int8", "ours": 3.0}
    record.check(row | record.environment("cpu"))
    assert "6.0 requests/s" in line(row)
    assert figures([LoadResult(1.0)]) == {}
