"""Reads text files as lines; bad lines are named by file and number, and are refused, or omitted and counted.

A line ends at LF or CRLF and nowhere else: other characters that some programs break lines at (form feed, U+2028, ...)
are text. Files may be compressed, pipes, or standard input ("-"; see `files`). "pairs.jsonl:en" is a column of a table
(see `tables`): each row is one line, even if its text has line ends.
"""

from __future__ import annotations

import io
import json
import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fastformer.data.files import read_bytes, shown
from fastformer.data.tables import BadRow, column_of, columns, file_of, kind_of, stream_column

logger = logging.getLogger("fastformer")

MAX_LINE = 20_000  # characters; a longer line is hardly a sentence, and would fill a batch
_SHOWN = 5  # the most bad lines that a message names
_AS_COLUMNS = "--train_source FILE.tsv:1 --train_target FILE.tsv:2"
_HINT = "; `fastformer train` leaves bad lines out with --skip_bad_lines"


@dataclass(frozen=True)
class BadLine:
    """A line that can't be used.

    Attributes:
        name: the name of the file.
        number: the number of the line, from 1.
        kind: the fault in a word or two, by which faults are counted.
        message: says what was expected and what was found.
    """

    name: str
    number: int
    kind: str
    message: str


def read_lines(path: str | os.PathLike[str]) -> list[str]:
    """Reads the lines of a UTF-8 file, without line ends and without a byte order mark.

    Args:
        path: the file.

    Raises:
        ValueError: no such file, an empty file, or bad lines: bytes that are not UTF-8, an empty line, a line of over
            MAX_LINE characters. The message names the file, counts the bad lines, and names the first few.
    """
    parsed = read_rows(path)
    bad = [line for line in parsed if isinstance(line, BadLine)]
    if bad:
        raise ValueError(_refusal(bad, len(parsed)))
    return [line for line in parsed if isinstance(line, str)]


def read_rows(
    path: str | os.PathLike[str], *, allow_empty: bool = False, max_line: int | None = MAX_LINE
) -> list[str | BadLine]:
    """Reads the lines of a file or the texts of a column; returns a description of the fault for each bad one.

    Args:
        path: the file, or FILE:COLUMN.
        allow_empty: accept empty lines as empty strings.
        max_line: the most characters of a line; None: any number.

    Raises:
        ValueError: no such file or column, an empty file, a table without a column, damaged data.
        ImportError: the package that reads the file is not installed.
    """
    if column_of(path) is None:
        return list(parse_lines(_read(path), shown(os.fspath(path)), allow_empty=allow_empty, max_line=max_line))
    rows = list(stream_rows(path, allow_empty=allow_empty, max_line=max_line))
    if not rows:
        raise ValueError(f"{file_of(path)} is empty: expected at least one row")
    return rows


def stream_rows(
    path: str | os.PathLike[str], *, allow_empty: bool = False, max_line: int | None = MAX_LINE
) -> Iterator[str | BadLine]:
    """Yields the texts of a column or their faults, as `read_rows`; for lines of a file see `streams`."""
    name, column = os.fspath(path), column_of(path)
    if column is None:
        raise ValueError(f"expected a column of a table, FILE:COLUMN, got {name}")
    for number, text in stream_column(*column):
        if isinstance(text, BadRow):
            yield BadLine(name, number, text.kind, text.message)
        else:
            yield judged(text, name, number, allow_empty, max_line)


def read_pairs(
    source: str | os.PathLike[str], target: str | os.PathLike[str], *, skip_bad: bool = False
) -> list[tuple[str, str]]:
    """Reads two line-aligned files as pairs.

    Args:
        source, target: the files.
        skip_bad: omit pairs with a bad line on either side, and log how many and why, instead of raising.

    Raises:
        ValueError: see `read_lines`; or different numbers of lines.
    """
    sources, targets = read_rows(source), read_rows(target)
    if len(sources) != len(targets):
        raise ValueError(misaligned(source, target, len(sources), len(targets)))
    return _good(list(zip(sources, targets, strict=True)), f"{source} and {target}", skip_bad)


