"""An error about broken text names the file and the line."""

from __future__ import annotations

import bz2
import gzip
import importlib
import io
import logging
import lzma
import os
import sys
import threading
from pathlib import Path

import pytest

from fastformer.data.files import open_bytes, read_bytes
from fastformer.data.filters import PairFilter
from fastformer.data.text import (
    MAX_LINE,
    BadLine,
    parse_lines,
    read_documents,
    read_lines,
    read_pairs,
    read_text,
    read_tsv,
)


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_line_ends_and_byte_order_mark(tmp_path) -> None:
    file = write(tmp_path / "a", b"\xef\xbb\xbfeins\r\nzw\xc3\xb6lf\r\n")
    assert read_lines(file) == ["eins", "zwölf"]
    assert read_lines(write(tmp_path / "b", b"no end")) == ["no end"]


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"", r"\ba is empty"),
        (b" \n\n", r"\ba is empty"),
        (b"one\n\nthree\n", "a, line 2"),
        (b"one\ntw\xff\n", "a, line 2: .*0xff"),
        (b"x" * 100_000, f"a, line 1: .*{MAX_LINE:,}.*100,000"),
    ],
)
def test_broken_lines(tmp_path, data, named) -> None:
    with pytest.raises(ValueError, match=named):
        read_lines(write(tmp_path / "a", data))


STRANGE = "a\x00b\x0bc\x0cd\x1ce\x1df\x85g\u2028h\u2029i\rj"  # str.splitlines would make ten lines of it


def test_lines_end_only_at_line_feeds(tmp_path) -> None:
    data = f"{STRANGE}\nend\r\n".encode()
    file = write(tmp_path / "a", data)
    assert read_lines(file) == [STRANGE, "end"]
    assert read_pairs(file, file) == [(STRANGE, STRANGE), ("end", "end")]
    assert read_text(file) == f"{STRANGE}\nend\n"
    assert read_tsv(write(tmp_path / "b", f"{STRANGE}\t{STRANGE}\n".encode())) == [(STRANGE, STRANGE)]
    assert read_pairs(write(tmp_path / "c", b"one\ttwo\n"), write(tmp_path / "d", b"x\n")) == [("one\ttwo", "x")]


BAD = b"ok\n\nb\xff\nok\n \n" + b"x" * (MAX_LINE + 1) + b"\n\n\nok\n" + b"y" * MAX_LINE + b"\n"  # 10 lines


def test_all_bad_lines_are_named_at_once(tmp_path) -> None:
    file = write(tmp_path / "a", BAD)
    message = r"a, line 2: .*\b6 of 10\b.*\b3 \(.*\b5 \(.*\b6 \(.*\b7 \("
    with pytest.raises(ValueError, match=message):
        read_lines(file)
    with pytest.raises(ValueError, match=message + ".*--skip_bad_lines"):
        read_pairs(file, write(tmp_path / "b", b"ok\n" * 10))
    # Empty lines allowed, the others still are what they were; numbers begin where the caller says.
    lines = parse_lines(BAD, "a", allow_empty=True, first=11)
    assert [line.number for line in lines if isinstance(line, BadLine)] == [13, 16]


def test_bad_lines_are_dropped_on_both_sides_and_counted(tmp_path, caplog) -> None:
    good = "".join(f"{i}\n" for i in range(1, 11)).encode()
    source = write(tmp_path / "s", BAD)
    target = write(tmp_path / "t", good.replace(b"4\n", b"\n").replace(b"5\n", b"\n"))
    with caplog.at_level(logging.WARNING):
        assert read_pairs(source, target, skip_bad=True) == [("ok", "1"), ("ok", "9"), ("y" * MAX_LINE, "10")]
    (said,) = caplog.messages
    for part in ("7 of 10", str(source), str(target), "(lines 2, 4, 5, 7, 8)", "(line 3)", "(line 6)"):
        assert part in said, said
    with pytest.raises(ValueError, match=r"\b9 and 10\b"):  # no guess which line is missing
        read_pairs(source, write(tmp_path / "u", good.removeprefix(b"1\n")), skip_bad=True)
    with pytest.raises(ValueError, match=r"\bline 1\b.*\bline 2\b"):
        read_pairs(write(tmp_path / "v", b"\xff\nx\n"), write(tmp_path / "w", b"x\n\n"), skip_bad=True)


