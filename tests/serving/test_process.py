"""Tests the server as a process of its own: signals, misbehaving clients, and its costs."""

from __future__ import annotations

import contextlib
import json
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from fastformer.generation import Translator
from fastformer.serving import Limits
from tests.serving import models

pytestmark = pytest.mark.slow  # each test starts a server of its own, and some of them load it for a while
LONG = {"text": "a long one", "split": False, "max_new_tokens": 1000}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Makes a translator that never ends by itself, at about a token per millisecond."""
    found = tmp_path_factory.mktemp("models") / "talker"
    sizes = {"d_model": 512, "d_ff": 2048, "num_heads": 8, "num_encoder_layers": 2, "num_decoder_layers": 4}
    return models.translator(found, max_len=1100, **sizes)


class Process(subprocess.Popen[str]):
    """The process of a server; `said` are the lines on standard error since it started to listen."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.said: list[str] = []


@contextlib.contextmanager
def served(folder: Path, *flags: str, before: Sequence[str] = ()) -> Iterator[tuple[Process, str]]:
    """Starts a server, and returns its process and its address."""
    words = [sys.executable, "-m", "fastformer.cli", "serve", str(folder), "--port", "0", "--access_log", "false"]
    process = Process([*before, *words, *flags], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        line = ""
        while process.poll() is None and not line.startswith("serving"):
            line = process.stderr.readline()
        found = re.search(r"http://\S+", line)
        assert found, line
        reader = threading.Thread(target=lambda: process.said.extend(process.stderr), daemon=True)
        reader.start()
        yield process, found.group()
    finally:
        process.kill()
        process.wait()


def gauges(url: str) -> dict[str, float]:
    """Returns the server's metrics without labels."""
    text = httpx.get(f"{url}/metrics").text
    return {name: float(value) for name, value in re.findall(r"^fastformer_(\w+) (\S+)$", text, re.MULTILINE)}


def nothing_runs(url: str) -> bool:
    found = gauges(url)
    return (
        found["requests_running"] == found["requests_waiting"] == 0
        and found["cache_free_tokens"] == found["cache_tokens"]
    )


def test_libretranslates_own_client(folder) -> None:
    api = pytest.importorskip("libretranslatepy", reason="the client that is tested").LibreTranslateAPI
    translator = Translator.from_pretrained(folder)
    with served(folder, "--source_lang", "en", "--target_lang", "de") as (_, url):
        client = api(url)
        for text in ("One. Two!\n three", "x"):
            assert client.translate(text, "en", "de") == translator.translate(text, split=True)
        assert client.languages()[0]["code"] == "en"
        assert client.detect("Das ist ein deutscher Satz.")[0]["language"] == "de"


def test_sigterm_never_cuts_a_response(folder) -> None:
    dice = random.Random(0)
    for _ in range(10):
        begun = threading.Semaphore(0)
        with served(folder, "--drain_delay_s", "0.2", "--access_log", "true") as (process, url):

            def ask(number: int) -> None:
                stream = number % 2 == 0
                body = {"text": "ab", "split": False, "max_new_tokens": 20 + 40 * number, "stream": stream}
                with httpx.Client(timeout=30) as client:
                    while True:
                        request = client.build_request("POST", f"{url}/v1/translate", json=body)  # noqa: B023
                        try:
                            answer = client.send(request, stream=True)
                        except httpx.TransportError:  # the server is no longer there; what it had begun is in its log
                            return
                        begun.release()  # noqa: B023
                        said = answer.read().decode()  # an answer that has begun is whole, or this raises
                        assert answer.status_code in (200, 503)
                        if answer.status_code == 503:
                            return
                        assert '"done":true' in said or not stream

            with ThreadPoolExecutor(6) as pool:
                asking = [pool.submit(ask, number) for number in range(6)]
                assert begun.acquire(timeout=30)
                time.sleep(dice.random())
                process.send_signal(signal.SIGTERM)
                for one in asking:
                    one.result(60)
            assert process.wait(30) == 0
            time.sleep(0.1)  # for the thread that reads it
            log = [json.loads(line) for line in process.said if line.startswith("{")]
            assert log and {line["status"] for line in log} <= {200, 503}


def test_a_second_signal_ends_at_once_and_a_drain_is_limited(folder) -> None:
    for flags, signals in ((("--drain_s", "0", "--drain_delay_s", "0"), 1), (("--drain_delay_s", "60"), 2)):
        with served(folder, *flags) as (process, url):
            with httpx.stream("POST", f"{url}/v1/translate", json={**LONG, "stream": True}) as answer:
                lines = answer.iter_lines()
                next(lines)
                for _ in range(signals):
                    process.send_signal(signal.SIGTERM)
                    time.sleep(0.05)
                rest: list[str] = []
                with contextlib.suppress(httpx.HTTPError):
                    rest += lines
            assert not any('"done"' in line for line in rest)
            assert process.wait(5) == 0 or signals == 2


def test_a_client_that_never_reads_leaves_the_batch(tmp_path) -> None:
    # More than the buffers of sockets hold: 4,000 tokens of some kilobytes each.
    from tests.serving.servers import post_head, running, until

    pytest.importorskip("tokenizers", reason="the tokenizers library is not installed")
    limits = Limits(write_s=0.5, max_new_tokens=4000)
    with running(models.generator(tmp_path / "model", max_len=4096), limits) as server:
        fields: dict[str, Any] = {"max_tokens": 4000, "min_tokens": 4000, "stream": True, "temperature": 0}
        fields |= {"logprobs": True, "top_logprobs": 20, "messages": [{"role": "user", "content": "the dog"}]}
        body = json.dumps(fields).encode()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((httpx.URL(server.url).host, httpx.URL(server.url).port))
            client.sendall(post_head("/v1/chat/completions", len(body)).encode() + body)
            until(lambda: server.service.session.stats().running == 1)
            seconds = until(lambda: server.service.session.stats().cancelled == 1)
            until(lambda: server.service.session.stats().running == 0)
            stats = server.service.session.stats()
            assert stats.free_tokens == stats.capacity_tokens
            print(f"its request left the batch after {seconds:.1f} s")


@pytest.mark.parametrize("is_known", [True, False], ids=["a limit at the start", "a limit that comes later"])
def test_a_thousand_connections_fill_no_log(is_known, folder) -> None:
    """Without a limit at the start, the server learns of it only when it can accept no connection."""
    limit = ("prlimit", "--nofile=256") if is_known else ()
    with served(folder, before=limit) as (process, url), contextlib.ExitStack() as held:
        if not is_known:
            psutil.Process(process.pid).rlimit(psutil.RLIMIT_NOFILE, (256, 256))
        place = httpx.URL(url)
        for _ in range(1000):
            client = held.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex((place.host, place.port))
        time.sleep(4)
        assert process.poll() is None
        held.close()
        answer = None
        for _ in range(100):
            with contextlib.suppress(httpx.TransportError):
                answer = httpx.get(f"{url}/health", timeout=5)
                if answer.status_code == 200:
                    break
            time.sleep(0.1)
        assert answer is not None and answer.status_code == 200
        size = sum(map(len, process.said))
        print(f"{size} characters in the log")
        assert size < 2000


def test_ten_thousand_requests_leave_nothing_behind(folder) -> None:
    with served(folder) as (process, url), httpx.Client(timeout=30) as client:
        watched, ask = psutil.Process(process.pid), {"text": "ab", "max_new_tokens": 2}

        def rounds(count: int) -> tuple[int, int, int]:
            for number in range(count):
                wrong = {"text": "ab", "nope": 1} if number % 10 == 0 else ask
                client.post(f"{url}/v1/translate", json={**wrong, "stream": number % 7 == 1})
            return watched.memory_info().rss, watched.num_threads(), watched.num_fds()

        memory, threads, files = rounds(3000)  # caches and arenas fill first
        after = rounds(10_000)
        print(f"memory {memory / 2**20:.1f} -> {after[0] / 2**20:.1f} MiB")
        assert after[0] <= 1.02 * memory and after[1:] == (threads, files)
