"""Checks whether a call of modules still runs the code of their classes, and nothing else.

A fused path reads the parameters of modules and calls none of them. That would silently skip a hook, a forward on the
instance, an override in a subclass or a parametrization. The predicates below check, at the moment of the call, whether
this is safe for a module or a class. A plan decides for a whole tree of modules which parts may be fused and which
padding may be omitted. It walks the tree once and holds as long as its `Guards` hold. Checking them is one flat
comparison of identities; `Plans` makes a new plan when they fail.

The C++ engine, which reads a whole model's weights, and CUDA graphs, which replay the work of one call, call no module.
They depend on the model's tensors, too, which `ModelGuards` watch.
"""

from __future__ import annotations

import copy
import functools
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, repeat, starmap
from operator import is_
from types import BuiltinFunctionType, MappingProxyType, ModuleType
from typing import Any, Generic, NamedTuple, TypeVar, cast

import torch
import torch.nn.functional as F
import torch.nn.modules.module as torch_module
from torch import Tensor, nn, overrides
from torch.utils._device import DeviceContext

import fastformer
from fastformer.engine.frozen import layout_of
from fastformer.ops import _extension
from fastformer.ops._dispatch import forced_backend

LINEARS = (nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear)
# The modules that `active_dropout` describes.
DROPOUTS = (nn.Dropout, nn.Identity)
_KINDS: tuple[type[nn.Module], ...] = (
    *(*LINEARS, nn.Dropout, nn.Identity, nn.LayerNorm, nn.RMSNorm, nn.ReLU, nn.GELU, nn.SiLU),
    *(nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer),
    *(nn.TransformerEncoder, nn.TransformerDecoder, nn.Transformer),
)
# The original functions, since users also replace the forward of a class, its call, and functions that it calls. None,
# here and below: the function was replaced before this module was imported.
FORWARDS: dict[type[nn.Module], object] = {}
# The overridable blocks of torch.nn's layers, which their forwards call.
BLOCKS: dict[type[nn.Module], dict[str, object]] = {
    kind: {name: getattr(kind, name) for name in ("_sa_block", "_mha_block", "_ff_block") if hasattr(kind, name)}
    for kind in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
}
# The `__call__` functions of other libraries' classes that are equivalent to it.
PLAIN_CALLS: set[object] = set()
# Hooks that only gather a layer's parameters before its forward and shard them again after it; the classes of sharded
# parameters; the modules inside of these layers. Each way of sharding a model adds its own.
GATHERING: set[object] = set()
PARTED: set[type[Tensor]] = set()
BORROWERS: weakref.WeakSet[nn.Module] = weakref.WeakSet()
# The functions that may be found as PyTorch's attention: its own, and the one that `integrations` puts in its place.
ATTENTIONS: set[object] = {torch._C._nn.scaled_dot_product_attention}
_PLAIN_TENSORS = (type(None), nn.Parameter, Tensor)


def _functions() -> tuple[object, ...]:
    return (F.linear, F.layer_norm, F.rms_norm, F.dropout, F.relu, F.gelu, F.silu, F.softmax, F.embedding)


def is_written_in(function: object, *packages: ModuleType) -> bool:
    """Returns whether a function's code is in one of these packages or built in; a wrapper only copies the names."""
    if isinstance(function, BuiltinFunctionType):
        return True
    code = getattr(function, "__code__", None)
    folders = tuple(os.path.join(each.__path__[0], "") for each in packages)
    return code is not None and code.co_filename.startswith(folders)


def if_written_in(functions: Iterable[object], *packages: ModuleType) -> tuple[object, ...]:
    """Returns the functions, with None for each that isn't written in the packages and so was replaced before."""
    return tuple(each if is_written_in(each, *packages) else None for each in functions)


_FUNCTIONS = if_written_in(_functions(), nn)
_CALL, _MULTI_HEAD_ATTENTION = if_written_in([nn.Module.__call__, F.multi_head_attention_forward], nn)


def is_watched() -> bool:
    """Returns whether a global hook, a mode or a replaced function observes or changes the work of all modules."""
    if torch_module._has_any_global_hook():
        return True
    if torch.compiler.is_compiling():
        return False
    if _functions() != _FUNCTIONS:
        return True
    return _has_function_mode()


