"""Whatever clients send to a server, there is no 5xx, no stuck request, no memory growth and no log of texts."""

from __future__ import annotations

import resource
import socket
import time
from pathlib import Path

import httpx
import psutil
import pytest

from tests.serving.fuzzing import RIGHT, Attack
from tests.serving.models import folder_of
from tests.serving.servers import until
from tests.serving.test_process import nothing_runs, served

SECONDS = 8.0
FLAGS = (
    "--body_s", "2", "--write_s", "2", "--max_new_tokens", "64", "--timeout_s", "20", "--max_body_bytes", "200000",
    "--max_connections", "4000",
)  # fmt: skip


@pytest.mark.slow  # proves it with some thousand requests that are wrong in each way that the attack knows
@pytest.mark.parametrize("kind", RIGHT)
def test_no_client_breaks_a_server(kind, tmp_path: Path, translator_folder: Path) -> None:
    with served(folder_of(kind, tmp_path / "model", translator_folder), *FLAGS) as (process, url):
        watched, place = psutil.Process(process.pid), (httpx.URL(url).host, httpx.URL(url).port or 0)

        def attacked(seed: int) -> int:
            attack = Attack(place, kind, seed)
            attack.run(SECONDS)
            assert not attack.wrong, "\n".join(attack.wrong[:5])
            assert attack.answers[200] and attack.answers[400] + attack.answers[422]
            until(lambda: nothing_runs(url), 5)
            until(lambda: len(watched.net_connections()) <= 3, 5)
            return int(watched.memory_info().rss)

        memory, files = attacked(0), watched.num_fds()
        assert attacked(1) <= 1.05 * memory and watched.num_fds() <= files + 2
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
        idle = [socket.create_connection(place) for _ in range(min(2000, hard - 200))]
        began = time.monotonic()
        assert httpx.get(f"{url}/health", timeout=5).status_code == 200 and time.monotonic() - began < 2
        until(lambda: len(watched.net_connections()) <= 3, 15)  # they were given up
        for one in idle:
            one.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert len(process.said) <= 3, process.said[:10]  # what is said once, and not what a client sends
