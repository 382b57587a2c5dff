"""Tests how commands read lines."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import threading
import time

import pytest

from fastformer.commands._lines import PipeLines


def piped(data: bytes) -> tuple[PipeLines, int]:
    """Returns the lines of a pipe into which a thread writes."""
    reading, writing = os.pipe()

    def write() -> None:
        with os.fdopen(writing, "wb") as sink:
            sink.write(data)

    threading.Thread(target=write, daemon=True).start()
    return PipeLines(reading), reading


def rest_of(lines: PipeLines) -> list[bytes | None]:
    found: list[bytes | None] = []
    try:
        while True:
            found.append(lines.get(wait=True))
    except EOFError:
        return found


def test_a_long_line_of_a_pipe_takes_time_in_proportion() -> None:
    long = b"x" * (40 << 20)
    lines, reading = piped(long + b"\nend")
    began = time.process_time()
    assert lines.get(wait=True) == long
    assert time.process_time() - began < 2  # about 0.1; copying the line for each piece takes over 5
    assert rest_of(lines) == [b"end"]
    os.close(reading)


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_compressed_standard_input(pack) -> None:
    lines, reading = piped(pack(b"one\n\ntwo\n" + b"x" * 100_000))
    assert rest_of(lines) == [b"one", b"", b"two", b"x" * 100_000]
    os.close(reading)
    lines, reading = piped(pack(b"one\n" + os.urandom(100_000))[:-50])
    with pytest.raises(ValueError, match=r"\bdamaged\b"):
        rest_of(lines)
    os.close(reading)


def test_a_few_bytes_that_look_compressed_are_text() -> None:
    for text in (b"B", b"BZ", b"BZh is a word", b"\x1f", b""):
        lines, reading = piped(text)
        assert rest_of(lines) == ([text] if text else [])
        os.close(reading)