def _has_function_mode() -> bool:
    # The mode of `with torch.device(...)` only sets the device of new tensors.
    return torch._C._len_torch_function_stack() > 0 and any(
        type(mode) is not DeviceContext for mode in overrides._get_current_function_mode_stack()
    )


def why_not_now() -> str | None:
    """Returns the reason why the C++ engine may run no model now (an active mode would miss its work), or None."""
    if (backend := forced_backend.get()) in ("reference", "triton"):
        return f"use_backend({backend!r}) asks for other code"
    if torch._C._len_torch_dispatch_stack():
        return "a TorchDispatchMode is on, which would see none of its operations"
    if _has_function_mode():
        return "a TorchFunctionMode is on, which would see none of its operations"
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return "a global forward hook is registered, which it would not call"
    return None


def is_called_plainly(module: nn.Module) -> bool:
    """Returns whether calling a module runs only its class's forward: no hook, patch or compilation of its own."""
    return is_unhooked(module) and not is_watched()


def is_unhooked(module: nn.Module) -> bool:
    """Returns `is_called_plainly`, for callers that have checked `is_watched` once for many modules."""
    own = module.__dict__
    return not (
        own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
        or "forward" in own
        or own.get("_compiled_call_impl") is not None
        or not has_plain_call(module)
    )


def gathers(module: nn.Module) -> bool:
    """Returns whether a module's only hooks gather its parameters for a call.

    Such a module must be called, but the hooks don't change its results.
    """
    own = module.__dict__
    hooks = [*own["_forward_pre_hooks"].values(), *own["_forward_hooks"].values()]
    return (
        bool(hooks)
        and all(getattr(hook, "__func__", None) in GATHERING for hook in hooks)
        and not (own["_backward_hooks"] or own["_backward_pre_hooks"] or "forward" in own)
        and own.get("_compiled_call_impl") is None
        and has_plain_call(module)
    )


def has_plain_call(module: nn.Module) -> bool:
    """Returns whether a module's class still has its original `__call__`."""
    call = type(module).__call__
    return call is _CALL or call in PLAIN_CALLS


def is_written_as_known(kind: type[nn.Module]) -> bool:
    """Returns whether the forward of a known class, or of the known class from which it is derived, wasn't replaced.

    For a layer of torch.nn this also checks its blocks, and the functions that its attention calls.
    """
    return replacement(kind) is None


class Replacement(NamedTuple):
    """The functions that replaced a class's own; see `is_written_as_known`."""

    original: Any  # the class
    replaced: str


def replacement(kind: type[nn.Module]) -> Replacement | None:
    """Returns the replacement in a class, or in the known class from which it is derived; None if there is none."""
    for original in kind.__mro__:
        if original in FORWARDS:
            if FORWARDS[original] is not original.forward:
                return Replacement(original, f"{original.__name__}.forward")
            if original is nn.MultiheadAttention:
                if F.scaled_dot_product_attention not in ATTENTIONS:
                    return Replacement(original, "torch.nn.functional.scaled_dot_product_attention")
                if F.multi_head_attention_forward is not _MULTI_HEAD_ATTENTION:
                    return Replacement(original, "torch.nn.functional.multi_head_attention_forward")
            if original in BLOCKS:
                for name, block in BLOCKS[original].items():
                    if getattr(original, name) is not block:
                        return Replacement(original, f"{original.__name__}.{name}")
            return None
    return None


def is_its_own(kind: type[nn.Module], *packages: ModuleType, method: str = "forward") -> bool:
    """Returns whether a class's method is its original in one of these packages, by the place that its code names.

    This is for classes that may have been patched before the first check.
    """
    owner = next(each for each in kind.__mro__ if method in vars(each))
    function: Any = vars(owner)[method]
    said = (getattr(function, "__module__", None), getattr(function, "__qualname__", None))
    return said == (owner.__module__, f"{owner.__qualname__}.{method}") and is_written_in(function, *packages)


FORWARDS.update({kind: kind.forward if is_its_own(kind, nn, fastformer) else None for kind in _KINDS})


