"""What is known of a model until it changes: findings about its modules, and frozen copies of its weights.

A plan decides for a whole tree of modules which parts may be fused and which padding may be omitted. It walks the tree
once and holds as long as its `Guards` hold. Checking them is one flat comparison of identities; `Plans` makes a new
plan when they fail. CUDA graphs, which replay the work of one call, depend on the model's tensors, too, which
`ModelGuards` watch. The C++ engine has one frozen copy of a model's weights for each precision, and a stamp by which
an outdated copy is noticed (`packed`).

Noticed are modules, parameters and buffers that were replaced, hooks, forwards and settings on instances, and train or
eval. Classes and functions of PyTorch are examined when a plan is made, and not again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator
from copy import deepcopy
from itertools import chain, starmap
from operator import is_
from typing import Any, Generic, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from fastformer.engine.checks import HOOKS, examine_again, gathers, has_plain_tensors, is_unhooked, is_watched
from fastformer.locks import ForkSafeLock
from fastformer.ops import _extension

T = TypeVar("T")
# (model) -> the tensors that its copies are made of. It raises the caller's error if no copy may be made any more.
FindTensors = Callable[[Any], list[Tensor]]

# The settings of a module that choose the dimension along which it works, or the way in which it is called.
_SETTINGS = frozenset(
    {
        *("dim", "normalized_shape", "num_parameters", "gradient_checkpointing", "forward", "_compiled_call_impl"),
        *("activation", "norm_first"),
        *("is_causal", "chunk_size_feed_forward", "position_embedding_type", "has_relative_attention_bias", "config"),
    }
)
# A forward on the owner itself is not watched: the owner's caller handles it.
_OF_THE_OWNER_ALONE = frozenset({"forward", "_compiled_call_impl"})
_SAMPLES = 4  # of each tensor
_SAMPLE_BYTES = 64


class UnfitError(Exception):
    """The engine can't run this model, or not in this precision; the text says why."""


class Stamp(NamedTuple):
    """A value that differs after the weights, the config or the settings of a model have changed; see `stamp_of`."""

    layout: object
    versions: object
    samples: object
    config: tuple[object, ...]
    settings: object


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


class Guards:
    """A snapshot of modules and their classes, by which later changes are noticed.

    It keeps the modules inside of the owner alive, but not the owner: let the owner hold it (see `Plans`).

    Args:
        owner: the module whose class, children and settings are watched. It may have hooks and a forward of its own.
        modules: the modules inside of the owner whose class, children, hooks, functions, and call settings are watched.
            Each is watched by itself, so pass the modules inside of them, too.
        wholly: further modules, of which all attributes are watched, with numbers and flags such as `training`, and the
            classes of their parameters. The parameters may be replaced by others of the same class.
        strangers: further modules of which only the class is watched.
        spaces: further dictionaries of which every value is watched. None may lead to the owner's own dictionary.
        lent: those of the modules whose parameters change their class in each call of a layer around them.
    """

    def __init__(
        self,
        owner: nn.Module,
        modules: Iterable[nn.Module] = (),
        *,
        wholly: Iterable[nn.Module] = (),
        strangers: Iterable[nn.Module] = (),
        spaces: Iterable[dict[str, object]] = (),
        lent: Collection[nn.Module] = (),
    ) -> None:
        modules, wholly, others = tuple(modules), tuple(wholly), tuple(spaces)
        every = (*modules, *wholly, *strangers)
        attributes_of_owner, partly, whole = vars(owner), [*map(vars, modules)], [*map(vars, wholly)]
        # Nothing here may refer to the owner's own dictionary, which refers to this object.
        names = ["_modules", *(name for name in watched_names(attributes_of_owner) if name not in _OF_THE_OWNER_ALONE)]
        # Dictionaries of which every value is watched, and attributes (dictionary, name), each watched alone.
        watched = [attributes_of_owner["_modules"], *others, *whole]
        watched += [each[name] for each in (*partly, *whole) for name in ("_modules", *HOOKS)]
        # The dictionaries of hooks themselves are watched, too, since users may replace them.
        attributes = [
            (each, name)
            for each in partly
            for name in ("_modules", *HOOKS, *watched_names(each), "forward", "_compiled_call_impl")
        ]
        tensors = [each._parameters for each in wholly if each not in lent]
        sized = [*watched, *partly, *tensors]
        watched = [space for space in watched if space]  # an empty one of the same size has no values
        self._record = (
            *((type(owner), *map(type, every)), every, tuple(names), tuple(map(attributes_of_owner.get, names))),
            *(tuple(sized), (len(attributes_of_owner), *map(len, sized))),
            *(tuple(watched), tuple(chain.from_iterable(map(dict.values, watched)))),
            *(tuple(attributes), tuple([space.get(name) for space, name in attributes])),
            *(tuple(tensors), tuple(map(type, chain.from_iterable(map(dict.values, tensors))))),
        )

    def hold(self, owner: nn.Module) -> bool:
        """Returns whether the owner and the modules inside of it are unchanged."""
        in_cpp = self._in_cpp
        return self._hold(owner) if in_cpp is None else bool(in_cpp.holds(owner, self._record))

    @functools.cached_property
    def _in_cpp(self) -> Any:
        made = _extension.host_function("GuardRecord")
        return None if made is None else made(self._record)

    def _hold(self, owner: nn.Module) -> bool:
        """Computes `hold` without the C++ extension: built-in functions over flat columns."""
        kinds, modules, names, own_values, sized, sizes, *_, tensors, types = self._record
        attributes_of_owner, [spaces, values, attributes, expected] = vars(owner), self._record[6:10]
        return (
            all(map(is_, kinds, map(type, (owner, *modules))))
            and sizes == (len(attributes_of_owner), *map(len, sized))
            and all(map(is_, own_values, map(attributes_of_owner.get, names)))
            and all(map(is_, values, chain.from_iterable(map(dict.values, spaces))))
            and all(map(is_, expected, starmap(dict.get, attributes)))
            and all(map(is_, types, map(type, chain.from_iterable(map(dict.values, tensors)))))
        )


