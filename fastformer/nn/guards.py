"""Is calling these modules still what their classes were written to do, and nothing else?

A fused path reads the parameters of modules and calls none of them. That would silently skip a hook, a forward on the
instance, an override in a subclass or a parametrization. The predicates below say of a module or a class, at the moment
of the call, whether it is safe. What is decided about a whole tree of modules (what may be fused, what may be left out)
is a plan: it walks the tree once and holds for as long as its `Guards` do. Asking them is one flat comparison of
identities; `Plans` makes a new plan when they fail.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, starmap
from operator import is_
from types import BuiltinFunctionType, MappingProxyType, ModuleType
from typing import Any, Generic, NamedTuple, TypeVar, cast

import torch
import torch.nn.functional as F
import torch.nn.modules.module as torch_module
from torch import Tensor, nn, overrides
from torch.utils._device import DeviceContext

import fastformer
from fastformer.nn.norm import AddLayerNorm

LINEARS = (nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear)
_KINDS: tuple[type[nn.Module], ...] = (
    *(*LINEARS, nn.Dropout, nn.Identity, nn.LayerNorm, nn.RMSNorm, AddLayerNorm, nn.ReLU, nn.GELU, nn.SiLU),
    *(nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer),
    *(nn.TransformerEncoder, nn.TransformerDecoder, nn.Transformer),
)
# What they were written to do: people replace the forward of a class, too, its call, and the functions behind it.
# None, here and below: somebody had done so before they were known.
FORWARDS: dict[type[nn.Module], object] = {}
# The seams of torch.nn's layers, which their forwards call.
BLOCKS: dict[type[nn.Module], dict[str, object]] = {
    kind: {name: getattr(kind, name) for name in ("_sa_block", "_mha_block", "_ff_block") if hasattr(kind, name)}
    for kind in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
}
_CALL = nn.Module.__call__
# Calls of other libraries' classes that come down to it.
PLAIN_CALLS: set[object] = set()
# What may stand for PyTorch's attention: its own, and ours by its name, of `integrations`.
ATTENTIONS: set[object] = {torch._C._nn.scaled_dot_product_attention}
_PLAIN_TENSORS = (type(None), nn.Parameter, Tensor)
Method = TypeVar("Method", bound=Callable[..., Any])


def _functions() -> tuple[object, ...]:
    return (F.linear, F.layer_norm, F.rms_norm, F.dropout, F.relu, F.gelu, F.silu)


def is_written_in(function: object, *packages: ModuleType) -> bool:
    """Whether a function's code is in one of these packages, or built in; a wrapper has no more than the names."""
    if isinstance(function, BuiltinFunctionType):
        return True
    code = getattr(function, "__code__", None)
    places = tuple(os.path.join(each.__path__[0], "") for each in packages)
    return code is not None and code.co_filename.startswith(places)


def if_written_in(functions: Iterable[object], *packages: ModuleType) -> tuple[object, ...]:
    """The functions as they are found, and None for each that somebody had replaced before."""
    return tuple(each if is_written_in(each, *packages) else None for each in functions)


_FUNCTIONS = if_written_in(_functions(), nn)
(_MULTI_HEAD_ATTENTION,) = if_written_in([F.multi_head_attention_forward], nn)


def is_watched() -> bool:
    """Whether somebody sees or changes what modules and functions do everywhere."""
    if torch_module._has_any_global_hook():
        return True
    if torch.compiler.is_compiling():
        return False
    if _functions() != _FUNCTIONS:
        return True
    # The mode of `with torch.device(...)` says where tensors are made, and nothing else.
    return torch._C._len_torch_function_stack() > 0 and any(
        type(mode) is not DeviceContext for mode in overrides._get_current_function_mode_stack()
    )


def is_called_plainly(module: nn.Module) -> bool:
    """Whether a call of a module is a call of its class's forward: not hooked, patched or compiled by itself."""
    return is_unhooked(module) and not is_watched()


def is_unhooked(module: nn.Module) -> bool:
    """`is_called_plainly`, for code that has asked `is_watched` for many modules at once."""
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


def has_plain_call(module: nn.Module) -> bool:
    """Whether a module's class has the call that it was written with."""
    call = type(module).__call__
    return call is _CALL or call in PLAIN_CALLS


def is_written_as_known(kind: type[nn.Module]) -> bool:
    """Whether nobody replaced the forward of a class that is known, or of the known one that it is derived from.

    Nor the blocks of a layer of torch.nn, nor the functions by which its attention attends.
    """
    return replacement(kind) is None


class Replacement(NamedTuple):
    """What somebody put in the place of what a class was written to do; see `is_written_as_known`."""

    original: type[nn.Module]
    replaced: str


def replacement(kind: type[nn.Module]) -> Replacement | None:
    """What is replaced of a class, or of the known one that it is derived from; None: nothing."""
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


