"""What a call of transformers' modules runs: its own functions and hooks, or replaced ones."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Iterable
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
import transformers
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import output_capturing

from fastformer.engine.checks import (
    attends_by_known_function,
    folder_of,
    has_plain_call,
    is_called_plainly,
    is_traced,
    is_unhooked,
    is_watched,
    is_written_as_known,
    is_written_in,
    why_not_now,
)

# The name of the cache among a model's arguments and outputs: "cache" since 5.24, which also accepts the older name.
OLD_CACHE = "past_key_values"
CACHE = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else OLD_CACHE
CACHE_NAMES = frozenset({CACHE, OLD_CACHE})
_LOSSES = frozenset({"CrossEntropyLoss", "BCEWithLogitsLoss", "MSELoss"})


def replaced_in_sources(kinds: Iterable[type[nn.Module]]) -> str | None:
    """Says which function that classes look up in a module of transformers was replaced; None if none was.

    The modules are those that define the classes. A function, or a loss, of such a module is written in transformers,
    in PyTorch, in accelerate or in Python's own library.
    """
    names = {each.__module__ for kind in kinds for each in kind.__mro__}
    libraries = [transformers, torch, *(sys.modules[name] for name in ("accelerate",) if name in sys.modules)]
    folders = tuple(os.path.join(each.__path__[0], "") for each in libraries)
    for source in sorted(name for name in names if name.startswith("transformers.models.")):
        for name, value in vars(sys.modules[source]).items():
            while isinstance(value, functools._lru_cache_wrapper):
                value = value.__wrapped__
            if name in _LOSSES:
                is_own = value is getattr(nn, name)
            elif isinstance(value, FunctionType):
                is_own = value.__code__.co_filename.startswith(folders) or _is_of_python(value.__module__)
            else:
                is_own = (
                    isinstance(value, type | BuiltinFunctionType)
                    or not callable(value)
                    or _is_of_python_or_theirs(value)
                )
            if not is_own:
                return f"{name} of {source} was replaced"
    return None


def _is_of_python(module: str | None) -> bool:
    return (module or "").partition(".")[0] in sys.stdlib_module_names


def _is_of_python_or_theirs(value: object) -> bool:
    # A special form of typing can be called; so can a mock, which is of the standard library, too.
    return type(value).__module__.partition(".")[0] in ("typing", "collections", "types", "torch", "transformers")


# The module of this library's function, which calls transformers' own for models that aren't accelerated.
_OURS = "fastformer.integrations.attention_interface"
_NO_CODE = compile("", "", "exec")
_WAS_ORIGINAL = ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward  # before it was put in its place


def attends_as_known() -> bool:
    """Returns whether attention "sdpa" ends up in PyTorch's function or this library's, and not in a replacement."""
    return attends_by_known_function() and is_sdpa_known()


def is_sdpa_known() -> bool:
    """Returns whether the function registered as "sdpa" is transformers' or this library's."""
    function = ALL_ATTENTION_FUNCTIONS["sdpa"]
    return function is sdpa_attention_forward or (
        _WAS_ORIGINAL
        and getattr(function, "__module__", None) == _OURS
        and getattr(function, "__code__", _NO_CODE).co_filename.startswith(folder_of("fastformer"))
    )


def is_recording() -> bool:
    """Returns whether transformers is recording outputs of modules, by the hooks that it put on them."""
    return bool(output_capturing._active_collector.get())


def why_not_at_this_moment() -> str | None:
    """Returns why no call of any model can run on the engine at this moment; None if calls can."""
    if is_traced():
        return "it is being traced"
    if (reason := why_not_now()) is not None:
        return reason
    if is_watched() or is_recording() or not attends_as_known():
        return "a mode, a global hook, a recording or a replaced function would see none of the engine's work"
    return None


def record_outputs_of(derived: type[nn.Module]) -> None:
    """Lets transformers record the same outputs of a derived class as of the original: hidden states and weights."""
    recorded = getattr(derived, "_can_record_outputs", None) or {}
    dict.__setitem__(output_capturing._CAN_RECORD_REGISTRY, str(derived), recorded)


def is_unhooked_or_recorded(module: nn.Module) -> bool:
    """Returns whether calling a module runs only its class's forward and transformers' hooks that record."""
    if is_unhooked(module):
        return True
    if not has_plain_call(module):
        return False
    own = vars(module)
    others = own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]
    if others or "forward" in own or own.get("_compiled_call_impl") is not None:
        return False
    return all(hook.__module__ == output_capturing.__name__ for hook in own["_forward_hooks"].values())


def is_known(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Returns whether a module is exactly of one of these classes, and calling it runs only that class's forward."""
    return type(module) in kinds and is_written_as_known(type(module)) and is_called_plainly(module)


# Libraries whose functions on a module read no positions. (A wrapped forward is examined separately.)
_LIBRARIES = ("torch", "transformers", "accelerate", "peft", "fastformer")
# Attributes whose functions are examined elsewhere: when a model is called, or when a loss is computed.
_EXAMINED = frozenset({"forward", "_compiled_call_impl", "_loss_function"})


def own_function(module: nn.Module) -> str | None:
    """Returns the name of a module's attribute that holds a foreign function or another callable; None if none does."""
    for name, value in vars(module).items():
        if name in _EXAMINED or not callable(value) or isinstance(value, type):
            continue
        while isinstance(value, functools.partial):
            value = value.func
        libraries = [sys.modules[library] for library in _LIBRARIES if library in sys.modules]
        if isinstance(value, nn.Module) or not is_written_in(code_of(value), *libraries):
            return name
    return None


def code_of(function: object) -> object:
    """Returns the object that has the code of a function, or of a callable object."""
    function = getattr(function, "__func__", function)
    has_code = hasattr(function, "__code__") or isinstance(function, BuiltinFunctionType)
    return function if has_code else vars(type(function)).get("__call__")


def gives_tuple(config: Any, kwargs: dict[str, Any]) -> bool:
    """Returns whether the caller of a stack, or else the stack's config, asks for a tuple."""
    told = kwargs.get("return_dict")
    return not (config.return_dict if told is None else told)


@functools.cache
def _signature(forward: Any) -> inspect.Signature:
    return inspect.signature(forward)


def by_name(forward: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """Returns a call's arguments by name; None if they don't fit (transformers' forward then raises the error)."""
    signature = _signature(forward)
    try:
        bound = signature.bind(module, *args, **kwargs).arguments
    except TypeError:
        return None
    named: dict[str, Any] = {}
    for name, value in list(bound.items())[1:]:
        if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            named |= value
        else:
            named[name] = value
    return named


def cache_of(given: dict[str, Any]) -> Any:
    """Returns the cache among a call's arguments by name; None if there is none."""
    return given.get(CACHE) if CACHE in given else given.get(OLD_CACHE)


def take_cache(given: dict[str, Any]) -> Any:
    """Removes the cache from a call's arguments by name, and returns it; None if there is none."""
    cache = cache_of(given)
    for name in CACHE_NAMES:
        given.pop(name, None)
    return cache


def nothing_else(args: tuple[Any, ...], kwargs: dict[str, Any], harmless: frozenset[str]) -> bool:
    """Returns whether no argument has an effect: each is None, False or a list of None, or has a harmless name."""
    return all(map(_is_nothing, args)) and all(_is_nothing(value) or name in harmless for name, value in kwargs.items())


def _is_nothing(value: object) -> bool:
    return value is None or value is False or (isinstance(value, list) and all(each is None for each in value))
