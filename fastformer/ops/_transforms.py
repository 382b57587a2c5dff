"""Whether a call is transformed, traced, or gets tensors of foreign classes, and so needs an op's formula."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

# The Python types that an op's schema knows, besides the numbers of torch.compile.
_ORDINARY = frozenset((Tensor, torch.nn.Parameter, type(None), float, int, bool, list, str, torch.dtype))


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
