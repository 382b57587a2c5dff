"""The lines that a command reads from files, or from standard input as they arrive."""

from __future__ import annotations

import contextlib
import io
import select
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, BinaryIO

from fastformer.console import is_terminal
from fastformer.data import files
from fastformer.data.tables import column_of, file_of
from fastformer.data.text import BadLine, check_plain, stream_rows
from fastformer.generation.text_io import TextError

if TYPE_CHECKING:
    from fastformer.generation.text_io import ErrorPolicy, Item, Source

_MARK = "\ufeff".encode()  # the byte order mark; a second one is text


def file_lines(path: str) -> Iterator[bytes | str | BadLine]:
    """Yields the lines of a file without LF, empty and long ones included; or the rows of a table's column.

    The first line of a file may begin with a byte order mark.

    Raises:
        ValueError: the file does not exist, is empty or damaged, or is a table without that column.
    """
    is_empty = True
    is_table = column_of(path) is not None
    lines = stream_rows(path, allow_empty=True, max_line=None) if is_table else _plain_lines(path)
    for line in lines:
        is_empty = False
        yield line
    if is_empty:
        expected = "row" if is_table else "line of text"
        raise ValueError(f"{files.shown(file_of(path))} is empty: expected at least one {expected}")


def _plain_lines(path: str) -> Iterator[bytes]:
    with files.open_bytes(path) as file:
        for number, line in enumerate(_without_ends(file), 1):
            if number == 1:
                check_plain(path, line.removeprefix(_MARK))
            yield line


def all_lines(file: str) -> list[str | TextError]:
    """Returns each line of a file as a text, or the error of a bad line; see `file_lines`."""
    return [_as_text(line, file, number) for number, line in enumerate(file_lines(file), 1)]


def good_lines(file: str) -> list[str]:
    """Returns the lines of a file, all of which have to be good.

    Raises:
        TextError: a line is bad.
    """
    texts = []
    for line in all_lines(file):
        if not isinstance(line, str):
            raise line
        texts.append(line)
    return texts


def each_line(file: str | None) -> Iterator[str]:
    """Yields the lines of a file or of standard input.

    Args:
        file: None or "-": standard input.

    Raises:
        ValueError: standard input is closed, or an error of `file_lines`.
        TextError: a line is not UTF-8; the message has its number.
    """
    lines: Iterable[bytes | str | BadLine]
    if file is None or file == files.STDIN:
        file, lines = files.STDIN, _waited(arriving())
    else:
        lines = file_lines(file)
    for number, line in enumerate(lines, 1):
        text = _as_text(line, file, number)
        if not isinstance(text, str):
            raise text
        yield text


def _waited(source: Source[bytes]) -> Iterator[bytes]:
    with contextlib.suppress(EOFError):
        while (line := source.get(wait=True)) is not None:
            yield line


class Texts:
    """A source of lines as texts. A line that is not UTF-8 is a bad text; if it is skipped, it becomes an empty one."""

    def __init__(
        self, lines: Source[bytes | str | BadLine], name: str, errors: ErrorPolicy, prefix: str | None
    ) -> None:
        self._lines, self._name, self._errors, self._prefix = lines, name, errors, prefix
        self._number = 0

    def get(self, wait: bool) -> Item | None:
        from fastformer.generation.text_io import Item

        line = self._lines.get(wait)
        if line is None:
            return None
        self._number += 1
        text = _as_text(line, self._name, self._number)
        if isinstance(text, str):
            return Item(text, self._prefix)
        self._errors.handle(text)
        return Item("")

    def __iter__(self) -> Iterator[Item]:
        with contextlib.suppress(EOFError):
            while (item := self.get(wait=True)) is not None:
                yield item


def typed(what: str, name: str, errors: ErrorPolicy, prefix: str | None = None) -> Texts:
    """Returns the lines of standard input as texts; a terminal is told what the command does to each."""
    if is_terminal(sys.stdin):
        print(f"{what} each line that you type; Ctrl-D ends", file=sys.stderr)
    return Texts(arriving(), name, errors, prefix)


def _as_text(line: bytes | str | BadLine, name: str, number: int) -> str | TextError:
    if isinstance(line, str):  # of a column, where line ends are text
        return line
    if isinstance(line, BadLine):
        return TextError(f"{line.name}, line {line.number:,}: {line.message}")
    line = line.removeprefix(_MARK) if number == 1 else line
    try:
        return line.removesuffix(b"\r").decode("utf-8")
    except UnicodeDecodeError as error:
        return TextError(
            f"{files.shown(name)}, line {number:,}: expected UTF-8, got byte 0x{line[error.start]:02x} at position "
            f"{error.start}; convert the file, for example with iconv"
        )


def _without_ends(lines: Iterable[bytes]) -> Iterator[bytes]:
    return (line.removesuffix(b"\n") for line in lines)


def arriving() -> Source[bytes]:
    """Returns the lines of standard input as they arrive.

    Raises:
        ValueError: standard input is closed.
    """
    from fastformer.generation.text_io import IterableSource

    if sys.stdin is None:
        raise ValueError("expected lines on standard input, which is closed")
    try:
        return PipeLines(sys.stdin.fileno())
    except OSError:  # not a file of the system: all of its lines are there already
        return IterableSource(_without_ends(files.open_bytes(files.STDIN)))


class PipeLines:
    """The lines of a pipe as they arrive, so that a writer may wait for an answer, and a fast writer fills the batch.

    Compressed input is read in blocks, and the call waits for it.

    Args:
        descriptor: the pipe's file descriptor.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._pipe = descriptor, io.FileIO(descriptor, closefd=False)
        self._lines: deque[bytes] = deque()
        self._begun: list[bytes] = []  # the pieces of a line whose end hasn't arrived
        self._is_open, self._is_first = True, True
        self._unpacked: BinaryIO | None = None

    def get(self, wait: bool) -> bytes | None:
        while not self._lines and self._is_open and self._unpacked is None:
            if not select.select([self._descriptor], [], [], None if wait else 0)[0]:
                return None
            if self._is_first:
                self._is_first = False
                chunk = files.beginning(self._pipe)
                stream = files.unpacked(chunk, io.FileIO(self._descriptor, closefd=False), files.STDIN)
                if files.compression(chunk) is not None:
                    self._unpacked = stream
                    break
            else:
                chunk = self._pipe.read(1 << 16)
            first, *others = chunk.split(b"\n")
            self._begun.append(first)
            if others:
                self._lines.append(b"".join(self._begun))
                self._lines += others[:-1]
                self._begun = [others[-1]]
            if not chunk:
                self._is_open = False
                rest = b"".join(self._begun)
                self._lines += [rest] if rest else []
        if self._unpacked is not None:
            for line in self._unpacked:
                return line.removesuffix(b"\n")
        if not self._lines:
            raise EOFError
        return self._lines.popleft()
