"""Reads GGUF files: their values, and the tensors as mapped bytes.

A file is little-endian. A text is its length in bytes (u64) and UTF-8.

"GGUF", u32 version (2 or 3), u64 number of tensors, u64 number of values
for each value: text key, u32 type, the value; an array is u32 type, u64 length, the elements
for each tensor: text name, u32 number of dimensions, u64 sizes (that of a row first), u32 type, u64 offset
padding to general.alignment, then the tensors, each at its offset, which is a multiple of the alignment

A large model may be split: NAME-00001-of-00003.gguf has the values, and every file has some of the tensors.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastformer.checkpoints.file_matrix import FileMatrix
from fastformer.checkpoints.gguf.blocks import BLOCKS, Kind, int4_groups, numbers
from fastformer.files import is_plain_file
from fastformer.models.quantization import Groups

SUFFIX = ".gguf"
_MAGIC = b"GGUF"
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
_LEAST_TEXT, _LEAST_TENSOR, _LEAST_VALUE = 8, 24, 13  # bytes
_MOST_HEADER = 1 << 28  # bytes; a vocabulary of a million tokens has a tenth of that
_MOST_DIMENSIONS = 4
_MOST_ALIGNMENT = 1 << 16
_MOST_FILES = 1000
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


class Stored(NamedTuple):
    """A tensor in a file.

    Attributes:
        kind: how its numbers are stored.
        shape: its sizes in PyTorch's order: the size of a row is the last.
        data: its bytes.
        place: its name and that of the file, for messages.
        release: (bytes) -> None: some of `data` won't be read soon, and need no memory.

    The other names are those of a `Source`, whose part is the bytes of rows.
    """

    kind: Kind
    shape: tuple[int, ...]
    data: Tensor
    place: str
    release: Callable[[Tensor], None]

    @property
    def dtype(self) -> torch.dtype:
        return BLOCKS[self.kind].dtype or torch.float32

    def matrix(self) -> FileMatrix:
        """Returns a tensor of two or three dimensions, which stays in the file."""
        block, columns = BLOCKS[self.kind], self.shape[-1]
        return FileMatrix(self, self.shape, (self.data.view(-1, columns // block.numbers * block.size),))

    def numbers_of(self, shape: tuple[int, ...], data: Tensor) -> Tensor:
        result = numbers(self.kind, shape, data.flatten())
        return result.clone() if result.data_ptr() == data.data_ptr() else result  # a view of the file

    def groups_of(self, shape: tuple[int, ...], data: Tensor) -> Groups | None:
        return int4_groups(self.kind, shape, data.flatten())


class GGUF(NamedTuple):
    """The contents of a file, or of all files of a split model.

    Attributes:
        path: the file; of a split model, the first.
        values: the values by key: numbers, texts, lists of one of them.
        tensors: the tensors by name.
    """

    path: Path
    values: dict[str, Any]
    tensors: dict[str, Stored]


def is_gguf(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path names a GGUF file, by its suffix."""
    return Path(path).suffix == SUFFIX and not Path(path).is_dir()


def read_gguf(path: str | os.PathLike[str]) -> GGUF:
    """Reads a file: its values, and its tensors as mapped bytes, of which none is read yet.

    Raises:
        ValueError: no such file, one that is cut or damaged, another version, or a type that fastformer can't read.
    """
    first = _read_one(Path(path))
    count = first.values.get("split.count", 1)
    if count in (0, 1):
        return first
    match = _PART.fullmatch(first.path.name)
    if match is None or not isinstance(count, int) or not 0 < count < _MOST_FILES or int(match[3]) != count:
        raise ValueError(f"expected {path} to be NAME-00001-of-{count:05}{SUFFIX}, since it is a part of a model")
    names = [first.path.with_name(f"{match[1]}-{number:05}-of-{match[3]}{SUFFIX}") for number in range(1, count + 1)]
    tensors: dict[str, Stored] = {}
    values: dict[str, Any] = {}
    for file in names:
        part = first if file == first.path else _read_one(file)
        if both := part.tensors.keys() & tensors.keys():
            raise ValueError(f"expected parts of one model, got {min(both)!r:.60} twice, again in {file}")
        tensors |= part.tensors
        values = values or part.values
    expected = values.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise ValueError(f"expected {expected} tensors in the {count} parts of {names[0]}, got {len(tensors)}")
    return GGUF(names[0], values, tensors)


