"""Values of the Gluon emulator: NumPy arrays with a GPU's types, and pointers that check their bounds."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from triton.experimental.gluon import language as gl


class GluonError(Exception):
    """An error or a hang of a GPU."""


BITS = {gl.int1: 1, gl.int16: 16, gl.int32: 32, gl.uint32: 32, gl.int64: 64}
FLOATS = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}


def rounded(array: np.ndarray, dtype: Any) -> np.ndarray:
    """Rounds float32 to a float dtype (bfloat16 stays in float32 storage)."""
    if dtype == gl.bfloat16:
        return torch.from_numpy(np.array(array, dtype=np.float32)).to(torch.bfloat16).float().numpy()
    if dtype == gl.float16:
        return np.asarray(array, dtype=np.float32).astype(np.float16).astype(np.float32)
    return np.asarray(array, dtype=np.float32)


def bits_of(array: np.ndarray, dtype: Any) -> np.ndarray:
    """Returns the 16 bits of half floats, as int64."""
    if dtype == gl.bfloat16:
        return (rounded(array, dtype).view(np.uint32) >> 16).astype(np.int64)
    return array.astype(np.float16).view(np.uint16).astype(np.int64)


def from_bits(bits: np.ndarray, dtype: Any) -> np.ndarray:
    if dtype == gl.bfloat16:
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.astype(np.uint16).view(np.float16).astype(np.float32)


class Value:
    """A tensor or a scalar: integers in int64, floats in float32, with a Gluon dtype; no layout."""

    def __init__(self, array: Any, dtype: Any) -> None:
        self.array = np.asarray(array)
        self.dtype = dtype

    @property
    def shape(self) -> list[int]:
        return list(self.array.shape)

    @property
    def type(self) -> Any:
        return types.SimpleNamespace(layout=None)

    def __index__(self) -> int:
        return int(self.array)

    def __bool__(self) -> bool:
        return bool(self.array)

    def __getitem__(self, index: Any) -> Value:
        return Value(self.array[index], self.dtype)

    def __hash__(self) -> int:
        return id(self)

    def reshape(self, shape: list[int]) -> Value:
        return Value(self.array.reshape(shape), self.dtype)

    def permute(self, order: tuple[int, ...]) -> Value:
        return Value(self.array.transpose(order), self.dtype)

    def to(self, dtype: Any, bitcast: bool = False) -> Value:
        if bitcast:
            assert self.dtype == gl.int16
            return Value(from_bits(self.array & 0xFFFF, dtype), dtype)
        if dtype in BITS:
            return Value(wrapped(self.array.astype(np.int64), dtype), dtype)
        return Value(rounded(self.array, dtype), dtype)


def wrapped(array: np.ndarray, dtype: Any) -> np.ndarray:
    if dtype == gl.int1:
        return array != 0
    if dtype == gl.int64:
        return array
    bits = BITS[dtype]
    array = array & ((1 << bits) - 1)
    return array if dtype == gl.uint32 else np.where(array >> (bits - 1), array - (1 << bits), array)


def value(x: Any, like: Any = None) -> Value:
    """Converts numbers as Triton types them: an int is an int32, or a uint32 if it doesn't fit."""
    if isinstance(x, Value):
        return x
    if isinstance(x, bool):
        return Value(x, gl.int1)
    if isinstance(x, int):
        if like in BITS and like != gl.int1:
            return Value(np.int64(x), like)
        return Value(np.int64(x), gl.int32 if -(2**31) <= x < 2**31 else gl.uint32 if 0 <= x < 2**32 else gl.int64)
    return Value(np.float32(x), gl.float32)


def common(a: Any, b: Any) -> Any:
    if a == b:
        return a
    for dtype in (gl.float32, gl.bfloat16, gl.float16, gl.int64, gl.uint32, gl.int32, gl.int16):
        if dtype in (a, b):
            return dtype
    return gl.int1


def binary(function: Callable, result: Any = None, reverse: bool = False, checked: bool = False) -> Callable:
    def apply(x: Any, y: Any) -> Any:
        if y is None or isinstance(y, Pointer | str):
            return NotImplemented
        x, y = value(x, getattr(y, "dtype", None)), value(y, getattr(x, "dtype", None))
        dtype = common(x.dtype, y.dtype)
        a, b = (y.array, x.array) if reverse else (x.array, y.array)
        if dtype in BITS and result is None:
            if dtype != gl.int1:
                a, b = a.astype(np.int64), b.astype(np.int64)
            if checked and ((a < 0).any() or (b <= 0).any()):
                raise GluonError("a division of a negative number: a GPU truncates, Python floors")
            exact = function(a, b)
            array = wrapped(np.asarray(exact), dtype)
            if dtype == gl.int32 and not np.array_equal(array, exact):
                raise GluonError(f"int32 overflow: {a} and {b}")
            return Value(array, dtype)
        if result is None:
            a, b = a.astype(np.float32), b.astype(np.float32)
            return Value(rounded(function(a, b), dtype), dtype)
        return Value(function(a, b), result)

    return apply


_ARITHMETIC: dict[str, Callable] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "floordiv": np.floor_divide, "mod": np.mod,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "rshift": np.right_shift, "truediv": np.divide,
}  # fmt: skip
_COMPARISONS: dict[str, Callable] = {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
}  # fmt: skip


def _shift_left(x: Value, y: Any) -> Value:
    return Value(wrapped(x.array.astype(np.int64) << value(y).array, x.dtype), x.dtype)


for _name, _function in _ARITHMETIC.items():
    setattr(Value, f"__{_name}__", binary(_function, checked=_name in ("floordiv", "mod")))
    setattr(Value, f"__r{_name}__", binary(_function, reverse=True, checked=_name in ("floordiv", "mod")))
for _name, _function in _COMPARISONS.items():
    setattr(Value, f"__{_name}__", binary(_function, gl.int1))
setattr(Value, "__lshift__", _shift_left)  # noqa: B010


class GlobalTensor:
    """A tensor in global memory. An element may be written once; `finish` copies the results back."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        flat = torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
        self.flat = flat
        self.first = tensor.storage_offset()
        if tensor.dtype in FLOATS:
            self.dtype, self.array = FLOATS[tensor.dtype], flat.float().numpy().copy()
        else:
            self.dtype = gl.int64 if tensor.dtype == torch.int64 else gl.int32
            self.array = flat.numpy().astype(np.int64)
        self.written = np.zeros(self.array.shape, dtype=bool)
        self.added = np.zeros(self.array.shape, dtype=bool)

    def finish(self) -> None:
        changed = self.written | self.added
        if changed.any():
            self.flat[torch.from_numpy(changed)] = torch.from_numpy(self.array[changed]).to(self.flat.dtype)


class Pointer:
    """Pointers to elements of a Memory."""

    def __init__(self, memory: GlobalTensor, offset: Any) -> None:
        self.memory = memory
        self.offset = offset
        self.dtype = types.SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.memory, self.offset + value(other).array.astype(np.int64))

    def inside(self, mask: np.ndarray) -> np.ndarray:
        offset, mask = np.broadcast_arrays(self.offset, mask)
        chosen = offset[mask]
        if ((chosen < 0) | (chosen >= len(self.memory.array))).any():
            raise GluonError("a pointer out of bounds")
        return chosen