def is_plain(module: object, *kinds: type[nn.Module]) -> bool:
    """Returns whether a module is exactly of one of these kinds, is called plainly, and has plain tensors.

    Args:
        module: any object in the place of a module.
        kinds: classes of which layers are made, or fastformer's classes.
    """
    return is_untouched(module, *kinds) and not is_watched()


def is_untouched(module: object, *kinds: type[nn.Module]) -> bool:
    """Returns `is_plain`, for callers that have checked `is_watched` once for many modules."""
    kind = type(module)
    if kind not in kinds:
        return False
    assert isinstance(module, nn.Module)
    if not is_written_as_known(kind) or not is_unhooked(module):
        return False
    return has_plain_tensors(module)


def has_plain_tensors(module: nn.Module) -> bool:
    """Returns whether no parameter of a module is of a tensor subclass that may override operations.

    Parameters that are sharded between calls of the layer around the module are plain while it computes.
    """
    for tensor in module._parameters.values():
        if type(tensor) not in _PLAIN_TENSORS and not (type(tensor) in PARTED and module in BORROWERS):
            return False
    return True


def plain_parameters(module: object, *kinds: type[nn.Module]) -> dict[str, Any] | None:
    """Returns the dictionary with the `weight` and `bias` of an untouched module of these kinds; None for any other."""
    if not is_untouched(module, *kinds):
        return None
    assert isinstance(module, nn.Module)
    # The replicas of DataParallel store their parameters elsewhere.
    return module._parameters if "weight" in module._parameters and "bias" in module._parameters else None


def active_dropout(dropout: nn.Module) -> float:
    """Returns the current probability of a plain `nn.Dropout`: 0 in evaluation, and 0 for an `nn.Identity`."""
    return dropout.p if isinstance(dropout, nn.Dropout) and dropout.training else 0.0


def given(**options: Any) -> dict[str, Any]:
    """Returns the options that aren't None: modules with torch.nn's signature get only options that the caller set."""
    return {name: value for name, value in options.items() if value is not None}


def is_traced() -> bool:
    """Returns whether values can't be read: under a compiler, a tracer, a graph capture or functorch."""
    modes = torch._C._TorchDispatchModeKey
    return (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
        or torch._C._functorch.maybe_current_level() is not None
        or torch._C._get_dispatch_mode(modes.PROXY) is not None
        or torch._C._get_dispatch_mode(modes.FAKE) is not None
    )


T = TypeVar("T")
# The settings of a module that choose the dimension along which it works, or the way in which it is called.
_SETTINGS = frozenset(
    {
        *("dim", "normalized_shape", "num_parameters", "gradient_checkpointing", "forward", "_compiled_call_impl"),
        *("activation", "norm_first"),
        *("is_causal", "chunk_size_feed_forward", "position_embedding_type", "has_relative_attention_bias", "config"),
    }
)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# A forward on the owner itself is not watched: the owner's caller handles it.
_OF_THE_OWNER_ALONE = frozenset({"forward", "_compiled_call_impl"})


