"""Writing files so that a reader sees the old one or the new one, never a half."""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

_LEFT_OVER = re.compile(r"\..+\.[0-9a-f]{16}\.tmp")


def write_atomically(path: Path, data: bytes | bytearray | memoryview) -> None:
    """Writes the whole file or nothing: beside it under a random name, to the disk, then renamed.

    The random name is opened for this write alone (O_EXCL), so that a link planted in the folder is never followed. A
    path that is itself a link is replaced by a file; what the link pointed to stays as it is. The mode is what the
    umask leaves of 0666, as for any file that a program writes.

    Raises:
        OSError: it could not be written; what was there before is still there, and nothing else is.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
        try:
            with open(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:  # a second Ctrl-C too
            temporary.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)
    except OSError as error:
        raise OSError(
            error.errno, f"could not write {path} ({error.strerror}): free some space; what was saved before is whole"
        ) from error


def remove_left_overs(folder: Path) -> None:
    """Removes what a process that was killed in the middle of `write_atomically` left in a folder."""
    for path in folder.glob(".*.tmp"):
        if _LEFT_OVER.fullmatch(path.name):
            path.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Brings the new name to the disk too, so that a power cut can't take it back."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:  # some network file systems can't sync a folder; the file itself is on the disk
        pass
    finally:
        os.close(descriptor)