_SCALARS = (bool, int, float, str, tuple)


class ModelGuards:
    """A snapshot of a model: its modules with their settings and hooks, and the addresses of its tensors.

    The values of tensors may change. The guards keep the tensors and the modules inside of the model alive, but not the
    model, so that a weak dictionary of models can hold them.

    Args:
        model: the model. If one of its methods is an attribute of the instance, the guards keep it alive.
        configs: dictionaries of which every value is watched, and the contents of lists and dictionaries in them.

    Attributes:
        tensors: the parameters and buffers; a shared one is listed once for each of its names.
        layout: the addresses and strides of the tensors; see `layout_of`.
    """

    def __init__(self, model: nn.Module, configs: Iterable[dict[str, object]] = ()) -> None:
        every, configs = [*model.modules()], [*configs]
        stores: list[dict[str, Any]] = []
        for module in every:
            stores += (cast(dict[str, Any], module._parameters), module._buffers)
        self._guards = Guards(model, wholly=every[1:], spaces=(*stores, *configs))
        self._own = _own_state(model)
        self._values = [each for config in configs for each in config.values() if isinstance(each, list | dict)]
        self._values_before = deepcopy(self._values)
        self.tensors = [tensor for store in stores for tensor in dict.values(store) if tensor is not None]
        self.layout = layout_of(self.tensors)

    def hold(self, model: nn.Module) -> bool:
        """Returns whether the model is unchanged."""
        return (
            self._guards.hold(model)
            and self._own == _own_state(model)
            and self.layout == layout_of(self.tensors)
            and self._values == self._values_before
        )


def _own_state(model: nn.Module) -> list[object]:
    """Returns the owner's state that `Guards` doesn't watch: its settings and its hooks."""
    attributes = vars(model)
    state: list[object] = []
    for name, value in attributes.items():
        if isinstance(value, _SCALARS):
            state.append(value)
        elif name in HOOKS:
            state += value.values()
    return state


class Plans(Generic[T]):
    """A lookup of the findings about modules, in training and in evaluation, each valid as long as its guards hold.

    Args:
        name: the name of the findings in each module's `Notes`.
        find: (module) -> the findings. They must not refer to the module, or it would be freed late.
        guard: (module) -> the guards of the findings.
        watched: (module, the findings) -> the findings that replace them for a call that `is_watched`; None: the same.
    """

    def __init__(
        self,
        name: str,
        find: Callable[[Any], T],
        guard: Callable[[Any], Guards] | None = None,
        *,
        watched: Callable[[Any, T], T] | None = None,
    ) -> None:
        self._names = {mode: (name, mode) for mode in (False, True)}
        self._find = find
        self._guard = guards_of if guard is None else guard
        self._watched = watched

    def of(self, module: nn.Module) -> T:
        """Returns the findings about a module for the current call."""
        if torch.compiler.is_compiling():
            plan = self._find(module)  # the compiler guards the values that are read here
        else:
            findings = notes_of(module).findings
            name = self._names[vars(module)["training"]]
            guarded: tuple[T, Guards] | None = findings.get(name)
            if guarded is None or not guarded[1].hold(module):
                examine_again()
                guarded = findings[name] = (self._find(module), self._guard(module))
            plan = guarded[0]
        return plan if self._watched is None or not is_watched() else self._watched(module, plan)


