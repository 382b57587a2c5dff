"""Asks Linux which pages of memory were written since a point in time, which costs a fraction of reading them.

Linux 6.7 can protect memory against writing in a way that no writer notices: the first write to a page removes its
protection, and `PAGEMAP_SCAN` finds the unprotected pages (the kernel's Documentation/admin-guide/mm, userfaultfd.rst
and pagemap.rst). This doesn't work on other systems, nor if a sandbox forbids it.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import logging
import mmap
import os
import platform
import sys
import threading
import weakref
from collections.abc import Iterable, Sequence
from functools import cache

logger = logging.getLogger("fastformer")

Range = tuple[int, int]  # addresses, from and to
Process = tuple[int, int]  # a process's id, which may be reused, and the number of forks that led to the process

_PAGE = mmap.PAGESIZE
_SYS_USERFAULTFD = 323  # on x86-64, the only architecture of the C++ engine
_USER_MODE_ONLY = 1  # the only mode for a process without privileges
_API, _REGISTER, _UNREGISTER, _SCAN = 0xC018AA3F, 0xC020AA00, 0x8010AA01, 0xC0606610  # ioctls
_FEATURES = 1 << 0 | 1 << 13 | 1 << 15  # write protection, also of unpopulated pages, without notifications
_WRITE_PROTECT, _PROTECTED_ALONE = 1, 2  # flags of a scan; the second makes it fail for unregistered memory
_WRITTEN = 1 << 1  # the category of written pages
# Linux splits the mappings of a process at the ends of what is registered, and limits their number: with none left, the
# next allocation of the program would fail. So ranges this close are registered as one, and this part of all is taken.
_NEAR = 256 * 2**10
_SHARE_OF_MAPPINGS = 8
_USUAL_MAPPINGS = 65530


class _Question:
    """A reusable request to Linux for the written pages of a range.

    Args:
        begin, end: the addresses of the range.
        most: the maximum number of runs of written pages in the answer, the first ones.

    Attributes:
        address: the address of the request's data.
    """

    def __init__(self, begin: int, end: int, most: int = 1) -> None:
        self.most, self._found = most, (ctypes.c_uint64 * (3 * most))()
        where, flags = ctypes.addressof(self._found), _PROTECTED_ALONE
        pages = 1 if most == 1 else 0  # the maximum number of pages; 0: no limit
        self._form = (ctypes.c_uint64 * 12)(96, flags, begin, end, 0, where, most, pages, 0, _WRITTEN, 0, _WRITTEN)
        self.address = ctypes.addressof(self._form)

    def answer(self, count: int) -> bytes | None:
        """Returns the `count` runs that Linux wrote as its answer; None if there may be more of them."""
        return bytes(memoryview(self._found).cast("B")[: 24 * count]) if count < self.most else None


class _System:
    """The two file descriptors by which a process asks Linux."""

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
        """Closes the descriptors."""
        for descriptor in (self._faults, self._pages):
            if descriptor >= 0:
                os.close(descriptor)

    def _ioctl(self, descriptor: int, request: int, *values: int) -> int:
        buffer = (ctypes.c_uint64 * len(values))(*values)
        return self._ask(descriptor, request, ctypes.addressof(buffer))

    def _ask(self, descriptor: int, request: int, address: int) -> int:
        found = int(self._call(descriptor, request, address))
        if found < 0:
            raise OSError(ctypes.get_errno(), "ioctl")
        return found

    def register(self, begin: int, end: int) -> None:
        """Registers memory for protection. Raises OSError for memory of a file."""
        self._ioctl(self._faults, _REGISTER, begin, end - begin, 2, 0)

    def unregister(self, begin: int, end: int) -> None:
        """Unregisters memory, which also removes its protection."""
        self._ioctl(self._faults, _UNREGISTER, begin, end - begin)

    def protect(self, begin: int, end: int) -> None:
        """Protects pages, which from now on count as not written."""
        flags = _WRITE_PROTECT | _PROTECTED_ALONE
        self._ioctl(self._pages, _SCAN, 96, flags, begin, end, 0, 0, 0, 0, 0, _WRITTEN, 0, _WRITTEN)

    def count(self, question: _Question) -> int:
        """Returns the number of runs of written pages. Raises OSError if the memory isn't registered any more."""
        return self._ask(self._pages, _SCAN, question.address)


@cache
def system_of(process: Process) -> _System | None:
    # Inherited descriptors refer to the parent's memory, so each process opens its own.
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return None
    try:
        return _System()
    except (OSError, AttributeError) as error:
        logger.info("this system can't tell which memory was written (%s); see fastformer.generation.repack", error)
        return None


@cache
def most_spans() -> int:
    mappings = _USUAL_MAPPINGS
    with contextlib.suppress(OSError, ValueError), open("/proc/sys/vm/max_map_count", encoding="ascii") as file:
        mappings = int(file.read())
    return mappings // _SHARE_OF_MAPPINGS // 2  # each span splits mappings at both of its ends