class Guards:
    """A snapshot of modules and their classes, by which later changes are noticed.

    It keeps the modules inside of the owner alive, but not the owner: let the owner hold it (see `Plans`).

    Args:
        owner: the module whose class, children and settings are watched. It may have hooks and a forward of its own.
        modules: the modules inside of the owner whose class, children, hooks, functions, and call settings are watched.
            Each is watched by itself, so pass the modules inside of them, too.
        functions: other watched functions, each by its holder (the `vars` of a Python module, or a class) and its name.
        wholly: further modules, of which all attributes are watched, with numbers and flags such as `training`, and the
            classes of their parameters. The parameters may be replaced by others of the same class.
        strangers: further modules of which only the class is watched.
        spaces: further dictionaries of which every value is watched. None may lead to the owner's own dictionary.
    """

    def __init__(
        self,
        owner: nn.Module,
        modules: Iterable[nn.Module] = (),
        functions: Iterable[tuple[object, str]] = (),
        *,
        wholly: Iterable[nn.Module] = (),
        strangers: Iterable[nn.Module] = (),
        spaces: Iterable[dict[str, object]] = (),
    ) -> None:
        modules, wholly, others = tuple(modules), tuple(wholly), tuple(spaces)
        every = (*modules, *wholly, *strangers)
        kinds = (type(owner), *map(type, every))
        own, partly, whole = vars(owner), [*map(vars, modules)], [*map(vars, wholly)]
        # Nothing here may refer to the owner's own dictionary, which refers to this object.
        names = ["_modules", *(name for name in watched_names(own) if name not in _OF_THE_OWNER_ALONE)]
        # Dictionaries of which every value is watched, and attributes (holder, name), each watched alone.
        watched = [
            own["_modules"],
            *others,
            *whole,
            *(each[name] for each in (*partly, *whole) for name in ("_modules", *_HOOKS)),
        ]
        attributes: list[tuple[object, str]] = []
        for each in partly:
            # The dictionaries of hooks themselves are watched, too, since users may replace them.
            attributes += [(each, name) for name in ("_modules", *_HOOKS, *watched_names(each))]
            attributes += [(each, name) for name in ("forward", "_compiled_call_impl")]
        for kind in {kind for line in set(kinds) for kind in line.__mro__} - {object}:
            # For a class that is not a module and has no __call__, getattr returns a new object each time.
            methods = ("forward", "__call__") if issubclass(kind, nn.Module) else ("forward",)
            attributes += [(kind, name) for name in (*methods, *BLOCKS.get(kind, ()))]
        attributes += functions
        tensors = [each._parameters for each in wholly if each not in BORROWERS]
        sized = [*watched, *partly, *tensors]
        watched = [space for space in watched if space]  # an empty one of the same size has no values
        self._record = (
            *(kinds, every, tuple(names), tuple(map(own.get, names))),
            *(tuple(sized), (len(own), *map(len, sized))),
            *(tuple(watched), tuple(chain.from_iterable(map(dict.values, watched)))),
            *(tuple(attributes), tuple(starmap(_look_up, attributes))),
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
        own, columns = vars(owner), self._columns
        return (
            all(map(is_, kinds, map(type, (owner, *modules))))
            and sizes == (len(own), *map(len, sized))
            and all(map(is_, own_values, map(own.get, names)))
            and all(map(is_, columns.values, chain.from_iterable(map(dict.values, columns.spaces))))
            and all(map(is_, columns.expected, columns.found()))
            and all(map(is_, types, map(type, chain.from_iterable(map(dict.values, tensors)))))
        )

    @functools.cached_property
    def _columns(self) -> _Columns:
        *_, spaces, values, attributes, expected, _, _ = self._record
        return _Columns(spaces, values, [*zip(attributes, expected, strict=True)])


class _Columns:
    """The watched attributes by the built-in function that reads them, with holders and names in two columns."""

    def __init__(
        self,
        spaces: tuple[dict[str, Any], ...],
        values: tuple[object, ...],
        attributes: list[tuple[tuple[object, str], object]],
    ) -> None:
        self.spaces, self.values = spaces, values
        dicts = [each for each in attributes if isinstance(each[0][0], dict)]
        proxies = [each for each in attributes if isinstance(each[0][0], MappingProxyType)]
        others = [each for each in attributes if not isinstance(each[0][0], dict | MappingProxyType)]
        self.expected = [expected for _, expected in (*dicts, *proxies, *others)]
        self._parts = [
            (look_up, [holder for (holder, _), _ in part], [name for (_, name), _ in part], repeat(None))
            for look_up, part in ((dict.get, dicts), (MappingProxyType.get, proxies), (getattr, others))
        ]

    def found(self) -> Iterator[object]:
        """Returns the current values of the attributes."""
        return chain.from_iterable(starmap(map, self._parts))


def _look_up(holder: object, name: str) -> object:
    return holder.get(name) if isinstance(holder, dict | MappingProxyType) else getattr(holder, name, None)


_SCALARS = (bool, int, float, str, tuple)


class ModelGuards:
    """A snapshot of a model: its modules with their settings and hooks, and the addresses of its tensors.

    The values of tensors may change. The guards keep the tensors and the modules inside of the model alive, but not the
    model, so that a weak dictionary of models can hold them.

    Args:
        model: the model. If one of its methods is an attribute of the instance, the guards keep it alive.
        functions: other watched functions; see `Guards`.
        values: lists and dictionaries whose contents are watched.

    Attributes:
        tensors: the parameters and buffers; a shared one is listed once for each of its names.
        layout: the addresses and strides of the tensors; see `layout_of`.
    """

    def __init__(
        self, model: nn.Module, functions: Iterable[tuple[object, str]] = (), values: Iterable[object] = ()
    ) -> None:
        every = [*model.modules()]
        stores: list[dict[str, Any]] = []
        for module in every:
            stores += (cast(dict[str, Any], module._parameters), module._buffers)
        self._guards = Guards(model, (), functions, wholly=every[1:], spaces=stores)
        self._own, self._values = _own_state(model), [*values]
        self._values_before = copy.deepcopy(self._values)
        self.tensors = [tensor for store in stores for tensor in store.values() if tensor is not None]
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
    own = vars(model)
    return [
        *(value for value in own.values() if isinstance(value, _SCALARS)),
        *(hook for name in _HOOKS for hook in own[name].values()),
    ]


class Kept(dict[bool, tuple[Any, Guards]]):
    """The plans of a module in training and in evaluation, each with its guards. A copy of the module makes its own."""

    def __reduce__(self) -> tuple[type[Kept], tuple[()]]:
        return Kept, ()


class Plans(Generic[T]):
    """A lookup of the findings about modules. Each module holds its own, which are valid as long as its guards hold.

    Args:
        attribute: the name of the module's attribute that holds its plans.
        find: (module) -> the findings. They must not refer to the module, or it would be freed late.
        guard: (module) -> the guards of the findings.
        watched: (module, the findings) -> the findings that replace them for a call that `is_watched`; None: the same.
    """

    def __init__(
        self,
        attribute: str,
        find: Callable[[Any], T],
        guard: Callable[[Any], Guards] | None = None,
        *,
        watched: Callable[[Any, T], T] | None = None,
    ) -> None:
        self._attribute = attribute
        self._find = find
        self._guard = guards_of if guard is None else guard
        self._watched = watched

    def of(self, module: nn.Module) -> T:
        """Returns the findings about a module for the current call."""
        found = self._of(module)
        return found if self._watched is None or not is_watched() else self._watched(module, found)

    def _of(self, module: nn.Module) -> T:
        if torch.compiler.is_compiling():
            return self._find(module)  # the compiler guards the values that are read here
        own = vars(module)
        plans = own.get(self._attribute)
        if plans is None:
            plans = own[self._attribute] = Kept()
        found: tuple[T, Guards] | None = plans.get(own["training"])
        if found is None or not found[1].hold(module):
            found = plans[own["training"]] = (self._find(module), self._guard(module))
        return found[0]


def forget_plans(module: nn.Module) -> None:
    """Removes all plans that a module holds."""
    for name in [name for name, value in vars(module).items() if isinstance(value, Kept)]:
        del module.__dict__[name]


# The functions by which torch.nn's layers attend, and those that may be a layer's activation.
_WATCHED = tuple(
    (vars(F), name) for name in ("scaled_dot_product_attention", "multi_head_attention_forward", "relu", "gelu", "silu")
)


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
    while pending:
        for child in pending.pop()._modules.values():
            if child is None or child in seen:
                continue
            seen.add(child)
            kind = type(child)
            is_known = kind.__module__.startswith(("torch.", "fastformer."))
            if not (is_known or any(each.__module__.startswith("fastformer.nn.") for each in kind.__mro__)):
                strangers.append(child)
                continue
            (wholly if is_unhooked(child) and has_plain_tensors(child) else partly).append(child)
            pending.append(child)
    return Guards(owner, partly, _WATCHED, wholly=wholly, strangers=strangers)


def watched_names(own: dict[str, Any]) -> Iterator[str]:
    """Yields the names of a module's attributes that may change the work of a call: functions and None.

    An absent child module is None, and users may replace the None by a function.
    """
    for name, value in own.items():
        if name in _SETTINGS or (value is None and name[0] != "_") or (callable(value) and not isinstance(value, type)):
            yield name