def misaligned(
    source: str | os.PathLike[str], target: str | os.PathLike[str], source_lines: int, target_lines: int
) -> str:
    """Returns the error for two files with different numbers of lines."""
    return (
        f"expected as many lines in {target} as in {source}, got {target_lines:,} and {source_lines:,}: "
        "the two files must be aligned line by line"
    )


def read_tsv(path: str | os.PathLike[str], *, skip_bad: bool = False) -> list[tuple[str, str]]:
    """Reads a file of "source<TAB>target" lines as pairs.

    Args:
        path: the file.
        skip_bad: omit bad lines, and log how many and why, instead of raising.

    Raises:
        ValueError: see `read_lines`; or a line without exactly one tab and text on both sides.
    """
    check_tsv(path)
    return _good(list(parse_tsv(_read(path, is_tsv=True), shown(str(path)))), str(path), skip_bad)


def check_tsv(path: str | os.PathLike[str]) -> None:
    """Raises a ValueError if a path that must name a file of source<TAB>target lines names a column."""
    if column_of(path) is not None:
        raise ValueError(f"expected a file of source<TAB>target lines, got one column, {path}: {_AS_COLUMNS}")


def parse_tsv(data: bytes, name: str, *, first: int = 1) -> Iterator[tuple[str | BadLine, str | BadLine]]:
    """Yields the two sides of each source<TAB>target line of some bytes, or the line's fault in the place of both."""
    for number, line in enumerate(parse_lines(data, name, first=first), first):
        if isinstance(line, BadLine):
            yield line, line
            continue
        fields = line.split("\t")
        if len(fields) == 2 and all(field.strip() for field in fields):
            yield fields[0], fields[1]
            continue
        kind = "with an empty side" if len(fields) == 2 else f"of {len(fields)} field{'s' * (len(fields) > 1)}"
        hint = f"; of more columns name two: {_AS_COLUMNS}" if len(fields) > 2 else ""
        bad = BadLine(name, number, kind, f"expected source<TAB>target, got a line {kind}{hint}")
        yield bad, bad


def read_text(path: str | os.PathLike[str], *, skip_bad: bool = False) -> str:
    """Reads a whole UTF-8 text, for a language model; line ends become LF.

    Args:
        path: the file.
        skip_bad: omit lines that are not UTF-8, and log how many, instead of raising.

    Raises:
        ValueError: no such file, an empty file, lines that are not UTF-8.
    """
    if column_of(path) is not None:
        rows = [(line, line) for line in read_rows(path, allow_empty=True, max_line=None)]
        return "\n".join(line for line, _ in _good(rows, str(path), skip_bad)) + "\n"
    data, name = _read(path), shown(os.fspath(path))
    text, bad = decoded(data, name)
    total = data.count(b"\n") + (not data.endswith(b"\n"))
    if bad and not skip_bad:
        raise ValueError(_refusal(bad, total) + _HINT)
    _report(bad, total, name, has_good=bool(text.strip()))
    return text


def decoded(data: bytes, name: str, first: int = 1) -> tuple[str, list[BadLine]]:
    """Decodes whole lines: line ends become LF, and a line that is not UTF-8 is left out with its end.

    Args:
        data: the bytes, which begin at the beginning of a line.
        name: the name of the file.
        first: the number of the first line.
    """
    try:
        return data.decode("utf-8").replace("\r\n", "\n"), []
    except UnicodeDecodeError:
        pass
    good: list[str] = []
    bad: list[BadLine] = []
    for number, line in enumerate(io.BytesIO(data), first):
        row = next(parse_lines(line, name, allow_empty=True, first=number, max_line=None))
        if isinstance(row, BadLine):
            bad.append(row)
        else:
            good.append(line.decode("utf-8"))
    return "".join(good).replace("\r\n", "\n"), bad


