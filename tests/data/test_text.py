"""An error about broken text names the file and the line."""

from __future__ import annotations

import gzip
import logging
from pathlib import Path

import pytest

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
