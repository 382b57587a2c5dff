"""Tests the precedence of the flags of `fastformer serve`, and its addresses without keys."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastformer import Encoder
from fastformer.cli import main
from tests.encoding.folders import bert
from tests.serving.conftest import translator_folder as translator_folder

pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Records the servers that the command would run, and the addresses as `places` of each."""
    found: list[Any] = []

    def run(server: Any, places: Any) -> None:
        server.places = places
        found.append(server)

    monkeypatch.setattr("fastformer.serving.run.Server.run", run)
    monkeypatch.setattr("fastformer.serving.run.bound", lambda host, port: (host, port))
    monkeypatch.delenv("FASTFORMER_API_KEYS", raising=False)
    return found


def test_flags_override_the_file_and_the_file_overrides_defaults(translator_folder, started, tmp_path) -> None:
    config = tmp_path / "serve.yaml"
    config.write_text(
        "port: 9000\nmax_waiting: 7\nmax_texts: 9\nnum_beams: 3\nlength_penalty: 0\ntimeout_s: 5\nsource_lang: en\n"
    )
    # Two of the flags have the values that they have by default.
    words = ["--config", str(config), "--port", "8000", "--max_waiting=256", "--num_beams", "2", "--target_lang", "de"]
    assert main(["serve", str(translator_folder), *words]) == 0
    (server,) = started
    service = server.config.app.state.service
    assert server.places == ("127.0.0.1", 8000)
    limits = service.limits
    assert (limits.max_waiting, limits.max_texts, limits.timeout_s, limits.max_beams) == (256, 9, 5.0, 8)
    assert (service.config.num_beams, service.config.length_penalty) == (2, 0)
    assert service.codes.defaults() == ("en", "de")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("prot: 9000", "port"),
        ("port: '9000'", "port"),
        ("port: 65536", "port"),
        ("max_waiting: 0", "max_waiting"),
        ("timeout_s: .nan", "timeout_s"),
        ("num_beams: many", "num_beams"),
        ("access_log: 1", "access_log"),
        ("folder: x", "folder"),
        ("config: x", "config"),
        ("", "settings"),
        ("- port", "settings"),
    ],
)
def test_a_mistake_in_a_file_is_an_error(started, tmp_path, ran, text, named) -> None:
    (config := tmp_path / "serve.yaml").write_text(text)
    said = ran("serve", str(tmp_path), "--config", str(config), code=1).err
    assert named in said and str(config) in said and not started


@pytest.mark.parametrize("flag", ["--port=65536", "--max_waiting=0", "--nope=1", "--num_beams=x", "--precision=int7"])
def test_a_mistake_in_a_flag_is_an_error(started, tmp_path, capsys, flag) -> None:
    assert main(["serve", str(tmp_path), flag]) != 0
    assert flag[2:].partition("=")[0] in capsys.readouterr().err and not started


LOCAL = ["127.0.0.1", "LocalHost", "127.0.0.9", "localhost", "::1", "[::1]"]
OPEN = ["0.0.0.0", "::", "192.168.1.2", "server.example", ""]


