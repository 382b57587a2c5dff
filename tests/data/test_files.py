"""Compressed files, pipes and standard input are read as files."""

from __future__ import annotations

import bz2
import gzip
import importlib
import io
import lzma
import os
import sys
import threading

import pytest

from fastformer.data.files import open_bytes, read_bytes
from fastformer.data.text import read_lines, read_pairs, read_text, read_tsv

TEXT = "".join(f"line {i} zwölf\n" for i in range(5000)).encode()
PACKERS = {"gzip": gzip.compress, "bzip2": bz2.compress, "xz": lzma.compress}


def zstandard():
    """Returns a compressor from any installed package for Zstandard."""
    for name in ("compression.zstd", "zstandard"):
        try:
            return importlib.import_module(name).compress
        except ImportError:
            continue
    return pytest.skip("nothing here reads Zstandard: neither Python 3.14 nor the package zstandard")


@pytest.mark.parametrize("kind", [*PACKERS, "Zstandard"])
def test_compressed_by_content(tmp_path, kind) -> None:
    pack = PACKERS.get(kind) or zstandard()
    file = tmp_path / "a.txt"  # its name says nothing
    file.write_bytes(pack(TEXT))
    assert read_bytes(file) == TEXT
    with open_bytes(file) as lines:
        assert b"".join(lines) == TEXT
    file.write_bytes(pack(TEXT[:100]) + pack(TEXT[100:]))  # parts, one behind another
    assert read_bytes(file) == TEXT
    other = tmp_path / "b.de"
    other.write_bytes(TEXT)
    assert read_pairs(file, other) == list(zip(read_lines(other), read_lines(other), strict=True))
    changed = [] if kind == "Zstandard" else [pack(TEXT)[:60] + b"?" * 9 + pack(TEXT)[69:]]  # it has no checksum
    for damaged in (pack(TEXT)[:-20], pack(TEXT)[:200], *changed):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"\ba\.txt\b.*{kind}"):
            read_pairs(file, other)


def test_zstandard_without_its_library(tmp_path, monkeypatch) -> None:
    file = tmp_path / "a.zst"
    file.write_bytes(b"\x28\xb5\x2f\xfd" + b"x" * 20)
    for name in ("compression.zstd", "zstandard"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"\ba\.zst\b.*fastformer\[zstd\]"):
        read_lines(file)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"PK\x03\x04...", "zip archive"),
        ("one\ntwo\n".encode("utf-16"), "UTF-16"),
        (b"PAR1....", "Parquet"),
        (b"ARROW1\0\0...", "Arrow"),
        (b"a.txt".ljust(257, b"\0") + b"ustar\x0000" + b"\0" * 300, "tar archive"),
    ],
)
def test_values_that_are_not_text_are_named(tmp_path, data, message) -> None:
    for packed in (data, gzip.compress(data)):
        (tmp_path / "a").write_bytes(packed)
        with pytest.raises(ValueError, match=message):
            read_text(tmp_path / "a", skip_bad=True)


def test_text_that_only_looks_compressed(tmp_path) -> None:
    for data in (b"BZh9 is a word\n", b"B", b"BZ\n", b"PK, what is that?\n", b"(\n", b"PAR 1\n"):
        (tmp_path / "a").write_bytes(data)
        assert read_bytes(tmp_path / "a") == data


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="named pipes are POSIX")
def test_pipes(tmp_path) -> None:
    for data in (b"one\teins\ntwo\tzwei\n", gzip.compress(b"one\teins\ntwo\tzwei\n")):
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)

        def write(pipe=pipe, data=data) -> None:
            with open(pipe, "wb", buffering=0) as file:
                for byte in data:
                    file.write(bytes([byte]))

        threading.Thread(target=write, daemon=True).start()
        assert read_tsv(pipe) == [("one", "eins"), ("two", "zwei")]
        pipe.unlink()
        reading, writing = os.pipe()  # as of <(zcat a.gz)
        os.write(writing, data)
        os.close(writing)
        assert read_tsv(f"/dev/fd/{reading}") == [("one", "eins"), ("two", "zwei")]
        os.close(reading)


def test_standard_input(monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(gzip.compress(TEXT))))
    assert read_bytes("-") == TEXT
    assert not sys.stdin.closed
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(ValueError, match=r"\bstandard input\b"):
        read_bytes("-")
