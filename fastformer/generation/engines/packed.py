"""What has been packed of models for the C++ engine, and whether it is still true."""

from __future__ import annotations

import itertools
import mmap
import os
import threading
from collections.abc import Callable
from itertools import starmap
from operator import is_
from typing import Any, NamedTuple, TypeVar, cast
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fastformer.generation.engines.page_watch import PageWatch

T = TypeVar("T")

_SAMPLES = 32  # of each tensor, where the system doesn't say what was written
_WHOLE_BYTES = 2 * mmap.PAGESIZE  # tensors below are read whole
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_numbers = itertools.count()


class Fingerprint(NamedTuple):
    """What is another one when a model has changed; see `fingerprint`."""

    layout: tuple[list[Any], ...]
    versions: list[int]
    period: int
    read: bytes
    config: tuple[object, ...]


class _Watch:
    """The places where a model keeps its tensors, and what tells that these were written: looking again is cheap.

    It keeps the memory of tensors that were replaced until the model is looked at again.
    """

    def __init__(self, model: nn.Module) -> None:
        self._places: list[tuple[dict[str, Any], str]] = []
        for module in model.modules():
            for kept in (module._modules, module._parameters, module._buffers):
                places = cast(dict[str, Any], kept)
                self._places += [(places, name) for name, value in places.items() if value is not None]
        self._objects = [kept[name] for kept, name in self._places]
        self.tensors = [value for value in self._objects if isinstance(value, Tensor)]
        self.layout = _layout(self.tensors)
        memory = [_memory(tensor.detach()) for tensor in self.tensors if tensor.numel()]
        self._pages: PageWatch | None = PageWatch(map(_range, memory))
        is_pinned = torch.cuda.is_initialized() and any(tensor.is_pinned() for tensor in self.tensors)
        if is_pinned or not self._pages.begin():
            self._pages = None
        self.period = next(_numbers)
        self._read = [part for bits in memory for part in _edges(bits)] if self._pages is not None else []
        if self._pages is None or not self._pages.is_private:
            self._read += map(_samples, memory)

    def is_current(self) -> bool:
        """Whether the model keeps the same objects in the same places."""
        return all(map(is_, self._objects, starmap(dict.get, self._places)))

    def look(self) -> bytes:
        """Begins another period where the watched memory was written; what has to be read to know about the rest."""
        if self._pages is not None and self._pages.is_written():
            self.period = next(_numbers)
            if not self._pages.begin():
                # A child process may be denied what its parent had: then each look is another.
                return next(_numbers).to_bytes(8, "big")
        return b"".join([part.tobytes() for part in self._read])

    def end(self) -> None:
        """Looks no more. It comes before another look at the same memory begins, which it would end."""
        if self._pages is not None:
            self._pages.end()

    def __del__(self) -> None:
        if hasattr(self, "_pages"):
            self.end()


_watches: WeakKeyDictionary[nn.Module, _Watch] = WeakKeyDictionary()


def fingerprint(model: nn.Module) -> Fingerprint:
    """What is another one when a parameter or buffer of a model was changed or replaced, or its config was.

    PyTorch counts the changes of a tensor, but for those through `parameter.data` or an array that shares its memory.
    Where Linux says what was written (see `page_watch`), each of these is noticed as well. Elsewhere, and where other
    processes may write, a few elements of each matrix are compared, and all of each vector: there, a change of a few
    elements of a matrix can be missed; see `repack`.

    Args:
        model: for which `why_not_packable` gives None: its tensors are on the CPU, and its modules are those that its
            config makes.
    """
    watch = _watches.get(model)
    current = watch is not None and watch.is_current()
    layout = _layout(watch.tensors) if watch is not None and current else ()
    if watch is None or not current or layout != watch.layout:
        if watch is not None:
            watch.end()
        watch = _watches[model] = _Watch(model)
        layout = watch.layout
    versions, read = [tensor._version for tensor in watch.tensors], watch.look()
    return Fingerprint(layout, versions, watch.period, read, tuple(vars(model.config).values()))


