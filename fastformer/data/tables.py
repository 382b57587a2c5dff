"""Columns of tables as texts: "pairs.jsonl:en", "pairs.parquet:translation.de", "pairs.csv:german", "pairs.tsv:2".

In JSON lines (or JSON: a list of objects, or a single one) and Parquet a column has a name; dots separate the names of
nested columns. In CSV and TSV a name is looked up in the first line. A number counts columns from 1, and then the first
line is text, too. Fields of TSV are never quoted.

Every row counts, so that columns of several files stay aligned: one without a usable text is a `BadRow`, and a blank
line of CSV, TSV or JSON lines is an empty text. Only blank lines at the end of JSON lines, and of a table with several
columns, aren't rows.
"""

from __future__ import annotations

import contextlib
import csv
import importlib
import io
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fastformer.data.files import is_there, open_bytes

_KINDS = {
    ".jsonl": "JSON lines", ".ndjson": "JSON lines", ".json": "JSON", ".parquet": "Parquet", ".pq": "Parquet",
    ".csv": "CSV", ".tsv": "TSV",
}  # fmt: skip
_PACKED = (".gz", ".bz2", ".xz", ".zst")
_MISSING = object()
_BLANK = object()
_BOM = b"\xef\xbb\xbf"
_NAMED_DELIMITER = re.compile(r"sep=(.)\r?\n")  # a first line that spreadsheets read
_SPACE = re.compile(r"\s*")
_QUOTED = re.compile(r'"[^"]*("|$)')
_SHOWN_ROWS = 20  # rows whose names of columns a message lists


@dataclass(frozen=True)
class BadRow:
    """A row without a text in the column.

    Attributes:
        kind: the fault in a word or two, by which faults are counted.
        message: says what was expected and what was found.
    """

    kind: str
    message: str


def kind_of(path: str | os.PathLike[str]) -> str | None:
    """Returns the kind of table by a file's name; None: no table."""
    name = os.fspath(path).lower()
    for suffix in _PACKED:
        name = name.removesuffix(suffix)
    return _KINDS.get(os.path.splitext(name)[1])


def column_of(path: str | os.PathLike[str]) -> tuple[str, str] | None:
    """Returns the file and the column that a path names; None: the path names a file without a column."""
    name = os.fspath(path)
    file, colon, column = name.rpartition(":")
    if not colon or not column or kind_of(file) is None or os.path.lexists(name):
        return None
    return file, column


def file_of(path: str | os.PathLike[str]) -> str:
    """Returns the file that a path names, with a column or without one."""
    return (column_of(path) or (os.fspath(path),))[0]


def paths_of(text: str) -> list[str]:
    """Splits a list of paths at its commas, except for commas in the path of a file or folder that exists."""
    words, paths = text.split(","), []
    while words:
        joined = (",".join(words[:count]) for count in range(len(words), 0, -1))
        path = next((path for path in joined if _exists(path)), words[0].strip())
        paths.append(path)
        del words[: path.count(",") + 1]
    return paths


def _exists(path: str) -> bool:
    path = os.path.expanduser(path)
    file, column = column_of(path) or (path, "")
    return os.path.exists(file) and "," not in column


def stream_column(file: str, column: str) -> Iterator[tuple[int, str | BadRow]]:
    """Reads the texts of a column, each with the number of its row or line.

    The whole table isn't in memory, but a JSON list is read whole. Rows without the column are held back until a row
    has it; if no row has it, the error says so.

    Raises:
        ValueError: no such file or column, or a table that is damaged.
        ImportError: a Parquet file, without the package that reads it.
    """
    if not is_there(file):
        raise ValueError(f"expected a table, but there is no file {file}")
    kind = kind_of(file)
    if kind in ("CSV", "TSV"):
        yield from _of_lines(file, column, _csv(file) if kind == "CSV" else _tsv(file))
        return
    shown: list[object] = []  # for a message
    # The rows before the first one that has the column, in their order.
    waiting: list[tuple[int, object]] = []
    has_values = False
    for number, row in _parquet(file, column) if kind == "Parquet" else _json(file):
        if len(shown) < _SHOWN_ROWS:
            shown.append(row)
        value = row if isinstance(row, BadRow) else "" if row is _BLANK else _look_up(row, column)
        has_values = has_values or not (row is _BLANK or value is _MISSING or isinstance(value, BadRow))
        waiting.append((number, value))
        if has_values:
            yield from ((number, _as_text(value, column)) for number, value in waiting)
            waiting.clear()
    if any(value is _MISSING for _, value in waiting):
        raise ValueError(_no_column(file, column, names_in(shown)))
    yield from ((number, _as_text(value, column)) for number, value in waiting)


