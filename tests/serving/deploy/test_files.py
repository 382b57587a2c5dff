"""The Dockerfile and the compose file keep their promises, and name flags and files that exist."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import yaml

from fastformer.commands import _parsing
from fastformer.serving.limits import Limits
from tests.serving.deploy.dockerfile import DOCKERFILE, ROOT, copied, health_command, stages

BUILD, FINAL = stages(DOCKERFILE.read_text(encoding="utf-8"))
COMPOSE = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text(encoding="utf-8"))
SERVICE = COMPOSE["services"]["fastformer"]
ENTRY = json.loads(FINAL.of("ENTRYPOINT")[0])


def test_the_image_contains_only_the_build() -> None:
    assert BUILD.name == "build" and BUILD.image == FINAL.image
    assert FINAL.of("COPY") == ["--from=build /opt/fastformer /opt/fastformer"]
    assert "g++" not in " ".join(FINAL.of("RUN"))


def test_it_does_not_run_as_root() -> None:
    user = FINAL.of("USER")[-1]
    assert user.isdigit() and int(user) > 0
    words = [word for word, _ in FINAL.instructions]
    assert words.index("USER") < words.index("ENTRYPOINT")


def test_the_image_starts_the_server_with_valid_flags() -> None:
    assert ENTRY[:2] == ["fastformer", "serve"]
    module = importlib.import_module("fastformer.commands.serve")
    values = _parsing.parse(module, "serve", [*ENTRY[2:], *SERVICE["command"]])
    assert values["host"] == "0.0.0.0" and str(values["port"]) == FINAL.of("EXPOSE")[0]
    assert f":{values['port']}/health" in health_command(FINAL)[-1]


def test_the_container_has_secret_keys_and_a_read_only_file_system() -> None:
    (name,) = SERVICE["secrets"]
    assert f"/run/secrets/{name}" in SERVICE["command"] and "file" in COMPOSE["secrets"][name]
    assert not any("KEY" in variable for variable in SERVICE["environment"])
    assert SERVICE["read_only"] is True and SERVICE["cap_drop"] == ["ALL"]
    assert all(volume.endswith(":ro") for volume in SERVICE["volumes"])
    assert all(port.startswith("127.0.0.1:") for port in SERVICE["ports"])


def test_it_gets_the_time_that_draining_takes() -> None:
    limits = Limits()
    assert int(SERVICE["stop_grace_period"].removesuffix("s")) > limits.drain_delay_s + limits.drain_s


def test_the_build_gets_all_files_of_the_package() -> None:
    build = (ROOT / "deploy" / SERVICE["build"]["context"]).resolve()
    assert build == ROOT and (build / SERVICE["build"]["dockerfile"]) == DOCKERFILE
    if not (ROOT / "setup.py").exists():
        pytest.skip("the sources are not here")
    taken = copied(Path(f"{DOCKERFILE}.dockerignore").read_text(encoding="utf-8"), ROOT)
    assert all(path.exists() for path in taken)
    manifest = (ROOT / "MANIFEST.in").read_text(encoding="utf-8")
    assert {"setup.py", "pyproject.toml", "csrc", "kernels", "fastformer"} <= {path.name for path in taken}
    assert "README.md" in manifest  # the package's metadata reads it
