"""Checks whether a call of modules still runs the code of their classes, and nothing else.

A fused path reads the parameters of modules and calls none of them. That would silently skip a hook, a forward on the
instance, an override in a subclass or a parametrization. Instances and modes are checked at the moment of the
call. Classes and functions are examined when a model is handed over (see `examine_again`), by the places that
their code names: a class's own method is written in the package of the class.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import BuiltinFunctionType, ModuleType
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.nn.functional as F
import torch.nn.modules.module as torch_module
from torch import Tensor, nn, overrides
from torch.utils._device import DeviceContext

from fastformer.ops._dispatch import forced_backend

LINEARS = (nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear)
# The modules that `active_dropout` describes.
DROPOUTS = (nn.Dropout, nn.Identity)
# The methods that the forward of a layer of torch.nn, or of a layer of transformers, calls and users override.
_BLOCKS = ("_sa_block", "_mha_block", "_ff_block", "feed_forward_chunk")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PLAIN_TENSORS = (type(None), nn.Parameter, Tensor)
_FUNCTIONS = ("linear", "layer_norm", "rms_norm", "dropout", "relu", "gelu", "silu", "softmax", "embedding")
_HERE = os.path.join(Path(__file__).parent.parent, "")
# None: it was replaced before this module was imported.
_CALL = nn.Module.__call__ if nn.Module.__call__.__code__.co_filename == torch_module.__file__ else None
Check = TypeVar("Check", bound=Callable[..., Any])
_CACHES: list[Any] = []


def _examined(check: Check) -> Check:
    """Lets a check of classes and functions keep its results until `examine_again`; to compilers they are constant."""
    cached = functools.cache(check)
    _CACHES.append(cached)

    @functools.wraps(check)
    def once(*args: Any) -> Any:
        return cached(*args)

    constant: Any = constant_for_compilers(once)
    constant.eager = cached  # for callers that no compiler traces
    return cast(Check, constant)


def constant_for_compilers(function: Check) -> Check:
    """Does what torch.compiler.assume_constant_result does, which would import the compiler."""
    cast(Any, function)._dynamo_marked_constant = True
    return function


def examine_again() -> None:
    """Forgets what was found about classes and functions, since a model is handed over."""
    for cache in _CACHES:
        cache.cache_clear()


@functools.cache
def folder_of(package: str) -> str:
    """Returns the folder of a package that is loaded."""
    return _HERE if package == "fastformer" else os.path.join(sys.modules[package].__path__[0], "")


def is_written_in(function: object, *packages: ModuleType) -> bool:
    """Returns whether a function's code is in one of these packages or built in; a wrapper only copies the names."""
    if isinstance(function, BuiltinFunctionType):
        return True
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename.startswith(tuple([os.path.join(p.__path__[0], "") for p in packages]))


def is_its_own(kind: type[nn.Module], method: str = "forward") -> bool:
    """Returns whether a class's method is the original of PyTorch or transformers, by the place that its code names."""
    for owner in kind.__mro__:
        if method in vars(owner):
            break
    function: Any = vars(owner)[method]
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    code = getattr(function, "__code__", None)
    if code is None or module != owner.__module__ or name != f"{owner.__qualname__}.{method}":
        return False
    return bool(code.co_filename.startswith((folder_of("torch"), folder_of(owner.__module__.partition(".")[0]))))


def _is_original(name: str, *packages: str) -> bool:
    """Returns whether a function of torch.nn.functional is PyTorch's own or one of these packages'."""
    function: Any = getattr(F, name)
    if isinstance(function, BuiltinFunctionType):
        return function.__name__ == name
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename.startswith(tuple(map(folder_of, ("torch", *packages))))


@_examined
def replaced_function() -> str | None:
    """Returns the name of a function by which modules of torch.nn compute and which was replaced; None if none was."""
    for name in _FUNCTIONS:
        if not _is_original(name):
            return f"torch.nn.functional.{name}"
    return None


@_examined
def attends_by_known_function() -> bool:
    """Returns whether PyTorch's attention is its own, or the one that `fastformer.activate` puts in its place."""
    return _is_original("scaled_dot_product_attention", "fastformer")


class Replacement(NamedTuple):
    """The functions that replaced a class's own; see `is_written_as_known`."""

    original: Any  # the class
    replaced: str


@_examined
def replacement(kind: type[nn.Module]) -> Replacement | None:
    """Returns the replacement in a class, or in the class from which it is derived; None if there is none.

    For a layer this also finds blocks that were replaced, and for torch.nn's attention the functions that it calls.
    """
    for original in cast(Any, kind.__mro__):
        if original.__module__.partition(".")[0] not in ("torch", "transformers") or original is nn.Module:
            continue
        name = original.__name__
        if original.forward is not nn.Module.forward and not is_its_own(original):
            return Replacement(original, f"{name}.forward")
        if original is nn.MultiheadAttention:
            if not attends_by_known_function():
                return Replacement(original, "torch.nn.functional.scaled_dot_product_attention")
            if not _is_original("multi_head_attention_forward"):
                return Replacement(original, "torch.nn.functional.multi_head_attention_forward")
        for block in _BLOCKS:
            if hasattr(original, block) and not is_its_own(original, block):
                return Replacement(original, f"{name}.{block}")
        return None
    return None


def is_written_as_known(kind: type[nn.Module]) -> bool:
    """Returns whether the forward of a class, or of the class from which it is derived, wasn't replaced."""
    return replacement(kind) is None