def names_in(rows: Iterable[object]) -> list[str]:
    """Returns the names of the columns of the given rows, for a message; nested names are joined by dots."""
    names: dict[str, None] = {}
    for _, row in zip(range(_SHOWN_ROWS), rows, strict=False):
        for name, value in row.items() if isinstance(row, dict) else ():
            inner = value if isinstance(value, dict) else {"": None}
            names |= {f"{name}.{key}".rstrip("."): None for key in inner}
    return list(names)


def columns(path: str | os.PathLike[str], data: bytes) -> str:
    """Lists the columns of a table for a message: "FILE.jsonl:en, FILE.jsonl:de"."""
    kind, first = kind_of(path), data.split(b"\n", 1)[0].decode("utf-8", "replace").strip("\r\ufeff")
    names = []
    if kind in ("JSON lines", "JSON"):
        with contextlib.suppress(ValueError):
            names = names_in([json.loads(first)])
    elif kind == "CSV":
        names = next(csv.reader([first], delimiter=_delimiter(first)), [])
    return ", ".join(f"{os.fspath(path)}:{name}" for name in names[:6] or ["COLUMN"])


def _json(file: str) -> Iterator[tuple[int, object]]:
    with open_bytes(file) as stream:
        is_first, last = True, 0
        for number, line in enumerate(stream, 1):
            line = line.removeprefix(_BOM) if number == 1 else line
            if not line.strip():
                continue
            is_whole, is_first = is_first and _begins_value(file, line), False
            if is_whole:
                yield from enumerate(_values(file, line + stream.read()), 1)
                return
            yield from ((blank, _BLANK) for blank in range(last + 1, number) if last)
            last = number
            try:
                yield number, json.loads(line)
            except UnicodeDecodeError:
                yield number, BadRow("not UTF-8", "expected UTF-8")
            except (ValueError, RecursionError) as error:
                yield number, BadRow("not JSON", f"expected a JSON object on each line, got invalid JSON ({error})")


def _begins_value(file: str, line: bytes) -> bool:
    """Returns whether a file's first line begins a list, or, in a .json, an object that continues in the next lines."""
    text = line.strip()
    if text.startswith(b"["):
        return True
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return kind_of(file) == "JSON" and error.pos >= len(error.doc) - 1
    except (ValueError, RecursionError):
        pass
    return False


def _values(file: str, data: bytes) -> list[object]:
    """Returns the rows in the whole text of a file: the items of a list, or objects that follow one another."""
    decoder, rows, place = json.JSONDecoder(), [], 0
    try:
        text = data.decode().strip()
        while place < len(text):
            row, place = decoder.raw_decode(text, place)
            rows.append(row)
            place = _SPACE.match(text, place).end()  # type: ignore[union-attr]
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    return rows[0] if len(rows) == 1 and isinstance(rows[0], list) else rows


def _parquet(file: str, column: str) -> Iterator[tuple[int, object]]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ImportError(f"reading {file} needs pyarrow: pip install 'fastformer[parquet]'") from error
    try:
        table = parquet.ParquetFile(file)
        names = table.schema_arrow.names
        top = column if column in names else column.partition(".")[0]
        if names.count(top) != 1:
            raise LookupError
        number = 0
        for batch in table.iter_batches(columns=[top]):
            for row in batch.to_pylist():
                number += 1
                yield number, row
    except LookupError:
        _check_single(file, top, names)
        raise ValueError(_no_column(file, column, names)) from None
    except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
        raise ValueError(f"{file} is not a Parquet file, or is damaged: {error}") from error


