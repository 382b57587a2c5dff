"""Snapshots of modules by which later changes are noticed, and the findings that hold as long as a snapshot does.

A plan decides for a whole tree of modules which parts may be fused and which padding may be omitted. It walks the tree
once and holds as long as its `Guards` hold. Checking them is one flat comparison of identities; `Plans` makes a new
plan when they fail. The C++ engine, which reads a whole model's weights, and CUDA graphs, which replay the work of one
call, depend on the model's tensors, too, which `ModelGuards` watch.

Noticed are modules, parameters and buffers that were replaced, hooks, forwards and settings on instances, and train or
eval. Classes and functions of PyTorch are examined when a plan is made, and not again.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain, starmap
from operator import is_
from typing import Any, Generic, TypeVar, cast

import torch
from torch import nn

from fastformer.engine.checks import HOOKS as _HOOKS
from fastformer.engine.checks import examine_again, gathers, has_plain_tensors, is_unhooked, is_watched
from fastformer.engine.frozen import layout_of, notes_of
from fastformer.ops import _extension

T = TypeVar("T")
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
        watched += [each[name] for each in (*partly, *whole) for name in ("_modules", *_HOOKS)]
        # The dictionaries of hooks themselves are watched, too, since users may replace them.
        attributes = [
            (each, name)
            for each in partly
            for name in ("_modules", *_HOOKS, *watched_names(each), "forward", "_compiled_call_impl")
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
        self._values_before = copy.deepcopy(self._values)
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
        elif name in _HOOKS:
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
