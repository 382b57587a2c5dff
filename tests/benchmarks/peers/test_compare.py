"""Tests the comparison with other programs: order of turns, choice of thread count, and the floor of times."""

from __future__ import annotations

import functools
import io
import json
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from benchmarks.measure import record
from benchmarks.measure.timing import Timing
from benchmarks.peers import cases, worker
from benchmarks.peers.__main__ import main
from benchmarks.peers.compare import Fastest, PeerKey, busy_neighbours, num_tokens, rival, steps, take_turns
from benchmarks.peers.job import PeerJob
from benchmarks.peers.load import LoadResult, Refused, percentile, put_under_load
from benchmarks.peers.reading import DRAM, bytes_per_step
from benchmarks.peers.side_by_side import rates
from benchmarks.serving import figures, line
from fastformer.models import GPT, Transformer


def test_turns_are_interleaved() -> None:
    order: list[str] = []

    def turn(name: str) -> float:
        order.append(name)
        return float(len(order))

    measured = take_turns({name: functools.partial(turn, name) for name in "abc"}, 3, pause=0.0)
    assert "".join(order) == "abccbaabc"  # so that none always comes behind the same one
    assert measured == {"a": [1.0, 6.0, 7.0], "b": [2.0, 5.0, 8.0], "c": [3.0, 4.0, 9.0]}


