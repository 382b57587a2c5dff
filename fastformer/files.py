"""Reads small files, and writes files so that a reader sees the old one or the new one, never a part.

It also imports the tokenizers library, which need not be installed, for all that read its files.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

# The end of a message for a model that is not on the disk.
NOT_DOWNLOADED = (
    "fastformer downloads nothing: `hf download NAME --local-dir FOLDER` copies a model from the Hugging Face Hub"
)
_MOST = 1 << 28  # bytes; a vocabulary of a million tokens has a fifth of that
_LEFT_OVER = re.compile(r"\.(.+)\.[0-9a-f]{16}\.tmp")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Opens a file that takes the place of another at the end of the block, as a whole: flushed to the disk, renamed.

    The random name is opened for this write alone (O_EXCL), so that a link planted in the folder is never followed. A
    path that is itself a link is replaced by a file; the link's target stays as it is. The mode is 0666 less the
    umask, as for any file that a program writes. After an error, the earlier file is still there, and no temporary one.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
    try:
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:  # a second Ctrl-C too
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def write_atomically(path: Path, data: bytes | bytearray | memoryview) -> None:
    """Writes a whole file or nothing; see `replacing`.

    Raises:
        OSError: the file could not be written. The earlier file is still there, and no temporary one.
    """
    try:
        with replacing(path) as file:
            file.write(data)
    except OSError as error:
        raise OSError(
            error.errno, f"could not write {path} ({error.strerror}): an earlier file of this name is unchanged"
        ) from error


def remove_left_overs(folder: Path, names: Iterable[str]) -> None:
    """Removes the temporary files of processes that were killed during `write_atomically`.

    Args:
        folder: the folder of the files.
        names: patterns of the final names, such as "step-*.pt"; any other file stays.
    """
    for path in folder.glob(".*.tmp"):
        left_over = _LEFT_OVER.fullmatch(path.name)
        if left_over and any(fnmatch.fnmatchcase(left_over[1], name) for name in names) and is_plain_file(path):
            path.unlink(missing_ok=True)


def is_plain_file(path: Path) -> bool:
    """Returns whether a path is a regular file: no link, folder, pipe or device. Only such files are written here."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def check_places(folder: Path, names: Iterable[str]) -> None:
    """Checks that files of these names can be written or replaced in a folder.

    A link is no obstacle: `write_atomically` replaces it by a file and doesn't change its target.

    Raises:
        ValueError: a folder, a pipe or a device has one of the names.
    """
    for name in names:
        path = folder / name
        if os.path.lexists(path) and not path.is_symlink() and not is_plain_file(path):
            raise ValueError(f"expected {path} to be a file, got a folder, a pipe or a device: remove it")


def read_small(path: Path) -> bytes:
    """Returns the bytes of a file of settings or of a vocabulary.

    Raises:
        ValueError: the file is far too large for one.
    """
    size = path.stat().st_size
    if size > _MOST:
        raise ValueError(f"expected {path} to be a small file, got {size:,} bytes: copy it again")
    return path.read_bytes()


def read_json(path: Path, *, unique_names: bool = False) -> dict[str, Any]:
    """Reads a JSON object from a file.

    Args:
        path: the file.
        unique_names: refuse an object with a repeated name, of which otherwise the last value counts.

    Raises:
        ValueError: the file doesn't exist, is damaged or far too large, or has no object.
    """
    values = _read_json(path, unique_names)
    if not isinstance(values, dict):
        raise ValueError(f"expected {path} to hold a JSON object, got a {type(values).__name__}")
    return values


def read_json_list(path: Path) -> list[Any]:
    """Reads a JSON list from a file; see `read_json`."""
    values = _read_json(path)
    if not isinstance(values, list):
        raise ValueError(f"expected {path} to hold a JSON list, got a {type(values).__name__}")
    return values


def _read_json(path: Path, unique_names: bool = False) -> Any:
    if not path.is_file():  # a pipe may never be written to
        raise ValueError(f"expected the file {path}, which doesn't exist: was the model saved completely?")
    data = read_small(path)
    try:
        text = data.decode("utf-8")
        return json.loads(text, object_pairs_hook=_unique if unique_names else None)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON or truncated ({error}): save or copy it again") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"{name!r} is there twice")
        values[name] = value
    return values


def _sync_folder(folder: Path) -> None:
    """Flushes the new name to the disk, so that a power cut can't undo the renaming."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:  # some network file systems can't sync a folder; the file's data are on the disk
        pass
    finally:
        os.close(descriptor)


def tokenizers_library(needed_by: str = "a BPE") -> ModuleType:
    """Imports the tokenizers library.

    Args:
        needed_by: the subject of the message if it is not installed.

    Raises:
        ImportError: it is not installed.
    """
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError(f"{needed_by} needs the tokenizers library: pip install 'fastformer[train]'") from error
    return tokenizers
