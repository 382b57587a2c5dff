"""Small helpers that several references and documented functions share."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor

from fastformer.ops._backends import SharedReason
from fastformer.ops._dispatch import is_readable

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


def cpp_unsupported_dtype(op_name: str, *, x: Tensor, **_: object) -> str | None:
    """Implements `cpp_unsupported` for an op that C++ computes for every x with a supported dtype."""
    return no_cpp_code(x.dtype)


def no_cpp_code(dtype: torch.dtype) -> SharedReason | None:
    """Returns why the C++ kernels can't compute a call in a dtype; None if they can."""
    if dtype in (torch.float32, torch.bfloat16, torch.float64):
        return None
    return SharedReason(f"it computes in fp32, bf16 and fp64, not {dtype}")


def check_range(indices: Tensor, size: int, expected: str) -> None:
    """Raises IndexError unless all indices are in [0, size); the message names the bound that is exceeded.

    The check runs only on a CPU: on a GPU it would cost a host sync, and there the lookup itself asserts on the device.
    """
    if not is_readable(indices) or indices.numel() == 0:
        return
    low, high = (int(bound) for bound in torch.aminmax(indices))
    if low < 0 or high >= size:
        raise IndexError(f"expected {expected}, got {low if low < 0 else high}")


def check_heads(
    q: Tensor, k: Tensor, v: Tensor, dims: int, layout: str, names: tuple[str, str, str] = ("q", "k", "v")
) -> None:
    """Raises ValueError unless q, k and v fit together: ranks, dtypes, head_dim, and heads that divide."""
    for name, tensor in zip(names, (q, k, v), strict=True):
        if not isinstance(tensor, Tensor) or tensor.dim() != dims or not tensor.is_floating_point():
            raise ValueError(f"expected a floating-point {name} {layout}, got {described(tensor)}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"expected q, k and v of one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    if k.shape != v.shape:
        raise ValueError(f"expected k and v of one shape, got {tuple(k.shape)} and {tuple(v.shape)}")
    if q.shape[-1] != k.shape[-1] or q.shape[-1] == 0:
        raise ValueError(f"expected q and k of one head_dim >= 1, got {q.shape[-1]} and {k.shape[-1]}")
    if k.shape[-2] == 0 or q.shape[-2] % k.shape[-2]:
        raise ValueError(
            f"expected num_heads to be a multiple of num_kv_heads, got {q.shape[-2]} heads and {k.shape[-2]} kv heads"
        )


# Larger than the length of any sequence, and small enough that sums with positions fit in 64 bits.
_FAR = 2**40


def _as_number(size: Any) -> Any:
    """Returns a size as a number; in torch.jit.trace it is a tensor, whose powers would be rounded to fp32."""
    return int(size) if isinstance(size, Tensor) else size


def resolve_bound(bound: int | None) -> int | None:
    """Limits one side of a window: all numbers beyond every sequence's length are equivalent."""
    return None if bound is None else max(-_FAR, min(_FAR, bound))


def resolve_window(is_causal: bool, window_size: tuple[int | None, int | None]) -> tuple[int | None, int | None]:
    """Returns (left, right), with is_causal included: causal attention has no keys to the right of the diagonal.

    Raises:
        ValueError: window_size is not a pair of integers or None.
    """
    if window_size == (None, None) and isinstance(is_causal, bool):
        return None, 0 if is_causal else None
    is_pair = isinstance(window_size, tuple | list) and len(window_size) == 2
    if is_pair and torch._C._get_tracing_state() is not None:  # the bounds may be differences of sizes
        window_size = _as_number(window_size[0]), _as_number(window_size[1])
    if not is_pair or not all(bound is None or isinstance(bound, int | torch.SymInt) for bound in window_size):
        raise ValueError(f"expected window_size (left, right) of integers or None, got {window_size!r}")
    left, right = (resolve_bound(bound) for bound in window_size)
    if not isinstance(is_causal, bool):
        raise ValueError(f"expected is_causal to be True or False, got {is_causal!r}")
    if is_causal:
        right = 0 if right is None else min(right, 0)
    return left, right


def check_seqlens_k(seqlens_k: Tensor | None, k: Tensor) -> None:
    """Raises ValueError unless seqlens_k is None or int32 (batch,); checks the lengths against k only on a CPU."""
    batch, seqlen_k = k.shape[:2]
    if seqlens_k is None:
        return
    if not isinstance(seqlens_k, Tensor) or seqlens_k.shape != (batch,) or seqlens_k.dtype != torch.int32:
        raise ValueError(f"expected seqlens_k int32 of shape ({batch},), got {described(seqlens_k)}")
    if not is_readable(seqlens_k) or not batch:
        return
    low, high = torch.aminmax(seqlens_k)
    if low < 0 or high > seqlen_k:
        raise ValueError(f"expected seqlens_k from 0 to {seqlen_k}, the keys of a row, got {int(low)} to {int(high)}")


def resolve_scale(softmax_scale: float | None, head_dim: int) -> float:
    """Returns softmax_scale, by default head_dim ** -0.5.

    Raises:
        ValueError: softmax_scale isn't a finite number.
    """
    if softmax_scale is None:
        return cast(float, _as_number(head_dim) ** -0.5)
    check_number("softmax_scale", softmax_scale)
    return float(softmax_scale)


def expand_mask(attn_mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Returns the mask in four dimensions, with size 1 in those that are broadcast.

    Raises:
        ValueError: the mask is neither boolean nor floating point, or doesn't broadcast.
    """
    if attn_mask is None:
        return None
    shape = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    if not isinstance(attn_mask, Tensor) or not (attn_mask.dtype == torch.bool or attn_mask.is_floating_point()):
        raise ValueError(f"expected a boolean or floating-point attn_mask, got {described(attn_mask)}")
    sizes = (1,) * (4 - attn_mask.dim()) + tuple(attn_mask.shape)
    if attn_mask.dim() > 4 or any(size not in (1, full) for size, full in zip(sizes, shape, strict=True)):
        raise ValueError(f"expected attn_mask broadcastable to {shape}, got shape {tuple(attn_mask.shape)}")
    return attn_mask.view(sizes) if attn_mask.is_contiguous() else attn_mask.reshape(sizes)
