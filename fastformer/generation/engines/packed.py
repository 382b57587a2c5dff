"""What has been packed of models for the C++ engine, and whether it is still true."""

from __future__ import annotations

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

T = TypeVar("T")

_SAMPLES = 32  # of each tensor
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Fingerprint(NamedTuple):
    """What is another one when a model has changed; see `fingerprint`."""

    layout: tuple[list[Any], ...]
    versions: list[int]
    samples: bytes
    config: tuple[object, ...]


class _Watch:
    """The places where a model keeps its tensors, and views of some elements of each: looking again is cheap.

    The views keep the memory of tensors that were replaced until the model is looked at again.
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
        self.samples = [_sample(tensor.detach()) for tensor in self.tensors if tensor.numel()]

    def is_current(self) -> bool:
        """Whether the model keeps the same objects in the same places."""
        return all(map(is_, self._objects, starmap(dict.get, self._places)))


_watches: WeakKeyDictionary[nn.Module, _Watch] = WeakKeyDictionary()


def fingerprint(model: nn.Module) -> Fingerprint:
    """What is another one when a parameter or buffer of a model was changed or replaced, or its config was.

    PyTorch counts the changes of a tensor, but for those through `parameter.data`. For them a few elements of each
    tensor are compared: a change of all elements, as a step of an optimizer is, can't be missed, one of a few can.

    Args:
        model: for which `why_not_packable` gives None: its tensors are on the CPU, and its modules are those that its
            config makes.
    """
    watch = _watches.get(model)
    current = watch is not None and watch.is_current()
    layout = _layout(watch.tensors) if watch is not None and current else ()
    if watch is None or not current or layout != watch.layout:
        watch = _watches[model] = _Watch(model)
        layout = watch.layout
    samples = np.concatenate(watch.samples).tobytes() if watch.samples else b""
    config = tuple(vars(model.config).values())
    return Fingerprint(layout, [tensor._version for tensor in watch.tensors], samples, config)


def _layout(tensors: list[Tensor]) -> tuple[list[Any], ...]:
    """Where the tensors are, and how their memory is read."""
    return (
        [*map(id, tensors)],
        [tensor.data_ptr() for tensor in tensors],
        [tensor.shape for tensor in tensors],
        [tensor.stride() for tensor in tensors],
        [tensor.dtype for tensor in tensors],
    )


def _sample(tensor: Tensor) -> npt.NDArray[np.integer[Any]]:
    """Some elements as bits, a view."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    # An odd step doesn't stay in one column of a matrix whose width is a power of two.
    step = max(1, extent // _SAMPLES) | 1
    bits = tensor.as_strided((extent,), (1,)).view(_BITS[tensor.element_size()])
    return cast(npt.NDArray[np.integer[Any]], bits.numpy()[::step])


_lock = threading.Lock()
_packed: WeakKeyDictionary[nn.Module, dict[str, tuple[Fingerprint, Any]]] = WeakKeyDictionary()


def packed(model: nn.Module, precision: str, pack: Callable[[], T]) -> T:
    """What `pack` made of a model in a precision, made again when the model has changed since.

    There is one at a time for each model and precision, the same in all threads, and none when the model is gone.

    Args:
        model: for which `why_not_packable` gives None.
        precision: names what is packed.
        pack: packs it. What it returns must not refer to the model, or neither would ever be let go.
    """
    with _lock:
        kept = _packed.setdefault(model, {})
        now = fingerprint(model)
        for name in [name for name, (before, _) in kept.items() if before != now]:
            del kept[name]  # there may be no memory for two
        if precision not in kept:
            kept[precision] = (now, pack())
        return cast(T, kept[precision][1])


def _renew_lock() -> None:
    # A child process has none of the threads that might have held it.
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)
