"""A lock that survives a fork."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from types import TracebackType


class ForkSafeLock:
    """A lock that is open in a forked child, and in a copy: the threads that may hold it don't exist there.

    with lock:
        ...
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        _locks.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[type[ForkSafeLock], tuple[()]]:
        return ForkSafeLock, ()


_locks: weakref.WeakSet[ForkSafeLock] = weakref.WeakSet()


def _renew() -> None:
    for lock in _locks:
        lock._lock = threading.Lock()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_renew)
