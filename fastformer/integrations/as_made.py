"""Checks whether a model of transformers still is the model that its config makes.

Such a model consists of transformers' modules (or of those that `accelerate` put in their place), with the settings of
a new model of this config, and without hooks and patches. The engine computes the same as a model's modules but calls
none of them, so it can run no other model. The check runs once, and its result holds as long as the model's guards do.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fastformer.integrations.known import (
    code_of,
    is_unhooked_or_recorded,
    own_function,
    register,
    replaced_function,
    sources_of,
)
from fastformer.integrations.replace import has_own_class, original_class
from fastformer.nn.guards import ModelGuards, is_written_as_known, is_written_in

PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16"}
_SCALARS = (bool, int, float, str, tuple, types.NoneType)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial)
_METHODS = (types.FunctionType, staticmethod)
# Numbers of a module that don't change its output in evaluation; all those with "drop" in their names don't, either.
# Sizes are ignored since the shapes of the parameters are compared: resizing embeddings leaves some sizes unchanged.
_FREE = frozenset(
    {
        *("training", "gradient_checkpointing", "name_or_path", "loss_type", "inplace", "p"),
        *("vocab_size", "num_embeddings", "in_features", "out_features"),
    }
)

register(torch.nn.modules.sparse)  # `guards` doesn't know this module


def guards_of(model: nn.Module) -> ModelGuards:
    """Returns guards that hold as long as nothing that `why_not_as_made` examined has changed."""
    kinds = {type(module) for module in model.modules()}
    places: list[tuple[object, str]] = [(space, name) for space, functions in sources_of(kinds) for name in functions]
    places += [(vars(kind), name) for kind, name in _methods(kinds)]
    configs = [*map(vars, _configs(model))]
    places += [(config, name) for config in configs for name in config]
    values = [value for config in configs for value in config.values() if isinstance(value, list | dict)]
    return ModelGuards(model, places, values)


def _configs(model: nn.Module) -> list[Any]:
    found = [vars(module).get("config") for module in model.modules()]
    return [*{id(config): config for config in found if config is not None}.values()]


def tables_of(model: nn.Module) -> Iterator[Tensor]:
    """Returns a model's non-persistent buffers, which no state_dict contains, and which the model reads as they are."""
    for module in model.modules():
        for name in module._non_persistent_buffers_set:
            if (table := module._buffers.get(name)) is not None and not _is_rewritten(module, name):
                yield table


def _is_rewritten(module: nn.Module, name: str) -> bool:
    """Returns whether each forward writes a buffer before it reads it, as with "longrope", by the batch's length."""
    return name == "inv_freq" and vars(module).get("rope_type") == "longrope"


def _methods(kinds: Iterable[type]) -> Iterator[tuple[type, str]]:
    """Returns the methods of classes and of their base classes in transformers and in this library."""
    for each in {base for kind in kinds for base in kind.__mro__}:
        if each.__module__.startswith(("transformers.", "fastformer.")):
            yield from ((each, name) for name, value in vars(each).items() if isinstance(value, _METHODS))


def why_not_as_made(model: Any, **options: Any) -> str | None:
    """Returns why the engine's results would differ from those of a model's modules; None if they would not.

    Args:
        model: a model of a class of transformers.
        options: the options of the class, besides the config.
    """
    kind = original_class(model)
    register(sys.modules[kind.__module__])
    for each, name in _methods({original_class(module) for module in model.modules()}):
        if not _is_theirs(vars(each)[name]):
            return f"{each.__name__}.{name} was replaced"
    if (replaced := replaced_function(sources_of({type(module) for module in model.modules()}))) is not None:
        return replaced
    if model.config._attn_implementation not in ("eager", "sdpa"):
        return f"its attention is {model.config._attn_implementation!r}, and not 'eager' or 'sdpa'"
    return _why_not_tensors(model) or _why_not_parts(model, kind, options)


def _is_theirs(function: Any) -> bool:
    """Returns whether a method is written in transformers or torch, also if a decorator of contextlib wraps it."""
    if getattr(function, "__code__", None) is not None and function.__code__.co_filename == contextlib.__file__:
        function = getattr(function, "__wrapped__", function)
    return is_written_in(code_of(function), transformers, torch)


def _why_not_tensors(model: nn.Module) -> str | None:
    dtypes = set()
    parameters = [(name, tensor, nn.Parameter) for name, tensor in model.named_parameters()]
    buffers = [(name, tensor, Tensor) for name, tensor in model.named_buffers()]
    for name, tensor, expected in (*parameters, *buffers):
        # The tensor by which `functional_call` replaces a parameter may be part of a derivative.
        if type(tensor) not in (nn.Parameter, expected) or tensor.layout != torch.strided:
            return f"its {name} is a {type(tensor).__name__} of layout {tensor.layout}"
        if tensor.device.type != "cpu":
            return f"its {name} is on {tensor.device}: the engine runs on a CPU"
        if tensor.is_inference():
            return f"its {name} was made in inference mode, whose changes could not be noticed"
        if isinstance(tensor, nn.Parameter):
            dtypes.add(tensor.dtype)
    if len(dtypes) != 1 or not dtypes <= PRECISIONS.keys():
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        return f"its parameters are of {names or 'no dtype'}: the engine packs models in float32 or bfloat16"
    return None


