"""One frozen copy of a model's weights for each precision, and the stamp by which an outdated copy is noticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fastformer.locks import ForkSafeLock
from fastformer.ops import _extension

T = TypeVar("T")
# (model) -> the tensors that its copies are made of. It raises the caller's error if no copy may be made any more.
FindTensors = Callable[[Any], list[Tensor]]

_SAMPLES = 4  # of each tensor
_SAMPLE_BYTES = 64


class UnfitError(Exception):
    """The engine can't run this model, or not in this precision; the text says why."""


class Stamp(NamedTuple):
    """A value that differs after the weights or the config of a model have changed; see `stamp_of`."""

    layout: object
    versions: object
    samples: object
    config: tuple[object, ...]


class _Entry:
    """What is stored for a model.

    Attributes:
        layout: the layout of the tensors (see `layout_of`) from which `tensors` and `places` were made.
        tensors: the tensors that are sampled, which are kept alive.
        places: (address, number of bytes) of their samples.
        notes: the findings about the model of other rooms, by name.
        copies: by precision, the stamp of the weights and the copy made of them, or the reason why there is none.
    """

    def __init__(self) -> None:
        self.layout: object = None
        self.tensors: list[Tensor] = []
        self.places: list[tuple[int, int]] = []
        self.notes: dict[str, Any] = {}
        self.copies: dict[str, tuple[Stamp, object]] = {}


class _Refusal(NamedTuple):
    reason: str


_lock = ForkSafeLock()
_entries: WeakKeyDictionary[nn.Module, _Entry] = WeakKeyDictionary()


def _entry_of(model: nn.Module) -> _Entry:
    entry = _entries.get(model)
    if entry is None:
        entry = _entries[model] = _Entry()
    return entry


def notes_of(model: nn.Module) -> dict[str, Any]:
    """Returns a dictionary for findings about a model, which `repack` drops. They must not refer to the model."""
    return _entry_of(model).notes


def layout_of(tensors: list[Tensor]) -> object:
    """Returns the identities of tensors, their addresses, and the layout by which their memory is read."""
    in_cpp = _extension.host_function("tensor_layout")
    layout = None if in_cpp is None else in_cpp(tensors)
    if layout is not None:
        return layout
    return (
        [*map(id, tensors)],
        [tensor.data_ptr() for tensor in tensors],
        [tensor.shape for tensor in tensors],
        [tensor.stride() for tensor in tensors],
        [tensor.dtype for tensor in tensors],
    )


def stamp_of(model: nn.Module, tensors: list[Tensor]) -> Stamp:
    """Returns a value that differs after a tensor or the config of a model was changed or replaced.

    It notices all changes that PyTorch counts, and tensors that were replaced or moved. PyTorch doesn't count writes
    through `parameter.data` or an array that shares its memory. Of these it notices those to a whole tensor, by a few
    samples, but not those to a part of one; see `repack`.

    Args:
        model: the model, whose attribute `config`, if it has one, is read.
        tensors: the model's tensors.

    Raises:
        UnfitError: the engine can't read a tensor, or couldn't notice its changes.
    """
    entry, layout = _entry_of(model), layout_of(tensors)
    if entry.layout != layout:
        if (reason := next(filter(None, map(_why_not, tensors)), None)) is not None:
            raise UnfitError(reason)
        places = [place for tensor in tensors for place in _samples(tensor)]
        entry.layout, entry.tensors, entry.places = layout, tensors, places
    count, digest = _extension.host_function("tensor_versions"), _extension.host_function("memory_digest")
    versions = [tensor._version for tensor in tensors] if count is None else count(tensors)
    config = vars(model).get("config")
    return Stamp(
        layout,
        versions,
        None if digest is None else digest(entry.places),
        () if config is None else tuple(vars(config).values()),
    )


def _why_not(tensor: Tensor) -> str | None:
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return f"a weight is on {tensor.device}, {tensor.layout}"
    if tensor.is_inference():
        return "a weight was made in inference mode, whose changes could not be noticed"
    return None


