"""Runs the Dockerfile's commands in a fresh venv: the installation serves a model and passes the health check."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.serving.deploy.dockerfile import DOCKERFILE, ROOT, copied, health_command, stages

pytestmark = pytest.mark.slow  # proves that the image's steps work, as far as that can be seen without Docker


def test_the_steps_of_the_build_make_a_server(tmp_path: Path, translator_folder: Path) -> None:
    build, final = stages(DOCKERFILE.read_text(encoding="utf-8"))
    target, source = tmp_path / "opt", tmp_path / "src"
    source.mkdir()
    tools = shutil.which("g++") or shutil.which("c++")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    if tools is None:
        environment["FASTFORMER_BUILD_CPP"] = "0"  # the ops then run on plain PyTorch
    for word, rest in build.instructions:
        here = rest.replace("/opt/fastformer", str(target))
        if word == "ENV":
            for pair in here.split():
                name, _, value = pair.partition("=")
                if name != "PIP_NO_CACHE_DIR":  # a cache saves this machine gigabytes
                    environment[name] = value.replace(f"${name}", environment.get(name, ""))
        elif word == "COPY":
            names, _, _ = here.rpartition(" ")
            ignore = Path(f"{DOCKERFILE}.dockerignore").read_text(encoding="utf-8")
            for path in copied(ignore, ROOT) if names == "." else [ROOT / names]:
                copy(path, source / path.name)
        elif word == "RUN" and not here.startswith("apt-get "):  # those need root
            done = subprocess.run(here, shell=True, cwd=source, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, f"{here}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"

    run_environment = {**environment, **{k: v for k, v in final.environment().items() if k != "PATH"}}
    entry = [word.replace("/model", str(translator_folder)) for word in json.loads(final.of("ENTRYPOINT")[0])]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    entry[entry.index("--port") + 1], entry[entry.index("--host") + 1] = str(port), "127.0.0.1"
    entry[0] = str(target / "bin" / entry[0])
    server = subprocess.Popen(entry, cwd="/", env=run_environment)
    try:
        check = [word.replace(":8000/", f":{port}/") for word in health_command(final)]
        check[0] = str(target / "bin" / check[0])

        def is_healthy() -> bool:
            return subprocess.run(check, env=run_environment, capture_output=True).returncode == 0

        assert not is_healthy() or server.poll() is None
        for _ in range(120):
            if server.poll() is not None or is_healthy():
                break
            time.sleep(0.5)
        assert is_healthy()
        server.send_signal(signal.SIGSTOP)
        assert not is_healthy()  # a server that hangs is told from one that works
        server.send_signal(signal.SIGCONT)
        server.send_signal(getattr(signal, final.of("STOPSIGNAL")[0]))
        assert server.wait(60) == 0
    finally:
        server.kill()
        server.wait()


def copy(path: Path, to: Path) -> None:
    """Copies a file or a folder, without build products."""
    if path.is_dir():
        made = shutil.ignore_patterns("__pycache__", "*.so", ".so_stamp")
        shutil.copytree(path, to, symlinks=True, ignore=made, dirs_exist_ok=True)
    else:
        shutil.copy(path, to)
