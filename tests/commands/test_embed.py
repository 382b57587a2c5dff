"""Tests what `fastformer embed` and `fastformer rank` write, and where."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import fastformer
from fastformer.cli import main
from fastformer.encoding.batches import READ_AHEAD
from tests.encoding.folders import D_MODEL, TEXTS, bert, modules

pytest.importorskip("transformers", reason="the folders are written by transformers")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("encoder")
    bert(folder)
    return folder


@pytest.fixture(scope="module")
def ranker(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ranker")
    bert(folder, num_labels=1)
    return folder


def given(monkeypatch, texts) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("".join(f"{text}\n" for text in texts).encode())))


def test_lines_become_an_array(encoder, tmp_path, monkeypatch, capfdbinary) -> None:
    due = fastformer.Encoder(encoder).encode(TEXTS)
    out, file = tmp_path / "vectors.npy", tmp_path / "texts"
    file.write_text("\n".join(TEXTS))
    assert main(["embed", str(encoder), "--file", str(file), "--out", str(out), "--batch_tokens", "9"]) == 0
    assert np.array_equal(np.load(out), due) and [*tmp_path.iterdir()] in ([out, file], [file, out])
    given(monkeypatch, TEXTS)
    assert main(["embed", str(encoder), "--normalize"]) == 0
    said = capfdbinary.readouterr()
    assert b"cut" not in said.err
    rows = np.load(io.BytesIO(said.out))
    assert np.allclose(rows, due / np.linalg.norm(due, axis=1, keepdims=True), atol=1e-6)
    assert f"{len(TEXTS)} texts" in said.err.decode()


@pytest.mark.parametrize("text", [TEXTS[1], "two\nlines", "-red #1", ""])
def test_a_text_is_an_argument(encoder, tmp_path, monkeypatch, ran, text) -> None:
    given(monkeypatch, TEXTS)
    assert "1 text" in ran("embed", str(encoder), text, "--out", str(tmp_path / "v.npy")).err
    assert np.array_equal(np.load(tmp_path / "v.npy"), fastformer.Encoder(encoder).encode([text]))
    assert sys.stdin.buffer.tell() == 0  # standard input is somebody else's


def test_a_text_and_a_file_are_refused(encoder, tmp_path, ran) -> None:
    error = ran("embed", str(encoder), "a text", "--file", "texts", "--out", str(tmp_path / "v.npy"), code=2).err
    assert "'a text'" in error and "--file" in error and not [*tmp_path.iterdir()]


def test_a_folder_that_normalises_need_not(tmp_path, monkeypatch) -> None:
    bert(tmp_path / "run")
    modules(tmp_path / "run", ("Pooling", {"pooling_mode": "cls", "embedding_dimension": D_MODEL}), ("Normalize", {}))
    due = fastformer.Encoder(tmp_path / "run").encode(TEXTS, normalize=False)
    for flags, is_plain in (([], False), (["--normalize"], False), (["--normalize=false"], True)):
        given(monkeypatch, TEXTS)
        assert main(["embed", str(tmp_path / "run"), "--out", str(tmp_path / "v.npy"), *flags]) == 0
        lengths = np.linalg.norm(due, axis=1, keepdims=True) ** (not is_plain)
        assert np.allclose(np.load(tmp_path / "v.npy"), due / lengths, atol=1e-6)


def test_a_terminal_gets_no_numbers_and_a_count_of_texts(encoder, tmp_path, monkeypatch) -> None:
    pytest.importorskip("tqdm", reason="the bar is tqdm's")
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, screen := io.StringIO())
        monkeypatch.setattr(screen, "isatty", lambda: True)
    given(monkeypatch, TEXTS)
    assert main(["embed", str(encoder)]) == 1
    assert "--out" in screen.getvalue() and not sys.stdout.getvalue() and sys.stdin.buffer.tell() == 0
    assert main(["embed", str(encoder), "--out", str(tmp_path / "v.npy")]) == 0
    assert f"{len(TEXTS)}text" in screen.getvalue()


@pytest.mark.parametrize("terminals", [(), ("stdout",), ("stderr",), ("stdin",), ("stdout", "stderr")])
def test_only_a_terminal_that_would_get_the_numbers_is_refused(encoder, monkeypatch, terminals) -> None:
    given(monkeypatch, [])
    out = io.BytesIO()
    for name, stream in (("stdout", io.TextIOWrapper(out)), ("stderr", io.StringIO())):
        monkeypatch.setattr(sys, name, stream)
    for name in terminals:
        monkeypatch.setattr(getattr(sys, name), "isatty", lambda: True)
    assert main(["embed", str(encoder), TEXTS[0]]) == ("stdout" in terminals)
    sys.stdout.flush()
    assert out.getvalue()[1:6] == (b"" if "stdout" in terminals else b"NUMPY")


@pytest.mark.parametrize("kind", ["of text alone", "closed", "that never was open", "that takes nothing"])
def test_an_output_that_takes_no_numbers_is_an_error(encoder, monkeypatch, capsys, kind) -> None:
    taking: Any = io.TextIOWrapper(io.BytesIO())
    if kind == "closed":
        taking.close()
    if kind == "that takes nothing":
        monkeypatch.setattr(taking.buffer, "write", Mock(side_effect=OSError(28, "No space left on device")))
    if kind == "that never was open":
        taking = None
    monkeypatch.setattr(sys, "stdout", io.StringIO() if kind == "of text alone" else taking)
    assert main(["embed", str(encoder), TEXTS[0]]) == 1
    error = capsys.readouterr().err
    reasons = {"of text alone": "buffer", "that takes nothing": "No space left"}
    assert "standard output" in error and reasons.get(kind, "closed") in error and "bug" not in error


@pytest.mark.skipif(os.name != "posix", reason="permissions are POSIX")
@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
def test_the_file_has_the_permissions_of_any_new_file(encoder, tmp_path, monkeypatch, mask) -> None:
    before = os.umask(mask)
    try:
        given(monkeypatch, TEXTS)
        assert main(["embed", str(encoder), "--out", str(tmp_path / "v.npy")]) == 0
        (tmp_path / "other").touch()
    finally:
        assert os.umask(before) == mask
    assert (tmp_path / "v.npy").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_more_lines_than_fit_in_memory_at_a_time(encoder, tmp_path, monkeypatch) -> None:
    given(monkeypatch, [*TEXTS, *["a"] * READ_AHEAD])
    assert main(["embed", str(encoder), "--out", str(tmp_path / "v.npy")]) == 0
    rows = np.load(tmp_path / "v.npy")
    assert rows.shape == (len(TEXTS) + READ_AHEAD, D_MODEL) and np.array_equal(rows[-1], rows[TEXTS.index("a")])


def test_no_lines_are_an_empty_array(encoder, tmp_path, monkeypatch) -> None:
    given(monkeypatch, [])
    assert main(["embed", str(encoder), "--out", str(tmp_path / "v.npy")]) == 0
    assert np.load(tmp_path / "v.npy").shape == (0, D_MODEL)


def test_an_error_leaves_the_old_file(encoder, tmp_path, capsys, ran) -> None:
    out, file = tmp_path / "v.npy", tmp_path / "texts"
    out.write_bytes(b"old")
    file.write_bytes(b"a\n\xff\n")
    assert main(["embed", str(encoder), "--file", str(file), "--out", str(out)]) == 1
    assert "line 2" in capsys.readouterr().err and out.read_bytes() == b"old" and len([*tmp_path.iterdir()]) == 2
    assert "prompt_name" in ran("embed", str(encoder), "--file", str(file), "--prompt_name", "passage", code=1).err
    assert "--out" in ran("embed", str(encoder), "--out", str(tmp_path / "none" / "v.npy"), code=1).err


def test_a_place_that_is_no_file_stays(encoder, tmp_path, monkeypatch, ran) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for name in ("folder", "pipe", "link"):
        given(monkeypatch, TEXTS)
        assert name in ran("embed", str(encoder), "--out", str(tmp_path / name), code=1).err
        assert sys.stdin.buffer.tell() == 0  # nothing was computed first
    assert (tmp_path / "pipe").is_fifo() and (tmp_path / "link").is_symlink() and len([*tmp_path.iterdir()]) == 3


def test_a_full_disk_is_named_and_keeps_the_old_file(encoder, tmp_path, monkeypatch, ran) -> None:
    resource = pytest.importorskip("resource", reason="file size limits are POSIX")
    out = tmp_path / "v.npy"
    out.write_bytes(b"old")
    given(monkeypatch, ["a"] * 300)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
        assert out.name in ran("embed", str(encoder), "--out", str(out), code=1).err
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert out.read_bytes() == b"old" and [*tmp_path.iterdir()] == [out]


def test_cut_texts_are_counted(encoder, tmp_path, monkeypatch, ran) -> None:
    given(monkeypatch, ["bird " * 50, "a", "bird " * 60])
    assert "2 were cut" in ran("embed", str(encoder), "--out", str(tmp_path / "v.npy")).err


def test_passages_are_ranked(ranker, tmp_path, monkeypatch, capsys) -> None:
    due = fastformer.CrossEncoder(ranker).rank("a bird", TEXTS, return_documents=True)
    given(monkeypatch, TEXTS)
    assert main(["rank", str(ranker), "--query", "a bird"]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines() == [f"{each['score']:.6f}\t{each['text']}" for each in due] and not said.err
    file = tmp_path / "passages.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    flags = ["--file", f"{file}:text", "--top_k", "3", "--json_lines"]
    assert main(["rank", str(ranker), "--query", "a bird", *flags]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == due[:3]
    file.write_text(json.dumps({"text": "ein Vögelchen " + "the " * 60}))
    assert main(["rank", str(ranker), "--query", "a bird", *flags]) == 0
    said = capsys.readouterr()
    assert "ein Vögelchen" in said.out and said.err.startswith("cut 1 passage")


def test_ranking_needs_a_cross_encoder(encoder, ranker, monkeypatch, ran) -> None:
    given(monkeypatch, TEXTS)
    assert "Encoder" in ran("rank", str(encoder), "--query", "a", code=1).err
    assert "query" in ran("rank", str(ranker), "--query", " ", code=1).err
    assert main(["rank", str(ranker)]) == 2


@pytest.mark.slow
def test_many_lines_take_no_more_memory(encoder, tmp_path) -> None:
    """The peak memory of a separate process for 100,000 piped lines is that for 20,000."""
    peaks = []
    for count in (20_000, 100_000):
        program = (
            "import resource, sys\nfrom fastformer.cli import main\n"
            f"assert main(['embed', {str(encoder)!r}, '--out', {str(tmp_path / 'v.npy')!r}]) == 0\n"
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)"
        )
        lines = "".join(f"the bird sings over {number} hills\n" for number in range(count)).encode()
        done = subprocess.run([sys.executable, "-c", program], input=lines, capture_output=True, env={**os.environ})
        assert done.returncode == 0, done.stderr.decode()
        assert np.load(tmp_path / "v.npy", mmap_mode="r").shape == (count, D_MODEL)
        peaks.append(int(done.stdout))
    assert peaks[1] < peaks[0] + 40, peaks
