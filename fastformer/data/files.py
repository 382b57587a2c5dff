"""Reads the bytes of text files, plain or compressed, from a disk or from a pipe.

Compressed files are recognised by their first bytes, not by their names. Python's own libraries decompress gzip, bzip2
and xz; Zstandard needs Python 3.14 or the package `zstandard`. "-" is standard input.
"""

from __future__ import annotations

import bz2
import gzip
import importlib
import io
import lzma
import os
import re
import select
import stat
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

STDIN = "-"
_CHUNK = 1 << 16
_WRITER_SECONDS = 2  # the longest wait until another process opens a pipe to write
# The first bytes of each kind, and the length of the longest of them.
_MAGICS = {
    "gzip": re.compile(rb"\x1f\x8b\x08"),
    "bzip2": re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)"),
    "xz": re.compile(rb"\xfd7zXZ\x00"),
    "Zstandard": re.compile(rb"\x28\xb5\x2f\xfd"),
}
_LONGEST = 10
_BEGINNINGS = (b"\x1f\x8b\x08", b"BZh", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd")
# First bytes of files that are not text, with the advice for each.
_OTHERS = {
    b"PK\x03\x04": "a zip archive: unpack it, and name the file in it",
    b"PAR1": "a Parquet file: name one of its columns, FILE.parquet:COLUMN",
    b"ARROW1": "an Arrow file: write it as Parquet, and name one of its columns, FILE.parquet:COLUMN",
    b"\xff\xfe": "UTF-16: expected UTF-8; convert it, for example with iconv -f UTF-16 -t UTF-8",
    b"\xfe\xff": "UTF-16: expected UTF-8; convert it, for example with iconv -f UTF-16 -t UTF-8",
}
_DAMAGE = (EOFError, OSError, zlib.error, lzma.LZMAError, ValueError)


class Readable(Protocol):
    """A source of bytes; a read returns those that are available, and none at the end."""

    def read(self, size: int = ..., /) -> bytes:
        """Reads at most `size` bytes."""


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """Reads a whole file; see `open_bytes`."""
    with open_bytes(path) as file:
        return file.read()


def open_bytes(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a file, a pipe or standard input for reading once, and decompresses it.

    Reads of a pipe return its bytes as they arrive.

    Raises:
        ValueError: there is no such file, it is an archive or of another encoding; while reading: it is damaged.
        ImportError: it is compressed by Zstandard, and no installed library can read that.
    """
    name = os.fspath(path)
    file = _open(name)
    return unpacked(beginning(file), file, name)


def beginning(file: Readable) -> bytes:
    """Reads the available bytes, at least as many as it takes to recognise the compression."""
    head = file.read(_CHUNK)
    while head and len(head) < _LONGEST and any(magic.startswith(head) for magic in _BEGINNINGS):
        more = file.read(_CHUNK)
        if not more:
            break
        head += more
    return head


def unpacked(head: bytes, file: Readable, name: str) -> BinaryIO:
    """Returns the decompressed stream of a file.

    Args:
        head: the bytes that `beginning` read from the file.
        file: the rest of the file.
        name: the name of the file, for messages.

    Raises:
        ValueError, ImportError: see `open_bytes`.
    """
    stream: BinaryIO = _buffered(_Rest(head, file))
    kind = compression(head)
    if kind is not None:
        stream = _buffered(_Unpacked(_unpacker(kind, name)(stream), name, kind))
        head = cast(io.BufferedReader, stream).peek(512)
    what = next((what for magic, what in _OTHERS.items() if head.startswith(magic)), None)
    if head[257:262] == b"ustar":
        what = "a tar archive: unpack it, and name the file in it"
    if what is not None:
        stream.close()
        raise ValueError(f"{shown(name)} is {what}")
    return stream


def compression(head: bytes) -> str | None:
    """Returns the compression of a file that begins with the given bytes; None: none that is known here."""
    return next((kind for kind, magic in _MAGICS.items() if magic.match(head)), None)


def is_there(path: str | os.PathLike[str]) -> bool:
    """Returns whether the path is a file, a pipe or standard input that exists."""
    name = os.fspath(path)
    return name == STDIN or (os.path.exists(name) and not os.path.isdir(name))


def shown(name: str) -> str:
    """Returns the name of a file for messages."""
    return "standard input" if name == STDIN else name


class _Rest(io.RawIOBase):
    """A stream of the bytes that were read from a file already, followed by the rest of the file."""

    def __init__(self, head: bytes, file: Readable) -> None:
        self._head, self._file = memoryview(head), file

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._head[: len(buffer)] or memoryview(self._file.read(len(buffer)))
        self._head = self._head[len(data) :]
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed and isinstance(self._file, io.FileIO):  # standard input stays open
            self._file.close()
        super().close()


class _Unpacked(io.RawIOBase):
    """A decompressor's stream whose errors name the file."""

    def __init__(self, file: Readable, name: str, kind: str) -> None:
        self._file, self._name, self._kind = file, name, kind

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._file.read(len(buffer))
        except _DAMAGE as error:
            raise ValueError(
                f"{shown(self._name)} is compressed by {self._kind}, and damaged or truncated: {error}"
            ) from error
        buffer[: len(data)] = data
        return len(data)


class _ZstandardFrames:
    """Zstandard frames, decompressed by the package `zstandard`, whose own reader doesn't notice a truncated file."""

    def __init__(self, package: Any, file: BinaryIO) -> None:
        self._new: Callable[[], Any] = package.ZstdDecompressor().decompressobj
        self._error: type[Exception] = package.ZstdError
        self._file, self._packed, self._text = file, b"", b""
        self._frame: Any = None

    def read(self, size: int = -1, /) -> bytes:
        while not self._text:
            self._packed = self._packed or self._file.read(_CHUNK)
            if not self._packed:
                if self._frame is not None:
                    raise EOFError("it ends within a frame")
                break
            self._frame = self._frame or self._new()
            try:
                self._text = self._frame.decompress(self._packed)
            except self._error as error:
                raise ValueError(str(error)) from error
            self._packed = b""
            if self._frame.eof:
                self._packed, self._frame = self._frame.unused_data, None
        text, self._text = self._text[:size], self._text[size:]
        return text


def _buffered(raw: io.RawIOBase) -> BinaryIO:
    return io.BufferedReader(raw, _CHUNK)


def _open(name: str) -> Readable:
    if name == STDIN:
        if sys.stdin is None:
            raise ValueError("expected text on standard input, which is closed")
        return _ReadAsItComes(sys.stdin.buffer)
    if not is_there(name):
        raise ValueError(f"expected a text file, but there is no file {name}")
    return _pipe(name) if stat.S_ISFIFO(os.stat(name).st_mode) else Path(name).open("rb", buffering=0)


def _pipe(name: str) -> Readable:
    """Opens a named pipe; a plain open would wait forever if no process writes into the pipe."""
    descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    file, poll, end = io.FileIO(descriptor), select.poll(), time.monotonic() + _WRITER_SECONDS
    poll.register(descriptor, select.POLLIN)
    first = b""
    while not first and not poll.poll(20):  # neither data nor the end has arrived
        try:
            first = os.read(descriptor, 1)
        except BlockingIOError:  # a writer has opened the pipe and written nothing so far
            break
        if time.monotonic() > end:
            file.close()
            raise ValueError(
                f"expected a text file, got the pipe {name}, into which nothing writes (waited {_WRITER_SECONDS} s): "
                "start its writer first"
            )
    os.set_blocking(descriptor, True)
    return _Rest(first, file)


class _ReadAsItComes:
    """A buffered stream whose reads return the available bytes."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def read(self, size: int = -1, /) -> bytes:
        read1 = getattr(self._stream, "read1", self._stream.read)
        return cast(bytes, read1(size))


def _unpacker(kind: str, name: str) -> Callable[[BinaryIO], Readable]:
    if kind == "Zstandard":
        return _zstandard(name)
    if kind == "gzip":
        return lambda file: gzip.GzipFile(fileobj=file)
    return bz2.BZ2File if kind == "bzip2" else lzma.LZMAFile


def _zstandard(name: str) -> Callable[[BinaryIO], Readable]:
    try:
        library = importlib.import_module("compression.zstd")  # Python 3.14
    except ImportError:
        pass
    else:
        return cast("Callable[[BinaryIO], Readable]", library.ZstdFile)
    try:
        package = importlib.import_module("zstandard")
    except ImportError as error:
        raise ImportError(
            f"{shown(name)} is compressed by Zstandard, which this Python can't read: pip install 'fastformer[zstd]', "
            "or unpack it with zstd -d"
        ) from error
    return lambda file: _ZstandardFrames(package, file)
