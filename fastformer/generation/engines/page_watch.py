"""Asks Linux which pages of memory have been written since: that costs a fraction of reading them.

Linux 6.7 can protect memory against writing in a way that no writer notices: the first write to a page takes its
protection away, and `PAGEMAP_SCAN` finds the pages that have none (the kernel's Documentation/admin-guide/mm,
userfaultfd.rst and pagemap.rst). Elsewhere, and where a sandbox forbids it, there is no such answer.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import mmap
import os
import platform
import sys
import threading
import weakref
from collections.abc import Iterable, Sequence
from functools import cache

Range = tuple[int, int]  # addresses, from and to

_PAGE = mmap.PAGESIZE
_SYS_USERFAULTFD = 323  # of x86-64, as the C++ engine is
_USER_MODE_ONLY = 1  # all that a process without privileges may ask for
_API, _REGISTER, _UNREGISTER, _SCAN = 0xC018AA3F, 0xC020AA00, 0x8010AA01, 0xC0606610  # ioctls
_FEATURES = 1 << 0 | 1 << 13 | 1 << 15  # write protection, of pages not yet there as well, and nobody is told
_WRITE_PROTECT, _PROTECTED_ALONE = 1, 2  # flags of a scan; the second fails where memory isn't registered
_WRITTEN = 1 << 1  # a kind of pages


class _System:
    """The two descriptors that a process asks by."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._call = libc.ioctl
        self._call.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p]
        self._faults = int(libc.syscall(_SYS_USERFAULTFD, os.O_CLOEXEC | os.O_NONBLOCK | _USER_MODE_ONLY))
        if self._faults < 0:
            raise OSError(ctypes.get_errno(), "no userfaultfd")
        self._pages = -1
        try:
            self._ioctl(self._faults, _API, 0xAA, _FEATURES, 0)
            self._pages = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Gives the descriptors back."""
        for descriptor in (self._faults, self._pages):
            if descriptor >= 0:
                os.close(descriptor)

    def _ioctl(self, descriptor: int, request: int, *values: int) -> int:
        buffer = (ctypes.c_uint64 * len(values))(*values)
        found = int(self._call(descriptor, request, ctypes.addressof(buffer)))
        if found < 0:
            raise OSError(ctypes.get_errno(), "ioctl")
        return found

    def register(self, begin: int, end: int) -> None:
        """Says that this memory may be protected. OSError for what belongs to a file."""
        self._ioctl(self._faults, _REGISTER, begin, end - begin, 2, 0)

    def unregister(self, begin: int, end: int) -> None:
        """Takes it back, and with it the protection."""
        self._ioctl(self._faults, _UNREGISTER, begin, end - begin)

    def protect(self, begin: int, end: int) -> None:
        """From now on these pages count as not written."""
        flags = _WRITE_PROTECT | _PROTECTED_ALONE
        self._ioctl(self._pages, _SCAN, 96, flags, begin, end, 0, 0, 0, 0, 0, _WRITTEN, 0, _WRITTEN)

    def is_written(self, begin: int, end: int) -> bool:
        """Whether a page was written since. OSError where the memory isn't registered any more."""
        found = (ctypes.c_uint64 * 3)()
        where, flags = ctypes.addressof(found), _PROTECTED_ALONE
        return self._ioctl(self._pages, _SCAN, 96, flags, begin, end, 0, where, 1, 1, 0, _WRITTEN, 0, _WRITTEN) > 0


@cache
def _system(process: int) -> _System | None:
    # What a child inherits speaks of its parent's memory: each process has its own.
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return None
    try:
        return _System()
    except (OSError, AttributeError):
        return None


class PageWatch:
    """Notices whatever this process writes into some memory, by any way: also through NumPy, or a file that is read.

    What another process writes to memory that both share isn't noticed, nor what a device does: such memory isn't
    watched.

    Args:
        ranges: of addresses; the whole pages in them are watched. They are memory of this process for as long as this
            object is there.
    """

    def __init__(self, ranges: Iterable[Range]) -> None:
        self.ranges: Sequence[Range] = sorted({(_up(begin), end // _PAGE * _PAGE) for begin, end in ranges})
        self.ranges = [(begin, end) for begin, end in self.ranges if begin < end]
        self._process = 0
        self._is_written = True

    def begin(self) -> bool:
        """Forgets what was written until now; False where the system can't tell what will be."""
        process = os.getpid()
        system = _system(process)
        if system is None:
            return False
        with _lock:
            for other in list(_all):
                if other is not self and _overlap(self.ranges, other.ranges):
                    other._look()  # before what it would have seen is forgotten
            try:
                if self._process != process or not self._protect(system):
                    if not _are_private(self.ranges):
                        return False
                    for one in self.ranges:
                        system.register(*one)
                    if not self._protect(system):
                        return False
            except OSError:
                return False
            self._process, self._is_written = process, False
            _all.add(self)
            return True

    def _protect(self, system: _System) -> bool:
        try:
            for one in self.ranges:
                system.protect(*one)
        except OSError:  # not registered, or no more: another watch of the same memory has ended
            return False
        return True

    def is_written(self) -> bool:
        """Whether any of it was written since the last `begin`."""
        with _lock:
            return self._look()

    def _look(self) -> bool:
        if not self._is_written:
            system = _system(os.getpid())
            try:
                self._is_written = (
                    system is None
                    or self._process != os.getpid()
                    or any(system.is_written(*one) for one in self.ranges)
                )
            except OSError:  # some of it was given back and is other memory by now
                self._is_written = True
        return self._is_written

    def end(self) -> None:
        """Watches no more."""
        system = _system(os.getpid()) if self._process == os.getpid() else None
        for one in self.ranges if system is not None else ():
            with contextlib.suppress(OSError):  # it isn't there any more
                system.unregister(*one)  # type: ignore[union-attr]
        self._process, self._is_written = 0, True


_lock = threading.RLock()
_all: weakref.WeakSet[PageWatch] = weakref.WeakSet()


def _renew_lock() -> None:
    # A child process has none of the threads that might have held it.
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


def _up(address: int) -> int:
    return -(-address // _PAGE) * _PAGE


def _are_private(ranges: Sequence[Range]) -> bool:
    """Whether no file and no other process writes to these ranges, which go upward."""
    mapped: list[list[int]] = []
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            addresses, rights, _, _, inode, *_ = line.split(maxsplit=5)
            if rights[3] != "p" or inode != "0":
                continue
            begin, end = (int(address, 16) for address in addresses.split("-"))
            if mapped and mapped[-1][1] == begin:
                mapped[-1][1] = end
            else:
                mapped.append([begin, end])
    places = (bisect.bisect_right(mapped, begin, key=lambda one: one[0]) - 1 for begin, _ in ranges)
    return all(place >= 0 and end <= mapped[place][1] for place, (_, end) in zip(places, ranges, strict=True))


def _overlap(some: Sequence[Range], others: Sequence[Range]) -> bool:
    """Whether any of the ones, upward, has memory in common with any of the others, upward."""
    first, second = iter(some), iter(others)
    one, other = next(first, None), next(second, None)
    while one is not None and other is not None:
        if one[0] < other[1] and other[0] < one[1]:
            return True
        if one[1] <= other[0]:
            one = next(first, None)
        else:
            other = next(second, None)
    return False