# What the methods of torch.nn take no argument for.
# Given by name. They are not keyword-only: torch.onnx's older exporter gives every default by position.
_OURS_ALONE = frozenset({"layout", "memory_layout", "cache", "rotary", "position_bias"})


def yields_to_torch(method: Method) -> Method:
    """For methods under the names of torch.nn's: those are called where somebody replaced what was accelerated."""

    def called(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        found = replacement(type(self))
        if found is None or not _OURS_ALONE.isdisjoint(kwargs):
            return method(self, *args, **kwargs)
        return getattr(found.original, method.__name__)(self, *args, **kwargs)

    # torch.compile counts what it compiles by code: one for all would be at its limit soon.
    called.__code__ = called.__code__.replace(co_name=method.__qualname__)
    return functools.wraps(method)(called)  # type: ignore[return-value]


def is_its_own(kind: type[nn.Module], *packages: ModuleType, method: str = "forward") -> bool:
    """Whether a class's method is what stands in its source, in one of these packages, by where it says it comes from.

    For classes that may have been patched before anybody asks.
    """
    owner = next(each for each in kind.__mro__ if method in vars(each))
    function: Any = vars(owner)[method]
    said = (getattr(function, "__module__", None), getattr(function, "__qualname__", None))
    return said == (owner.__module__, f"{owner.__qualname__}.{method}") and is_written_in(function, *packages)


FORWARDS.update({kind: kind.forward if is_its_own(kind, nn, fastformer) else None for kind in _KINDS})


def is_plain(module: object, *kinds: type[nn.Module]) -> bool:
    """Whether a module is exactly of one of these kinds, is called plainly, and has plain tensors.

    Args:
        module: anything that stands where a module is expected.
        kinds: out of those that layers are made of, or classes of ours.
    """
    return is_untouched(module, *kinds) and not is_watched()


def is_untouched(module: object, *kinds: type[nn.Module]) -> bool:
    """`is_plain`, for code that has asked `is_watched` for many modules at once."""
    kind = type(module)
    if kind not in kinds:
        return False
    assert isinstance(module, nn.Module)
    if not is_written_as_known(kind) or not is_unhooked(module):
        return False
    for tensor in module._parameters.values():  # noqa: SIM110  a generator takes longer than all else here
        if type(tensor) not in _PLAIN_TENSORS:
            return False
    return True


DROPOUTS = (nn.Dropout, nn.Identity)


def is_plain_dropout(dropout: object) -> bool:
    """Whether `active_dropout` says all that there is to say about a module that stands where a dropout does."""
    return is_plain(dropout, *DROPOUTS)


class NormSettings(NamedTuple):
    """A plain norm, in the terms of `ops.add_layer_norm`."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    rms_norm: bool


def norm_settings(norm: object) -> NormSettings | None:
    """What a plain norm of the last dimension computes; None for anything else."""
    return read_norm(norm) if is_untouched_norm(norm) and not is_watched() else None


def is_untouched_norm(norm: object) -> bool:
    """Whether `read_norm` says all about a norm, for who has asked `is_watched`."""
    return (
        is_untouched(norm, AddLayerNorm, nn.LayerNorm, nn.RMSNorm)
        and isinstance(norm, nn.LayerNorm | nn.RMSNorm)
        and len(norm.normalized_shape) == 1
        and norm.eps is not None
        and not (isinstance(norm, AddLayerNorm) and norm.dropout and norm.training)
    )


def read_norm(norm: object) -> NormSettings:
    """What a norm of the last dimension computes, of one that is known to be plain."""
    assert isinstance(norm, nn.LayerNorm | nn.RMSNorm) and norm.eps is not None
    is_rms = norm.rms_norm if isinstance(norm, AddLayerNorm) else isinstance(norm, nn.RMSNorm)
    return NormSettings(norm.weight, getattr(norm, "bias", None), norm.eps, is_rms)


def is_traced() -> bool:
    """Whether values can't be looked at: under a compiler or tracer, in a graph that is being captured, functorch."""
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
# What of a module's settings says along which dimension it works, or how it is called.
_SETTINGS = frozenset(
    {
        *("dim", "normalized_shape", "num_parameters", "gradient_checkpointing", "forward", "_compiled_call_impl"),
        *("is_causal", "chunk_size_feed_forward", "position_embedding_type", "has_relative_attention_bias", "config"),
    }
)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# A forward of the owner's own is its caller's affair.
_OF_THE_OWNER_ALONE = frozenset({"forward", "_compiled_call_impl"})


class Guards:
    """What modules and their classes were when this was made.

    It keeps the modules inside of the owner alive, and not the owner: let the owner hold it (see `Plans`).

    Args:
        owner: the module whose class, children and attributes are watched. Unless `everything` is watched it may have
            hooks and a forward of its own.
        modules: those inside of it that are watched, each by itself: give what is inside of them, too.
        functions: what else is watched, each by where it stands (the `vars` of a Python module, or a class) and its
            name.
        everything: whether all attributes of the owner and the modules are watched, numbers and flags such as
            `training` among them; else their children, hooks, functions, and the settings that say how they are called.
            Parameters and buffers may always be replaced.
    """

    def __init__(
        self,
        owner: nn.Module,
        modules: Iterable[nn.Module],
        functions: Iterable[tuple[object, str]] = (),
        *,
        everything: bool = False,
    ) -> None:
        self._modules = tuple(modules)
        self._kinds = (type(owner), *map(type, self._modules))
        own, inside = vars(owner), [*map(vars, self._modules)]
        # Nothing here may hold the owner's own dictionary, which holds this.
        if everything:
            self._names = tuple(name for name in own if type(own[name]) is not Kept)
        else:
            self._names = ("_modules", *(name for name in watched_names(own) if name not in _OF_THE_OWNER_ALONE))
        self._own = tuple(map(own.get, self._names))
        # Dictionaries of which every value is watched.
        spaces = [each[name] for each in inside for name in ("_modules", *_HOOKS)]
        spaces += [own[name] for name in ("_modules", *(_HOOKS if everything else ()))]
        # Places of which the one value is. Not only what is in the dictionaries of hooks counts: people put others in
        # their place.
        places: list[tuple[object, str]] = []
        if everything:
            spaces += inside
        else:
            for each in inside:
                names = ("_modules", *_HOOKS, *watched_names(each), "forward", "_compiled_call_impl")
                places += [(each, name) for name in names]
        # By their dictionaries: of a class without a __call__, getattr makes another object each time.
        for kind in {kind for line in set(self._kinds) for kind in line.__mro__} - {object}:
            places += [(vars(kind), name) for name in ("forward", "__call__", *BLOCKS.get(kind, ()))]
        places += functions
        # By how each is looked up, so that no Python code runs for it.
        self._in_dicts = tuple(place for place in places if isinstance(place[0], dict))
        self._in_classes = tuple(place for place in places if isinstance(place[0], MappingProxyType))
        self._in_objects = tuple(
            (*place, None) for place in places if not isinstance(place[0], (dict, MappingProxyType))
        )
        self._expected = tuple(self._now())
        self._spaces = tuple(space for space in spaces if space is not None)
        self._values = tuple(chain.from_iterable(map(dict.values, self._spaces)))
        self._sized = self._spaces if everything else (*self._spaces, *inside)
        self._sizes = (len(own), *map(len, self._sized))

    def hold(self, owner: nn.Module) -> bool:
        """Whether everything is as it was, of the owner and inside of it."""
        own = vars(owner)
        return (
            all(map(is_, self._kinds, map(type, (owner, *self._modules))))
            and self._sizes == (len(own), *map(len, self._sized))
            and all(map(is_, self._own, map(own.get, self._names)))
            and all(map(is_, self._values, chain.from_iterable(map(dict.values, self._spaces))))
            and all(map(is_, self._expected, self._now()))
        )

    def _now(self) -> Iterator[object]:
        """What stands in the places."""
        return chain(
            starmap(dict.get, self._in_dicts),
            starmap(MappingProxyType.get, self._in_classes),
            starmap(getattr, self._in_objects),
        )


class Kept(Generic[T]):
    """A plan and its guards, as a module keeps them. A copy of the module makes a plan of its own."""

    __slots__ = ("guards", "plan")

    def __init__(self, plan: T | None = None, guards: Guards | None = None) -> None:
        self.plan = plan
        self.guards = guards

    def __reduce__(self) -> tuple[type[Kept[T]], tuple[()]]:
        return Kept, ()


class Plans(Generic[T]):
    """What was found out about modules. Each keeps its own, for as long as the guards hold.

    Args:
        attribute: the name under which a module keeps its plan.
        make: (module) -> (what was found out about it, its guards). Neither may hold the module, or it would be freed
            late.
    """

    def __init__(self, attribute: str, make: Callable[[Any], tuple[T, Guards]]) -> None:
        self._attribute = attribute
        self._make = make

    def of(self, module: nn.Module) -> T:
        """What is found out about a module as it is now. Not to be asked while torch.compile traces."""
        own = vars(module)
        kept: Kept[T] | None = own.get(self._attribute)
        if kept is None:
            kept = own[self._attribute] = Kept()
        if kept.guards is None or not kept.guards.hold(module):
            kept.plan, kept.guards = self._make(module)
        return cast(T, kept.plan)


def watched_names(own: dict[str, Any]) -> Iterator[str]:
    """The attributes in a module's dictionary that may change what a call of it does: functions, and room for some.

    A module that isn't there is None, in whose place people put functions.
    """
    for name, value in own.items():
        if name in _SETTINGS or (value is None and name[0] != "_") or (callable(value) and not isinstance(value, type)):
            yield name