def _layout(tensors: list[Tensor]) -> tuple[list[Any], ...]:
    """Where the tensors are, and how their memory is read."""
    return (
        [*map(id, tensors)],
        [tensor.data_ptr() for tensor in tensors],
        [tensor.shape for tensor in tensors],
        [tensor.stride() for tensor in tensors],
        [tensor.dtype for tensor in tensors],
    )


def _memory(tensor: Tensor) -> npt.NDArray[np.integer[Any]]:
    """All that lies between a tensor's first and last element, as bits, a view."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    bits = tensor.as_strided((extent,), (1,)).view(_BITS[tensor.element_size()])
    return cast(npt.NDArray[np.integer[Any]], bits.numpy())


def _range(bits: npt.NDArray[np.integer[Any]]) -> tuple[int, int]:
    # A small tensor is read whole: its page has neighbours, and so have the first and the last page of a large one.
    begin = bits.ctypes.data
    return (begin, begin + bits.nbytes) if bits.nbytes >= _WHOLE_BYTES else (begin, begin)


def _edges(bits: npt.NDArray[np.integer[Any]]) -> list[npt.NDArray[np.integer[Any]]]:
    """What of a tensor no watched page holds."""
    if bits.nbytes < _WHOLE_BYTES:
        return [bits]
    page, size = mmap.PAGESIZE, bits.itemsize
    # Rounded up: memory that begins at any byte has elements on both sides of a page's end.
    before, behind = -(bits.ctypes.data // -page) * page - bits.ctypes.data, (bits.ctypes.data + bits.nbytes) % page
    return [bits[: -(-before // size)], bits[len(bits) - -(-behind // size) :]]


def _samples(bits: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.integer[Any]]:
    """What of a tensor is compared where the pages don't tell all."""
    # An odd step doesn't stay in one column of a matrix whose width is a power of two.
    return bits if bits.nbytes < _WHOLE_BYTES else bits[:: max(1, len(bits) // _SAMPLES) | 1]


_lock = threading.Lock()
_packed: WeakKeyDictionary[nn.Module, dict[str, tuple[Fingerprint, Any]]] = WeakKeyDictionary()


def packed(model: nn.Module, precision: str, pack: Callable[[], T], *, may_be_old: bool = False) -> T:
    """What `pack` made of a model in a precision, made again when the model has changed since.

    There is one at a time for each model and precision, the same in all threads, and none when the model is gone.

    Args:
        model: for which `why_not_packable` gives None.
        precision: names what is packed.
        pack: packs it. What it returns must not refer to the model, or neither would ever be let go.
        may_be_old: what is there will do, whatever has become of the model since: the caller asks again before use.
    """
    with _lock:
        kept = _packed.setdefault(model, {})
        if may_be_old and precision in kept:
            return cast(T, kept[precision][1])
        now = fingerprint(model)
        for name in [name for name, (before, _) in kept.items() if before != now]:
            del kept[name]  # there may be no memory for two
        if precision not in kept:
            kept[precision] = (now, pack())
        return cast(T, kept[precision][1])


def repack(model: nn.Module) -> None:
    """Has the next batch pack the weights of a model again for the C++ engine, in `generate` as in a Translator.

    It is for changes that PyTorch doesn't count, through `parameter.data` or an array that shares its memory, where the
    system doesn't tell what was written: without Linux 6.7 or newer, in a sandbox that forbids `userfaultfd` (as
    Docker's default one does), in memory that is pinned for a device, and for models beyond the first thousands in one
    process. It is also for what another process writes to memory or a file that this one has mapped. There, a change of
    a few elements of a matrix can go unnoticed. All other changes are noticed without this.

    Args:
        model: the one that was changed, or one that holds it.

    Raises:
        ValueError: something else than a module.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"expected a model, got {type(model).__name__}")
    with _lock:
        for module in model.modules():
            _packed.pop(module, None)


def _renew_lock() -> None:
    # A child process has none of the threads that might have held it.
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)
