"""Tests Ray: a replica dies under load, and an actor dies while it translates a corpus."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from fastformer.generation import Translator
from fastformer.number_words import english

pytestmark = [
    pytest.mark.slow,  # Ray's processes take half a minute to come and go
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Ray's own
]
ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'fastformer[ray]'")


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Starts a cluster with two CPUs on this machine."""
    environment = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    os.environ.update(environment)
    ray.init(
        num_cpus=2, include_dashboard=False, object_store_memory=200 << 20, log_to_driver=False,
        _node_ip_address="127.0.0.1", configure_logging=False,
    )  # fmt: skip
    try:
        yield
    finally:
        ray.shutdown()
        for name in environment:
            del os.environ[name]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def replicas() -> list[psutil.Process]:
    """Returns the processes of the replicas among the descendants of this process."""
    found = []
    for each in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            if any("ServeReplica" in part for part in each.cmdline()):
                found.append(each)
    return found


def test_no_request_is_lost_when_a_replica_dies(cluster: None, translator_folder: Path, tmp_path: Path) -> None:
    # Proves what a client sees of a machine that dies: errors at once, and an answer when it asks again.
    import httpx
    from ray import serve

    from fastformer.serving.ray_app import Options, build

    (keys := tmp_path / "keys.txt").write_text("a-key\n")
    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    options = Options(folder=str(translator_folder), num_cpus=1, min_replicas=2, max_replicas=2, keys_file=str(keys))
    serve.run(build(options), name="test", blocking=False)
    texts = [english(number) for number in range(400)]
    expected = Translator.from_pretrained(translator_folder).translate(texts)
    failed: list[int] = []

    async def ask(http: httpx.AsyncClient, text: str) -> str:
        for _ in range(100):
            try:
                response = await http.post("/v1/translate", json={"text": text})
            except httpx.TransportError:
                failed.append(0)
            else:
                if response.status_code == 200:
                    return str(response.json()["text"])
                assert response.status_code >= 500, response.text
                failed.append(response.status_code)
            await asyncio.sleep(0.2)
        raise AssertionError(f"{text!r} was never answered")

    async def load() -> list[str]:
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", timeout=60, headers={"Authorization": "Bearer a-key"}
        ) as http:
            limit, begun = asyncio.Semaphore(16), asyncio.Event()

            async def one(number: int) -> str:
                async with limit:
                    if number == 100:
                        begun.set()
                    return await ask(http, texts[number])

            async def kill() -> None:
                await begun.wait()
                found = replicas()
                assert len(found) == 2
                found[0].kill()

            killed = asyncio.ensure_future(kill())
            found = await asyncio.gather(*map(one, range(len(texts))))
            await killed
            return list(found)

    try:
        assert asyncio.run(load()) == expected
        assert len(failed) < len(texts) / 4, failed  # those of the one that died, and not of the other
        # Another one takes its place.
        for _ in range(120):
            if len(replicas()) == 2:
                break
            asyncio.run(asyncio.sleep(0.5))
        assert len(replicas()) == 2
        assert asyncio.run(_get(port, "/ready")) == 200 and asyncio.run(_get(port, "/v1/info")) == 401
        with pytest.raises(ValueError, match=r"\bmax_waiting\b"):
            build(Options(folder=str(translator_folder), limits={"max_waiting": 0}))
    finally:
        serve.shutdown()


async def _get(port: int, path: str) -> int:
    import httpx

    async with httpx.AsyncClient() as http:
        return (await http.get(f"http://127.0.0.1:{port}{path}")).status_code


def test_every_row_of_a_corpus_is_written_once_although_an_actor_dies(
    cluster: None, translator_folder: Path, tmp_path: Path
) -> None:
    # Proves that blocks which a dead actor had in hand are done again, and that no row is there twice.
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

    from fastformer.serving.ray_data import TranslateRows, translate_corpus

    rows, files = 10_000, 8
    (source := tmp_path / "source").mkdir()
    for part in range(files):
        ids = range(part, rows, files)
        pq.write_table(
            pa.table({"id": list(ids), "text": [english(each % 50) for each in ids]}), source / f"{part}.parquet"
        )
    mark = str(tmp_path / "died")

    class DiesOnce(TranslateRows):
        calls = 0

        def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
            assert torch.get_num_threads() == 1
            self.calls += 1
            if self.calls == 3:
                try:
                    os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    pass
                else:
                    os._exit(1)
            return super().__call__(batch)

    target = tmp_path / "target"
    counted = translate_corpus(
        str(source), str(target), str(translator_folder), num_cpus=1, max_actors=1, batch_size=256, actor=DiesOnce,
        checkpoint=str(tmp_path / "checkpoint"),
    )  # fmt: skip
    assert counted == rows
    assert os.path.exists(mark)  # it did die
    table = pq.read_table(target).sort_by("id").to_pydict()
    assert table["id"] == list(range(rows))
    said = dict(
        zip(
            map(english, range(50)),
            Translator.from_pretrained(translator_folder).translate(list(map(english, range(50)))),
            strict=True,
        )
    )
    assert table["translation"] == [said[text] for text in table["text"]]


def test_a_duplicate_row_is_an_error(cluster: None, translator_folder: Path, tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

    from fastformer.serving.ray_data import translate_corpus

    source, target = tmp_path / "source.parquet", tmp_path / "target"
    pq.write_table(pa.table({"id": [1, 2], "text": ["one", "two"]}), source)
    folders = str(source), str(target), str(translator_folder)
    assert translate_corpus(*folders) == 2
    with pytest.raises(RuntimeError, match="4"):
        translate_corpus(*folders)  # into a folder that holds the rows already
    with pytest.raises(ValueError, match=r"\bmax_time\b"):
        translate_corpus(*folders, max_time=1.0)
