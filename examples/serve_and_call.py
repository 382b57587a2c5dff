"""Serves a translation model on this machine, and asks it for a translation: first whole, then as a stream.

    python examples/serve_and_call.py MODEL "a text"

MODEL is a run of `fastformer train`, or a folder of a translation model as transformers saved it. You would normally
start a server with `fastformer serve MODEL`; this script starts one on a free port and stops it at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def server(model: str) -> Iterator[str]:
    """Runs a server, and yields its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "fastformer.cli", "serve", model, "--port", str(port)]
    process = subprocess.Popen(command)
    try:
        wait(f"http://127.0.0.1:{port}/ready", process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()  # the server finishes the running requests, then exits
        process.wait(30)


def wait(url: str, process: subprocess.Popen[bytes], seconds: float = 120.0) -> None:
    """Returns as soon as the server accepts requests.

    Raises:
        RuntimeError: the server has exited, or is not ready in time.
    """
    end = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < end:
        with contextlib.suppress(urllib.error.URLError, ConnectionError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(0.2)
    raise RuntimeError(f"expected a server at {url} within {seconds} s, got none")


def post(url: str, body: dict[str, Any]) -> Any:
    """Posts a JSON body, and returns the open response."""
    data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    return urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=60)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("text")
    options = parser.parse_args(arguments)

    with server(options.model) as address:
        with post(f"{address}/v1/translate", {"text": options.text}) as answer:
            print(f"whole: {json.load(answer)['text']}")
        with post(f"{address}/v1/translate", {"text": options.text, "stream": True}) as answer:
            for line in answer:  # server-sent events: "data: {...}"
                if line.startswith(b"data: "):
                    print(f"event: {line[6:].decode().strip()}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
