"""The properties for which a kernel is compiled: the types of its arguments, what is known of their values, constants.

Triton's own launch uses the same properties, but ignores `do_not_specialize` inside of a tuple, so that each number of
tiles, and a batch of one, would lead to another binary. So kernels are compiled by the signatures of this module, which
the compile report, the files of binaries and the launches share.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

# The index of a parameter, or the path of indices to an element of a tuple.
Place = tuple[int, ...]

_TYPES = {
    torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64", torch.bool: "u1",
    torch.uint8: "u8", torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip
_DIVISIBLE = [["tt.divisibility", 16]]


class Signature(NamedTuple):
    """The properties on which a binary depends, apart from the kernel's source, the compiler and its options."""

    types: dict[str, Any]  # the type of each parameter; for a tuple, the types of its elements
    constants: dict[Place, Any]
    attributes: dict[Place, list[list[Any]]]  # which arguments are multiples of 16


def signature_of(kernel: Any, arguments: Mapping[str, Any]) -> Signature:
    """Returns the signature of a launch.

    Args:
        kernel: a result of `triton.jit`.
        arguments: the arguments by name: tensors, numbers, None, descriptors, tuples of them, and the constexprs.

    Raises:
        TypeError: an argument has another type.
    """
    signature = Signature({}, {}, {})
    for index, parameter in enumerate(kernel.params):
        name = parameter.name
        value = arguments.get(name, parameter.default)
        free = parameter.do_not_specialize
        aligned = free or parameter.do_not_specialize_on_alignment
        signature.types[name] = _describe(signature, value, (index,), parameter.is_constexpr, free, aligned)
    return signature


def _describe(signature: Signature, value: Any, path: Place, is_constexpr: bool, free: bool, aligned: bool) -> Any:
    """Returns the type of an argument, and records the known properties of its value in the signature.

    Args:
        free: the compiler learns nothing about the value.
        aligned: the compiler doesn't learn whether the value is a multiple of 16.
    """
    kind = type(value)
    if kind is tuple and not is_constexpr:
        return tuple(_describe(signature, item, (*path, i), False, free, aligned) for i, item in enumerate(value))
    if is_constexpr or value is None or (kind is int and value == 1 and not free):
        signature.constants[path] = value
        return "constexpr"
    if kind is bool:
        return "u1"
    if isinstance(value, int):
        if value % 16 == 0 and not aligned:
            signature.attributes[path] = _DIVISIBLE
        return "i32" if -(2**31) <= value < 2**31 else "i64" if value < 2**63 else "u64"
    if isinstance(value, float):
        return "fp32"
    if isinstance(value, torch.Tensor) and value.dtype in _TYPES:
        if not aligned and value.data_ptr() % 16 == 0:
            signature.attributes[path] = _DIVISIBLE
        return "*" + _TYPES[value.dtype]
    if hasattr(value, "block_shape"):
        layout = f",{value.layout!r}" if hasattr(value, "layout") else ""  # Gluon's descriptor has a layout
        return f"tensordesc<{_TYPES[value.base.dtype]}{list(value.block_shape)}{layout}>"
    raise TypeError(f"expected a tensor, a number, None or a tuple for a kernel, got {kind.__name__}")


def key_of(kernel: Any, signature: Signature, options: Mapping[str, Any]) -> str:
    """Returns a digest of everything on which a binary depends, except the kernels' sources and the architecture.

    Args:
        options: the compiler's options: num_warps, num_stages, maxnreg.
    """
    parts = (
        kernel.fn.__module__.rpartition(".")[2],
        kernel.fn.__name__,
        tuple(signature.types.items()),
        sorted((path, type(value).__name__, repr(value)) for path, value in signature.constants.items()),
        sorted(signature.attributes),
        sorted((name, value) for name, value in options.items() if value is not None),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


_LETTERS = {
    "u1": "b", "i1": "b", "i8": "b", "u8": "b", "i16": "h", "u16": "h", "i32": "i", "u32": "i", "i64": "q", "u64": "Q",
    "fp32": "f", "fp64": "d",
}  # fmt: skip


def layout_of(signature: Signature, num_args: int) -> str:
    """Returns the layout that turns the first arguments of a launch into parameters; see csrc/bindings/launcher.cpp."""

    def letters(kind: Any) -> str:
        if isinstance(kind, tuple):
            return f"({''.join(map(letters, kind))})"
        if kind == "constexpr":
            return "n"
        if kind.startswith("tensordesc"):
            return "T"
        return "p" if kind.startswith("*") else _LETTERS[kind]

    return "".join(map(letters, list(signature.types.values())[:num_args])) + "00"


def arguments_of(
    kernel: Any, args: tuple[Any, ...], options: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns a launch's arguments by name, and the compiler's options.

    Args:
        args: the kernel's first arguments.
        options: its other arguments by name, and the compiler's options.
    """
    names = [parameter.name for parameter in kernel.params]
    arguments = dict(zip(names, args, strict=False))
    arguments |= {name: value for name, value in options.items() if name in names}
    return arguments, {name: value for name, value in options.items() if name not in names}
