"""Asks Linux which pages of memory have been written since: that costs a fraction of reading them.

Linux 6.7 can protect memory against writing in a way that no writer notices: the first write to a page takes its
protection away, and `PAGEMAP_SCAN` finds the pages that have none (the kernel's Documentation/admin-guide/mm,
userfaultfd.rst and pagemap.rst). Elsewhere, and where a sandbox forbids it, there is no such answer.
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
Process = tuple[int, int]  # its id, which another process may get again, and how many forks there are behind it

_PAGE = mmap.PAGESIZE
_SYS_USERFAULTFD = 323  # of x86-64, as the C++ engine is
_USER_MODE_ONLY = 1  # all that a process without privileges may ask for
_API, _REGISTER, _UNREGISTER, _SCAN = 0xC018AA3F, 0xC020AA00, 0x8010AA01, 0xC0606610  # ioctls
_FEATURES = 1 << 0 | 1 << 13 | 1 << 15  # write protection, of pages not yet there as well, without a notice
_WRITE_PROTECT, _PROTECTED_ALONE = 1, 2  # flags of a scan; the second fails where memory isn't registered
_WRITTEN = 1 << 1  # a kind of pages
# Linux splits the mappings of a process at the ends of what is registered, and limits their number: with none left, the
# next allocation of the program would fail. So ranges this close are registered as one, and this part of all is taken.
_NEAR = 256 * 2**10
_SHARE_OF_MAPPINGS = 8
_USUAL_MAPPINGS = 65530


class _Question:
    """Which pages of a range were written, in the form in which Linux is asked, any number of times.

    Args:
        begin, end: of the range.
        most: how many runs of such pages it names at most, the first ones.

    Attributes:
        address: of that form.
    """

    def __init__(self, begin: int, end: int, most: int = 1) -> None:
        self.most, self._found = most, (ctypes.c_uint64 * (3 * most))()
        where, flags = ctypes.addressof(self._found), _PROTECTED_ALONE
        pages = 1 if most == 1 else 0  # the first is enough, or all
        self._form = (ctypes.c_uint64 * 12)(96, flags, begin, end, 0, where, most, pages, 0, _WRITTEN, 0, _WRITTEN)
        self.address = ctypes.addressof(self._form)

    def answer(self, count: int) -> bytes | None:
        """What Linux wrote as its answer, so many runs; None where there may be more of them."""
        return bytes(memoryview(self._found).cast("B")[: 24 * count]) if count < self.most else None


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

    def count(self, question: _Question) -> int:
        """How many runs of written pages there are. OSError where the memory isn't registered any more."""
        found = int(self._call(self._pages, _SCAN, question.address))
        if found < 0:
            raise OSError(ctypes.get_errno(), "ioctl")
        return found


@cache
def system_of(process: Process) -> _System | None:
    # What a child inherits speaks of its parent's memory: each process has its own.
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return None
    try:
        return _System()
    except (OSError, AttributeError) as error:
        logger.info("this system doesn't say which memory was written (%s); see fastformer.generation.repack", error)
        return None


@cache
def most_spans() -> int:
    mappings = _USUAL_MAPPINGS
    with contextlib.suppress(OSError, ValueError), open("/proc/sys/vm/max_map_count", encoding="ascii") as file:
        mappings = int(file.read())
    return mappings // _SHARE_OF_MAPPINGS // 2  # each is cut off at both ends


class PageWatch:
    """Notices whatever this process writes into some memory, by any way: also through NumPy, or a file that is read.

    What a device writes isn't noticed, nor what another process writes to memory or a file that both have mapped; see
    `is_private`.

    Args:
        ranges: of addresses; the whole pages in them are watched. They are memory of this process for as long as this
            object is there.

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
        self._spans: Sequence[Range] = ()  # what is registered: the ranges, and what lies between near ones
        self._is_written = True

    def begin(self) -> bool:
        """Forgets what was written until now; False where the system can't tell what will be."""
        process = _this_process()
        system = system_of(process)
        if system is None:
            return False
        with _lock:
            for other in list(_all):
                if other is not self and _overlap(self.ranges, other.ranges):
                    other._look()  # before what it would have seen is forgotten
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
        except OSError:  # some of it can't be, or there are no more mappings to be had
            self._unregister(system)
            return False
        if not self._protect(system):
            self._unregister(system)
            return False
        # Some more runs than there are places between the ranges of one span.
        self._overview = [_Question(*one, 2 * len(self.ranges) + 2) for one in spans]
        self._between = []
        return True

    def _unregister(self, system: _System) -> None:
        for one in self._spans:
            with contextlib.suppress(OSError):  # it isn't there any more
                system.unregister(*one)
        self._spans = ()

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
            process = _this_process()
            system = system_of(process)
            try:
                self._is_written = system is None or self._process != process or self._asks(system)
            except OSError:  # some of it was given back and is other memory by now
                self._is_written = True
        return self._is_written

    def _asks(self, system: _System) -> bool:
        seen: list[bytes | None] = []
        try:
            seen = [question.answer(system.count(question)) for question in self._overview]
        except OSError:  # what lay between the ranges was given back, and is other memory by now
            self._overview = []
        if seen and None not in seen and seen == self._between:
            return False
        if any(system.count(question) for question in self._questions):
            return True
        self._between = seen  # none of it is in a range, for none of these was written afterwards
        return False

    def end(self) -> None:
        """Watches no more."""
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
    # A child process has none of the threads that might have held the lock, and nothing registered.
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
    """Whether no file and no other process writes to some ranges, which go upward, and what to register for them."""
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
        place = bisect.bisect_right(mapped, begin, key=lambda one: one[0]) - 1
        if place < 0 or mapped[place][1] < end:
            is_private, place = False, -1
        if found and begin <= found[-1][1] + (_NEAR if place == last >= 0 else 0):
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
        last = place
    return is_private, found


def _overlap(some: Sequence[Range], others: Sequence[Range]) -> bool:
    """Whether any of the ones, upward, has memory in common with any of the others, upward."""
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
