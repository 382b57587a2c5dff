"""Tests how commands read lines."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import sys
import threading
import time
from pathlib import Path

import pytest

from fastformer.cli import main
from fastformer.commands._lines import PipeLines, file_lines
from fastformer.data import ByteTokenizer
from fastformer.data.text import MAX_LINE
from fastformer.models import GPT
from tests.generation.small import tiny

MARKED = b"\xef\xbb\xbfone\r\ntwo birds"  # as an editor of Windows writes it, without an end of the last line
# Each command that reads lines, with flags for which every character of them counts in what it prints.
READERS: dict[str, list[str]] = {
    "translate": ["translate", "translator", "--num_beams", "2", "--n_best", "2", "--max_new_tokens", "6"],
    "generate": ["generate", "gpt", "--greedy", "--max_new_tokens", "4"],
    "score": ["score", "gpt", "--by_line"],
    "embed": ["embed", "encoder"],
    "rank": ["rank", "encoder", "--query", "a bird"],
    "chat": ["chat", "chat", "--greedy", "--max_new_tokens", "4"],
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """Returns a folder with a small model of each kind."""
    pytest.importorskip("transformers", reason="the folders are written by transformers")
    from tests.checkpoints.decoders import llama3
    from tests.encoding.folders import bert
    from tests.generation.chat_templates import CHATML
    from tests.generation.test_chat import with_template

    place = tmp_path_factory.mktemp("lines")
    tiny(max_len=40).save_pretrained(place / "translator", ByteTokenizer())
    tiny(GPT, max_len=40).save_pretrained(place / "gpt", ByteTokenizer())
    (place / "encoder").mkdir()
    bert(place / "encoder", num_labels=1)
    llama3(place / "chat")
    with_template(place / "chat", CHATML)
    return place


@pytest.mark.parametrize("command", READERS)
def test_lines_are_read_alike_from_files_and_pipes(command, folders, tmp_path, monkeypatch, capfdbinary) -> None:
    """A byte order mark, line ends of Windows, a last line without an end and compression change no result."""
    monkeypatch.chdir(folders)
    words, file = READERS[command], tmp_path / "lines"

    def outcome(way: str, content: bytes) -> tuple[int, bytes, bytes]:
        file.write_bytes(content)
        with open(file, "rb") as stream, io.BytesIO(content) as memory:
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(stream if way == "pipe" else memory, encoding="utf-8"))
            flags = {"file": ["--file", str(file)], "-": ["--file", "-"]}.get(way, [])
            code = main([*words, *flags])
        return code, *capfdbinary.readouterr()

    ways = {"chat": ["stdin", "pipe"], "score": ["file", "-"]}.get(command, ["file", "-", "pipe"])
    code, due, _ = outcome(ways[0], b"one\ntwo birds\n")
    assert code == 0 and due
    twice = [outcome(way, MARKED[:3] + MARKED)[:2] for way in ways]  # the second mark is text
    assert twice == [twice[0]] * len(ways)
    assert (twice[0] == (0, due)) == (command == "embed")  # whose tokenizer drops it
    for way in ways:
        for content in (MARKED, gzip.compress(MARKED)):
            assert outcome(way, content)[:2] == (0, due), way
        code, _, err = outcome(way, b"one\ntwo\xff\n")
        assert code == 1 and b"line 2: expected UTF-8" in err, (way, err)


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


def test_a_row_of_a_table_may_be_longer_than_a_line_of_training(tmp_path) -> None:
    long = "x" * (MAX_LINE + 1)
    (tmp_path / "rows.csv").write_text(f"text\n{long}\ntwo birds\n")
    assert list(file_lines(f"{tmp_path}/rows.csv:text")) == [long, "two birds"]


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


@pytest.mark.parametrize("command", READERS)
def test_a_standard_input_that_is_closed_is_named(command, folders, monkeypatch, capsys) -> None:
    monkeypatch.chdir(folders)
    monkeypatch.setattr(sys, "stdin", None)
    assert main([*READERS[command], *([] if command == "chat" else ["--file", "-"])]) == 1
    error = capsys.readouterr().err
    assert "standard input" in error and "bug" not in error