def read_documents(path: str | os.PathLike[str], *, skip_bad: bool = False) -> list[str]:
    """Reads the documents that a language model learns from: a file, or a folder's *.txt files in the order of names.

    Each row of a table's column is a document, too. The log counts the files of a folder that are omitted.

    Raises:
        ValueError: see `read_text`; or a folder without *.txt files that have text in them.
    """
    if not Path(path).is_dir():
        if column_of(path) is None:
            return [read_text(path, skip_bad=skip_bad)]
        rows = [(line, line) for line in read_rows(path, max_line=None)]
        return [line for line, _ in _good(rows, str(path), skip_bad)]
    documents, left_out = [], Counter[str]()
    files, others = documents_in(path)
    for file in files:
        try:
            documents.append(read_text(file, skip_bad=skip_bad))
        except NothingError as error:
            left_out[error.reason] += 1
    left_out += others
    counts = ", ".join(f"{count:,} {reason}" for reason, count in left_out.items())
    if not documents:
        raise ValueError(
            f"expected a text file or a folder of *.txt files, but there are none in {path}"
            + (f" with text in them: {counts}" if counts else "")
        )
    logger.info("read %s documents of %s%s", f"{len(documents):,}", path, f"; left out {counts}" if counts else "")
    return documents


def documents_in(folder: str | os.PathLike[str]) -> tuple[list[Path], Counter[str]]:
    """Lists the documents of a folder in the order of their names, and counts by reason what else is in it."""
    entries = {path: _why_no_document(path) for path in sorted(Path(folder).iterdir())}
    left_out = Counter(reason for reason in entries.values() if reason is not None)
    return [path for path, reason in entries.items() if reason is None], left_out


class NothingError(ValueError):
    """A file without a single usable line.

    Attributes:
        reason: the fault in a word or two, by which files are counted.
        lines: the number of bad lines that were skipped; 0: the file is empty.
    """

    def __init__(self, message: str, reason: str, lines: int = 0) -> None:
        super().__init__(message)
        self.reason, self.lines = reason, lines


def _why_no_document(file: Path) -> str | None:
    """Returns why a file in a folder is not a document, or None if it is; macOS leaves "._a.txt" beside "a.txt"."""
    if file.is_dir():
        return "in a subfolder or more (train on each folder separately, or join them)"
    name = file.name.lower()
    for suffix in (".gz", ".bz2", ".xz", ".zst"):
        name = name.removesuffix(suffix)
    if not name.endswith(".txt"):
        return "of another kind than *.txt"
    if name.startswith("."):
        return "hidden"
    return None if file.is_file() else "not a file"


def _read(path: str | os.PathLike[str], *, is_tsv: bool = False) -> bytes:
    """Reads the bytes of a file of lines of text.

    Raises:
        ValueError: no such file, one without text, or a table.
    """
    name = shown(os.fspath(path))
    data = read_bytes(path).removeprefix(b"\xef\xbb\xbf")
    if not data.strip():
        raise NothingError(f"{name} is empty: expected at least one line of text", "empty")
    check_plain(path, data, is_tsv=is_tsv)
    return data


def check_plain(path: str | os.PathLike[str], data: bytes, *, is_tsv: bool = False) -> None:
    """Checks that a file isn't a table, whose quotes and commas a model would learn as text.

    Args:
        path: the file.
        data: at least its first bytes.
        is_tsv: whether it is read as source<TAB>target.

    Raises:
        ValueError: its name is that of a table.
    """
    kind, first = kind_of(path), data.split(b"\n", 1)[0]
    if kind in ("JSON lines", "CSV"):
        raise ValueError(
            f"{os.fspath(path)} is {kind}, of which one column is text: expected {columns(path, data)}"
            + (" (with --train_source and --train_target)" if is_tsv else "")
            + "; to read it as plain text, rename it"
        )
    try:
        is_object = first.startswith(b"{") and isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        is_object = False
    if is_object:
        logger.warning(
            "%s begins with a JSON object, which is read as text: for a column of JSON lines name it FILE.jsonl:COLUMN",
            os.fspath(path),
        )


