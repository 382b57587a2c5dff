"""One training at a time in a run folder."""

from __future__ import annotations

import errno
import logging
import os
import re
import socket
from pathlib import Path
from typing import Any

from fastformer.files import is_plain_file

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

logger = logging.getLogger("fastformer")

LOCK = ".lock"
_HOLDER = re.compile(rb"(process \d+ on .*\n?)?")  # the lock file's text; empty after a crash


class RunLock:
    """A lock on a run folder, held by this process until `release` or its end, however it ends.

    The operating system drops the lock when the process ends, so that a kill leaves nothing to clean up. The file,
    which names the holder, stays. If the file system has no locks (some network ones), a warning says so and training
    continues.

    Args:
        run: the folder; it must exist when the lock is acquired.
    """

    def __init__(self, run: Path) -> None:
        self._descriptor: int | None = None  # first of all, for __del__
        self._file = run / LOCK

    def acquire(self) -> None:
        """Acquires the lock; does nothing if this object holds it already.

        Raises:
            ValueError: another process, or another trainer of this one, trains in the folder; a file that is
                not the lock of a run has the lock's name.
        """
        if self._descriptor is not None or fcntl is None:
            return
        if os.path.lexists(self._file) and not is_plain_file(self._file):
            raise ValueError(f"expected {self._file} to be a file, got a link, a folder or a pipe: remove it")
        # O_NOFOLLOW: a symbolic link with this name could redirect the write to another file.
        descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(descriptor, 200).decode(errors="replace").strip()
            os.close(descriptor)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                logger.warning("%s can't be locked (%s): make sure that no other process uses it", self._file, error)
                return
            raise ValueError(
                f"{self._file.parent} is in use by {holder or 'another process'}: wait for it or end it, or "
                "take another folder"
            ) from error
        if not _HOLDER.fullmatch(os.pread(descriptor, 1000, 0)):
            os.close(descriptor)
            raise ValueError(f"expected {self._file} to be the lock of a run, got another file: remove it")
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        self._descriptor = descriptor

    def release(self) -> None:
        """Releases the lock; does nothing if this object doesn't hold it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> RunLock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        self.release()
