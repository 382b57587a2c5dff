"""One training at a time in a run folder."""

from __future__ import annotations

import errno
import logging
import os
import re
import socket
from pathlib import Path
from types import TracebackType
from typing import Any

from fastformer.files import is_plain_file

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

logger = logging.getLogger("fastformer")

LOCK = ".lock"
_HOLDER = re.compile(rb"(process \d+ on .*\n?)?")  # what stands in it; nothing after a crash


class RunLock:
    """A lock on a run folder, held by this process until `release` or its end, however it ends.

    The system forgets the lock with the process, so that a kill leaves nothing to clean up; the file, which names the
    holder, stays. Where a file system has no locks (some network ones) a warning says so and training goes on.

    Args:
        run: the folder; it has to be there when the lock is taken.
    """

    def __init__(self, run: Path) -> None:
        self._descriptor: int | None = None  # first of all, for __del__
        self._file = run / LOCK

    def acquire(self) -> None:
        """Takes the lock; nothing happens if it is held already.

        Raises:
            ValueError: another process, or another trainer of this one, trains in the folder; something else than the
                lock of a run has its name.
        """
        if self._descriptor is not None or fcntl is None:
            return
        if os.path.lexists(self._file) and not is_plain_file(self._file):
            raise ValueError(f"expected {self._file} to be a file, got a link, a folder or a pipe: take it away")
        # O_NOFOLLOW: a link in this place could make us write elsewhere.
        descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(descriptor, 200).decode(errors="replace").strip()
            os.close(descriptor)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                logger.warning("%s can't be locked (%s): take care that nothing else trains there", self._file, error)
                return
            raise ValueError(
                f"{self._file.parent} is being trained by {holder or 'another process'}: wait for it or end it, or "
                "take another folder"
            ) from error
        if not _HOLDER.fullmatch(os.pread(descriptor, 1000, 0)):
            os.close(descriptor)
            raise ValueError(f"expected {self._file} to be the lock of a run, got another file: take it away")
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        self._descriptor = descriptor

    def release(self) -> None:
        """Gives the lock back; nothing happens if it isn't held."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> RunLock:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __del__(self) -> None:
        self.release()