def test_other_machines_need_a_key(translator_folder, started, tmp_path, ran, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, keys, config = str(translator_folder), tmp_path / "keys", tmp_path / "serve.yaml"
    keys.write_text("a-key\n")
    for host in LOCAL:
        assert main(["serve", folder, f"--host={host}"]) == 0
    assert len(started) == len(LOCAL) and not any(one.config.app.state.has_keys for one in started)
    started.clear()
    for host in OPEN:
        assert "--keys_file" in ran("serve", folder, f"--host={host}", code=1).err
        config.write_text(f"host: '{host}'")  # a file doesn't open it either
        assert "--keys_file" in ran("serve", folder, "--config", str(config), code=1).err
    assert not started
    for flags, has_keys in ((["--keys_file", str(keys)], True), (["--no_auth"], False)):
        assert main(["serve", folder, "--host=0.0.0.0", *flags]) == 0
        assert started.pop().config.app.state.has_keys == has_keys
    assert main(["serve", folder, "--no_auth", "--keys_file", str(keys)]) == 1  # which of them is meant?
    monkeypatch.setenv("FASTFORMER_API_KEYS", "another")
    assert main(["serve", folder, "--host=0.0.0.0"]) == 0 and started.pop().config.app.state.has_keys
    assert "FASTFORMER_API_KEYS" in ran("serve", folder, "--no_auth", code=1).err and not started


@pytest.mark.parametrize(
    ("flags", "is_let"),
    [
        ([], False), (["--hosts=a.example"], False), (["--hosts=b.example, evil.example"], True), (["--hosts=*"], True),
        (["--host=::1"], False), (["--host=0.0.0.0", "--no_auth"], True),
        (["--host=0.0.0.0", "--no_auth", "--hosts=a.example"], False),
    ],
)  # fmt: skip
def test_without_keys_other_names_of_this_machine_are_refused(flags, is_let, translator_folder, started) -> None:
    testclient = pytest.importorskip("starlette.testclient", reason="the httpx library is not installed")
    assert main(["serve", str(translator_folder), *flags]) == 0
    client = testclient.TestClient(started.pop().config.app)
    for host, status in (("evil.example", 200 if is_let else 403), ("localhost:8000", 200)):
        assert client.get("/v1/info", headers={"Host": host}).status_code == status


def test_a_missing_file_of_keys_is_an_error(started, tmp_path: Path, capsys) -> None:
    assert main(["serve", str(tmp_path), "--keys_file", str(tmp_path / "nowhere")]) == 1
    assert "nowhere" in capsys.readouterr().err and not started


def test_a_port_that_is_taken_and_an_unknown_host_are_errors_before_the_model_is_read(tmp_path: Path, ran) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = ran("serve", str(tmp_path / "nowhere"), "--port", str(port), code=1).err
        assert str(port) in said and "nowhere" not in said
    said = ran("serve", str(tmp_path / "nowhere"), "--no_auth", "--host", "server.invalid", code=1).err
    assert "server.invalid" in said and "nowhere" not in said


def test_sockets_are_bound_to_all_addresses_of_a_host() -> None:
    from fastformer.serving.run import bound

    for host, names in (("127.0.0.1", {"127.0.0.1"}), ("localhost", {"127.0.0.1", "::1"}), ("[::1]", {"::1"})):
        if "::1" in names and not _has_ipv6():
            names = names - {"::1"}
        if not names:
            continue
        found = bound(host, 0)
        try:
            assert {one.getsockname()[0] for one in found} <= names and found
            with pytest.raises(ConnectionRefusedError):  # nothing listens yet
                socket.create_connection(found[0].getsockname()[:2], timeout=5)
        finally:
            for one in found:
                one.close()


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as own:
            own.bind(("::1", 0))
    except OSError:
        return False
    return True


def test_a_calibration_is_read_from_texts_or_numbers(started, tmp_path, ran) -> None:
    (tmp_path / "encoder").mkdir()
    bert(tmp_path / "encoder")
    texts = tmp_path / "texts.txt"
    texts.write_text("the dog\na bird\nthe hills\n")
    rows = Encoder(tmp_path / "encoder").encode(texts.read_text().splitlines())
    np.save(tmp_path / "rows.npy", rows)
    for file in (texts, tmp_path / "rows.npy"):
        assert main(["serve", str(tmp_path / "encoder"), f"--calibration={file}"]) == 0
        ranges = started[-1].config.app.state.service.encoder.ranges
        np.testing.assert_array_equal(ranges, [rows.min(0), rows.max(0)])
    (tmp_path / "bad.npy").write_bytes(b"\x93NUMPY")
    np.save(tmp_path / "objects.npy", np.array([{}]))
    np.save(tmp_path / "narrow.npy", rows[:, 1:])
    with open(tmp_path / "several.npy", "wb") as several:
        np.savez(several, rows=rows)
    (tmp_path / "zip.npy").write_bytes((tmp_path / "several.npy").read_bytes()[:99])
    (tmp_path / "open.npy").write_bytes(b"\x93NUMPY\x01\0\x04\0((((")
    for name in ("none.npy", "none.txt", "bad.npy", "several.npy", "zip.npy", "open.npy", "objects.npy", "narrow.npy"):
        told = ran("serve", str(tmp_path / "encoder"), f"--calibration={tmp_path / name}", code=1).err
        assert "this is a bug" not in told
