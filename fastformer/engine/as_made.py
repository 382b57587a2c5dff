"""Checks whether a model is the one that its config makes.

The C++ engine computes the same as a model's modules and calls none of them. So it runs only a model that consists of
its library's own modules, with the settings of a new model of the config, and without hooks and patches. `Made` says
what that means for the models of one library. The check runs once, and its result holds as long as the model's
`ModelGuards` do.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from fastformer.engine.checks import folder_of

PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_ON_CPU = (torch.float32, torch.bfloat16)  # the dtypes that the C++ engine computes in
_SCALARS = (bool, int, float, str, tuple, types.NoneType)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial)


@dataclass(frozen=True)
class Made:
    """The properties that a model of one library has to share with a new one of its config.

    Attributes:
        is_free: (module, name) -> whether an attribute may differ without an effect on the results in evaluation.
        why_not: (module, the same module of the new model) -> a further difference between them, or None.
        class_of: the class that the config names for a module.
        has_hook: whether calling a module runs a hook that the engine would not call.
        may_be: (name, module) -> whether a child of this name may be any module of this kind; None: no child may.
        is_rewritten: (module, name) -> whether each call writes a buffer before it reads it.
        has_tables: whether buffers may have another dtype than the parameters.
        device: the device that all tensors have to be on.
    """

    is_free: Callable[[nn.Module, str], bool]
    why_not: Callable[[Any, Any], str | None]
    class_of: Callable[[nn.Module], type] = type
    has_hook: Callable[[nn.Module], bool] = lambda module: bool(module._forward_hooks or module._forward_pre_hooks)
    may_be: Callable[[str, Any], bool] | None = None
    is_rewritten: Callable[[nn.Module, str], bool] = lambda module, name: False
    has_tables: bool = False
    device: torch.device = torch.device("cpu")


def why_not_as_made(model: nn.Module, make: Callable[[], nn.Module], made: Made) -> str | None:
    """Returns how a model differs from a new one of its config, with the module's name; None if it doesn't.

    Args:
        model: the model.
        make: makes a new model of the config, whose weights may be on "meta".
        made: what is compared.
    """
    modules = [*model.modules()]
    if (replaced := replaced_method({*map(type, modules), *map(made.class_of, modules)})) is not None:
        return replaced
    try:
        new = make()
    except Exception as error:  # the config was changed after the model was made
        return f"no model can be made from its config: {type(error).__name__}: {error}"
    dtypes: dict[torch.dtype, str] = {}
    stack, seen = [("", model, new)], {(id(model), id(new))}
    while stack:
        name, module, other = stack.pop()
        reason = _why_not_module(module, other, made) or _why_not_tensors(module, other, name, made, dtypes)
        if reason is not None:
            return f"{_called(name)} {reason}"
        children, expected = module._modules, other._modules
        for child in children.keys() | expected.keys() if children.keys() != expected.keys() else children:
            inner, made_inner = children.get(child), expected.get(child)
            if inner is None and made_inner is None:
                continue
            if made.may_be is not None and inner is not None and made.may_be(child, inner):
                made_inner = inner
            if inner is None or made_inner is None:
                what = "has no" if inner is None else "has an additional"
                return f"{_called(name)} {what} module {child!r}, which contradicts its config"
            if (id(inner), id(made_inner)) not in seen:
                seen.add((id(inner), id(made_inner)))
                stack.append((f"{name}.{child}" if name else child, inner, made_inner))
    known = _ON_CPU if made.device.type == "cpu" else PRECISIONS
    if len(dtypes) != 1 or not all(dtype in known for dtype in dtypes):
        listed = ", ".join(f"{name} is {str(dtype).removeprefix('torch.')}" for dtype, name in dtypes.items())
        return f"its parameters are not all float32 or all bfloat16: {listed or 'it has none'}"
    return None


def replaced_method(kinds: Iterable[type]) -> str | None:
    """Returns a reason with the name of a method that isn't written in the package of its class, or None.

    Of PyTorch's classes only `forward` and `__call__` are examined.
    """
    packages = ("torch", "transformers", "fastformer")
    for each in {base for kind in kinds for base in kind.__mro__}:
        package = each.__module__.partition(".")[0]
        if package not in packages:
            continue
        folders: tuple[str, ...] = (folder_of("torch"), folder_of(package))
        if package == "fastformer" and "transformers" in str(each.__mro__):
            folders = (*folders, folder_of("transformers"))
        for name, value in vars(each).items():
            if package == "torch" and name not in ("forward", "__call__"):
                continue
            function: Any = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            while not isinstance(function, types.FunctionType) and hasattr(function, "__wrapped__"):
                function = function.__wrapped__
            if not callable(function) or isinstance(function, type | types.BuiltinFunctionType):
                continue
            code = getattr(function, "__code__", None)
            if code is not None and code.co_filename == contextlib.__file__:  # of a decorator
                code = getattr(getattr(function, "__wrapped__", None), "__code__", None)
            if code is None or not code.co_filename.startswith(folders):
                return f"{each.__name__}.{name} was replaced"
    return None


def _why_not_module(module: nn.Module, new: nn.Module, made: Made) -> str | None:
    kind, expected = made.class_of(module), type(new)
    if kind is not expected:
        return f"is a {_full_name(kind)}, not {_full_name(expected)}"
    if made.has_hook(module):
        return "has a forward hook, which it would not call"
    attributes, as_new = vars(module), vars(new)
    for name, value in attributes.items():
        # An instance's attribute that hides a method of its class, such as a patched prepare_inputs_for_generation.
        if name not in as_new and callable(value) and not isinstance(value, nn.Module) and hasattr(kind, name):
            return f"has its own {name}"
    for name, value in as_new.items():
        current = attributes.get(name)
        if isinstance(value, _FUNCTIONS):
            if _bare(value) != _bare(current) and not made.is_free(module, name):
                return f"has a {name} that contradicts its config"
        # If a tensor stood for a number, it could be changed without detection.
        elif isinstance(value, _SCALARS) and (type(value) is not type(current) or value != current):
            if made.is_free(module, name):
                continue
            return f"has {name} {current!r}, while its config says {value!r}"
    return made.why_not(module, new)


def _why_not_tensors(
    module: nn.Module, new: nn.Module, place: str, made: Made, dtypes: dict[torch.dtype, str]
) -> str | None:
    for kind, expected, tensors in (
        (nn.Parameter, new._parameters, module._parameters),
        (Tensor, new._buffers, module._buffers),
    ):
        if expected.keys() != tensors.keys():
            return f"has the tensors {[*tensors]}, while its config says {[*expected]}"
        for name, tensor in dict.items(cast(dict[str, Any], tensors)):  # reads nothing of a model that is in a file
            other = expected[name]
            if tensor is None or other is None:
                if tensor is not None or other is not None:
                    return f"has {'a' if other is None else 'no'} {name}, which contradicts its config"
                continue
            # The tensor by which `functional_call` replaces a parameter may be part of a derivative.
            if type(tensor) not in (nn.Parameter, kind) or tensor.layout != torch.strided:
                return f"has a {name} that is a {_full_name(type(tensor))} of layout {tensor.layout}"
            if tensor.device != made.device:
                return f"has a {name} on {tensor.device}: the engine runs on {made.device}"
            if tensor.is_inference():
                return f"has a {name} made in inference mode, whose changes it could not notice"
            if tensor.shape != other.shape:
                return f"has a {name} of shape {tuple(tensor.shape)}, while its config says {tuple(other.shape)}"
            if kind is nn.Parameter or not made.has_tables:
                dtypes.setdefault(tensor.dtype, f"{place}.{name}" if place else name)
            is_table = kind is Tensor and name in module._non_persistent_buffers_set and not other.is_meta
            if is_table and not _is_equal(tensor, other) and not made.is_rewritten(module, name):
                advice = "load a model with dtype=, and don't cast it"
                return f"has a {name} with values that contradict its config: {advice}"
    return None


def _is_equal(table: Tensor, made: Tensor) -> bool:
    if table.device.type == "cpu" or table.dtype != made.dtype:
        return table.dtype == made.dtype and torch.equal(table, made)
    return torch.allclose(table, made.to(table.device), rtol=1e-5, atol=1e-6)  # another device rounds powers otherwise


def _bare(function: Any) -> object:
    if isinstance(function, functools.partial):
        return function.func, function.args, function.keywords
    return getattr(function, "__func__", function)


def _called(name: str) -> str:
    return f"its {name}" if name else "it"


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__name__}"