def parse_lines(
    data: bytes, name: str, *, allow_empty: bool = False, first: int = 1, max_line: int | None = MAX_LINE
) -> Iterator[str | BadLine]:
    """Yields the text of each line of some bytes, or the line's fault."""
    for number, line in enumerate(data.removesuffix(b"\n").split(b"\n"), first):
        try:
            text = line.removesuffix(b"\r").decode("utf-8")
        except UnicodeDecodeError as error:
            byte = f"byte 0x{line[error.start]:02x} at position {error.start}"
            message = f"expected UTF-8, got {byte}; convert the file, for example with iconv"
            yield BadLine(name, number, "not UTF-8", message)
            continue
        yield judged(text, name, number, allow_empty, max_line)


def judged(text: str, name: str, number: int, allow_empty: bool, max_line: int | None) -> str | BadLine:
    """Returns the text of a line, or the line's fault."""
    if not text.strip() and not allow_empty:
        return BadLine(name, number, "empty", "expected text, got an empty line; remove it (on both sides)")
    if max_line is not None and len(text) > max_line:
        message = f"expected at most {max_line:,} characters, got {len(text):,}; split it into sentences"
        return BadLine(name, number, "too long", message)
    return text


def _good(rows: Sequence[tuple[str | BadLine, str | BadLine]], where: str, skip_bad: bool) -> list[tuple[str, str]]:
    """Returns the rows without a bad line; logs the other ones, or raises."""
    good, bad = sort_out(rows, skip_bad=skip_bad)
    _report(bad, len(rows), where, has_good=bool(good))
    return good


def _report(bad: Sequence[BadLine], total: int, where: str, *, has_good: bool) -> None:
    """Logs bad lines that are skipped.

    Raises:
        NothingError: there is no other line.
    """
    if not has_good:
        kind = bad[0].kind if bad else "empty"
        raise NothingError(f"every line of {where} is bad: {_by_kind(bad) or kind}", kind, len(bad))
    if bad:
        logger.warning("skipped %s of %s lines of %s: %s", f"{len(bad):,}", f"{total:,}", where, _by_kind(bad))


def sort_out(
    rows: Sequence[tuple[str | BadLine, str | BadLine]], *, skip_bad: bool
) -> tuple[list[tuple[str, str]], list[BadLine]]:
    """Returns the rows without a bad line, and the first bad line of each other row.

    Raises:
        ValueError: a bad line that is not to be skipped.
    """
    good = [(one, other) for one, other in rows if isinstance(one, str) and isinstance(other, str)]
    bad = [next(line for line in row if isinstance(line, BadLine)) for row in rows if BadLine in map(type, row)]
    if bad and not skip_bad:
        raise ValueError(_refusal(bad, len(rows)) + _HINT)
    return good, bad


def _refusal(bad: Sequence[BadLine], total: int) -> str:
    """Returns the message for bad lines: the first in full, the next few by number and kind."""
    message = f"{bad[0].name}, line {bad[0].number:,}: {bad[0].message}"
    if len(bad) == 1:
        return message
    others = ", ".join(f"{line.number:,} ({line.kind})" for line in bad[1:_SHOWN])
    more = ", ..." if len(bad) > _SHOWN else ""
    return f"{message}; {len(bad):,} of {total:,} lines are bad: also {others}{more}"


def _by_kind(bad: Sequence[BadLine]) -> str:
    """ "2 empty (lines 4, 9), 1 not UTF-8 (line 17)"."""
    parts = []
    for kind in dict.fromkeys(line.kind for line in bad):
        numbers = [line.number for line in bad if line.kind == kind]
        shown = ", ".join(f"{number:,}" for number in numbers[:_SHOWN]) + (", ..." if len(numbers) > _SHOWN else "")
        parts.append(f"{len(numbers):,} {kind} (line{'s' * (len(numbers) > 1)} {shown})")
    return ", ".join(parts)
