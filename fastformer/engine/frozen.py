"""One frozen copy of a model's weights for each precision, and the stamp by which an outdated copy is noticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

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


class _Sampled(NamedTuple):
    layout: object  # see `layout_of`
    tensors: list[Tensor]
    places: list[tuple[int, int]]  # (address, number of bytes)


class _Refusal(NamedTuple):
    reason: str


# The name of the attribute that holds a module's `Notes`.
ATTRIBUTE = "_fastformer_notes"
_lock = ForkSafeLock()


class Notes:
    """What this library notes about a module, in one attribute of it. Nothing here may refer to the module.

    A copy of the module has its settings, and is examined and packed anew. A shallow copy shares all notes until its
    settings are changed; the guards and stamps of what it shares notice in which of its attributes it differs.

    Attributes:
        owner: the id of the module for which this was made; None: it was copied.
        settings: the decisions of `accelerate`, by name.
        findings: the results of checks, with the guards as long as which they hold, by name; `repack` drops them.
        copies: by precision, the stamp of the weights and the copy made of them, or the reason why there is none.
        sampled: the tensors that are sampled, which are kept alive; replaced as a whole, for threads without the lock.
    """

    def __init__(self, settings: dict[str, Any], owner: int | None = None) -> None:
        self.owner, self.settings = owner, settings
        self.findings: dict[object, Any] = {}
        self.copies: dict[str, tuple[Stamp, object]] = {}
        self.sampled = _Sampled(None, [], [])

    def __reduce__(self) -> tuple[type[Notes], tuple[dict[str, Any]]]:
        return Notes, (self.settings,)


def notes_of(module: nn.Module) -> Notes:
    """Returns a module's notes, which it gets if it has none."""
    try:  # each call of a model asks several times, and finds them but once
        notes: Notes = module.__dict__[ATTRIBUTE]
    except KeyError:
        notes = module.__dict__.setdefault(ATTRIBUTE, Notes({}, id(module)))
    return notes


def setting_of(module: nn.Module, name: str) -> Any:
    """Returns a decision of `accelerate` for a module; None if there is none."""
    notes: Notes | None = vars(module).get(ATTRIBUTE)
    return None if notes is None else notes.settings.get(name)


def settings_to_change(module: nn.Module) -> dict[str, Any]:
    """Returns the decisions of `accelerate` for a module, which no other module shares."""
    notes = notes_of(module)
    if notes.owner != id(module):
        notes = vars(module)[ATTRIBUTE] = Notes(dict(notes.settings), id(module))
    return notes.settings


def forget_setting(module: nn.Module, name: str) -> Any:
    """Removes a decision of `accelerate` for a module, and returns it; None if there is none."""
    return None if setting_of(module, name) is None else settings_to_change(module).pop(name)


def forget_notes(module: nn.Module) -> None:
    """Removes the attribute with a module's notes."""
    vars(module).pop(ATTRIBUTE, None)


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
    samples, but not those to a part of one, nor those on a GPU; see `repack`.

    Args:
        model: the model, whose attribute `config`, if it has one, is read.
        tensors: the model's tensors.

    Raises:
        UnfitError: the engine can't read a tensor, or couldn't notice its changes.
    """
    layout, notes = layout_of(tensors), notes_of(model)
    if notes.sampled.layout != layout:
        places: list[tuple[int, int]] = []
        for tensor in tensors:
            _add_samples(tensor, places)
        notes.sampled = _Sampled(layout, tensors, places)
    count, digest = _extension.host_function("tensor_versions"), _extension.host_function("memory_digest")
    versions = [tensor._version for tensor in tensors] if count is None else count(tensors)
    config = vars(model).get("config")
    return Stamp(
        layout,
        versions,
        None if digest is None else digest(notes.sampled.places),
        () if config is None else tuple(vars(config).values()),
    )


def _add_samples(tensor: Tensor, places: list[tuple[int, int]]) -> None:
    """Adds a few places of a tensor on the CPU, from its first to its last element, as (address, number of bytes)."""
    if tensor.device.type not in ("cpu", "cuda") or tensor.layout != torch.strided:
        raise UnfitError(f"a weight is on {tensor.device}, {tensor.layout}")
    if tensor.is_inference():
        raise UnfitError("a weight was made in inference mode, whose changes could not be noticed")
    if not tensor.numel() or tensor.device.type != "cpu":
        return
    extent = tensor.numel()
    if not tensor.is_contiguous():
        extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin, rest = tensor.data_ptr(), extent * tensor.element_size() - _SAMPLE_BYTES
    if rest <= _SAMPLE_BYTES * _SAMPLES:
        places.append((begin, rest + _SAMPLE_BYTES))
        return
    for i in range(_SAMPLES):
        places.append((begin + rest * i // (_SAMPLES - 1), _SAMPLE_BYTES))


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
    copies = notes_of(model).copies
    before, copy = copies.get(precision, (None, None))
    # Without the lock: another model may be packed meanwhile.
    if copy is not None and type(copy) is not _Refusal and (may_be_old or before == stamp_of(model, find(model))):
        return cast(T, copy)
    copy = None  # memory may not suffice for it and the next one
    with _lock:
        now = _drop_old(model, find)
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
    copies = notes_of(model).copies
    for name, (before, _) in list(copies.items()):
        if before != now:
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
    notes: Notes | None = vars(model).get(ATTRIBUTE)
    return None if notes is None else notes.copies.get(precision, (None, None))[1]


def unpack(model: nn.Module) -> None:
    """Drops the copies of a model's weights."""
    notes: Notes | None = vars(model).get(ATTRIBUTE)
    if notes is not None:
        with _lock:
            notes.copies.clear()
            notes.sampled = _Sampled(None, [], [])


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
        notes: Notes | None = vars(module).get(ATTRIBUTE)
        if notes is not None:
            notes.findings.clear()
