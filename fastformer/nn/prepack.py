"""The weights of models and stacks that are packed for the C++ engine, and whether they are still their own."""

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
    """The tensors of a model or a stack, as `ModelGuards` has them."""

    @property
    def tensors(self) -> list[Tensor]:
        """All of which a change counts."""

    @property
    def layout(self) -> object:
        """Where they are; see `layout_of`."""


# (model) -> the guards of a model that may be packed, or None and why it may not.
FindGuards: TypeAlias = Callable[[Any], tuple[Held | None, str | None]]
if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Bits: TypeAlias = npt.NDArray[np.integer[Any]]

_SAMPLES = 32  # of each tensor, where the system doesn't say what was written
_WHOLE_BYTES = 2 * mmap.PAGESIZE  # tensors below are read whole
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_numbers = itertools.count()


class Fingerprint(NamedTuple):
    """Differs once the weights or the config of a model have changed; see `fingerprint`."""

    layout: object
    versions: object
    period: int
    read: bytes
    config: tuple[object, ...]


class _Watch:
    """Finds out whether the tensors of a model were written. It keeps them alive.

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
        if self._digest is not None:  # which reads what lies in one piece
            whole = [part for part in self._read if part.flags.c_contiguous]
            self._places = [(part.ctypes.data, part.nbytes) for part in whole]  # of tensors, which this keeps alive
            self._read = [part for part in self._read if not part.flags.c_contiguous]

    def look(self) -> bytes:
        """Begins another period if the watched memory was written. Returns what has to be read of the rest."""
        if self._pages is not None and self._pages.is_written():
            self.period = next(_numbers)
            if not self._pages.begin():
                # A child process may be denied what its parent had: then each look is another.
                return next(_numbers).to_bytes(8, "big")
        seen = b"" if self._digest is None else self._digest(self._places)
        return seen + b"".join([part.tobytes() for part in self._read])

    def end(self) -> None:
        """Stops watching. Call it before another watch of the same memory begins, which this would end."""
        if self._pages is not None:
            self._pages.end()

    def __del__(self) -> None:
        self.end()


_watches: WeakKeyDictionary[nn.Module, _Watch] = WeakKeyDictionary()


def fingerprint(model: nn.Module, find: FindGuards) -> Fingerprint:
    """A value that differs once a parameter or buffer of a model was changed or replaced, or its config was changed.

    PyTorch counts the changes of a tensor, but for those through `parameter.data` or an array that shares its memory.
    Where Linux says what was written (see `page_watch`), each of these is noticed as well. Elsewhere, and where other
    processes may write, a few elements of each matrix are compared, and all of each vector: there, a change of a few
    elements of a matrix can be missed; see `repack`.

    Args:
        model: whose weights are read.
        find: its guards.

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
    """All that lies between a tensor's first and last element, as bits, a view."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    bits = tensor.as_strided((extent,), (1,)).view(_BITS[tensor.element_size()])
    return cast("Bits", bits.numpy())


def _range(bits: Bits) -> tuple[int, int]:
    # A small tensor is read whole: its page has neighbours, and so have the first and the last page of a large one.
    begin = bits.ctypes.data
    return (begin, begin + bits.nbytes) if bits.nbytes >= _WHOLE_BYTES else (begin, begin)


def _edges(bits: Bits) -> list[Bits]:
    """What of a tensor no watched page holds."""
    if bits.nbytes < _WHOLE_BYTES:
        return [bits]
    page, size = mmap.PAGESIZE, bits.itemsize
    # Rounded up: memory that begins at any byte has elements on both sides of a page's end.
    before, behind = -(bits.ctypes.data // -page) * page - bits.ctypes.data, (bits.ctypes.data + bits.nbytes) % page
    return [bits[: -(-before // size)], bits[len(bits) - -(-behind // size) :]]


def _samples(bits: Bits) -> Bits:
    """The part of a tensor that is compared if the pages don't tell all."""
    # An odd step doesn't stay in one column of a matrix whose width is a power of two.
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
    """What `pack` made of a model in a precision, made again when the model has changed since.

    There is one at a time for each model and precision, the same in all threads, and none when the model is gone.

    Args:
        model: one whose weights `pack` reads, a stack of layers among them.
        precision: names what is packed.
        pack: packs it. What it returns must not refer to the model, or neither would ever be freed.
        find: the guards of the model.
        may_be_old: accept what is there, whether or not the model has changed since: the caller asks again before use.
    """
    with _lock:
        kept = _packed.setdefault(model, {})
        if may_be_old and precision in kept:
            return cast(T, kept[precision][1])
        now = fingerprint(model, find)
        for name in [name for name, (before, _) in kept.items() if before != now]:
            del kept[name]  # there may be no memory for two
        if precision not in kept:
            kept[precision] = (now, pack())
        return cast(T, kept[precision][1])


def is_packed(model: nn.Module, precision: str) -> bool:
    """Whether there is something that `packed` made, as the model is now or as it was."""
    with _lock:
        return precision in _packed.get(model, ())


def packed_before(model: nn.Module, precision: str, *, find: FindGuards) -> Any:
    """The result of `packed` for a model as it is now, or None: nothing is packed for this call."""
    with _lock:
        kept = _packed.get(model, {})
        if precision not in kept:
            return None
        now = fingerprint(model, find)
        for name in [name for name, (before, _) in kept.items() if before != now]:
            del kept[name]
        return kept[precision][1] if precision in kept else None


def unpack(model: nn.Module) -> None:
    """Drops what was packed of a model by itself."""
    with _lock:
        _packed.pop(model, None)


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


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_renew_lock)
