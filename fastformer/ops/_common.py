"""Small helpers that several references and documented functions share."""

from __future__ import annotations

import math

import torch
from torch import Tensor

INTEGERS = (torch.int64, torch.int32)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of statistics, losses and sums over rows: fp32, or fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def described(tensor: object) -> str:
    """Describes an argument in an error message: a tensor by its dtype and shape, any other object by its type."""
    if not isinstance(tensor, Tensor):
        return type(tensor).__name__
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}"


def check_features(x: Tensor) -> None:
    """Raises ValueError unless x is (..., dim), floating point, dim >= 1."""
    if not isinstance(x, Tensor) or x.dim() == 0 or x.shape[-1] == 0 or not x.is_floating_point():
        raise ValueError(f"expected a floating-point x (..., dim) with dim >= 1, got {described(x)}")


def check_number(name: str, value: object, least: float = -math.inf) -> None:
    """Raises ValueError unless the value is a finite number, and not below `least`."""
    if not isinstance(value, int | float) or not least <= value or not -math.inf < value < math.inf:
        bound = "" if least == -math.inf else f" of at least {least:g}"
        raise ValueError(f"expected {name} to be a finite number{bound}, got {value!r}")


def resolve_softcap(softcap: float) -> float:
    """Returns c of c * tanh(x / c) as a float; 0: no cap.

    Raises:
        ValueError: c isn't a finite number of at least 0.
    """
    check_number("softcap", softcap, 0.0)
    return float(softcap)


def soft_capped(x: Tensor, softcap: float) -> Tensor:
    """Computes c * tanh(x / c), which limits numbers to (-c, c) and hardly changes small ones; returns x for c = 0."""
    return (x / softcap).tanh() * softcap if softcap else x


def check_vector(name: str, vector: Tensor | None, size: int) -> None:
    """Raises ValueError unless the vector is None or floating point of shape (size,)."""
    if vector is None:
        return
    if not isinstance(vector, Tensor) or vector.shape != (size,) or not vector.is_floating_point():
        raise ValueError(f"expected a floating-point {name} of shape ({size},), got {described(vector)}")


def is_matrix(value: object, columns: int) -> bool:
    """Returns whether a value is a floating-point tensor (any number of rows, columns)."""
    return isinstance(value, Tensor) and value.dim() == 2 and value.shape[1] == columns and value.is_floating_point()


def check_dtype(name: str, parameter: Tensor | None, dtype: torch.dtype) -> None:
    """Raises ValueError unless the parameter is None or has the given dtype."""
    if parameter is not None and parameter.dtype != dtype:
        raise ValueError(f"expected {name} in x's dtype {dtype}, got {parameter.dtype}")


def check_linear(x: Tensor, weight: Tensor, bias: Tensor | None, rows: str, at_least: int = 1) -> None:
    """Raises ValueError unless x (..., dim), weight (rows, dim) and bias (rows,) are floating point of one dtype.

    Args:
        x, weight, bias: the arguments, after autocast.
        rows: the name of the weight's rows in messages.
        at_least: the minimum number of rows.
    """
    check_features(x)
    if not is_matrix(weight, x.shape[-1]) or weight.shape[0] < at_least:
        raise ValueError(f"expected a floating-point weight ({rows}, {x.shape[-1]}), got {described(weight)}")
    check_vector("bias", bias, weight.shape[0])
    check_dtype("weight", weight, x.dtype)
    check_dtype("bias", bias, x.dtype)


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Returns whether autograd will record operations on these tensors."""
    if torch.is_grad_enabled():
        for tensor in tensors:  # runs in each call: a generator takes three times as long
            if getattr(tensor, "requires_grad", False):
                return True
    return False


class SharedReason(str):
    """A reason that is the same for all ops why a backend's kernels can't compute a call; it is logged only once."""

    __slots__ = ()


def cpp_unsupported_dtype(op_name: str, *, x: Tensor, **_: object) -> str | None:
    """Implements `cpp_unsupported` for an op that C++ computes for every x with a supported dtype."""
    return no_cpp_code(x.dtype)


def no_cpp_code(dtype: torch.dtype) -> SharedReason | None:
    """Returns why the C++ kernels can't compute a call in a dtype; None if they can."""
    if dtype in (torch.float32, torch.bfloat16, torch.float64):
        return None
    return SharedReason(f"it computes in fp32, bf16 and fp64, not {dtype}")


def is_plain(tensor: Tensor) -> bool:
    """Returns whether a tensor holds numbers, is of no subclass, and is neither traced nor batched."""
    return (
        not torch.compiler.is_compiling()
        and type(tensor) is Tensor
        and torch._C._functorch.maybe_current_level() is None
        and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is None  # the mode of make_fx
        and not torch._C._functorch.is_legacy_batchedtensor(tensor)  # the tensors of autograd's is_grads_batched
    )


def is_readable(tensor: Tensor) -> bool:
    """Returns whether reading a tensor's values is free: it is in CPU memory, and neither traced nor batched."""
    return tensor.device.type == "cpu" and is_plain(tensor)


def check_range(indices: Tensor, size: int, expected: str) -> None:
    """Raises IndexError unless all indices are in [0, size); the message names the bound that is exceeded.

    The check runs only on a CPU: on a GPU it would cost a host sync, and there the lookup itself asserts on the device.
    """
    if not is_readable(indices) or indices.numel() == 0:
        return
    low, high = (int(bound) for bound in torch.aminmax(indices))
    if low < 0 or high >= size:
        raise IndexError(f"expected {expected}, got {low if low < 0 else high}")
