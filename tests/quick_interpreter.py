"""Triton's interpreter, faster and closer to a device.

`quicken` leaves out repeated work, and tests of kernels take half as long; what a kernel computes stays the same to the
bit. `fuse` rounds a fused multiply-add once, as a device does. Of a release of Triton that is written otherwise,
nothing is changed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any


def quicken() -> None:
    """Changes the interpreter of this process. Call it before a kernel runs."""
    import triton
    from triton.runtime import interpreter

    options: Any = getattr(interpreter.interpreter_builder, "options", None)
    if not getattr(options, "debug", True) and hasattr(options, "sanitize_overflow"):
        # Each sum and product of integers is computed once more in int64, for an assertion that only debug makes.
        interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)
    if hasattr(interpreter, "_patch_lang") and hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang = _patch_once(interpreter._patch_lang, interpreter._LangPatchScope)
    if hasattr(interpreter, "_get_np_dtype"):
        interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
    if triton.__version__.startswith("3.6."):
        interpreter._patch_lang_tensor = _with_index(interpreter._patch_lang_tensor)
    if triton.__version__.startswith("3.7."):
        _share_types()
        _shorten_calls()


def _share_types() -> None:
    """Makes one object of each type of a block, and derives from a type once what all values of the type share.

    Each operation makes several types and values, and Triton checks every dimension of each.
    """
    import triton.language as tl

    core: Any = tl.core
    blocks: dict[Any, Any] = {}
    make_block = core.block_type.__init__

    def block(cls: Any, element_ty: Any, shape: Any) -> Any:
        sizes = [size.value if isinstance(size, core.constexpr) else size for size in shape]
        key = (element_ty.name, getattr(element_ty, "address_space", None), *sizes)
        if key not in blocks:
            made = object.__new__(cls)
            make_block(made, element_ty, shape)
            blocks[key] = made
        return blocks[key]

    def make_value(self: Any, handle: Any, type: Any) -> None:
        if "of_values" not in vars(type):
            shape = [*type.shape] if type.is_block() else []
            type.of_values = core.tuple([*map(core.constexpr, shape)]), core.constexpr(math.prod(shape)), type.scalar
        self.handle, self.type = handle, type
        self.shape, self.numel, self.dtype = type.of_values

    def same_first(compare: Callable[[Any, Any], Any], true: Any) -> Callable[[Any, Any], Any]:
        return lambda self, other: true if self is other else compare(self, other)

    core.block_type.__new__, core.block_type.__init__ = block, lambda self, element_ty, shape: None
    core.tensor.__init__ = make_value
    for owner, true in ((core.dtype, True), (core.block_type, True), (core.tuple, core.constexpr(True))):
        owner.__eq__ = same_first(owner.__eq__, true)


def _shorten_calls() -> None:
    """Leaves out what Triton does in each call for cases that are not this one."""
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    semantic: Any = TritonSemantic
    check_types, constant, broadcast = (
        semantic.binary_op_type_checking_impl,
        semantic.scalar_constant,
        semantic.broadcast_impl_value,
    )
    constants: dict[Any, Any] = {}
    unwrap, wrapper = tl.core._unwrap_if_constexpr, tl.core.builtin(_shorten_calls).__code__

    def check_types_if_different(self: Any, lhs: Any, rhs: Any, *allowed: bool, **options: bool) -> Any:
        alike = type(lhs) is type(rhs) is tl.tensor and lhs.dtype is rhs.dtype
        if alike and not lhs.dtype.is_ptr() and not options.get("div_or_mod"):
            return self.broadcast_impl_value(lhs, rhs)
        return check_types(self, lhs, rhs, *allowed, **options)

    def broadcast_if_different(self: Any, lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    def constant_once(self: Any, value: Any, dtype: Any) -> Any:
        key = (type(value), value, dtype.name)
        if key not in constants:
            if len(constants) > 10_000:
                constants.clear()
            constants[key] = constant(self, value, dtype)
            constants[key].handle.data.flags.writeable = False
        return constants[key]

    def patch(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function = member.__wrapped__ if member.__code__ is wrapper else member

        def call(*args: Any, **options: Any) -> Any:
            options["_semantic"] = interpreter.interpreter_semantic
            return function(*args, **options)

        scope.set_attr(owner, name, call)

    def unwrap_first(o: Any) -> Any:
        kind = type(o)
        return o.value if kind is tl.constexpr else o if kind is int else unwrap(o)

    tl.core._unwrap_if_constexpr = unwrap_first
    interpreter._patch_attr = patch
    semantic.binary_op_type_checking_impl = check_types_if_different
    semantic.broadcast_impl_value = broadcast_if_different
    semantic.scalar_constant = constant_once


def fuse() -> None:
    """Makes tl.fma round once.

    With two roundings, fma(a, b, -(a * b)) is 0; on a device, it is the rounding error of a * b.
    """
    import numpy as np
    from triton.runtime import interpreter

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        dtype = x.data.dtype
        wide = np.float64 if dtype in (np.float16, np.float32) else dtype
        with np.errstate(all="ignore"):
            # A product of two fp32 is exact in fp64.
            data = (x.data.astype(wide) * y.data.astype(wide) + z.data.astype(wide)).astype(dtype)
        return interpreter.TensorHandle(data, z.dtype.scalar)

    if hasattr(interpreter, "InterpreterBuilder") and hasattr(interpreter, "TensorHandle"):
        interpreter.InterpreterBuilder.create_fma = create_fma


def sort_at_once() -> None:
    """Makes NumPy sort for tl.topk, of whose network each comparison is a dozen operations: seconds a call."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    def topk(x: Any, k: Any, dim: Any = None) -> Any:
        count = getattr(k, "value", k)
        best = np.sort(x.handle.data, axis=-1)[..., : -count - 1 : -1]
        handle = interpreter.TensorHandle(np.ascontiguousarray(best), x.dtype.scalar)
        return tl.tensor(handle, tl.block_type(x.dtype.scalar, [*x.shape[:-1], count]))

    if hasattr(interpreter, "TensorHandle"):
        tl.topk = topk


def _patch_once(patch: Callable[[Any], Any], no_changes: Callable[[], Any]) -> Callable[[Any], Any]:
    """Patches triton.language once per launch, and not again in each call of a jit function."""
    import triton.language as tl

    @functools.cache
    def changed_first(fn: Any) -> list[tuple[Any, str]]:
        """Returns the functions that replace those of `fn`."""
        languages = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        places = [(language, "load") for language in languages] + [(tl.math, "exp")] * (tl in languages)
        return [*places, (tl.tensor, "__add__"), (tl.core.tensor_descriptor_base, "load")] if languages else []

    def patch_once(fn: Any) -> Any:
        places = changed_first(fn)
        if places and not any(tl.core.is_builtin(getattr(owner, name)) for owner, name in places):
            return no_changes()
        return patch(fn)

    return patch_once


def _by_name(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Stores the table of types, which the interpreter makes again at every lookup."""
    import triton.language as tl

    cache: dict[str, Any] = {}

    def find_once(dtype: Any) -> Any:
        element = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        if isinstance(element, tl.pointer_type):
            return find(dtype)
        if element.name not in cache:
            cache[element.name] = find(element)
        return cache[element.name]

    return find_once


def _with_index(patch: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Converts arrays of one element, which Triton 3.6 uses as indices, and which numpy 2.4 and newer refuse."""

    def patch_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    return patch_tensor