class PageWatch:
    """Notices every write of this process to some memory, also through NumPy or by reading a file into it.

    Writes by a device aren't noticed, nor those of another process to memory or a file that both have mapped; see
    `is_private`.

    Args:
        ranges: ranges of addresses, of which the whole pages are watched. They must remain memory of this process as
            long as this object exists.

    Attributes:
        is_private: since the first `begin`, whether no file and no other process can change the memory.
    """

    def __init__(self, ranges: Iterable[Range]) -> None:
        self.ranges: Sequence[Range] = sorted({(_up(begin), end // _PAGE * _PAGE) for begin, end in ranges})
        self.ranges = [(begin, end) for begin, end in self.ranges if begin < end]
        self.is_private = False
        self._questions = [_Question(*one) for one in self.ranges]
        # One call covers several registered ranges: the memory between them rarely changes.
        self._overview: list[_Question] = []
        self._between: list[bytes | None] = []
        self._process: Process | None = None
        self._spans: Sequence[Range] = ()  # the registered memory: the ranges, and the gaps between near ones
        self._is_written = True

    def begin(self) -> bool:
        """Forgets the writes until now; returns False if the system can't report later ones."""
        process = _this_process()
        system = system_of(process)
        if system is None:
            return False
        with _lock:
            for other in list(_all):
                if other is not self and _overlap(self.ranges, other.ranges):
                    other._look()  # before the writes that it would have seen are forgotten
            if (self._process != process or not self._protect(system)) and not self._register(system):
                return False
            self._process, self._is_written = process, False
            _all.add(self)
            return True

    def _register(self, system: _System) -> bool:
        self._process, self._spans = None, ()
        try:
            self.is_private, spans = _spans(self.ranges)
            if len(spans) + sum(len(other._spans) for other in _all) > most_spans():
                return False
            for count, one in enumerate(spans):
                self._spans = spans[: count + 1]
                system.register(*one)
        except OSError:  # some memory can't be registered, or no mappings are left
            self._unregister(system)
            return False
        if not self._protect(system):
            self._unregister(system)
            return False
        # More runs than a span has gaps between its ranges.
        self._overview = [_Question(*one, 2 * len(self.ranges) + 2) for one in spans]
        self._between = []
        return True

    def _unregister(self, system: _System) -> None:
        for one in self._spans:
            with contextlib.suppress(OSError):  # the memory may be unmapped by now
                system.unregister(*one)
        self._spans = ()

    def _protect(self, system: _System) -> bool:
        try:
            for one in self.ranges:
                system.protect(*one)
        except OSError:  # not registered, or unregistered by the end of another watch of the same memory
            return False
        return True

    def is_written(self) -> bool:
        """Returns whether any watched page was written since the last `begin`."""
        with _lock:
            return self._look()

    def _look(self) -> bool:
        if not self._is_written:
            process = _this_process()
            system = system_of(process)
            try:
                self._is_written = system is None or self._process != process or self._asks(system)
            except OSError:  # some of the memory was freed and may have been mapped again
                self._is_written = True
        return self._is_written

    def _asks(self, system: _System) -> bool:
        seen: list[bytes | None] = []
        try:
            seen = [question.answer(system.count(question)) for question in self._overview]
        except OSError:  # the memory between the ranges was freed and may have been mapped again
            self._overview = []
        if seen and None not in seen and seen == self._between:
            return False
        if any(system.count(question) for question in self._questions):
            return True
        self._between = seen  # no run is inside a range, since no range was written
        return False

    def end(self) -> None:
        """Stops watching."""
        process = _this_process()
        system = system_of(process) if self._process == process else None
        if system is not None:
            self._unregister(system)
        self._process, self._spans, self._is_written = None, (), True


_lock = threading.RLock()
_all: weakref.WeakSet[PageWatch] = weakref.WeakSet()
_forks = 0


def _this_process() -> Process:
    return os.getpid(), _forks


def _renew() -> None:
    # A child process has no threads that might hold the lock, and no registered memory.
    global _lock, _forks
    _lock = threading.RLock()
    _forks += 1
    for watch in list(_all):
        watch._spans = ()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_renew)


def _up(address: int) -> int:
    return -(-address // _PAGE) * _PAGE


def _spans(ranges: Sequence[Range]) -> tuple[bool, list[Range]]:
    """Returns whether ascending ranges are private to this process, and the spans to register for them."""
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
    is_private, found, last = True, list[Range](), -1
    for begin, end in ranges:
        index = bisect.bisect_right(mapped, begin, key=lambda one: one[0]) - 1
        if index < 0 or mapped[index][1] < end:
            is_private, index = False, -1
        if found and begin <= found[-1][1] + (_NEAR if index == last >= 0 else 0):
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
        last = index
    return is_private, found


def _overlap(some: Sequence[Range], others: Sequence[Range]) -> bool:
    """Returns whether two ascending lists of ranges overlap anywhere."""
    if not some or not others or some[-1][1] <= others[0][0] or others[-1][1] <= some[0][0]:
        return False
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
