"""When an op may skip PyTorch's dispatcher: an eager call of plain tensors that is not traced, wrapped or watched.

For a small call, the work that torch.library adds to the dispatcher for autograd takes longer than all the rest,
whether gradients are needed or not (except in inference mode). The dispatcher is for the things that may surround a
call: torch.compile and export, functorch's transforms, forward-mode AD, modes that record or replace operations,
subclasses, profilers. PyTorch marks a tensor or a thread with a dispatch key for nearly each of these. If all keys are
the ordinary ones, a call skips the dispatcher; if anything is unknown, the dispatcher runs it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fastformer.kernels import _plans
from fastformer.ops import _extension

_Key, _Keys = torch._C.DispatchKey, torch._C.DispatchKeySet


def _plain_keys() -> dict[int, str]:
    """Returns the device type by the dispatch keys of a plain strided tensor that autograd may see."""
    plain = {}
    for device, key, autocast, autograd in (
        ("cpu", _Key.CPU, _Key.AutocastCPU, _Key.AutogradCPU),
        ("cuda", _Key.CUDA, _Key.AutocastCUDA, _Key.AutogradCUDA),
    ):
        keys = _Keys(key) | _Keys(autocast) | _Keys(_Key.ADInplaceOrView) | _Keys(autograd)
        plain[keys.raw_repr()] = device
    return plain


_PLAIN = _plain_keys()
# The keys that a thread adds to those of its calls. Inference mode adds fewer, and gives the dispatcher little to do.
_QUIET = (_Keys(_Key.BackendSelect) | _Keys(_Key.ADInplaceOrView)).raw_repr()
_QUIET_INFERENCE = _Keys(_Key.BackendSelect).raw_repr()
# The Python types for each type of the schema; the dispatcher converts or refuses all others.
_TENSORS = frozenset((Tensor, torch.nn.Parameter))
_TYPES: dict[str, frozenset[type]] = {
    "Tensor": _TENSORS,
    "Optional[Tensor]": _TENSORS | {type(None)},
    "float": frozenset((float,)),
    "int": frozenset((int,)),
    "SymInt": frozenset((int,)),
    "Optional[int]": frozenset((int, type(None))),
    "bool": frozenset((bool,)),
    "List[bool]": frozenset((list,)),  # the op's own function made the elements
    "str": frozenset((str,)),
    "ScalarType": frozenset((torch.dtype,)),
}
_ORDINARY = frozenset().union(*_TYPES.values())
_included, _keys_of = torch._C._dispatch_tls_local_include_set, torch._C._dispatch_keys


class Places(dict[tuple[type, ...], tuple[int, ...]]):
    """The positions of the tensors among a call's arguments, by the types of these, for `device_of`.

    If an argument is not exactly of the schema's type, there are no positions: the dispatcher serves these calls.
    """

    def __init__(self, schema: torch.FunctionSchema) -> None:
        # A ScalarType is an integer to the schema, and a torch.dtype to Python.
        self._types = tuple(
            _TYPES["ScalarType" if str(argument.real_type) == "ScalarType" else str(argument.type)]
            for argument in schema.arguments
        )

    def __missing__(self, kinds: tuple[type, ...]) -> tuple[int, ...]:
        if len(kinds) != len(self._types):
            return ()
        if any(kind not in allowed for kind, allowed in zip(kinds, self._types, strict=True)):
            return ()
        self[kinds] = places = tuple(place for place, kind in enumerate(kinds) if kind in _TENSORS)
        return places


def nothing_watches() -> bool:
    """Returns whether this thread has no active mode, transform or profiler. Not for use while torch.compile traces."""
    return (
        _included().raw_repr() == _QUIET
        and not torch._C._is_torch_function_mode_enabled()
        and forward_ad._current_level < 0
        and not torch._C._autograd._profiler_enabled()  # a profiler shows the calls of the dispatcher
    )


def nothing_sees_ops() -> bool:
    """Returns `nothing_watches` for a call that replaces several ops: also in inference mode, and without autocast."""
    return (
        _included().raw_repr() in (_QUIET, _QUIET_INFERENCE)
        and not torch._C._is_torch_function_mode_enabled()
        and not torch._C._is_any_autocast_enabled()
        and forward_ad._current_level < 0
        and not torch._C._autograd._profiler_enabled()
    )


@functools.cache
def _overrides_functions(kind: type) -> bool:
    """Returns whether a tensor class overrides PyTorch's functions, and so doesn't know these ops.

    PyTorch's own classes for tracing know ops by their schema. A class without such a method acts as a plain tensor.
    """
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    if not issubclass(kind, Tensor) or issubclass(kind, FakeTensor | FunctionalTensor):
        return False
    function: Any = kind.__torch_function__
    its_own = getattr(function, "__func__", function) is not Tensor.__torch_function__.__func__  # type: ignore[attr-defined]
    return (
        its_own and function is not torch._C._disabled_torch_function_impl
    ) or kind.__torch_dispatch__ is not Tensor.__torch_dispatch__


def is_transformed() -> bool:
    """Returns whether the call is inside a functorch transform or forward-mode differentiation."""
    return forward_ad._current_level >= 0 or torch._C._functorch.maybe_current_level() is not None


def is_differentiated(tensor: Tensor) -> bool:
    """Returns whether functorch or forward mode, found by `is_transformed`, takes derivatives by this tensor."""
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
        return True
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        if torch._C._functorch.is_gradtrackingtensor(tensor) and tensor.requires_grad:
            return True
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return False


def needs_formula(args: tuple[Any, ...]) -> bool:
    """Returns whether a call needs PyTorch's own operations, which support more than a forward and a backward pass."""
    if is_transformed() or is_traced_for_onnx():
        return True
    return not _ORDINARY.issuperset(map(type, args)) and any(map(_overrides_functions, map(type, args)))


def is_traced_for_onnx() -> bool:
    """Returns whether torch.onnx's older exporter traces, which knows only PyTorch's own operations."""
    return torch._C._get_tracing_state() is not None and torch.onnx.is_in_onnx_export()


def device_of(args: tuple[Any, ...], places: Places) -> tuple[str | None, bool]:
    """Returns (device type, whether a tensor requires a gradient) of a call with only plain tensors on one device.

    The type is None if a tensor isn't plain, the devices differ, or an argument isn't exactly of the schema's type.
    """
    device = None
    requires_grad = False
    for place in places[tuple(map(type, args))]:
        tensor = args[place]
        here = _PLAIN.get(_keys_of(tensor).raw_repr())
        if here is None or here != (device or here):
            return None, False
        device = here
        requires_grad = requires_grad or tensor.requires_grad
    return device, requires_grad


class ArgumentChecks(NamedTuple):
    """The functions that examine the arguments of each call.

    Attributes:
        device_of: see `device_of`.
        geometry: see `_plans.geometry`.
        is_fast: whether both are C++ functions.
    """

    device_of: Callable[[tuple[Any, ...], Places], tuple[str | None, bool]]
    geometry: Callable[[tuple[Any, ...]], Hashable | None]
    is_fast: bool


@functools.cache
def argument_checks() -> ArgumentChecks:
    """Returns the argument checks, from C++ if the extension exists: these take a fifth of the time."""
    in_cpp = _extension.host_function("device_of"), _extension.host_function("geometry")
    return ArgumentChecks(in_cpp[0] or device_of, in_cpp[1] or _plans.geometry, None not in in_cpp)


def autograd_is_excluded() -> bool:
    """Returns whether this thread is inside an op that PyTorch differentiates as a whole."""
    return torch._C._dispatch_tls_is_dispatch_key_excluded(_Key.AutogradOther)
