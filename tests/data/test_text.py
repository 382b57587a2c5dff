"""Broken text is named by file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastformer.data.text import MAX_LINE, read_lines, read_pairs, read_text, read_tsv


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_line_ends_and_byte_order_mark(tmp_path) -> None:
    file = write(tmp_path / "a", b"\xef\xbb\xbfeins\r\nzw\xc3\xb6lf\r\n")
    assert read_lines(file) == ["eins", "zwölf"]
    assert read_lines(write(tmp_path / "b", b"no end")) == ["no end"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "a is empty: expected at least one line"),
        (b" \n\n", "a is empty"),
        (b"one\n\nthree\n", "a, line 2: expected text, got an empty line"),
        (b"one\ntw\xff\n", "a, line 2: expected UTF-8, got byte 0xff at position 2"),
        (b"x" * 100_000, f"a, line 1: expected at most {MAX_LINE:,} characters, got 100,000"),
    ],
)
def test_broken_lines(tmp_path, data, message) -> None:
    with pytest.raises(ValueError, match=message):
        read_lines(write(tmp_path / "a", data))


def test_missing_file(tmp_path) -> None:
    with pytest.raises(ValueError, match="there is no file"):
        read_lines(tmp_path / "nothing")


def test_pairs(tmp_path) -> None:
    source, target = write(tmp_path / "s", b"one\ntwo\n"), write(tmp_path / "t", b"eins\nzwei\n")
    assert read_pairs(source, target) == [("one", "eins"), ("two", "zwei")]
    with pytest.raises(ValueError, match="as many lines in .*, got 1 and 2"):
        read_pairs(source, write(tmp_path / "u", b"eins\n"))


def test_tsv(tmp_path) -> None:
    assert read_tsv(write(tmp_path / "a", b"one\teins\r\ntwo\tzwei\n")) == [("one", "eins"), ("two", "zwei")]
    for broken in (b"one\teins\ntwo\n", b"one\teins\ntwo\t \n", b"one\teins\na\tb\tc\n"):
        with pytest.raises(ValueError, match="line 2: expected source<TAB>target"):
            read_tsv(write(tmp_path / "a", broken))


def test_text(tmp_path) -> None:
    assert read_text(write(tmp_path / "a", b"one\r\n\r\ntwo")) == "one\n\ntwo"
    with pytest.raises(ValueError, match="line 3: expected UTF-8, got byte 0xfe"):
        read_text(write(tmp_path / "a", b"one\ntwo\n\xfe"))
