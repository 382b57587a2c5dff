"""Packs the weights of models and stacks for the C++ engine, and notices when the originals change."""

from __future__ import annotations

import itertools
import mmap
import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fastformer.nn.page_watch import PageWatch
from fastformer.ops import _extension

T = TypeVar("T")


class Held(Protocol):
    """The tensors of a model or a stack, with the attributes of `ModelGuards`."""

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors whose changes are noticed."""

    @property
    def layout(self) -> object:
        """The addresses of the tensors; see `layout_of`."""


# (model) -> the guards of a model that may be packed, or None and the reason why it may not.
FindGuards: TypeAlias = Callable[[Any], tuple[Held | None, str | None]]
if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Bits: TypeAlias = npt.NDArray[np.integer[Any]]

_SAMPLES = 32  # the number of samples of each tensor, if the system doesn't report writes
_WHOLE_BYTES = 2 * mmap.PAGESIZE  # smaller tensors are read whole
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_numbers = itertools.count()


class Fingerprint(NamedTuple):
    """A value that differs after the weights or the config of a model have changed; see `fingerprint`."""

    layout: object
    versions: object
    period: int
    read: bytes
    config: tuple[object, ...]


class _Watch:
    """Notices writes to the tensors of a model, and keeps the tensors alive.

    Attributes:
        layout: see `Held`.
        period: a number that changes when watched memory was written.
    """

    def __init__(self, guards: Held) -> None:
        self._pages: PageWatch | None = None
        self._tensors, self.layout = guards.tensors, guards.layout
        memory = [_memory(tensor.detach()) for tensor in self._tensors if tensor.numel()]
        pages = PageWatch(map(_range, memory))
        is_pinned = torch.cuda.is_initialized() and any(tensor.is_pinned() for tensor in self._tensors)
        if not is_pinned and pages.begin():
            self._pages = pages
        self.period = next(_numbers)
        parts = [part for bits in memory for part in _edges(bits)] if self._pages is not None else []
        if self._pages is None or not self._pages.is_private:
            parts += map(_samples, memory)
        self._read = [part for part in parts if part.size]
        self._digest = _extension.host_function("memory_digest")
        if self._digest is not None:  # it reads contiguous memory
            whole = [part for part in self._read if part.flags.c_contiguous]
            self._places = [(part.ctypes.data, part.nbytes) for part in whole]  # this object keeps the tensors alive
            self._read = [part for part in self._read if not part.flags.c_contiguous]

    def look(self) -> bytes:
        """Begins another period if the watched memory was written. Returns bytes to compare for the other memory."""
        if self._pages is not None and self._pages.is_written():
            self.period = next(_numbers)
            if not self._pages.begin():
                # A child process may lack its parent's permission: then each look begins another period.
                return next(_numbers).to_bytes(8, "big")
        seen = b"" if self._digest is None else self._digest(self._places)
        return seen + b"".join([part.tobytes() for part in self._read])

    def end(self) -> None:
        """Stops watching. Call this before another watch of the same memory begins, since it would end that watch."""
        if self._pages is not None:
            self._pages.end()

    def __del__(self) -> None:
        self.end()


_watches: WeakKeyDictionary[nn.Module, _Watch] = WeakKeyDictionary()


def fingerprint(model: nn.Module, find: FindGuards) -> Fingerprint:
    """Returns a value that differs after a parameter, a buffer or the config of a model was changed or replaced.

    PyTorch counts the changes of a tensor, except those through `parameter.data` or an array that shares its memory. If
    Linux reports writes (see `page_watch`), these are noticed as well. Otherwise, and if other processes may write, all
    elements of each vector but only a few of each matrix are compared. A change of a few elements of a matrix can then
    be missed; see `repack`.

    Args:
        model: the model whose weights are read.
        find: finds the guards of the model.

    Raises:
        ValueError: the model is no longer one that the C++ engine supports.
    """
    guards, reason = find(model)
    if guards is None:
        raise ValueError(f"expected a model as it was when its engine was chosen: {reason}")
    watch = _watches.get(model)
    if watch is None or watch.layout != guards.layout:
        if watch is not None:
            watch.end()
        watch = _watches[model] = _Watch(guards)
    count = _extension.host_function("tensor_versions")
    versions = [tensor._version for tensor in guards.tensors] if count is None else count(guards.tensors)
    read = watch.look()
    config = vars(model).get("config")
    settings = () if config is None else tuple(vars(config).values())
    return Fingerprint(guards.layout, versions, watch.period, read, settings)


def _memory(tensor: Tensor) -> Bits:
    """Returns the memory from a tensor's first to its last element as integers, in a view."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    bits = tensor.as_strided((extent,), (1,)).view(_BITS[tensor.element_size()])
    return cast("Bits", bits.numpy())