def test_bad_lines_of_a_tsv(tmp_path, caplog) -> None:
    file = write(tmp_path / "a", b"one\teins\r\ntwo\na\tb\tc\n\xfe\tx\nx\t \n\ttwo\nsix\tsechs\n")
    with pytest.raises(ValueError, match=r"\bline 2\b.*\b1 field\b.*\b5 of 7\b.*--skip"):
        read_tsv(file)
    with caplog.at_level(logging.WARNING):
        assert read_tsv(file, skip_bad=True) == [("one", "eins"), ("six", "sechs")]
    for part in ("1 field (line 2)", "3 fields (line 3)", "(line 4)", "(lines 5, 6)"):
        assert part in caplog.messages[0]


def test_bad_lines_of_a_text(tmp_path, caplog) -> None:
    long = "x" * (MAX_LINE + 1)
    file = write(tmp_path / "a", f"one\r\n\r\n{long}\n".encode() + b"\xfe\nend")
    with pytest.raises(ValueError, match=r"\bline 4\b.*--skip_bad_lines"):
        read_text(file)
    with caplog.at_level(logging.WARNING):
        assert read_text(file, skip_bad=True) == f"one\n\n{long}\nend"
    assert "1 of 5 lines" in caplog.text and "1 not UTF-8 (line 4)" in caplog.text


def test_each_file_of_a_folder_is_a_document(tmp_path) -> None:
    for name, text in (("b.txt", "two\n"), ("a.txt", "one\n\nx"), ("c.md", "no")):
        write(tmp_path / name, text.encode())
    assert read_documents(tmp_path) == ["one\n\nx", "two\n"]
    assert read_documents(tmp_path / "c.md") == ["no"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"\*\.txt"):
        read_documents(tmp_path / "empty")


def test_odd_files_of_a_folder_are_skipped_and_counted(tmp_path, caplog) -> None:
    for name, data in {
        "b.txt": b"two\n", "A.TXT": b"one", "c.txt.gz": gzip.compress(b"three"), "empty.txt": b"",
        "blank.txt": b" \n\n", "._a.txt": b"\x00\x05\x16\x07\xff", ".B.TXT": b"hidden", "notes.md": b"no",
        "latin.txt": b"\xff",
    }.items():  # fmt: skip
        write(tmp_path / name, data)
    (tmp_path / "sub.txt").mkdir()
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"\blatin\.txt, line 1\b"):
        read_documents(tmp_path)
    with caplog.at_level(logging.INFO):
        assert read_documents(tmp_path, skip_bad=True) == ["one", "two\n", "three"]
    said = caplog.messages[-1]
    counts = ("2 empty", "2 hidden", "1 of another kind", "1 in a subfolder", "1 not a file", "1 not UTF-8")
    assert all(part in said for part in ("read 3 documents", *counts)), said
    for file in tmp_path.iterdir():
        if file.name not in ("empty.txt", "sub.txt"):
            file.unlink()
    with pytest.raises(ValueError, match=r"\b1 empty\b.*\b1 in\b"):
        read_documents(tmp_path)


# Compressed files, pipes and standard input are read as files.


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


# Filters of training pairs drop the pairs that they describe, and count them by reason.


PAIRS = [("one", "eins"), ("one ", "one"), ("one", "eins"), ("a", "x" * 9), ("  a  ", "b"), ("x" * 20, "y" * 20)]


def test_each_filter_alone() -> None:
    for options, left_out in (
        ({"max_length_ratio": 8.9}, {3: "of a length ratio above 8.9"}),
        ({"max_length_ratio": 9.0}, {}),
        ({"min_chars": 2}, {3: "of fewer than 2 characters", 4: "of fewer than 2 characters"}),
        ({"min_chars": 1}, {}),
        ({"min_chars": 3}, {3: "of fewer than 3 characters", 4: "of fewer than 3 characters"}),  # "one" has three
        ({"max_chars": 19}, {5: "of more than 19 characters"}),
        ({"max_chars": 20}, {}),
        ({"drop_duplicates": True}, {2: "duplicate"}),
        ({"drop_identical": True}, {1: "with identical sides"}),
    ):
        kept, reasons = PairFilter(**options).apply([PAIRS])
        assert kept == [[pair for place, pair in enumerate(PAIRS) if place not in left_out]], options
        assert sorted(reasons.elements()) == sorted(left_out.values())


def test_filters_together_count_a_pair_once() -> None:
    every = PairFilter(max_length_ratio=3, min_chars=2, max_chars=10, drop_duplicates=True, drop_identical=True)
    kept, reasons = every.apply([PAIRS[:2], PAIRS[2:], [("one", "eins"), ("two", "zwei")]])
    assert kept == [[("one", "eins")], [], [("two", "zwei")]]  # of a pair in two corpora the first stays
    assert reasons.total() == sum(map(len, (PAIRS[:2], PAIRS[2:], [1, 2]))) - 2 and reasons["duplicate"] == 2
    assert every and not PairFilter()