@pytest.mark.parametrize("words", ["--case bert_tiny --precision int4", "--case gpt-tiny --shape order=sorted"])
def test_options_that_leave_nothing_to_measure_are_an_error(words: str, capsys, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    assert main([*words.split(), "--peer", "fastformer" if "gpt" in words else "accelerated", "--out", str(out)]) == 2
    assert words.split()[1] in capsys.readouterr().err and not out.exists()


def best_of(*things: tuple[str, str]) -> dict[PeerKey, Fastest]:
    return {PeerKey(*thing): Fastest(1, Timing(1.0, 1.0, 1.0)) for thing in things}


def test_rivals() -> None:
    everyone = best_of(("ctranslate2", "int8"), ("ctranslate2", "fp32"), ("transformers", "fp32"))
    assert rival(PeerKey("fastformer", "int8"), everyone) == ("ctranslate2", "int8")
    assert rival(PeerKey("fastformer", "fp32"), everyone) == ("ctranslate2", "fp32")
    assert rival(PeerKey("fastformer", "bf16"), everyone) == ("ctranslate2", "int8")  # it has no bf16
    gpt = best_of(("transformers", "fp32"), ("llama.cpp", "int8"))
    assert rival(PeerKey("fastformer", "int8"), gpt) == ("llama.cpp", "int8")
    alone = best_of(("transformers", "fp32"))
    assert rival(PeerKey("fastformer", "int8"), alone) == ("transformers", "fp32")
    assert rival(PeerKey("fastformer", "int8"), {}) is None


def test_steps_and_tokens() -> None:
    forced = PeerJob([[[3], [4]], [[5], [6]]], 4, 10)
    assert steps(forced, None) == 20 and num_tokens(forced, None) == 40
    free = PeerJob([[[3], [4]], [[5]]], 1, None)
    outputs = [[7, 1], [7, 7, 7, 1], [7, 7, 1]]
    assert steps(free, outputs) == 4 + 3 and num_tokens(free, outputs) == 9
    assert steps(PeerJob(free.batches, 4, None), outputs) is None  # beams go on behind what is found
    assert free.limit([[3], [4, 5, 6]]) == 103 and forced.limit([[3]]) == 10


def test_busy_processes_end_with_the_turn() -> None:
    children = psutil.Process().children
    before = set(children())
    with busy_neighbours(2):
        assert len(set(children()) - before) == 2
    assert set(children()) == before


def test_bytes_of_a_step() -> None:
    model = Transformer.from_preset("tiny", vocab_size=500)
    d, ff = 128, 512
    layer = 4 * d * d + 2 * d * d + 2 * d * ff  # the keys and values of cross-attention are there once a source
    assert bytes_per_step(model, "int8") == 500 * d + 2 * layer
    assert bytes_per_step(model, "bf16") == 2 * bytes_per_step(model, "int8")
    gpt = GPT.from_preset("tiny", vocab_size=500)
    assert bytes_per_step(gpt, "fp32") == 4 * (500 * d + 4 * (4 * d * d + 2 * d * 4 * d))


def test_a_row_shows_its_distance_from_the_floor() -> None:
    job = PeerJob([[[3], [4]]], 4, 10)
    row = rates(1000, 0.5, job, None, {DRAM: 40_000.0, 1000: 80_000.0})
    assert row["tokens_s"] == 40
    # 10 steps of 1000 bytes in half a second.
    assert row["ms_step"] == 50.0 and (row["share_of_dram"], row["share_of_cached"]) == (0.5, 0.25)


def test_each_source_has_a_length() -> None:
    lines = [[5] * 9, [6] * 7, [7] * 7, *[[8] * 40] * 60]
    sources = cases.mixed_sources(lines, [1])
    assert sorted(map(len, sources)) == list(range(8, 61)) and [len(s) for s in sources] != list(range(8, 61))
    assert all(source[-1] == 1 and 1 not in source[:-1] for source in sources)
    assert [6] * 7 + [1] in sources and [5] * 9 + [1] in sources  # lines as they are, where there is one
    with pytest.raises(ValueError, match="more tokens"):
        cases.mixed_sources(lines[:5], [1])


def test_a_worker_answers_orders_and_reports_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    job = cases.make_job({"name": "tiny"}, 2, 1)
    place = worker.WorkerConfig("fastformer", "fp32", torch.get_num_threads(), {"name": "tiny"}, {})
    answers = io.StringIO()
    worker.serve(place, io.StringIO(json.dumps(asdict(job)) + "\n"), answers)
    ready, turn = map(json.loads, answers.getvalue().splitlines())
    assert ready == {} and turn["seconds"] > 0 and [len(row) for row in turn["tokens"]] == [12, 12]

    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    for peer, model, message in (
        ("llama.cpp", "gpt-tiny", "no llama-bench: `make peers` builds it"),
        ("ik_llama.cpp", "gpt-tiny", "no ik-llama-bench: `make peers` builds it"),
        ("ctranslate2", "tiny", "not installed: pip install ctranslate2"),
    ):
        answers = io.StringIO()
        options = dict.fromkeys(cases.LLAMA_BENCHES, "/nowhere/llama-bench")
        worker.serve(worker.WorkerConfig(peer, "int8", 1, {"name": model}, options), io.StringIO(""), answers)
        assert json.loads(answers.getvalue())["missing"].startswith(message)


def test_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the whole program, in one process instead of several workers."""

    class Here:
        def __init__(self, place: worker.WorkerConfig) -> None:
            self.peer = worker.peers(place.case)[place.peer](
                cases.make_model(place.case), place.precision, torch.get_num_threads(), place.options
            )

        def ready(self) -> None:
            return None

        def turn(self, job: PeerJob):
            return self.peer.turn(job)

        def close(self) -> None:
            pass

    monkeypatch.setattr("benchmarks.peers.side_by_side.Worker", Here)
    monkeypatch.setattr("benchmarks.peers.side_by_side.TURN", 0.01)
    monkeypatch.setattr("benchmarks.peers.side_by_side.PAUSE", 0.0)
    monkeypatch.setattr("benchmarks.peers.side_by_side.DRAM", 2**20)
    out = tmp_path / "peers.jsonl"
    # fmt: off
    arguments = ["--case", "tiny", "--batch", "2", "--beams", "1", "--precision", "fp32", "--threads", "1",
                 "--peer", "fastformer", "--rounds", "2", "--out", str(out)]
    # fmt: on
    assert main(arguments) == 0
    (row,) = map(json.loads, out.read_text().splitlines())
    assert (row["op"], row["model"], row["provider"], row["precision"]) == ("peers", "tiny", "fastformer", "fp32")
    assert row["shape"] == {"batch": 2, "num_beams": 1} and row["threads"] == 1 and row["same_tokens"] == 2
    assert row["tokens_s"] == pytest.approx(24e3 / row["ms_p50"])
    assert row["share_of_dram"] > 0 and row["share_of_cached"] > 0
    assert "tiny batch=2" in capsys.readouterr().out


# Clients of a server count the right answers and measure their time.


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