def _range(bits: Bits) -> tuple[int, int]:
    # A small tensor is read whole: it shares its pages with other data, as a large one shares its first and last page.
    begin = bits.ctypes.data
    return (begin, begin + bits.nbytes) if bits.nbytes >= _WHOLE_BYTES else (begin, begin)


def _edges(bits: Bits) -> list[Bits]:
    """Returns the parts of a tensor outside of the watched pages."""
    if bits.nbytes < _WHOLE_BYTES:
        return [bits]
    page, size = mmap.PAGESIZE, bits.itemsize
    # Rounded up: if memory isn't aligned to its elements, one element may cross the end of a page.
    before, behind = -(bits.ctypes.data // -page) * page - bits.ctypes.data, (bits.ctypes.data + bits.nbytes) % page
    return [bits[: -(-before // size)], bits[len(bits) - -(-behind // size) :]]


def _samples(bits: Bits) -> Bits:
    """Returns the elements of a tensor that are compared if watching pages isn't enough."""
    # With an odd step the samples aren't all in one column of a matrix whose width is a power of two.
    return bits if bits.nbytes < _WHOLE_BYTES else bits[:: max(1, len(bits) // _SAMPLES) | 1]


_lock = threading.Lock()
_packed: WeakKeyDictionary[nn.Module, dict[str, tuple[Fingerprint, object]]] = WeakKeyDictionary()


def packed(
    model: nn.Module,
    precision: str,
    pack: Callable[[], T],
    *,
    find: FindGuards,
    may_be_old: bool = False,
) -> T:
    """Returns the result of `pack` for a model in a precision, and packs again if the model has changed.

    Each model has one result per precision, which all threads share and which is dropped with the model.

    Args:
        model: a model, or a stack of layers, whose weights `pack` reads.
        precision: the name of the result.
        pack: packs the weights. Its result must not refer to the model, or neither would ever be freed.
        find: finds the guards of the model.
        may_be_old: return an existing result even if the model has changed since; the caller checks again before use.
    """
    with _lock:
        kept = _packed.setdefault(model, {})
        if may_be_old and precision in kept:
            return cast(T, kept[precision][1])
        now = _drop_old(model, kept, find)
        if precision not in kept:
            kept[precision] = (now, pack())
        return cast(T, kept[precision][1])


def _drop_old(model: nn.Module, kept: dict[str, tuple[Fingerprint, object]], find: FindGuards) -> Fingerprint:
    """Drops the results from before a model's changes: memory may not suffice for two. Returns its fingerprint."""
    now = fingerprint(model, find)
    for name in [name for name, (before, _) in kept.items() if before != now]:
        del kept[name]
    return now


def is_packed(model: nn.Module, precision: str) -> bool:
    """Returns whether `packed` has a result for a model, be it current or outdated."""
    with _lock:
        return precision in _packed.get(model, ())


def packed_before(model: nn.Module, precision: str, *, find: FindGuards) -> Any:
    """Returns the result of `packed` if it exists and is current; else None, without packing."""
    with _lock:
        kept = _packed.get(model, {})
        if precision in kept:
            _drop_old(model, kept, find)
        return kept[precision][1] if precision in kept else None


def unpack(model: nn.Module) -> None:
    """Drops the packed weights of a model."""
    with _lock:
        _packed.pop(model, None)


def repack(model: nn.Module) -> None:
    """Makes the next batch pack the weights of a model again for the C++ engine, in `generate` and in a Translator.

    It is for changes that PyTorch doesn't count, through `parameter.data` or an array that shares its memory, if the
    system doesn't report writes: without Linux 6.7 or newer, in a sandbox that forbids `userfaultfd` (as Docker's
    default one does), in memory that is pinned for a device, and for models beyond the first thousands in one process.
    It is also for writes of another process to memory or a file that this process has mapped. In these cases a change
    of a few elements of a matrix can go unnoticed. All other changes are noticed without this.

    Args:
        model: the model that was changed, or a module that contains it.

    Raises:
        ValueError: `model` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"expected a model, got {type(model).__name__}")
    with _lock:
        for module in model.modules():
            _packed.pop(module, None)


def _renew_lock() -> None:
    # A child process has no threads that might hold the lock.
    global _lock
    _lock = threading.Lock()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_renew_lock)