def _samples(tensor: Tensor) -> list[tuple[int, int]]:
    """Returns a few places of a tensor, from its first to its last element, as (address, number of bytes)."""
    if not tensor.numel():
        return []
    extent = tensor.numel()
    if not tensor.is_contiguous():
        extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin, rest = tensor.data_ptr(), extent * tensor.element_size() - _SAMPLE_BYTES
    if rest <= _SAMPLE_BYTES * _SAMPLES:
        return [(begin, rest + _SAMPLE_BYTES)]
    return [(begin + rest * i // (_SAMPLES - 1), _SAMPLE_BYTES) for i in range(_SAMPLES)]


def packed(
    model: nn.Module, precision: str, pack: Callable[[], T], *, find: FindTensors, may_be_old: bool = False
) -> T:
    """Returns the copy of a model's weights in a precision, and packs them again if the model has changed.

    Each model has one copy per precision, which all threads share and which is dropped with the model.

    Args:
        model: a model, or a stack of layers, whose weights `pack` reads.
        precision: the name of the copy.
        pack: packs the weights. Its result must not refer to the model, or neither would ever be freed.
        find: finds the tensors of the model.
        may_be_old: return an existing copy even if the model has changed since; the caller checks again before use.

    Raises:
        UnfitError: `pack` raised it, now or before for the same weights.
    """
    with _lock:
        entry = _entries.get(model)
        if may_be_old and entry is not None and precision in entry.copies:
            old = entry.copies[precision][1]
            if not isinstance(old, _Refusal):
                return cast(T, old)
        now = _drop_old(model, find)
        copies = _entries[model].copies
        if precision not in copies:
            try:
                copies[precision] = (now, pack())
            except UnfitError as error:
                copies[precision] = (now, _Refusal(str(error)))
        copy = copies[precision][1]
    if isinstance(copy, _Refusal):
        raise UnfitError(copy.reason)
    return cast(T, copy)


def _drop_old(model: nn.Module, find: FindTensors) -> Stamp:
    """Drops the copies from before a model's changes: memory may not suffice for two. Returns the model's stamp."""
    now = stamp_of(model, find(model))
    copies = _entries[model].copies
    for name in [name for name, (before, _) in copies.items() if before != now]:
        del copies[name]
    return now


def is_packed(model: nn.Module, precision: str) -> bool:
    """Returns whether `packed` has a copy for a model, be it current or outdated."""
    with _lock:
        return not isinstance(_copy_of(model, precision), _Refusal | None)


def packed_before(model: nn.Module, precision: str, *, find: FindTensors) -> Any:
    """Returns the copy that `packed` made if it exists and is current; else None, without packing."""
    with _lock:
        if isinstance(_copy_of(model, precision), _Refusal | None):
            return None
        _drop_old(model, find)
        return _copy_of(model, precision)


def refusal(model: nn.Module, precision: str) -> str | None:
    """Returns why the last attempt to pack a model in a precision failed; None if it didn't, or there was none."""
    with _lock:
        copy = _copy_of(model, precision)
    return copy.reason if isinstance(copy, _Refusal) else None


def _copy_of(model: nn.Module, precision: str) -> object:
    entry = _entries.get(model)
    return None if entry is None else entry.copies.get(precision, (None, None))[1]


def unpack(model: nn.Module) -> None:
    """Drops the copies of a model's weights."""
    with _lock:
        _entries.pop(model, None)


def repack(model: nn.Module) -> None:
    """Makes the next call examine a model anew, and pack its weights again if it needs a packed copy.

    A change that PyTorch counts is noticed without this, and so are parameters that were replaced or moved. Call it
    after you have written to a part of a tensor through `parameter.data`, through a NumPy array that shares the memory,
    or from another process, or replaced a method of a class inside of the model: a call notices none of these.

    Args:
        model: the model that was changed, or a module that contains it.

    Raises:
        ValueError: `model` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"expected a model, got {type(model).__name__}")
    for module in model.modules():
        unpack(module)