@_examined
def _is_plain_call(call: Any) -> bool:
    """Returns whether a class's `__call__` is one of those that are equivalent to that of all modules.

    The layers of transformers have one for checkpoints, until 5.24. The containers in which peft keeps adapters, which
    have one, too, are never called.
    """
    name, module = getattr(call, "__name__", None), getattr(call, "__module__", "")
    is_known = name == "__call__" and module in ("transformers.modeling_layers", "torch.nn.modules.container")
    code = getattr(call, "__code__", None)
    return is_known and code is not None and code.co_filename.startswith(folder_of(module.partition(".")[0]))


def is_watched() -> bool:
    """Returns whether a global hook, a mode or a replaced function observes or changes the work of all modules."""
    if torch_module._has_any_global_hook():
        return True
    if torch.compiler.is_compiling():
        return False
    return cast(Any, replaced_function).eager() is not None or (
        torch._C._len_torch_function_stack() > 0 and _has_function_mode()
    )


def _has_function_mode() -> bool:
    # The mode of `with torch.device(...)` only sets the device of new tensors.
    return any(type(mode) is not DeviceContext for mode in overrides._get_current_function_mode_stack())


def why_not_now() -> str | None:
    """Returns the reason why the C++ engine may run no model now (an active mode would miss its work), or None."""
    if (backend := forced_backend.get()) in ("reference", "triton"):
        return f"use_backend({backend!r}) asks for other code"
    if torch._C._len_torch_dispatch_stack():
        return "a TorchDispatchMode is on, which would see none of its operations"
    if torch._C._len_torch_function_stack() and _has_function_mode():
        return "a TorchFunctionMode is on, which would see none of its operations"
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return "a global forward hook is registered, which it would not call"
    return None


def is_called_plainly(module: nn.Module) -> bool:
    """Returns whether calling a module runs only its class's forward: no hook, patch or compilation of its own."""
    return is_unhooked(module) and not is_watched()


def is_unhooked(module: nn.Module) -> bool:
    """Returns `is_called_plainly`, for callers that have checked `is_watched` once for many modules."""
    attributes = module.__dict__
    return not (
        attributes["_forward_hooks"]
        or attributes["_forward_pre_hooks"]
        or attributes["_backward_hooks"]
        or attributes["_backward_pre_hooks"]
        or "forward" in attributes
        or attributes.get("_compiled_call_impl") is not None
        or not has_plain_call(module)
    )


def has_plain_call(module: nn.Module) -> bool:
    """Returns whether a module's class still has its original `__call__`."""
    call = type(module).__call__
    return call is _CALL or _is_plain_call(call)


def gathers(module: nn.Module) -> bool:
    """Returns whether a module's only hooks are those by which FSDP gathers its parameters for a call.

    Such a module must be called, but the hooks don't change its results.
    """
    attributes = module.__dict__
    hooks = [*attributes["_forward_pre_hooks"].values(), *attributes["_forward_hooks"].values()]
    return (
        bool(hooks)
        and all(map(_is_fsdp_hook, hooks))
        and not (attributes["_backward_hooks"] or attributes["_backward_pre_hooks"] or "forward" in attributes)
        and attributes.get("_compiled_call_impl") is None
        and has_plain_call(module)
    )


def _is_fsdp_hook(hook: Any) -> bool:
    state = getattr(hook, "__self__", None)
    if type(state).__module__ != "torch.distributed.fsdp._fully_shard._fsdp_state":
        return False
    policy: Any = getattr(state, "_mp_policy", None)  # by which the hooks also cast what a module gets and returns
    return policy is not None and policy.param_dtype is None and policy.output_dtype is None


def is_sharded(tensor: object) -> bool:
    """Returns whether an object is a tensor of which each process holds a part."""
    distributed = sys.modules.get("torch.distributed.tensor")
    return distributed is not None and isinstance(tensor, distributed.DTensor)


def is_plain(module: object, *kinds: type[nn.Module]) -> bool:
    """Returns whether a module is exactly of one of these kinds, is called plainly, and has plain tensors.

    Args:
        module: any object in the place of a module.
        kinds: classes of which layers are made, or fastformer's classes.
    """
    return is_untouched(module, *kinds) and not is_watched()


def is_untouched(module: object, *kinds: type[nn.Module], is_lent: bool = False) -> bool:
    """Returns `is_plain`, for callers that have checked `is_watched` once for many modules.

    Args:
        module, kinds: see `is_plain`.
        is_lent: whether a layer around the module gathers its parameters before it computes; see `gathers`.
    """
    kind = type(module)
    if kind not in kinds:
        return False
    assert isinstance(module, nn.Module)
    if not is_written_as_known(kind) or not is_unhooked(module):
        return False
    return has_plain_tensors(module, is_lent=is_lent)


def has_plain_tensors(module: nn.Module, *, is_lent: bool = False) -> bool:
    """Returns whether no parameter of a module is of a tensor subclass that may override operations.

    Parameters that are sharded between calls of the layer around the module are plain while it computes.
    """
    for tensor in module._parameters.values():
        if type(tensor) not in _PLAIN_TENSORS and not (is_lent and _is_whole_in_calls(tensor)):
            return False
    return True


def _is_whole_in_calls(tensor: Any) -> bool:
    # With tensor parallelism, which is a second dimension of the mesh, it stays sharded.
    return is_sharded(tensor) and tensor.device_mesh.ndim == 1


def plain_parameters(module: object, *kinds: type[nn.Module], is_lent: bool = False) -> dict[str, Any] | None:
    """Returns the dictionary with the `weight` and `bias` of an untouched module of these kinds; None for any other."""
    if not is_untouched(module, *kinds, is_lent=is_lent):
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