def guards_of(owner: nn.Module) -> Guards:
    """Makes guards for findings about a module that depend on the modules inside of it.

    Modules of PyTorch's and of this library's classes are watched as a whole. If a module is hooked or patched, its
    hooks and patches are watched. Attributes of modules of other classes aren't watched: they may change at each call.
    """
    wholly: list[nn.Module] = []
    partly: list[nn.Module] = []
    strangers: list[nn.Module] = []

    # No recursive inner function: it would keep the modules alive until the garbage collector runs.
    pending, seen = [owner], {owner}
    lent: set[nn.Module] = set()
    while pending:
        parent = pending.pop()
        is_lent = parent in lent or gathers(parent)
        for child in parent._modules.values():
            if child is None or child in seen:
                continue
            seen.add(child)
            kind = type(child)
            is_known = kind.__module__.startswith(("torch.", "fastformer."))
            if not (is_known or any(each.__module__.startswith("fastformer.nn.") for each in kind.__mro__)):
                strangers.append(child)
                continue
            if is_lent:
                lent.add(child)
            is_plain = is_unhooked(child) and has_plain_tensors(child, is_lent=is_lent)
            (wholly if is_plain else partly).append(child)
            pending.append(child)
    return Guards(owner, partly, wholly=wholly, strangers=strangers, lent=lent)


def watched_names(attributes: dict[str, Any]) -> Iterator[str]:
    """Yields the names of a module's attributes that may change the work of a call: functions and None.

    An absent child module is None, and users may replace the None by a function.
    """
    for name, value in attributes.items():
        if name in _SETTINGS or (value is None and name[0] != "_") or (callable(value) and not isinstance(value, type)):
            yield name


def stamp_of(model: nn.Module, tensors: list[Tensor], settings: object = None) -> Stamp:
    """Returns a value that differs after a tensor or the config of a model was changed or replaced.

    It notices all changes that PyTorch counts, and tensors that were replaced or moved. PyTorch doesn't count writes
    through `parameter.data` or an array that shares its memory. Of these it notices those to a whole tensor, by a few
    samples, but not those to a part of one, nor those on a GPU; see `repack`.

    Args:
        model: the model, whose attribute `config`, if it has one, is read.
        tensors: the model's tensors.
        settings: other values that a copy depends on, such as those of modules without a config.

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
        settings,
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
    model: nn.Module,
    precision: str,
    pack: Callable[[], T],
    *,
    find: FindTensors,
    settings: object = None,
    may_be_old: bool = False,
) -> T:
    """Returns the copy of a model's weights in a precision, and packs them again if the model has changed.

    Each model has one copy per precision, which all threads share and which is dropped with the model.

    Args:
        model: a model, or a stack of layers, whose weights `pack` reads.
        precision: the name of the copy.
        pack: packs the weights. Its result must not refer to the model, or neither would ever be freed.
        find: finds the tensors of the model.
        settings: see `stamp_of`; all copies of a model have the same.
        may_be_old: return an existing copy even if the model has changed since; the caller checks again before use.

    Raises:
        UnfitError: `pack` raised it, now or before for the same weights.
    """
    copies = notes_of(model).copies
    before, copy = copies.get(precision, (None, None))
    # Without the lock: another model may be packed meanwhile.
    if (
        copy is not None
        and type(copy) is not _Refusal
        and (may_be_old or before == stamp_of(model, find(model), settings))
    ):
        return cast(T, copy)
    copy = None  # memory may not suffice for it and the next one
    with _lock:
        now = _drop_old(model, find, settings)
        if precision not in copies:
            try:
                copies[precision] = (now, pack())
            except UnfitError as error:
                copies[precision] = (now, _Refusal(str(error)))
        copy = copies[precision][1]
    if isinstance(copy, _Refusal):
        raise UnfitError(copy.reason)
    return cast(T, copy)


def _drop_old(model: nn.Module, find: FindTensors, settings: object = None) -> Stamp:
    """Drops the copies from before a model's changes: memory may not suffice for two. Returns the model's stamp."""
    now = stamp_of(model, find(model), settings)
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