class _Reader:
    """Reads the head of a mapped file, from the number of tensors on, and never beyond the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._end, self.place = path, data, min(len(data), _MOST_HEADER), 8

    def need(self, size: int) -> None:
        """Raises ValueError if the file has fewer bytes left."""
        if size > self._end - self.place:
            raise ValueError(
                f"expected {size:,} more bytes in {self._path}, got {self._end - self.place:,}: the file was cut, or "
                "is damaged"
            )

    def take(self, form: str, count: int = 1) -> tuple[Any, ...]:
        size = struct.calcsize(f"<{form}") * count
        self.need(size)
        self.place += size
        return struct.unpack_from(f"<{count}{form}", self._data, self.place - size)

    def count(self, least: int) -> int:
        """Reads a number of parts that have at least so many bytes each."""
        (value,) = self.take("Q")
        self.need(value * least)
        return int(value)

    def text(self) -> str:
        size = self.count(1)
        self.place += size
        data = self._data[self.place - size : self.place]
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"expected UTF-8 in {self._path}, got {data!r:.60}") from error

    def texts(self, count: int) -> list[str]:
        data, place, result = self._data, self.place, list[str]()
        for _ in range(count):  # a vocabulary has many: few calls for each
            begin = place + _LEAST_TEXT
            end = begin + int.from_bytes(data[place:begin], "little")
            try:
                if end > self._end:
                    break
                result.append(data[begin:end].decode())
            except UnicodeDecodeError:
                break
            place = end
        self.place = place
        return result if len(result) == count else [*result, self.text()]  # which raises the error

    def value(self, key: str) -> Any:
        (kind,) = self.take("I")
        if kind in _NUMBERS:
            return self.take(_NUMBERS[kind])[0]
        if kind == _TEXT:
            return self.text()
        if kind == _ARRAY:
            (kind,) = self.take("I")
            if kind == _TEXT:
                return self.texts(self.count(_LEAST_TEXT))
            if kind in _NUMBERS:
                return [*self.take(_NUMBERS[kind], self.count(struct.calcsize(_NUMBERS[kind])))]
        raise ValueError(f"expected {key!r:.60} in {self._path} to have a known type of values, got type {kind}")


def first_value(path: str | os.PathLike[str], key: str) -> Any:
    """Returns a value without reading those behind it; None: there is none. A ValueError: see `read_gguf`."""
    reader, _ = _opened(Path(path))
    reader.count(_LEAST_TENSOR)
    return next((value for name, value in _values(reader) if name == key), None)


def _opened(path: Path) -> tuple[_Reader, mmap.mmap]:
    """Returns a reader of a file's head, at the number of tensors, and the mapped file."""
    if not is_plain_file(path.resolve()):
        raise ValueError(f"expected a GGUF file, but there is no file {path}")
    with open(path, "rb") as file:
        head = file.read(8)
        if head[:4] != _MAGIC:
            raise ValueError(f"expected a GGUF file, which begins with {_MAGIC!r}, got {head[:4]!r}: {path}")
        version = int.from_bytes(head[4:], "little")
        if version not in (2, 3):
            is_big = int.from_bytes(head[4:], "big") in (1, 2, 3)
            what = "a big-endian one" if is_big else f"version {version}"
            raise ValueError(f"expected a GGUF file of version 2 or 3, got {what}: {path}")
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return _Reader(path, memory), memory


def _values(reader: _Reader) -> Iterator[tuple[str, Any]]:
    for _ in range(reader.count(_LEAST_VALUE)):
        key = reader.text()
        yield key, reader.value(key)


def _read_one(path: Path) -> GGUF:
    """Reads one file."""
    reader, memory = _opened(path)
    size = len(memory)
    num_tensors = reader.count(_LEAST_TENSOR)
    values: dict[str, Any] = {}
    for key, value in _values(reader):
        if key in values:
            raise ValueError(f"expected keys that differ in {path}, got {key!r:.60} twice")
        values[key] = value
    reader.need(num_tensors * _LEAST_TENSOR)
    listed = [*_tensors(reader, path, num_tensors)]
    alignment = values.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 8 <= alignment <= _MOST_ALIGNMENT or alignment & (alignment - 1):
        raise ValueError(f"expected {path} to have an alignment that is a power of two, got {alignment!r:.60}")
    begin = -(-reader.place // alignment) * alignment
    mapped, release = _mapped(memory)
    tensors: dict[str, Stored] = {}
    end = 0
    for name, kind, shape, offset in sorted(listed, key=lambda each: each[3]):
        block = BLOCKS[kind]
        length = math.prod(shape) // block.numbers * block.size
        if offset % alignment or offset < end:
            raise ValueError(
                f"expected the tensors of {path} one after another, at multiples of {alignment}, got {name!r:.60} at "
                f"{offset:,}, where the one before ends at {end:,}"
            )
        end = offset + length
        if begin + end > size:
            raise ValueError(f"expected {begin + end:,} bytes of {path}, for {name!r:.60}, got {size:,}: it was cut")
        if name in tensors:
            raise ValueError(f"expected names that differ in {path}, got {name!r:.60} twice")
        tensors[name] = Stored(kind, shape, mapped[begin + offset : begin + end], f"{name} of {path}", release)
    return GGUF(path, values, tensors)


def _mapped(memory: mmap.mmap) -> tuple[Tensor, Callable[[Tensor], None]]:
    """Returns the bytes of a file, and `Stored.release`."""
    mapped = torch.frombuffer(memory, dtype=torch.uint8)
    advice = getattr(mmap, "MADV_DONTNEED", None)

    def release(part: Tensor) -> None:
        offset = part.data_ptr() - mapped.data_ptr()
        if advice is not None and 0 <= offset <= len(mapped) - part.numel() and part.numel():
            begin = offset // mmap.PAGESIZE * mmap.PAGESIZE
            memory.madvise(advice, begin, offset + part.numel() - begin)

    return mapped, release


def _tensors(reader: _Reader, path: Path, count: int) -> Iterator[tuple[str, Kind, tuple[int, ...], int]]:
    """Reads the names, kinds, shapes and offsets of the tensors."""
    for _ in range(count):
        name = reader.text()
        (rank,) = reader.take("I")
        if not 0 < rank <= _MOST_DIMENSIONS:
            raise ValueError(f"expected {name!r:.60} in {path} of 1 to {_MOST_DIMENSIONS} dimensions, got {rank}")
        sizes = reader.take("Q", rank)
        number, offset = reader.take("I")[0], reader.take("Q")[0]
        try:
            kind = Kind(number)
        except ValueError as error:
            known = ", ".join(kind.name for kind in Kind)
            raise ValueError(
                f"expected {name!r:.60} in {path} to be of a type in {known}, got type {number}"
            ) from error
        if 0 in sizes or sizes[0] % BLOCKS[kind].numbers:
            raise ValueError(
                f"expected rows of {name!r:.60} in {path} to be blocks of {BLOCKS[kind].numbers} numbers, as "
                f"{kind.name} has them, got sizes {sizes}"
            )
        yield name, kind, tuple(reversed(sizes)), offset