def _why_not_parts(model: nn.Module, kind: Any, options: dict[str, Any]) -> str | None:
    """Returns how a model differs from a new one of its config; None if it doesn't."""
    try:
        with torch.inference_mode(False), torch.random.fork_rng(devices=()), Weightless():
            made = kind(copy.deepcopy(model.config), **options)
    except Exception as error:
        return f"no model can be made from its config: {type(error).__name__}: {error}"
    compared: set[tuple[int, int]] = set()
    found, expected = dict(_named(model)), dict(_named(made))
    if found.keys() != expected.keys():
        return f"its modules differ from those that its config makes: {sorted(found.keys() ^ expected.keys())[:3]}"
    for name, module in found.items():
        other = expected[name]
        reason = _why_not_module(module, other) or _why_not_shapes(module, other)
        if reason is not None:
            return f"{'its ' + name if name else 'it'} {reason}"
        pair: tuple[Any, Any] = (vars(module).get("config"), vars(other).get("config"))
        if None not in pair and (key := (id(pair[0]), id(pair[1]))) not in compared:
            compared.add(key)
            if pair[0].to_dict() != pair[1].to_dict():
                return f"{'its ' + name if name else 'it'} has a config that differs from the model's"
    return None


def _named(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields modules by name. Several names may share one embedding, or each have its own with the same weight."""
    seen = set[nn.Module]()
    for name, module in model.named_modules(remove_duplicate=False):
        if module not in seen or isinstance(module, nn.Embedding):
            seen.add(module)
            yield name, module


def _why_not_module(module: nn.Module, made: nn.Module) -> str | None:
    kind = original_class(module)
    if kind is not original_class(made):
        return f"is a {kind.__module__}.{kind.__name__}, not a {original_class(made).__name__}"
    if has_own_class(module):
        return f"has another class, {type(module).__name__}, than accelerate gave it"
    if not is_written_as_known(type(module)):
        return f"has a class whose forward was replaced, {type(module).__name__}"
    if not is_unhooked_or_recorded(module):
        return "has a hook or its own forward, which the engine would not call"
    if (own := own_function(module)) is not None:
        return f"has a function of yours, {own}"
    ours, theirs = vars(module), vars(made)
    for name, value in ours.items():
        # An instance's attribute that hides a method of its class, such as a patched prepare_inputs_for_generation.
        if name not in theirs and callable(value) and not isinstance(value, nn.Module) and hasattr(kind, name):
            return f"has its own {name}"
    for name, value in theirs.items():
        if isinstance(value, _FUNCTIONS) and _bare(value) != _bare(ours.get(name)):
            return f"has a {name} that contradicts its config"
        if name[0] == "_" or name in _FREE or "drop" in name or not isinstance(value, _SCALARS):
            continue
        if name == "padding_idx" and not _counts_from_padding(module):
            continue
        if ours.get(name) != value or type(ours.get(name)) is not type(value):
            return f"has {name} {ours.get(name)!r}, while its config says {value!r}"
    return None


def _counts_from_padding(module: nn.Module) -> bool:
    """Returns whether a module's padding_idx decides which positions tokens have.

    In an embedding, and in a stack, which passes it on to one, it only names the row that learns nothing.
    """
    return not isinstance(module, nn.Embedding) and (not module._modules or "position_embeddings" in module._modules)


def _bare(function: Any) -> object:
    if isinstance(function, functools.partial):
        return function.func, function.args, function.keywords
    return getattr(function, "__func__", function)


def _why_not_shapes(module: nn.Module, made: nn.Module) -> str | None:
    for kind, found, expected in (
        ("parameters", module._parameters, made._parameters),
        ("buffers", module._buffers, made._buffers),
    ):
        if found.keys() != expected.keys():
            return f"has the {kind} {[*found]}, while its config says {[*expected]}"
        for name, tensor in found.items():
            other = expected[name]
            if (tensor is None) != (other is None):
                return f"has {'no' if tensor is None else 'a'} {name}, which contradicts its config"
            if tensor is None or other is None:
                continue
            if tensor.shape != other.shape:
                return f"has a {name} of shape {tuple(tensor.shape)}, while its config says {tuple(other.shape)}"
            is_saved = kind == "parameters" or name not in module._non_persistent_buffers_set
            if is_saved or other.is_meta or _is_rewritten(module, name):
                continue
            if not (tensor.dtype == other.dtype and torch.equal(tensor, other)):
                return (
                    f"has a {name} with values that contradict its config: load a model with dtype=, and don't cast it"
                )
    return None


class Weightless(TorchFunctionMode):
    """Makes tensors for weights on "meta" and doesn't fill them. Other tensors, such as tables, are made as usual."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        """See `TorchFunctionMode`."""
        options, name = dict(kwargs or {}), func.__name__
        if func in (torch.empty, torch.randn, torch.rand):
            options["device"] = "meta"
        target = args[0] if args else options.get("tensor")
        if name.endswith("_") and not name.endswith("__") and isinstance(target, Tensor) and target.is_meta:
            return target
        return func(*args, **options)
