"""The lines that a command reads: of files, and of standard input as they arrive."""

from __future__ import annotations

import contextlib
import os
import select
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from fastformer.generation.bad_texts import BadTexts
    from fastformer.generation.flow import Source
    from fastformer.generation.texts import Item


def prefix_lines(file: str) -> list[str]:
    """The lines of a file of prefixes."""
    path = Path(file)
    if not path.is_file():
        raise ValueError(f"expected a text file, but there is no file {path}")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected UTF-8, got byte 0x{error.object[error.start]:02x}; convert it") from error
    lines = text.split("\n")
    return [line.removesuffix("\r") for line in (lines if lines[-1] else lines[:-1])]


class Texts:
    """Lines as texts. One that is no UTF-8 is a bad text, which becomes an empty one when it is skipped."""

    def __init__(self, lines: Source[bytes], name: str, bad: BadTexts, prefix: str | None) -> None:
        self._lines, self._name, self._bad, self._prefix = lines, name, bad, prefix
        self._number = 0

    def get(self, wait: bool) -> Item | None:
        from fastformer.generation.bad_texts import TextError
        from fastformer.generation.texts import Item

        line = self._lines.get(wait)
        if line is None:
            return None
        self._number += 1
        line = line.removeprefix(b"\xef\xbb\xbf") if self._number == 1 else line
        try:
            return Item(line.removesuffix(b"\r").decode("utf-8"), self._prefix)
        except UnicodeDecodeError as error:
            self._bad.meet(
                TextError(
                    f"{self._name}, line {self._number}: expected UTF-8, got byte 0x{line[error.start]:02x} at "
                    f"position {error.start}; convert the file, for example with iconv"
                )
            )
            return Item("")

    def __iter__(self) -> Iterator[Item]:
        with contextlib.suppress(EOFError):
            while (item := self.get(wait=True)) is not None:
                yield item


def file_lines(path: Path) -> Iterator[bytes]:
    if not path.exists() or path.is_dir():
        raise ValueError(f"expected a text file, but there is no file {path}")
    if path.is_file() and path.stat().st_size == 0:
        raise ValueError(f"{path} is empty: expected at least one line of text")
    with path.open("rb") as file:
        yield from _without_ends(file)


def _without_ends(lines: Iterable[bytes]) -> Iterator[bytes]:
    return (line.removesuffix(b"\n") for line in lines)


def arriving(stream: BinaryIO) -> Source[bytes]:
    from fastformer.generation.flow import IterableSource

    try:
        return PipeLines(stream.fileno())
    except OSError:  # no file of the system's: all of it is there
        return IterableSource(_without_ends(stream))


class PipeLines:
    """Lines of a pipe as they arrive: a writer that waits for the answer to a line gets it; a fast one fills the batch.

    Args:
        descriptor: of the pipe.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lines: deque[bytes] = deque()
        self._begun: list[bytes] = []  # the pieces of a line whose end hasn't arrived
        self._is_open = True

    def get(self, wait: bool) -> bytes | None:
        """See `Source.get`."""
        while not self._lines and self._is_open:
            if not select.select([self._descriptor], [], [], None if wait else 0)[0]:
                return None
            chunk = os.read(self._descriptor, 1 << 16)
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
        if not self._lines:
            raise EOFError
        return self._lines.popleft()
