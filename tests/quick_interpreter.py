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
    import numpy as np
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    semantic: Any = TritonSemantic
    check_types, constant, broadcast, cast = (
        semantic.binary_op_type_checking_impl,
        semantic.scalar_constant,
        semantic.broadcast_impl_value,
        semantic.cast,
    )
    constants: dict[Any, Any] = {}
    uncast: set[Any] = set()  # kinds of operands that no operation casts
    numbers: dict[Any, Any] = {}  # by the type of the tensor beside a number
    spread: dict[Any, tuple[Any, Any]] = {}  # by two types, those to which their values are broadcast
    as_they_are = {int, float, bool, str, type(None), tl.tensor, tl.dtype, tl.block_type, tl.pointer_type}
    unwrap, wrapper = tl.core._unwrap_if_constexpr, tl.core.builtin(_shorten_calls).__code__

    def check_types_if_different(self: Any, lhs: Any, rhs: Any, *allowed: bool, **options: bool) -> Any:
        if type(lhs) is type(rhs) is tl.tensor:
            kinds = (lhs.dtype.name, rhs.dtype.name, allowed, *options.items())
            if kinds in uncast:
                return self.broadcast_impl_value(lhs, rhs)
            found = check_types(self, lhs, rhs, *allowed, **options)
            if found[0].dtype == lhs.dtype and found[1].dtype == rhs.dtype:
                uncast.add(kinds)
            return found
        if type(lhs) is not tl.tensor or type(rhs) not in (int, float):
            return check_types(self, lhs, rhs, *allowed, **options)
        key = (lhs.type.name, type(rhs), rhs, allowed, *options.items())
        if key not in numbers:
            same, number = check_types(self, lhs, rhs, *allowed, **options)
            if same is not lhs:
                return same, number
            numbers[key] = number
        return lhs, numbers[key]

    def broadcast_if_different(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.shape is rhs.shape:
            return lhs, rhs
        key = lhs.type.name, rhs.type.name
        if key not in spread:
            found = broadcast(self, lhs, rhs)
            if lhs.type.is_block() or rhs.type.is_block():
                spread[key] = found[0].type, found[1].type
            return found
        return as_wide(lhs, spread[key][0]), as_wide(rhs, spread[key][1])

    def as_wide(value: Any, type: Any) -> Any:
        if value.type is type:
            return value
        data, dtype = value.handle.data, value.handle.dtype.scalar
        if data.size == 1:
            data = data.astype(interpreter._get_np_dtype(dtype), copy=False)
            data = np.ndarray(type.shape, data.dtype, data, strides=(0,) * len(type.shape))
        else:
            data = np.broadcast_to(data, type.shape)
        return tl.tensor(interpreter.TensorHandle(data, dtype), type)

    def cast_if_different(self: Any, input: Any, dst_ty: Any, *rounding: Any) -> Any:
        return input if input.dtype is dst_ty else cast(self, input, dst_ty, *rounding)

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Callable[[Any, Any], Any]) -> Any:
        output, dtype = op(lhs.data, rhs.data), lhs.dtype.scalar
        if output.dtype is not lhs.data.dtype and not interpreter._validate_np_data_size(output, dtype):
            output = output.astype(interpreter._get_np_dtype(dtype))
        return interpreter.TensorHandle(output, dtype)

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
        return o if kind in as_they_are else o.value if kind is tl.constexpr else unwrap(o)

    tl.core._unwrap_if_constexpr = unwrap_first
    interpreter._patch_attr = patch
    semantic.binary_op_type_checking_impl = check_types_if_different
    semantic.broadcast_impl_value = broadcast_if_different
    semantic.scalar_constant = constant_once
    semantic.cast = cast_if_different
    interpreter.InterpreterBuilder.binary_op = binary_op
    interpreter.TensorHandle.__post_init__ = lambda self: None  # the sizes of numpy's types


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
