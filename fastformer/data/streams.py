"""Streams text files of any size as blocks of lines, which one process reads and other processes parse.

A block is small enough for memory and large enough to be worth sending. Lines of pairs are parsed by `PairBlock.pairs`
in the receiving process, so that the reading process does little more than count line ends. Running text is decoded and
cut where it is read.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy

from fastformer.data.cuts import parts
from fastformer.data.files import open_bytes, shown
from fastformer.data.tables import column_of
from fastformer.data.text import (
    BadLine,
    check_plain,
    check_tsv,
    decoded,
    documents_in,
    misaligned,
    parse_lines,
    parse_tsv,
    sort_out,
    stream_rows,
)

Row = str | BadLine
LINES = 16_384  # lines of a block of pairs
TEXT = 4 << 20  # characters of a block of running text
_CHUNK = 1 << 20
_MOST = 1 << 26  # the most bytes that are read for a block, unless a line is longer
_LONGEST = 1 << 28  # the most bytes of a line
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Lines:
    """Consecutive lines of a file, as raw bytes.

    Attributes:
        name: the name of the file.
        first: the number of the first line.
        data: the bytes.
    """

    name: str
    first: int
    data: bytes

    def rows(self) -> list[Row]:
        """Yields each line, or a description of its fault."""
        return list(parse_lines(self.data, self.name, first=self.first))


@dataclass(frozen=True)
class PairBlock:
    """A block of pairs: equally many lines of source and target, or lines that hold both sides (`target` None).

    A side is lines of a file, or rows of a column.
    """

    source: Lines | list[Row]
    target: Lines | list[Row] | None

    def pairs(self, *, skip_bad: bool) -> tuple[list[tuple[str, str]], list[BadLine]]:
        """Returns the good pairs and the bad lines.

        Raises:
            ValueError: a bad line that is not to be skipped.
        """
        if self.target is None:
            assert isinstance(self.source, Lines)
            rows = list(parse_tsv(self.source.data, self.source.name, first=self.source.first))
        else:
            sides = (side.rows() if isinstance(side, Lines) else side for side in (self.source, self.target))
            rows = list(zip(*sides, strict=True))
        return sort_out(rows, skip_bad=skip_bad)


@dataclass
class TextBlock:
    """A block of running text.

    Attributes:
        passages: documents or parts of documents, each with a flag that says whether its document ends there.
        bad: bad lines, or rows of a column.
        size: the number of characters.
    """

    passages: list[tuple[str, bool]] = field(default_factory=list)
    bad: list[BadLine] = field(default_factory=list)
    size: int = 0

    def add(self, passage: tuple[str, bool] | BadLine) -> None:
        """Adds a passage or a bad line."""
        if isinstance(passage, BadLine):
            self.bad.append(passage)
        else:
            self.passages.append(passage)
        self.size += len(passage.message if isinstance(passage, BadLine) else passage[0])

    def documents(self, *, skip_bad: bool) -> tuple[list[tuple[str, bool]], list[BadLine]]:
        """Returns the passages and the bad lines.

        Raises:
            ValueError: a bad line that is not to be skipped.
        """
        return self.passages, sort_out([(line, line) for line in self.bad], skip_bad=skip_bad)[1]


def stream_pairs(source: str, target: str) -> Iterator[PairBlock]:
    """Yields the blocks of two line-aligned files or columns.

    Raises:
        ValueError: no such file or column, an empty or a damaged file, different numbers of lines.
        ImportError: the library that reads the file is not installed.
    """
    sides = [_Lines(path) if column_of(path) is None else _Texts(path) for path in (source, target)]
    while True:
        ready = [side.ready(LINES) for side in sides]
        count = min(ready)
        if count == 0:
            if max(ready) > 0:
                raise ValueError(misaligned(source, target, *(side.count_all() for side in sides)))
            return
        yield PairBlock(sides[0].take(count), sides[1].take(count))


def stream_tsv(path: str) -> Iterator[PairBlock]:
    """Yields the blocks of a file of source<TAB>target lines; raises the errors of `stream_pairs`."""
    check_tsv(path)
    lines = _Lines(path, is_tsv=True)
    while count := lines.ready(LINES):
        yield PairBlock(lines.take(count), None)


def stream_documents(path: str, cuts: re.Pattern[str] | None) -> Iterator[TextBlock]:
    """Yields blocks of running text: of a file, of a folder's *.txt files in the order of their names, or of a column.

    Args:
        path: the file, the folder or the column.
        cuts: where the tokenizer's ids don't depend on a cut (see `cuts`); None: nowhere.

    Raises:
        ValueError: no such file, folder or column, one without text, a damaged file, a document that is too long to be
            encoded whole.
        ImportError: the library that reads the file is not installed.
    """
    block, is_empty = TextBlock(), True
    for passage in _passages(path, cuts):
        is_empty = False
        block.add(passage)
        if block.size >= TEXT:
            yield block
            block = TextBlock()
    if block.passages or block.bad:
        yield block
    if is_empty:
        raise ValueError(f"expected a text file or a folder of *.txt files with text in them, got {path}")


def _passages(path: str, cuts: re.Pattern[str] | None) -> Iterator[tuple[str, bool] | BadLine]:
    if column_of(path) is not None:
        for row in stream_rows(path, max_line=None):
            if isinstance(row, BadLine):
                yield row
            else:
                yield from parts([row], cuts, TEXT, path)
    elif os.path.isdir(path):
        for file in documents_in(path)[0]:
            yield from _of_file(str(file), cuts)
    else:
        yield from _of_file(path, cuts)


def _of_file(path: str, cuts: re.Pattern[str] | None) -> Iterator[tuple[str, bool] | BadLine]:
    bad: list[BadLine] = []

    def texts() -> Iterator[str]:
        first = 1
        for lines in _whole_lines(path):
            text, some = decoded(lines, shown(path), first)
            bad.extend(some)
            first += lines.count(b"\n")
            yield text

    for part in parts(texts(), cuts, TEXT, shown(path)):
        yield from bad
        bad.clear()
        yield part
    yield from bad


def _whole_lines(path: str) -> Iterator[bytes]:
    """Yields the lines of a file, many at a time."""
    with open_bytes(path) as file:
        rest = file.read(_CHUNK).removeprefix(_BOM)
        check_plain(path, rest)
        while chunk := file.read(_CHUNK):
            end = chunk.rfind(b"\n") + 1
            if end:
                yield rest + chunk[:end]
                rest = chunk[end:]
            else:
                rest += chunk
            if len(rest) > _LONGEST:
                raise ValueError(f"{shown(path)}: expected lines of text, got one of over {_LONGEST:,} bytes")
        if rest:
            yield rest


class _Lines:
    """A file of lines, from which any number can be taken once they are ready."""

    def __init__(self, path: str, *, is_tsv: bool = False) -> None:
        self._name, self._file = shown(path), open_bytes(path)
        self._next = 1  # the number of the next line
        first = self._file.read(_CHUNK).removeprefix(_BOM)
        if not first:
            raise ValueError(f"{self._name} is empty: expected at least one line of text")
        check_plain(path, first, is_tsv=is_tsv)
        self._chunks, self._ends, self._size = [first], first.count(b"\n"), len(first)
        self._file_ended = False

    def ready(self, count: int) -> int:
        """Returns how many lines `take` can return: `count`, or fewer if they are very long or the file ends."""
        while not self._file_ended and self._ends < count and (self._size < _MOST or not self._ends):
            chunk = self._file.read(_CHUNK)
            if not chunk:
                self._file_ended = True
                self._file.close()
            self._chunks.append(chunk)
            self._ends += chunk.count(b"\n")
            self._size += len(chunk)
            if self._size > _LONGEST and not self._ends:
                raise ValueError(f"{self._name}, line {self._next:,}: expected lines of text, got one without an end")
        return min(count, self._ends + self._has_open_line())

    def _has_open_line(self) -> bool:
        """Returns whether the file has ended with a line that has no line end."""
        if not self._file_ended:
            return False
        last = next((chunk for chunk in reversed(self._chunks) if chunk), b"")
        return bool(last) and not last.endswith(b"\n")

    def take(self, count: int) -> Lines:
        """Returns the next `count` lines, which `ready` has confirmed."""
        data, open_line = b"".join(self._chunks), self._has_open_line()
        if count == self._ends + open_line and open_line:
            end = len(data)
        else:
            end = int(numpy.flatnonzero(numpy.frombuffer(data, numpy.uint8) == 10)[count - 1]) + 1
        lines, rest = Lines(self._name, self._next, data[:end]), data[end:]
        self._chunks, self._size = [rest], len(rest)
        self._ends -= min(count, self._ends)
        self._next += count
        return lines

    def count_all(self) -> int:
        """Counts the lines of the whole file; after that, none can be taken."""
        total = self._next - 1
        while count := self.ready(LINES):
            self.take(count)
            total += count
        return total


class _Texts:
    """A column, from which any number of texts can be taken."""

    def __init__(self, path: str) -> None:
        self._texts, self._waiting, self._taken = stream_rows(path), [], 0  # type: tuple[Iterator[Row], list[Row], int]
        if not self.ready(1):
            raise ValueError(f"{path} is empty: expected at least one row")

    def ready(self, count: int) -> int:
        """Returns how many texts `take` can return: `count`, or as many as are left."""
        self._waiting += itertools.islice(self._texts, max(0, count - len(self._waiting)))
        return min(count, len(self._waiting))

    def take(self, count: int) -> list[Row]:
        """Returns the next `count` texts."""
        lines, self._waiting = self._waiting[:count], self._waiting[count:]
        self._taken += count
        return lines

    def count_all(self) -> int:
        """Counts the rows of the whole column; after that, none can be taken."""
        return self._taken + len(self._waiting) + sum(1 for _ in self._texts)