def _csv(file: str) -> Iterator[tuple[int, list[str]]]:
    # Bytes that are not UTF-8 become surrogates, until it is known whether they are in the column.
    with io.TextIOWrapper(open_bytes(file), "utf-8", "surrogateescape", newline="") as text:
        first = text.readline().removeprefix("\ufeff")
        named = _NAMED_DELIMITER.fullmatch(first)
        delimiter, lines = (named[1], text) if named else (_delimiter(first), itertools.chain([first], text))
        reader = csv.reader(lines, delimiter=delimiter, strict=True)
        while True:
            number = reader.line_num + 1 + (named is not None)
            limit = csv.field_size_limit(2**31 - 1)  # of the whole process, which may read two files at a time
            try:
                row = next(reader, None)
            except csv.Error as error:
                raise ValueError(f"{file}, line {number:,}: expected CSV: {error}") from error
            finally:
                csv.field_size_limit(limit)
            if row is None:
                return
            yield number, row


def _tsv(file: str) -> Iterator[tuple[int, list[str]]]:
    with open_bytes(file) as stream:
        for number, line in enumerate(stream, 1):
            line = line.removeprefix(_BOM) if number == 1 else line
            text = line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8", "surrogateescape")
            yield number, text.split("\t") if text else []


def _delimiter(first: str) -> str:
    return max(",;\t", key=_QUOTED.sub("", first).count)


def _of_lines(file: str, column: str, rows: Iterator[tuple[int, Sequence[str]]]) -> Iterator[tuple[int, str | BadRow]]:
    first = next(rows, None)
    if first is None:
        return
    place, has_names = _place(file, column, first[1])
    blank: list[int] = []  # lines whose next row is not known
    width = len(first[1])
    for number, row in rows if has_names else itertools.chain([first], rows):
        if not row:
            blank.append(number)
            continue
        yield from ((line, "") for line in blank)
        blank.clear()
        if any(field.strip() for field in row[width:]):
            expected = f"expected {width} field{'s' * (width > 1)}, as in the first line, got {len(row)}"
            yield number, BadRow(f"of {len(row)} fields", f"{expected}: is a delimiter part of a text?")
        elif place >= len(row):
            yield number, BadRow("too short", f"expected a column {column}, got a line of {len(row)} fields")
        else:
            yield number, _as_text(row[place], column)
    if width < 2:
        yield from ((line, "") for line in blank)


def _place(file: str, column: str, first: Sequence[str]) -> tuple[int, bool]:
    """Returns the index of a column, and whether the first line has the names of the columns."""
    _check_single(file, column, first)
    is_number = column.isdecimal() and int(column) > 0
    if column in first:
        if is_number and not all(name.isdecimal() for name in first):
            raise ValueError(
                f"expected the name or the number of a column of {file}, got {column}, which may be both: "
                f"its first line is {', '.join(first[:_SHOWN_ROWS])}"
            )
        return first.index(column), True
    if not is_number:
        raise ValueError(_no_column(file, column, first))
    if int(column) > len(first):
        raise ValueError(f"expected a column {column} in {file}, got {len(first)} columns in its first line")
    return int(column) - 1, False


def _check_single(file: str, column: str, names: Sequence[str]) -> None:
    if (count := names.count(column)) > 1:
        raise ValueError(f"expected one column {column} in {file}, got {count} of that name")


def _look_up(row: object, column: str) -> object:
    if isinstance(row, dict) and column in row:
        return row[column]
    for name in column.split("."):
        if not isinstance(row, dict) or name not in row:
            return _MISSING
        row = row[name]
    return row


def _as_text(value: object, column: str) -> str | BadRow:
    if isinstance(value, BadRow):
        return value
    if value is _MISSING:
        return BadRow(f"without {column}", f"expected a column {column}, which is missing here")
    if value is None:
        return BadRow("empty", f"expected text in column {column}, got null")
    if not isinstance(value, str):
        return BadRow("no text", f"expected text in column {column}, got {value!r:.60}")
    try:
        value.encode()
    except UnicodeEncodeError:
        return BadRow("not UTF-8", f"expected UTF-8 in column {column}, got {ascii(value):.60}")
    return value


def _no_column(file: str, column: str, names: Sequence[str]) -> str:
    shown = ", ".join(names[:20]) or "none that has a name"
    return f"expected a column {column} in {Path(file).name}, which has: {shown}"
